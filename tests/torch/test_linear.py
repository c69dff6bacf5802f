"""Packed matrices against products written out in float64, over random shapes in every form and instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.kernels.linear import GROUP, PackedLinear, linear_instruction_sets, quantise_groups

SETS = linear_instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason="the native kernels were not built")

STORED = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "int4": torch.int4,
}
LAST_BIT = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of an output: sums of float32, or the rounding of a result."""


@pytest.fixture(params=SETS)
def instruction_set(request):
    return request.param


def held(weight, storage):
    """What packing makes of a matrix, in float64."""
    if storage in (torch.int8, torch.int4):
        whole, scales = quantise_groups(weight, storage)
        scales = scales.double().repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
        return whole * scales[..., 0] + scales[..., 1] if storage is torch.int4 else whole * scales
    return weight.to(storage).double()


def rounded(x):
    """Rows in eight bits, a scale for each group of inputs: what the kernels multiply bytes by."""
    rows, inputs = x.shape
    wide = torch.nn.functional.pad(x.float(), (0, -inputs % GROUP)).view(rows, -1, GROUP)
    scales = wide.abs().amax(2, keepdim=True) / 127
    whole = torch.where(scales > 0, torch.round(wide / scales), 0.0)
    return (whole.double() * scales.double()).view(rows, -1)[:, :inputs]


def seen(packed, x):
    return rounded(x) if packed.rounds_inputs else x.double()


def random_matrix(random, outputs, inputs):
    return torch.from_numpy(random.normal(size=(outputs, inputs)) * random.choice([0.02, 1.0])).float()


def poisoned(rows, columns, dtype):
    return torch.full((rows, columns), float("nan"), dtype=dtype)


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("row_type", LAST_BIT, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_products_of_random_shapes_equal_those_in_float64(instruction_set, name, row_type, seed):
    random = np.random.default_rng([seed, list(STORED).index(name)])
    for rows in (1, int(random.integers(2, 14)), int(random.integers(14, 300))):
        outputs, inputs = int(random.integers(1, 200)), int(random.choice([1, 7, 64, 100, 511, 513, 1030]))
        weight, bias = random_matrix(random, outputs, inputs), torch.from_numpy(random.normal(size=outputs)).float()
        packed = PackedLinear([weight], [bias], storage=STORED[name], instruction_set=instruction_set)
        x = torch.from_numpy(random.normal(size=(rows, inputs))).to(row_type)
        out = poisoned(rows, outputs, row_type)
        packed.into(x, out)
        matrix = held(weight, STORED[name])
        right = seen(packed, x) @ matrix.T + bias.double()
        size = seen(packed, x).abs() @ matrix.T.abs() + bias.double().abs()
        assert bool(((out.double() - right).abs() <= LAST_BIT[row_type] * size + 1e-30).all()), (rows, outputs, inputs)


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("row_type", [torch.float32, torch.bfloat16], ids=str)
def test_neither_batch_mates_nor_threads_change_a_bit_of_a_row(instruction_set, name, row_type):
    random = np.random.default_rng(3)
    weight = random_matrix(random, 150, 1100)
    packed = PackedLinear([weight], storage=STORED[name], instruction_set=instruction_set)
    x = torch.from_numpy(random.normal(size=(70, 1100))).to(row_type)
    alone = poisoned(70, 150, torch.float32)
    for row in range(70):
        packed.into(x[row : row + 1], alone[row : row + 1])
    for threads in (1, 3):
        packed.threads = threads
        for rows in (2, 3, 5, 6, 7, 11, 12, 13, 25, 37, 70):
            together = poisoned(rows, 150, torch.float32)
            packed.into(x[:rows], together)
            assert torch.equal(together, alone[:rows]), (threads, rows)


def test_one_chain_of_sums_whatever_the_order_of_rows(instruction_set):
    random = np.random.default_rng(4)
    packed = PackedLinear([random_matrix(random, 64, 300)], instruction_set=instruction_set)
    x = torch.from_numpy(random.normal(size=(40, 300))).float()
    order = torch.from_numpy(random.permutation(40))
    assert torch.equal(packed(x)[order], packed(x[order]))


@pytest.mark.parametrize("row_type", LAST_BIT, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 9, 40])
def test_the_best_output_is_that_of_the_stored_ones_and_the_lowest_of_equals(instruction_set, row_type, rows):
    random = np.random.default_rng(rows)
    weight = random_matrix(random, 517, 96)
    weight[400] = weight[17]
    weight[516] = weight[17]
    packed = PackedLinear([weight.to(row_type)], instruction_set=instruction_set)
    x = torch.from_numpy(random.normal(size=(rows, 96))).to(row_type)
    x[0] = weight[17].to(row_type) * 3
    stored = packed(x)
    values, indices = packed.argmax(x)
    assert indices[0] == 17
    assert torch.equal(values, stored.float().amax(1))
    assert indices.tolist() == [int((row == row.max()).nonzero()[0]) for row in stored]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_best_output_is_the_same_whoever_multiplies_which_panels(instruction_set, threads):
    random = np.random.default_rng(6)
    weight = random_matrix(random, 5000, 256).round(decimals=1)  # so much that nobody does it all alone
    weight[[3, 4900]] = weight[[300]]
    packed = PackedLinear([weight], instruction_set=instruction_set, threads=threads)
    x = torch.from_numpy(random.normal(size=(230, 256))).round().float()
    x[5, 9], x[200] = float("nan"), weight[300] * 9
    stored = packed(x)
    values, indices = packed.argmax(x)
    assert torch.equal(indices, stored.argmax(1))
    assert indices[[5, 200]].tolist() == [0, 3]
    assert torch.equal(values[6:], stored.amax(1)[6:])


