"""The accounting invariants of the KV cache, each by name. Those of lower tiers are in `check_tiers`.

`check(cache)` raises `InvariantViolation` at the first that does not hold; `INVARIANTS` maps each
name to its function, which is how `octavo check` runs them one by one. Reads only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from octavo.errors import InvariantViolation
from octavo.memory.cache import KVCache
from octavo.memory.pool import NO_OWNER
from octavo.memory.slots import SlotState
from octavo.memory.values import DEVICE, Int64


def free_plus_allocated_is_total(cache: KVCache) -> None:
    """Every slab is either in the free structure, once, or owned by a group: none lost, none twice."""
    pool = cache.pool
    free = pool.free.members()
    owned = np.flatnonzero(pool.owner != NO_OWNER)
    _require("free-plus-allocated", len(free) == pool.free.count, f"{len(free)} free, counted {pool.free.count}")
    seen = np.bincount(np.concatenate([free, owned]), minlength=pool.slabs)
    odd = np.flatnonzero(seen != 1)
    _require(
        "free-plus-allocated",
        not len(odd),
        f"{len(free)} free + {len(owned)} allocated of {pool.slabs} slabs; "
        f"slab {_first(odd)} counted {_at(seen, odd)} times",
    )


def free_slots_are_unreferenced(cache: KVCache) -> None:
    """EMPTY and DRAINING slots have no reference, FILLING ones at least one; READY ones too, unless they are cached."""
    for group, columns in enumerate(cache.pool.slots):
        idle = (columns.state == SlotState.EMPTY) | (columns.state == SlotState.DRAINING)
        cached = (columns.state == SlotState.READY) & _keyed(cache, group) & (columns.refs == 0)
        odd = np.flatnonzero((idle | cached) != (columns.refs == 0))
        _require(
            "free-is-unreferenced",
            not len(odd),
            f"group {group} slot {_first(odd)}: state {_at(columns.state, odd)}, {_at(columns.refs, odd)} references",
        )
        saved_first = [slot for g, slot in _unsaved(cache) if g == group]
        _require(
            "free-is-unreferenced",
            cache.pool.unsaved[group] == len(saved_first) and bool(cached[saved_first].all()),
            f"group {group}: {cache.pool.unsaved[group]} counted as unsaved, {len(saved_first)} listed",
        )
        counted = cache.pool.cached[group]
        _require("free-is-unreferenced", counted == int(cached.sum()), f"group {group}: {counted} counted as cached")


def kept_blocks_can_be_found(cache: KVCache) -> None:
    """A slot stands at a node if and only if it is findable; it is READY or drains, and its start is kept with it."""
    if cache.sharing is None:
        return
    directory = cache.sharing.directory
    for group, layout in enumerate(cache.layout.groups):
        columns, found = cache.pool.slots[group], np.zeros(len(cache.pool.slots[group].refs), dtype=bool)
        for node in directory.nodes():
            slot = node.slots[group]
            if slot < 0:
                continue
            where = f"group {group} slot {slot} at node {node.number}"
            _require("kept-is-findable", not found[slot], f"{where} stands at two nodes")
            found[slot] = True
            state = SlotState(int(columns.state[slot]))
            _require("kept-is-findable", state in (SlotState.READY, SlotState.DRAINING), f"{where} is {state.name}")
            start = node.parent is None or node.parent.index < 0 or node.parent.slots[group] >= 0
            if layout.block_tokens and not layout.slides:
                _require("kept-is-findable", start, f"{where}: the block before it is not kept")
        odd = np.flatnonzero(found != directory.keyed[group])
        _require("kept-is-findable", not len(odd), f"group {group} slot {_first(odd)} is marked wrongly")


def references_equal_occurrences(cache: KVCache) -> None:
    """A slot's references are its occurrences in tables, suspensions, pins, doubles and copies, no more and no less."""
    for group, columns in enumerate(cache.pool.slots):
        odd = np.flatnonzero(_occurrences(cache, group) != columns.refs)
        _require(
            "references-equal-occurrences",
            not len(odd),
            f"group {group} slot {_first(odd)}: {_at(columns.refs, odd)} references, "
            f"{_at(_occurrences(cache, group), odd)} occurrences",
        )


def no_two_writable_blocks_alias(cache: KVCache) -> None:
    """A FILLING slot stands in exactly one table or suspension; one that nobody waits for any more in none."""
    for group, columns in enumerate(cache.pool.slots):
        copied = _copied(cache, group)
        owners = _occurrences(cache, group) - copied
        odd = np.flatnonzero((columns.state == SlotState.FILLING) & (owners != 1) & ~((owners == 0) & (copied > 0)))
        _require("no-writable-alias", not len(odd), f"group {group} slot {_first(odd)} is FILLING and shared")


