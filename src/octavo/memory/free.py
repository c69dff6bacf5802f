"""Which slabs are free, in two forms: a stack (any slab will do) and runs (one contiguous piece).

Both keep the same promise: a slab is handed out at most once until it is given back.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from octavo.memory.values import Int64


class FreeSlabs(Protocol):
    @property
    def count(self) -> int: ...

    def take(self, n: int) -> Int64:
        """n free slabs; the caller has checked that they can be had."""
        ...

    def give(self, slabs: Int64) -> None: ...

    def members(self) -> Int64:
        """All free slabs, for the invariants."""
        ...

    def largest_run(self) -> int: ...


class FreeStack:
    """An integer stack: O(1) a slab, the last one given back is the first one taken."""

    def __init__(self, total: int) -> None:
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int64)
        self._top = total

    @property
    def count(self) -> int:
        return self._top

    def take(self, n: int) -> Int64:
        self._top -= n
        return self._stack[self._top : self._top + n][::-1].copy()

    def give(self, slabs: Int64) -> None:
        n = len(slabs)
        if n == 1:
            self._stack[self._top] = slabs[0]
            self._top += 1
            return
        self._stack[self._top : self._top + n] = slabs[::-1]
        self._top += n

    def members(self) -> Int64:
        return self._stack[: self._top].copy()

    def largest_run(self) -> int:
        return self._top


class FreeRuns:
    """A bitmap searched for runs: first fit, lowest address. The baseline's allocator."""

    def __init__(self, total: int) -> None:
        self._free = np.ones(total, dtype=bool)
        self._count = total

    @property
    def count(self) -> int:
        return self._count

    def take(self, n: int) -> Int64:
        starts, lengths = self._runs()
        start = int(starts[np.argmax(lengths >= n)])
        self._free[start : start + n] = False
        self._count -= n
        return np.arange(start, start + n, dtype=np.int64)

    def give(self, slabs: Int64) -> None:
        self._free[slabs] = True
        self._count += len(slabs)

    def members(self) -> Int64:
        return np.flatnonzero(self._free).astype(np.int64)

    def largest_run(self) -> int:
        _, lengths = self._runs()
        return int(lengths.max(initial=0))

    def _runs(self) -> tuple[Int64, Int64]:
        edges = np.diff(np.concatenate(([False], self._free, [False])).astype(np.int8))
        starts = np.flatnonzero(edges == 1).astype(np.int64)
        return starts, np.flatnonzero(edges == -1).astype(np.int64) - starts
