"""A mover in virtual time: every transfer takes what the law of its route says, one at a time on each lane.

    submit --> lane's queue --> under way --> ended --> told by the first poll at or after that moment
                                   |
               stopped: cancelled, or past its deadline: the block under way is finished, no other begins

Owns the clock of copies, whole nanoseconds, and which key each disk slot holds; who holds a slot is the core's. What
is submitted or cancelled counts from the moment of the last `poll`. Invariant: what `Mover` promises, and a core that
lets two copies meet in a slot is caught as `InvariantViolation`.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Protocol

from octavo.cost.transfer import TransferLaw
from octavo.errors import ConfigError, InvariantViolation
from octavo.memory.transfers import LANES, SIDES, UPWARDS, Ended, Lane, Notice, Order, Route, Status, Tier, TimedOut
from octavo.simulate.executors import NANOSECONDS, nanoseconds, seconds

_LAWS: Mapping[Route, TransferLaw] = MappingProxyType(
    {
        "demote": TransferLaw(10e9, 20e-6),
        "promote": TransferLaw(10e9, 20e-6),
        "store": TransferLaw(1e9, 200e-6),
        "load": TransferLaw(1.5e9, 200e-6),
    }
)


@dataclass(frozen=True, slots=True)
class Links:
    """How fast blocks move between tiers, and what of it may be taken: bytes per second, None for no bound."""

    laws: Mapping[Route, TransferLaw] = field(default_factory=lambda: _LAWS)
    """By route; those not named keep the stated guesses."""
    bytes_per_second: float | None = None
    disk_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        for name in ("bytes_per_second", "disk_bytes_per_second"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(name, value, "must be positive")

    def times_ns(self, route: Route, block_bytes: int) -> tuple[int, float]:
        """Before the first block of an order, and for each of them."""
        law = self.laws.get(route, _LAWS[route])
        bound = self.bytes_per_second if LANES[route] == "arenas" else self.disk_bytes_per_second
        rate = law.bytes_per_s if bound is None else min(law.bytes_per_s, bound)
        return nanoseconds(law.latency_s), block_bytes / rate * NANOSECONDS


class Faults(Protocol):
    """What goes wrong, by order: each is asked about once, when it begins."""

    def reason(self, order: Order, block: int) -> str:
        """Why this block does not arrive; empty if it does."""
        ...

    def delay_ns(self, order: Order) -> int:
        """For how long its first block hangs."""
        ...

    def loses(self, order: Order) -> bool:
        """Whether the word that it is done gets lost: it has failed, whatever was copied."""
        ...


@dataclass(frozen=True, slots=True)
class SeededFaults:
    """Shares of what goes wrong. Depends on the seed and the order's number alone, not on what was asked before."""

    seed: int
    fails: float = 0.0
    """Of blocks."""
    stalls: float = 0.0
    """Of orders, which take up to `stall_s` longer."""
    stall_s: float = 1.0
    loses_word: float = 0.0
    """Of orders."""

    def reason(self, order: Order, block: int) -> str:
        source = self._random(order, f"block {block}")
        if source.random() >= self.fails:
            return ""
        return source.choice(("bad_checksum", "truncated", "io_error", "disk_full"))

    def delay_ns(self, order: Order) -> int:
        source = self._random(order, "delay")
        return nanoseconds(source.random() * self.stall_s) if source.random() < self.stalls else 0

    def loses(self, order: Order) -> bool:
        return self._random(order, "word").random() < self.loses_word

    def _random(self, order: Order, what: str) -> Random:
        return Random(f"{self.seed}/{order.number}/{what}")


@dataclass(slots=True, eq=False)
class _Transfer:
    order: Order
    deadline_ns: int | None
    reasons: list[str]
    """`not_begun` until its blocks are."""
    stopped: Status | None = None
    started_ns: int | None = None
    lead_ns: int = 0
    block_ns: float = 0.0
    moved: int = 0
    """Blocks that will have been moved when it ends."""

    def ends_ns(self, block: int | None = None) -> int:
        """When it ends, or one of its blocks does. It has begun."""
        assert self.started_ns is not None
        count = self.moved if block is None else block + 1
        return self.started_ns + self.lead_ns + round(count * self.block_ns)


