"""Preemption: who gives way when blocks run out, and what happens to its state.

- `recompute`: it is given up, the tail first where blocks are kept for reuse, and computed again.
- `offload`: it is moved to the host as it is, and back when there is room.
- `auto`: the cheaper of the two for this victim, by what computing and moving have cost so far.

The mechanism never offers the oldest running sequence, so that it always finishes, and computes again where there is
no room to move to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from octavo.errors import ConfigError
from octavo.policy.rates import Rates

Action = Literal["recompute", "offload"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running sequence that may be asked to give way."""

    sequence_id: int
    priority: int
    """Lower goes first, as in admission."""
    arrival: int
    """Order of submission."""
    blocks: int
    computed_tokens: int


class VictimPolicy(Protocol):
    name: str

    def victim(self, candidates: Sequence[Candidate]) -> int:
        """Index of the sequence to preempt; `candidates` is never empty."""
        ...


class LatestLowest:
    """The lowest priority, then the latest arrival: what is lost was begun last."""

    name = "latest_lowest"

    def victim(self, candidates: Sequence[Candidate]) -> int:
        return max(range(len(candidates)), key=lambda i: (candidates[i].priority, candidates[i].arrival))


class PreemptionAction(Protocol):
    name: str
    moves: bool
    """Whether state is ever moved to the host."""

    def action(self, computed_tokens: int, moved_bytes: int, rates: Rates) -> Action:
        """What to do with a victim that has computed so many positions; offloading it moves so many bytes each way."""
        ...


class Recompute:
    name = "recompute"
    moves = False

    def action(self, computed_tokens: int, moved_bytes: int, rates: Rates) -> Action:
        return "recompute"


class Offload:
    name = "offload"
    moves = True

    def action(self, computed_tokens: int, moved_bytes: int, rates: Rates) -> Action:
        return "offload"


class Auto(Offload):
    name = "auto"

    def action(self, computed_tokens: int, moved_bytes: int, rates: Rates) -> Action:
        there_and_back = rates.move_seconds("demote", moved_bytes) + rates.move_seconds("promote", moved_bytes)
        return "offload" if there_and_back < rates.compute_seconds(0, computed_tokens) else "recompute"


PREEMPTIONS: dict[str, type[Recompute | Offload]] = {"recompute": Recompute, "offload": Offload, "auto": Auto}


def preemption_named(name: str) -> PreemptionAction:
    if name not in PREEMPTIONS:
        raise ConfigError("preemption", name, f"use one of {', '.join(PREEMPTIONS)}")
    return PREEMPTIONS[name]()
