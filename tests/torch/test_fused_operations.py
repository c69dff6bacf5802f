"""The small operations of a fused layer against float64, for every instruction set, type and odd size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from octavo.geometry.dtypes import FP8, FP16, FP32, INT8
from octavo.geometry.state import Component, Growing
from octavo.kernels.cpu import NativeAttention, instruction_sets, load_native
from octavo.kernels.layer import NUMBERS, Act, NormWeights, Rope
from octavo.kernels.quantise import dequantise, quantise
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.runtime.arena import Arena

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native kernels were not built")

TYPES = [torch.float32, torch.bfloat16, torch.float16]
NEAR = {torch.float32: 2e-6, torch.bfloat16: 1.7e-2, torch.float16: 2e-3}
"""Of the largest result: two or three units in the last place."""
WIDTHS = (1, 5, 16, 37, 64, 576)


@pytest.fixture(params=load_native().layer_instruction_sets() if instruction_sets() else ())
def layers(request):
    return load_native().Layers(request.param)


def rows(count, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, width, generator=generator) * 2).to(dtype)


def poisoned(count, width, dtype):
    return torch.full((count, width), float("nan"), dtype=dtype)


def require_near(found, right, dtype):
    assert torch.isfinite(found).all(), "an element was not written"
    apart = (found.double() - right).abs().max()
    assert apart <= NEAR[dtype] * max(1.0, float(right.abs().max())), float(apart)


def normalised(x, norm):
    wide = x.double()
    if norm.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    return wide if norm.bias is None else wide + norm.bias.double()


def a_norm(width, *, centred=False, bias=False, seed=3):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(2, width, generator=generator)
    return NormWeights(made[0].contiguous(), made[1].contiguous() if bias else None, 1e-5, centred, rounds=not centred)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("centred", [False, True])
def test_a_sum_and_its_norm(layers, dtype, width, centred):
    for count in (1, 3, 70):
        x, delta = rows(count, width, dtype), rows(count, width, dtype, 1)
        norm = a_norm(width, centred=centred, bias=centred)
        total, out = poisoned(count, width, dtype), poisoned(count, width, dtype)
        layers.residual(
            NUMBERS[dtype], width, x.data_ptr(), delta.data_ptr(), 0, None, 1.0, total.data_ptr(), norm.native,
            out.data_ptr(), count, 2,
        )  # fmt: skip
        require_near(total, x.double() + delta.double(), dtype)
        if width > 1 or not centred:
            require_near(out, normalised(total, norm), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_added_can_be_normalised_first_scaled_and_two(layers, dtype, width):
    x, delta, second = (rows(9, width, dtype, seed) for seed in (1, 2, 3))
    norm, total = a_norm(width), poisoned(9, width, dtype)
    at = (x.data_ptr(), delta.data_ptr(), second.data_ptr())
    layers.residual(NUMBERS[dtype], width, *at, norm.native, 0.5, total.data_ptr(), None, 0, 9, 1)
    right = x.double() + 0.5 * normalised(delta, norm) + 0.5 * second.double()
    require_near(total, right, dtype)


def test_a_sum_may_be_written_over_its_rows(layers):
    x, delta = rows(5, 40, torch.float32), rows(5, 40, torch.float32, 1)
    right = x.double() + delta.double()
    layers.residual(0, 40, x.data_ptr(), delta.data_ptr(), 0, None, 1.0, x.data_ptr(), None, 0, 5, 1)
    require_near(x, right, torch.float32)


ACTS = {
    Act.SILU: functional.silu,
    Act.GELU: functional.gelu,
    Act.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Act.RELU: functional.relu,
    Act.RELU_SQUARED: lambda x: functional.relu(x).square(),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("act", list(Act))
@pytest.mark.parametrize("gated", [False, True])
def test_activations(layers, dtype, act, gated):
    for count, width in ((1, 1), (3, 37), (60, 200)):
        given = rows(count, width * (2 if gated else 1), dtype) * 3
        out = poisoned(count, width, dtype)
        layers.gate(act, NUMBERS[dtype], gated, width, given.data_ptr(), out.data_ptr(), count, 2)
        right = ACTS[act](given[:, :width].double())
        require_near(out, right * given[:, width:].double() if gated else right, dtype)


@pytest.mark.parametrize("act", list(Act))
def test_activations_far_from_zero_and_not_a_number(layers, act):
    given = torch.tensor([[-1e30, -200.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0, float("nan")]])
    out = poisoned(1, 9, torch.float32)
    layers.gate(act, 0, False, 9, given.data_ptr(), out.data_ptr(), 1, 1)
    right = ACTS[act](given.double())
    assert torch.isnan(out[0, 8])
    assert torch.allclose(out[0, :8].double(), right[0, :8], rtol=1e-5, atol=1e-6)


class Turning:
    """Random rows of heads, tables and pages in which nothing is a number."""

    def __init__(self, dtype, pages_dtype, dim, rotary, entries, tokens=7):
        self.q_heads, self.kv_heads, self.dim, self.v_dim, self.tokens = 6, 2, dim, dim, tokens
        state = Growing(tuple(Component(name, (2, dim), pages_dtype) for name in ("k", "v")))
        layout = make_layout(served_groups((state,)), 4, "heads_tokens")
        self.arena = Arena(layout, 5)
        self.arena.bytes.fill_(0xFF)
        self.pages = self.arena.pages(0)
        self.bound = NativeAttention().bound(self.pages)
        self.rows = rows(tokens, (self.q_heads + 2 * self.kv_heads) * dim, dtype)
        self.given = self.rows.clone()
        self.rotary, self.dtype = rotary, dtype
        angles = torch.rand(tokens, entries, generator=torch.Generator().manual_seed(5)) * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        random = np.random.default_rng(2).permutation(20)[:tokens]
        self.blocks, self.offsets = torch.from_numpy(random // 4), torch.from_numpy(random % 4)

    def turn(self, layers, rope, norms=(None, None)):
        layers.turn(
            self.bound, NUMBERS[self.dtype], self.rows.data_ptr(), self.rows.shape[1], self.q_heads,
            *(None if norm is None else norm.native for norm in norms), rope, self.rotary, 0, self.cos.data_ptr(),
            self.sin.data_ptr(), self.cos.shape[1], False, self.blocks.data_ptr(), self.offsets.data_ptr(),
            self.tokens, 2,
        )  # fmt: skip

    def heads(self, tensor):
        """Queries, keys and values [tokens, heads, dim]."""
        q, kv = self.q_heads * self.dim, self.kv_heads * self.dim
        parts = (tensor[:, :q], tensor[:, q : q + kv], tensor[:, q + kv :])
        return [part.reshape(self.tokens, -1, self.dim) for part in parts]


def turned(x, cos, sin, rope, rotary):
    out = x.double().clone()
    half = rotary // 2
    for i in range(half):
        a, b = (i, i + half) if rope in (Rope.HALVES, Rope.HALVES_PACKED) else (2 * i, 2 * i + 1)
        low, high = (i, i) if rope in (Rope.PAIRS_PACKED, Rope.HALVES_PACKED) else (a, b)
        first, second = x[..., a].double(), x[..., b].double()
        c, s = cos.double()[:, None], sin.double()[:, None]
        out[..., a] = first * c[..., low] - second * s[..., low]
        out[..., b] = second * c[..., high] + first * s[..., high]
    return out


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rope", list(Rope))
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (64, 16), (20, 20), (12, 6), (80, 80)])
def test_heads_are_turned_and_stored(layers, dtype, rope, dim, rotary):
    packed = rope in (Rope.PAIRS_PACKED, Rope.HALVES_PACKED)
    one = Turning(dtype, FP32, dim, 0 if rope is Rope.NONE else rotary, rotary // 2 if packed else rotary)
    one.turn(layers, rope)
    q, k, v = one.heads(one.given)
    right_q, right_k = (turned(x, one.cos, one.sin, rope, one.rotary) for x in (q, k))
    found_q, found_k, found_v = one.heads(one.rows)
    require_near(found_q, right_q, dtype)
    require_near(found_k, right_k, dtype)
    assert torch.equal(found_v, v)
    assert torch.equal(one.pages.k[one.blocks, :, one.offsets], found_k.float())
    assert torch.equal(one.pages.v[one.blocks, :, one.offsets], v.float())
    written = torch.zeros(one.pages.k.shape[0], 4, dtype=torch.bool)
    written[one.blocks, one.offsets] = True
    assert torch.isnan(one.pages.k.transpose(1, 2)[~written]).all(), "more was written than the step's tokens"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [64, 20])
@pytest.mark.parametrize("kind", ["each", "whole", "own weights"])
def test_heads_are_normalised_before_they_are_turned(layers, dtype, dim, kind):
    one = Turning(dtype, FP32, dim, dim, dim)
    shapes = {"each": ((dim,), (dim,)), "whole": ((6 * dim,), (2 * dim,)), "own weights": ((6, dim), (2, dim))}[kind]
    generator = torch.Generator().manual_seed(9)
    norms = [NormWeights(torch.randn(s, generator=generator), None, 1e-6, centred=False, rounds=True) for s in shapes]
    one.turn(layers, Rope.HALVES, norms)
    for found, given, norm in zip(one.heads(one.rows), one.heads(one.given), norms, strict=False):
        shape = (one.tokens, -1) if kind == "whole" else given.shape
        right = normalised(given.reshape(shape), norm).reshape(given.shape)
        require_near(found, turned(right, one.cos, one.sin, Rope.HALVES, dim), dtype)


@pytest.mark.parametrize("kept", [FP16, INT8, FP8])
def test_keys_and_values_are_stored_as_pages_keep_them(layers, kept):
    one = Turning(torch.float32, kept, 64, 64, 64)
    one.turn(layers, Rope.HALVES)
    _, k, v = one.heads(one.rows)
    for found, scales, right in ((one.pages.k, one.pages.k_scales, k), (one.pages.v, one.pages.v_scales, v)):
        at = (one.blocks, slice(None), one.offsets)
        if scales is None:
            assert torch.equal(found[at], right.to(found.dtype))
            continue
        values, by = quantise(right, found.dtype)
        assert torch.equal(found.view(torch.uint8)[at], values.view(torch.uint8))
        assert torch.equal(dequantise(values, scales[at]), dequantise(values, by))


def test_a_token_outside_the_pages_is_refused(layers):
    one = Turning(torch.float32, FP32, 64, 64, 64)
    one.blocks[3] = 5
    with pytest.raises(ValueError, match="packed token 3"):
        one.turn(layers, Rope.HALVES)


def test_a_row_does_not_depend_on_the_rows_beside_it(layers):
    norm = a_norm(576)
    x, delta = rows(300, 576, torch.bfloat16), rows(300, 576, torch.bfloat16, 1)
    outs = []
    for first, count in ((0, 300), (123, 1)):
        out = poisoned(count, 576, torch.bfloat16)
        at = (x[first:].data_ptr(), delta[first:].data_ptr(), 0)
        layers.residual(1, 576, *at, None, 1.0, 0, norm.native, out.data_ptr(), count, 2)
        outs.append(out)
    assert torch.equal(outs[0][123], outs[1][0])
