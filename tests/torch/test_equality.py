"""Greedy float32 tokens through pages equal those of Transformers' `generate`, architecture by architecture."""

from __future__ import annotations

import pytest
from tiny import ARCHITECTURES, Bench, tiny_config, tiny_prompts

from octavo.geometry.dtypes import FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.state import Growing, Windowed
from octavo.models.observe import observed_layers
from octavo.models.table import VERIFIED
from octavo.scheduling.events import Preempted

WANTED = 12


@pytest.fixture(scope="module", params=ARCHITECTURES)
def bench(request):
    return Bench(tiny_config(request.param))


def test_ragged_chunks_with_a_pause_give_the_tokens_of_generate(bench):
    prompts = tiny_prompts()
    served, _ = bench.serve(prompts, WANTED, pause=2)
    ties, distinct = bench.compare(prompts, served)
    print(f"{ties} near ties among {len(prompts)} sequences")
    assert distinct > 10, "a model that hardly varies its tokens proves nothing"


def test_the_engine_with_a_forced_preemption_gives_the_tokens_of_generate(bench):
    prompts = tiny_prompts()
    served, events = bench.run(prompts, WANTED, n_slabs=22)
    assert any(isinstance(event, Preempted) for event in events)
    ties, _ = bench.compare(prompts, served)
    print(f"{ties} near ties among {len(prompts)} sequences")


def test_the_geometry_read_from_the_config_is_what_the_layers_store(bench):
    told = geometry_from_config(bench.config, FP32).layers
    seen = observed_layers(bench.reference, FP32)
    assert len(told) == len(seen)
    for state, observed in zip(told, seen, strict=True):
        assert isinstance(state, (Growing, Windowed))
        assert state.components == observed.components


def test_every_type_in_the_verified_table_is_compared_here():
    compared = {tiny_config(name).model_type for name in ARCHITECTURES}
    assert compared == set(VERIFIED)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("block_tokens", [1, 3, 16])
def test_block_size_and_pipelining_do_not_change_tokens(depth, block_tokens):
    bench = Bench(tiny_config("gemma2"))
    prompts = tiny_prompts(9)
    served, _ = bench.run(prompts, WANTED, n_slabs=-(-60 // block_tokens) * 3, depth=depth, block_tokens=block_tokens)
    bench.compare(prompts, served)


def test_tokens_do_not_depend_on_how_the_trial_was_cut():
    bench = Bench(tiny_config("gpt_oss"))
    prompts = tiny_prompts(3)
    cuts = [
        bench.serve(prompts, WANTED, pause=seed, seed=seed, longest_chunk=longest)[0]
        for seed, longest in ((0, 2), (1, 50), (2, 11))
    ]
    assert cuts[0] == cuts[1] == cuts[2]
