"""Rope that depends on length: fixed so that it is Transformers' own, or refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tiny import COMMON, Bench, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.errors import ModelError
from octavo.models.rope import fix_rope

SWITCH = 16


def longrope_config(model_type="phi3", **more):
    half = 4
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(half)],
        "long_factor": [2.0 + 0.9 * i for i in range(half)],
        "original_max_position_embeddings": SWITCH,
        **more,
    }
    fields = {**COMMON, "original_max_position_embeddings": SWITCH, "rope_parameters": rope}
    return AutoConfig.for_model(model_type, **fields)


def dynamic_config():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return AutoConfig.for_model("llama", **{**COMMON, "max_position_embeddings": 32, "rope_parameters": rope})


def prompts_of(*lengths):
    random = np.random.default_rng(1)
    return [random.integers(3, 120, size=length).tolist() for length in lengths]


def test_short_sequences_of_a_short_context_get_the_short_factors():
    bench = Bench(longrope_config(), prepare=lambda model: fix_rope(model, SWITCH))
    prompts = prompts_of(3, 9, 1, 6)
    served, _ = bench.serve(prompts, 7, pause=1)
    bench.compare(prompts, served)


def test_long_sequences_get_the_long_factors_whoever_is_beside_them():
    bench = Bench(longrope_config(), prepare=lambda model: fix_rope(model, 64))
    prompts = prompts_of(17, 30, 25, 40)
    served, _ = bench.serve([*prompts, [5, 6, 7]], 9, pause=1)
    bench.compare(prompts, served[:-1])


def test_without_fixing_a_long_neighbour_changes_a_short_sequence():
    """What `fix_rope` is for: this fails to differ only if Transformers stops looking at the whole row."""
    bench = Bench(longrope_config())
    short = prompts_of(4, 5)
    alone, _ = bench.serve(short, 7)
    bench.compare(short, alone)
    beside, _ = bench.serve([*short, prompts_of(40)[0]], 7, longest_chunk=40)
    assert beside[:2] != alone


def test_the_notes_say_where_longrope_differs_from_transformers():
    model = AutoModelForCausalLM.from_config(longrope_config())
    (note,) = fix_rope(copy.deepcopy(model), 64)
    assert "max_model_len=64" in note
    assert "differs from Transformers" in note
    (note,) = fix_rope(model, SWITCH)
    assert "as in Transformers" in note


def test_dynamic_rope_is_served_up_to_its_own_length():
    bench = Bench(dynamic_config(), prepare=lambda model: fix_rope(model, 32))
    prompts = prompts_of(3, 20, 11)
    served, _ = bench.serve(prompts, 10, pause=1)
    bench.compare(prompts, served)


def test_dynamic_rope_past_its_own_length_is_refused():
    model = AutoModelForCausalLM.from_config(dynamic_config())
    with pytest.raises(ModelError, match=r"max_model_len=33.*32 tokens"):
        fix_rope(model, 33)


def test_a_rotation_of_its_own_that_looks_at_the_row_is_refused():
    more = {"short_mscale": 1.1, "long_mscale": 1.4}
    model = AutoModelForCausalLM.from_config(longrope_config("phimoe", **more))
    with pytest.raises(ModelError, match="depends on the length of others"):
        fix_rope(model, 64)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_plain_rope_is_left_alone(name):
    model = AutoModelForCausalLM.from_config(tiny_config(name))
    before = {key: value.clone() for key, value in model.named_buffers()}
    assert fix_rope(model, 128) == ()
    assert all(torch.equal(before[key], value) for key, value in model.named_buffers())
