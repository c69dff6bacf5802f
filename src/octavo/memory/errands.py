"""Orders under way: who asked for each, and which lanes still answer.

    ask(...) -> number --take_orders--> mover --notices--> settle: `late` at a deadline, `ended` exactly once

Owns numbers and deadlines, no slot. Invariant: whoever asked hears of the end exactly once, and until then nothing
that the order touches may be used for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.errors import InvariantViolation
from octavo.memory.transfers import LANES, Ended, Lane, Order, Route, TimedOut
from octavo.policy.rates import Rates


@dataclass(slots=True, eq=False)
class _Errand:
    order: Order
    ended: Callable[[Ended], None]
    late: Callable[[], None]
    is_late: bool = False


class Errands:
    def __init__(self, rates: Rates, timeout_s: float | None) -> None:
        self.rates = rates
        self.timeout_s = timeout_s
        self._open: dict[int, _Errand] = {}
        self._orders: list[Order] = []
        self._cancels: list[int] = []
        self._late: dict[Lane, int] = {"arenas": 0, "disk": 0}
        """Orders of each lane that nobody waits for any more and that have not ended."""
        self._numbers = 0

    def __len__(self) -> int:
        """Orders that have not ended."""
        return len(self._open)

    @property
    def orders(self) -> list[Order]:
        """Those that have not ended, for the invariants."""
        return [errand.order for errand in self._open.values()]

    @property
    def asked(self) -> bool:
        """Whether the mover is still to be told of orders, or of what is called off."""
        return bool(self._orders or self._cancels)

    @property
    def history(self) -> tuple[int, int, int]:
        """Changes whenever an order is given, ends, or misses its deadline."""
        return self._numbers, len(self._open), sum(self._late.values())

    @property
    def awaited(self) -> bool:
        """Whether some are under way whose deadline has not passed."""
        return len(self._open) > sum(self._late.values())

    def answers(self, lane: Lane) -> bool:
        """Whether a lane may be given more: it has nothing that missed its deadline."""
        return self._late[lane] == 0

    def under_way(self, lane: Lane) -> bool:
        """Whether copies of this lane have not ended, be they late."""
        return any(LANES[errand.order.route] == lane for errand in self._open.values())

    def ask(
        self,
        route: Route,
        group: int,
        copies: Sequence[tuple[int, int]],
        ended: Callable[[Ended], None],
        *,
        late: Callable[[], None] = lambda: None,
        keys: tuple[bytes, ...] = (),
    ) -> int:
        """Copy each (source, target); returns the order's number."""
        self._numbers += 1
        sources, targets = (tuple(side) for side in zip(*copies, strict=True))
        order = Order(self._numbers, route, group, sources, targets, keys, self.timeout_s)
        self._open[order.number] = _Errand(order, ended, late)
        self._orders.append(order)
        return order.number

    def cancel(self, number: int) -> None:
        """Nobody needs it: no further part of it need begin."""
        if number in self._open:
            self._cancels.append(number)

    def take_orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def take_cancels(self) -> list[int]:
        cancels, self._cancels = self._cancels, []
        return cancels

    def settle(self, notices: Sequence[TimedOut | Ended]) -> None:
        for notice in notices:
            errand = self._open.get(notice.number)
            if errand is None:
                raise InvariantViolation("transfer-answered", f"order {notice.number} is answered and not under way")
            lane = LANES[errand.order.route]
            if isinstance(notice, TimedOut):
                if not errand.is_late:
                    errand.is_late = True
                    self._late[lane] += 1
                    errand.late()
                continue
            del self._open[notice.number]
            self._late[lane] -= errand.is_late
            if len(notice.reasons) != errand.order.blocks:
                raise InvariantViolation(
                    "transfer-answered", f"{len(notice.reasons)} reasons for {errand.order.blocks} blocks"
                )
            self.rates.learn_transfer(errand.order.route, notice.bytes, notice.seconds)
            errand.ended(notice)
