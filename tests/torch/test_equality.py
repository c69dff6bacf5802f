"""Greedy float32 tokens through pages equal those of Transformers' `generate`, family by family.

The sequences are longer than windows and chunks, and what can no longer be read, or belongs to nobody, is not a
number: a kernel that reads it would spread it into the logits.
"""

from __future__ import annotations

import pytest
from families import FAMILIES
from hard_run import BUDGET, hard_run
from tiny import ARCHITECTURES, Bench, tiny_config, tiny_prompts

from octavo.geometry.charge import sequence_bytes_charged
from octavo.geometry.dtypes import FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.state import Borrowed, Chunked, Growing, Windowed
from octavo.models.observe import observed_layers, require_geometry
from octavo.models.table import VERIFIED

WANTED = 12
KINDS = {Growing: "full", Windowed: "window", Chunked: "chunk", Borrowed: "borrowed"}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request):
    return Bench(tiny_config(request.param)), FAMILIES[request.param]


def test_ragged_chunks_with_a_pause_give_the_tokens_of_generate(case):
    bench, family = case
    prompts = tiny_prompts()
    served, trial = bench.serve(prompts, WANTED, pause=2)
    ties, distinct = bench.compare(prompts, served, family.tolerance)
    print(f"{ties} near ties among {len(prompts)} sequences")
    assert distinct > 10, "a model that hardly varies its tokens proves nothing"
    assert trial.pauses == 1
    assert (trial.given_up > 0) == family.releases


@pytest.mark.parametrize("depth", [0, 1])
def test_the_engine_under_pressure_gives_the_tokens_of_generate(case, depth):
    bench, family = case
    prompts = tiny_prompts()
    outcome = hard_run(bench, prompts, WANTED, depth=depth)
    bench.compare(prompts, outcome.tokens, family.tolerance)
    assert outcome.preemptions > 0
    assert (outcome.given_up > 0) == family.releases
    assert outcome.weighed > len(prompts), "held bytes were compared with the geometry, chunk by chunk"
    assert outcome.empty


def test_a_batch_mate_does_not_change_a_sequence(case):
    bench, family = case
    prompts = tiny_prompts()
    together = hard_run(bench, prompts, WANTED, n_slabs=400, rows=7, budget=24)
    alone = [hard_run(bench, [prompt], WANTED, rows=1, budget=24).tokens[0] for prompt in prompts]
    bench.compare(prompts, alone, family.tolerance)
    bench.compare(prompts, together.tokens, family.tolerance)
    assert together.preemptions == 0


def test_what_is_held_is_never_more_than_the_geometry_charges(case):
    bench, _ = case
    geometry = geometry_from_config(bench.config, FP32)
    prompts = tiny_prompts()
    outcome = hard_run(bench, prompts, WANTED)
    for prompt, most in zip(prompts, outcome.most_bytes, strict=True):
        tokens = len(prompt) + WANTED - 1
        charged = sequence_bytes_charged(geometry, tokens, step_tokens=min(BUDGET, tokens), block_tokens=4)
        assert most <= charged
        if not case[1].releases:
            assert most == charged


def test_the_geometry_read_from_the_config_is_what_the_layers_store_and_read(case):
    bench, family = case
    told = geometry_from_config(bench.config, FP32).layers
    seen = observed_layers(bench.reference, FP32)
    assert {KINDS[type(state)] for state in told} == family.kinds
    assert told == seen
    require_geometry(bench.reference, told)


def test_every_type_in_the_verified_table_is_compared_here():
    compared = {tiny_config(name).model_type for name in ARCHITECTURES}
    assert compared == set(VERIFIED)


@pytest.mark.parametrize(("kind", "least"), [("window", 3), ("chunk", 3), ("borrowed", 3), ("full", 30)])
def test_there_are_families_enough_of_each_kind(kind, least):
    assert sum(kind in family.kinds for family in FAMILIES.values()) >= least


@pytest.mark.parametrize("name", ["mistral", "llama4_text-chunks"])
def test_memory_stops_growing_past_the_window_or_chunk(name):
    bench = Bench(tiny_config(name))
    short, long = (tiny_prompts()[2][:length] * 3 for length in (10, 30))
    outcome = hard_run(bench, [short, long], WANTED, budget=6, n_slabs=60)
    bench.compare([short, long], outcome.tokens)
    assert outcome.most_bytes[0] == outcome.most_bytes[1]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("block_tokens", [1, 3, 16])
@pytest.mark.parametrize("name", ["gemma2", "llama4_text", "gemma3n_text"])
def test_block_size_and_pipelining_do_not_change_tokens(name, depth, block_tokens):
    bench = Bench(tiny_config(name))
    prompts = tiny_prompts(9)
    outcome = hard_run(bench, prompts, WANTED, depth=depth, block_tokens=block_tokens)
    bench.compare(prompts, outcome.tokens)
    assert outcome.preemptions


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text", "gemma4_text"])
def test_tokens_do_not_depend_on_how_the_trial_was_cut(name):
    bench = Bench(tiny_config(name))
    prompts = tiny_prompts(3)
    cuts = [
        bench.serve(prompts, WANTED, pause=seed, seed=seed, longest_chunk=longest)[0]
        for seed, longest in ((0, 2), (1, 50), (2, 11))
    ]
    assert cuts[0] == cuts[1] == cuts[2]
