"""What crosses between the engine and the mover: orders to copy whole blocks, and what became of them.

Frozen values only. Invariant of the protocol: every order accepted is answered by exactly one `Ended`, and until it
is, the order's slots belong to the copy; `TimedOut`, which may come before, frees nobody's memory, only the wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Route = Literal["demote", "promote", "store", "load"]
"""device -> host, host -> device, host -> disk, disk -> host."""

Status = Literal["done", "failed", "cancelled", "timed_out"]

LANES: dict[Route, str] = {"demote": "arenas", "promote": "arenas", "store": "disk", "load": "disk"}
"""Each lane has a thread and a budget of its own: a stuck disk does not hold up copies between arenas."""


@dataclass(frozen=True, slots=True)
class Order:
    """Copy blocks of one group. Arenas are addressed by slot, the disk by key."""

    route: Route
    group: int
    sources: tuple[int, ...] = ()
    """Slots; empty for `load`."""
    targets: tuple[int, ...] = ()
    """Slots; empty for `store`."""
    keys: tuple[bytes, ...] = ()
    """Of `store` and `load`."""
    timeout: float | None = None
    """Seconds after which nobody should wait for it any more."""

    @property
    def blocks(self) -> int:
        return len(self.targets or self.sources)


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The deadline has passed: recompute. The slots stay busy until `Ended` says otherwise."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing touches the slots of this order any more."""

    transfer: int
    order: Order
    status: Status
    bytes: int
    """Of the blocks that arrived whole."""
    seconds: float
    """From the start of the copy; 0 if it never began."""
    reasons: tuple[str, ...]
    """One for each block: empty where it arrived whole, else why not."""


Notice = TimedOut | Ended
