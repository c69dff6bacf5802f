"""Who enters: waiting sequences are seated while seats, tokens and blocks allow.

Order is priority, then arrival. When the first in line cannot be served for want of blocks,
smaller ones behind it may pass, at most `MAX_PASSED` times and from at most `LOOKAHEAD` places
behind; then the line waits for it. Nobody passes a sequence that was preempted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import InvariantViolation, PolicyError
from octavo.memory.cache import KVCache
from octavo.memory.values import Shortfall
from octavo.policy.admission import AdmissionView
from octavo.scheduling.draft import Draft
from octavo.scheduling.events import Resource
from octavo.scheduling.keeping import cut as cut_of
from octavo.scheduling.limits import extent_of
from octavo.scheduling.moving import lose_latest_suspension, lose_suspension
from octavo.scheduling.refusal import awaits, remembered, still_refused
from octavo.scheduling.sequence import Sequence
from octavo.scheduling.starting import Start, kept, on_the_device, start_of, take

if TYPE_CHECKING:
    from octavo.scheduling.scheduler import Scheduler

LOOKAHEAD = 16
MAX_PASSED = 64


def enter(scheduler: Scheduler, draft: Draft) -> None:
    """Seat waiting sequences; says in `draft.bound_by` what kept the next one out."""
    if draft.preempted or draft.stalled:
        return
    whole = scheduler.policies.batching.whole_batches
    closed: Resource | None = "sequence_limit" if whole and len(draft.rows) else _closed(scheduler, draft)
    if closed is not None:
        draft.bound_by = draft.bound_by or closed
        return
    promised: _Promised | None = None
    first_blocked: Sequence | None = None
    looked = 0
    for sequence in scheduler.waiting:
        closed = _closed(scheduler, draft)
        if closed is not None:
            draft.bound_by = draft.bound_by or closed
            return
        looked += first_blocked is not None
        seated = None
        if sequence.refusal is not None and still_refused(scheduler, sequence.refusal):
            if awaits(scheduler, sequence, sequence.refusal):
                continue
        else:
            sequence.refusal = None
            start = start_of(scheduler, draft, sequence)
            if start is None:
                continue
            promised = promised or _promised(scheduler)
            seated = _try_to_seat(scheduler, draft, sequence, start, promised)
        if seated is None:
            draft.bound_by = "kv_blocks"
            first_blocked = first_blocked or sequence
            if sequence.preemptions or first_blocked.passed >= MAX_PASSED or looked >= LOOKAHEAD:
                return
            continue
        promised = seated if promised is None else promised.plus(seated)  # never None: it was weighed
        if first_blocked is not None:
            first_blocked.passed += 1
            if first_blocked.passed >= MAX_PASSED:
                return


def _closed(scheduler: Scheduler, draft: Draft) -> Resource | None:
    """What keeps everybody out, however many blocks are free."""
    if len(scheduler.running) >= scheduler.limits.max_num_seqs:
        return "sequence_limit"
    if draft.budget <= 0 and not scheduler.policies.batching.whole_batches:
        return "token_budget"
    return None


@dataclass(frozen=True, slots=True)
class _Promised:
    """Blocks of each group still to be reserved: for tokens that sequences have, and for their declared maxima."""

    known: list[int]
    most: list[int]

    def plus(self, other: _Promised) -> _Promised:
        return _Promised(_sums(self.known, other.known), _sums(self.most, other.most))


def _try_to_seat(
    scheduler: Scheduler, draft: Draft, sequence: Sequence, start: Start, promised: _Promised
) -> _Promised | None:
    """Seat it and say what it still has to reserve, or None."""
    cache, limits = scheduler.cache, scheduler.limits
    # Plans made ahead: what the last one reads is kept while the next one's positions are reserved.
    plans = scheduler.plans_ahead + 1
    span = cache.largest_step(sequence.limit - 1, limits.max_num_batched_tokens * plans)
    step = max(1, span // plans)
    cut = cut_of(scheduler, sequence)
    chunk = min(sequence.known_tokens - start.tokens, step, draft.budget)
    if cut > start.tokens:
        chunk = min(chunk, cut - start.tokens)
    reserve = _extent(scheduler, sequence, start.tokens + chunk)
    lengths = (max(sequence.known_tokens, reserve), max(sequence.limit - 1, reserve))
    needs = _needs(cache, lengths, step * plans, start.shared)
    # Where there is no room to plan ahead, it goes on one plan at a time, and alone.
    singly = span < plans
    least = needs
    if singly and not len(scheduler.running):
        least = _needs(cache, lengths, span, start.shared)
    view = _view(scheduler, promised, least, resuming=sequence.preemptions > 0)
    if not scheduler.policies.admission.admits(view):
        if _must_have_room(scheduler, sequence, view):
            return _try_to_seat(scheduler, draft, sequence, start, promised)
        sequence.refusal = remembered(scheduler, sequence, start.match)
        return None
    row = scheduler.running.seat(sequence, step, start.tokens, cut)
    scheduler.running.singly[row] = singly
    got = take(scheduler, draft, sequence, start, reserve)
    if got is None or isinstance(got, Shortfall):
        scheduler.running.unseat([row])
        scheduler.back_to_line(sequence)
        less = _less(scheduler, sequence, start, got)
        return None if less is None else _try_to_seat(scheduler, draft, sequence, less, promised)
    draft.new_blocks.extend(got.new_blocks)
    if start.waits:
        chunk = 0
    draft.entered_rows.append(row)
    draft.entered_counts.append(chunk)
    draft.budget -= chunk
    scheduler.welcome(sequence, draft, start)
    if not len(scheduler.waiting):
        return needs  # there is nobody left for whom it is to be weighed
    own = [int(table.held[row]) - n for table, n in zip(cache.tables, start.shared, strict=True)]
    return _Promised(_beyond(needs.known, own), _beyond(needs.most, own))


def _extent(scheduler: Scheduler, sequence: Sequence, upto: int) -> int:
    """Positions that it gets room for."""
    allocation = scheduler.policies.allocation
    extent = extent_of(sequence.request, sequence.limit, upto, scheduler.limits.max_model_len)
    reserve = allocation.reserve_tokens(extent)
    if reserve < extent.upto:
        raise PolicyError(f"allocation {allocation.name!r} gave room for {reserve} of {extent.upto} positions")
    return reserve


def _must_have_room(scheduler: Scheduler, sequence: Sequence, view: AdmissionView) -> bool:
    """It was refused. Whether room has just been made for it, since nothing else is going to make any."""
    tiering = scheduler.tiering
    if view.running or scheduler.in_flight or (tiering is not None and tiering.pending):
        return False
    if lose_latest_suspension(scheduler, sequence):
        return True
    if view.free < view.total and not scheduler.cache.suspensions:
        raise InvariantViolation("end-releases", f"nothing runs and {view.free} of {view.total} slabs are free")
    raise PolicyError(f"admission {scheduler.policies.admission.name!r} refuses although nothing runs: {view}")


def _less(scheduler: Scheduler, sequence: Sequence, start: Start, got: Shortfall | None) -> Start | None:
    """It was seated and did not find room. What it may start from instead, at once."""
    if got is None:
        return on_the_device(scheduler, sequence)
    tiering = scheduler.tiering
    if len(scheduler.running) or scheduler.in_flight or (tiering is not None and tiering.pending):
        return None
    if not start.tokens:
        # Blocks that come before a suspended sequence's own are counted as room, and cannot go while it has those.
        return start if lose_latest_suspension(scheduler, sequence) else None
    if start.ticket is not None:
        lose_suspension(scheduler, sequence)
    # What it would be copied from takes the very room for the copy: it computes all by itself.
    return kept(scheduler, start.match.left_alone())


def _needs(cache: KVCache, tokens: tuple[int, int], step: int, shared: list[int]) -> _Promised:
    """Blocks to reach each of two lengths, beyond those that are shared."""
    known, most = (_beyond(cache.blocks_charged(n, step), shared) for n in tokens)
    return _Promised(known, most)


def _view(scheduler: Scheduler, promised: _Promised, needs: _Promised, *, resuming: bool) -> AdmissionView:
    pool = scheduler.cache.pool
    known, free = pool.room_for(promised.known)
    most, _ = pool.room_for(promised.most)
    return AdmissionView(
        total=pool.slabs,
        free=free,
        promised=known,
        promised_max=most,
        need=pool.room_for(_sums(promised.known, needs.known))[0] - known,
        need_max=pool.room_for(_sums(promised.most, needs.most))[0] - most,
        running=len(scheduler.running),
        resuming=resuming,
    )


def _promised(scheduler: Scheduler) -> _Promised:
    """What running sequences still have to reserve."""
    running, cache = scheduler.running, scheduler.cache
    rows = running.order
    known = running.known[rows] + running.pending[rows]
    step = None
    if cache.gives_up:
        step = np.minimum(running.step[rows], np.maximum(1, known - running.computed[rows]))
        if scheduler.plans_ahead:
            step += np.maximum(step, running.computed[rows] - cache.committed[rows])
    most = running.limit[rows] - 1
    if running.ended:
        most[running.done[rows]] = 0
    return _Promised(cache.blocks_to_come(rows, known, step), cache.blocks_to_come(rows, most, step))


def _sums(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]


def _beyond(needed: list[int], held: list[int]) -> list[int]:
    return [max(0, a - b) for a, b in zip(needed, held, strict=True)]
