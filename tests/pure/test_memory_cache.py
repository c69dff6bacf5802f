"""Tables and the verbs of the KV cache, with figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import InvariantViolation
from octavo.memory.cache import KVCache
from octavo.memory.check import check, is_empty
from octavo.memory.slots import SlotState
from octavo.memory.tables import BlockTables
from octavo.memory.values import NOTHING_NEW, NewBlocks, Reservation, Shortfall
from octavo.simulate.toy_model import toy_layout


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def upto(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def table(cache: KVCache, row: int, group: int = 0) -> list[int]:
    return cache.tables[group].row(row).tolist()


def commit(cache: KVCache, row: int, tokens: int) -> None:
    cache.commit(rows(row), upto(tokens))


# -- tables ---------------------------------------------------------------------------------------


def test_a_table_grows_past_its_first_width_and_keeps_what_it_had() -> None:
    tables = BlockTables(3)
    assert tables.append(1, np.arange(10, dtype=np.int32)).tolist() == list(range(10))
    assert tables.append(1, np.arange(100, 140, dtype=np.int32)).tolist() == list(range(10, 50))
    assert tables.append_one_each(rows(2, 1), rows(7, 8)).tolist() == [0, 50]
    assert tables.row(1).tolist() == [*range(10), *range(100, 140), 8]
    assert tables.row(2).tolist() == [7]
    assert tables.row(0).tolist() == []


def test_what_a_cleared_table_returns_is_the_callers_own() -> None:
    tables = BlockTables(2)
    tables.append(0, rows(4, 5))
    mine = tables.clear(0)
    tables.append(0, rows(9, 9))
    assert mine.tolist() == [4, 5]


# -- reserve --------------------------------------------------------------------------------------


def test_a_sequence_holds_slots_that_are_not_neighbours_and_its_order_is_the_tables() -> None:
    """A0 -> 0, A1 -> 2, A2 -> 5: blocks go to whoever needs one next."""
    cache = KVCache(toy_layout(), 12, 3)
    cache.reserve(0, 4)
    cache.reserve(1, 1)
    cache.reserve(0, 8)
    cache.reserve(1, 12)
    cache.reserve(0, 12)
    assert table(cache, 0) == [0, 2, 5]
    assert table(cache, 1) == [1, 3, 4]
    check(cache)


def test_a_slot_is_used_again_after_its_owner_ended() -> None:
    cache = KVCache(toy_layout(), 4, 3)
    cache.reserve(0, 8)
    cache.reserve(1, 8)
    assert cache.release(0) == 2
    cache.reserve(2, 5)
    assert sorted(table(cache, 2)) == [0, 1]
    assert table(cache, 1) == [2, 3]
    check(cache)


def test_a_reservation_names_the_blocks_that_are_new_and_no_others() -> None:
    cache = KVCache(toy_layout((4, 2)), 12, 2)
    cache.reserve(0, 4)
    got = cache.reserve(0, 13)
    assert isinstance(got, Reservation)
    assert [(b.group, b.rows.tolist(), b.indices.tolist()) for b in got.new_blocks] == [
        (0, [0, 0, 0], [1, 2, 3]),
        (1, [0, 0, 0], [1, 2, 3]),
    ]
    assert [b.slots.tolist() for b in got.new_blocks] == [table(cache, 0, g)[1:] for g in (0, 1)]


def test_reserving_what_a_row_has_already_takes_nothing() -> None:
    cache = KVCache(toy_layout(), 4, 2)
    cache.reserve(0, 5)
    assert cache.reserve(0, 8) is NOTHING_NEW
    assert cache.reserve(0, 1) is NOTHING_NEW
    assert cache.reserve_many(rows(0), upto(8)) is NOTHING_NEW
    assert (cache.room_tokens(0), cache.pool.free.count) == (8, 2)


@pytest.mark.parametrize("heads", [(2,), (4, 2), (6, 2)])
def test_a_reservation_that_falls_short_changes_nothing(heads: tuple[int, ...]) -> None:
    cache = KVCache(toy_layout(heads), 5, 3)
    cache.reserve(0, 5)
    before = [table(cache, row, g) for row in range(3) for g in range(len(heads))]
    free = cache.pool.free.members().tolist()
    assert isinstance(cache.reserve(1, 100), Shortfall)
    assert isinstance(cache.reserve_many(rows(0, 2), upto(9, 100)), Shortfall)
    assert [table(cache, row, g) for row in range(3) for g in range(len(heads))] == before
    assert cache.pool.free.members().tolist() == free
    check(cache)


def test_reserving_for_many_rows_is_all_of_them_or_none() -> None:
    cache = KVCache(toy_layout(), 3, 4)
    got = cache.reserve_many(rows(0, 1, 2, 3), upto(4, 4, 4, 4))
    assert got == Shortfall(needed=4, free=3)
    assert is_empty(cache)
    got = cache.reserve_many(rows(3, 1), upto(1, 8))
    assert isinstance(got, Reservation)
    (new,) = got.new_blocks
    assert (new.rows.tolist(), new.indices.tolist()) == ([3, 1, 1], [0, 0, 1])
    assert new.slots.tolist() == [*table(cache, 3), *table(cache, 1)]
    check(cache)


def test_reserving_for_many_rows_equals_reserving_for_each() -> None:
    together, singly = (KVCache(toy_layout((4, 2)), 20, 3) for _ in range(2))
    together.reserve_many(rows(0, 2, 1), upto(5, 9, 1))
    for row, tokens in ((0, 5), (2, 9), (1, 1)):
        singly.reserve(row, tokens)
    assert [t.counts.tolist() for t in together.tables] == [t.counts.tolist() for t in singly.tables]
    assert together.pool.free.count == singly.pool.free.count
    check(together)


def test_the_largest_reservation_is_what_the_free_blocks_hold() -> None:
    cache = KVCache(toy_layout(), 5, 2)
    cache.reserve(0, 6)
    cache.reserve(1, 4)
    assert cache.largest_reservable(0, 100) == 16
    assert cache.largest_reservable(0, 13) == 13
    assert cache.largest_reservable(1, 100) == 12
    cache.reserve(1, 12)
    assert cache.largest_reservable(0, 100) == 8, "what it has already is always its own"


@pytest.mark.parametrize("heads", [(2,), (4, 2), (6, 2), (5, 2)])
def test_the_capacity_for_one_sequence_is_exact(heads: tuple[int, ...]) -> None:
    for slabs in range(1, 12):
        cache = KVCache(toy_layout(heads), slabs, 1)
        most = cache.max_tokens_per_sequence()
        assert isinstance(cache.reserve(0, most + 1), Shortfall)
        assert isinstance(cache.reserve(0, most), Reservation)


def test_a_contiguous_run_is_reserved_once_and_never_outgrown() -> None:
    cache = KVCache(toy_layout(), 8, 2, contiguous=True)
    cache.reserve(0, 7)
    assert table(cache, 0) == [0, 1]
    assert cache.reserve(0, 8) is NOTHING_NEW
    with pytest.raises(InvariantViolation, match="row 0 outgrew its run"):
        cache.reserve(0, 9)
    with pytest.raises(InvariantViolation, match="row 0 outgrew its run"):
        cache.reserve_many(rows(1, 0), upto(4, 9))
    check(cache)


# -- commit and release -----------------------------------------------------------------------------


def test_a_block_is_ready_when_its_last_position_is_computed_and_not_before() -> None:
    cache = KVCache(toy_layout(), 8, 2)
    cache.reserve(0, 10)
    states = cache.pool.slots[0].state
    for tokens, ready in ((3, 0), (4, 1), (7, 1), (10, 2)):
        commit(cache, 0, tokens)
        assert int((states == SlotState.READY).sum()) == ready
    check(cache)


def test_one_commit_may_fill_several_blocks_of_several_rows() -> None:
    cache = KVCache(toy_layout((4, 2)), 12, 2)
    cache.reserve(0, 12)
    cache.reserve(1, 5)
    cache.commit(rows(0, 1), upto(12, 5))
    assert [columns.count(SlotState.READY) for columns in cache.pool.slots] == [4, 4]
    assert [columns.count(SlotState.FILLING) for columns in cache.pool.slots] == [1, 1]
    check(cache)


def test_blocks_of_a_row_that_no_plan_touches_return_at_once() -> None:
    cache = KVCache(toy_layout(), 4, 2)
    cache.reserve(0, 16)
    cache.touch(rows(0), 0)
    cache.settle(0)
    assert cache.release(0) == 4
    assert is_empty(cache)
    assert (int(cache.committed[0]), int(cache.touched[0])) == (0, -1)


def test_blocks_that_a_plan_in_flight_touches_drain_until_it_completes() -> None:
    cache = KVCache(toy_layout((4, 2)), 4, 2)
    cache.reserve(0, 8)
    cache.touch(rows(0), 0)
    cache.touch(rows(0), 1)
    cache.settle(0)
    cache.release(0)
    assert cache.pool.draining == [2, 2]
    assert not is_empty(cache)
    assert isinstance(cache.reserve(1, 8), Shortfall)
    check(cache)
    cache.settle(1)
    assert is_empty(cache)
    assert isinstance(cache.reserve(1, 8), Reservation)


def test_releasing_an_empty_row_releases_nothing() -> None:
    cache = KVCache(toy_layout(), 4, 2)
    assert cache.release(1) == 0
    assert is_empty(cache)


# -- suspend and resume -----------------------------------------------------------------------------


def test_a_suspended_state_comes_back_whole_in_another_row() -> None:
    cache = KVCache(toy_layout((4, 2)), 8, 3)
    cache.reserve(0, 6)
    commit(cache, 0, 6)
    cache.touch(rows(0), 0)
    held = [table(cache, 0, g) for g in (0, 1)]
    value = cache.suspend(0)
    assert (value.tokens, value.touched) == (6, 0)
    assert table(cache, 0) == []
    assert cache.pool.free.count == 8 - 2 - 1
    check(cache)
    got = cache.resume(2, value)
    assert [b.slots.tolist() for b in got.new_blocks] == held
    assert [table(cache, 2, g) for g in (0, 1)] == held
    assert (int(cache.committed[2]), int(cache.touched[2])) == (6, 0)
    check(cache)


def test_a_suspended_state_is_resumed_or_dropped_once() -> None:
    cache = KVCache(toy_layout(), 4, 2)
    cache.reserve(0, 6)
    value = cache.suspend(0)
    cache.drop(value)
    assert is_empty(cache)
    for again in (lambda: cache.drop(value), lambda: cache.resume(1, value)):
        with pytest.raises(InvariantViolation, match="ticket 1 was resumed or dropped before"):
            again()


def test_only_an_empty_row_resumes() -> None:
    cache = KVCache(toy_layout(), 4, 2)
    cache.reserve(0, 6)
    value = cache.suspend(0)
    cache.reserve(1, 1)
    with pytest.raises(InvariantViolation, match="row 1 holds blocks"):
        cache.resume(1, value)
    cache.resume(0, value)
    check(cache)


def test_dropping_a_state_that_a_plan_in_flight_touches_drains_it() -> None:
    cache = KVCache(toy_layout(), 4, 2)
    cache.reserve(0, 6)
    cache.touch(rows(0), 3)
    cache.drop(cache.suspend(0))
    assert cache.pool.draining == [2]
    cache.settle(3)
    assert is_empty(cache)


def test_new_blocks_say_where_in_which_table_they_stand() -> None:
    cache = KVCache(toy_layout((6, 2)), 14, 3)
    executor: list[list[list[int]]] = [[[], []] for _ in range(3)]
    for wanted in ({0: 4, 1: 9}, {0: 6}, {1: 13, 2: 5, 0: 7}):
        got = cache.reserve_many(rows(*wanted), upto(*wanted.values()))
        assert isinstance(got, Reservation)
        for blocks in got.new_blocks:
            assert isinstance(blocks, NewBlocks)
            for row, index, slot in zip(blocks.rows, blocks.indices, blocks.slots, strict=True):
                assert len(executor[row][blocks.group]) == index
                executor[row][blocks.group].append(int(slot))
    assert executor == [[table(cache, row, g) for g in (0, 1)] for row in range(3)]
