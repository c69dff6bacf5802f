"""Who enters: waiting sequences are seated while seats, tokens and blocks allow.

Order is priority, then arrival. When the first in line cannot be served for want of blocks,
smaller ones behind it may pass, at most `MAX_PASSED` times and from at most `LOOKAHEAD` places
behind; then the line waits for it. Nobody passes a sequence that was preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import PolicyError
from octavo.memory.values import NOTHING_NEW, Int64, Shortfall
from octavo.policy.admission import AdmissionView
from octavo.scheduling.draft import Draft
from octavo.scheduling.events import Resource
from octavo.scheduling.limits import extent_of
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
    promised = promised_slabs(scheduler)
    committed = committed_slabs(scheduler)
    first_blocked: Sequence | None = None
    looked = 0
    for sequence in scheduler.waiting:
        closed = _closed(scheduler, draft)
        if closed is not None:
            draft.bound_by = draft.bound_by or closed
            return
        looked += first_blocked is not None
        costs = _try_to_seat(scheduler, draft, sequence, promised, committed)
        if costs is None:
            draft.bound_by = "kv_blocks"
            first_blocked = first_blocked or sequence
            if sequence.preemptions or first_blocked.passed >= MAX_PASSED or looked >= LOOKAHEAD:
                return
            continue
        promised += costs[0]
        committed += costs[1]
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


def _try_to_seat(
    scheduler: Scheduler, draft: Draft, sequence: Sequence, promised: int, committed: int
) -> tuple[int, int] | None:
    """Seat it, or None. Returns what it still has to reserve for its tokens, and its declared maximum."""
    layout, pool, allocation = scheduler.cache.layout, scheduler.cache.pool, scheduler.policies.allocation
    known = sequence.known_tokens
    chunk = min(known, draft.budget)
    extent = extent_of(sequence.request, sequence.limit, chunk, scheduler.limits.max_model_len)
    reserve = allocation.reserve_tokens(extent)
    if reserve < extent.upto:
        raise PolicyError(f"allocation {allocation.name!r} gave room for {reserve} of {extent.upto} positions")
    need, need_max = layout.slabs_for(max(known, reserve)), layout.slabs_for(max(sequence.limit - 1, reserve))
    view = AdmissionView(
        total=pool.slabs,
        free=pool.free.count,
        promised=promised,
        committed=committed,
        need=need,
        need_max=need_max,
        running=len(scheduler.running),
        resuming=sequence.preemptions > 0,
    )
    if not scheduler.policies.admission.admits(view):
        if not view.running and not scheduler.in_flight:
            raise PolicyError(f"admission {scheduler.policies.admission.name!r} refuses although nothing runs: {view}")
        return None
    row = scheduler.running.seat(sequence)
    got = scheduler.cache.reserve(row, reserve) if reserve else NOTHING_NEW
    if isinstance(got, Shortfall):
        scheduler.running.unseat([row])
        scheduler.back_to_line(sequence)
        return None
    draft.new_blocks.extend(got.new_blocks)
    draft.entered_rows.append(row)
    draft.entered_counts.append(chunk)
    draft.budget -= chunk
    scheduler.welcome(sequence, draft)
    return need - layout.slabs_for(reserve), need_max


def promised_slabs(scheduler: Scheduler) -> int:
    """Slabs that running sequences still have to reserve for the tokens they already have."""
    running = scheduler.running
    rows = running.order
    return _beyond(scheduler, rows, running.known[rows] + running.pending[rows])


def committed_slabs(scheduler: Scheduler) -> int:
    """Slabs of the declared maxima of all running sequences, and of what drains."""
    running, cache = scheduler.running, scheduler.cache
    rows = running.order
    most = np.where(running.done[rows], 0, running.limit[rows] - 1)
    total = _beyond(scheduler, rows, most)
    for group, table in zip(cache.layout.groups, cache.tables, strict=True):
        total += int((-(-table.counts[rows] // group.blocks_per_slab)).sum())
    draining = sum(-(-n // g.blocks_per_slab) for n, g in zip(cache.pool.draining, cache.layout.groups, strict=True))
    return total + draining


def _beyond(scheduler: Scheduler, rows: np.ndarray, tokens: Int64) -> int:
    """Slabs to be added so that each row has room for `tokens` positions."""
    total = 0
    for group, table in zip(scheduler.cache.layout.groups, scheduler.cache.tables, strict=True):
        blocks = -(-tokens // group.block_tokens) if group.block_tokens else np.ones_like(tokens)
        missing = np.maximum(0, blocks - table.counts[rows])
        total += int((-(-missing // group.blocks_per_slab)).sum())
    return total
