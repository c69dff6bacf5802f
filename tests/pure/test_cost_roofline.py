"""The roofline cost: fused steps, windows, ranks, and runs that equal their steps bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cost.laws import laws_of
from octavo.cost.roofline import Factor, Factors, RooflineCost
from octavo.cost.step import LinearCost, Scaled, StepShape, run_seconds
from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import Borrowed, Chunked, Component, Constant, Growing, LayerState, Windowed
from octavo.planner.accelerators import device_named
from octavo.planner.roofline import Machine

KV = (Component("k", (2, 8), BF16), Component("v", (2, 8), BF16))


def cost(*layers: LayerState, ranks: int = 1, **machine: float) -> RooflineCost:
    geometry = ModelGeometry(
        model_type="toy", architecture="", layers=layers or (Growing(KV),), kv_dtype=BF16, hidden_size=64,
        num_attention_heads=4,
    )  # fmt: skip
    fields = {"weights_bytes": 2 * 10**9, "parameters": 1e9, "active_parameters": 1e9, "weight_bits": 16} | machine
    return RooflineCost(machine=Machine(accelerator=device_named("h100-sxm"), geometry=geometry, **fields), ranks=ranks)  # type: ignore[arg-type]


ALL = (Growing(KV), Windowed(KV, 40), Chunked(KV, 32), Constant((Component("conv", (64,), BF16),)), Borrowed(0))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=9), st.integers(1, 70), st.sampled_from((1.0, 0.8)))
def test_a_run_costs_what_its_steps_cost_bit_for_bit(positions: list[int], steps: int, factor: float) -> None:
    for model in (cost(*ALL), cost(*ALL, parameters=9e9), LinearCost(), Scaled(cost(*ALL), factor)):
        shape = StepShape.decode(positions)
        singly = [model.step_seconds(shape.later(step)) for step in range(steps)]
        assert run_seconds(model, shape, steps).tolist() == singly


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200), st.integers(1, 90))
def test_positions_read_and_pairs_met_are_those_counted_one_by_one(start: int, count: int) -> None:
    reach = {"full": lambda p: p + 1, "window": lambda p: min(p + 1, 40), "chunk": lambda p: p % 32 + 1}
    lowest = {"full": lambda p: 0, "window": lambda p: max(0, p - 39), "chunk": lambda p: p // 32 * 32}
    starts, counts = np.array([start]), np.array([count])
    for law in laws_of(cost(*ALL).machine.geometry):
        if law.kind == "constant":
            continue
        queries = range(start, start + count)
        assert law.pairs(starts, counts).tolist() == [sum(reach[law.kind](p) for p in queries)]
        assert law.read(starts, counts).tolist() == [start + count - lowest[law.kind](start)]


def test_a_borrowed_layer_reads_again_and_writes_nothing() -> None:
    full = next(law for law in laws_of(cost(*ALL).machine.geometry) if law.kind == "full")
    per_layer = Growing(KV).bytes_per_token
    assert (full.bytes_per_position, full.written_bytes) == (2 * per_layer, per_layer)
    assert full.flops_per_pair == 2 * (2 * 4 * 16)


def test_a_fused_step_costs_less_than_its_parts_one_after_the_other() -> None:
    model = cost()
    prompt, decode = StepShape.from_chunks([0], [64], 1), StepShape.decode([500] * 16)
    fused = StepShape.from_chunks([0, *[500] * 16], [64, *[1] * 16], 17)
    parts = model.step_seconds(prompt) + model.step_seconds(decode)
    assert max(model.step_seconds(prompt), model.step_seconds(decode)) <= model.step_seconds(fused) < 0.6 * parts


def test_one_token_takes_the_time_of_reading_the_weights() -> None:
    free = Factor(0.0, "test")
    one = Factor(1.0, "test")
    model = replace(cost(), factors=Factors(weight_bandwidth=one, layer_s=free))
    assert model.step_seconds(StepShape.decode([0])) == pytest.approx(2e9 / 3350e9, rel=1e-3)


def test_of_experts_only_those_that_are_gone_to_are_read() -> None:
    model = cost(active_parameters=1e8)
    few, many = (model.step_seconds(StepShape.decode([9] * n)) for n in (1, 200))
    assert few < many / 4


def test_ranks_exchange_activations_and_need_a_link() -> None:
    shape = StepShape.from_chunks([0], [2048], 1)
    assert cost(ranks=2).step_seconds(shape) < cost(ranks=8).step_seconds(shape)
    assert cost().step_seconds(shape) < cost(ranks=2).step_seconds(shape)
    alone = replace(cost().machine, accelerator=device_named("rtx-4090"))
    with pytest.raises(ConfigError, match="link"):
        RooflineCost(machine=alone, ranks=2)


def test_every_factor_says_where_it_is_from() -> None:
    factors = Factors()
    named = [getattr(factors, name) for name in Factors.__dataclass_fields__ if "interval" not in name]
    assert all(factor.source and factor.value > 0 for factor in named)
    assert "kernel timings" in factors.interval_source


def test_a_step_has_an_interval_around_its_seconds_and_the_hosts() -> None:
    shape = StepShape.decode([100, 200])
    seconds = cost().step_seconds(shape) + cost().host_seconds(shape)
    low, high = cost().step_interval(shape)
    assert (low / seconds, high / seconds) == pytest.approx(cost().interval)


def test_state_whose_time_is_not_modelled_is_refused() -> None:
    with pytest.raises(ConfigError, match="not modelled yet"):
        cost(Growing(KV, read_tokens=8))
