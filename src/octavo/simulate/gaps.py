"""Times between consecutive tokens of a sequence, however many: exact while they are few, then in narrow bins.

A bin is a tenth of a percent wide and keeps how many it has and their sum, so that means stay exact and percentiles
are off by no more than that. Invariant: memory does not grow with the tokens of a run.
"""

from __future__ import annotations

import numpy as np

from octavo.cost.step import Float64

_EXACT = 2**17
"""Values kept as they are."""
_LOWEST_S, _RATIO = 1e-9, 1.001
_BINS = 40_000
"""Up to more than six years."""


class Gaps:
    def __init__(self) -> None:
        self._values: list[Float64] = []
        self._weights: list[float] = []
        self._kept = 0
        self._counts = np.zeros(0)
        self._sums = np.zeros(0)

    def add(self, values: Float64, weight: float = 1.0) -> None:
        """Each of these occurred `weight` times."""
        self._values.append(values)
        self._weights.append(weight)
        self._kept += len(values)
        if self._kept > _EXACT:
            self._bin()

    def all(self) -> tuple[Float64, Float64]:
        """(gaps, how many there were of each)."""
        values = [*self._values]
        weights = [np.full(len(v), w) for v, w in zip(self._values, self._weights, strict=True)]
        if len(self._counts):
            filled = np.flatnonzero(self._counts)
            values.append(self._sums[filled] / self._counts[filled])
            weights.append(self._counts[filled])
        if not values:
            return np.empty(0), np.empty(0)
        return np.concatenate(values), np.concatenate(weights)

    def _bin(self) -> None:
        if not len(self._counts):
            self._counts, self._sums = np.zeros(_BINS), np.zeros(_BINS)
        values = np.concatenate(self._values)
        weights = np.repeat(self._weights, [len(v) for v in self._values])
        at = np.log(np.maximum(values, _LOWEST_S) / _LOWEST_S) / np.log(_RATIO)
        places = np.minimum(at.astype(np.int64), _BINS - 1)
        self._counts += np.bincount(places, weights, _BINS)
        self._sums += np.bincount(places, weights * values, _BINS)
        self._values, self._weights, self._kept = [], [], 0