def allocated_covers_committed(cache: KVCache) -> None:
    """Every row has blocks for all computed positions that a later one may read; full blocks are READY.

    A row that waits for copies is excepted: its blocks are still arriving.
    """
    for row in _live_rows(cache):
        if cache.arriving is not None and row in cache.arriving:
            continue
        tokens = int(cache.committed[row])
        for group, (layout, table) in enumerate(zip(cache.layout.groups, cache.tables, strict=True)):
            have = int(table.counts[row])
            _require(
                "allocated-covers-committed",
                have >= layout.blocks_for(tokens) if tokens else True,
                f"row {row} group {group}: {have} blocks for {tokens} positions",
            )
            first = int(table.firsts[row])
            full = tokens // layout.block_tokens if layout.block_tokens else 0
            states = cache.pool.slots[group].state[table.row(row)[: max(0, full - first)]]
            _require(
                "allocated-covers-committed",
                bool((states == SlotState.READY).all()),
                f"row {row} group {group}: a full block is not READY",
            )


def nothing_readable_is_given_up(cache: KVCache) -> None:
    """No block has left a table, or a suspension, that the next position, or a later one, may read."""
    for group, (layout, table) in enumerate(zip(cache.layout.groups, cache.tables, strict=True)):
        odd = np.flatnonzero(table.firsts > layout.first_block(cache.committed))
        _require(
            "nothing-readable-given-up",
            not len(odd),
            f"row {_first(odd)} group {group}: {_at(table.firsts, odd)} blocks given up, "
            f"position {_at(cache.committed, odd)} may read some of them",
        )
        for value in cache.suspensions.values():
            _require(
                "nothing-readable-given-up",
                value.firsts[group] <= int(layout.first_block(np.array([value.tokens]))[0]),
                f"suspension {value.ticket} group {group}: {value.firsts[group]} blocks given up "
                f"of {value.tokens} positions",
            )


def bytes_in_use_equal_geometry(cache: KVCache) -> None:
    """Bytes of referenced blocks are what the layout charges for the blocks in tables and suspensions."""
    for group, layout in enumerate(cache.layout.groups):
        columns = cache.pool.slots[group]
        held = int(np.count_nonzero(columns.refs)) * layout.block_bytes
        shared = int((columns.refs - 1).clip(min=0).sum())
        blocks = int(_occurrences(cache, group).sum())
        _require(
            "bytes-equal-geometry",
            held == (blocks - shared) * layout.block_bytes,
            f"group {group}: {held} bytes held, {blocks} blocks of {layout.block_bytes} listed, {shared} shared",
        )


def slabs_are_owned_by_one_group(cache: KVCache) -> None:
    """Only the owner of a slab has slots in it, `used` counts them, and none is beyond the arena."""
    pool = cache.pool
    for group, (columns, per_slab) in enumerate(zip(pool.slots, pool.blocks_per_slab, strict=True)):
        held = (columns.state != SlotState.EMPTY).reshape(pool.slabs, per_slab).sum(axis=1)
        owned = pool.owner == group
        odd = np.flatnonzero(np.where(owned, pool.used, 0) != held)
        _require(
            "slab-ownership",
            not len(odd),
            f"slab {_first(odd)}: {_at(held, odd)} slots of group {group} in use, owner {_at(pool.owner, odd)}",
        )


def draining_slots_wait_for_a_plan(cache: KVCache) -> None:
    """A DRAINING slot waits for a plan that has not completed; otherwise it would never come back."""
    for group, columns in enumerate(cache.pool.slots):
        draining = columns.state == SlotState.DRAINING
        odd = np.flatnonzero(draining & (columns.last_plan <= cache.settled))
        _require("draining-waits", not len(odd), f"group {group} slot {_first(odd)} drains for a completed plan")
        counted = cache.pool.draining[group]
        _require("draining-waits", counted == int(draining.sum()), f"group {group}: {counted} counted as draining")


def contiguous_tables_are_runs(cache: KVCache) -> None:
    """Under contiguous allocation every table is one run of neighbouring slots."""
    if not cache.pool.contiguous:
        return
    for row in _live_rows(cache):
        for table in cache.tables:
            _require("contiguous-runs", bool((np.diff(table.row(row)) == 1).all()), f"row {row} is in pieces")


