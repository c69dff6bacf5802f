"""Products whose first half is activated and multiplied with the second as they are made."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.cpu import load_native
from octavo.kernels.layer import NUMBERS, Act
from octavo.kernels.linear import PackedLinear, linear_instruction_sets

SETS = linear_instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason="the native kernels were not built")

LAYERS = {"avx512dot": "avx512"}
"""Small operations of the same vectors, where they have another name."""
TYPES = [torch.float32, torch.bfloat16]


def random(count, width, dtype, seed):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed_matrix(instruction_set, dtype, outputs, inputs, bias):
    weight = random(outputs, inputs, dtype, 1) / inputs**0.5
    biases = (random(1, outputs, dtype, 2)[0],) if bias else ()
    return PackedLinear([weight], biases, instruction_set=instruction_set, threads=2)


def gated(packed, x, act, threads=2):
    out = torch.full((x.shape[0], packed.out_features // 2), float("nan"), dtype=x.dtype)
    packed.native.run_gated(
        x.data_ptr(), NUMBERS[x.dtype], x.stride(0), x.shape[0], out.data_ptr(), out.stride(0), act, threads
    )
    return out


def afterwards(packed, x, act):
    layers = load_native().Layers(LAYERS.get(packed.instruction_set, packed.instruction_set))
    both = packed(x)
    out = torch.empty((x.shape[0], packed.out_features // 2), dtype=x.dtype)
    layers.gate(act, NUMBERS[x.dtype], True, out.shape[1], both.data_ptr(), out.data_ptr(), x.shape[0], 1)
    return out


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [31, 576, 1100])
def test_gating_gives_the_bits_of_gating_afterwards(instruction_set, dtype, inputs):
    packed = packed_matrix(instruction_set, dtype, 192, inputs, bias=inputs == 576)
    if not packed.native.gates(NUMBERS[dtype]):
        pytest.skip("these rows are gated afterwards")
    for act in Act:
        for rows in (1, 2, 3, 12, 13, 200):
            x = random(rows, inputs, dtype, rows)
            assert torch.equal(gated(packed, x, act), afterwards(packed, x, act)), (act, rows)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_gated_row_does_not_depend_on_those_beside_it(dtype):
    packed = packed_matrix(SETS[0], dtype, 128, 1100, bias=False)
    if not packed.native.gates(NUMBERS[dtype]):
        pytest.skip("these rows are gated afterwards")
    x = random(40, 1100, dtype, 5)
    together = gated(packed, x, Act.SILU)
    for first, count in ((0, 1), (7, 2), (11, 5), (20, 20)):
        assert torch.equal(gated(packed, x[first : first + count], Act.SILU, 1), together[first : first + count])


def test_halves_that_are_not_whole_panels_and_rounded_weights_are_gated_afterwards():
    assert packed_matrix(SETS[0], torch.float32, 192, 16, bias=False).native.gates(NUMBERS[torch.float32])
    assert not packed_matrix(SETS[0], torch.float32, 194, 16, bias=False).native.gates(NUMBERS[torch.float32])
    small = PackedLinear([random(192, 64, torch.bfloat16, 1)], storage=torch.int8)
    assert not small.native.gates(NUMBERS[torch.bfloat16])
    x = random(2, 64, torch.bfloat16, 3)
    with pytest.raises(ValueError, match="does not gate"):
        gated(small, x, Act.SILU)
