"""Placement: which state is copied to a lower tier, when, and whether it is worth bringing back.

- `drop`: nothing is copied; a block that is given up is lost.
- `write_back`: a block is copied down before its room is taken, and always brought back.
- `write_through`: a block is copied down as soon as it is full, so that its room is free at once.
- `break_even`: as `write_back`, where moving costs less than computing again, by what both have cost so far.

A policy sees figures and answers yes or no; what is copied, and when its room is free, is the mechanism's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.errors import ConfigError
from octavo.policy.rates import Rates


@dataclass(frozen=True, slots=True)
class Bargain:
    """Positions first .. end - 1 of a sequence, and what moving their state would take."""

    first: int
    end: int
    host_bytes: int
    """To come from, or go to, the host."""
    disk_bytes: int = 0
    """Of these, to come from, or go to, the disk besides."""


class Placement(Protocol):
    name: str
    saves: bool
    """Whether anything is copied down at all."""
    at_once: bool
    """As soon as a block is full, rather than when its room may be needed."""
    constant: bool
    """Whether it answers the same whatever moving and computing have cost so far."""

    def worth_saving(self, bargain: Bargain, rates: Rates) -> bool:
        """A block of which another request may want to start."""
        ...

    def worth_loading(self, bargain: Bargain, rates: Rates) -> bool:
        """A sequence could start from this state instead of computing it."""
        ...


class Drop:
    name = "drop"
    saves = False
    at_once = False
    constant = True

    def worth_saving(self, bargain: Bargain, rates: Rates) -> bool:
        return False

    def worth_loading(self, bargain: Bargain, rates: Rates) -> bool:
        return True


class WriteBack(Drop):
    name = "write_back"
    saves = True

    def worth_saving(self, bargain: Bargain, rates: Rates) -> bool:
        return True


class WriteThrough(WriteBack):
    name = "write_through"
    at_once = True


class BreakEven(WriteBack):
    name = "break_even"
    constant = False

    def worth_saving(self, bargain: Bargain, rates: Rates) -> bool:
        return self.worth_loading(bargain, rates)

    def worth_loading(self, bargain: Bargain, rates: Rates) -> bool:
        moving = rates.move_seconds("promote", bargain.host_bytes) + rates.move_seconds("load", bargain.disk_bytes)
        return moving < rates.compute_seconds(bargain.first, bargain.end)


PLACEMENTS: dict[str, type[Drop]] = {
    "drop": Drop,
    "write_back": WriteBack,
    "write_through": WriteThrough,
    "break_even": BreakEven,
}


def placement_named(name: str) -> Placement:
    if name not in PLACEMENTS:
        raise ConfigError("placement", name, f"use one of {', '.join(PLACEMENTS)}")
    return PLACEMENTS[name]()
