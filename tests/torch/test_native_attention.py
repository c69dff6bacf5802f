"""The native kernels against attention written out in float64, over random shapes in poisoned memory."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from native import PLAIN, Shape, World

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16, FP8, FP16, FP32, INT8
from octavo.kernels.cpu import NativeAttention, instruction_sets
from octavo.kernels.interface import AttentionRule
from octavo.kernels.quantise import quantise

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason="the native kernels were not built")

DTYPES = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "int8": INT8, "fp8": FP8}


@pytest.fixture(params=SETS)
def backend(request):
    return NativeAttention(request.param)


def worst(out, right):
    error = float((out.double() - right).abs().max())
    return error if math.isfinite(error) else math.inf


def random_rule(random, heads):
    return AttentionRule(
        scale=float(random.choice([0.05, 0.125, 0.3])),
        window=int(random.integers(1, 700)) if random.random() < 0.4 else None,
        softcap=float(random.choice([1.0, 5.0, 50.0])) if random.random() < 0.3 else None,
        sinks=torch.from_numpy(random.normal(size=heads) * 2).float() if random.random() < 0.3 else None,
        chunk_tokens=int(random.integers(1, 900)) if random.random() < 0.2 else None,
    )


def random_shape(random, dtype):
    dim = int(random.choice([32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256]))
    return Shape(
        kv_heads=int(random.integers(1, 4)),
        group=int(random.integers(1, 17)),
        dim=dim,
        v_dim=dim if random.random() < 0.7 else int(random.choice([32, 64, 88, 128])),
        block=int(random.choice([8, 16, 24, 32, 64, 128])),
        dtype=dtype,
    )


def random_chunks(random):
    """Decodes by falling context, then longer chunks: at most about 6000 positions."""
    decodes = sorted((int(random.integers(0, 400)) for _ in range(random.integers(0, 5))), reverse=True)
    if random.random() < 0.4:
        decodes.insert(0, int(random.integers(400, 5000)))
    longer = [
        (int(random.integers(0, 600)), int(random.choice([2, 3, 5, 9, 17, 40, 130])))
        for _ in range(random.integers(0 if decodes else 1, 3))
    ]
    return [*decodes, *(start for start, _ in longer)], [*([1] * len(decodes)), *(count for _, count in longer)]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_ragged_steps_of_random_shapes_equal_attention_in_float64(backend, name, seed):
    random = np.random.default_rng([seed, list(DTYPES).index(name)])
    shape = random_shape(random, DTYPES[name])
    world = World(shape, backend, slots=1000, seed=seed)
    for _ in range(3):
        starts, counts = random_chunks(random)
        rule = random_rule(random, shape.heads)
        assert worst(*world.run(starts, counts, rule)) < 2e-5, (shape, rule, starts, counts)


@pytest.mark.parametrize("rule", [PLAIN, AttentionRule(0.2, window=100), AttentionRule(0.2, softcap=20.0)])
def test_lengths_around_every_edge_of_a_tile_and_a_segment(backend, rule):
    world = World(Shape(kv_heads=1, group=2, dim=32, v_dim=32, block=8), backend, slots=1700)
    contexts = [5000, 4097, 4096, 4095, 1025, 1024, 513, 512, 511, 129, 128, 127, 65, 64, 63, 17, 16, 15, 9, 8, 7, 2, 1]
    for low in range(0, len(contexts), 3):
        group = contexts[low : low + 3]
        assert worst(*world.run([n - 1 for n in group], [1] * len(group), rule)) < 1e-5
    for count in (3, 4, 5, 31, 32, 33, 64, 65, 97, 400):
        assert worst(*world.run([0, 61], [count, count], rule)) < 1e-5


def test_a_long_chunk_over_a_long_context(backend):
    world = World(Shape(kv_heads=1, group=3, dim=64, v_dim=64), backend, slots=400)
    assert worst(*world.run([4500], [300], PLAIN)) < 1e-5


@pytest.mark.parametrize(("q_dtype", "most"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-9)])
def test_half_precision_queries_lose_no_more_than_the_rounding_of_the_output(backend, q_dtype, most):
    for dtype in (BF16, FP16, FP32):
        world = World(Shape(group=4, dtype=dtype, q_dtype=q_dtype), backend, slots=200)
        out, right = world.run([900, 5, 0], [1, 1, 40], PLAIN)
        assert out.dtype is q_dtype
        assert worst(out, right) < most * float(right.abs().max())


@pytest.mark.parametrize("seed", range(8))
def test_bfloat16_queries_over_bfloat16_pages_of_random_shapes(backend, seed):
    """Where the processor has dots of pairs of them; weights may be rounded as the output is."""
    random = np.random.default_rng([seed, 17])
    shape = replace(random_shape(random, BF16), q_dtype=torch.bfloat16)
    world = World(shape, backend, slots=1000, seed=seed)
    for _ in range(3):
        starts, counts = random_chunks(random)
        rule = random_rule(random, shape.heads)
        out, right = world.run(starts, counts, rule)
        assert worst(out, right) < 2**-7 * float(right.abs().max()), (shape, rule, starts, counts)


@pytest.mark.parametrize(("spread", "most"), [(1e-3, 1e-8), (30.0, 0.03)])
def test_scores_of_any_size_neither_overflow_nor_vanish(backend, spread, most):
    """At a spread of 30 scores reach thousands, and their last bit in float32 is worth a thousandth of a weight."""
    world = World(Shape(group=3), backend, slots=200, spread=spread)
    assert worst(*world.run([700, 3, 0], [1, 1, 90], PLAIN)) < most


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 5, 200)])
def test_a_batch_mate_never_changes_a_sequence_and_neither_do_threads(backend, counts):
    shape = Shape(group=3, dtype=BF16, q_dtype=torch.bfloat16)
    world = World(shape, backend, slots=500)
    step, q, k, v = world.step([2300, 1100, 40], counts, PLAIN)
    new = (k.transpose(0, 1)[None], v.transpose(0, 1)[None])
    backend.write(k, v, world.pages, step)
    together = backend.attend(q, new, world.pages, step, PLAIN)
    for threads in (2, 5):
        other = NativeAttention(backend.instruction_set, threads=threads)
        for _ in range(3):
            assert torch.equal(other.attend(q, new, world.pages, step, PLAIN), together)
    for i in range(3):
        span = slice(int(step.offsets[i]), int(step.offsets[i + 1]))
        alone = type(step)(
            block_tokens=step.block_tokens,
            decodes=int(counts[i] == 1),
            rows=step.rows[i : i + 1],
            offsets=np.array([0, counts[i]]),
            starts=step.starts[i : i + 1],
            contexts=step.contexts[i : i + 1],
            tables=step.tables,
            write_blocks=step.write_blocks[span],
            write_offsets=step.write_offsets[span],
        )
        assert torch.equal(backend.attend(q[span], new, world.pages, alone, PLAIN), together[span])


@pytest.mark.parametrize("kept", [Shape(), Shape(dtype=BF16, q_dtype=torch.bfloat16)])
def test_a_nan_in_one_sequence_stays_in_it_and_is_seen(backend, kept):
    for where in ("k", "v"):
        world = World(kept, backend, slots=100)
        step, q, k, v = world.step([200, 150, 0], [1, 1, 60], PLAIN)
        backend.write(k, v, world.pages, step)
        getattr(world.pages, where)[int(step.tables[step.rows[1], 2]), :, 3] = float("nan")
        out = backend.attend(q, (k, v), world.pages, step, PLAIN)
        assert out[1].isnan().all()
        assert out[[0, *range(2, 62)]].isfinite().all()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_is_what_torch_would_write(backend, name, q_dtype):
    shape = Shape(kv_heads=3, dim=40, v_dim=24, dtype=DTYPES[name], q_dtype=q_dtype)
    world = World(shape, backend, slots=60, spread=3.0)
    step, _, k, v = world.step([7, 0], [1, 300], PLAIN)
    k[3], k[5, 1], k[6, 0, 0], v[9] = 0, 1e-6, 60000.0, -0.0
    # as a model hands them over: heads before tokens
    backend.write(k.transpose(0, 1).contiguous().transpose(0, 1), v, world.pages, step)
    for x, pages, scales in ((k, world.pages.k, world.pages.k_scales), (v, world.pages.v, world.pages.v_scales)):
        where = (step.write_blocks, slice(None), step.write_offsets)
        if scales is None:
            assert torch.equal(pages[where], x.to(pages.dtype))
        else:
            values, by = quantise(x, pages.dtype)
            assert torch.equal(scales[where], by)
            assert torch.equal(pages.view(torch.uint8)[where], values.view(torch.uint8))


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_quantised_row_that_is_not_finite_is_read_as_not_finite(backend, name, bad):
    world = World(Shape(dtype=DTYPES[name]), backend, slots=40)
    step, q, k, v = world.step([9, 0], [1, 1], PLAIN)
    v[0, 1, 3] = bad
    backend.write(k, v, world.pages, step)
    out = backend.attend(q, (k, v), world.pages, step, PLAIN)
    assert not out[0, 3:].isfinite().any()
    assert out[0, :3].isfinite().all()
    assert out[1].isfinite().all()


def test_what_does_not_fit_is_refused_before_memory_is_touched(backend):
    world = World(Shape(), backend, slots=40)
    step, q, k, v = world.step([9, 0], [1, 5], PLAIN)
    with pytest.raises(ConfigError, match="query"):
        backend.attend(q[:, :5], (k, v), world.pages, step, PLAIN)
    with pytest.raises(ConfigError, match="float64"):
        backend.attend(q.double(), (k, v), world.pages, step, PLAIN)
    with pytest.raises(ConfigError, match="key"):
        backend.write(k[..., :8], v, world.pages, step)
    with pytest.raises(ConfigError, match="sinks"):
        backend.attend(q, (k, v), world.pages, step, AttentionRule(1.0, sinks=torch.zeros(2)))
    step.write_blocks[2] = 10**6
    with pytest.raises(ValueError, match="outside the pages"):
        backend.write(k, v, world.pages, step)
    step.memo.clear()
    step.tables[step.rows[1]] = 10**6
    with pytest.raises(ValueError, match="other pages"):
        backend.attend(q, (k, v), world.pages, step, PLAIN)


def test_a_stale_table_entry_below_the_window_is_never_followed(backend):
    world = World(Shape(), backend, slots=60)
    rule = AttentionRule(0.125, window=20)
    step, q, k, v = world.step([400], [1], rule)
    assert (step.tables[step.rows[0], :20] < 0).all()
    backend.write(k, v, world.pages, step)
    assert backend.attend(q, (k, v), world.pages, step, rule).isfinite().all()
    with pytest.raises(ValueError, match="negative"):
        backend.attend(q, (k, v), world.pages, step, PLAIN)
