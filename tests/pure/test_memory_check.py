"""Waste by cause with figures worked out by hand; each invariant breached once; tables for people."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import InvariantViolation
from octavo.memory.adoption import adopt
from octavo.memory.cache import KVCache
from octavo.memory.check import INVARIANTS, check, check_rows
from octavo.memory.inspect import cached_lines, table_lines
from octavo.memory.keys import Chain, KeySpace
from octavo.memory.values import Adoption
from octavo.memory.waste import Waste, useful_bytes, waste
from octavo.simulate.toy_model import toy_layout

BLOCK = toy_layout().slab_bytes  # 4 tokens of 16 bytes


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def commit(cache: KVCache, row: int, tokens: int) -> None:
    cache.commit(rows(row), np.array([tokens], dtype=np.int64))


# -- waste, by cause --------------------------------------------------------------------------------


def test_a_row_half_way_through_its_block_wastes_the_tail_of_it() -> None:
    cache = KVCache(toy_layout(), 8, 2)
    cache.reserve(0, 6)
    commit(cache, 0, 6)
    assert useful_bytes(cache) == 6 * BLOCK // 4
    assert waste(cache) == Waste(reserved_bytes=0, internal_bytes=2 * BLOCK // 4, padding_bytes=0, external_bytes=0)


def test_what_is_set_aside_and_not_yet_computed_is_reserved_waste() -> None:
    cache = KVCache(toy_layout(), 8, 2, contiguous=True)
    cache.reserve(0, 24)
    commit(cache, 0, 5)
    assert waste(cache) == Waste(4 * BLOCK, 3 * BLOCK // 4, 0, 0)
    commit(cache, 0, 24)
    assert waste(cache).total_bytes == 0


def test_free_blocks_outside_the_largest_run_are_external_waste() -> None:
    cache = KVCache(toy_layout(), 8, 4, contiguous=True)
    for row, tokens in enumerate((8, 4, 4, 4)):  # slots 0 1 | 2 | 3 | 4, then three free
        cache.reserve(row, tokens)
        commit(cache, row, tokens)
    cache.release(0)
    cache.release(2)
    assert cache.pool.free.count == 6
    assert waste(cache) == Waste(0, 0, 0, 3 * BLOCK)
    paged = KVCache(toy_layout(), 8, 4)
    paged.reserve(0, 4)
    commit(paged, 0, 4)
    assert waste(paged).external_bytes == 0


def test_padding_is_what_a_slab_has_beyond_its_blocks_and_blocks_nobody_took() -> None:
    layout = toy_layout((5, 2))  # slabs of 160 bytes; two blocks of 64 leave 32
    cache = KVCache(layout, 8, 2)
    cache.reserve(0, 12)
    commit(cache, 0, 12)
    # The second group holds three blocks in two slabs: 2 x 32 beyond the blocks, and one block of 64.
    assert waste(cache) == Waste(0, 0, 2 * 32 + 64, 0)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("heads", [(2,), (4, 2), (6, 2), (5, 2)])
def test_useful_bytes_and_waste_add_up_to_what_is_owned(heads: tuple[int, ...], contiguous: bool) -> None:
    cache = KVCache(toy_layout(heads), 30, 4, contiguous=contiguous)
    for row, (reserved, computed) in enumerate(((9, 9), (14, 3), (4, 4), (7, 0))):
        cache.reserve(row, reserved)
        commit(cache, row, computed)
    cache.release(2)
    owned = (30 - cache.pool.free.count) * cache.layout.slab_bytes
    lost = waste(cache)
    assert useful_bytes(cache) + lost.total_bytes - lost.external_bytes == owned


# -- the checks, and the view for people --------------------------------------------------------------


@pytest.mark.parametrize("name", INVARIANTS)
def test_each_invariant_notices_its_own_breach(name: str) -> None:
    keys = KeySpace("toy", 4) if name == "kept-is-findable" else None
    cache = KVCache(toy_layout(), 6, 2, contiguous=name == "contiguous-runs", keys=keys)
    cache.reserve(0, 12)
    cache.reserve(1, 5)
    commit(cache, 0, 8)
    columns = cache.pool.slots[0]

    def drained_for_ever() -> None:
        columns.refs[4] = 0
        cache.tables[0].counts[1] = 1
        cache.pool.slots[0].last_plan[4] = -1
        cache.pool.drain(0, rows(4))

    breaches = {
        "free-plus-allocated": lambda: cache.pool.free.take(1),
        "free-is-unreferenced": lambda: columns.refs.__setitem__(5, 1),
        "references-equal-occurrences": lambda: columns.refs.__setitem__(0, 2),
        "no-writable-alias": lambda: cache.tables[0].append(0, rows(4)),
        "allocated-covers-committed": lambda: cache.committed.__setitem__(1, 9),
        "nothing-readable-given-up": lambda: cache.tables[0].firsts.__setitem__(0, 1),
        "bytes-equal-geometry": lambda: cache.tables[0].counts.__setitem__(0, 2),
        "slab-ownership": lambda: cache.pool.used.__setitem__(0, 2),
        "draining-waits": drained_for_ever,
        "kept-is-findable": lambda: cache.sharing.directory.keyed[0].__setitem__(5, True),
        "contiguous-runs": lambda: cache.tables[0].slots[0].__setitem__(slice(0, 2), [1, 0]),
    }
    INVARIANTS[name](cache)
    breaches[name]()
    with pytest.raises(InvariantViolation) as caught:
        INVARIANTS[name](cache)
    assert caught.value.name == name
    with pytest.raises(InvariantViolation):
        check(cache)


def test_a_full_block_that_is_not_ready_is_noticed() -> None:
    cache = KVCache(toy_layout(), 6, 2)
    cache.reserve(0, 8)
    cache.committed[0] = 5
    with pytest.raises(InvariantViolation, match="a full block is not READY"):
        check(cache)


@pytest.mark.parametrize(
    ("breach", "name"),
    [
        (lambda cache: cache.committed.__setitem__(0, 13), "allocated-covers-committed"),
        (lambda cache: cache.pool.slots[0].refs.__setitem__(2, 0), "references-equal-occurrences"),
        (lambda cache: cache.pool.free.take(1), "free-plus-allocated"),
    ],
)
def test_the_incremental_check_sees_what_a_step_can_break(breach: object, name: str) -> None:
    cache = KVCache(toy_layout(), 6, 2)
    cache.reserve(0, 12)
    check_rows(cache, rows(0, 1))
    breach(cache)  # type: ignore[operator]
    with pytest.raises(InvariantViolation) as caught:
        check_rows(cache, rows(0, 1))
    assert caught.value.name == name


def test_tables_are_printed_logical_to_physical_with_the_state_of_each_slot() -> None:
    cache = KVCache(toy_layout(), 12, 3)
    cache.reserve(0, 4)
    cache.reserve(2, 8)
    cache.reserve(0, 12)
    commit(cache, 0, 9)
    assert table_lines(cache, {0: "A", 1: "B", 2: "C"}) == [
        "g0: A0 -> 0 ready, A1 -> 3 ready, A2 -> 4 filling",
        "g0: B holds no blocks",
        "g0: C0 -> 1 filling, C1 -> 2 filling",
    ]


def test_tables_say_how_many_share_a_slot_and_cached_slots_are_listed_apart() -> None:
    cache = KVCache(toy_layout(), 6, 3, keys=KeySpace("toy", 4))
    text = np.arange(1, 9, dtype=np.int32)
    for row in (0, 1):
        chain = Chain(cache.sharing.directory.space)  # type: ignore[union-attr]
        chain.extend(text)
        match = cache.sharing.match(chain, text, 8 if row else 0)  # type: ignore[union-attr]
        assert isinstance(adopt(cache, row, match, chain, upto=9, plan=0), Adoption)
        if row == 0:
            commit(cache, 0, 8)
            cache.sharing.key(0, cache.tables, chain.keys, text)  # type: ignore[union-attr]
    assert table_lines(cache, {0: "A", 1: "B"}) == [
        "g0: A0 -> 0 ready x2, A1 -> 1 ready x2, A2 -> 2 filling",
        "g0: B0 -> 0 ready x2, B1 -> 1 ready x2, B2 -> 3 filling",
    ]
    assert cached_lines(cache) == []
    cache.release(0)
    cache.release(1)
    assert table_lines(cache, {}) == []
    assert cached_lines(cache) == ["g0: cached 0, 1"]


def test_tables_of_every_group_are_printed_and_a_row_without_a_name_is_numbered() -> None:
    cache = KVCache(toy_layout((4, 2)), 12, 3)
    cache.reserve(1, 5)
    assert table_lines(cache, {}) == [
        "g0: row 1 block 0 -> 0 filling, row 1 block 1 -> 1 filling",
        "g1: row 1 block 0 -> 4 filling, row 1 block 1 -> 5 filling",
    ]
