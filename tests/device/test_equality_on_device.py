"""The equality tests of the CPU, on an accelerator: same models, same plans, same comparison."""

from __future__ import annotations

import pytest
import torch
from tiny import ARCHITECTURES, Bench, tiny_config, tiny_prompts

from octavo.scheduling.events import Preempted

DEVICE = "cuda"
WANTED = 12


@pytest.fixture(scope="module", params=ARCHITECTURES)
def bench(request):
    torch.backends.cuda.matmul.allow_tf32 = False
    return Bench(tiny_config(request.param), DEVICE)


def test_ragged_chunks_with_a_pause_give_the_tokens_of_generate(bench):
    prompts = tiny_prompts()
    served, _ = bench.serve(prompts, WANTED, pause=2)
    ties, _ = bench.compare(prompts, served)
    print(f"{ties} near ties among {len(prompts)} sequences")


def test_the_engine_with_a_forced_preemption_gives_the_tokens_of_generate(bench):
    prompts = tiny_prompts()
    served, events = bench.run(prompts, WANTED, n_slabs=22)
    assert any(isinstance(event, Preempted) for event in events)
    ties, _ = bench.compare(prompts, served)
    print(f"{ties} near ties among {len(prompts)} sequences")
