"""Block tables of one group: row -> slots in order, as one growable 2-D array."""

from __future__ import annotations

import numpy as np

from octavo.memory.values import Int32, Int64


class BlockTables:
    """`slots[row, :counts[row]]` are the row's blocks; what lies beyond is meaningless."""

    def __init__(self, rows: int) -> None:
        self.slots = np.zeros((rows, 16), dtype=np.int32)
        self.counts = np.zeros(rows, dtype=np.int64)

    def append_one_each(self, rows: Int32 | Int64, slots: Int32) -> Int32:
        """One block for each of `rows` (no repeats); returns the table indices written."""
        indices = self.counts[rows]
        self._widen(int(indices.max(initial=-1)) + 1)
        self.slots[rows, indices] = slots
        self.counts[rows] = indices + 1
        return indices.astype(np.int32)

    def append(self, row: int, slots: Int32) -> Int32:
        start = int(self.counts[row])
        end = start + len(slots)
        self._widen(end)
        self.slots[row, start:end] = slots
        self.counts[row] = end
        return np.arange(start, end, dtype=np.int32)

    def row(self, row: int) -> Int32:
        return self.slots[row, : self.counts[row]]

    def clear(self, row: int) -> Int32:
        """Empty the row's table; returns a copy of what it held."""
        slots = self.row(row).copy()
        self.counts[row] = 0
        return slots

    def _widen(self, width: int) -> None:
        if width <= self.slots.shape[1]:
            return
        wider = np.zeros((self.slots.shape[0], max(width, 2 * self.slots.shape[1])), dtype=np.int32)
        wider[:, : self.slots.shape[1]] = self.slots
        self.slots = wider
