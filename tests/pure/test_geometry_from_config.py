"""Geometry from config.json: every figure is written out by hand from the file's own numbers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16, FP8, FP32
from octavo.geometry.from_config import geometry_from_config, language_model_config
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import Borrowed, Chunked, Growing, Stateless, Windowed

GIB = 2**30


def geometry(**config: Any) -> ModelGeometry:
    return geometry_from_config(config, BF16)


def llama(**changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    return {**config, **changes}


def test_the_textbook_example_is_128_kib_a_token_and_one_gib_for_8192_tokens() -> None:
    g = geometry(**llama())
    assert g.bytes_per_token_growing == 131072 == 32 * 2 * 8 * 128 * 2
    assert g.bytes_kept(8192) == GIB
    assert g.bytes_read(8192) == GIB
    assert g.fixed_bytes_per_sequence == g.bytes_per_token_windowed == 0
    assert g.attention_mode == "gqa"


def test_as_many_kv_heads_as_heads_cost_four_times_as_much() -> None:
    g = geometry(**llama(num_key_value_heads=32))
    assert g.bytes_kept(8192) == 4 * GIB
    assert g.attention_mode == "mha"


def test_a_quantised_dtype_counts_its_scales() -> None:
    g = geometry_from_config(llama(), FP8)
    # one byte an element and a scale of 4 bytes for each head's key and each head's value
    assert g.bytes_per_token == 32 * 2 * 8 * (128 + 4)


TABLE: list[tuple[str, dict[str, Any], int, int, str]] = [
    # label, config, growing bytes per token, windowed bytes per token, mode (bf16)
    (
        "qwen3-0.6b: explicit head_dim",
        {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_window_layers": 28,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        28 * 2 * 8 * 128 * 2,
        0,
        "gqa",
    ),
    (
        "mistral-nemo: head_dim is not hidden / heads",
        {
            "model_type": "mistral",
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": None,
        },
        40 * 2 * 8 * 128 * 2,
        0,
        "gqa",
    ),
    (
        "gpt2-medium: n_embd, n_head, n_layer",
        {"model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_layer": 24},
        24 * 2 * 16 * 64 * 2,
        0,
        "mha",
    ),
    ("gpt-j-6b", {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28}, 28 * 2 * 16 * 256 * 2, 0, "mha"),
    (
        "gpt-neox-20b",
        {"model_type": "gpt_neox", "hidden_size": 6144, "num_attention_heads": 64, "num_hidden_layers": 44},
        44 * 2 * 64 * 96 * 2,
        0,
        "mha",
    ),
    (
        "opt-13b",
        {"model_type": "opt", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40},
        40 * 2 * 40 * 128 * 2,
        0,
        "mha",
    ),
    ("falcon-7b: multi_query by default", {"model_type": "falcon"}, 32 * 2 * 1 * 64 * 2, 0, "mqa"),
    (
        "falcon-40b: the new form states its kv heads",
        {
            "model_type": "falcon",
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "multi_query": True,
            "new_decoder_architecture": True,
        },
        60 * 2 * 8 * 64 * 2,
        0,
        "gqa",
    ),
    (
        "falcon-rw: neither multi_query nor the new form",
        {
            "model_type": "falcon",
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "multi_query": False,
        },
        24 * 2 * 32 * 64 * 2,
        0,
        "mha",
    ),
    (
        "bloom",
        {"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "n_head": 112},
        70 * 2 * 112 * 128 * 2,
        0,
        "mha",
    ),
    ("mpt-7b", {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32}, 32 * 2 * 32 * 128 * 2, 0, "mha"),
    (
        "mpt with kv_n_heads",
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "attn_config": {"kv_n_heads": 8}},
        32 * 2 * 8 * 128 * 2,
        0,
        "gqa",
    ),
    (
        "dbrx: nested attn_config",
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "attn_config": {"kv_n_heads": 8}},
        40 * 2 * 8 * 128 * 2,
        0,
        "gqa",
    ),
    (
        "gpt_bigcode: multi_query",
        {"model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_layer": 40, "multi_query": True},
        40 * 2 * 1 * 128 * 2,
        0,
        "mqa",
    ),
    (
        "starcoder2-3b",
        {
            "model_type": "starcoder2",
            "hidden_size": 3072,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
        },
        30 * 2 * 2 * 128 * 2,
        0,
        "gqa",
    ),
    (
        "starcoder2-3b with its window",
        {"model_type": "starcoder2", "num_attention_heads": 24, "num_key_value_heads": 2, "sliding_window": 4096},
        0,
        30 * 2 * 2 * 128 * 2,
        "gqa+window",
    ),
    (
        "chatglm3-6b: multi_query_group_num, num_layers, kv_channels",
        {
            "model_type": "chatglm",
            "hidden_size": 4096,
            "num_layers": 28,
            "num_attention_heads": 32,
            "kv_channels": 128,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "padded_vocab_size": 65024,
            "seq_length": 8192,
        },
        28 * 2 * 2 * 128 * 2,
        0,
        "gqa",
    ),
    (
        "chatglm without multi-query ignores the group number",
        {
            "model_type": "chatglm",
            "hidden_size": 4096,
            "num_layers": 28,
            "num_attention_heads": 32,
            "multi_query_attention": False,
            "multi_query_group_num": 1,
        },
        28 * 2 * 32 * 128 * 2,
        0,
        "mha",
    ),
    (
        "phi-2 as Microsoft first spelled it",
        {"model_type": "phi-msft", "n_embd": 2560, "n_head": 32, "n_head_kv": None, "n_layer": 32},
        32 * 2 * 32 * 80 * 2,
        0,
        "mha",
    ),
    (
        "gemma-2-2b: every other layer has the window",
        {
            "model_type": "gemma2",
            "hidden_size": 2304,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
        },
        13 * 2 * 4 * 256 * 2,
        13 * 2 * 4 * 256 * 2,
        "gqa+window",
    ),
    (
        "gemma-3-1b: five of six layers have the window",
        {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        4 * 2 * 1 * 256 * 2,
        22 * 2 * 1 * 256 * 2,
        "mqa+window",
    ),
    (
        "mistral-7b-v0.1: the class's window, in all layers",
        {"model_type": "mistral", "num_key_value_heads": 8},
        0,
        32 * 2 * 8 * 128 * 2,
        "gqa+window",
    ),
    (
        "gpt-oss-120b",
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
        },
        36864,
        36864,
        "gqa+window",
    ),
    (
        "qwen2 with windows from max_window_layers on",
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 1024,
            "max_window_layers": 20,
        },
        20 * 2 * 2 * 64 * 2,
        4 * 2 * 2 * 64 * 2,
        "gqa+window",
    ),
    (
        "a window that is switched off",
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "use_sliding_window": False,
            "sliding_window": 1024,
            "max_window_layers": 20,
        },
        24 * 2 * 2 * 64 * 2,
        0,
        "gqa",
    ),
    (
        "a window that this kind of model does not have is no window",
        llama(sliding_window=128),
        131072,
        0,
        "gqa",
    ),
    (
        "cohere2: three of four layers have the window",
        {
            "model_type": "cohere2",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        8 * 2 * 8 * 128 * 2,
        24 * 2 * 8 * 128 * 2,
        "gqa+window",
    ),
    (
        "key and value of different widths, other heads in window layers",
        {
            "model_type": "mimo_v2_flash",
            "hidden_size": 4096,
            "num_hidden_layers": 6,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "sliding_window": 128,
            "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
            "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 8,
            "swa_head_dim": 192,
            "swa_v_head_dim": 128,
        },
        2 * 4 * (192 + 128) * 2,
        4 * 8 * (192 + 128) * 2,
        "gqa+window",
    ),
    (
        "deepseek-v3: one latent and one rope key a token",
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
        },
        70272,
        0,
        "mla",
    ),
    (
        "deepseek-v3.2: an index key besides",
        {
            "model_type": "deepseek_v32",
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "index_head_dim": 128,
            "index_topk": 2048,
        },
        61 * (512 + 64 + 128) * 2,
        0,
        "mla",
    ),
]


@pytest.mark.parametrize(
    ("config", "growing", "windowed", "mode"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_bytes_per_token_equal_the_written_out_sum(
    config: dict[str, Any], growing: int, windowed: int, mode: str
) -> None:
    g = geometry_from_config(config, BF16)
    assert (g.bytes_per_token_growing, g.bytes_per_token_windowed, g.attention_mode) == (growing, windowed, mode)


def test_known_figures_are_what_is_known() -> None:
    by_name = {row[0].split(":")[0]: row for row in TABLE}
    assert by_name["qwen3-0.6b"][2] == 114_688
    assert by_name["falcon-7b"][2] == 8_192


@pytest.mark.parametrize("head_dim", [None, "absent"])
def test_a_head_dim_that_is_null_or_absent_is_derived(head_dim: str | None) -> None:
    config = llama(head_dim=None)
    if head_dim == "absent":
        del config["head_dim"]
    g = geometry(**config)
    assert isinstance(g.layers[0], Growing)
    assert g.layers[0].components[0].shape == (8, 128)


def test_a_null_kv_head_count_means_as_many_as_heads_not_the_default() -> None:
    g = geometry(
        model_type="qwen2", hidden_size=1024, num_attention_heads=8, num_hidden_layers=1, num_key_value_heads=None
    )
    assert g.attention_mode == "mha"
    assert g.bytes_per_token == 2 * 8 * 128 * 2


def test_a_window_reads_itself_and_the_positions_before_it() -> None:
    g = geometry(model_type="gpt_oss", num_hidden_layers=2)
    window = g.layers[0]
    assert isinstance(window, Windowed)
    assert window.window_tokens == 128
    assert window.first_readable(127) == 0
    assert window.first_readable(128) == 1
    assert g.window_tokens == (128,)
    # 100 tokens are below the window in both layers; 1000 are 128 in one and 1000 in the other
    per_layer = 2 * 8 * 64 * 2
    assert g.bytes_kept(100) == 2 * 100 * per_layer
    assert g.bytes_kept(1000) == (128 + 1000) * per_layer


def test_where_a_class_counts_the_query_apart_the_window_is_one_longer() -> None:
    g = geometry(model_type="mimo_v2_flash", num_hidden_layers=1, hybrid_layer_pattern=[1], sliding_window_size=128)
    assert g.window_tokens == (129,)


def test_layers_with_rotary_positions_attend_in_chunks_the_others_to_everything() -> None:
    g = geometry(model_type="llama4_text", num_hidden_layers=8, no_rope_layers=[])
    kinds = [type(state) for state in g.layers]
    assert kinds == [Chunked, Chunked, Chunked, Growing] * 2
    assert g.bytes_per_token_growing == 2 * 2 * 8 * 128 * 2
    assert g.bytes_kept(10_000) == 2 * 10_000 * 4096 + 6 * 8192 * 4096
    listed = geometry(model_type="llama4_text", num_hidden_layers=2, no_rope_layers=[0, 1])
    assert [type(state) for state in listed.layers] == [Growing, Chunked]


def test_shared_layers_borrow_from_the_last_layer_of_their_own_kind() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    g = geometry(
        model_type="gemma4_text",
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        sliding_window=512,
        num_kv_shared_layers=3,
        layer_types=kinds,
    )
    assert g.layers[3:] == (Borrowed(1), Borrowed(1), Borrowed(2))
    assert g.bytes_per_token_growing == 2 * 512 * 2
    assert g.bytes_per_token_windowed == 2 * 2 * 256 * 2
    assert g.attention_mode == "mqa+window+shared"
    # one step reads the lender again for each borrower
    assert g.bytes_read(10) == 10 * (2 * 2048 + 2 * 1024) + 10 * 1024 * 2


def test_full_layers_may_have_heads_of_another_width_and_number() -> None:
    g = geometry(
        model_type="gemma4_text",
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
    )
    assert g.bytes_per_token_windowed == 5 * 2 * 8 * 256 * 2
    assert g.bytes_per_token_growing == 2 * 2 * 512 * 2, "the class's global head width is 512"


def test_per_layer_overrides_in_the_file_count() -> None:
    g = geometry(
        model_type="gemma4_text",
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        per_layer_config={"05": {"head_dim": 128, "num_key_value_heads": 2}},
    )
    assert g.bytes_per_token_growing == 2 * 2 * 128 * 2


def test_block_configs_describe_each_layer_and_layers_without_attention_keep_nothing() -> None:
    attention = {"no_op": False, "n_heads_in_group": 8, "window_length": None}
    blocks = [
        {"attention": attention},
        {"attention": {"no_op": True, "n_heads_in_group": None}},
        {"attention": {**attention, "n_heads_in_group": 16, "window_length": 512, "num_sink_tokens": 4}},
    ]
    g = geometry(
        model_type="nemotron-nas",
        hidden_size=8192,
        num_attention_heads=64,
        num_hidden_layers=3,
        num_key_value_heads=None,
        block_configs=blocks,
    )
    assert [type(state) for state in g.layers] == [Growing, Stateless, Windowed]
    assert g.bytes_per_token_growing == 2 * 8 * 128 * 2
    assert g.bytes_kept(1000) == 1000 * 2 * 8 * 128 * 2 + (512 + 4) * 2 * 4 * 128 * 2


# -- nested configs -----------------------------------------------------------------------------

INNER = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"model_type": "mistral3", "text_config": {**INNER, "model_type": "ministral3"}}, "text_config"),
        ({"model_type": "internvl_chat", "llm_config": {**INNER, "model_type": "qwen2"}}, "llm_config"),
        (
            {
                "model_type": "qwen2_5_omni",
                "thinker_config": {"model_type": "qwen2_5_omni_thinker", "text_config": INNER},
                "talker_config": {"num_hidden_layers": 99},
            },
            "thinker_config.text_config",
        ),
        ({"model_type": "qwen2_5_vl", "text_config": INNER, "vision_config": {"depth": 32}}, "text_config"),
    ],
)
def test_the_language_model_is_found_inside_and_the_notes_say_where(config: dict[str, Any], path: str) -> None:
    g = geometry_from_config({**config, "architectures": ["WrapperForConditionalGeneration"]}, BF16)
    assert g.bytes_per_token == 4 * 2 * 2 * 64 * 2
    assert any(f"geometry read from {path} " in note for note in g.notes)
    assert language_model_config(config)["hidden_size"] == 1024


def test_a_nested_config_without_a_model_type_takes_the_wrappers_own() -> None:
    g = geometry(model_type="gemma3", text_config={"num_hidden_layers": 6, "sliding_window": 1024})
    assert g.model_type == "gemma3_text"
    assert g.attention_mode == "gqa+window"


def test_a_wrapper_in_the_older_flat_form_is_read_at_the_top() -> None:
    g = geometry(model_type="qwen2_vl", **INNER)
    assert g.bytes_per_token == 4 * 2 * 2 * 64 * 2


# -- what must not matter -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {}},
        {"rope_scaling": "linear"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "dynamic", "type": "dynamic", "factor": 2.0, "unknown": [1]}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}},
    ],
)
def test_no_spelling_of_rope_scaling_changes_the_geometry(rope: dict[str, Any]) -> None:
    assert geometry(**llama(**rope)).bytes_per_token == 131072


def test_a_config_without_model_type_takes_it_from_its_architecture() -> None:
    g = geometry(architectures=["GPTNeoXForCausalLM"], hidden_size=768, num_attention_heads=12, num_hidden_layers=12)
    assert g.model_type == "gpt_neox"
    assert g.context_length == 2048
    assert any("names no model_type" in note for note in g.notes)


def test_mixture_of_experts_widths_count_all_experts_of_a_token() -> None:
    g = geometry(model_type="mixtral", intermediate_size=14336, num_experts_per_tok=2, hidden_size=4096)
    assert g.intermediate_size == 2 * 14336


# -- refusals -----------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba2", {"model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64}, "state-space"),
    ("mamba by defaults alone", {"model_type": "mamba"}, "state_size"),
    ("falcon-mamba", {"model_type": "falcon_mamba", "hidden_size": 4096}, "state-space"),
    ("jamba", llama(model_type="jamba", attn_layer_period=8, attn_layer_offset=4), "state-space"),
    ("bamba", llama(model_type="bamba"), "state-space"),
    ("zamba2", {"model_type": "zamba2"}, "state-space"),
    ("nemotron-h", llama(model_type="nemotron_h", hybrid_override_pattern="M-M*"), "state-space"),
    ("falcon-h1", llama(model_type="falcon_h1"), "state-space"),
    ("qwen3-next", llama(model_type="qwen3_next"), "linear attention"),
    ("qwen3.5 inside a wrapper", {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}, "linear"),
    ("lfm2", llama(model_type="lfm2"), "short convolutions"),
    ("recurrentgemma", llama(model_type="recurrent_gemma"), "recurrent"),
    ("rwkv", llama(model_type="rwkv5", attention_hidden_size=2560), "RWKV"),
    ("an unknown type that is named after mamba", llama(model_type="supermamba"), "mamba"),
    ("an unknown type with mamba fields", llama(model_type="new", mamba_d_state=16), "mamba_d_state"),
    ("an unknown type with linear layers", llama(model_type="new", layer_types=["linear_attention"] * 32), "linear"),
    (
        "kimi-linear",
        {"model_type": "kimi_linear", "kv_lora_rank": 512, "linear_attn_config": {"head_dim": 128}},
        "linear",
    ),
    ("deepseek-v4", {"model_type": "deepseek_v4", "compress_ratios": [0, 4]}, "index"),
    ("sparse attention", llama(model_type="x", sparse_attention_config={"use_sparse_attention": True}), "sparse"),
    ("cross-layer attention", llama(model_type="hunyuan_v1_moe", use_cla=True), "CLA"),
    ("cross attention", llama(model_type="mllama_text_model"), "something other"),
    ("gpt-neo", {"model_type": "gpt_neo"}, "attention_types"),
    ("t5", {"model_type": "t5", "d_model": 512, "num_layers": 6, "num_heads": 8}, "encoder-decoder"),
    ("latent and linear layers mixed", {"model_type": "bailing_hybrid"}, "beside this has no rule"),
    ("layers that run several times", {"model_type": "hrm_text"}, "other layers than"),
    ("windows over latents", {"model_type": "dots3_note_text"}, "list of kinds"),
    ("windows of unknown length", {"model_type": "modernbert-decoder"}, "unknown length"),
    ("a kind of layer of its class alone", {"model_type": "zaya"}, "hybrid"),
    ("a wrapper without its language model", {"model_type": "gemma3"}, "text_config"),
    ("bart by flag", llama(is_encoder_decoder=True), "encoder"),
    ("bert", {"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "encoder"),
    ("a classifier", llama(architectures=["LlamaForSequenceClassification"]), "does not generate text"),
    ("an image model", {"model_type": "vit"}, "only decoders"),
    ("embedding gemma", {"model_type": "gemma3_text", "use_bidirectional_attention": True}, "encoder"),
]


@pytest.mark.parametrize(("config", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_no_rule_fits_is_refused_by_name_and_never_taken_for_plain_attention(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        geometry_from_config(config, BF16)
    assert words in str(caught.value)
    assert caught.value.field


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("kv heads do not divide heads", llama(num_key_value_heads=5), "num_key_value_heads"),
    ("more kv heads than heads", llama(num_key_value_heads=64), "num_key_value_heads"),
    ("hidden is no multiple of heads", llama(hidden_size=4097), "hidden_size"),
    ("a negative size", llama(head_dim=-128), "head_dim"),
    ("no layers", llama(num_hidden_layers=0), "num_hidden_layers"),
    ("layers as text", llama(num_hidden_layers="32"), "num_hidden_layers"),
    ("layers as true", llama(num_hidden_layers=True), "num_hidden_layers"),
    ("heads as a float", llama(num_attention_heads=32.0), "num_attention_heads"),
    ("an absurd size", llama(hidden_size=10**30), "hidden_size"),
    ("zero heads", llama(num_attention_heads=0), "num_attention_heads"),
    ("heads as a list", llama(num_attention_heads=[32]), "num_attention_heads"),
    (
        "layer_types of another length",
        {"model_type": "gpt_oss", "num_hidden_layers": 3, "layer_types": ["full_attention"]},
        "layer_types",
    ),
    ("layer_types that is no list", {"model_type": "gpt_oss", "layer_types": "full_attention"}, "layer_types"),
    ("layer_types of numbers", {"model_type": "gpt_oss", "num_hidden_layers": 1, "layer_types": [1]}, "layer_types"),
    (
        "a kind of layer nobody knows",
        {"model_type": "gpt_oss", "num_hidden_layers": 1, "layer_types": ["psychic_attention"]},
        "layer_types",
    ),
    (
        "a window layer without a window",
        {"model_type": "gpt_oss", "num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": None},
        "sliding_window",
    ),
    ("a window of zero", {"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
    ("use_sliding_window as text", {"model_type": "qwen2", "use_sliding_window": "false"}, "use_sliding_window"),
    ("two spellings that disagree", llama(n_layer=16), "n_layer"),
    ("an unknown type whose window nobody places", llama(model_type="new", sliding_window=128), "sliding_window"),
    ("a bad pattern", {"model_type": "exaone4", "sliding_window_pattern": "LLXG"}, "sliding_window_pattern"),
    (
        "shared layers without a lender",
        {"model_type": "gemma4_text", "num_hidden_layers": 2, "num_kv_shared_layers": 2},
        "num_kv_shared_layers",
    ),
    (
        "latent without its rope key",
        {"model_type": "new", "kv_lora_rank": 512, "num_hidden_layers": 2},
        "qk_rope_head_dim",
    ),
    ("architectures as text", llama(architectures="LlamaForCausalLM"), "architectures"),
    ("model_type as a number", llama(model_type=3), "model_type"),
    ("an empty config", {}, "num_hidden_layers"),
]


@pytest.mark.parametrize(("config", "field"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_config_that_contradicts_itself_is_refused_naming_the_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        geometry_from_config(config, BF16)
    assert caught.value.field == field


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_an_unknown_model_must_say_everything_itself(missing: str) -> None:
    config = llama(model_type="brand-new")
    del config[missing]
    with pytest.raises(ConfigError, match=missing):
        geometry_from_config(config, BF16)


def test_config_json_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="one JSON object"):
        geometry_from_config([], BF16)  # type: ignore[arg-type]


def test_geometry_is_a_value() -> None:
    assert geometry(**llama()) == geometry(**llama())
    assert geometry_from_config(llama(), FP32).bytes_per_token == 2 * geometry(**llama()).bytes_per_token


def test_the_defaults_are_read_lazily_and_quickly() -> None:
    code = (
        "import time, json, sys\n"
        "import octavo.geometry.fields as f\n"
        "assert f.defaults_table.cache_info().currsize == 0\n"
        "t = time.perf_counter(); f.defaults_table(); print(time.perf_counter() - t)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(times) < 0.03


def test_planning_one_model_takes_milliseconds() -> None:
    geometry(**llama())
    start = time.perf_counter()
    geometry(**json.loads(json.dumps(llama())))
    assert time.perf_counter() - start < 0.05
