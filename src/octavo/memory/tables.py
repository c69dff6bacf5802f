"""Block tables of one group: row -> slots in order, as one growable 2-D array.

    positions   | block 0 | block 1 | block 2 | block 3 |
    held                            ^ firsts[row]       ^ counts[row]

Entry i is the block of positions i * block_tokens and on, whatever was given up before it. Entries are stored narrow
and handed out wide: numpy indexes several times as fast with 64-bit integers.
"""

from __future__ import annotations

import numpy as np

from octavo.memory.values import Int64


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

    def append_one_each(self, rows: Int64, slots: Int64) -> Int64:
        """One block for each of `rows` (no repeats); returns the table indices written."""
        indices = self.counts[rows]
        self._widen(max(indices.tolist(), default=-1) + 1)
        self.slots[rows, indices] = slots
        self.counts[rows] = indices + 1
        return indices

    def append_at(self, rows: Int64, indices: Int64, slots: Int64) -> None:
        """Blocks at these places, which are the next ones of each of `rows`, without a gap and in order for each."""
        self._widen(max(indices.tolist(), default=-1) + 1)
        self.slots[rows, indices] = slots
        self.counts[rows] = indices + 1  # the last of each row stays

    def append(self, row: int, slots: Int64) -> Int64:
        start = int(self.counts[row])
        end = start + len(slots)
        self._widen(end)
        self.slots[row, start:end] = slots
        self.counts[row] = end
        return np.arange(start, end)

    def adopt(self, row: int, first: int, slots: Int64) -> Int64:
        """Put blocks `first` and on into an empty row; returns the table indices written."""
        self.firsts[row] = self.counts[row] = first
        return self.append(row, slots)

    def give_up(self, rows: Int64, firsts: Int64) -> Int64:
        """Cut the front of each of `rows` (no repeats) up to block `firsts`; the slots cut, row by row."""
        before = self.firsts[rows]
        cut = np.minimum(firsts, self.counts[rows]) - before
        self.firsts[rows] = before + cut
        if (cut == 1).all():
            slots = self.slots[rows, before]
        else:
            inside = np.arange(cut.sum()) - np.repeat(np.cumsum(cut) - cut, cut)
            slots = self.slots[np.repeat(rows, cut), np.repeat(before, cut) + inside]
        return slots.astype(np.int64)

    def between(self, rows: Int64, firsts: Int64, ends: Int64) -> Int64:
        """Slots of blocks `firsts` to `ends` - 1 of each of `rows`, row by row; of most rows that is often none."""
        many = ends - firsts
        some = many.nonzero()[0]
        if not len(some):
            return some
        if len(some) == 1:
            place = some[0]
            slots = self.slots[rows[place], firsts[place] : ends[place]]
        elif int(np.add.reduce(many)) == len(some):
            slots = self.slots[rows[some], firsts[some]]
        else:
            slots = np.concatenate([self.slots[rows[i], firsts[i] : ends[i]] for i in some.tolist()])
        return slots.astype(np.int64)

    def row(self, row: int) -> Int64:
        """The blocks that the row holds."""
        return self.slots[row, self.firsts[row] : self.counts[row]].astype(np.int64)

    def clear(self, row: int) -> Int64:
        """Empty the row's table; returns a copy of what it held."""
        slots = self.row(row)
        self.counts[row] = self.firsts[row] = 0
        return slots

    def _widen(self, width: int) -> None:
        if width <= self.slots.shape[1]:
            return
        wider = np.zeros((self.slots.shape[0], max(width, 2 * self.slots.shape[1])), dtype=np.int32)
        wider[:, : self.slots.shape[1]] = self.slots
        self.slots = wider
