"""The plan: figures worked out by hand or printed by others, sums that are exact, words that say what fits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.planner_shapes import (
    DEEPSEEK_V3,
    GEMMA_4_31B,
    GIB,
    GPT_OSS,
    LLAMA_8B,
    MAMBA_2_8B,
    MIB,
    QWEN_35_27B,
)

import octavo
from octavo.errors import ConfigError
from octavo.geometry.charge import sequence_bytes_charged
from octavo.geometry.dtypes import BF16
from octavo.geometry.from_config import geometry_from_config
from octavo.planner.build import plan
from octavo.planner.json_form import as_json
from octavo.planner.report import report
from octavo.planner.values import Plan

HAND: dict[str, Any] = {"layers": 32, "kv_heads": 8, "head_dim": 128, "kv_dtype": "bf16", "context": 8192}


def text(made: Plan) -> str:
    return "\n".join(report(made))


def test_the_public_name_is_the_planner() -> None:
    assert octavo.plan is plan


def test_by_hand_a_token_takes_128_kib_and_8192_of_them_one_gib() -> None:
    made = plan(**HAND)
    assert made.state.bytes_per_token_growing == 131_072
    assert made.sequence_bytes[8192] == GIB
    assert "128 KiB per token" in text(made)
    assert "1 GiB needed" in text(made)


def test_the_textbook_case_reserves_three_gib_of_which_a_good_third_is_useful() -> None:
    """Three sequences of 1,200, 7,600 and 2,000 tokens: 10,800 x 128 KiB of 3 x 8,192 x 128 KiB."""
    made = plan(**HAND, lengths="1200,7600,2000", declared_max=8192)
    found = made.workload
    assert found is not None
    assert found.contiguous.set_aside_bytes == 3 * GIB
    assert found.contiguous.useful_bytes == found.live_bytes == 10_800 * 131_072
    assert found.contiguous.waste.reserved_bytes == 3 * GIB - 10_800 * 131_072
    assert round(100 * found.contiguous.useful_share, 1) == 43.9
    assert found.paged.blocks == 75 + 475 + 125
    assert found.paged.partial_blocks == 0
    assert found.paged.waste.total_bytes == 0
    said = text(made)
    assert "3 GiB reserved, 1.318 GiB useful (43.9%)" in said
    assert "675 paged blocks, none partial" in said


def test_a_partial_block_is_internal_waste() -> None:
    found = plan(**HAND, lengths="17").workload
    assert found is not None
    assert found.paged.partial_blocks == 1
    assert found.paged.waste.internal_bytes == 15 * 131_072


def test_two_numbers_make_a_distribution_with_that_mean_and_maximum() -> None:
    found = plan(**HAND, mean=2000, max=8192).workload
    assert found is not None
    assert found.max_tokens == found.declared_max_tokens == 8192
    assert abs(found.mean_tokens - 2000) < 1.5


@pytest.mark.parametrize(
    ("config", "growing", "windowed", "fixed"),
    [
        (GPT_OSS, 36_864, 36_864, 0),
        (DEEPSEEK_V3, 70_272, 0, 0),
        (GEMMA_4_31B, 81_920, 819_200, 0),
        # 48 layers of (10,240 channels x 3 inputs in bf16, 48 matrices of 128 x 128 in fp32)
        (QWEN_35_27B, 65_536, 0, 48 * (10_240 * 3 * 2 + 48 * 128 * 128 * 4)),
    ],
    ids=["gpt-oss-120b", "deepseek-v3", "gemma-4-31b", "qwen3.5-27b"],
)
def test_known_public_figures_of_state(config: dict[str, Any], growing: int, windowed: int, fixed: int) -> None:
    state = plan(config).state
    assert state.bytes_per_token_growing == growing
    assert state.bytes_per_token_windowed == windowed
    assert state.fixed_bytes_per_sequence == fixed


def test_gemma_4_needs_3_28_gib_at_32k_and_charges_window_layers_no_more_than_window_and_step() -> None:
    made = plan(GEMMA_4_31B, context=32768, max_num_batched_tokens=2048)
    assert made.sequence_bytes[32768] == 10 * 8192 * 32768 + 50 * 16_384 * 1024
    assert round(made.sequence_bytes[32768] / GIB, 2) == 3.28
    # full layers 2,048 blocks of 1.25 MiB; windows reach (1,023 + 2,048 positions) over 193 blocks of 12.5 MiB
    assert made.sequence_bytes_per_device[32768] == (2048 * 1.25 + 193 * 12.5) * MIB


def test_pages_of_one_size_for_layers_of_different_size_would_take_30_gib() -> None:
    """Gemma-4-31B at 32k: 60 layers x 16 KiB, the largest layer's, x 32,768 tokens."""
    lever = next(x for x in plan(GEMMA_4_31B, context=32768).levers if x.name == "unified pages")
    assert lever.sequence_bytes == 30 * GIB


