"""What running is estimated to take: per layer, of sampled rows, bounded by a step, and once on every device.

Expected figures are computed by hand from the formulas' own terms, or are what engines printed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.pure.planner_shapes import GIB, GPT_OSS, LLAMA_8B, QWEN_35_27B

from octavo.geometry.dtypes import BF16
from octavo.geometry.from_config import geometry_from_config
from octavo.planner.against import explain
from octavo.planner.asked import Asked
from octavo.planner.build import plan
from octavo.planner.engines import engine_named
from octavo.planner.largest_step import first_rank_samples, largest_step
from octavo.planner.ledger import Line, StepLimits
from octavo.planner.values import Plan

OSS = GPT_OSS | {
    "intermediate_size": 2880,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    },
}


def step(config: dict[str, Any], engine: str = "vllm", **limits: int) -> Line:
    given = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "max_model_len": 8192, "block_tokens": 16,
             "kv_blocks": 0} | limits  # fmt: skip
    return largest_step(
        engine_named(engine), geometry_from_config(config, BF16), StepLimits(**given, compute_dtype=BF16, device="cuda")
    )


def lines(made: Plan) -> dict[str, int]:
    assert made.budget is not None
    return {line.label: line.predicted_bytes for line in made.budget.runtime}


def test_a_long_step_is_bounded_by_one_layer_and_never_by_all_of_them() -> None:
    """Printed for 29,000 tokens of an 8B: 2.99 GiB; three of the residual's width and three of the MLP's."""
    found = step(LLAMA_8B, "vllm-0.6.4", max_num_batched_tokens=29_000)
    assert found.predicted_bytes == 29_000 * (3 * 4096 + 3 * 14336) * 2
    assert found.predicted_bytes / GIB == pytest.approx(2.99, abs=0.005)
    more_layers = step(LLAMA_8B | {"num_hidden_layers": 64}, "vllm-0.6.4", max_num_batched_tokens=29_000)
    assert more_layers.predicted_bytes == found.predicted_bytes


def test_a_layer_and_sampling_are_not_added_up() -> None:
    """Printed for 8,192 tokens and 256 sampled rows of an 8B: 1.26 GiB; their sum would be 2.1."""
    found = step(LLAMA_8B, "vllm-0.6.5", max_num_batched_tokens=8192)
    assert found.predicted_bytes == 256 * 128_256 * 38 + 8192 * 4096 * 2
    assert found.predicted_bytes / GIB == pytest.approx(1.26, rel=0.03)
    assert "sampling" in found.basis


def test_logits_are_those_of_sampled_rows_and_not_of_a_steps_tokens() -> None:
    few, many = (step(LLAMA_8B, max_num_seqs=128, max_num_batched_tokens=n).predicted_bytes for n in (128, 2048))
    assert many - few == (2048 - 128) * 4096 * 2  # only the hidden states grow
    assert step(LLAMA_8B, max_num_seqs=4096, max_num_batched_tokens=512) == step(
        LLAMA_8B, max_num_seqs=512, max_num_batched_tokens=512
    )  # no more rows than tokens


def test_of_experts_only_those_that_a_token_is_sent_to_have_activations() -> None:
    wide = {"max_num_seqs": 1, "max_num_batched_tokens": 8192}
    assert step(OSS, **wide).predicted_bytes == 8192 * (3 * 2880 + 3 * 4 * 2880) * 2
    assert step(OSS | {"num_local_experts": 256}, **wide) == step(OSS, **wide)


def test_llama_cpp_computes_in_float32_and_logits_of_a_micro_batch() -> None:
    """Printed for an 8B of this shape: a compute buffer of 258.5 MiB."""
    found = step(LLAMA_8B, "llamacpp", max_num_batched_tokens=512)
    assert found.predicted_bytes == 512 * (128_256 + 4096) * 4 == int(258.5 * 2**20)


def test_what_is_left_of_an_h100_beside_gpt_oss_120b_is_what_vllm_printed() -> None:
    """Printed: 1.71 GiB. Experts grow by padding, and 1,024 rows are sampled in the profile."""
    made = plan(OSS, device="h100-sxm", engine="vllm-0.11", utilization=0.95, max_num_batched_tokens=1024)
    assert made.max_num_seqs == 1024
    assert lines(made)["largest step"] == 1024 * 201_088 * 38 + 1024 * 2880 * 2
    experts = 36 * 128 * (3072 * 2 * 2944 + 2944 * 3072 - 3 * 2880 * 2880)
    plain = plan(OSS, device="h100-sxm")
    assert (made.weights.device_bytes or 0) - (plain.weights.device_bytes or 0) == experts * 17 // 32
    assert made.budget is not None
    assert made.budget.kv.predicted_bytes / GIB == pytest.approx(1.71, abs=0.25)


@pytest.mark.parametrize(
    ("engine", "device", "rows"),
    [("vllm-0.11", "h100-sxm", 1024), ("vllm-0.11", "a100-sxm4-80gb", 256), ("vllm-0.7", "h100-sxm", 256),
     ("vllm-0.11", "l40s", 256), ("octavo", "h100-sxm", 256)],
)  # fmt: skip
def test_sequences_at_once_are_the_engines_own_default(engine: str, device: str, rows: int) -> None:
    assert plan(LLAMA_8B, engine=engine, device=device).max_num_seqs == rows


# -- several devices: nothing is pooled -----------------------------------------------------------


@pytest.mark.parametrize("engine", ["octavo", "vllm-0.11", "sglang", "trtllm"])
def test_activations_are_charged_on_every_tensor_rank_whole(engine: str) -> None:
    """Not once for all ranks, and not a share of it on each."""
    plans = [plan(LLAMA_8B, device="h100-sxm", engine=engine, tp=ranks) for ranks in (1, 2, 4)]
    one, *more = [{k: v for k, v in lines(made).items() if k not in PER_BLOCK} for made in plans]
    for found in more:
        assert {k: v for k, v in found.items() if k != "communication"} == one
        assert found["communication"] > 0


PER_BLOCK = ("block tables and token columns", "allocator metadata")
"""Lines that depend on how many blocks there are."""


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_five_gb_of_activations_are_taken_from_each_of_identical_devices(ranks: int) -> None:
    """80 GB devices at 0.9, 5 GB of activations and 16 GB of weights: every rank has 67 - 16 / ranks for KV."""
    made = plan(LLAMA_8B, memory=80 * 10**9, weights_bytes=16 * 10**9 // ranks, runtime_bytes=5 * 10**9, tp=ranks)
    assert made.budget is not None
    assert made.capacity is not None
    block = 16 * 131_072 // ranks
    left = 72 * 10**9 - 5 * 10**9 - 16 * 10**9 // ranks
    assert made.budget.kv.predicted_bytes == left // block * block
    assert made.capacity.tokens == left // block * 16
    assert sum(made.budget.by_label.values()) == 80 * 10**9


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_more_devices_never_give_one_device_more_than_its_own_memory(tp: int, pp: int) -> None:
    made = plan(LLAMA_8B, device="h100-sxm", tp=tp, pp=pp)
    assert made.budget is not None
    assert made.memory_bytes is not None
    parts = made.budget
    assert parts.kv.predicted_bytes + parts.runtime_bytes + parts.weights.predicted_bytes <= 0.9 * made.memory_bytes


# -- the rank that samples ------------------------------------------------------------------------

QUOTED = """
INFO worker.py:267] model weights take 13.95GiB; non_torch_memory takes 0.25GiB; PyTorch activation peak memory takes \
0.19GiB; the rest of the memory reserved for KV Cache is 8.69GiB.
INFO GPU KV cache size: 81,536 tokens
INFO Maximum concurrency for 131072 tokens per request: 0.62x
vLLM API server version 0.7.3 tensor_parallel_size=2 gpu_memory_utilization=0.98
"""
QWEN_14B = LLAMA_8B | {
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "vocab_size": 152_064,
    "head_dim": 128,
}


def test_a_log_that_quotes_a_rank_that_does_not_sample_is_explained_by_the_one_that_does(tmp_path: Path) -> None:
    """256 x 152,064 x 38 + 2,048 x 5,120 x 2 B less 0.19 GiB: 1.207 GiB less than the rank that was quoted."""
    file = tmp_path / "start.log"
    file.write_text(QUOTED)
    steps = {s["what"]: s for s in explain(QWEN_14B, Asked.of(), str(file))["steps"]}
    assert steps["sampling on the first rank"]["predicted"] / GIB == pytest.approx(1.207, abs=0.002)
    assert abs(steps["tokens"]["unexplained"]) < 0.01


def test_ranks_that_all_sample_or_state_it_differ_in_nothing() -> None:
    geometry = geometry_from_config(QWEN_14B, BF16)
    limits = StepLimits(max_num_batched_tokens=2048, max_num_seqs=256, max_model_len=8192, block_tokens=16,
                        kv_blocks=0, compute_dtype=BF16, device="cuda")  # fmt: skip
    old, new = engine_named("vllm-0.7"), engine_named("vllm-0.11")
    assert first_rank_samples(old, 2, geometry, limits, 0.19 * GIB) > GIB
    assert first_rank_samples(old, 1, geometry, limits, 0.19 * GIB) == 0
    assert first_rank_samples(old, 2, geometry, limits, 1.5 * GIB) == 0
    assert first_rank_samples(new, 2, geometry, limits, 0.19 * GIB) == 0
    assert first_rank_samples(old, 2, replace(geometry, vocab_size=None), limits, 0.0) == 0


def test_llama_cpp_gives_an_index_values_too_where_there_are_values() -> None:
    """Printed for 12 layers of 2 heads of 256 and an index of 128 at 262,144 cells: 6,144 and 2,304 MiB."""
    config = {"model_type": "", "hidden_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16,
              "num_key_value_heads": 2, "head_dim": 256, "index_head_dim": 128, "index_topk": 2048,
              "layer_types": ["indexed_attention"] * 12}  # fmt: skip
    made = plan(config, engine="llamacpp", context=262_144)
    assert made.sequence_bytes_per_device[262_144] == (6144 + 2304) * 2**20
    assert plan(config, context=262_144).sequence_bytes[262_144] == (6144 + 768) * 2**20  # what is needed


def test_tables_hold_all_tokens_that_fit_where_a_slab_makes_many_blocks() -> None:
    """The first group's slab is one recurrent state, of which the growing group makes many blocks."""
    made = plan(QWEN_35_27B, device="h100-sxm", context=32768)
    assert made.capacity is not None
    assert made.capacity.block_bytes > 2 * made.capacity.page_bytes
    assert lines(made)["block tables and token columns"] > 4 * made.capacity.tokens + 2 * 256 * (32768 // 16) * 4
