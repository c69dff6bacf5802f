"""States in slots: copied by a plan and gone on from, zeroed at the start, refused where nothing can hold them."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from recurrent_models import recurrent_config
from tiny import Bench
from torch import nn

from octavo.errors import ModelError
from octavo.geometry.dtypes import BF16, FP32
from octavo.geometry.state import Component
from octavo.models.recurrent import (
    ChunkCache,
    LayerSlots,
    MixerForward,
    SlotStates,
    StateStep,
    comparable,
    keeps_constant_state,
    numbered_states,
)
from octavo.scheduling.plan import Admission, BlockCopies, NewBlocks, StepPlan
from octavo.scheduling.request import Request, SamplingParams

BLOCK = 4
PREFIX = [17, 90, 4, 33, 8, 61, 102, 55]
"""Two blocks of positions."""


class Line:
    """One executor and hand-made plans for it, one chunk a step. Slots are named by the caller."""

    def __init__(self, name: str) -> None:
        self.executor, self.layout = Bench(recurrent_config(name)).executor(block_tokens=BLOCK, n_slabs=60, rows=4)
        self.groups = self.layout.groups
        self.constant = next(i for i, group in enumerate(self.groups) if not group.block_tokens)
        self.number = 0

    def slots(self, group: int, which: int) -> np.ndarray:
        """Slots of slabs 8 * which and on, none of which another group or sequence is given."""
        first = (8 * which + (4 if group == self.constant else 0)) * self.groups[group].blocks_per_slab
        count = 1 if group == self.constant else 4
        return np.arange(first, first + count, dtype=np.int32)

    def admit(self, row: int, which: int, attention: int | None = None) -> tuple[Admission, tuple[NewBlocks, ...]]:
        """The sequence in `row` gets slots `which`; those of attention may be another's."""
        params = SamplingParams(temperature=0.0, seed=0).with_defaults({})
        request = Request(request_id=str(row), prompt_token_ids=np.asarray(PREFIX, np.int32), params=params)
        new = []
        for group in range(len(self.groups)):
            slots = self.slots(group, which if group == self.constant or attention is None else attention)
            if group != self.constant and attention is not None:
                slots = np.concatenate([slots[:2], self.slots(group, which)[2:]])
            rows = np.full(len(slots), row, np.int32)
            new.append(NewBlocks(group, rows, np.arange(len(slots), dtype=np.int32), slots))
        return Admission(row, row, request, np.zeros(0, np.int32)), tuple(new)

    def step(self, row: int, start: int, tokens: list[int], admitted=None, before=(), after=()) -> int:
        """The token that follows these."""
        self.number += 1
        ints = [np.asarray([value], np.int32) for value in (row, start, len(tokens))]
        plan = StepPlan(
            self.number, 0.0, ints[0].astype(np.int64), *ints, np.ones(1, np.bool_), np.asarray(tokens, np.int32),
            admissions=() if admitted is None else (admitted[0],), new_blocks=() if admitted is None else admitted[1],
            copies_before=tuple(before), copies_after=tuple(after),
        )  # fmt: skip
        self.executor.submit(plan)
        return int(self.executor.collect().tokens[0])

    def copy(self, source: int, target: int) -> BlockCopies:
        return BlockCopies(self.constant, self.slots(self.constant, source), self.slots(self.constant, target))

    def alone(self, row: int, tokens: list[int], wanted: int = 6) -> list[int]:
        """What follows `tokens`, computed from the first."""
        out = [self.step(row, 0, tokens, self.admit(row, row))]
        while len(out) < wanted:
            out.append(self.step(row, len(tokens) + len(out) - 1, out[-1:]))
        return out