INVARIANTS: dict[str, Callable[[KVCache], None]] = {
    "free-plus-allocated": free_plus_allocated_is_total,
    "free-is-unreferenced": free_slots_are_unreferenced,
    "kept-is-findable": kept_blocks_can_be_found,
    "references-equal-occurrences": references_equal_occurrences,
    "no-writable-alias": no_two_writable_blocks_alias,
    "allocated-covers-committed": allocated_covers_committed,
    "nothing-readable-given-up": nothing_readable_is_given_up,
    "bytes-equal-geometry": bytes_in_use_equal_geometry,
    "slab-ownership": slabs_are_owned_by_one_group,
    "draining-waits": draining_slots_wait_for_a_plan,
    "contiguous-runs": contiguous_tables_are_runs,
}


def check(cache: KVCache) -> None:
    """All invariants. Raises `InvariantViolation` naming the first that does not hold."""
    for invariant in INVARIANTS.values():
        invariant(cache)


def check_rows(cache: KVCache, rows: Int64) -> None:
    """The part that one step can break, at a cost of what the step touched: rows, their tails, the counts."""
    for group, (layout, table) in enumerate(zip(cache.layout.groups, cache.tables, strict=True)):
        counts = table.counts[rows]
        need = -(-cache.committed[rows] // layout.block_tokens) if layout.block_tokens else np.minimum(counts, 1)
        odd = np.flatnonzero(counts < need)
        _require("allocated-covers-committed", not len(odd), f"group {group}: row {_at(rows, odd)} lacks blocks")
        held = rows[table.held[rows] > 0]
        tails = table.slots[held, table.counts[held] - 1]
        refs = cache.pool.slots[group].refs[tails]
        _require(
            "references-equal-occurrences", bool((refs >= 1).all()), f"group {group}: a tail block is unreferenced"
        )
    pool = cache.pool
    owned = int(np.count_nonzero(pool.owner != NO_OWNER))
    _require(
        "free-plus-allocated",
        owned + pool.free.count == pool.slabs,
        f"{pool.free.count} free + {owned} allocated of {pool.slabs} slabs",
    )


def is_empty(cache: KVCache) -> bool:
    """True when nothing is held, nothing drains, and every slab is free or holds nothing but cached blocks."""
    return cache.pool.available_slabs == cache.pool.slabs and not any(cache.pool.draining)


def _occurrences(cache: KVCache, group: int) -> Int64:
    table = cache.tables[group]
    columns = np.arange(table.slots.shape[1])
    inside = (columns < table.counts[:, None]) & (columns >= table.firsts[:, None])
    listed = [table.slots[inside].astype(np.int64)]
    listed += [
        np.array([slot for tier, slot in s.slots[group] if tier == DEVICE], dtype=np.int64)
        for s in cache.suspensions.values()
    ]
    listed += [slots for pinned in cache.pins.values() for pinned_group, slots in pinned if pinned_group == group]
    if cache.sharing is not None:
        doubles = [slot for doubled_group, slot in cache.sharing.doubles() if doubled_group == group]
        listed.append(np.array(doubles, dtype=np.int64))
    return np.bincount(np.concatenate(listed), minlength=len(cache.pool.slots[group].refs)) + _copied(cache, group)


def _copied(cache: KVCache, group: int) -> Int64:
    """By slot: copies to or from it that are under way."""
    touched = [] if cache.copied is None else [slot for tier, g, slot in cache.copied() if not tier and g == group]
    return np.bincount(np.array(touched, dtype=np.int64), minlength=len(cache.pool.slots[group].refs))


def _unsaved(cache: KVCache) -> list[tuple[int, int]]:
    return [] if cache.sharing is None else list(cache.sharing.shelf.unsaved)


def _keyed(cache: KVCache, group: int) -> npt.NDArray[np.bool_]:
    if cache.sharing is None:
        return np.zeros(len(cache.pool.slots[group].refs), dtype=bool)
    return cache.sharing.directory.keyed[group]


def _live_rows(cache: KVCache) -> Iterator[int]:
    for row in range(cache.rows):
        if cache.committed[row] or any(table.counts[row] for table in cache.tables):
            yield row


def _require(name: str, holds: bool, detail: str) -> None:
    if not holds:
        raise InvariantViolation(name, detail)


def _first(indices: Int64) -> int | str:
    return int(indices[0]) if len(indices) else "-"


def _at(values: np.ndarray, indices: Int64) -> int | str:
    return int(values[indices[0]]) if len(indices) else "-"
