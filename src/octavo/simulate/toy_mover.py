"""A mover of toy state: what it copies is real, and it is as late and as faulty as it is told to be.

Copies between the cells of a `ToyExecutor` and arrays that stand for the host and the disk. A copy is made at the
last moment, when its end is told, so that a slot that is used too early holds rubbish; one that fails leaves rubbish
behind. Raises `InvariantViolation` (`in-flight-slots`) when a copy would touch what a plan in flight still touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from octavo.memory.transfers import Ended, Notice, Order, Status, TimedOut
from octavo.simulate.toy_laws import UInt64
from octavo.simulate.toy_model import RUBBISH, ToyExecutor


@dataclass(frozen=True, slots=True)
class ToyFaults:
    """Shares of orders, 0 to 1, and polls."""

    fails: float = 0.0
    """Of blocks."""
    times_out: float = 0.0
    most_polls: int = 3
    """Before an order ends."""
    most_late_polls: int = 30
    """Before one that timed out ends."""


@dataclass(slots=True, eq=False)
class _Open:
    order: Order
    due: int
    told_late: int | None
    """The poll at which its deadline passes."""
    cancelled: bool = False


class ToyMover:
    def __init__(
        self,
        executor: ToyExecutor,
        host_slabs: int,
        disk_slots: Sequence[int] = (),
        *,
        faults: ToyFaults | None = None,
        seed: int = 0,
    ) -> None:
        self.executor = executor
        self.faults = faults or ToyFaults()
        self.host = executor.new_arena(host_slabs)
        self.disk: tuple[dict[int, tuple[bytes, UInt64]], ...] = tuple({} for _ in disk_slots)
        """By group and slot: key and cells."""
        self.copied: dict[str, int] = {}
        """Blocks that arrived, by route."""
        self._random = Random(seed)
        self._open: dict[int, _Open] = {}
        self._polls = 0

    def submit(self, order: Order) -> None:
        due, late = self._polls + 1 + self._random.randrange(self.faults.most_polls), None
        if self._random.random() < self.faults.times_out:
            late = due
            due += 1 + self._random.randrange(self.faults.most_late_polls)
        self._open[order.number] = _Open(order, due, late)

    def cancel(self, number: int) -> None:
        if number in self._open:
            self._open[number].cancelled = True

    def forget(self, group: int, slots: Sequence[int]) -> None:
        for slot in slots:
            self.disk[group].pop(slot, None)

    def poll(self, now: float) -> list[Notice]:
        self._polls += 1
        notices: list[Notice] = []
        for number, one in list(self._open.items()):
            if one.told_late is not None and self._polls >= one.told_late:
                notices.append(TimedOut(number))
                one.told_late = None
            if self._polls >= one.due:
                del self._open[number]
                notices.append(self._end(one))
        return notices

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _end(self, one: _Open) -> Ended:
        order = one.order
        reasons = []
        for i in range(order.blocks):
            if one.cancelled and self._random.random() < 0.5:
                reasons.append("not_begun")
            elif self._random.random() < self.faults.fails:
                self._write(order, i, None)
                reasons.append("error: injected")
            else:
                reasons.append(self._copy(order, i))
        whole = reasons.count("")
        self.copied[order.route] = self.copied.get(order.route, 0) + whole
        size = self.executor.layout.groups[order.group].block_bytes
        status: Status = "cancelled" if one.cancelled else "done"
        return Ended(order.number, order, status, whole * size, 0.001, tuple(reasons))

    def _copy(self, order: Order, i: int) -> str:
        group, source = order.group, order.sources[i]
        if order.route == "load":
            key, cells = self.disk[group].get(source, (b"", self.host[:0]))
            if key != order.keys[i]:
                return "wrong_key"
        elif order.route == "demote":
            cells = self.executor.read_block(group, source)
        else:
            cells = self.host[self.executor.cells(group, source)]
        self._write(order, i, cells.copy())
        return ""

    def _write(self, order: Order, i: int, cells: UInt64 | None) -> None:
        group, target = order.group, order.targets[i]
        if order.route == "promote":
            self.executor.write_block(group, target, RUBBISH if cells is None else cells)
        elif order.route == "store":
            self.disk[group].pop(target, None)
            if cells is not None:
                self.disk[group][target] = (order.keys[i], cells)
        else:
            self.host[self.executor.cells(group, target)] = RUBBISH if cells is None else cells