@pytest.mark.parametrize("name", ["mamba2", "mamba", "lfm2", "qwen3_next", "falcon_h1", "zamba"])
def test_a_state_copied_after_a_chunk_is_gone_on_from_in_another_sequence(name: str) -> None:
    rest = [71, 5, 44]
    right = Line(name).alone(0, PREFIX + rest)
    line = Line(name)
    line.step(0, 0, PREFIX, line.admit(0, 0), after=[line.copy(0, 5)])
    line.step(0, len(PREFIX), [9, 9, 9])  # the first sequence goes its own way
    out = [line.step(1, len(PREFIX), rest, line.admit(1, 1, attention=0), before=[line.copy(5, 1)])]
    while len(out) < len(right):
        out.append(line.step(1, len(PREFIX) + len(rest) + len(out) - 1, out[-1:]))
    assert out == right
    # and once more from the same copy, which nobody changed
    again = line.step(2, len(PREFIX), rest, line.admit(2, 2, attention=0), before=[line.copy(5, 2)])
    assert again == right[0]


def test_without_the_copy_the_tokens_would_differ() -> None:
    rest = [71, 5, 44]
    line = Line("mamba2")
    right = line.alone(0, PREFIX + rest)
    line.step(1, 0, PREFIX, line.admit(1, 1))
    assert line.step(2, len(PREFIX), rest, line.admit(2, 2)) != right[0]


@pytest.mark.parametrize("name", ["mamba2", "mamba", "lfm2"])
def test_a_sequence_starts_from_nothing_whatever_its_slot_held(name: str) -> None:
    line = Line(name)
    right = line.alone(0, PREFIX)
    line.executor.arena.bytes.fill_(0xFF)
    assert line.alone(1, PREFIX) == right
    one = Line(name).alone(0, PREFIX[:1])
    line.executor.arena.bytes.fill_(0xFF)
    assert line.alone(2, PREFIX[:1]) == one


def test_a_copy_moves_whole_blocks_and_nothing_else() -> None:
    line = Line("mamba2")
    arena, group = line.executor.arena, line.constant
    arena.bytes.copy_(torch.randint(0, 256, arena.bytes.shape, dtype=torch.uint8))
    before = arena.bytes.clone()
    arena.copy(group, np.asarray([1, 2], np.int32), np.asarray([2, 7], np.int32))
    size = line.groups[group].block_bytes
    for source, target in ((1, 2), (2, 7)):
        start, end = line.layout.address(group, source), line.layout.address(group, target)
        assert torch.equal(arena.bytes[end : end + size], before[start : start + size])
        arena.bytes[end : end + size] = before[end : end + size]
    assert torch.equal(arena.bytes, before)


def tensors_alive() -> int:
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


@pytest.mark.parametrize("name", ["mamba", "mamba2", "lfm2"])
def test_a_step_keeps_no_tensor_alive(name: str) -> None:
    """Nothing that a step makes may be tied to itself, or states would wait for the garbage collector."""
    line = Line(name)
    out = line.step(0, 0, PREFIX, line.admit(0, 0))
    gc.collect()
    gc.disable()
    try:
        before = tensors_alive()
        for i in range(5):
            out = line.step(0, len(PREFIX) + 3 * i, [out, 4, 5])
        assert tensors_alive() <= before + 2
    finally:
        gc.enable()


# -- the cache that a mixer sees -------------------------------------------------------------------


def states(decodes=0, offsets=(0, 2), starting=(False,), columns=3):
    slots = LayerSlots((torch.arange(4.0 * 2 * columns).reshape(4, 2, columns),), (torch.ones(4, 6),))
    units = torch.arange(len(starting))
    return SlotStates({1: slots}, StateStep(decodes, tuple(offsets), tuple(starting), units)), slots


def test_inputs_of_a_convolution_are_kept_by_one_column_less_than_it_reads() -> None:
    own, slots = states()
    part = own.parts[0]
    cache = ChunkCache(own, part)
    before = slots.convolutions[0][0].clone()
    new = torch.full((1, 2, 2), -1.0)
    seen = cache.update_conv_state(new, 1, conv_kernel_size=4)
    assert torch.equal(seen, torch.cat([before[None], new], dim=-1))
    assert torch.equal(slots.convolutions[0][0], before), "nothing is stored until the module has run"
    cache.store()
    assert torch.equal(slots.convolutions[0][0], seen[0, :, -3:])


