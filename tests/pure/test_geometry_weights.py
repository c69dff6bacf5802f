"""Weights by formula: totals that the checkpoints themselves are known to have, and sums written out by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16, FP32
from octavo.geometry.weights import bytes_from_index, weights_from_config, weights_from_tensors

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text("utf-8"))

KNOWN = {
    # parameters as the published checkpoints' own headers count them
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "Qwen/Qwen2-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "google/gemma-2-2b": 2_614_341_888,
    "gpt2-xl": 1_557_611_200,
    "meta-llama/Meta-Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Meta-Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Meta-Llama-3.1-8B": 8_030_261_248,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "state-spaces/mamba-2.8b": 2_768_345_600,
}

ACTIVE = {
    # billions that a token passes, as the models' cards state them
    "Qwen/Qwen3-30B-A3B": 3.3,
    "Qwen/Qwen3-235B-A22B": 22,
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": 55,
    "mistralai/Mixtral-8x7B-v0.1": 12.9,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 17,
    "moonshotai/Kimi-K2-Instruct": 32,
    "tencent/Hunyuan-A13B-Instruct": None,
}

TINY: dict[str, Any] = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
MATRICES = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48
"""Of one layer: queries, keys and values, output, and three of the feed-forward network."""


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_those_of_the_published_checkpoint(name: str) -> None:
    found = weights_from_config(PUBLISHED[name])
    assert found.exact
    assert found.total_parameters == KNOWN[name]


@pytest.mark.parametrize("name", [name for name, billions in ACTIVE.items() if billions])
def test_of_routed_experts_a_token_passes_only_those_it_is_sent_to(name: str) -> None:
    found = weights_from_config(PUBLISHED[name])
    assert found.active_parameters == pytest.approx(ACTIVE[name] * 1e9, rel=0.03)
    assert found.active_parameters < found.total_parameters


def test_a_small_model_is_the_sum_written_out() -> None:
    found = weights_from_config(TINY)
    assert found.total_parameters == 64 * 32 + 2 * (MATRICES + 2 * 32) + 32 + 64 * 32
    assert found.total_bytes == 2 * found.total_parameters
    assert found.replicated_bytes == 2 * (2 * 2 * 32 + 32), "norms, on every rank"
    assert "llama" in found.basis
    assert "bf16" in found.basis


def test_tied_embeddings_are_counted_once_and_biases_where_they_are() -> None:
    plain = weights_from_config(TINY).total_parameters
    assert weights_from_config({**TINY, "tie_word_embeddings": True}).total_parameters == plain - 64 * 32
    biased = weights_from_config({**TINY, "attention_bias": True}).total_parameters
    assert biased == plain + 2 * (32 + 16 + 16 + 32)


def test_the_type_is_the_configs_own_unless_another_is_asked_for() -> None:
    assert weights_from_config({**TINY, "torch_dtype": "float32"}).by_type == (("fp32", 4 * 19_616),)
    assert weights_from_config({**TINY, "torch_dtype": "float32"}, dtype=BF16).by_type == (("bf16", 2 * 19_616),)
    assert weights_from_config(TINY, dtype=FP32).total_bytes == 4 * 19_616


def test_what_the_class_supplies_is_said() -> None:
    config = {name: value for name, value in TINY.items() if name != "intermediate_size"}
    found = weights_from_config(config)
    assert "defaults stand in for intermediate_size" in found.basis
    assert "defaults" not in weights_from_config(TINY).basis


@pytest.mark.parametrize(
    ("quantisation", "linear_bytes"),
    [
        # a scale of 4 bytes for each 128 x 128 weights: one for each of the seven matrices
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 2 * (MATRICES + 7 * 4)),
        ({"quant_method": "fp8"}, 2 * MATRICES),
        # half a byte, and 16 bits of scale and 4 of zero point for each 32
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, 2 * MATRICES // 2 + 2 * MATRICES // 32 * 20 // 8),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32}, 2 * MATRICES // 2 + 2 * MATRICES // 32 * 20 // 8),
        # half a byte, and an 8-bit scale for each 16
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 2 * MATRICES // 2 + 2 * MATRICES // 16),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 2 * MATRICES // 2 + 2 * MATRICES // 64 * 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 2 * MATRICES),
        (
            {"quant_method": "compressed-tensors",
             "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}},
            2 * MATRICES // 2 + 2 * MATRICES // 32 * 2,
        ),
    ],
)  # fmt: skip
def test_quantised_checkpoints_pack_their_matrices_with_scales(quantisation: dict[str, Any], linear_bytes: int) -> None:
    found = weights_from_config({**TINY, "quantization_config": quantisation})
    assert found.total_parameters == 19_616
    assert found.total_bytes == linear_bytes + 2 * (2 * 64 * 32 + 2 * 2 * 32 + 32)


def test_what_a_config_lists_as_not_converted_stays_as_it_is() -> None:
    config = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn", "lm_head"]}
    spared = weights_from_config({**TINY, "quantization_config": config})
    whole = weights_from_config({**TINY, "quantization_config": {"quant_method": "fp8"}})
    assert spared.total_bytes - whole.total_bytes == 32 * 32 + 2 * 16 * 32 + 32 * 32
    by_pattern = {"quant_method": "fp8", "ignore": ["re:.*self_attn.*"]}
    both = weights_from_config({**TINY, "quantization_config": by_pattern})
    assert both.total_bytes - whole.total_bytes == 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32)


def test_mxfp4_packs_experts_alone() -> None:
    config = PUBLISHED["openai/gpt-oss-20b"]
    found = weights_from_config(config)
    # 24 layers, 32 experts of 2880 x 5760 and 2880 x 2880: half a byte a weight and a byte of scale for 32
    experts = 24 * 32 * (2880 * 5760 + 2880 * 2880)
    rest = KNOWN["openai/gpt-oss-20b"] - experts
    assert dict(found.by_type) == {"mxfp4": experts // 2 + experts // 32, "bf16": 2 * rest}
    assert found.total_bytes == pytest.approx(13.76e9, rel=0.01), "the size of the published files"


def test_a_device_holds_its_share_of_matrices_and_all_vectors() -> None:
    found = weights_from_config(TINY)
    vectors = 2 * (2 * 2 * 32 + 32)
    assert found.rank_bytes(1) == found.total_bytes
    assert found.rank_bytes(4) == (found.total_bytes - vectors) // 4 + vectors
    assert found.rank_bytes(2, 2) == -(-(found.total_bytes - vectors) // 4) + vectors // 2


def test_a_type_without_formulas_is_estimated_and_says_so() -> None:
    found = weights_from_config({**TINY, "model_type": "brand-new"})
    assert not found.exact
    assert "estimated" in found.basis
    assert found.total_parameters == 2 * 64 * 32 + 2 * MATRICES


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", 49.87),
        ("deepseek-ai/DeepSeek-V4-Flash", 284.3),
        ("internlm/internlm2_5-7b", 7.74),
        ("THUDM/chatglm3-6b", 6.24),
    ],
)
def test_estimates_come_within_a_percent(name: str, billions: float) -> None:
    found = weights_from_config(PUBLISHED[name])
    assert not found.exact
    assert found.total_parameters == pytest.approx(billions * 1e9, rel=0.01)


@dataclass(frozen=True)
class Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def test_headers_are_counted_exactly() -> None:
    tensors = [
        Entry("model.embed_tokens.weight", "BF16", (64, 32), 4096),
        Entry("model.layers.0.mlp.experts.0.up_proj.weight", "F8_E4M3", (8, 32), 256),
        Entry("model.layers.0.mlp.experts.1.up_proj.weight", "F8_E4M3", (8, 32), 256),
        Entry("model.norm.weight", "F32", (32,), 128),
    ]
    found = weights_from_tensors(tensors, {**TINY, "model_type": "mixtral", "num_local_experts": 2,
                                           "num_experts_per_tok": 1})  # fmt: skip
    assert (found.total_parameters, found.total_bytes) == (64 * 32 + 2 * 256 + 32, 4096 + 512 + 128)
    assert found.active_parameters == found.total_parameters - 256
    assert found.by_type == (("BF16", 4096), ("F8_E4M3", 512), ("F32", 128))
    assert found.replicated_bytes == 128


def test_an_index_states_its_total() -> None:
    assert bytes_from_index({"metadata": {"total_size": 123}, "weight_map": {}}) == 123
    with pytest.raises(ConfigError, match="total_size"):
        bytes_from_index({"weight_map": {}})


@pytest.mark.parametrize(
    ("quantisation", "field"),
    [
        ({"quant_method": "magic"}, "quantization_config.quant_method"),
        ("fp8", "quantization_config"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "quantization_config.weight_block_size"),
        ({"quant_method": "gptq"}, "quantization_config.bits"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantization_config.quant_algo"),
        ({"quant_method": "compressed-tensors"}, "quantization_config.config_groups"),
        ({"quant_method": "fp8", "ignore": ["re:("]}, "quantization_config.ignore"),
    ],
)
def test_quantisation_that_cannot_be_counted_is_refused(quantisation: Any, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        weights_from_config({**TINY, "quantization_config": quantisation})
    assert caught.value.field == field


def test_a_size_that_nothing_gives_is_named() -> None:
    config = {name: value for name, value in TINY.items() if name != "vocab_size"}
    with pytest.raises(ConfigError, match="vocab_size"):
        weights_from_config({**config, "model_type": "brand-new"})
