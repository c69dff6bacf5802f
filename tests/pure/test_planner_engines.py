"""How other engines charge: figures that they printed, and the arithmetic behind each written out."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pure.planner_shapes import DEEPSEEK_V3, GEMMA_4_31B, GIB, GPT_OSS, LLAMA_4, LLAMA_8B, MIB, QWEN_35_27B

from octavo.errors import ConfigError
from octavo.planner.build import plan
from octavo.planner.engines import engine_named
from octavo.planner.values import Capacity


def capacity(config: dict[str, Any], **options: Any) -> Capacity:
    found = plan(config, **options).capacity
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("vllm-0.11", "vllm 0.11"),
        ("vLLM 0.11.x", "vllm 0.11"),
        ("vllm ~0.6.4", "vllm 0.6.4"),
        ("vllm-2026-03", "vllm 0.17"),
        ("vllm 0.2x", "vllm 0.29"),
        ("vllm 0.1.dev20073", "vllm"),
        ("sglang-0.4.9", "sglang 0.4.9"),
        ("TensorRT-LLM", "trtllm"),
        ("llama.cpp", "llamacpp"),
        ("octavo", "octavo"),
    ],
)
def test_an_engine_is_named_with_a_release_a_month_or_neither(text: str, label: str) -> None:
    assert engine_named(text).label == label


def test_vllm_pages_a_hybrid_as_the_log_of_two_3090_says() -> None:
    """27B, tensor ranks 2, fp8: printed 302,921 tokens and 2.31x of 131,072 out of 4.99 GiB, blocks of 1,568.

    A layer's state takes 1,603,584 B, or 1,566 tokens of 1,024 B: 98 x 16. Four groups of 16 layers; a
    request takes 84 blocks of attention and 2 of each of the 3 groups of state; 208 / 90 = 2.311.
    """
    found = capacity(QWEN_35_27B, tp=2, kv_dtype="fp8_e4m3", engine="vllm-2026-08", max_model_len=131_072,
                     kv_cache_memory_bytes=int(4.99 * GIB))  # fmt: skip
    assert found.block_tokens == 1568
    assert found.blocks == int(4.99 * GIB) // (16 * 1568 * 1024) == 208
    assert found.blocks_per_sequence[131_072] == 84 + 3 * 2
    assert found.tokens == 302_921


def test_an_older_vllm_divides_the_pool_by_its_groups_and_prints_fewer_tokens() -> None:
    found = capacity(QWEN_35_27B, tp=2, kv_dtype="fp8", engine="vllm-0.17", max_model_len=131_072,
                     kv_cache_memory_bytes=int(4.99 * GIB))  # fmt: skip
    assert found.tokens == 208 // 4 * 1568


def test_speculation_adds_a_column_of_convolution_for_each_drafted_token() -> None:
    """Printed: blocks of 1,648 with 7 drafted tokens: (5,120 x 10 x 2 + 24 x 128 x 128 x 4) B over 1,024 B."""
    found = capacity(QWEN_35_27B, tp=2, kv_dtype="fp8", engine="vllm", speculative_tokens=7, context=4096,
                     kv_cache_memory_bytes=GIB)  # fmt: skip
    assert found.block_tokens == 1648


def test_vllm_keeps_a_recurrence_in_the_models_type_unless_the_config_names_one() -> None:
    """Public logs of a hybrid whose config names none: blocks of 544 tokens.

    32 x 128 x 128 matrices and 8,192 x 3 inputs in bf16 are 1,097,728 B: 536 tokens of 2,048 B, 34 x 16.
    """
    config = {k: v for k, v in QWEN_35_27B.items() if k != "mamba_ssm_dtype"}
    config |= {"linear_num_value_heads": 32, "num_key_value_heads": 2, "num_attention_heads": 16}
    found = capacity(config, engine="vllm-0.11", kv_cache_memory_bytes=GIB, context=4096)
    assert found.block_tokens == 544


@pytest.mark.parametrize(
    ("engine", "options", "tokens"),
    [
        ("vllm-0.6.4", {"context": 29_000}, 29_000),
        ("vllm-0.6.4", {"context": 35_000}, 2048),
        ("vllm-0.11", {"device": "h100-sxm"}, 8192),
        ("vllm-0.11", {"device": "a100-sxm4-80gb"}, 2048),
        ("vllm-0.11", {"device": "l40s"}, 2048),
        ("llamacpp", {}, 512),
        ("octavo", {"max_num_seqs": 4096}, 4096),
    ],
)
def test_a_step_has_the_tokens_that_each_engine_gives_it(engine: str, options: dict[str, Any], tokens: int) -> None:
    assert plan(LLAMA_8B, engine=engine, weights_bytes="15GiB", **options).max_num_batched_tokens == tokens


def test_gpt_oss_at_full_length_is_refused_by_vllm_0_11_with_1_71_gib() -> None:
    found = capacity(GPT_OSS, engine="vllm-0.11", max_num_batched_tokens=1024, kv_cache_memory_bytes=int(1.71 * GIB))
    assert not found.fits
    # 3,112 blocks of 2 x 18 layers x 1 KiB x 16, one null, 73 for the window of 127 + 1,024 positions
    assert found.largest_context == (int(1.71 * GIB) // (18 * 2048 * 16) - 1 - 73) * 16


def test_vllm_keeps_windows_at_full_length_until_the_version_that_does_not() -> None:
    old = plan(GEMMA_4_31B, engine="vllm-0.20", kv_cache_memory_bytes="50GB", context=262_144)
    assert old.capacity is not None
    assert old.capacity.tokens == 50 * 10**9 // (901_120 * 16) * 16
    assert any("full length" in rule for rule in old.rules)
    new = plan(GEMMA_4_31B, engine="vllm-0.21", kv_cache_memory_bytes="50GB", context=262_144)
    assert new.capacity is not None
    assert new.capacity.tokens > 9 * old.capacity.tokens
    assert old.sequence_bytes == new.sequence_bytes  # what is needed does not depend on who charges


def test_chunked_layers_at_full_length_need_24_gib_for_a_million_tokens() -> None:
    made = plan(LLAMA_4, tp=8, engine="vllm-0.8.3", context=1_048_576)
    assert made.sequence_bytes_per_device[1_048_576] == 24 * GIB


def test_sglang_pools_one_page_more_than_it_serves() -> None:
    """Printed for 61 layers: 160.63 GiB for 2,454,421 tokens, the same on every rank."""
    found = capacity(DEEPSEEK_V3, tp=8, engine="sglang", kv_cache_memory_bytes=2_454_421 * 70_272, context=4096)
    assert found.tokens == 2_454_421


def test_sglang_keeps_latents_beside_an_index_in_656_and_132_bytes_a_layer() -> None:
    indexed = {**DEEPSEEK_V3, "index_head_dim": 128, "index_topk": 2048, "index_n_heads": 64}
    made = plan(indexed, engine="sglang", kv_dtype="fp8")
    assert made.state.bytes_per_token_growing == 61 * (656 + 132)
    # where the device computes in fp4 that is what auto means, elsewhere bf16
    assert plan(indexed, engine="sglang", device="b200").state.bytes_per_token_growing == 61 * (656 + 132)
    assert plan(indexed, engine="sglang", device="h100-sxm").state.bytes_per_token_growing == 61 * (576 * 2 + 132)


def test_fp8_has_a_scale_a_head_in_octavo_and_none_in_vllm() -> None:
    assert plan(LLAMA_8B, kv_dtype="fp8").state.bytes_per_token_growing == 32 * 2 * 8 * (128 + 4)
    assert plan(LLAMA_8B, kv_dtype="fp8", engine="vllm").state.bytes_per_token_growing == 32 * 2 * 8 * 128


def test_llama_cpp_reserves_cells_and_its_types_carry_scales() -> None:
    """8B at 8,192: 1,024 MiB in f16; q8_0 takes 34 bytes for 32 values."""
    assert plan(LLAMA_8B, engine="llamacpp", context=8192).sequence_bytes_per_device[8192] == 1024 * MIB
    q8 = plan(LLAMA_8B, engine="llamacpp", context=8192, kv_dtype="q8_0")
    assert q8.sequence_bytes_per_device[8192] == 1024 * MIB * 34 // 64
    odd = plan(LLAMA_8B, engine="llamacpp", context=8193)
    assert odd.sequence_bytes_per_device[8193] == (8192 + 256) * 131_072


def test_llama_cpp_keeps_recurrent_state_in_float32() -> None:
    """Printed for four sequences of the 27B: 598.5 MiB."""
    made = plan(QWEN_35_27B, engine="llamacpp", context=4096)
    assert 4 * made.state.fixed_bytes_per_sequence == 598.5 * MIB


def test_tensorrt_llm_counts_blocks_of_its_own_size() -> None:
    """Printed: 26.91 GiB for 220,480 tokens in blocks of 64."""
    found = capacity(LLAMA_8B, engine="trtllm", block_size=64, kv_cache_memory_bytes=220_480 * 131_072)
    assert found.tokens == 220_480


def test_each_engine_divides_a_device_in_its_own_way() -> None:
    known = {"memory": "80GiB", "weights_bytes": "20GiB", "runtime_bytes": "4GiB", "utilization": 0.9, "context": 8192}
    left = {e: plan(LLAMA_8B, engine=e, **known).budget for e in ("vllm", "sglang", "trtllm")}
    figures = {e: round(b.kv.predicted_bytes / GIB, 1) for e, b in left.items() if b is not None}
    assert figures == {"vllm": 72 - 24, "sglang": 72 - 20, "trtllm": round(0.9 * 56, 1)}


def test_a_config_without_state_is_refused() -> None:
    nothing = {**LLAMA_8B, "block_configs": [{"attention": {"no_op": True}}] * 32}
    with pytest.raises(ConfigError, match="keeps no state"):
        plan(nothing)