def test_a_chunk_that_starts_its_sequence_sees_no_state_and_pads_what_it_leaves() -> None:
    own, slots = states(starting=(True,))
    cache = ChunkCache(own, own.parts[0])
    assert cache.get_conv_state(1) is None
    assert cache.get_recurrent_state(1) is None
    assert not cache.has_previous_state(1)
    new = torch.full((1, 2, 2), -1.0)
    assert cache.update_conv_state(new, 1) is new
    cache.store()
    assert slots.convolutions[0][0].tolist() == [[0, -1, -1]] * 2


def test_a_state_changed_in_place_is_stored_in_every_sequence_of_the_batch() -> None:
    own, slots = states(decodes=3, offsets=(0, 1, 2, 3), starting=(False,) * 3)
    (part,) = own.parts
    cache = ChunkCache(own, part)
    cache.get_recurrent_state(1).mul_(torch.arange(3.0)[:, None])
    cache.store()
    assert slots.recurrences[0][:, 0].tolist() == [0, 1, 2, 1]


def test_a_recurrence_comes_back_in_the_shape_in_which_it_was_handed_over() -> None:
    own, slots = states()
    cache = ChunkCache(own, own.parts[0])
    cache.update_recurrent_state(torch.zeros(1, 2, 3), 1)
    cache.store()
    assert ChunkCache(own, own.parts[0]).get_recurrent_state(1).shape == (1, 2, 3)
    assert not slots.recurrences[0][0].any()


def test_a_layer_or_a_state_that_geometry_does_not_tell_is_refused() -> None:
    own, _ = states()
    cache = ChunkCache(own, own.parts[0])
    with pytest.raises(ModelError, match="layer 2"):
        cache.get_conv_state(2)
    with pytest.raises(ModelError, match="conv state 1"):
        cache.update_conv_state(torch.zeros(1, 2, 2), 1, state_idx=1)


# -- mixers ----------------------------------------------------------------------------------------


class Asks(nn.Module):
    def forward(self, hidden, cache=None, other=None):
        return self._look(cache, hidden)

    def _look(self, cache, hidden):
        return cache.update_conv_state(hidden, 1)


class Plain(nn.Module):
    def forward(self, hidden, cache=None):
        return cache.update(hidden, hidden, 1)


class Paged:
    def __init__(self, slot_states):
        self.slot_states = slot_states


def test_a_module_is_known_by_what_it_asks_also_in_a_method_of_its_own() -> None:
    assert keeps_constant_state(Asks())
    assert not keeps_constant_state(Plain())
    assert not keeps_constant_state(nn.Linear(1, 1))


def test_a_tensor_that_cannot_be_shared_out_among_chunks_is_refused_by_its_shape() -> None:
    own, _ = states()
    bound = MixerForward(Asks())
    with pytest.raises(ModelError, match=r"Asks.*\[3, 2\].*2 tokens"):
        bound(torch.zeros(1, 2, 2), cache=Paged(own), other=torch.zeros(3, 2))


def test_a_mixer_of_which_geometry_tells_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Asks.*does not tell"):
        MixerForward(Asks())(torch.zeros(1, 2, 2), cache=Paged(None))


def test_state_that_no_cache_holds_is_refused_by_its_component() -> None:
    with pytest.raises(ModelError, match="normaliser"):
        numbered_states([Component("normaliser", (4, 4), FP32)])


def test_channels_may_be_divided_as_one_likes() -> None:
    divided = [Component("conv", (64, 3), BF16), Component("conv_groups", (2, 16, 3), BF16)]
    scan = Component("recurrent", (64, 8), FP32)
    whole = [Component("conv", (96, 3), BF16), Component("recurrent", (4, 16, 8), FP32)]
    assert comparable([*divided, scan]) == comparable(whole) == {"conv_0": (96, 3), "recurrent_0": (512,)}
    assert comparable(whole) != comparable([Component("conv", (96, 4), BF16), whole[1]])
