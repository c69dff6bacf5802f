"""Geometry against models whose state is not where the others keep theirs, or depends on the length.

Each test says by whose convention its figure is, where Transformers keeps more than is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from observed_state import as_file, built, observe, predicted
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig
from transformers.models.deepseek_v4 import modeling_deepseek_v4  # noqa: F401 - registers its kinds of cache layers

from octavo.geometry.dtypes import BF16, FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.model import ModelGeometry
from octavo.geometry.recurrent import Convention
from octavo.geometry.state import Compressed, Constant, Windowed, parts_of


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    yield
    logging.disable(logging.NOTSET)


def geometry(config: PreTrainedConfig, convention: Convention = "transformers") -> ModelGeometry:
    return geometry_from_config(as_file(config), BF16, convention=convention)


def run(config: PreTrainedConfig, tokens: int, **more: Any) -> tuple[torch.nn.Module, Any]:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        return model, model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=True, **more)


def test_rwkv_keeps_two_inputs_and_three_vectors_per_layer() -> None:
    config = built("rwkv", {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 64})
    _, output = run(config, 5)
    # the last axis of its five tensors is the layer
    per_layer = [sum(tensor[..., layer].nbytes for tensor in output.state) for layer in range(3)]
    assert per_layer == [state.bytes_kept(5) for state in geometry(config).layers] == [2 * 32 * 2 + 3 * 32 * 4] * 3


def test_xlstm_keeps_a_matrix_a_normaliser_and_a_maximum_per_head() -> None:
    config = built("xlstm", {"hidden_size": 128, "num_heads": 4, "num_hidden_layers": 2, "vocab_size": 64})
    _, output = run(config, 5)
    written = sum(tensor.nbytes for layer in output.cache_params.rnn_state.values() for tensor in layer)
    # its heads are 64 / 4 and 128 / 4 wide; Transformers keeps them in the model's type, the config says float32
    assert written == geometry(config).fixed_bytes_per_sequence == 2 * (4 * 16 * 32 + 4 * 16 + 4) * 2
    assert geometry(config, "needed").fixed_bytes_per_sequence == 2 * (4 * 16 * 32 + 4 * 16 + 4) * 4


def test_lightning_attention_keeps_a_matrix_per_head() -> None:
    config = built("minimax", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
                               "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 64,
                               "num_local_experts": 2})  # fmt: skip
    _, output = run(config, 5)
    linear = output.past_key_values.linear_cache[1]
    state = geometry(config).layers[1]
    assert isinstance(state, Constant)
    assert tuple(linear.shape[1:]) == state.components[0].shape == (4, 16, 16)


def test_a_gated_linear_recurrence_keeps_its_state_in_the_layer() -> None:
    config = built("recurrent_gemma", {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                                       "intermediate_size": 32, "vocab_size": 64, "attention_window_size": 8,
                                       })  # fmt: skip
    model, _ = run(config, 5)
    block = model.model.layers[0].temporal_block
    written = block.conv1d_state.nbytes + block.rg_lru.recurrent_states.nbytes
    assert written == geometry(config).layers[0].bytes_kept(5) == 64 * 3 * 2 + 64 * 4


def test_index_keys_may_be_kept_wider_than_keys() -> None:
    config = built("dots3_note_text", {"num_hidden_layers": 4})
    written, ours = observe(config), [predicted(state) for state in geometry(config).layers]
    # Transformers computes and keeps these index keys in float32; needed is the type of the keys
    assert written[0].per_token - ours[0].per_token == 128 * (4 - 2)
    assert written[2:] == ours[2:]


def test_windows_by_mask_alone_are_kept_at_full_length_by_transformers() -> None:
    config = built("gpt_neo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "hidden_size": 64,
                               "num_heads": 4})  # fmt: skip
    written, state = observe(config)[1], geometry(config).layers[1]
    assert isinstance(state, Windowed)
    assert (written.per_token, written.window, state.window_tokens) == (state.bytes_per_token, None, 256)


def test_heads_of_window_layers_are_those_of_the_file() -> None:
    config = built("mimo_v2_flash", {"num_hidden_layers": 2})
    raw = {**as_file(config), "swa_num_key_value_heads": 8}
    ours = geometry_from_config(raw, BF16, convention="transformers")
    assert [predicted(state) for state in ours.layers] == observe(config)


@pytest.mark.parametrize("tokens", [5, 8, 9, 30])
def test_a_window_holds_one_position_less_between_steps_than_a_step_reads(tokens: int) -> None:
    config = built("mistral", {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64,
                               "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8})  # fmt: skip
    cache = DynamicCache(config=config)
    run(config, tokens, cache=cache)
    state = geometry(config).layers[0]
    assert isinstance(state, Windowed)
    # needed while a step runs: 8 positions, its own included; Transformers keeps the 7 before the next one
    assert state.bytes_kept(tokens) == min(tokens, 8) * state.bytes_per_token
    held = cache.layers[0].keys.nbytes + cache.layers[0].values.nbytes
    assert held == min(tokens, 7) * state.bytes_per_token


@pytest.mark.parametrize("tokens", [3, 4, 127, 129, 258])
def test_entries_waiting_and_carried_parts_are_those_of_the_reference(tokens: int) -> None:
    config = built("deepseek_v4", {"num_hidden_layers": 4})
    cache = DynamicCache(config=config)
    with torch.device("meta"), torch.inference_mode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
        model(input_ids=torch.ones(1, tokens, dtype=torch.long), cache=cache, use_cache=True)
    for layer, state in zip(cache.layers, geometry(config).layers, strict=True):
        names = ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate")
        held = [t for name in names for t in getattr(layer, name, {}).values() if t is not None]
        compressed = [part for part in parts_of(state) if isinstance(part, Compressed)]
        assert sum(tensor.nbytes for tensor in held) == sum(part.bytes_kept(tokens) for part in compressed)


@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next", "kimi_linear", "lfm2"])
def test_one_column_of_a_convolution_less_is_needed_than_transformers_keeps(model_type: str) -> None:
    config = built(model_type, {"full_attn_idxs": [1]} if model_type == "lfm2" else {})
    needed, kept = geometry(config, "needed"), geometry(config, "transformers")
    assert (needed.convention, kept.convention) == ("needed", "transformers")
    pairs = 0
    for a, b in zip(needed.layers, kept.layers, strict=True):
        if not (isinstance(a, Constant) and isinstance(b, Constant)):
            continue
        for ours, theirs in zip(a.components, b.components, strict=True):
            if ours.name.startswith("conv"):
                assert (ours.name, *ours.shape[:-1], ours.shape[-1] + 1) == (theirs.name, *theirs.shape)
                pairs += 1
            else:
                assert ours == theirs
                assert ours.dtype == FP32
    assert pairs
