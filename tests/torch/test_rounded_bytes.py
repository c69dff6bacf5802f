"""What the planner counts of rounded weights, beside the bytes that the engine holds once it has packed them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import COMMON, MOE
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.config import Config
from octavo.engine.build import build_engine
from octavo.geometry.dtypes import dtype_named
from octavo.geometry.weights_rounded import packed_bytes, rounded_weights
from octavo.kernels.linear import PackedLinear, linear_instruction_sets
from octavo.models.linear import packed_matrices
from octavo.planner.build import plan

pytestmark = pytest.mark.skipif(not linear_instruction_sets(), reason="the native kernels were not built")

WIDE = {"intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "head_dim": 32}
"""Whole panels, so that it is the same to count q, k and v one by one or as the one matrix that they are joined to."""
CASES = {
    "untied": ("llama", "int4", {"tie_word_embeddings": False}),
    "tied": ("llama", "int8", {"tie_word_embeddings": True}),
    "experts": ("qwen2_moe", "int4", {**MOE, "tie_word_embeddings": False}),
    "scaled embedding": ("gemma3_text", "int4", {"tie_word_embeddings": True}),
    "head that is read": ("mamba2", "int8", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2,
                                             "chunk_size": 8, "expand": 2, "tie_word_embeddings": False}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_planner_counts_the_bytes_that_the_engine_holds(case: str, tmp_path: Path) -> None:
    model_type, kind, more = CASES[case]
    torch.manual_seed(0)
    shape: dict[str, Any] = COMMON | WIDE | more
    config = AutoConfig.for_model(model_type, **{name: value for name, value in shape.items() if value is not None})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    limits = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 40}
    asked = {"dtype": "float32", "quantization": kind, "linear_backend": "native", "skip_tokenizer_init": True}
    engine = build_engine(Config.from_kwargs(model=str(tmp_path), block_size=4, **limits, **asked))
    model = engine.core.executor.model
    held: dict[str, int] = {}
    for packed in packed_matrices(model):
        name = str(packed.storage).removeprefix("torch.")
        held[name] = held.get(name, 0) + packed.nbytes
    left = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    engine.close()
    counted = rounded_weights(config.to_dict(), kind, dtype=dtype_named("float32"))
    by_type = dict(counted.by_type)
    biases = 4 * sum(packed.out_features for packed in packed_matrices(model)) if model_type == "qwen2_moe" else 0
    assert {name: by_type[name] for name in held} == held
    assert 0 <= by_type["fp32"] - sum(left.values()) <= biases  # those of fused layers lie in their programs
    made = plan(str(tmp_path), memory="1GiB", quantization=kind, dtype="float32")
    assert made.weights.total_bytes == counted.total_bytes
    assert made.budget is not None
    assert made.budget.by_label["weights"] == counted.total_bytes


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 32), (96, 64), (7, 33), (33, 100)])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_matrix_takes_whole_panels_and_whole_groups(kind: str, outputs: int, inputs: int) -> None:
    packed = PackedLinear([torch.randn(outputs, inputs)], storage=getattr(torch, kind))
    counted = packed_bytes(kind, outputs, inputs)
    if packed.instruction_set.startswith("avx512") or outputs % 32 == 0:
        assert packed.nbytes == counted
    else:
        assert packed.nbytes <= counted