def test_a_recurrent_model_keeps_the_same_whatever_the_length() -> None:
    made = plan(MAMBA_2_8B, contexts="1024,65536", kv_cache_memory_bytes="1GiB")
    each = 64 * (5120 * 3 * 2 + 5120 * 16 * 4)
    assert set(made.sequence_bytes.values()) == {each}
    assert made.capacity is not None
    assert made.capacity.sequences[65536] == GIB // each
    assert "any length" in text(made)


def test_the_ledger_sums_to_the_device_exactly() -> None:
    made = plan(LLAMA_8B, memory="80GiB", weights_bytes="16060522496", runtime_bytes="3GiB", utilization=0.9)
    assert made.budget is not None
    assert sum(made.budget.by_label.values()) == 80 * GIB
    left = int(80 * GIB * 0.9) - 16_060_522_496 - 3 * GIB
    assert made.budget.kv.predicted_bytes == left // (2 * MIB) * (2 * MIB)
    assert as_json(made)["ledger"] == made.budget.by_label


@given(
    memory=st.integers(min_value=2**28, max_value=2**38),
    weights=st.integers(min_value=0, max_value=2**38),
    runtime=st.integers(min_value=0, max_value=2**35),
    engine=st.sampled_from(["octavo", "vllm-0.11", "vllm", "sglang", "trtllm", "llamacpp"]),
)
@settings(max_examples=40, deadline=None)
def test_whatever_is_asked_the_ledger_is_exact_and_what_does_not_fit_is_said(
    memory: int, weights: int, runtime: int, engine: str
) -> None:
    made = plan(QWEN_35_27B, memory=memory, weights_bytes=weights, runtime_bytes=runtime, engine=engine, context=4096)
    assert made.budget is not None
    assert sum(made.budget.by_label.values()) == memory
    if weights + runtime > memory:
        assert made.budget.missing_bytes < 0
        assert any("does not fit" in warning for warning in made.warnings)


def test_capacity_is_in_whole_blocks() -> None:
    found = plan(LLAMA_8B, kv_cache_memory_bytes=10 * GIB + 1_000_000, context=8192).capacity
    assert found is not None
    assert (found.blocks, found.block_bytes, found.block_tokens) == (5120, 2 * MIB, 16)
    assert found.tokens == found.largest_context == 81_920
    assert found.sequences[8192] == 10
    assert found.concurrency[8192] == 10.0


def test_a_pool_of_exactly_one_request_is_no_fit() -> None:
    exact = plan(LLAMA_8B, kv_cache_memory_bytes=GIB, context=8192)
    assert exact.capacity is not None
    assert exact.capacity.concurrency[8192] == 1.0
    assert not exact.capacity.fits
    assert any("could not go on" in warning for warning in exact.warnings)
    assert "DOES NOT FIT" in text(exact)
    more = plan(LLAMA_8B, kv_cache_memory_bytes=GIB + 2 * MIB, context=8192)
    assert more.capacity is not None
    assert more.capacity.fits
    assert "1 to spare" in more.capacity.margin