def test_equal_outputs_everywhere_and_none_that_is_a_number(instruction_set):
    packed = PackedLinear([torch.zeros(130, 8)], instruction_set=instruction_set)
    x = torch.ones(3, 8)
    x[1, 2] = float("nan")
    values, indices = packed.argmax(x)
    assert indices.tolist() == [0, 0, 0]
    assert values[[0, 2]].tolist() == [0.0, 0.0]
    assert bool(values[1].isnan())


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_row_that_is_not_finite_is_not_finite_after_rounding_and_its_neighbours_are(instruction_set, name):
    packed = PackedLinear([torch.ones(40, 130)], storage=STORED[name], instruction_set=instruction_set)
    x = torch.ones(3, 130)
    x[0, 129], x[2, 0] = float("inf"), float("nan")
    out = packed(x)
    assert not out[[0, 2]].isfinite().any()
    assert bool(out[1].isfinite().all())


def test_joined_matrices_give_their_outputs_side_by_side(instruction_set):
    random = np.random.default_rng(8)
    parts = [random_matrix(random, outputs, 70) for outputs in (33, 5, 64)]
    biases = [torch.ones(33), None, torch.full((64,), -2.0)]
    joined = PackedLinear(parts, biases, instruction_set=instruction_set)
    assert joined.parts == (33, 5, 64)
    x = torch.from_numpy(random.normal(size=(4, 70))).float()
    apart = [PackedLinear([w], [b], instruction_set=instruction_set)(x) for w, b in zip(parts, biases, strict=True)]
    assert torch.equal(joined(x), torch.cat(apart, 1))


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_every_bit_of_a_matrix_can_be_read_again(instruction_set, name):
    weight = random_matrix(np.random.default_rng(9), 75, 37).to(STORED[name])
    packed = PackedLinear([weight], instruction_set=instruction_set)
    wanted = torch.tensor([[74, 0], [31, 32]])
    assert torch.equal(packed.rows(wanted, STORED[name]), weight[wanted])


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_repacking_is_packing_and_keeps_the_bias(instruction_set, name):
    weight = random_matrix(np.random.default_rng(10), 75, 192)
    x = torch.from_numpy(np.random.default_rng(11).normal(size=(5, 192))).float()
    made = PackedLinear([weight], [torch.ones(75)], storage=STORED[name], instruction_set=instruction_set)
    again = PackedLinear([weight], [torch.ones(75)], instruction_set=instruction_set)
    before = again.nbytes
    again.repack(STORED[name])
    assert torch.equal(again(x), made(x))
    assert again.nbytes == made.nbytes < before / 3


