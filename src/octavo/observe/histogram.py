"""A histogram as numpy columns: many observations cost one call, nothing is kept of the single ones.

Bounds are upper and inclusive, as in Prometheus. Not safe between threads by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a histogram holds at one moment."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """One more than bounds: the last is of what exceeds them all. Not cumulative."""
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._edges = np.array(bounds, dtype=np.float64)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[int(self._edges.searchsorted(value))] += times
        self._sum += value * times

    def add_all(self, values: npt.NDArray[np.float64]) -> None:
        places = self._edges.searchsorted(values)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(values.sum())

    def read(self) -> Distribution:
        return Distribution(self.bounds, tuple(self._counts.tolist()), self._sum)


def _steps(low: int, high: int) -> tuple[float, ...]:
    """1, 2, 5 times each power of ten from 10**low on, and 10**high."""
    return (*(float(f"{digit}e{power}") for power in range(low, high) for digit in (1, 2, 5)), float(f"1e{high}"))


SEQUENCES = tuple(float(2**n) for n in range(13))
TOKENS = (0.0, *(float(2**n) for n in range(16)))
STEP_PARTS = _steps(-6, 1)
GAPS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0,
        10.0)  # fmt: skip
"""For ITL and TPOT: fine where a reader notices the difference."""
WAITS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0,
         60.0, 120.0, 300.0, 600.0)  # fmt: skip

BOUNDS: dict[str, tuple[float, ...]] = {
    "batch_size_by_iteration": SEQUENCES,
    "batch_tokens_by_iteration": TOKENS,
    "step_seconds": STEP_PARTS,
    "promotion_seconds": STEP_PARTS,
    "transfer_stall_seconds": STEP_PARTS,
    "time_per_output_token_seconds": GAPS,
    "inter_token_latency_seconds": GAPS,
}
"""Of each histogram; those not named have `WAITS`."""
