"""Room for the running: reserve blocks for this step's chunks, and decide who gives way when short.

Fast path: everything fits and one call does it. Otherwise one sequence at a time, the oldest
first: shrink its chunk to what fits, else wait for what drains or is being copied away, else
preempt. The oldest running sequence is never a victim, so somebody always finishes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import InvariantViolation, PolicyError
from octavo.memory.values import Shortfall
from octavo.policy.preemption import Candidate
from octavo.scheduling.draft import Draft
from octavo.scheduling.moving import lose_broken_suspensions, lose_latest_suspension, preempt

if TYPE_CHECKING:
    from octavo.scheduling.scheduler import Scheduler


def grow(scheduler: Scheduler, draft: Draft) -> None:
    """Reserve for `draft.given`, lowering it where blocks run out."""
    if scheduler.cache.gives_up:
        scheduler.cache.slide(draft.rows)
    going = draft.given.nonzero()[0]
    if not len(going):
        return
    rows = draft.rows[going]
    computed = scheduler.running.computed[rows]
    upto = computed + draft.given[going]
    got = scheduler.cache.reserve_many(rows, upto)
    if isinstance(got, Shortfall):
        draft.bound_by = "kv_blocks"
        _grow_singly(scheduler, draft, rows.tolist())
    else:
        draft.new_blocks.extend(got.new_blocks)


def _grow_singly(scheduler: Scheduler, draft: Draft, rows: list[int]) -> None:
    running = scheduler.running
    oldest = _oldest(scheduler)
    rows.sort(key=lambda row: (row != oldest, running.sequence(row).order))
    places = {int(row): place for place, row in enumerate(draft.rows)}
    for row in rows:
        while draft.given[places[row]]:
            if _grow_one(scheduler, draft, row, places[row]):
                break
            if not _make_room(scheduler, draft, oldest):
                draft.given[places[row]] = 0
                draft.stalled += 1


def _grow_one(scheduler: Scheduler, draft: Draft, row: int, place: int) -> bool:
    """Reserve for as much of the row's chunk as fits; False when not even one position does."""
    cache = scheduler.cache
    computed = int(scheduler.running.computed[row])
    upto = computed + int(draft.given[place])
    fits = cache.largest_reservable(row, upto)
    short = fits <= computed
    if short:
        if not any(cache.pool.unsaved):
            return False
        fits = computed + 1  # asking begins the copies that room waits for
    got = cache.reserve(row, fits)
    if isinstance(got, Shortfall):
        if short or scheduler.tiering is not None:
            return False
        raise InvariantViolation("reserve-all-or-nothing", f"row {row}: {fits} positions fit, then did not")
    draft.new_blocks.extend(got.new_blocks)
    draft.given[place] = fits - computed
    return True


def _make_room(scheduler: Scheduler, draft: Draft, oldest: int) -> bool:
    """Preempt somebody. False when the step must wait instead: for draining blocks, or a plan in flight."""
    running = scheduler.running
    tiering = scheduler.tiering
    # Whom nobody may pause waits for late copies too: they hold room that was promised.
    guarantees = scheduler.policies.admission.guarantees
    copying = tiering is not None and (tiering.holds_room if guarantees else tiering.frees_soon)
    if any(scheduler.cache.pool.draining) or scheduler.cache.pins or copying or _will_slide(scheduler):
        # What is on its way back may be enough; nobody is paused before that is known.
        return False
    if lose_broken_suspensions(scheduler):
        return True
    rows = [row for row in running.live_rows().tolist() if row != oldest and running.wanted(np.array([row]))[0]]
    if not rows:
        if scheduler.release_ended_seats():
            return True
        if scheduler.in_flight or (tiering is not None and tiering.awaited):
            return False
        if lose_latest_suspension(scheduler, running.sequence(oldest)):
            return True
        if max(scheduler.cache.pool.blocks_per_slab) > 1 or scheduler.cache.sharing is not None:
            # Alone, and yet short: its blocks lie scattered over slabs that it fills in part, or it holds
            # doubles of blocks that others have left. Starting over packs them, and shares those.
            return preempt(scheduler, oldest, draft)
        if tiering is not None and tiering.pending:
            return False  # copies that are late hold what it lacks
        raise InvariantViolation("progress", "the oldest running sequence cannot grow and nobody can give way")
    candidates = [
        Candidate(
            sequence_id=running.sequence(row).sequence_id,
            priority=running.sequence(row).request.priority,
            arrival=running.sequence(row).sequence_id,
            blocks=sum(int(table.held[row]) for table in scheduler.cache.tables),
            computed_tokens=int(running.computed[row]),
        )
        for row in rows
    ]
    choice = scheduler.policies.victim.victim(candidates)
    if not 0 <= choice < len(candidates):
        raise PolicyError(f"victim policy {scheduler.policies.victim.name!r} chose {choice} of {len(candidates)}")
    return preempt(scheduler, rows[choice], draft)


def _will_slide(scheduler: Scheduler) -> bool:
    """Whether blocks will be given up once the plan in flight has been learned of."""
    if not scheduler.in_flight or not scheduler.cache.gives_up:
        return False
    rows = scheduler.running.live_rows()
    return scheduler.cache.will_slide(rows, scheduler.running.computed[rows])


def _oldest(scheduler: Scheduler) -> int:
    live = scheduler.running.live_rows()
    return int(live[np.argmin(scheduler.running.sequence_id[live])])