def test_what_octavo_sets_aside_is_what_admission_charges() -> None:
    """The shared rule, for groups of one block size: units add nothing to it."""
    geometry = geometry_from_config(GPT_OSS, BF16)
    made = plan(GPT_OSS, contexts="1000,20000", max_num_batched_tokens=512, max_num_seqs=64)
    for tokens in (1000, 20000):
        charged = sequence_bytes_charged(geometry, tokens, step_tokens=512, block_tokens=16)
        assert made.sequence_bytes_per_device[tokens] == charged


def test_tensor_ranks_share_heads_and_replicate_latents() -> None:
    heads = plan(LLAMA_8B, tp=4, context=8192, kv_cache_memory_bytes=GIB)
    assert heads.state.bytes_per_token_growing == 131_072
    assert heads.state.device_bytes_per_token_growing == 32_768
    assert heads.capacity is not None
    assert heads.capacity.tokens == 32_768
    latent = plan(DEEPSEEK_V3, tp=8)
    assert latent.state.device_bytes_per_token_growing == 70_272
    few = plan(LLAMA_8B, tp=16)
    assert few.state.device_bytes_per_token_growing == 32 * 2 * 128 * 2


def test_a_pipeline_stage_is_charged_its_own_layers() -> None:
    """61 layers over two stages: the fuller one has 31 of 1,152 bytes."""
    assert plan(DEEPSEEK_V3, pp=2).state.device_bytes_per_token_growing == 31 * 1152


def test_replicas_multiply_what_is_served_and_nothing_on_a_device() -> None:
    made = as_json(plan(LLAMA_8B, dp=4, devices=4, context=8192, kv_cache_memory_bytes=2 * GIB))
    assert made["capacity"]["sequences"]["8192"] == 2
    assert made["capacity"]["sequences_all_replicas"]["8192"] == 8


def test_devices_that_no_rank_takes_are_replicas() -> None:
    made = plan(LLAMA_8B, tp=2, devices=8, context=8192, kv_cache_memory_bytes=GIB)
    assert (made.tp, made.dp, made.devices) == (2, 4, 8)
    assert as_json(made)["capacity"]["sequences_all_replicas"]["8192"] == 8


def test_a_host_tier_adds_nothing_to_capacity_or_to_the_longest_context() -> None:
    without = plan(LLAMA_8B, device="h100-sxm", weights_bytes="15GiB", context=8192, host_memory_bytes=0)
    with_tier = plan(LLAMA_8B, device="h100-sxm", weights_bytes="15GiB", context=8192, host_memory_bytes="512GiB")
    assert without.capacity == with_tier.capacity
    tier = next(lever for lever in with_tier.levers if lever.name == "host tier")
    assert tier.sequences == 512
    # 1 GiB over 63 GB/s at 80%
    assert tier.seconds == pytest.approx(GIB / (0.8 * 63e9))


def test_levers_say_what_each_would_change() -> None:
    made = plan(LLAMA_8B, context=8192, kv_cache_memory_bytes="8GiB", lengths="2000,4000,6000", declared_max=8192)
    levers = {lever.name: lever for lever in made.levers}
    assert levers["GQA"].sequence_bytes == 4 * GIB  # 32 key heads instead of 8
    assert levers["KV type"].sequence_bytes == 8192 * 32 * 2 * 8 * (128 + 4)  # fp8 with a scale a head
    assert levers["guaranteed_no_evict"].sequences == 8
    assert levers["max_utilization"].sequences == 16  # 65,536 tokens, 4,000 each
    certain, likely, most = (
        levers[n].sequences or 0 for n in ("guaranteed_no_evict", "future_bounded", "max_utilization")
    )
    assert certain <= likely <= most
    # 6,144 tokens each beside 2,048 that are kept once
    assert levers["prefix sharing"].sequences == (65_536 - 2048) // 6144


def test_without_lengths_admission_is_compared_on_even_ones_and_that_is_said() -> None:
    levers = {lever.name: lever for lever in plan(LLAMA_8B, context=8192, kv_cache_memory_bytes="8GiB").levers}
    assert levers["guaranteed_no_evict"].sequences == 8
    # 128 x 1 ... 128 x 64 tokens: 4,160 on average, 260 blocks
    assert levers["max_utilization"].sequences == 4096 // 260
    assert "assumed even" in levers["max_utilization"].says


