"""Who gives way, and state on its way between tiers: what becomes of a sequence when its copies end, or do not.

    running --preempt--> waiting, its state given up or suspended on the host
    seated, waiting for copies --arrived--> computes on
                               --lost-----> waiting, and starts without what did not come

Owns no state: functions of the scheduler, as `growth` and `entry` are.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import TYPE_CHECKING

from octavo.memory.transfers import Ended, Notice
from octavo.policy.preemption import Action
from octavo.scheduling.events import Arrived, Preempted, Restarted, Transferred
from octavo.scheduling.records import note_peak

if TYPE_CHECKING:
    from octavo.scheduling.draft import Draft
    from octavo.scheduling.scheduler import Scheduler
    from octavo.scheduling.sequence import Sequence


def preempt(scheduler: Scheduler, row: int, draft: Draft) -> bool:
    """The row's sequence gives way and returns to the queue; what is in flight for it is forgotten.

    Its state is given up, or goes to the host as it is. False when that has to wait for a plan in flight: then it is
    left out of this step.
    """
    sequence, cache = scheduler.running.sequence(row), scheduler.cache
    computed = int(cache.committed[row])
    action = _action(scheduler, row, computed)
    if action == "offload" and int(cache.touched[row]) > cache.settled:
        draft.given[draft.rows == row] = 0
        draft.stalled += 1
        return False
    blocks = sum(int(table.held[row]) for table in cache.tables)
    if action == "offload" and _park(scheduler, row):
        given_up = 0
    else:
        action, given_up = "recompute", computed
        scheduler.leave(row)
    draft.withdraw(row)
    draft.preempted += 1
    sequence.preemptions += 1
    sequence.given_up_tokens = given_up
    sequence.paused_at_s = draft.now
    scheduler.waiting.push(sequence, returned=True)
    scheduler.say(Preempted(draft.now, sequence.sequence_id, action, computed, blocks))
    return True


def _action(scheduler: Scheduler, row: int, computed: int) -> Action:
    policy, tiering = scheduler.policies.preemption, scheduler.tiering
    if tiering is None or not policy.moves or not computed:
        return "recompute"
    counts = tiering.parking.own_blocks(row)
    if not tiering.parking.can_park(counts):
        return "recompute"
    moved = sum(n * group.block_bytes for n, group in zip(counts, scheduler.cache.layout.groups, strict=True))
    return policy.action(computed, moved, tiering.rates)


def _park(scheduler: Scheduler, row: int) -> bool:
    """The row's state goes to the host, and its seat is empty; False, and nothing has changed, without room."""
    assert scheduler.tiering is not None
    sequence = scheduler.running.sequence(row)
    note_peak(sequence, [int(table.held[row]) for table in scheduler.cache.tables])
    value = scheduler.tiering.parking.park(row)
    if value is None:
        return False
    sequence.suspended = value.ticket
    scheduler.snapshots.forget(row)
    scheduler.untold(row)
    scheduler.running.unseat([row])
    return True


def settle_transfers(scheduler: Scheduler, notices: ListLike[Notice], now: float) -> None:
    """Learn what became of copies. Between two steps."""
    assert scheduler.tiering is not None
    for notice in notices:
        if isinstance(notice, Ended):
            order, reasons = notice.order, tuple(reason for reason in notice.reasons if reason)
            scheduler.say(
                Transferred(
                    now, order.route, order.group, order.blocks - len(reasons),
                    notice.bytes, notice.seconds, notice.status, reasons,
                )
            )  # fmt: skip
    arrivals = scheduler.tiering.settle(notices)
    for row, reason in arrivals.lost:
        _restart(scheduler, row, reason, now)
    for row in arrivals.rows:
        scheduler.running.loading[row] = False
        sequence = scheduler.running.sequence(row)
        sequence.restored_tokens = sequence.spared_tokens = 0
        scheduler.say(Arrived(now, sequence.sequence_id, now - sequence.waits_since_s))


def _restart(scheduler: Scheduler, row: int, reason: str, now: float) -> None:
    """What the row waited for will not come: its sequence goes back to the queue, and begins without it."""
    sequence = scheduler.running.sequence(row)
    scheduler.leave(row)
    sequence.given_up_tokens += sequence.spared_tokens
    sequence.restored_tokens = sequence.spared_tokens = 0
    if not sequence.preemptions:
        sequence.cached_tokens = None
    sequence.paused_at_s = now
    scheduler.waiting.push(sequence, returned=True)
    scheduler.say(Restarted(now, sequence.sequence_id, reason))


def lose_suspension(scheduler: Scheduler, sequence: Sequence) -> None:
    """Its suspended state is given up: it computes again, from the longest start that is kept."""
    assert scheduler.tiering is not None
    assert sequence.suspended is not None
    sequence.given_up_tokens += scheduler.cache.suspensions[sequence.suspended].tokens
    scheduler.tiering.parking.drop(sequence.suspended)
    sequence.suspended = None


def lose_broken_suspensions(scheduler: Scheduler) -> bool:
    """Suspended state that has lost a part takes room for nothing; whether any was given up."""
    if scheduler.tiering is None or not scheduler.tiering.parking.any_broken:
        return False
    broken = scheduler.tiering.parking.broken
    lost = [other for other in scheduler.waiting if other.suspended is not None and broken(other.suspended)]
    for sequence in lost:
        lose_suspension(scheduler, sequence)
    return bool(lost)


def lose_latest_suspension(scheduler: Scheduler, spared: Sequence) -> bool:
    """Of those who wait with suspended state, the last in line gives it up; False when there is none but `spared`."""
    waiting = [other for other in scheduler.waiting if other.suspended is not None and other is not spared]
    if waiting:
        lose_suspension(scheduler, waiting[-1])
    return bool(waiting)
