"""Bytes per token of one config of every spelling: each figure is a sum written out by hand, in bf16."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.geometry.dtypes import BF16
from octavo.geometry.from_config import geometry_from_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}

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
        {**LLAMA, "sliding_window": 128},
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
        "mla+sparse",
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
