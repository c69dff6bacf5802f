"""Published config files, trimmed to the fields that shape state and weights: each has its geometry.

The figures are written out from the models' own papers and cards, in bf16, by what is needed;
`published_configs.json` holds the files' fields and no figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.geometry.dtypes import BF16
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.model import ModelGeometry

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text("utf-8"))

FULL: dict[str, tuple[int, int, int]] = {
    "01-ai/Yi-34B": (60, 8, 128),
    "CohereForAI/aya-23-8B": (32, 8, 128),
    "CohereForAI/c4ai-command-r-plus": (64, 8, 128),
    "CohereForAI/c4ai-command-r-v01": (40, 64, 128),
    "EleutherAI/gpt-j-6b": (28, 16, 256),
    "EleutherAI/gpt-neox-20b": (44, 64, 96),
    "EleutherAI/pythia-1.4b": (24, 16, 128),
    "EleutherAI/pythia-12b": (36, 40, 128),
    "EleutherAI/pythia-160m": (12, 12, 64),
    "EleutherAI/pythia-6.9b": (32, 32, 128),
    "HuggingFaceTB/SmolLM-1.7B": (24, 32, 64),
    "HuggingFaceTB/SmolLM2-1.7B": (24, 32, 64),
    "HuggingFaceTB/SmolLM2-135M": (30, 3, 64),
    "HuggingFaceTB/SmolLM2-360M": (32, 5, 64),
    "MiniMaxAI/MiniMax-M2": (62, 8, 128),
    "Qwen/Qwen2-0.5B": (24, 2, 64),
    "Qwen/Qwen2-1.5B": (28, 2, 128),
    "Qwen/Qwen2-7B": (28, 4, 128),
    "Qwen/Qwen2.5-3B": (36, 2, 128),
    "Qwen/Qwen3-0.6B": (28, 8, 128),
    "Qwen/Qwen3-235B-A22B": (94, 4, 128),
    "Qwen/Qwen3-30B-A3B": (48, 4, 128),
    "Qwen/Qwen3-8B": (36, 8, 128),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": (62, 8, 128),
    "THUDM/chatglm3-6b": (28, 2, 128),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (22, 4, 64),
    "XiaomiMiMo/MiMo-7B-Base": (36, 8, 128),
    "allenai/OLMo-2-0325-32B": (64, 8, 128),
    "allenai/OLMo-2-1124-13B": (40, 40, 128),
    "allenai/OLMo-2-1124-7B": (32, 32, 128),
    "bigscience/bloom": (70, 112, 128),
    "bigscience/bloom-560m": (24, 16, 64),
    "bigscience/bloom-7b1": (30, 32, 128),
    "facebook/opt-1.3b": (24, 32, 64),
    "facebook/opt-13b": (40, 40, 128),
    "google/gemma-2b": (18, 1, 256),
    "google/gemma-7b": (28, 16, 256),
    "gpt2-medium": (24, 16, 64),
    "gpt2-xl": (48, 25, 64),
    "ibm-granite/granite-3.3-8b-instruct": (40, 8, 128),
    "internlm/internlm2_5-7b": (32, 8, 128),
    "meta-llama/Llama-2-13b-hf": (40, 40, 128),
    "meta-llama/Llama-2-70b-hf": (80, 8, 128),
    "meta-llama/Llama-2-7b-hf": (32, 32, 128),
    "meta-llama/Llama-3.2-1B": (16, 8, 64),
    "meta-llama/Llama-3.2-3B": (28, 8, 128),
    "meta-llama/Llama-3.3-70B-Instruct": (80, 8, 128),
    "meta-llama/Meta-Llama-3.1-405B": (126, 8, 128),
    "meta-llama/Meta-Llama-3.1-70B": (80, 8, 128),
    "meta-llama/Meta-Llama-3.1-8B": (32, 8, 128),
    "microsoft/Phi-3-mini-4k-instruct": (32, 32, 96),
    "microsoft/Phi-3.5-MoE-instruct": (32, 8, 128),
    "microsoft/phi-1_5": (24, 32, 64),
    "microsoft/phi-2": (32, 32, 80),
    "mistralai/Ministral-3-3B-2512": (26, 8, 128),
    "mistralai/Mistral-7B-Instruct-v0.3": (32, 8, 128),
    "mistralai/Mistral-Nemo-Instruct-2407": (40, 8, 128),
    "mistralai/Mistral-Small-3.1-24B": (40, 8, 128),
    "mistralai/Mixtral-8x7B-v0.1": (32, 8, 128),
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": (49, 8, 128),
    "stabilityai/stablelm-2-zephyr-1_6b": (24, 32, 64),
    "tencent/Hunyuan-A13B-Instruct": (32, 8, 128),
    "tiiuae/falcon-40b": (60, 8, 64),
    "togethercomputer/RedPajama-INCITE-3B-v1": (32, 32, 80),
    "zai-org/GLM-4.5-Air": (46, 8, 128),
}
"""Keys and values in every layer that keeps any, over all positions."""

WINDOWED: dict[str, tuple[int, int, int]] = {
    # growing bytes per token, windowed bytes per token, window
    "CohereForAI/c4ai-command-r7b-12-2024": (8 * 2 * 8 * 128 * 2, 24 * 2 * 8 * 128 * 2, 4096),
    "XiaomiMiMo/MiMo-V2-Flash": (9 * 4 * (192 + 128) * 2, 39 * 8 * (192 + 128) * 2, 129),
    "allenai/Olmo-3-32B": (16 * 2 * 8 * 128 * 2, 48 * 2 * 8 * 128 * 2, 4096),
    "allenai/Olmo-3-7B-Instruct": (8 * 2 * 32 * 128 * 2, 24 * 2 * 32 * 128 * 2, 4096),
    "google/gemma-2-27b": (23 * 2 * 16 * 128 * 2, 23 * 2 * 16 * 128 * 2, 4096),
    "google/gemma-2-2b": (13 * 2 * 4 * 256 * 2, 13 * 2 * 4 * 256 * 2, 4096),
    "google/gemma-3-12b-it": (8 * 2 * 8 * 256 * 2, 40 * 2 * 8 * 256 * 2, 1024),
    "google/gemma-3-1b-it": (4 * 2 * 1 * 256 * 2, 22 * 2 * 1 * 256 * 2, 512),
    "google/gemma-4-26B-A4B": (5 * 2 * 2 * 512 * 2, 25 * 2 * 8 * 256 * 2, 1024),
    "google/gemma-4-E2B": (3 * 2 * 1 * 512 * 2, 12 * 2 * 1 * 256 * 2, 512),
    "microsoft/Phi-4-mini-instruct": (0, 32 * 2 * 8 * 128 * 2, 262144),
    "microsoft/Phi-mini-MoE-instruct": (0, 32 * 2 * 8 * 128 * 2, 2047),
    "mistralai/Mistral-7B-v0.1": (0, 32 * 2 * 8 * 128 * 2, 4096),
    "nvidia/Gemma-4-31B-IT-NVFP4": (10 * 2 * 4 * 512 * 2, 50 * 2 * 16 * 256 * 2, 1024),
    "openai/gpt-oss-120b": (36864, 36864, 128),
    "openai/gpt-oss-20b": (12 * 2 * 8 * 64 * 2, 12 * 2 * 8 * 64 * 2, 128),
    "stepfun-ai/Step-3.7-Flash": (12 * 2 * 8 * 128 * 2, 33 * 2 * 8 * 128 * 2, 512),
}

CHUNKED = ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "meta-llama/Llama-4-Scout-17B-16E-Instruct")

LATENT: dict[str, int] = {
    # values per token over all layers: latent and rope key, and an index key where there is an index
    "deepseek-ai/DeepSeek-V2": 60 * 576,
    "deepseek-ai/DeepSeek-V2-Lite": 27 * 576,
    "deepseek-ai/DeepSeek-V3.2": 61 * (576 + 128),
    "moonshotai/Kimi-K2-Instruct": 61 * 576,
    "moonshotai/Kimi-K2.5": 61 * 576,
    "nvidia/Kimi-K2.6-NVFP4": 61 * 576,
    "zai-org/GLM-5": 78 * (576 + 128),
    "zai-org/GLM-5.1": 78 * (576 + 128),
    "zai-org/GLM-5.2": 78 * 576 + 21 * 128,
    "zai-org/GLM-5.3": 78 * 576 + 21 * 128,
    "zai-org/GLM-5.3-FP8": 78 * 576 + 21 * 128,
}

F32, B16 = 4, 2

CONSTANT: dict[str, tuple[int, int]] = {
    # growing bytes per token, bytes per sequence: layers x (K - 1 columns + recurrence in float32)
    "LiquidAI/LFM2-1.2B": (6 * 2 * 8 * 64 * 2, 10 * 2048 * 2 * B16),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        12 * 2 * 2 * 256 * 2,
        36 * ((2 * 16 * 128 + 32 * 128) * 3 * B16 + 32 * 128 * 128 * F32),
    ),
    "Qwen/Qwen3.5-27B": (
        16 * 2 * 4 * 256 * 2,
        48 * ((2 * 16 * 128 + 48 * 128) * 3 * B16 + 48 * 128 * 128 * F32),
    ),
    "Qwen/Qwen3.5-35B-A3B": (
        10 * 2 * 2 * 256 * 2,
        30 * ((2 * 16 * 128 + 32 * 128) * 3 * B16 + 32 * 128 * 128 * F32),
    ),
    "nvidia/Qwen3.6-27B-NVFP4": (
        16 * 2 * 4 * 256 * 2,
        48 * ((2 * 16 * 128 + 48 * 128) * 3 * B16 + 48 * 128 * 128 * F32),
    ),
    "nvidia/Qwen3.6-35B-A3B-NVFP4": (
        10 * 2 * 2 * 256 * 2,
        30 * ((2 * 16 * 128 + 32 * 128) * 3 * B16 + 32 * 128 * 128 * F32),
    ),
    # two inputs one position late, and a matrix for each of 40 heads
    "RWKV/rwkv-5-world-3b": (0, 32 * (2 * 2560 * B16 + 40 * 64 * 64 * F32)),
    # 9 of 54 layers attend as well, over twice the hidden size: 32 heads of 160
    "Zyphra/Zamba2-2.7B": (9 * 2 * 32 * 160 * 2, 54 * ((5120 + 2 * 1 * 64) * 3 * B16 + 8 * 640 * 64 * F32)),
    "ai21labs/AI21-Jamba-1.5-Large": (9 * 2 * 8 * 128 * 2, 63 * (16384 * 3 * B16 + 16384 * 16 * F32)),
    "allenai/Olmo-Hybrid-7B": (
        8 * 2 * 30 * 128 * 2,
        24 * ((2 * 30 * 96 + 30 * 192) * 3 * B16 + 30 * 96 * 192 * F32),
    ),
    "ibm-ai-platform/Bamba-9B": (3 * 2 * 8 * 128 * 2, 29 * ((8192 + 2 * 1 * 128) * 3 * B16 + 128 * 64 * 128 * F32)),
    # latents in 24 of 93 layers, delta attention with 96 heads of 128 in 69
    "moonshotai/Kimi-K3": (24 * 576 * 2, 69 * (3 * 96 * 128 * 3 * B16 + 96 * 128 * 128 * F32)),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": (7 * 576 * 2, 20 * (3 * 32 * 128 * 3 * B16 + 32 * 128 * 128 * F32)),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": (
        12 * 2 * 2 * 128 * 2,
        48 * ((256 * 64 + 2 * 8 * 128) * 3 * B16 + 256 * 64 * 128 * F32),
    ),
    # 118 letters: 54 M, 10 *, 54 -
    "nvidia/Nemotron-H-56B-Base-8K": (
        10 * 2 * 8 * 128 * 2,
        54 * ((256 * 64 + 2 * 8 * 256) * 3 * B16 + 256 * 64 * 256 * F32),
    ),
    "state-spaces/mamba-2.8b": (0, 64 * (5120 * 3 * B16 + 5120 * 16 * F32)),
    "state-spaces/mamba2-2.7b": (0, 64 * ((5120 + 2 * 1 * 128) * 3 * B16 + 80 * 64 * 128 * F32)),
    # attention and a state space in every one of 36 layers
    "tiiuae/Falcon-H1-0.5B-Base": (
        36 * 2 * 2 * 64 * 2,
        36 * ((1536 + 2 * 1 * 128) * 3 * B16 + 24 * 64 * 128 * F32),
    ),
    "tiiuae/falcon-mamba-7b": (0, 64 * (8192 * 3 * B16 + 8192 * 16 * F32)),
}

SPARSE: dict[str, tuple[int, int]] = {
    # keys, values and an index key in 57 of 60 layers; kept and read by a step at 100,000 positions
    "MiniMaxAI/MiniMax-M3": (
        60 * 2 * 4 * 128 * 2 + 57 * 128 * 2,
        3 * 100_000 * 2048 + 57 * (100_000 * 256 + (16 + 1) * 128 * 2048),
    ),
    # latent, rope key and index key in all 61; 2048 latents read
    "deepseek-ai/DeepSeek-V3.2": (61 * (576 + 128) * 2, 61 * (100_000 * 256 + 2048 * 1152)),
}


def test_every_published_config_is_in_exactly_one_table() -> None:
    named = [*FULL, *WINDOWED, *CHUNKED, *LATENT, *CONSTANT, "MiniMaxAI/MiniMax-M3", "deepseek-ai/DeepSeek-V4-Flash"]
    assert sorted(named) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", FULL)
def test_plain_attention_costs_layers_by_two_by_heads_by_width_by_bytes(name: str) -> None:
    layers, kv_heads, head_dim = FULL[name]
    g = geometry_from_config(PUBLISHED[name], BF16)
    assert g.bytes_per_token_growing == layers * 2 * kv_heads * head_dim * 2
    assert g.bytes_per_token_windowed == 0
    assert g.bytes_kept(1000) == 1000 * g.bytes_per_token_growing


@pytest.mark.parametrize("name", WINDOWED)
def test_window_layers_are_counted_apart(name: str) -> None:
    growing, windowed, window = WINDOWED[name]
    g = geometry_from_config(PUBLISHED[name], BF16)
    assert (g.bytes_per_token_growing, g.bytes_per_token_windowed, g.window_tokens) == (growing, windowed, (window,))
    assert g.bytes_kept(10 * window) == 10 * window * growing + window * windowed


@pytest.mark.parametrize("name", CHUNKED)
def test_three_of_four_layers_of_llama_4_attend_in_chunks(name: str) -> None:
    g = geometry_from_config(PUBLISHED[name], BF16)
    assert g.bytes_per_token_growing == 12 * 2 * 8 * 128 * 2
    assert g.bytes_kept(20_000) == 20_000 * 12 * 4096 + 8192 * 36 * 4096


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention_keeps_a_latent_and_a_rope_key_whatever_the_heads(name: str) -> None:
    assert geometry_from_config(PUBLISHED[name], BF16).bytes_per_token_growing == LATENT[name] * 2


@pytest.mark.parametrize("name", CONSTANT)
def test_constant_state_is_counted_per_sequence_and_attention_per_token(name: str) -> None:
    growing, fixed = CONSTANT[name]
    g = geometry_from_config(PUBLISHED[name], BF16)
    assert (g.bytes_per_token_growing, g.bytes_per_token_windowed, g.fixed_bytes_per_sequence) == (growing, 0, fixed)
    assert g.bytes_kept(1) == growing + fixed
    assert g.bytes_kept(5000) == 5000 * growing + fixed


@pytest.mark.parametrize("name", SPARSE)
def test_an_index_is_kept_for_all_positions_and_narrows_what_is_read(name: str) -> None:
    growing, read = SPARSE[name]
    g = geometry_from_config(PUBLISHED[name], BF16)
    assert g.bytes_per_token_growing == growing
    assert g.bytes_read(100_000) == read
    assert g.bytes_kept(100_000) == 100_000 * growing


def test_compressed_layers_keep_a_window_and_an_entry_for_each_run() -> None:
    g = geometry_from_config(PUBLISHED["deepseek-ai/DeepSeek-V4-Flash"], BF16)
    # 43 layers: 2 with the window alone, 21 with an entry for 4 positions, 20 with one for 128; key and value are one
    assert g.bytes_per_token_windowed == 43 * 512 * 2
    assert g.bytes_per_token_growing == 21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // 128 == 6880
    # at 1000 positions: 250 entries and nothing waiting; 7 entries and 104 waiting as projection and gate
    sparse = 250 * (512 + 128) * 2 + 4 * (512 + 128) * (2 + 4)
    heavy = 7 * 512 * 2 + 104 * 2 * 512 * 2
    assert g.bytes_kept(1000) == 43 * 128 * 512 * 2 + 21 * sparse + 20 * heavy
    assert g.window_tokens == (128,)


def test_figures_that_are_known_in_public() -> None:
    def published(name: str) -> ModelGeometry:
        return geometry_from_config(PUBLISHED[name], BF16)

    gpt_oss = published("openai/gpt-oss-120b")
    assert (gpt_oss.bytes_per_token_growing, gpt_oss.bytes_per_token_windowed) == (36_864, 36_864)
    assert gpt_oss.window_tokens == (128,), "its sinks are learned logits, which take no position"
    assert 146 < published("Qwen/Qwen3.5-27B").fixed_bytes_per_sequence / 2**20 < 148
    gemma = published("nvidia/Gemma-4-31B-IT-NVFP4")
    assert round(gemma.bytes_kept(32768) / 2**30, 2) == 3.28
    deepseek = {"model_type": "deepseek_v3", "num_hidden_layers": 61}
    assert geometry_from_config(deepseek, BF16).bytes_per_token == 61 * (512 + 64) * 2 == 70_272
    falcon = {"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544}
    assert geometry_from_config(falcon, BF16).bytes_per_token == 8_192
    gemma3 = {"model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32,
              "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024, "hidden_size": 5376}  # fmt: skip
    assert round(geometry_from_config(gemma3, BF16).bytes_kept(131072) / 2**30, 2) == 10.41
