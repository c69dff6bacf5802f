"""How fast this machine's memory is read just now, by all threads: a few milliseconds of plain reading.

Owns the reading, of processors alone; what follows from the rates is `octavo.cost.speeds`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_BYTES = 128 << 20
"""More than caches hold."""
_READS = 3
"""The best of them counts: what another program takes in between is not the memory's speed."""


class MemoryRate:
    def __init__(self, timer: Callable[[], float] = time.perf_counter) -> None:
        self._memory = torch.ones(_BYTES // 4)
        self._timer = timer

    def read(self) -> float:
        """Bytes a second."""
        best = float("inf")
        for _ in range(_READS):
            begun = self._timer()
            self._memory.sum()
            best = min(best, self._timer() - begun)
        return _BYTES / max(best, 1e-9)