def test_the_roofline_of_a_step_is_what_it_reads_over_the_bandwidth() -> None:
    made = plan(LLAMA_8B, device="h100-sxm", weights_bytes=16_060_522_496, context=8192, batch_size=4, price=3.35)
    found = made.roofline
    assert found is not None
    assert found.decode_bound == "bandwidth"
    assert found.decode_s == pytest.approx((16_060_522_496 + 4 * GIB) / 3.35e12)
    assert found.batch_state_overtakes_weights == 16_060_522_496 // GIB + 1
    assert found.dollars_per_million_tokens == pytest.approx(3.35 / 3600 * found.decode_s / 4 * 1e6)


def test_what_limits_first_and_from_how_many_live_tokens_memory_does() -> None:
    tight = plan(LLAMA_8B, context=8192, kv_cache_memory_bytes="8GiB", max_num_seqs=64).limits
    assert tight is not None
    assert tight.binding == "KV blocks"
    assert tight.memory_from_tokens == 65_536
    assert tight.memory_from_context == 1024
    loose = plan(LLAMA_8B, context=512, kv_cache_memory_bytes="8GiB", max_num_seqs=64).limits
    assert loose is not None
    assert loose.binding == "sequence limit"
    assert loose.memory_from_tokens is None


def test_an_slo_can_be_what_limits() -> None:
    made = plan(LLAMA_8B, device="h100-sxm", weights_bytes="15GiB", context=32768, slo_tpot_ms=6, max_num_seqs=256)
    assert made.limits is not None
    assert made.limits.binding == "SLO"
    # 6 ms x 3.35 TB/s less the weights, in sequences of 4 GiB
    assert made.limits.all[-1].sequences == int((0.006 * 3.35e12 - 15 * GIB) / (4 * GIB))


def test_the_documented_names_of_the_json_are_there() -> None:
    told = as_json(plan(LLAMA_8B, device="h100-sxm", weights_bytes="15GiB", contexts="8192,32768"))
    assert told["state"]["bytes_per_token_growing"] == 131_072
    assert told["state"]["bytes_per_token_windowed"] == 0
    assert told["state"]["fixed_bytes_per_sequence"] == 0
    assert told["sequence_bytes"] == {"8192": GIB, "32768": 4 * GIB}
    assert set(told["capacity"]) >= {"tokens", "sequences", "blocks"}
    assert set(told["ledger"]) == {"weights", "runtime", "kv", "headroom"}
    assert isinstance(told["warnings"], list)
    assert json.loads(json.dumps(told)) == told


def test_no_line_is_wider_than_a_usual_window() -> None:
    made = plan(GEMMA_4_31B, device="h100-sxm", weights_bytes="20GiB", tp=2, lengths="100,9000", price=2)
    lines = list(report(made))
    assert max(map(len, lines)) <= 120
    assert sum(line.startswith(("STATE", "REQUEST", "LEDGER", "CAPACITY", "LIMIT", "ROOFLINE")) for line in lines) == 6


