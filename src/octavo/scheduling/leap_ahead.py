"""Many decode steps at once where each is planned before the last one is learned of (`plans_ahead` is 1).

At the beginning and at the end one plan is in flight, of everybody who runs, one token each:

    in flight       f         planned      f + 1 .. f + n       learned of      f .. f + n - 1

Only where blocks come in one call (`leap_blocks.plain`), nothing is shared, given up or copied, and up to the step
before the one that ends somebody. What waits for blocks is asked at every step.

Invariant: `AheadRun.events()` are those that single steps would have given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.memory.values import Int32, Int64
from octavo.scheduling.events import Event, Resource, StepEnded, StepPlanned, StepTokens
from octavo.scheduling.leap_blocks import Blocks, plain, take_blocks
from octavo.scheduling.plan import PENDING, StepPlan

if TYPE_CHECKING:
    from octavo.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True, eq=False)
class AheadRun:
    before: StepPlan
    """The plan that was in flight."""
    planned: tuple[float, ...]
    """When each further plan was made."""
    done: tuple[float, ...]
    """When each plan that has been learned of was done, `before` first: as many."""
    tokens: Int32
    """Of each row, the same in every step."""
    waiting: int
    free_slabs: Int64
    """Once each further plan had its blocks."""
    resource: Resource
    last: StepPlan
    """The plan that is in flight now."""

    def events(self) -> Iterator[Event]:
        """As single steps tell them."""
        rows, ids = self.before.rows, self.before.sequence_ids
        running, number, made_s = len(rows), self.before.number, self.before.planned_s
        for now, done, free in zip(self.planned, self.done, self.free_slabs.tolist(), strict=True):
            yield StepPlanned(now, number + 1, running, self.waiting, running, 0, free, self.resource)
            yield StepTokens(done, number, ids, self.tokens, rows)
            yield StepEnded(done, number, made_s)
            number, made_s = number + 1, now


def quiet_steps_ahead(scheduler: Scheduler, flying: StepPlan, refused_for: Resource | None) -> int:
    """How many further plans are of everybody, one token each, with none learned of meanwhile that reaches a limit."""
    running, cache = scheduler.running, scheduler.cache
    rows = running.live_rows()
    if scheduler.in_flight != 1 or scheduler.tiering is not None or cache.sharing is not None or cache.gives_up:
        return 0
    if scheduler.policies.batching.whole_batches or not plain(cache.pool) or any(cache.pool.draining):
        return 0
    if not len(rows) or len(rows) > scheduler.limits.max_num_batched_tokens:
        return 0
    if len(scheduler.waiting) and refused_for not in ("sequence_limit", "token_budget"):
        return 0
    if not np.array_equal(flying.rows, rows) or not np.array_equal(flying.sequence_ids, running.sequence_id[rows]):
        return 0
    known, computed = running.known[rows], running.computed[rows]
    same = (computed == known) & (running.pending[rows] == 1) & (known > running.feed_tokens[rows])
    if not same.all() or running.singly[rows].any():
        return 0
    return max(0, int(np.minimum.reduce(running.limit[rows] - known)) - 1)


def advance_ahead(
    scheduler: Scheduler,
    flying: StepPlan,
    tokens: Int32,
    moments: tuple[list[float], list[float]],
    refused_for: Resource | None = None,
) -> AheadRun | None:
    """Make up to as many further plans as `moments` (planned, done) has, as many as there are blocks for; None: none.

    `tokens` are those of `live_rows()` in each step that is learned of, and no stops.
    """
    running, cache = scheduler.running, scheduler.cache
    rows, (planned, done) = running.live_rows(), moments
    begun = running.computed[rows]
    free_slabs = take_blocks(scheduler, rows, Blocks(begun, flying.number + 1, len(planned), behind=1)).free_slabs
    steps = len(free_slabs)
    if not steps:
        return None
    running.learn_repeated(rows, tokens, steps)
    running.computed[rows] = begun + steps
    number = scheduler.take_numbers(steps) + steps - 1
    cache.touch(rows, number)
    cache.settle(number - 1)
    ones = np.ones(len(rows), dtype=np.int32)
    last = StepPlan(
        number=number,
        planned_s=planned[steps - 1],
        sequence_ids=running.sequence_id[rows],
        rows=rows,
        starts=(begun + steps - 1).astype(np.int32),
        counts=ones,
        samples=ones.astype(bool),
        token_ids=np.full(len(rows), PENDING, dtype=np.int32),
    )
    waiting = len(scheduler.waiting)
    return AheadRun(
        before=flying,
        planned=tuple(planned[:steps]),
        done=tuple(done[:steps]),
        tokens=tokens,
        waiting=waiting,
        free_slabs=free_slabs,
        resource=(refused_for or "none") if waiting else "compute",
        last=last,
    )
