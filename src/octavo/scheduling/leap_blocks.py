"""The blocks of many decode steps at once, in the order of single steps: `take_blocks`.

A step slides windows and reserves before it is computed; once it is, blocks that are full become READY and, where
they are reused, findable. Only the steps in which one of these happens are looked at. Where any free block will do
and nothing is given up, they are taken in one call.

Invariant: tables, slots, keys and evictions end as after single steps; the step that lacks a block has taken none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import InvariantViolation
from octavo.memory.layout import BOUNDLESS
from octavo.memory.values import Int64, Shortfall
from octavo.scheduling.keeping import key_filled

if TYPE_CHECKING:
    from octavo.memory.cache import KVCache
    from octavo.memory.pool import BlockPool
    from octavo.scheduling.scheduler import Scheduler

_NOTHING = np.zeros(1024, dtype=np.int64)
_NOTHING.setflags(write=False)

Due = dict[int, Int64]
"""By step: places among the rows at which something is due."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """What is asked: decode steps of rows from these positions on, the first of them plan number `first`."""

    positions: Int64
    first: int
    steps: int
    behind: int = 0
    """Plans that are made before the one before them is learned of."""


@dataclass(frozen=True, slots=True)
class Taken:
    """By step that had its blocks: slabs then free, kept blocks given up."""

    free_slabs: Int64
    evicted: Int64


def take_blocks(scheduler: Scheduler, rows: Int64, asked: Blocks) -> Taken:
    """Reserve and commit for these steps, or for as many as there are blocks for."""
    cache = scheduler.cache
    pool, sharing = cache.pool, cache.sharing
    if plain(pool) and not cache.gives_up:
        coming = _coming(cache, rows, asked)
        if sharing is None or len(coming.steps) <= pool.free.count:
            return _at_once(scheduler, rows, asked, coming)
    return _in_order(scheduler, rows, asked, _crossings(cache, rows, asked))


def first_slide(cache: KVCache, rows: Int64, positions: Int64, steps: int) -> int:
    """Steps before the first that begins with giving up blocks; `steps` if none does."""
    slides = _slides(cache, rows, positions, steps)
    return slides[0] if slides else steps


def within(cache: KVCache, rows: Int64, positions: Int64, steps: int, blocks: int) -> int:
    """So many of these steps take no more than so many blocks together."""
    due = [
        np.full(len(places), step)
        for group, table in zip(cache.layout.groups, cache.tables, strict=True)
        if group.block_tokens
        for step, places in by_step(table.counts[rows] * group.block_tokens - positions, group.block_tokens, steps)
    ]
    in_order = np.sort(np.concatenate(due)) if due else ()
    return steps if len(in_order) <= blocks else int(in_order[blocks])


def until_full(positions: Int64, size: int) -> Int64:
    """Decode steps from each position on that complete no block."""
    return size - 1 - positions % size


@dataclass(slots=True)
class _Coming:
    """Blocks that rows of one group will need, in the order of single steps."""

    steps: Int64
    """In which each is reserved."""
    places: Int64
    """Whose it is, among the rows."""
    turns: Int64
    """Which of its row's new blocks it is."""