def test_an_unverified_device_is_said_to_be_so() -> None:
    assert any("unverified" in warning for warning in plan(LLAMA_8B, device="t4", weights_bytes="15GiB").warnings)
    assert not any("unverified" in warning for warning in plan(LLAMA_8B, device="l4", weights_bytes="15GiB").warnings)


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"memory": -1}, "memory", "bytes"),
        ({"context": 0}, "context", "at least 1"),
        ({"contexts": "8192,x"}, "contexts", "whole number"),
        ({"utilization": 1.5}, "utilization", "at most 1"),
        ({"utilization": "nan"}, "utilization", "above 0"),
        ({"tp": 3}, "tp", "must divide the 32 attention heads"),
        ({"tp": 2, "devices": 3}, "devices", "a multiple of tp x pp = 2"),
        ({"tp": 2, "dp": 2, "devices": 8}, "devices", "tp x pp x dp = 4"),
        ({"pp": 33}, "pp", "32 layers"),
        ({"kv_dtype": "fp9"}, "kv_dtype", "unknown dtype"),
        ({"kv_dtype": "q8_0"}, "kv_dtype", "--engine llamacpp"),
        ({"engine": "triton"}, "engine", "octavo, vllm, sglang"),
        ({"contxt": 5}, "contxt", "did you mean context"),
        ({"tp": 2, "tensor_parallel_size": 4}, "tensor_parallel_size", "contradicts tp=2"),
        ({"mean": 10}, "max", "belong together"),
        ({"lengths": "9000", "declared_max": 8192}, "declared_max", "below the longest"),
        ({"lengths": "5", "mean": 3, "max": 4}, "workload", "one of"),
        ({"layers": 3}, "layers", "manual form"),
        ({"device": "h100"}, "device", "h100-sxm5-80gb, h100-pcie-80gb, h100-nvl-94gb"),
        ({"device": "h1oo"}, "device", "did you mean h100-sxm5-80gb"),
        ({"quantization": "int2"}, "quantization", "one of int8, int4"),
        ({"quantization": "int8", "engine": "vllm"}, "quantization", "not vllm"),
        ({"quantization": "int8", "weights_bytes": "8GiB"}, "quantization", "one of both"),
        ({"quantization": "int8", "device": "h100-sxm"}, "quantization", "on CPUs alone"),
    ],
)
def test_wrong_options_are_refused_with_the_remedy(options: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(LLAMA_8B, **options)
    assert caught.value.field == field
    assert says in caught.value.remedy
    assert "\n" not in str(caught.value)


def test_a_type_that_a_kind_of_state_cannot_have_is_refused_whoever_charges() -> None:
    for engine in ("octavo", "vllm"):
        with pytest.raises(ConfigError, match="which integers cannot hold"):
            plan(DEEPSEEK_V3, kv_dtype="int4", engine=engine)
    with pytest.raises(ConfigError, match="only constant state"):
        plan(MAMBA_2_8B, kv_dtype="fp8")


def test_rounded_weights_are_counted_with_their_scales_and_the_rest_as_it_is() -> None:
    plain = plan(LLAMA_8B, memory="64GiB")
    eight, four = (plan(LLAMA_8B, memory="64GiB", quantization=kind) for kind in ("int8", "int4"))
    layers = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    head = 128256 * 4096
    norms = 2 * (2 * 32 + 1) * 4096
    # 8.5 bits a weight; 5 with what 0 stands for; the embedding in bf16, since the head is not tied to it
    assert eight.weights.total_bytes == (layers + head) * 17 // 16 + 2 * head + norms
    assert four.weights.total_bytes == layers * 5 // 8 + head * 17 // 16 + 2 * head + norms
    assert eight.weights.total_parameters == plain.weights.total_parameters
    assert "linear layers rounded to int4, the output head to int8" in " ".join(text(four).split())
    assert four.budget is not None
    assert eight.budget is not None
    assert plain.budget is not None
    freed = plain.weights.total_bytes - four.weights.total_bytes
    assert four.budget.kv.predicted_bytes - plain.budget.kv.predicted_bytes == pytest.approx(freed, abs=4 * MIB)


def test_a_checkpoint_that_is_quantised_itself_is_not_rounded_again() -> None:
    with pytest.raises(ConfigError, match="quantised itself, by fp8"):
        plan(LLAMA_8B | {"quantization_config": {"quant_method": "fp8"}}, memory="64GiB", quantization="int8")


def test_vllms_names_mean_the_same() -> None:
    ours = plan(LLAMA_8B, memory="40GiB", weights_bytes=0, tp=2, context=4096, utilization=0.8, kv_dtype="fp8")
    theirs = plan(LLAMA_8B, memory="40GiB", weights_bytes=0, tensor_parallel_size=2, max_model_len=4096,
                  gpu_memory_utilization=0.8, kv_cache_dtype="fp8")  # fmt: skip
    assert ours == theirs
