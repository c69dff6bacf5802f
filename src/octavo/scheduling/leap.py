"""Many decode steps at once, where it is certain that nothing else happens in them.

While nothing arrives, ends or could run short, every step decodes one token of everybody who runs, and who waits
goes on waiting. `quiet_steps` says for how many steps that is so, `advance` takes them: the columns, tables and
counters end as if each had been planned and learned of singly, block for block. Serves virtual time; a device
has to compute each step anyway.

Invariant: `expand(advance(...))` are the events that single steps would have given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo.errors import InvariantViolation
from octavo.memory.values import Int32, Int64, Shortfall
from octavo.policy.admission import STEADY
from octavo.scheduling.events import Resource, StepEnded, StepPlanned, StepTokens
from octavo.scheduling.keeping import key_filled

if TYPE_CHECKING:
    from octavo.memory.pool import BlockPool
    from octavo.memory.sharing import Sharing
    from octavo.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRun:
    """Consecutive steps in which everybody decoded one token and nothing else happened."""

    first: int
    """Number of the first plan."""
    moments: npt.NDArray[np.float64]
    """When each step was planned, and when the last one was done: one more than there are steps."""
    rows: Int32
    sequence_ids: Int64
    tokens: Int32
    """The token of each row, the same in every step."""
    waiting: int
    free_slabs: Int64
    """Once each step had its blocks."""
    resource: Resource

    @property
    def steps(self) -> int:
        return len(self.moments) - 1


def quiet_steps(scheduler: Scheduler, refused_for: Resource | None = None) -> int:
    """For how many steps nobody reaches a limit, nobody enters and all decode. Blocks are not looked at.

    `refused_for` is what bound the step before, where that step was one of decode tokens alone that seated, paused
    and ended nobody, and nothing has been submitted since; None where one of them is not so.
    """
    running = scheduler.running
    rows = running.live_rows()
    if not len(rows) or scheduler.in_flight or scheduler.cache.gives_up or scheduler.tiering is not None:
        return 0
    if scheduler.cache.sharing is not None and not _plain(scheduler.cache.pool):
        return 0
    if len(rows) > scheduler.limits.max_num_batched_tokens:
        return 0
    if len(scheduler.waiting) and not _go_on_waiting(scheduler, refused_for):
        return 0
    computed, known = running.computed[rows], running.known[rows]
    if (computed != known - 1).any() or (computed < running.feed_tokens[rows]).any():
        return 0
    steps = int((running.limit[rows] - known).min()) - 1
    sharing = scheduler.cache.sharing
    if sharing is not None and refused_for == "kv_blocks" and len(scheduler.waiting):
        # A block that is completed may be what somebody waits to start from.
        steps = min(steps, int(_until_full(computed, sharing.directory.space.block_tokens).min()))
    return steps


def _go_on_waiting(scheduler: Scheduler, refused_for: Resource | None) -> bool:
    if refused_for == "kv_blocks":
        # In a whole batch it is growth that was short, and seats of ended members have been given up for it.
        return type(scheduler.policies.admission) in STEADY and not scheduler.policies.batching.whole_batches
    return refused_for in ("sequence_limit", "token_budget")


def advance(
    scheduler: Scheduler, tokens: Int32, moments: npt.NDArray[np.float64], refused_for: Resource | None = None
) -> DecodeRun | None:
    """Take up to `len(moments) - 1` decode steps, as many as there are blocks for; None where not even one.

    Step j is planned at `moments[j]` and done at `moments[j + 1]`; `tokens` are those of `live_rows()` in each.
    The caller has asked `quiet_steps` and knows that no token is a stop.
    """
    running, cache = scheduler.running, scheduler.cache
    rows = running.live_rows()
    if (running.stop_ids[rows] == tokens[:, None]).any():
        raise InvariantViolation("quiet-steps", "a token that ends a sequence is none to leap with")
    free_slabs = _reserve_ahead(scheduler, rows, len(moments) - 1)
    steps = len(free_slabs)
    if not steps:
        return None
    if (running.known[rows] + steps >= running.limit[rows]).any():
        raise InvariantViolation("quiet-steps", f"a sequence reaches its limit within {steps} steps")
    first = scheduler.take_numbers(steps)
    ends = running.computed[rows] + steps
    running.computed[rows] = ends
    running.learn_repeated(rows, tokens, steps)
    cache.touch(rows, first + steps - 1)
    cache.commit(rows, ends)
    if cache.sharing is not None:
        _key_in_order(scheduler, cache.sharing, rows, free_slabs)
    cache.settle(first + steps - 1)
    waiting = len(scheduler.waiting)
    return DecodeRun(
        first=first,
        moments=moments[: steps + 1],
        rows=rows,
        sequence_ids=running.sequence_id[rows],
        tokens=tokens,
        waiting=waiting,
        free_slabs=free_slabs,
        resource=(refused_for or "none") if waiting else "compute",
    )


def _reserve_ahead(scheduler: Scheduler, rows: Int32, steps: int) -> Int64:
    """Blocks for the next positions of these rows, in the order of single steps; the free slabs after each step.

    Shorter than `steps` where blocks ran out: the step that lacks one has taken none.
    """
    cache = scheduler.cache
    pool = cache.pool
    positions = scheduler.running.computed[rows]
    free_slabs = np.full(steps, pool.available_slabs, dtype=np.int64)
    crossings = _crossings(scheduler, rows, positions, steps)
    if not crossings:
        return free_slabs
    if _plain(pool):
        taken = np.zeros(steps, dtype=np.int64)
        for step, places in crossings:
            taken[step] = len(places)
        taken = taken.cumsum()
        # What is kept for reuse is not given up here: that takes the order of single steps.
        enough = int(np.searchsorted(taken, pool.free.count, side="right"))
        growing = [rows[places] for step, places in crossings if step < enough]
        if growing:
            again = np.concatenate(growing)
            got = pool.take([len(again)])
            if isinstance(got, Shortfall):
                raise InvariantViolation("reserve-all-or-nothing", f"{len(again)} blocks were free, then were not")
            cache.tables[0].append_repeated(again, got[0])
        return (free_slabs - taken)[:enough]
    for step, places in crossings:
        if isinstance(cache.reserve_many(rows[places], positions[places] + step + 1), Shortfall):
            return free_slabs[:step]
        free_slabs[step:] = pool.available_slabs
    return free_slabs


def _crossings(scheduler: Scheduler, rows: Int32, positions: Int64, steps: int) -> list[tuple[int, Int64]]:
    """Steps in which some of `rows` need a block of some group, with their places, both in order."""
    due: dict[int, list[Int64]] = {}
    for group, table in zip(scheduler.cache.layout.groups, scheduler.cache.tables, strict=True):
        if group.block_tokens:
            room = table.counts[rows] * group.block_tokens - positions
            for step, places in _by_step(room, group.block_tokens, steps):
                due.setdefault(step, []).append(places)
    if len(scheduler.cache.tables) == 1:
        return [(step, places[0]) for step, places in due.items()]
    return [(step, np.unique(np.concatenate(due[step]))) for step in sorted(due)]


def _plain(pool: BlockPool) -> bool:
    """One group, a block a slab, any free one will do: many blocks at once are those that come one by one."""
    return pool.blocks_per_slab == (1,) and not pool.contiguous


def _until_full(computed: Int64, size: int) -> Int64:
    """Decode steps of each row that complete no block."""
    return size - 1 - computed % size


def _key_in_order(scheduler: Scheduler, sharing: Sharing, rows: Int32, free_slabs: Int64) -> None:
    """Blocks that were completed in these steps become findable, by step, then row."""
    size, steps, pool = sharing.directory.space.block_tokens, len(free_slabs), scheduler.cache.pool
    ends = scheduler.running.computed[rows]
    for step, places in _by_step(_until_full(ends - steps, size), size, steps):
        before = pool.available_slabs
        key_filled(scheduler, sharing, rows[places], ends[places] - steps + step + 1)
        free_slabs[step + 1 :] += pool.available_slabs - before


def _by_step(firsts: Int64, every: int, steps: int) -> Iterator[tuple[int, Int64]]:
    """Steps below `steps`, in order, at which something is due: of place i first at `firsts[i]`, then periodically."""
    places = np.flatnonzero(firsts < steps)
    if not len(places):
        return
    many = -(-(steps - firsts[places]) // every)
    place = np.repeat(places, many)
    turn = np.arange(len(place)) - np.repeat(np.cumsum(many) - many, many)
    at = firsts[place] + turn * every
    order = np.lexsort((place, at))
    at, place = at[order], place[order]
    step_of, starts = np.unique(at, return_index=True)
    yield from zip(step_of.tolist(), np.split(place, starts[1:]), strict=True)


def expand(run: DecodeRun) -> Iterator[StepPlanned | StepTokens | StepEnded]:
    """The same as single steps tell it."""
    running = len(run.rows)
    moments = run.moments.tolist()
    for step, free in enumerate(run.free_slabs.tolist()):
        number = run.first + step
        yield StepPlanned(moments[step], number, running, run.waiting, running, 0, free, run.resource)
        yield StepTokens(moments[step + 1], number, run.sequence_ids, run.tokens, run.rows)
        yield StepEnded(moments[step + 1], number, moments[step])
