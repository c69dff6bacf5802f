"""Block tables of one group: row -> slots in order, as one growable 2-D array.

    positions   | block 0 | block 1 | block 2 | block 3 |
    held                            ^ firsts[row]       ^ counts[row]

Entry i is the block of positions i * block_tokens and on, whatever was given up before it.
"""

from __future__ import annotations

import numpy as np

from octavo.memory.values import Int32, Int64


class BlockTables:
    """`slots[row, firsts[row]:counts[row]]` are the row's blocks; what lies outside is meaningless."""

    def __init__(self, rows: int) -> None:
        self.slots = np.zeros((rows, 16), dtype=np.int32)
        self.counts = np.zeros(rows, dtype=np.int64)
        """Where the next block goes: blocks ever held."""
        self.firsts = np.zeros(rows, dtype=np.int64)
        """Blocks given up at the front."""

    @property
    def held(self) -> Int64:
        """Blocks of each row."""
        return self.counts - self.firsts

    def append_one_each(self, rows: Int32 | Int64, slots: Int32) -> Int32:
        """One block for each of `rows` (no repeats); returns the table indices written."""
        indices = self.counts[rows]
        self._widen(int(indices.max(initial=-1)) + 1)
        self.slots[rows, indices] = slots
        self.counts[rows] = indices + 1
        return indices.astype(np.int32)

    def append_at(self, rows: Int32, indices: Int64, slots: Int32) -> None:
        """Blocks at these places, which are the next ones of each of `rows`, without a gap and in order for each."""
        self._widen(int(indices.max(initial=-1)) + 1)
        self.slots[rows, indices] = slots
        np.maximum.at(self.counts, rows, indices + 1)

    def append(self, row: int, slots: Int32) -> Int32:
        start = int(self.counts[row])
        end = start + len(slots)
        self._widen(end)
        self.slots[row, start:end] = slots
        self.counts[row] = end
        return np.arange(start, end, dtype=np.int32)

    def adopt(self, row: int, first: int, slots: Int32) -> Int32:
        """Put blocks `first` and on into an empty row; returns the table indices written."""
        self.firsts[row] = self.counts[row] = first
        return self.append(row, slots)

    def give_up(self, rows: Int32 | Int64, firsts: Int64) -> Int32:
        """Cut the front of each of `rows` (no repeats) up to block `firsts`; the slots cut, row by row."""
        before = self.firsts[rows]
        cut = np.minimum(firsts, self.counts[rows]) - before
        self.firsts[rows] = before + cut
        slots: Int32
        if (cut == 1).all():
            slots = self.slots[rows, before]
        else:
            inside = np.arange(cut.sum()) - np.repeat(np.cumsum(cut) - cut, cut)
            slots = self.slots[np.repeat(rows, cut), np.repeat(before, cut) + inside]
        return slots

    def row(self, row: int) -> Int32:
        """The blocks that the row holds."""
        return self.slots[row, self.firsts[row] : self.counts[row]]

    def clear(self, row: int) -> Int32:
        """Empty the row's table; returns a copy of what it held."""
        slots = self.row(row).copy()
        self.counts[row] = self.firsts[row] = 0
        return slots

    def _widen(self, width: int) -> None:
        if width <= self.slots.shape[1]:
            return
        wider = np.zeros((self.slots.shape[0], max(width, 2 * self.slots.shape[1])), dtype=np.int32)
        wider[:, : self.slots.shape[1]] = self.slots
        self.slots = wider
