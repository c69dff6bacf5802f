"""Every way in which configs say which layer keeps what, and what each kind answers. Figures by hand, in bf16."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.geometry.dtypes import BF16, FP8, FP16, FP32, INT4, INT8, Dtype
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import (
    Borrowed,
    Component,
    Compound,
    Compressed,
    Constant,
    Growing,
    LayerState,
    Stateless,
    Windowed,
    parts_of,
)

PLAIN = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}


def geometry(**config: Any) -> ModelGeometry:
    return geometry_from_config(config, BF16)


def letters(g: ModelGeometry) -> str:
    """One letter a layer: a attention, w window, r constant, h both, x window and constant, b borrowed, - nothing."""

    def letter(state: LayerState) -> str:
        kinds = {Growing: "a", Windowed: "w", Constant: "r", Borrowed: "b", Stateless: "-"}
        if isinstance(state, Compound):
            return "x" if any(isinstance(part, Windowed) for part in state.parts) else "h"
        return kinds[type(state)]

    return "".join(letter(state) for state in g.layers)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "jamba", "num_hidden_layers": 9, "attn_layer_period": 4, "attn_layer_offset": 1}, "rarrrarrr"),
        ({"model_type": "zamba", "num_hidden_layers": 12, "attention_hidden_size": 7424}, "rrhrrrrhrrrr"),
        ({"model_type": "zamba2", "num_hidden_layers": 4, "hybrid_layer_ids": [2], "attention_head_dim": 160}, "rrhr"),
        ({"model_type": "bamba", "num_hidden_layers": 4, "attn_layer_indices": [1]}, "rarr"),
        ({"model_type": "bamba", "num_hidden_layers": 2, "attn_layer_indices": None}, "rr"),
        ({"model_type": "falcon_h1", "num_hidden_layers": 2, "attn_layer_indices": None}, "hh"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*E"}, "r-a-"),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "attention"]}, "r-a"),
        ({"model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}, "ra"),
        ({"model_type": "qwen3_next", "num_hidden_layers": 8}, "rrrarrra"),
        ({"model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 2}, "rara"),
        ({"model_type": "lfm2", "num_hidden_layers": 4, "full_attn_idxs": [2]}, "rrar"),
        ({"model_type": "lfm3", "num_hidden_layers": 6}, "rrarwr"),
        ({"model_type": "minimax", "num_hidden_layers": 4}, "arar"),
        ({"model_type": "minimax_text_01", **PLAIN, "num_hidden_layers": 3, "attn_type_list": [0, 0, 1]}, "rra"),
        ({"model_type": "recurrent_gemma", "num_hidden_layers": 5}, "rrwrr"),
        ({"model_type": "kimi_linear", "num_hidden_layers": 6}, "rrrrar"),
        ({"model_type": "rwkv", "num_hidden_layers": 3}, "rrr"),
        ({"model_type": "xlstm", "num_hidden_layers": 2}, "rr"),
        ({"model_type": "inkling_text", "num_hidden_layers": 3, "local_layer_ids": [0, 2]}, "xhx"),
        ({"model_type": "zaya", "num_hidden_layers": 2}, "hh"),
        ({"model_type": "gpt_neo", "num_layers": 4, "attention_types": [[["global", "local"], 2]]}, "awaw"),
        ({"model_type": "flint", "num_hidden_layers": 7}, "aawwwaa"),
        ({"model_type": "longcat_flash", "num_layers": 2}, "aaaa"),
        ({"model_type": "hrm_text", "num_hidden_layers": 1, "H_cycles": 2, "L_cycles": 3}, "aaaaaaaa"),
        (
            {"model_type": "inkling2_loop_text", "num_hidden_layers": 6,
             "loop_config": {"core_start": 1, "core_end": 3, "num_passes": 3}},
            "xxxxxxxxxh",
        ),
        ({"model_type": "new", **PLAIN, "num_hidden_layers": 4, "use_cla": True, "cla_share_factor": 2}, "abab"),
        (
            {"model_type": "new", **PLAIN, "num_hidden_layers": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
             "kv_source_layers": [0, 0, 2, 0]},
            "abab",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_the_pattern_of_layers_is_read(config: dict[str, Any], expected: str) -> None:
    assert letters(geometry(**config)) == expected


def test_cross_layer_attention_borrows_from_the_first_of_its_group() -> None:
    g = geometry(model_type="hunyuan", **PLAIN, num_hidden_layers=6, use_cla=True, cla_share_factor=3)
    assert [g.layers[i] for i in (1, 2, 4, 5)] == [Borrowed(0), Borrowed(0), Borrowed(3), Borrowed(3)]
    assert g.bytes_per_token == 2 * 2 * 2 * 64 * 2
    assert g.bytes_read(10) == 6 * 10 * 2 * 2 * 64 * 2


def test_heads_may_be_listed_layer_by_layer() -> None:
    g = geometry(model_type="openelm", model_dim=1280, num_transformer_layers=2, num_query_heads=[12, 16],
                 num_kv_heads=[3, 4], head_dim=64)  # fmt: skip
    assert g.bytes_per_token == (3 + 4) * 2 * 64 * 2
    assert g.num_attention_heads == 16


def test_windows_may_lie_over_latents() -> None:
    g = geometry(model_type="dots3_note_text", num_hidden_layers=4, sliding_window=512,
                 per_layer_config={"2": {"kv_lora_rank": 1024}, "3": {"kv_lora_rank": 1024}})  # fmt: skip
    assert letters(g) == "aaww"
    assert g.bytes_per_token_windowed == 2 * (1024 + 64) * 2
    assert g.bytes_per_token_growing == 2 * (512 + 64 + 128) * 2


def test_an_index_may_be_shared_by_the_layers_after_it() -> None:
    index = {"model_type": "glm_moe_dsa", "num_hidden_layers": 4}
    both = geometry(**index, index_topk_freq=2, index_skip_topk_offset=2)
    assert both.bytes_per_token == 4 * 576 * 2 + 3 * 128 * 2, "layers 0, 1 and 3"
    lettered = geometry(**index, index_topk_pattern="FSSS")
    assert lettered.bytes_per_token == 4 * 576 * 2 + 128 * 2


@pytest.mark.parametrize(
    ("dtype", "per_row"),
    [(BF16, 128 * 2), (FP16, 128 * 2), (FP32, 128 * 4), (FP8, 128 + 4), (INT8, 128 + 4), (INT4, 64 + 4)],
    ids=str,
)
def test_every_element_type_counts_a_scale_for_each_token_and_head(dtype: Dtype, per_row: int) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 1, **PLAIN, "head_dim": 128}
    assert geometry_from_config(config, dtype).bytes_per_token == 2 * 2 * per_row


def test_other_scales_are_said_with_the_type() -> None:
    assert FP8.with_scales(0).bytes_for((8, 128)) == 8 * 128
    assert INT4.with_scales(2, 32).bytes_for((8, 128)) == 8 * (64 + 4 * 2)
    assert INT4.bytes_for((3, 5)) == 3 * (3 + 4), "each row in whole bytes"
    assert INT4.bytes_for((0, 5)) == 0


def test_a_quantised_type_leaves_constant_state_as_it_is() -> None:
    config = {"model_type": "qwen3_next", "num_hidden_layers": 4}
    plain, quantised = geometry_from_config(config, BF16), geometry_from_config(config, FP8)
    assert quantised.fixed_bytes_per_sequence == plain.fixed_bytes_per_sequence
    assert quantised.bytes_per_token == 2 * 2 * (256 + 4)


def test_a_config_may_name_the_types_of_its_state() -> None:
    config = {"model_type": "mamba2", "num_hidden_layers": 1}
    assert geometry(**config).layers[0].bytes_kept(1) == (8192 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4
    half = geometry(**config, mamba_ssm_dtype="bfloat16")
    assert half.layers[0].bytes_kept(1) == (8192 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 2
    wide = geometry(**config, torch_dtype="float32")
    assert wide.layers[0].bytes_kept(1) == (8192 + 2 * 8 * 128) * 3 * 4 + 128 * 64 * 128 * 4


TOKEN = (Component("k", (1, 8), BF16),)
INDEXED = (*TOKEN, Component("index_k", (4,), BF16))


def test_an_entry_stands_for_each_full_run() -> None:
    state = Compressed(TOKEN, 4, waiting=TOKEN, carried=TOKEN)
    assert [state.bytes_kept(n) for n in (0, 3, 4, 9)] == [0, 48, 32, 64]
    assert state.bytes_read(9) == 2 * 16
    assert state.first_readable(9) == 0
    assert state.reusable_prefix(9) == 0, "the carried part is not kept for others"
    assert Compressed(TOKEN, 4).reusable_prefix(9) == 8


def test_an_index_is_read_whole_and_the_rest_where_it_points() -> None:
    assert Growing(INDEXED, read_tokens=3).bytes_read(10) == 10 * 8 + 3 * 16
    assert Growing(INDEXED, read_tokens=30).bytes_read(10) == 10 * 24
    assert Growing(INDEXED).bytes_read(10) == 10 * 24
    assert Compressed(INDEXED, 2, read_entries=3).bytes_read(10) == 5 * 8 + 3 * 16


def test_a_compound_needs_all_of_its_parts() -> None:
    state = Compound((Windowed(TOKEN, 4), Constant(TOKEN)))
    assert state.bytes_kept(10) == 4 * 16 + 16
    assert state.bytes_read(10) == 4 * 16 + 16
    assert state.first_readable(10) == 7
    assert state.reusable_prefix(10) == 0, "a recurrence starts from a snapshot or not at all"
    assert parts_of(state) == state.parts
    assert parts_of(Stateless()) == (Stateless(),)
    assert state.components == (*TOKEN, *TOKEN)
