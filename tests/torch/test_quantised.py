"""Eight-bit keys and values: what a row becomes, where it lies, and that nothing but the row decides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.geometry.dtypes import FP8, FP32, INT8
from octavo.geometry.state import Component, Growing
from octavo.kernels.quantise import LARGEST, dequantise, quantise
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.runtime.arena import QUANTISED, Arena

ERROR = {torch.int8: 0.5 / 127 + 1e-6, torch.float8_e4m3fn: 2**-4 + 1e-6}
"""Of an element: for int8 as a share of its row's largest, for fp8 as a share of itself."""


@pytest.fixture(params=LARGEST, ids=str)
def dtype(request):
    return request.param


def rows(seed=0, spread=8.0):
    generator = torch.Generator().manual_seed(seed)
    plain = torch.randn(40, 3, 24, generator=generator)
    return plain * torch.exp(spread * torch.randn(40, 3, 1, generator=generator))


def test_an_element_is_off_by_no_more_than_its_type_allows(dtype):
    x = rows()
    back = dequantise(*quantise(x, dtype))
    largest = x.abs().amax(-1, keepdim=True)
    allowed = largest if dtype == torch.int8 else torch.maximum(x.abs(), largest * 2**-6 / 448)
    assert ((back - x).abs() <= ERROR[dtype] * allowed).all()
    assert not torch.equal(back, x)


def test_the_largest_of_a_row_is_kept_to_the_last_bits(dtype):
    x = rows()
    back = dequantise(*quantise(x, dtype))
    assert torch.allclose(back.abs().amax(-1), x.abs().amax(-1), rtol=1e-6)


def test_a_row_of_zeros_stays_zeros_and_the_smallest_numbers_do_no_harm(dtype):
    x = torch.zeros(3, 8)
    x[1] = 1e-44
    x[2, 3] = 2e-38
    back = dequantise(*quantise(x, dtype))
    assert (back[0] == 0).all()
    assert (back - x).abs().max() < 1e-38


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_comes_back_not_finite_and_alone(dtype, bad):
    x = rows()
    right = dequantise(*quantise(x, dtype))
    x[5, 1, 3] = bad
    back = dequantise(*quantise(x, dtype))
    assert not torch.isfinite(back[5, 1]).any()
    back[5, 1] = right[5, 1]
    assert torch.equal(back, right)


def test_what_was_rounded_once_is_rounded_no_further(dtype):
    once = dequantise(*quantise(rows(), dtype))
    assert torch.allclose(dequantise(*quantise(once, dtype)), once, rtol=1e-6, atol=0)


def test_a_row_is_rounded_alike_in_every_batch(dtype):
    x = rows()
    values, scales = quantise(x, dtype)
    for i in (0, 7, 39):
        one_values, one_scales = quantise(x[i : i + 1], dtype)
        assert torch.equal(one_values.view(torch.int8)[0], values.view(torch.int8)[i])
        assert torch.equal(one_scales[0], scales[i])


def test_every_eight_bit_float_is_read_as_torch_reads_it():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = torch.isfinite(codes.float())
    assert int(finite.sum()) == 254
    read = dequantise(codes[:, None], torch.ones(256))[:, 0]
    assert torch.equal(read[finite], codes.float()[finite])


def layout(kind, block_tokens=4, heads=2, dim=6, order="tokens_heads"):
    components = (Component("k", (heads, dim), kind), Component("v", (heads, dim + 2), kind))
    return make_layout(served_groups([Growing(components)] * 3), block_tokens, order)


@pytest.mark.parametrize("order", ["tokens_heads", "heads_tokens"])
@pytest.mark.parametrize("kind", [INT8, FP8], ids=str)
def test_values_and_scales_fill_a_block_to_its_last_byte_and_never_overlap(kind, order):
    made = layout(kind, order=order)
    group = made.groups[0]
    token_bytes = 3 * 2 * ((6 + 4) + (8 + 4))
    assert group.block_bytes == 4 * token_bytes
    arena = Arena(made, 5)
    counts = np.zeros(arena.bytes.numel(), np.int64)
    for layer in range(3):
        pages = arena.pages(layer)
        assert pages.quantised
        assert pages.k.dtype == QUANTISED[kind.name]
        assert pages.token_bytes == token_bytes // 3
        for part in (pages.k, pages.k_scales, pages.v, pages.v_scales):
            arena.bytes.zero_()
            part[2].view(torch.uint8).fill_(1) if part.dtype != torch.float32 else part[2].view(torch.int32).fill_(
                0x01010101
            )
            counts += arena.bytes.numpy()
    start = 2 * group.block_bytes
    assert (counts[start : start + group.block_bytes] == 1).all()
    assert counts.sum() == group.block_bytes


@pytest.mark.parametrize("order", ["tokens_heads", "heads_tokens"])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_clearing_positions_clears_their_scales_and_no_others(first, order):
    arena = Arena(layout(INT8, order=order), 3)
    arena.bytes.fill_(0xFF)
    arena.clear(0, 1, first)
    for layer in range(3):
        pages = arena.pages(layer)
        for part in (pages.k, pages.k_scales, pages.v, pages.v_scales):
            block = part[1] if order == "tokens_heads" else part[1].transpose(0, 1)
            assert (block[first:] == 0).all()
            assert (block[:first] != 0).all()
            assert (part[0] != 0).all()
    cleared = 3 * 2 * (6 + 4 + 8 + 4) * (4 - first)
    assert int((arena.bytes == 0).sum()) == cleared


def test_blocks_in_which_scales_cannot_be_aligned_are_refused():
    with pytest.raises(ConfigError, match="use a multiple of 4") as caught:
        Arena(layout(INT8, block_tokens=3, heads=1, dim=5), 2).pages(0)
    assert caught.value.field == "block_size"


def test_plain_pages_have_no_scales():
    pages = Arena(layout(FP32), 2).pages(0)
    assert not pages.quantised
    assert pages.v_scales is None
