"""Moves whole blocks between tiers, beside the engine: a thread for the arenas, another for the disk.

    engine's thread              a lane's thread
    submit(order)     --queue--> one order at a time, upwards before downwards, in batches, within the budget
    poll() -> notices <--ended-- status, bytes and a reason for each block
    cancel(number)               seen between two batches; the batch under way is always finished
    forget(slots)     --queue--> in turn, so that what is stored there afterwards stays

Owns the copies and their order; decides nothing about who holds a slot. Invariant: every order is answered by one
`Ended`, never while a copy may still touch its slots, whatever happens to the copy, its deadline or its completion.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.errors import ConfigError, InvariantViolation
from octavo.memory.transfers import LANES, SIDES, UPWARDS, Ended, Lane, Notice, Order, Status, Tier, TimedOut
from octavo.runtime.arena import Arena
from octavo.runtime.block_copy import BlockCopier
from octavo.runtime.disk_batch import Batch, Int64, are_below, are_keys, numbers
from octavo.runtime.disk_format import KEY_BYTES
from octavo.runtime.disk_look import LOOK_S, Looker
from octavo.runtime.disk_store import DiskStore
from octavo.runtime.host_pages import PagesAhead

Clock = Callable[[], float]

WAIT_S = 0.02
"""The longest that `wait` waits."""


class Faults(Protocol):
    """What tests do to a mover: called on a lane's thread."""

    def before_batch(self, order: Order, first_block: int) -> None:
        """May sleep, or raise."""

    def loses(self, order: Order) -> bool:
        """Whether the word that the order has ended gets lost."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What the lanes may take of the machine: bytes per second, None for no bound."""

    bytes_per_second: float | None = None
    """Between the arenas."""
    disk_bytes_per_second: float | None = None
    batch_bytes: int = 8 << 20
    """Between two looks at the budget and at cancellations; at least one block."""
    disk_batch_bytes: int = 32 << 20
    """The same on the disk's lane."""

    def __post_init__(self) -> None:
        for name in ("bytes_per_second", "disk_bytes_per_second", "batch_bytes", "disk_batch_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(name, value, "must be positive")


@dataclass(slots=True, eq=False)
class _Transfer:
    order: Order
    sources: Int64
    targets: Int64
    deadline: float | None
    after: Any
    reasons: list[str]
    state: str = "queued"  # then running, then ended
    stopped: Status | None = None
    """Cancelled or timed out: no further batch begins."""
    started: float | None = None
    ended: float = 0.0
    blocks: Batch | None = None
    """Of an order to or from the disk, once it has begun."""


@dataclass(frozen=True, slots=True)
class _Erasure:
    group: int
    slots: tuple[int, ...]


@dataclass(slots=True)
class _Lane:
    name: Lane
    batch_bytes: int
    bytes_per_second: float | None
    queue: deque[_Transfer | _Erasure] = field(default_factory=deque)
    current: _Transfer | None = None
    next_start: float = 0.0
    thread: threading.Thread | None = None

    @property
    def is_dead(self) -> bool:
        return self.thread is not None and not self.thread.is_alive()


def _enqueue(queue: deque[_Transfer | _Erasure], transfer: _Transfer) -> None:
    """A copy upwards goes before those downwards, which fewer wait for, but not before erasures and others upwards. It
    touches no slot that they do: what is copied up has been copied down, and that copy has ended."""
    place = len(queue)
    if transfer.order.route in UPWARDS:
        while place and isinstance(before := queue[place - 1], _Transfer) and before.order.route not in UPWARDS:
            place -= 1
    queue.insert(place, transfer)


class Mover:
    """A `memory.transfers.Mover`. `device` and `host` have one layout; `disk` has a store for each group, or is empty.

    Its methods belong to one thread, the engine's, and none but `wait` and `close` waits for anything. Deadlines are
    kept by its own clock, which runs on while the engine computes. `after_order` may be set to a wake-up call that
    lanes make whenever something has ended.
    """

    def __init__(
        self,
        device: Arena,
        host: Arena,
        disk: Sequence[DiskStore] = (),
        *,
        budget: Budget | None = None,
        clock: Clock = time.monotonic,
        faults: Faults | None = None,
        look_s: float = LOOK_S,
    ) -> None:
        """`look_s`: between two looks for what other processes have left on a disk that is shared."""
        budget = budget or Budget()
        sizes = [group.block_bytes for group in device.layout.groups]
        if disk and [store.block_bytes for store in disk] != sizes:
            raise ConfigError(
                "disk_path", [store.block_bytes for store in disk], f"stores must hold blocks of {sizes} bytes"
            )
        self.copier = BlockCopier(device, host)
        self.disk = tuple(disk)
        self.after_order: Callable[[], None] | None = None
        self.erasures_failed = 0
        """Times that records could not be erased, for a reason that no store names."""
        self._sizes = sizes
        self._pages = PagesAhead(host.bytes.data_ptr(), 0 if device.device.type == "cuda" else host.bytes.numel())
        self._clock = clock
        self._faults = faults
        self._lock = threading.Condition()
        self._open: dict[int, _Transfer] = {}
        self._ended: deque[_Transfer] = deque()
        self._news = False
        """Whether there may be something to poll, deadlines apart."""
        self._closing = False
        self._lanes = {
            "arenas": _Lane("arenas", budget.batch_bytes, budget.bytes_per_second),
            "disk": _Lane("disk", budget.disk_batch_bytes, budget.disk_bytes_per_second),
        }
        for lane in self._lanes.values():
            lane.thread = threading.Thread(target=self._serve, args=(lane,), name=f"octavo-{lane.name}", daemon=True)
            lane.thread.start()
        self._looker = Looker(self.disk, look_s)

    # ---- the engine's thread

    def submit(self, order: Order) -> None:
        sources, targets = self._checked(order)
        after = self.copier.mark() if LANES[order.route] == "arenas" else None
        deadline = None if order.timeout is None else self._clock() + order.timeout
        transfer = _Transfer(order, sources, targets, deadline, after, ["not_begun"] * order.blocks)
        if SIDES[order.route][1] == "host":
            self._pages.used(self.copier.host.layout.address(order.group, int(targets.max())))
        with self._lock:
            self._open[order.number] = transfer
            _enqueue(self._lanes[LANES[order.route]].queue, transfer)
            self._lock.notify_all()

    def cancel(self, number: int) -> None:
        """Begin no further batch of it; nothing, if its end was reported already."""
        with self._lock:
            transfer = self._open.get(number)
            if transfer is not None:
                transfer.stopped = transfer.stopped or "cancelled"
                self._news = True
                self._lock.notify_all()

    def forget(self, group: int, slots: Sequence[int]) -> None:
        """Erase the records of disk slots once everything ordered before has ended, also if `close` comes first."""
        if not self.disk:
            raise InvariantViolation("transfer-order", f"forget {list(slots)} without a disk")
        with self._lock:
            self._lanes["disk"].queue.append(_Erasure(group, tuple(slots)))
            self._lock.notify_all()

    def poll(self, now: float) -> list[Notice]:
        """What has happened since the last call. `now`, the engine's clock, plays no part."""
        notices: list[Notice] = [*self._looker.take()]
        moment = self._clock()
        with self._lock:
            self._news = False
            for transfer in list(self._open.values()):
                late = transfer.deadline is not None and moment >= transfer.deadline and transfer.state != "ended"
                if late and transfer.stopped is None:
                    transfer.stopped = "timed_out"
                    notices.append(TimedOut(transfer.order.number))
                    self._lock.notify_all()
                self._reconcile(transfer, moment)
            while self._ended:
                transfer = self._ended.popleft()
                if self._open.pop(transfer.order.number, None) is not None:
                    notices.append(self._report(transfer))
        return notices

    def wait(self) -> None:
        """Return once something has ended, a deadline has come, or `WAIT_S` has passed."""
        with self._lock:
            deadlines = [t.deadline for t in self._open.values() if t.deadline is not None and t.stopped is None]
            until = min(deadlines, default=None)
            seconds = WAIT_S if until is None else min(WAIT_S, max(0.0, until - self._clock()))
            self._lock.wait_for(lambda: self._news, seconds)

    @property
    def pending(self) -> int:
        """Orders whose end has not been reported."""
        return len(self._open)

    def close(self) -> None:
        """Stop after the batches under way, wait for them, and close the disk's stores.

        A last `poll` then reports every order's end.
        """
        with self._lock:
            self._closing = True
            for transfer in self._open.values():
                if transfer.state != "ended":
                    transfer.stopped = transfer.stopped or "cancelled"
            self._lock.notify_all()
        self._looker.close()
        for lane in self._lanes.values():
            if lane.thread is not None:
                lane.thread.join()
        for item in list(self._lanes["disk"].queue):  # of a thread that died
            if isinstance(item, _Erasure):
                self._lanes["disk"].queue.remove(item)
                self._erase(item)
        for store in self.disk:
            store.close()
        self.copier.close()

    def _checked(self, order: Order) -> tuple[Int64, Int64]:
        """Sources and targets, as arrays: what is sliced and compared batch by batch."""
        order.require_whole()
        if self._closing or order.number in self._open:
            why = "after close" if self._closing else "a second time"
            raise InvariantViolation("transfer-order", f"number {order.number} is ordered {why}")
        if LANES[order.route] == "disk" and not self.disk:
            raise InvariantViolation("transfer-order", f"{order.route} without a disk")
        if not are_keys(order.keys):
            raise InvariantViolation("transfer-order", f"{order.route} with keys of other than {KEY_BYTES} bytes")
        sides = numbers(order.sources), numbers(order.targets)
        for tier, slots in zip(SIDES[order.route], sides, strict=True):
            most = self._slots(tier, order.group)
            if not are_below(slots, most):
                slots_named = slots.tolist()
                raise InvariantViolation(
                    "transfer-order", f"{order.route}: a slot of {slots_named} is outside 0..{most - 1}"
                )
        return sides

    def _slots(self, tier: Tier, group: int) -> int:
        if tier == "disk":
            return self.disk[group].slots
        arena = self.copier.device if tier == "device" else self.copier.host
        return arena.n_slabs * arena.layout.groups[group].blocks_per_slab

    def _reconcile(self, transfer: _Transfer, moment: float) -> None:
        """End what no thread will: a stopped order that never began, or one whose word of completion got lost."""
        lane = self._lanes[LANES[transfer.order.route]]
        if transfer.state == "queued" and (transfer.stopped is not None or lane.is_dead):
            lane.queue.remove(transfer)
            self._end(transfer, moment)
        elif transfer.state == "running" and (lane.current is not transfer or lane.is_dead):
            transfer.reasons = ["lost_completion"] * transfer.order.blocks
            self._end(transfer, moment)

    def _end(self, transfer: _Transfer, moment: float) -> None:
        transfer.ended = moment
        transfer.state = "ended"
        self._ended.append(transfer)

    def _report(self, transfer: _Transfer) -> Ended:
        order, arrived = transfer.order, transfer.reasons.count("")
        return Ended(
            number=order.number,
            order=order,
            status=transfer.stopped or ("done" if arrived == order.blocks else "failed"),
            bytes=arrived * self._sizes[order.group],
            seconds=0.0 if transfer.started is None else transfer.ended - transfer.started,
            reasons=tuple(transfer.reasons),
        )

    # ---- a lane's thread

    def _serve(self, lane: _Lane) -> None:
        while True:
            with self._lock:
                idle = lane.name == "arenas" and self._pages.lacking and not lane.queue and not self._closing
                while not lane.queue and not self._closing and not idle:
                    self._lock.wait()
                if not lane.queue and not idle:
                    return
                item = None if idle else lane.queue.popleft()
                if isinstance(item, _Transfer):
                    item.state = "running"
                    item.started = self._clock()
                    lane.current = item
            if item is None:
                self._pages.ask()
            elif isinstance(item, _Transfer):
                self._carry_out(lane, item)
            else:
                self._erase(item)

    def _carry_out(self, lane: _Lane, transfer: _Transfer) -> None:
        lost = True
        try:
            lost = self._move(lane, transfer)
        finally:
            with self._lock:  # both at once: a running order that is nobody's current one has lost its completion
                lane.current = None
                if not lost and transfer.state == "running":
                    self._end(transfer, self._clock())
                self._news = True
                self._lock.notify_all()
        if self.after_order is not None:
            self.after_order()

    def _erase(self, erasure: _Erasure) -> None:
        try:
            self.disk[erasure.group].forget(erasure.slots)
        except Exception:  # noqa: BLE001 - the lane goes on, whatever failed
            self.erasures_failed += 1

    def _move(self, lane: _Lane, transfer: _Transfer) -> bool:
        order = transfer.order
        size = self._sizes[order.group]
        per_batch = max(1, lane.batch_bytes // size)
        for first in range(0, order.blocks, per_batch):
            count = min(per_batch, order.blocks - first)
            if not self._may_start(lane, transfer, count * size):
                break
            try:
                if self._faults is not None:
                    self._faults.before_batch(order, first)
                reasons = self._batch(transfer, slice(first, first + count))
            except Exception as error:  # noqa: BLE001 - a transfer that fails is a recompute, whatever failed in it
                transfer.reasons[first:] = [f"error: {error}"] * (order.blocks - first)
                break
            transfer.reasons[first : first + count] = reasons
        return self._faults is not None and self._faults.loses(order)

    def _may_start(self, lane: _Lane, transfer: _Transfer, size: int) -> bool:
        """Wait for the budget; false if the order has been stopped meanwhile."""
        with self._lock:
            while transfer.stopped is None:
                now = self._clock()
                if lane.bytes_per_second is None:
                    return True
                if now >= lane.next_start:
                    lane.next_start = now + size / lane.bytes_per_second
                    return True
                self._lock.wait(lane.next_start - now)
        return False

    def _blocks(self, transfer: _Transfer) -> Batch:
        """All of an order to or from the disk, checked once."""
        order, group = transfer.order, transfer.order.group
        sides = (transfer.sources, transfer.targets)
        on_host, on_disk = sides if order.route == "store" else sides[::-1]
        blocks = self.copier.host_blocks(group, on_host, on_disk, order.keys)
        blocks.require(self.disk[group].slots, self._sizes[group], writable=order.route == "load")
        return blocks

    def _batch(self, transfer: _Transfer, part: slice) -> list[str]:
        order, group = transfer.order, transfer.order.group
        if LANES[order.route] == "arenas":
            sources, targets = transfer.sources[part], transfer.targets[part]
            self.copier.copy(order.route == "demote", group, sources, targets, transfer.after)
            return [""] * len(sources)
        if transfer.blocks is None:
            transfer.blocks = self._blocks(transfer)
        store, blocks = self.disk[group], transfer.blocks.part(part.start, part.stop)
        reasons = store.write(blocks) if order.route == "store" else store.read(blocks)
        return [""] * len(blocks) if reasons.count(None) == len(blocks) else [reason or "" for reason in reasons]
