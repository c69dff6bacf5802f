"""Slots, slabs and what is free: the slot state machine, the free structures, pools over shared slabs."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import InvariantViolation
from octavo.memory.free import FreeRuns, FreeStack
from octavo.memory.pool import NO_OWNER, BlockPool
from octavo.memory.slots import LEGAL_MOVES, GroupSlots, SlotState
from octavo.memory.values import Shortfall
from octavo.simulate.toy_model import toy_layout

EMPTY, FILLING, READY, DRAINING = SlotState


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def taken(pool: BlockPool, *counts: int) -> list[list[int]]:
    got = pool.take(counts)
    assert not isinstance(got, Shortfall)
    return [group.tolist() for group in got]


def short(pool: BlockPool, *counts: int) -> Shortfall:
    got = pool.take(counts)
    assert isinstance(got, Shortfall)
    return got


# -- the state machine of a slot ------------------------------------------------------------------


@pytest.mark.parametrize("before", SlotState)
@pytest.mark.parametrize("after", SlotState)
def test_every_move_of_a_slot_is_legal_or_refused_and_a_refused_one_changes_nothing(
    before: SlotState, after: SlotState
) -> None:
    allowed = {
        EMPTY: {FILLING},
        FILLING: {READY, EMPTY, DRAINING},
        READY: {EMPTY, DRAINING},
        DRAINING: {EMPTY, READY},
    }
    columns = GroupSlots(3)
    columns.state[1] = before
    if after in allowed[before]:
        columns.move(slots(1), after)
        assert columns.state.tolist() == [EMPTY, after, EMPTY]
    else:
        with pytest.raises(InvariantViolation, match=f"slot 1: {before.name} -> {after.name}"):
            columns.move(slots(1), after)
        assert columns.state.tolist() == [EMPTY, before, EMPTY]
    assert ((before, after) in LEGAL_MOVES) == (after in allowed[before])


def test_one_illegal_move_among_many_moves_none() -> None:
    columns = GroupSlots(3)
    columns.move(slots(0, 1), FILLING)
    with pytest.raises(InvariantViolation, match="slot 2: EMPTY -> READY"):
        columns.move(slots(0, 1, 2), READY)
    assert (columns.count(FILLING), columns.count(EMPTY)) == (2, 1)


# -- free slabs -----------------------------------------------------------------------------------


def test_a_free_stack_hands_out_the_lowest_first_and_then_what_came_back_last() -> None:
    free = FreeStack(5)
    assert free.take(3).tolist() == [0, 1, 2]
    free.give(slots(1))
    free.give(slots(2, 0))
    assert free.count == 5
    assert free.take(5).tolist() == [2, 0, 1, 3, 4]
    assert free.count == 0


def test_a_free_stack_hands_each_slab_out_once() -> None:
    free = FreeStack(4)
    first, second = free.take(2), free.take(2)
    assert sorted([*first.tolist(), *second.tolist()]) == [0, 1, 2, 3]
    free.give(second)
    assert sorted(free.members().tolist()) == sorted(second.tolist())


def test_what_a_free_stack_handed_out_does_not_change_later() -> None:
    free = FreeStack(3)
    mine = free.take(2)
    free.give(slots(1, 0))
    free.take(2)
    assert mine.tolist() == [0, 1]


def test_free_runs_give_the_first_run_that_is_long_enough() -> None:
    free = FreeRuns(10)
    free.take(10)
    free.give(slots(1, 2))
    free.give(slots(5, 6, 7))
    free.give(slots(9))
    assert (free.count, free.largest_run()) == (6, 3)
    assert free.take(3).tolist() == [5, 6, 7]
    assert free.take(1).tolist() == [1]
    assert free.members().tolist() == [2, 9]
    assert free.largest_run() == 1


def test_neighbouring_runs_join_when_what_lies_between_returns() -> None:
    free = FreeRuns(6)
    free.take(6)
    free.give(slots(0, 1))
    free.give(slots(4, 5))
    assert free.largest_run() == 2
    free.give(slots(2, 3))
    assert free.largest_run() == 6


# -- pools over shared slabs ----------------------------------------------------------------------


def test_with_one_group_a_slab_is_a_block() -> None:
    pool = BlockPool(toy_layout(), 4)
    assert taken(pool, 3) == [[0, 1, 2]]
    assert (pool.available(0), pool.free.count) == (1, 1)
    pool.give(0, slots(1))
    assert pool.available(0) == 2
    assert taken(pool, 1) == [[1]]


def test_a_block_is_taken_from_the_fullest_slab_first() -> None:
    pool = BlockPool(toy_layout((6, 2)), 4)  # three of the second group in a slab
    assert taken(pool, 0, 9)[1] == list(range(9))
    pool.give(1, slots(3, 4))  # slab 1 keeps one block
    pool.give(1, slots(8))  # slab 2 keeps two
    assert taken(pool, 0, 1)[1] == [8]
    assert taken(pool, 0, 2)[1] == [3, 4]
    assert taken(pool, 0, 1)[1] == [9]


def test_a_slab_whose_last_block_returns_is_free_for_every_group() -> None:
    pool = BlockPool(toy_layout((4, 2)), 2)
    assert taken(pool, 0, 3)[1] == [0, 1, 2]
    assert short(pool, 1, 0) == Shortfall(needed=1, free=0)
    pool.give(1, slots(2))
    assert pool.owner.tolist() == [1, NO_OWNER]
    assert taken(pool, 1, 0)[0] == [1]
    assert pool.owner.tolist() == [1, 0]


def test_a_slab_that_is_partly_used_serves_its_own_group_alone() -> None:
    pool = BlockPool(toy_layout((4, 2)), 2)
    taken(pool, 1, 1)
    assert pool.available(1) == 1
    assert pool.available(0) == 0
    assert taken(pool, 0, 1)[1] == [3]


def test_available_counts_begun_slabs_and_free_ones() -> None:
    pool = BlockPool(toy_layout((6, 2)), 5)
    taken(pool, 1, 4)  # the second group has begun its second slab
    assert pool.available(0) == 2
    assert pool.available(1) == 2 + 3 * 2


@pytest.mark.parametrize("contiguous", [False, True])
def test_taking_is_all_or_nothing_across_groups(contiguous: bool) -> None:
    pool = BlockPool(toy_layout((4, 2)), 3, contiguous=contiguous)
    before = pool.free.members().tolist()
    got = short(pool, 3, 1)
    assert (got.needed, got.free) == (4, 3)
    assert pool.free.members().tolist() == before
    assert all(columns.count(EMPTY) == len(columns.state) for columns in pool.slots)
    assert all(not columns.refs.any() for columns in pool.slots)
    assert taken(pool, 2, 2) == [[0, 1], [4, 5]]


def test_what_is_taken_is_filling_and_has_one_reference() -> None:
    pool = BlockPool(toy_layout((4, 2)), 3)
    taken(pool, 1, 3)
    assert [columns.count(FILLING) for columns in pool.slots] == [1, 3]
    assert [int(columns.refs.sum()) for columns in pool.slots] == [1, 3]


def test_blocks_of_a_contiguous_pool_lie_in_one_run() -> None:
    pool = BlockPool(toy_layout((6, 2)), 8, contiguous=True)
    assert taken(pool, 2, 4) == [[0, 1], [6, 7, 8, 9]]
    pool.give(1, slots(6, 7, 8))
    assert pool.free.members().tolist() == [2, 4, 5, 6, 7]
    pool.give(1, slots(9))
    assert pool.free.largest_run() == 6


# -- shortfalls -----------------------------------------------------------------------------------


def test_a_shortfall_says_what_was_needed_and_what_is_free() -> None:
    pool = BlockPool(toy_layout(), 5)
    taken(pool, 3)
    got = short(pool, 4)
    assert (got.needed, got.free, got.evictable, got.draining, got.largest_run) == (4, 2, 0, 0, None)
    assert not got.waits_for_draining
    assert not got.fragmented


def test_a_shortfall_that_draining_blocks_will_cover_says_so() -> None:
    pool = BlockPool(toy_layout(), 5)
    taken(pool, 5)
    pool.slots[0].refs[[0, 3]] = 0
    pool.slots[0].last_plan[slots(0, 3)] = 7
    pool.drain(0, slots(0, 3))
    assert short(pool, 2) == Shortfall(needed=2, free=0, draining=2)
    assert short(pool, 2).waits_for_draining
    assert not short(pool, 3).waits_for_draining
    pool.give(0, slots(0, 3))
    assert sorted(taken(pool, 2)[0]) == [0, 3]


def test_draining_blocks_count_as_slabs_only_where_a_whole_slab_will_be_free() -> None:
    pool = BlockPool(toy_layout((6, 2)), 2)
    taken(pool, 0, 6)
    pool.slots[1].refs[[0, 1, 3]] = 0
    pool.slots[1].last_plan[slots(0, 1, 3)] = 0
    pool.drain(1, slots(0, 1, 3))
    assert short(pool, 1, 0) == Shortfall(needed=1, free=0, draining=0)
    # For the group itself each draining block helps: of five, three are on their way back.
    got = short(pool, 0, 5)
    assert (got.needed, got.draining) == (2, 1)
    pool.slots[1].refs[2] = 0
    pool.slots[1].last_plan[slots(2)] = 0
    pool.drain(1, slots(2))
    assert short(pool, 1, 0) == Shortfall(needed=1, free=0, draining=1)


def test_free_blocks_in_pieces_are_fragmentation_and_the_shortfall_names_the_largest_run() -> None:
    pool = BlockPool(toy_layout(), 6, contiguous=True)
    taken(pool, 6)
    pool.give(0, slots(0, 2, 3, 5))
    got = short(pool, 3)
    assert (got.needed, got.free, got.largest_run) == (3, 4, 2)
    assert got.fragmented
    assert not short(pool, 5).fragmented
    assert taken(pool, 2) == [[2, 3]]
