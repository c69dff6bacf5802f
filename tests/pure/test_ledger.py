"""The ledger: sums that are exact, formulas that say what they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16, FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.planner.ledger import (
    RUNTIME_LINES,
    Ledger,
    Line,
    StepLimits,
    kv_basis,
    make_ledger,
    predict_runtime,
)

GEOMETRY = geometry_from_config(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
    },
    BF16,
)
LIMITS = StepLimits(
    max_num_batched_tokens=128,
    max_num_seqs=8,
    max_model_len=512,
    block_tokens=16,
    kv_blocks=100,
    compute_dtype=BF16,
    device="cpu",
    process_bytes=12345,
)


def predicted(limits: StepLimits = LIMITS) -> dict[str, int]:
    return {line.label: line.predicted_bytes for line in predict_runtime(GEOMETRY, limits)}


def test_every_runtime_line_is_there_with_its_formula() -> None:
    lines = predict_runtime(GEOMETRY, LIMITS)
    assert tuple(line.label for line in lines) == RUNTIME_LINES
    assert all(line.basis for line in lines)


def test_the_formulas_are_what_they_say() -> None:
    lines = predicted()
    # four of the residual's 64, cosine and sine of 16, and the MLP's three of 160, which are wider than attention's
    # 2 x 64 + 2 x 32; on CPU twice that
    assert lines["temporary buffers"] == 128 * (4 * 64 + 2 * 16 + 3 * 160) * 2 * 2
    # as the model makes them and in float32, and all 8 rows sorted
    assert lines["logits"] == 8 * 1000 * (2 + 4) + 8 * 1000 * 68
    # one layer keeps 2 x 2 x 16 values a token; the mask is 128 queries by 512 positions
    tile = 8 * 512 * (2 * 2 * 16 * 2)
    assert lines["attention workspace"] == tile * 5 // 4 + 128 * 512 * 2
    # 8 rows x 32 blocks in two tables, token ids of 8 x 512 positions capped by the pool's 1600, columns
    assert lines["block tables and token columns"] == 2 * 8 * 32 * 4 + 1600 * 4 + 8 * 256
    assert lines["allocator metadata"] == 100 * 32
    assert lines["other engine state"] == 12345
    assert lines["kernels"] == lines["graph captures"] == 0


def test_the_sampler_sorts_no_more_rows_at_a_time_than_it_has_room_for() -> None:
    lines = predicted(replace(LIMITS, max_num_batched_tokens=4096, max_num_seqs=4096, compute_dtype=FP32))
    assert lines["logits"] == 4096 * 1000 * 4 + 2**20 // 1000 * 1000 * 68


def test_the_workspace_is_a_tile_or_the_longest_sequence_whichever_is_larger() -> None:
    token = 2 * 2 * 16 * 2
    many_short = predicted(replace(LIMITS, max_num_seqs=128, max_model_len=512))
    assert many_short["attention workspace"] == 3 * 2**20 * 5 // 4 + 128 * 512 * 2
    long = 10**6
    assert predicted(replace(LIMITS, max_model_len=long))["attention workspace"] == long * (token * 5 // 4 + 128 * 2)


def test_a_gpu_pays_for_its_context() -> None:
    assert predicted(replace(LIMITS, device="cuda"))["kernels"] > 0


@given(
    tokens=st.integers(1, 10_000),
    seqs=st.integers(1, 1000),
    length=st.integers(1, 100_000),
    blocks=st.integers(0, 10_000),
)
def test_a_larger_step_never_needs_less(tokens: int, seqs: int, length: int, blocks: int) -> None:
    small = replace(LIMITS, max_num_batched_tokens=tokens, max_num_seqs=seqs, max_model_len=length, kv_blocks=blocks)
    large = replace(
        small,
        max_num_batched_tokens=tokens + 1,
        max_num_seqs=seqs + 1,
        max_model_len=length + 1,
        kv_blocks=blocks + 1,
    )
    before, after = predicted(small), predicted(large)
    assert all(before[label] <= after[label] for label in before)


@given(st.lists(st.integers(0, 2**50), min_size=4, max_size=4))
def test_the_total_is_exactly_the_sum_of_its_lines(sizes: list[int]) -> None:
    weights, other, kv, headroom = sizes
    runtime = (*predict_runtime(GEOMETRY, LIMITS), Line("more", other, "a test"))
    ledger = make_ledger(GEOMETRY, weights_bytes=weights, runtime=runtime, kv_bytes=kv, headroom_bytes=headroom)
    assert ledger.total_bytes == weights + ledger.runtime_bytes + kv + headroom
    assert ledger.total_bytes == sum(line.predicted_bytes for line in ledger.lines)


def make() -> Ledger:
    runtime = predict_runtime(GEOMETRY, LIMITS)
    return make_ledger(GEOMETRY, weights_bytes=1000, runtime=runtime, kv_bytes=5000, headroom_bytes=7)


def test_measured_stands_beside_predicted() -> None:
    ledger = make()
    assert ledger.measured_total_bytes is None
    found = ledger.measured({"weights": 1100, "logits": 5})
    assert found.weights.predicted_bytes == 1000
    assert found.weights.measured_bytes == 1100
    assert found.total_bytes == ledger.total_bytes
    assert found.measured_total_bytes == ledger.total_bytes + 100 + 5 - predicted()["logits"]
    assert ledger.weights.measured_bytes is None, "a ledger is a value"


def test_measuring_what_is_no_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="no line of the ledger"):
        make().measured({"wieghts": 1})


def test_bytes_below_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 bytes or more"):
        Line("x", -1, "a test")
    with pytest.raises(ConfigError, match="0 bytes or more"):
        make().measured({"weights": -1})


def test_the_kv_line_says_what_it_excludes_and_what_windows_give_up() -> None:
    assert "excludes weights, runtime and headroom" in kv_basis(GEOMETRY)
    assert "window" not in kv_basis(GEOMETRY)
    windows = geometry_from_config({"model_type": "gpt_oss", "num_hidden_layers": 2}, BF16)
    assert "2,048 B of a token are in window or chunk layers" in kv_basis(windows)
    assert "given up once nothing can read them" in kv_basis(windows)
