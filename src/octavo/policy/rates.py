"""How fast this engine computes and moves, as seen so far: what `break_even` and `auto` weigh.

    compute: seconds = step constant + tokens x seconds a token     two running means over steps
    move:    seconds = bytes / bytes a second, by route             a running mean over transfers

Pure figures fed by results and notices, so that a replay learns the same. Before anything was seen, the stated
guesses hold; they favour neither side. Knows no model: `Predict` may take its place where a cost model is at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.memory.transfers import Route

Predict = Callable[[int, int], float]
"""Seconds to compute positions first .. end - 1 of one sequence."""

_WEIGHT = 0.2
"""Of the latest observation in a running mean."""
_FEWEST_TOKENS = 16
"""A step of fewer tokens says little about a token's price."""
_FIRST_TOKENS_A_SECOND = 1000.0
_FIRST_BYTES_A_SECOND: dict[Route, float] = {"demote": 2e9, "promote": 2e9, "store": 5e8, "load": 5e8}


@dataclass(slots=True)
class Rates:
    predict: Predict | None = None
    seconds_a_token: float = 1.0 / _FIRST_TOKENS_A_SECOND
    bytes_a_second: dict[Route, float] = field(default_factory=lambda: dict(_FIRST_BYTES_A_SECOND))

    def compute_seconds(self, first: int, end: int) -> float:
        """To compute positions first .. end - 1 of a sequence."""
        if self.predict is not None:
            return self.predict(first, end)
        return max(0, end - first) * self.seconds_a_token

    def move_seconds(self, route: Route, size_bytes: int) -> float:
        return size_bytes / self.bytes_a_second[route]

    def learn_step(self, tokens: int, seconds: float) -> None:
        """A step that computed `tokens` positions took so long."""
        if tokens >= _FEWEST_TOKENS and seconds > 0:
            self.seconds_a_token += _WEIGHT * (seconds / tokens - self.seconds_a_token)

    def learn_transfer(self, route: Route, size_bytes: int, seconds: float) -> None:
        if size_bytes > 0 and seconds > 0:
            self.bytes_a_second[route] += _WEIGHT * (size_bytes / seconds - self.bytes_a_second[route])
