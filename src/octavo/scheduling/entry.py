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
from octavo.memory.adoption import adopt, shared_blocks
from octavo.memory.cache import KVCache
from octavo.memory.prefix import NO_MATCH, Match
from octavo.memory.values import NOTHING_NEW, Adoption, Reservation, Shortfall
from octavo.policy.admission import AdmissionView
from octavo.scheduling.draft import Draft
from octavo.scheduling.events import Resource
from octavo.scheduling.limits import extent_of
from octavo.scheduling.refusal import awaits, remembered, still_refused
from octavo.scheduling.sequence import Sequence

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
            if awaits(scheduler, sequence.refusal):
                continue
        else:
            sequence.refusal = None
            match = _match(scheduler, draft, sequence)
            if match is None:
                continue
            promised = promised or _promised(scheduler)
            seated = _try_to_seat(scheduler, draft, sequence, match, promised)
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
    scheduler: Scheduler, draft: Draft, sequence: Sequence, match: Match, promised: _Promised
) -> _Promised | None:
    """Seat it and say what it still has to reserve, or None."""
    cache, limits = scheduler.cache, scheduler.limits
    allocation = scheduler.policies.allocation
    known = sequence.known_tokens
    # Plans made ahead: what the last one reads is kept while the next one's positions are reserved.
    plans = scheduler.plans_ahead + 1
    span = cache.largest_step(sequence.limit - 1, limits.max_num_batched_tokens * plans)
    step = max(1, span // plans)
    cut = scheduler.cut(sequence)
    chunk = min(known - match.tokens, step, draft.budget)
    if cut > match.tokens:
        chunk = min(chunk, cut - match.tokens)
    extent = extent_of(sequence.request, sequence.limit, match.tokens + chunk, limits.max_model_len)
    reserve = allocation.reserve_tokens(extent)
    if reserve < extent.upto:
        raise PolicyError(f"allocation {allocation.name!r} gave room for {reserve} of {extent.upto} positions")
    shared = shared_blocks(cache, match)
    needs = _needs(cache, (max(known, reserve), max(sequence.limit - 1, reserve)), step * plans, shared)
    # Where there is no room to plan ahead, it goes on one plan at a time, and alone.
    singly = span < plans
    least = needs
    if singly and not len(scheduler.running):
        least = _needs(cache, (max(known, reserve), max(sequence.limit - 1, reserve)), span, shared)
    view = _view(scheduler, promised, least, resuming=sequence.preemptions > 0)
    if not scheduler.policies.admission.admits(view):
        if not view.running and not scheduler.in_flight:
            if view.free < view.total and not cache.suspensions:
                raise InvariantViolation("end-releases", f"nothing runs and {view.free} of {view.total} slabs are free")
            raise PolicyError(f"admission {scheduler.policies.admission.name!r} refuses although nothing runs: {view}")
        sequence.refusal = remembered(scheduler, sequence, match)
        return None
    row = scheduler.running.seat(sequence, step, match.tokens, cut)
    scheduler.running.singly[row] = singly
    got = _blocks(scheduler, draft, sequence, match, reserve)
    if isinstance(got, Shortfall):
        scheduler.running.unseat([row])
        scheduler.back_to_line(sequence)
        if match.tokens and not len(scheduler.running) and not scheduler.in_flight:
            # What it would be copied from takes the very room for the copy: it computes all by itself.
            return _try_to_seat(scheduler, draft, sequence, match.left_alone(), promised)
        return None
    draft.new_blocks.extend(got.new_blocks)
    draft.entered_rows.append(row)
    draft.entered_counts.append(chunk)
    draft.budget -= chunk
    scheduler.welcome(sequence, draft, match)
    own = [int(table.held[row]) - n for table, n in zip(cache.tables, shared, strict=True)]
    return _Promised(_beyond(needs.known, own), _beyond(needs.most, own))


def _needs(cache: KVCache, tokens: tuple[int, int], step: int, shared: list[int]) -> _Promised:
    """Blocks to reach each of two lengths, beyond those that are shared."""
    known, most = (_beyond(cache.blocks_charged(n, step), shared) for n in tokens)
    return _Promised(known, most)


def _blocks(
    scheduler: Scheduler, draft: Draft, sequence: Sequence, match: Match, reserve: int
) -> Reservation | Adoption | Shortfall:
    """Blocks of the row just seated, with room for `reserve` positions."""
    cache = scheduler.cache
    if sequence.chain is None:
        return cache.reserve(sequence.row, reserve) if reserve else NOTHING_NEW
    got = adopt(cache, sequence.row, match, sequence.chain, reserve, scheduler.next_plan)
    if isinstance(got, Adoption):
        draft.copies.extend(got.copies)
    return got


def _match(scheduler: Scheduler, draft: Draft, sequence: Sequence) -> Match | None:
    """What it can start from; None when it had better wait for the block that a running sequence is computing."""
    sharing, chain = scheduler.cache.sharing, sequence.chain
    if sharing is None or chain is None or draft.budget <= 0:
        return NO_MATCH
    tokens = sequence.tokens()
    chain.extend(tokens)
    match = sharing.match(chain, tokens, len(tokens) - 1)
    # A whole batch enters together or not at all: nobody in it can wait for another.
    if not scheduler.policies.batching.whole_batches and sharing.awaited(match, chain):
        return None
    return match


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
    step = np.minimum(running.step[rows], np.maximum(1, known - running.computed[rows]))
    if scheduler.plans_ahead:
        step += np.maximum(step, running.computed[rows] - cache.committed[rows])
    most = np.where(running.done[rows], 0, running.limit[rows] - 1)
    return _Promised(cache.blocks_to_come(rows, known, step), cache.blocks_to_come(rows, most, step))


def _sums(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]


def _beyond(needed: list[int], held: list[int]) -> list[int]:
    return [max(0, a - b) for a, b in zip(needed, held, strict=True)]
