"""Invariants of a running scheduler, checked after every step under `--audit`.

Every step: what the step touched, and progress. Every `full_every` steps: everything.
`INVARIANTS` maps names to functions, as in `memory.check`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import InvariantViolation
from octavo.memory.check import check, check_rows
from octavo.memory.check_tiers import check_tiers
from octavo.scheduling.plan import StepPlan

if TYPE_CHECKING:
    from octavo.scheduling.scheduler import Scheduler


def tokens_are_ordered(scheduler: Scheduler) -> None:
    """0 <= committed <= computed <= known + pending <= limit, for every running sequence."""
    running, rows = scheduler.running, scheduler.running.live_rows()
    known = running.known[rows] + running.pending[rows]
    committed, computed = scheduler.cache.committed[rows], running.computed[rows]
    good = (committed >= 0) & (committed <= computed) & (computed <= known) & (known <= running.limit[rows])
    good &= running.pending[rows] >= 0
    odd = np.flatnonzero(~good)
    _require("token-order", not len(odd), f"rows {rows[odd].tolist()}")


def admitted_have_blocks(scheduler: Scheduler) -> None:
    """Admitted -> blocks allocated; grows -> capacity accounted: room for every computed position."""
    for row in scheduler.running.live_rows().tolist():
        computed, room = int(scheduler.running.computed[row]), scheduler.cache.room_tokens(row)
        _require("growth-is-accounted", computed <= room, f"row {row}: {computed} positions, room for {room}")


def held_within_charge(scheduler: Scheduler) -> None:
    """Where blocks are given up, nobody holds more of them than admission charged for its plans in flight and next."""
    cache, running = scheduler.cache, scheduler.running
    if not cache.gives_up:
        return
    rows = running.live_rows()
    plans = np.where(running.singly[rows], 1, scheduler.plans_ahead + 1)
    for group, (layout, table) in enumerate(zip(cache.layout.groups, cache.tables, strict=True)):
        most = layout.most_blocks_many(running.limit[rows] - 1, running.step[rows] * plans)
        odd = np.flatnonzero(table.held[rows] > most)
        detail = (
            f"rows {rows[odd].tolist()} group {group}: {table.held[rows][odd].tolist()} blocks, charged {most[odd]}"
        )
        _require("held-within-charge", not len(odd), detail)


def empty_seats_hold_nothing(scheduler: Scheduler) -> None:
    """Ends -> released: a row without a sequence has no blocks, and those who ended in their seats are counted."""
    running, ended = scheduler.running, int(np.count_nonzero(scheduler.running.done))
    _require("end-releases", running.ended == ended, f"{running.ended} counted as ended in their seats, {ended} have")
    seated = np.zeros(scheduler.running.rows, dtype=bool)
    seated[scheduler.running.order] = True
    for table in scheduler.cache.tables:
        odd = np.flatnonzero(~seated & (table.counts > 0))
        _require("end-releases", not len(odd), f"empty rows {odd.tolist()} hold blocks")


def idle_engine_has_nothing_waiting(scheduler: Scheduler) -> None:
    """Nothing runs and nothing is in flight: then nothing may be waiting after a step that seated nobody."""
    copying = scheduler.tiering is not None and scheduler.tiering.pending
    idle = not len(scheduler.running) and not scheduler.in_flight and not copying
    _require("progress", not (idle and len(scheduler.waiting)), f"{len(scheduler.waiting)} wait and nothing runs")


INVARIANTS: dict[str, Callable[[Scheduler], None]] = {
    "token-order": tokens_are_ordered,
    "growth-is-accounted": admitted_have_blocks,
    "held-within-charge": held_within_charge,
    "end-releases": empty_seats_hold_nothing,
}


class Audit:
    def __init__(self, full_every: int = 64) -> None:
        self.full_every = full_every
        self.steps = 0
        self._was_idle = False

    def after_step(self, scheduler: Scheduler, plan: StepPlan | None) -> None:
        """Raises `InvariantViolation` naming what does not hold."""
        self.steps += 1
        if plan is not None:
            check_rows(scheduler.cache, plan.rows)
        self._check_progress(scheduler, plan)
        if self.steps % self.full_every == 0:
            check_all(scheduler)

    def _check_progress(self, scheduler: Scheduler, plan: StepPlan | None) -> None:
        if self._was_idle and plan is None:
            idle_engine_has_nothing_waiting(scheduler)
        self._was_idle = not len(scheduler.running) and not scheduler.in_flight


def check_all(scheduler: Scheduler) -> None:
    check(scheduler.cache)
    if scheduler.tiering is not None:
        check_tiers(scheduler.tiering)
    for invariant in INVARIANTS.values():
        invariant(scheduler)


def _require(name: str, holds: bool, detail: str) -> None:
    if not holds:
        raise InvariantViolation(name, detail)