def test_rounding_to_eight_and_four_bits_is_as_fine_as_its_steps_allow():
    weight = random_matrix(np.random.default_rng(12), 64, 512)
    for storage, most in ((torch.int8, 0.006), (torch.int4, 0.1)):
        error = (held(weight, storage) - weight.double()).norm() / weight.double().norm()
        assert 0 < float(error) < most
    assert held(torch.zeros(3, 40), torch.int4).abs().max() == 0
    tiny = weight * 1e-5
    assert float((held(tiny, torch.int8) - tiny.double()).norm() / tiny.double().norm()) < 0.1


def test_what_was_rounded_to_four_bits_before_keeps_every_bit(instruction_set):
    random = np.random.default_rng(14)
    whole = torch.from_numpy(random.integers(0, 16, size=(70, 4, GROUP))).float()
    whole[:, :, 5], whole[:, :, 9] = 0, 15  # whoever rounds spans a group from end to end
    scale, shift = (torch.from_numpy(random.normal(size=(70, 4, 1)) * 0.1).half().float() for _ in range(2))
    weight = (whole * scale.abs().clamp_min(1e-3).half().float() + shift).view(70, -1)
    packed = PackedLinear([weight], storage=torch.int4, instruction_set=instruction_set)
    assert torch.equal(packed.rows(torch.arange(70), torch.float32), weight)


def test_rows_may_be_views_and_have_more_dimensions(instruction_set):
    random = np.random.default_rng(13)
    packed = PackedLinear([random_matrix(random, 20, 30)], instruction_set=instruction_set)
    wide = torch.from_numpy(random.normal(size=(2, 3, 60))).float()
    right = packed(wide[..., :30].contiguous().view(6, 30)).view(2, 3, 20)
    assert torch.equal(packed(wide[..., :30]), right)
    assert torch.equal(packed(wide[..., :30].transpose(0, 1)), right.transpose(0, 1))
    out = poisoned(6, 25, torch.float32)
    packed.into(wide[..., :30].contiguous().view(6, 30), out[:, 2:22])
    assert torch.equal(out[:, 2:22], right.view(6, 20))
    assert bool(out[:, [0, 1, 22, 23, 24]].isnan().all())
    assert packed(wide[:0, :, :30]).shape == (0, 3, 20)


def test_what_cannot_be_packed_or_multiplied_is_refused_by_name():
    with pytest.raises(ConfigError, match="instruction_set"):
        PackedLinear([torch.ones(2, 2)], instruction_set="mmx")
    with pytest.raises(ConfigError, match="storage"):
        PackedLinear([torch.ones(2, 2)], storage=torch.float64)
    with pytest.raises(ConfigError, match="weights"):
        PackedLinear([torch.ones(2, 2), torch.ones(2, 3)])
    with pytest.raises(ConfigError, match="weights"):
        PackedLinear([])
    with pytest.raises(ConfigError, match="biases"):
        PackedLinear([torch.ones(2, 2)], [torch.ones(3)])
    packed = PackedLinear([torch.ones(2, 3)])
    with pytest.raises(ConfigError, match=r"x=\(\(1"):
        packed(torch.ones(1, 2))
    with pytest.raises(ConfigError, match=r"x=\(\(1"):
        packed(torch.ones(1, 3, dtype=torch.float64))
    with pytest.raises(ConfigError, match="out"):
        packed.into(torch.ones(1, 3), torch.ones(1, 3))
    with pytest.raises(ConfigError, match="outputs"):
        packed.rows(torch.tensor([0]), torch.int8)
    with pytest.raises(ValueError, match="no output 2"):
        packed.rows(torch.tensor([2]), torch.float32)
