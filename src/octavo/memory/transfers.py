"""What crosses between the core and a mover: orders to copy whole blocks, and what became of them.

    core --orders--> Mover --copies--> the tiers' memory
         <-notices--

Frozen values only. Invariant of the protocol: every order is answered by exactly one `Ended`, and until it is, the
order's slots belong to the copy; `TimedOut`, which may come before, frees nobody's memory, only the wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from octavo.errors import InvariantViolation

Tier = Literal["device", "host", "disk"]

Route = Literal["demote", "promote", "store", "load"]
"""device -> host, host -> device, host -> disk, disk -> host."""

Status = Literal["done", "failed", "cancelled", "timed_out"]

Lane = Literal["arenas", "disk"]

LANES: dict[Route, Lane] = {"demote": "arenas", "promote": "arenas", "store": "disk", "load": "disk"}
"""Each lane has a thread and a budget of its own: a stuck disk does not hold up copies between arenas."""

UPWARDS: tuple[Route, ...] = ("promote", "load")
"""A sequence waits for each of them: they go before copies the other way that have not begun."""

SIDES: Mapping[Route, tuple[Tier, Tier]] = MappingProxyType(
    {
        "demote": ("device", "host"),
        "promote": ("host", "device"),
        "store": ("host", "disk"),
        "load": ("disk", "host"),
    }
)
"""The tier that a route reads, and the one that it writes."""


@dataclass(frozen=True, slots=True)
class Order:
    """Copy blocks of one group, slot `sources[i]` of one tier to slot `targets[i]` of another."""

    number: int
    route: Route
    group: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    keys: tuple[bytes, ...] = ()
    """Of `store` and `load`: what each block is, 32 bytes, written beside it and compared when it is read."""
    timeout: float | None = None
    """Seconds after which nobody should wait for it any more."""

    @property
    def blocks(self) -> int:
        return len(self.targets)

    def require_whole(self) -> None:
        """Raises `InvariantViolation` unless there is a block, and a source, a target and, on disk, a key of each."""
        keys = self.blocks if LANES[self.route] == "disk" else 0
        if not self.blocks or (len(self.sources), len(self.keys)) != (self.blocks, keys):
            given = [len(part) for part in (self.sources, self.targets, self.keys)]
            raise InvariantViolation("transfer-order", f"{self.route} with sources, targets, keys of lengths {given}")


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The deadline has passed: recompute. The slots stay busy until `Ended` says otherwise."""

    number: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing touches the slots of this order any more."""

    number: int
    order: Order
    status: Status
    bytes: int
    """Of the blocks that arrived whole."""
    seconds: float
    """From the start of the copy; 0 if it never began."""
    reasons: tuple[str, ...]
    """One for each block: empty where it arrived whole, else why not."""


@dataclass(frozen=True, slots=True)
class Appeared:
    """Other processes have left blocks of this group on a disk that they share with this one: they may be read."""

    group: int
    keys: tuple[bytes, ...]
    """The oldest use first."""


Notice = TimedOut | Ended | Appeared


class Mover(Protocol):
    """Carries out orders beside the engine. All calls come from the engine's thread, and none of them raises for what
    went wrong with a copy."""

    def submit(self, order: Order) -> None: ...

    def cancel(self, number: int) -> None:
        """Begin no further part of it. Its end is reported as ever."""
        ...

    def forget(self, group: int, slots: Sequence[int]) -> None:
        """What these slots of the disk hold must not be found by a later run either."""
        ...

    def poll(self, now: float) -> list[Notice]:
        """What has happened since the last call: ends, deadlines that passed, blocks that appeared."""
        ...

    def wait(self) -> None:
        """Return once there is something to poll, or a moment later; where nobody else needs the thread."""
        ...

    def close(self) -> None: ...
