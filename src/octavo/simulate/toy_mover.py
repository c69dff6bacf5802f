"""A mover of toy state: what it copies is real, and it is as late and as faulty as it is told to be.

Copies between the cells of a `ToyExecutor` and arrays that stand for the host and the disk. A source is read at the
first moment or at the last, as chance has it; a target holds rubbish from the first moment on and is written at the
last, when the end is told; a copy that fails leaves it so. Raises `InvariantViolation` (`in-flight-slots`) when a copy
would write what a plan in flight still touches. `stored` is what another engine may go on from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from octavo.memory.transfers import Ended, Notice, Order, Status, TimedOut
from octavo.simulate.toy_laws import UInt64
from octavo.simulate.toy_model import RUBBISH, ToyExecutor

DiskGroup = dict[int, tuple[bytes, UInt64]]
"""By slot: key and cells."""
_Block = tuple[str, UInt64 | None]
"""Why it cannot be read, or nothing, and its cells."""


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
    read: list[_Block]
    """What was read at the first moment; empty: nothing was."""
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
        disk: Sequence[DiskGroup] = (),
    ) -> None:
        """`disk` is what an earlier mover left."""
        self.executor = executor
        self.faults = faults or ToyFaults()
        self.host = executor.new_arena(host_slabs)
        self.disk: tuple[DiskGroup, ...] = tuple(map(dict, disk)) or tuple({} for _ in disk_slots)
        self.copied: dict[str, int] = {}
        """Blocks that arrived, by route."""
        self._random = Random(seed)
        self._open: dict[int, _Open] = {}
        self._polls = 0

    @property
    def stored(self) -> tuple[tuple[tuple[bytes, int], ...], ...]:
        """By group: (key, slot) of each record, in order of writing."""
        return tuple(tuple((key, slot) for slot, (key, _) in group.items()) for group in self.disk)

    def submit(self, order: Order) -> None:
        order.require_whole()
        due, late = self._polls + 1 + self._random.randrange(self.faults.most_polls), None
        if self._random.random() < self.faults.times_out:
            late = due
            due += 1 + self._random.randrange(self.faults.most_late_polls)
        read = [self._read(order, i) for i in range(order.blocks)] if self._random.random() < 0.5 else []
        self._open[order.number] = _Open(order, due, late, read)
        for i in range(order.blocks):
            self._write(order, i, None)

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

    def fails(self, order: Order, i: int) -> bool:
        """Whether block `i` of this order is lost."""
        return self._random.random() < self.faults.fails

    def _end(self, one: _Open) -> Ended:
        order = one.order
        reasons = []
        for i in range(order.blocks):
            if one.cancelled and self._random.random() < 0.5:
                reasons.append("not_begun")
            elif self.fails(order, i):
                reasons.append("error: injected")
            else:
                reason, cells = one.read[i] if one.read else self._read(order, i)
                self._write(order, i, cells)
                reasons.append(reason)
        whole = reasons.count("")
        self.copied[order.route] = self.copied.get(order.route, 0) + whole
        size = self.executor.layout.groups[order.group].block_bytes
        status: Status = "cancelled" if one.cancelled else "done"
        return Ended(order.number, order, status, whole * size, 0.001, tuple(reasons))

    def _read(self, order: Order, i: int) -> _Block:
        group, source = order.group, order.sources[i]
        if order.route == "load":
            key, cells = self.disk[group].get(source, (b"", None))
            return ("", cells) if key == order.keys[i] else ("wrong_key", None)
        if order.route == "demote":
            return "", self.executor.read_block(group, source).copy()
        return "", self.host[self.executor.cells(group, source)].copy()

    def _write(self, order: Order, i: int, cells: UInt64 | None) -> None:
        """None: rubbish."""
        group, target = order.group, order.targets[i]
        if order.route == "promote":
            self.executor.write_block(group, target, RUBBISH if cells is None else cells)
        elif order.route == "store":
            self.disk[group].pop(target, None)
            if cells is not None:
                self.disk[group][target] = (order.keys[i], cells)
        else:
            self.host[self.executor.cells(group, target)] = RUBBISH if cells is None else cells
