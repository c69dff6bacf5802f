"""Decodes whose tables begin with the same blocks: read together by the native kernels, to the same bits as apart."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from native import PLAIN, Shape, World

from octavo.geometry.dtypes import BF16, FP8, FP16, FP32, INT8
from octavo.kernels.cpu import NativeAttention, instruction_sets
from octavo.kernels.interface import AttentionRule

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason="the native kernels were not built")

DTYPES = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "int8": INT8, "fp8": FP8}
RULES = {
    "plain": PLAIN,
    "window": AttentionRule(0.125, window=333),
    "chunks": AttentionRule(0.125, chunk_tokens=300),
    "all": AttentionRule(0.1, window=700, softcap=20.0, sinks=torch.linspace(-2.0, 3.0, 32)),
}


@pytest.fixture(params=SETS)
def backend(request):
    return NativeAttention(request.param)


def rule_for(name, heads):
    rule = RULES[name]
    return rule if rule.sinks is None else replace(rule, sinks=rule.sinks[:heads])


def worst(out, right):
    error = float((out.double() - right).abs().max())
    return error if math.isfinite(error) else math.inf


def alone(step, i):
    """The step of chunk i and nobody else."""
    span = slice(int(step.offsets[i]), int(step.offsets[i + 1]))
    count = span.stop - span.start
    only = {name: getattr(step, name)[i : i + 1] for name in ("rows", "starts", "contexts")}
    writes = {name: getattr(step, name)[span] for name in ("write_blocks", "write_offsets")}
    return span, replace(step, decodes=int(count == 1), offsets=np.array([0, count]), memo={}, **only, **writes)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_decodes_that_share_a_prefix_equal_attention_in_float64(backend, name, rule):
    random = np.random.default_rng(list(DTYPES).index(name))
    for shape in (
        Shape(kv_heads=2, group=3, dtype=DTYPES[name]),
        Shape(kv_heads=1, group=int(random.integers(1, 9)), dim=40, v_dim=72, block=24, dtype=DTYPES[name]),
    ):
        world = World(shape, backend, slots=600, seed=3)
        starts = np.sort(random.integers(300, 1200, size=12))[::-1]
        shared = random.choice([0, 200, 290, 700, 1100], size=12)  # some share nothing, others more than others
        starts, counts = [*starts, 350], [*([1] * 12), 40]  # and a longer chunk shares with them
        assert worst(*world.run(starts, counts, rule_for(rule, shape.heads), shared=[*shared, 320])) < 2e-5, shape


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("rule", ["plain", "all"])
def test_what_is_shared_and_with_how_many_never_changes_a_bit(backend, name, rule, q_dtype):
    shape = Shape(kv_heads=2, group=3, dtype=DTYPES[name], q_dtype=q_dtype)
    world = World(shape, backend, slots=900, seed=5)
    chosen = rule_for(rule, shape.heads)
    starts = [1300, 1250, 1200, 1111, *([1100] * 20), 900, 5]
    shared = [1040, 1040, 1040, 600, *([1040] * 20), 880, 0]
    step, q, k, v = world.step(starts, [1] * len(starts), chosen, shared=shared)
    backend.write(k, v, world.pages, step)
    new = (k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    together = backend.attend(q, new, world.pages, step, chosen)
    plan = backend.plan(step, chosen, shape.group, shape.kv_heads)
    assert plan.tasks < plan.items * 2 // 3
    for i in (0, 3, 10, 23, 24, 25):
        span, only = alone(step, i)
        assert torch.equal(backend.attend(q[span], new, world.pages, only, chosen), together[span])
    for threads in (2, 5):
        other = NativeAttention(backend.instruction_set, threads=threads)
        assert torch.equal(other.attend(q, new, world.pages, step, chosen), together)


@pytest.mark.parametrize("rule", RULES)
def test_bfloat16_throughout_loses_no_more_than_rounding_where_decodes_share(backend, rule):
    shape = Shape(kv_heads=2, group=3, dtype=BF16, q_dtype=torch.bfloat16)
    world = World(shape, backend, slots=900, seed=7)
    starts = [1300, 1250, 1200, *([1101] * 15), 900, 5]
    shared = [1040, 1040, 600, *([1040] * 15), 704, 0]
    out, right = world.run(starts, [1] * len(starts), rule_for(rule, shape.heads), shared=shared)
    assert worst(out, right) < 2**-7 * float(right.abs().max())


def test_sequences_that_share_nothing_are_taken_one_by_one(backend):
    world = World(Shape(), backend, slots=500)
    step, *_ = world.step([900, 900, 700, 40], [1] * 4, PLAIN)
    plan = backend.plan(step, PLAIN, 3, 2)
    assert plan.tasks == plan.items


def test_a_window_beyond_the_shared_blocks_shares_nothing(backend):
    world = World(Shape(), backend, slots=500)
    rule = AttentionRule(0.125, window=100)
    step, *_ = world.step([900] * 6, [1] * 6, rule, shared=[640] * 6)
    plan = backend.plan(step, rule, 3, 2)
    assert plan.tasks == plan.items
    assert worst(*world.run([900] * 6, [1] * 6, rule, shared=[640] * 6)) < 1e-5


def test_a_nan_in_what_one_of_them_added_stays_with_it_and_one_in_what_they_share_is_seen_by_all(backend):
    world = World(Shape(), backend, slots=500)
    step, q, k, v = world.step([900] * 6, [1] * 6, PLAIN, shared=[640, 640, 640, 640, 640, 0])
    backend.write(k, v, world.pages, step)
    new = (k, v)
    world.pages.k[int(step.tables[step.rows[1], 50]), :, 3] = float("nan")
    out = backend.attend(q, new, world.pages, step, PLAIN)
    assert out[1].isnan().all()
    assert out[[0, 2, 3, 4, 5]].isfinite().all()
    world.pages.v[int(step.tables[step.rows[0], 20]), :, 3] = float("nan")
    out = backend.attend(q, new, world.pages, step, PLAIN)
    assert out[:5].isnan().all()
    assert out[5].isfinite().all()
