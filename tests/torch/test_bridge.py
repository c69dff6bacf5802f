"""The two hooks: nothing global but a function, and refusals where a model does not use them as agreed."""

from __future__ import annotations

import gc

import pytest
import torch
from tiny import Bench, tiny_config
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.masking_utils import AttentionMaskInterface

from octavo.errors import ModelError
from octavo.memory.layout import GroupLayout
from octavo.models.bridge import IMPLEMENTATION, Bridge, PagedCache, PagedTicket, attention
from octavo.models.tickets import TICKET, leave


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


def group(**reach):
    return GroupLayout("g", (0,), 4, (), 64, 1, **reach)


class Backend:
    """Attends to nothing."""

    def attend(self, q, new, pages, step, rule):
        self.rule = rule
        return torch.zeros_like(q)


def stored(key, value, **reach):
    ticket, kwargs = PagedTicket(Backend(), None, None, group(**reach)), {}
    leave(ticket, key, value, kwargs)
    return kwargs


def call(key=None, value=None, mask=None, module=None, **kwargs):
    query = torch.zeros(1, 2, 3, 4)
    return attention(module or torch.nn.Linear(1, 1), query, key, value, mask, **kwargs)


def pair():
    return torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4)


def test_attending_without_having_stored_is_refused():
    with pytest.raises(ModelError, match="did not store"):
        call(*pair())


@pytest.mark.parametrize("changed", [0, 1])
def test_attending_to_something_else_than_was_stored_is_refused(changed):
    used = list(pair())
    kwargs = stored(*used)
    used[changed] = used[changed] * 2
    with pytest.raises(ModelError, match="between storing and attending"):
        call(*used, **kwargs)


def test_a_layer_that_is_handed_keys_of_another_attends_to_the_pages_of_that_one():
    key, value = pair()
    ticket = stored(key, value)[TICKET]
    call(key, value, sliding_window=5)
    assert ticket.backend.rule.window == 5


def test_a_mask_that_a_model_makes_itself_is_refused():
    key, value = pair()
    with pytest.raises(ModelError, match="mask of its own"):
        call(key, value, torch.ones(3, 3), **stored(key, value))


def test_a_bias_that_a_model_adds_to_its_scores_is_refused():
    key, value = pair()
    with pytest.raises(ModelError, match="position_bias"):
        call(key, value, position_bias=key, **stored(key, value))


def chunked(chunk):
    module = torch.nn.Linear(1, 1)
    module.config = AutoConfig.for_model(
        "llama4_text", num_hidden_layers=1, layer_types=["chunked_attention"], attention_chunk_size=chunk
    )
    module.layer_idx = 0
    return module


@pytest.mark.parametrize(
    ("reach", "window", "chunk"),
    [
        ({"window_tokens": 6}, 7, None),
        ({"window_tokens": 6}, None, None),
        ({"window_tokens": 6}, None, 8),
        ({"chunk_tokens": 6}, None, 4),
        ({"chunk_tokens": 6}, None, 12),
        ({"chunk_tokens": 6}, 3, None),
        ({"chunk_tokens": 6}, None, None),
    ],
)
def test_a_layer_that_reads_further_back_than_its_group_keeps_is_refused(reach, window, chunk):
    key, value = pair()
    with pytest.raises(ModelError, match="where its geometry keeps"):
        call(
            key, value, sliding_window=window, module=None if chunk is None else chunked(chunk),
            **stored(key, value, **reach),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("reach", "window", "chunk"),
    [
        ({}, None, None),
        ({}, 9, None),
        ({"window_tokens": 6}, 6, None),
        ({"window_tokens": 6}, 2, None),
        ({"window_tokens": 6}, None, 6),
        ({"chunk_tokens": 6}, None, 6),
        ({"chunk_tokens": 6}, None, 3),
    ],
)
def test_a_layer_that_reads_what_its_group_keeps_is_served_by_its_rule(reach, window, chunk):
    key, value = pair()
    kwargs = stored(key, value, **reach)
    call(key, value, sliding_window=window, module=None if chunk is None else chunked(chunk), **kwargs)
    rule = kwargs[TICKET].backend.rule
    assert (rule.window, rule.chunk_tokens) == (window, chunk)


def test_chunks_of_a_size_that_the_config_does_not_tell_are_refused():
    key, value = pair()
    module = chunked(6)
    module.config.attention_chunk_size = None
    with pytest.raises(ModelError, match="attention_chunk_size"):
        call(key, value, module=module, **stored(key, value))


def test_a_layer_that_its_geometry_does_not_tell_is_refused():
    cache = PagedCache(None, {}, {}, (), ())
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
