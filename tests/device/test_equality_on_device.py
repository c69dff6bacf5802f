"""The equality tests of the CPU, on an accelerator: same models, same plans, same comparison."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES
from hard_run import hard_run
from tiny import ARCHITECTURES, Bench, tiny_config, tiny_prompts

DEVICE = "cuda"
WANTED = 12


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request):
    torch.backends.cuda.matmul.allow_tf32 = False
    return Bench(tiny_config(request.param), DEVICE), FAMILIES[request.param]


def test_ragged_chunks_with_a_pause_give_the_tokens_of_generate(case):
    bench, family = case
    prompts = tiny_prompts()
    served, trial = bench.serve(prompts, WANTED, pause=2)
    ties, _ = bench.compare(prompts, served, family.tolerance)
    print(f"{ties} near ties among {len(prompts)} sequences")
    assert (trial.given_up > 0) == family.releases


def test_the_engine_under_pressure_gives_the_tokens_of_generate(case):
    bench, family = case
    prompts = tiny_prompts()
    outcome = hard_run(bench, prompts, WANTED)
    ties, _ = bench.compare(prompts, outcome.tokens, family.tolerance)
    print(f"{ties} near ties among {len(prompts)} sequences")
    assert outcome.preemptions > 0
    assert (outcome.given_up > 0) == family.releases
    assert outcome.empty
