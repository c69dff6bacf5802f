"""Moves whole blocks between tiers, beside the engine: a thread for the arenas, another for the disk.

    engine's thread                      a lane's thread
    submit(order) -> number   --queue--> one order at a time, in batches, within the budget
    poll() -> notices         <--ended-- status, bytes and a reason for each block
    cancel(number)                       seen between two batches; the batch under way is always finished

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
from octavo.runtime.arena import Arena
from octavo.runtime.block_copy import BlockCopier
from octavo.runtime.disk import DiskPool
from octavo.memory.transfers import LANES, Ended, Notice, Order, Status, TimedOut

Clock = Callable[[], float]


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

    def __post_init__(self) -> None:
        for name in ("bytes_per_second", "disk_bytes_per_second", "batch_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(name, value, "must be positive")


@dataclass(slots=True)
class _Transfer:
    number: int
    order: Order
    deadline: float | None
    after: Any
    reasons: list[str]
    state: str = "queued"  # then running, then ended
    stopped: Status | None = None
    """Cancelled or timed out: no further batch begins."""
    started: float | None = None
    ended: float = 0.0


@dataclass(slots=True)
class _Lane:
    name: str
    batch_bytes: int
    bytes_per_second: float | None
    queue: deque[_Transfer] = field(default_factory=deque)
    current: int | None = None
    next_start: float = 0.0
    thread: threading.Thread | None = None


class Mover:
    """`device` and `host` have one layout; `disk` has a pool for each group, or is empty.

    `submit`, `cancel`, `poll` and `close` belong to one thread, the engine's, and none of the first three waits for
    a copy. `after_order` may be set to a wake-up call that lanes make
    whenever something has ended.
    """

    def __init__(
        self,
        device: Arena,
        host: Arena,
        disk: Sequence[DiskPool] = (),
        *,
        budget: Budget | None = None,
        clock: Clock = time.monotonic,
        faults: Faults | None = None,
    ) -> None:
        budget = budget or Budget()
        sizes = [group.block_bytes for group in device.layout.groups]
        if disk and [pool.block_bytes for pool in disk] != sizes:
            raise ConfigError(
                "disk_path", [pool.block_bytes for pool in disk], f"pools must hold blocks of {sizes} bytes"
            )
        self.copier = BlockCopier(device, host)
        self.disk = tuple(disk)
        self.after_order: Callable[[], None] | None = None
        self._sizes = sizes
        self._clock = clock
        self._faults = faults
        self._lock = threading.Condition()
        self._open: dict[int, _Transfer] = {}
        self._ended: deque[_Transfer] = deque()
        self._numbers = 0
        self._closing = False
        self._lanes = {
            "arenas": _Lane("arenas", budget.batch_bytes, budget.bytes_per_second),
            "disk": _Lane("disk", budget.batch_bytes, budget.disk_bytes_per_second),
        }
        for lane in self._lanes.values():
            lane.thread = threading.Thread(target=self._serve, args=(lane,), name=f"octavo-{lane.name}", daemon=True)
            lane.thread.start()

    # ---- the engine's thread

    def submit(self, order: Order) -> int:
        """Queue an order; the number under which its end will be reported."""
        self._check(order)
        after = self.copier.mark()
        deadline = None if order.timeout is None else self._clock() + order.timeout
        with self._lock:
            self._numbers += 1
            transfer = _Transfer(self._numbers, order, deadline, after, ["not_begun"] * order.blocks)
            self._open[transfer.number] = transfer
            self._lanes[LANES[order.route]].queue.append(transfer)
            self._lock.notify_all()
        return transfer.number

    def cancel(self, number: int) -> bool:
        """Begin no further batch of it. Its end is reported as ever; false if it was already."""
        with self._lock:
            transfer = self._open.get(number)
            if transfer is None:
                return False
            transfer.stopped = transfer.stopped or "cancelled"
            self._lock.notify_all()
        return True

    def poll(self) -> list[Notice]:
        """What has happened since the last call: ends, and deadlines that passed."""
        notices: list[Notice] = []
        now = self._clock()
        with self._lock:
            for transfer in list(self._open.values()):
                late = transfer.deadline is not None and now >= transfer.deadline and transfer.state != "ended"
                if late and transfer.stopped is None:
                    transfer.stopped = "timed_out"
                    notices.append(TimedOut(transfer.number))
                    self._lock.notify_all()
                self._reconcile(transfer, now)
            while self._ended:
                transfer = self._ended.popleft()
                if self._open.pop(transfer.number, None) is not None:
                    notices.append(self._report(transfer))
        return notices

    @property
    def pending(self) -> int:
        """Orders whose end has not been reported."""
        return len(self._open)

    def close(self) -> None:
        """Stop after the batches under way, and wait for them. A last `poll` then reports every order's end."""
        with self._lock:
            self._closing = True
            for transfer in self._open.values():
                if transfer.state != "ended":
                    transfer.stopped = transfer.stopped or "cancelled"
            self._lock.notify_all()
        for lane in self._lanes.values():
            if lane.thread is not None:
                lane.thread.join()
        self.copier.close()

    def _check(self, order: Order) -> None:
        want_slots = {"demote": (1, 1, 0), "promote": (1, 1, 0), "store": (1, 0, 1), "load": (0, 1, 1)}[order.route]
        given = tuple(len(part) for part in (order.sources, order.targets, order.keys))
        if not order.blocks or given != tuple(order.blocks * want for want in want_slots):
            raise InvariantViolation("transfer-order", f"{order.route} with sources, targets, keys of lengths {given}")
        if self._closing:
            raise InvariantViolation("transfer-order", "ordered after close")
        if LANES[order.route] == "disk" and not self.disk:
            raise InvariantViolation("transfer-order", f"{order.route} without a disk")
        arenas = (self.copier.host, self.copier.device)
        read, written = arenas if order.route in ("promote", "store") else arenas[::-1]
        for arena, slots in ((read, order.sources), (written, order.targets)):
            most = arena.n_slabs * arena.layout.groups[order.group].blocks_per_slab
            if any(not 0 <= slot < most for slot in slots):
                raise InvariantViolation("transfer-order", f"{order.route}: a slot of {slots} is outside 0..{most - 1}")

    def _reconcile(self, transfer: _Transfer, now: float) -> None:
        """End what no thread will: a stopped order that never began, or one whose word of completion got lost."""
        lane = self._lanes[LANES[transfer.order.route]]
        dead = lane.thread is not None and not lane.thread.is_alive()
        if transfer.state == "queued" and (transfer.stopped is not None or dead):
            if transfer in lane.queue:
                lane.queue.remove(transfer)
            self._end(transfer, now)
        elif transfer.state == "running" and (lane.current != transfer.number or dead):
            transfer.reasons = ["lost_completion"] * transfer.order.blocks
            self._end(transfer, now)

    def _end(self, transfer: _Transfer, now: float) -> None:
        transfer.ended = now
        transfer.state = "ended"
        self._ended.append(transfer)

    def _report(self, transfer: _Transfer) -> Ended:
        arrived = sum(not reason for reason in transfer.reasons)
        whole = arrived == transfer.order.blocks
        status: Status = transfer.stopped or ("done" if whole else "failed")
        return Ended(
            transfer=transfer.number,
            order=transfer.order,
            status=status,
            bytes=arrived * self._sizes[transfer.order.group],
            seconds=0.0 if transfer.started is None else transfer.ended - transfer.started,
            reasons=tuple(transfer.reasons),
        )

    # ---- a lane's thread

    def _serve(self, lane: _Lane) -> None:
        while True:
            with self._lock:
                while not lane.queue and not self._closing:
                    self._lock.wait()
                if not lane.queue:
                    return
                transfer = lane.queue.popleft()
                transfer.state = "running"
                transfer.started = self._clock()
                lane.current = transfer.number
            lost = True
            try:
                lost = self._move(lane, transfer)
            finally:
                with self._lock:  # both at once: a running order that is nobody's current one has lost its completion
                    lane.current = None
                    if not lost and transfer.state == "running":
                        self._end(transfer, self._clock())
            if self.after_order is not None:
                self.after_order()

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
                reasons = self._batch(transfer, first, count)
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

    def _batch(self, transfer: _Transfer, first: int, count: int) -> list[str]:
        order = transfer.order
        part = slice(first, first + count)
        if order.route in ("demote", "promote"):
            down = order.route == "demote"
            self.copier.copy(down, order.group, order.sources[part], order.targets[part], transfer.after)
            return [""] * count
        pool = self.disk[order.group]
        act, slots = (pool.put, order.sources) if order.route == "store" else (pool.get, order.targets)
        return [
            act(key, self.copier.host_block(order.group, slot)) or ""
            for key, slot in zip(order.keys[part], slots[part], strict=True)
        ]