def _coming(cache: KVCache, rows: Int64, asked: Blocks) -> _Coming:
    size = cache.layout.groups[0].block_tokens or BOUNDLESS
    room = cache.tables[0].counts[rows] * size - asked.positions
    places = (room < asked.steps).nonzero()[0]
    steps = room[places]
    if len(places) and asked.steps - int(np.minimum.reduce(steps)) > size:
        many = -(-(asked.steps - steps) // size)
        place = np.arange(len(places)).repeat(many)
        turns = np.arange(len(place)) - (many.cumsum() - many)[place]
        places, steps = places[place], steps[place] + turns * size
    else:  # as most often: one block each at most
        turns = np.zeros(len(places), dtype=np.int64)
    order = steps.argsort(kind="stable")
    return _Coming(steps[order], places[order], turns[order])


def _at_once(scheduler: Scheduler, rows: Int64, asked: Blocks, coming: _Coming) -> Taken:
    """One group, a block a slab: many blocks are those that come one by one."""
    cache, pool = scheduler.cache, scheduler.cache.pool
    enough, count = asked.steps, len(coming.steps)
    if count > pool.free.count:
        enough = int(coming.steps[pool.free.count])
        count = int(coming.steps.searchsorted(enough))
    taken = np.bincount(coming.steps if count == len(coming.steps) else coming.steps[:count], minlength=enough).cumsum()
    free_slabs: Int64 = pool.available_slabs - taken
    begun, had, sharing = cache.tables[0].counts[rows], 0, cache.sharing
    if sharing is not None:
        size = sharing.directory.space.block_tokens
        for step, places in by_step(until_full(asked.positions, size), size, enough):
            # One that is completed a second time gives back the first, which is the next to be taken.
            _take(cache, rows, begun, coming, slice(had, int(taken[step])))
            had, before = int(taken[step]), pool.available_slabs
            key_filled(scheduler, sharing, rows[places], asked.positions[places] + step + 1)
            free_slabs[step + 1 :] += pool.available_slabs - before
    _take(cache, rows, begun, coming, slice(had, count))
    cache.commit(rows, asked.positions + enough - asked.behind)
    return Taken(free_slabs, _NOTHING[:enough] if enough <= len(_NOTHING) else np.zeros(enough, dtype=np.int64))


def _take(cache: KVCache, rows: Int64, begun: Int64, coming: _Coming, part: slice) -> None:
    """These of the blocks that are coming; `begun` is how many each row had."""
    places = coming.places[part]
    if not len(places):
        return
    got = cache.pool.take([len(places)])
    if isinstance(got, Shortfall):
        raise InvariantViolation("reserve-all-or-nothing", f"{len(places)} blocks were free, then were not")
    cache.tables[0].append_at(rows[places], begun[places] + coming.turns[part], got[0])


def _in_order(scheduler: Scheduler, rows: Int64, asked: Blocks, crossings: Due) -> Taken:
    """Whatever is due, step by step."""
    cache, steps = scheduler.cache, asked.steps
    if cache.gives_up:  # of whoever has ended in its seat too
        cache.slide(scheduler.running.order)
    free_slabs = np.full(steps, cache.pool.available_slabs, dtype=np.int64)
    evicted = np.zeros(steps, dtype=np.int64)
    slides = set(_slides(cache, rows, asked.positions, steps))
    filled: Due = {}
    if cache.sharing is not None:
        size = cache.sharing.directory.space.block_tokens
        filled = dict(by_step(until_full(asked.positions, size), size, steps))
    # Which blocks are READY matters to who gives up or saves some, and else at the end alone.
    watched = cache.gives_up or scheduler.tiering is not None
    for step in sorted(slides.union(crossings, filled)):
        at = asked.positions + step
        if watched:
            cache.commit(rows, at)
        cache.settle(asked.first + step - 1)
        if step in slides:
            cache.slide(rows)
        places = crossings.get(step)
        if places is not None and isinstance(cache.reserve_many(rows[places], at[places] + 1), Shortfall):
            cache.commit(rows, at)
            return Taken(free_slabs[:step], evicted[:step])
        free_slabs[step:] = cache.pool.available_slabs
        if step in filled and cache.sharing is not None:
            if watched:
                cache.commit(rows, at + 1)
            key_filled(scheduler, cache.sharing, rows[filled[step]], at[filled[step]] + 1)
            free_slabs[step + 1 :] = cache.pool.available_slabs
        evicted[step] = scheduler.kept.evictions_untold()
    cache.commit(rows, asked.positions + steps)
    return Taken(free_slabs, evicted)


def _crossings(cache: KVCache, rows: Int64, asked: Blocks) -> Due:
    """Steps in which some of `rows` need a block of some group, with their places, both in order."""
    due: dict[int, list[Int64]] = {}
    for group, table in zip(cache.layout.groups, cache.tables, strict=True):
        if group.block_tokens:
            room = table.counts[rows] * group.block_tokens - asked.positions
            for step, places in by_step(room, group.block_tokens, asked.steps):
                due.setdefault(step, []).append(places)
    if len(cache.tables) == 1:
        return {step: places[0] for step, places in due.items()}
    return {step: np.unique(np.concatenate(due[step])) for step in sorted(due)}


def _slides(cache: KVCache, rows: Int64, positions: Int64, steps: int) -> list[int]:
    """Steps, in order, that begin with giving up blocks of some row."""
    due = np.zeros(steps, dtype=bool)
    if not cache.gives_up or not steps:
        return []
    at = positions[:, None] + np.arange(steps)
    for group, table in zip(cache.layout.groups, cache.tables, strict=True):
        if group.slides:
            firsts = np.concatenate([table.firsts[rows][:, None], group.first_block(at)], axis=1)
            due |= (np.diff(firsts, axis=1) > 0).any(axis=0)
    found: list[int] = np.flatnonzero(due).tolist()
    return found


def plain(pool: BlockPool) -> bool:
    """One group, a block a slab, any free one will do: many blocks at once are those that come one by one."""
    return pool.blocks_per_slab == (1,) and not pool.contiguous


def by_step(firsts: Int64, every: int, steps: int) -> Iterator[tuple[int, Int64]]:
    """Steps below `steps`, in order, at which something is due: of place i first at `firsts[i]`, then periodically."""
    places = (firsts < steps).nonzero()[0]
    if not len(places):
        return
    if len(places) == 1:  # as most often: a leap is short beside a block
        for step in range(int(firsts[places[0]]), steps, every):
            yield step, places
        return
    many = -(-(steps - firsts[places]) // every)
    place = np.repeat(places, many)
    turn = np.arange(len(place)) - np.repeat(np.cumsum(many) - many, many)
    at = firsts[place] + turn * every
    order = np.lexsort((place, at))
    at, place = at[order], place[order]
    step_of, starts = np.unique(at, return_index=True)
    yield from zip(step_of.tolist(), np.split(place, starts[1:]), strict=True)
