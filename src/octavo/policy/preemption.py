"""Preemption: who gives way when blocks run out. The action is `recompute`.

The mechanism never offers the oldest running sequence, so that it always finishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
