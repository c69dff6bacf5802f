"""The two hooks: nothing global but a function, and refusals where a model does not use them as agreed."""

from __future__ import annotations

import gc

import pytest
import torch
from tiny import Bench, tiny_config
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.masking_utils import AttentionMaskInterface

from octavo.errors import ModelError
from octavo.models.bridge import IMPLEMENTATION, TICKET, Bridge, PagedCache, attention


def test_transformers_knows_our_attention_and_no_mask_for_it():
    assert AttentionInterface()[IMPLEMENTATION] is attention
    assert IMPLEMENTATION not in AttentionMaskInterface._global_mapping


@pytest.mark.parametrize(
    ("model_type", "fields"), [("bloom", {"n_head": 2, "hidden_size": 16, "n_layer": 1}), ("t5", {"num_layers": 1})]
)
def test_a_model_that_cannot_take_ragged_rows_is_refused_by_name(model_type, fields):
    config = AutoConfig.for_model(model_type, vocab_size=64, **fields)
    maker = AutoModelForSeq2SeqLM if model_type == "t5" else AutoModelForCausalLM
    with pytest.raises(ModelError, match="For"):
        Bridge(maker.from_config(config))


def test_binding_one_model_leaves_another_of_the_same_class_alone():
    one, two = (AutoModelForCausalLM.from_config(tiny_config("llama")) for _ in range(2))
    before = two.config._attn_implementation
    Bridge(one)
    assert one.config._attn_implementation == IMPLEMENTATION
    assert two.config._attn_implementation == before


def call(key=None, value=None, mask=None, **kwargs):
    query = torch.zeros(1, 2, 3, 4)
    return attention(torch.nn.Linear(1, 1), query, key, value, mask, **kwargs)


def test_attending_without_having_stored_is_refused():
    key = torch.zeros(1, 1, 3, 4)
    with pytest.raises(ModelError, match="did not store"):
        call(key, key)


def test_attending_to_something_else_than_was_stored_is_refused():
    key = torch.zeros(1, 1, 3, 4)
    with pytest.raises(ModelError, match="between storing and attending"):
        call(key, key * 2, **{TICKET: (("backend", "pages", "step"), key, key)})


def test_a_mask_that_a_model_makes_itself_is_refused():
    key = torch.zeros(1, 1, 3, 4)
    with pytest.raises(ModelError, match="mask of its own"):
        call(key, key, torch.ones(3, 3), **{TICKET: (("backend", "pages", "step"), key, key)})


def test_a_bias_that_a_model_adds_to_its_scores_is_refused():
    key = torch.zeros(1, 1, 3, 4)
    with pytest.raises(ModelError, match="position_bias"):
        call(key, key, position_bias=key, **{TICKET: (("backend", "pages", "step"), key, key)})


def test_a_layer_that_its_geometry_does_not_tell_is_refused():
    cache = PagedCache(None, {}, {}, ())
    with pytest.raises(ModelError, match="layer 3"):
        cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 3, kwargs={})


def live_tensors():
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def test_a_step_keeps_no_tensor_alive():
    """The ticket must not tie a key to itself, or every step would wait for the garbage collector."""
    bench = Bench(tiny_config("gpt_neox"))
    bench.serve([[4, 5, 6]], 3)
    gc.collect()
    gc.disable()
    try:
        before = live_tensors()
        executor, _ = bench.executor()
        del executor
        trial = bench.serve([[4, 5, 6]], 12)
        del trial
        after = live_tensors()
    finally:
        gc.enable()
    assert after - before < 40