@dataclass(frozen=True, slots=True)
class _Erasure:
    group: int
    slots: tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Lane:
    queue: deque[_Transfer | _Erasure] = field(default_factory=deque)
    current: _Transfer | None = None


class SimMover:
    """`block_bytes` by group; `stored`: (key, slot) by group of what an earlier run left on the disk.

    Deadlines are exact, and an order that is done at its deadline is done.
    """

    def __init__(
        self,
        block_bytes: Sequence[int],
        links: Links | None = None,
        *,
        faults: Faults | None = None,
        stored: Sequence[Sequence[tuple[bytes, int]]] = (),
    ) -> None:
        self.links = links or Links()
        self.now_ns = 0
        """Of the last poll."""
        self.records = {(group, slot): key for group, left in enumerate(stored) for key, slot in left}
        """What a later run would find, by group and disk slot."""
        self._block_bytes = tuple(block_bytes)
        self._faults = faults
        self._lanes: dict[Lane, _Lane] = {"arenas": _Lane(), "disk": _Lane()}
        self._open: dict[int, _Transfer] = {}
        self._deadlines: list[tuple[int, int]] = []
        self._notices: list[Notice] = []
        self._reads: Counter[tuple[Tier, int, int]] = Counter()
        self._writes: set[tuple[Tier, int, int]] = set()
        self._closed = False

    # ---- the seam

    def submit(self, order: Order) -> None:
        self._check(order)
        deadline = None if order.timeout is None else self.now_ns + nanoseconds(order.timeout)
        transfer = _Transfer(order, deadline, ["not_begun"] * order.blocks)
        self._open[order.number] = transfer
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, order.number))
        self._claim(order)
        queue = self._lanes[LANES[order.route]].queue
        place = len(queue)
        if order.route in UPWARDS:  # as the real mover
            while place and isinstance(before := queue[place - 1], _Transfer) and before.order.route not in UPWARDS:
                place -= 1
        queue.insert(place, transfer)
        self._start_next(LANES[order.route], self.now_ns)

    def cancel(self, number: int) -> None:
        transfer = self._open.get(number)
        if transfer is not None and transfer.stopped is None:
            self._stop(transfer, "cancelled", self.now_ns)

    def forget(self, group: int, slots: Sequence[int]) -> None:
        """In turn: what the lane was given before comes first."""
        self._lanes["disk"].queue.append(_Erasure(group, tuple(slots)))
        self._start_next("disk", self.now_ns)

    def poll(self, now: float) -> list[Notice]:
        self._advance(max(self.now_ns, nanoseconds(now)))
        notices, self._notices = self._notices, []
        return notices

    def wait(self) -> None:
        """Virtual time waits for nobody: whoever drives the clock asks `next_ns`."""

    def close(self) -> None:
        """Begin nothing more. A last `poll` then reports every order's end."""
        self._closed = True
        for number in list(self._open):
            self.cancel(number)
        ends = [lane.current.ends_ns() for lane in self._lanes.values() if lane.current is not None]
        self._advance(max(ends, default=self.now_ns))

    def next_ns(self) -> int | None:
        """When there is something to poll; None: never, as things stand."""
        if self._notices:
            return self.now_ns
        coming = self._coming()
        return None if coming is None else coming[0]

    @property
    def pending(self) -> int:
        """Orders whose end has not been reported."""
        return len(self._open) + sum(isinstance(notice, Ended) for notice in self._notices)

    # ---- time

    def _advance(self, until_ns: int) -> None:
        while (coming := self._coming()) is not None and coming[0] <= until_ns:
            moment, late, number = coming
            transfer = self._open[number]
            if late:
                self._notices.append(TimedOut(number))
                self._stop(transfer, "timed_out", moment)
            else:
                self._lanes[LANES[transfer.order.route]].current = None
                self._end(transfer, moment)
                self._start_next(LANES[transfer.order.route], moment)
        self.now_ns = until_ns

    def _coming(self) -> tuple[int, bool, int] | None:
        """The next thing to happen: (moment, whether it is a deadline, order)."""
        currents = [lane.current for lane in self._lanes.values() if lane.current is not None]
        events = [(transfer.ends_ns(), False, transfer.order.number) for transfer in currents]
        while self._deadlines:
            moment, number = self._deadlines[0]
            if number in self._open and self._open[number].stopped is None:
                events.append((moment, True, number))
                break
            heapq.heappop(self._deadlines)
        return min(events, default=None)

    def _start_next(self, name: Lane, moment: int) -> None:
        lane = self._lanes[name]
        while lane.queue and lane.current is None:
            item = lane.queue.popleft()
            if isinstance(item, _Erasure):
                for slot in item.slots:
                    self.records.pop((item.group, slot), None)
            else:
                lane.current = item
                self._begin(item, moment)

    def _begin(self, transfer: _Transfer, moment: int) -> None:
        order = transfer.order
        transfer.started_ns = moment
        transfer.moved = order.blocks
        transfer.lead_ns, transfer.block_ns = self.links.times_ns(order.route, self._block_bytes[order.group])
        if self._faults is not None:
            transfer.lead_ns += self._faults.delay_ns(order)
        if order.route == "store":
            for slot in order.targets:
                self.records.pop((order.group, slot), None)

    def _stop(self, transfer: _Transfer, status: Status, moment: int) -> None:
        transfer.stopped = status
        if transfer.started_ns is None:
            self._lanes[LANES[transfer.order.route]].queue.remove(transfer)
            self._end(transfer, moment)
            return
        under_way = (block for block in range(transfer.moved) if transfer.ends_ns(block) >= moment)
        transfer.moved = next(under_way, transfer.moved - 1) + 1

    def _end(self, transfer: _Transfer, moment: int) -> None:
        order, size = transfer.order, self._block_bytes[transfer.order.group]
        del self._open[order.number]
        for block in range(transfer.moved):
            transfer.reasons[block] = self._arrive(transfer, block)
        if transfer.moved and self._faults is not None and self._faults.loses(order):
            transfer.reasons = ["lost_completion"] * order.blocks
        self._release(order)
        arrived = transfer.reasons.count("")
        status: Status = transfer.stopped or ("done" if arrived == order.blocks else "failed")
        took = 0 if transfer.started_ns is None else moment - transfer.started_ns
        self._notices.append(Ended(order.number, order, status, arrived * size, seconds(took), tuple(transfer.reasons)))

    def _arrive(self, transfer: _Transfer, block: int) -> str:
        """The block's copy is over: why it is not whole, or empty."""
        order = transfer.order
        reason = "" if self._faults is None else self._faults.reason(order, block)
        if order.route == "load" and not reason:
            found = self.records.get((order.group, order.sources[block]))
            reason = "absent" if found is None else "" if found == order.keys[block] else "wrong_key"
        if reason:
            return reason
        if order.route == "store":
            self.records[order.group, order.targets[block]] = order.keys[block]
        return ""

    # ---- what the core owes

    def _check(self, order: Order) -> None:
        order.require_whole()
        if self._closed or order.number in self._open:
            why = "after close" if self._closed else "a second time"
            raise InvariantViolation("transfer-order", f"number {order.number} is ordered {why}")

    def _claim(self, order: Order) -> None:
        """No copy may write what another reads or writes."""
        reads, writes = self._places(order)
        for place in writes:
            if place in self._writes or self._reads[place]:
                raise InvariantViolation("transfer-slots", f"{order} writes {place}, which another copy still touches")
            self._writes.add(place)
        for place in reads:
            if place in self._writes:
                raise InvariantViolation("transfer-slots", f"{order} reads {place}, which another copy still writes")
        self._reads.update(reads)

    def _release(self, order: Order) -> None:
        reads, writes = self._places(order)
        self._writes.difference_update(writes)
        self._reads.subtract(reads)

    @staticmethod
    def _places(order: Order) -> tuple[list[tuple[Tier, int, int]], list[tuple[Tier, int, int]]]:
        read, written = SIDES[order.route]
        return (
            [(read, order.group, slot) for slot in order.sources],
            [(written, order.group, slot) for slot in order.targets],
        )
