"""Seconds that moving blocks between two tiers takes: a latency each time, and the bytes over a bandwidth.

Owns the law and its fit. Who moves what, and what waits in which queue, is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.cost.fit import nnls
from octavo.errors import ConfigError

_MOST = 1e15
"""Bytes a second, seconds, or ratios: nothing that was measured has more."""
_FIELDS = ("bytes_per_s", "latency_s", "error")


@dataclass(frozen=True, slots=True)
class TransferLaw:
    """One way between two tiers."""

    bytes_per_s: float
    latency_s: float
    error: float = 0.0
    """Median relative error of the fit."""

    def seconds(self, size: int) -> float:
        return self.latency_s + size / self.bytes_per_s

    def told(self) -> dict[str, float]:
        return {"bytes_per_s": self.bytes_per_s, "latency_s": self.latency_s, "error": self.error}

    @classmethod
    def of(cls, told: Any, name: str) -> TransferLaw:
        """Raises `ConfigError` where it is none."""
        if not isinstance(told, dict):
            raise ConfigError(f"transfers.{name}", told, "must be a JSON object; calibrate again")
        bandwidth, latency, error = (_number(told.get(key), f"transfers.{name}.{key}") for key in _FIELDS)
        if bandwidth == 0:
            raise ConfigError(f"transfers.{name}.bytes_per_s", bandwidth, "must be above 0; calibrate again")
        return cls(bandwidth, latency, error)

    @classmethod
    def fitted(cls, sizes: Sequence[int], seconds: Sequence[float]) -> TransferLaw:
        """To transfers of these bytes that took these seconds, on relative errors."""
        took = np.array(seconds, dtype=np.float64)
        columns = np.column_stack([np.ones(len(took)), np.array(sizes, dtype=np.float64)]) / took[:, None]
        latency, per_byte = nnls(columns, np.ones(len(took)))
        if per_byte <= 0:
            raise ConfigError("transfers", list(sizes), "took no longer with more bytes; measure larger ones")
        error = np.abs(columns @ np.array([latency, per_byte]) - 1)
        return cls(float(1 / per_byte), float(latency), float(np.median(error)))


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST:
        raise ConfigError(name, value, f"must be a number from 0 to {_MOST:g}; calibrate again")
    return float(value)
