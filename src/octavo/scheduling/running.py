"""The running set as numpy columns, one row per seat. The columns are the truth.

    0 <= computed <= known + pending          known: tokens the host has seen
    known + pending <= limit                  pending: tokens sampled in flight, not yet learned
                                              computed: positions computed or planned to be

    tokens:    p p p p p p o o o o ?          p prompt, o output, ? pending
               |---- computed ----|
                                  ^ the next chunk starts here

A sequence wants `known + pending - computed` positions, and none once `known + pending` has
reached its limit: its last token is never computed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from octavo.memory.values import Int32, Int64
from octavo.scheduling.plan import PENDING
from octavo.scheduling.sequence import Sequence, SequenceState

_NO_STOP = -2  # never equal to a token id
_FEW = 32
"""Tokens of a row: so many are written with those of others, more of them row by row."""
_LATER = np.arange(_FEW, dtype=np.int64)


class RunningSet:
    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.sequence_id = np.full(rows, -1, dtype=np.int64)
        self.prompt = np.zeros(rows, dtype=np.int64)
        self.known = np.zeros(rows, dtype=np.int64)
        self.pending = np.zeros(rows, dtype=np.int64)
        self.computed = np.zeros(rows, dtype=np.int64)
        self.limit = np.zeros(rows, dtype=np.int64)
        self.step = np.zeros(rows, dtype=np.int64)
        """The most positions of each row in one step."""
        self.singly = np.zeros(rows, dtype=bool)
        """Whether each row waits for its plan in flight before the next: there is no room for what both read."""
        self.cut = np.zeros(rows, dtype=np.int64)
        """A position of each row where a chunk ends, so that state can be copied as it stands there; 0: nowhere."""
        self.loading = np.zeros(rows, dtype=bool)
        """Whether each row waits for state on its way to the device, and computes nothing until then."""
        self.last_token = np.zeros(rows, dtype=np.int32)
        self.done = np.zeros(rows, dtype=bool)
        """Ended, but still in its seat because its batch has not (batching by request)."""
        self.ended = 0
        """How many of them there are."""
        self.feed_tokens = np.zeros(rows, dtype=np.int64)
        self.feed: list[Int32 | None] = [None] * rows
        """The tokens a row had when it was seated."""
        self.outputs = np.zeros((rows, 64), dtype=np.int32)
        self.stop_ids = np.full((rows, 1), _NO_STOP, dtype=np.int32)
        self.order = np.empty(0, dtype=np.int64)
        """Rows in order of admission."""
        self._sequences: list[Sequence | None] = [None] * rows
        self._free_rows = list(range(rows - 1, -1, -1))
        self._cuts = False
        """Whether any sequence so far had a position to cut at."""
        self._stops: list[tuple[int, ...]] = [()] * rows
        """What stands in `stop_ids`, by row."""

    def __len__(self) -> int:
        return len(self.order)

    def sequence(self, row: int) -> Sequence:
        sequence = self._sequences[row]
        assert sequence is not None, f"row {row} is empty"
        return sequence

    def live_rows(self) -> Int64:
        """Rows whose sequence has not ended, in order of admission. Nobody changes it."""
        order = self.order
        return order[~self.done[order]] if self.ended else order

    def end(self, row: int) -> None:
        """The row's sequence has ended, and keeps its seat until it is emptied."""
        self.ended += not self.done[row]
        self.done[row] = True

    def wanted(self, rows: Int64) -> Int64:
        """Positions that each row could compute now."""
        known = self.known[rows] + self.pending[rows]
        computed = self.computed[rows]
        wanted = known - computed
        wanted[(known >= self.limit[rows]) | self.done[rows] | self.loading[rows]] = 0
        most: Int64 = np.minimum(wanted, self.step[rows])
        if self._cuts:
            to_cut = self.cut[rows] - computed
            most = np.where(to_cut > 0, np.minimum(most, to_cut), most)
        return most

    def seat(self, sequence: Sequence, step: int, computed: int = 0, cut: int = 0) -> int:
        """Give it a row, in which it computes at most `step` positions at once from `computed` on; returns the row."""
        row = self._free_rows.pop()
        feed = sequence.tokens()
        outputs = sequence.outputs
        self._widen_outputs(len(outputs))
        self.sequence_id[row] = sequence.sequence_id
        self.prompt[row] = sequence.request.prompt_tokens
        self.known[row] = self.feed_tokens[row] = len(feed)
        self.pending[row] = 0
        self.computed[row] = computed
        self.limit[row] = sequence.limit
        self.step[row] = step
        self.singly[row] = False
        self.cut[row] = cut
        self._cuts = self._cuts or cut > 0
        self.loading[row] = False
        self.last_token[row] = feed[-1]
        self.done[row] = False
        self.feed[row] = feed
        if len(outputs):
            self.outputs[row, : len(outputs)] = outputs
        self._set_stops(row, sequence.request.stop_ids)
        self.order = np.concatenate((self.order, (row,)))
        self._sequences[row] = sequence
        sequence.row = row
        sequence.state = SequenceState.RUNNING
        return row

    def unseat(self, rows: Iterable[int]) -> None:
        """Empty these seats; the outputs go back to their sequences."""
        leaving = list(rows)
        for row in leaving:
            sequence = self.sequence(row)
            sequence.outputs = self.outputs[row, : self.known[row] - self.prompt[row]].copy()
            sequence.row = -1
            self._sequences[row] = None
            self.feed[row] = None
            self.sequence_id[row] = -1
            self.ended -= int(self.done[row])
            self.done[row] = False
            self._free_rows.append(row)
        if len(leaving) == 1:
            self.order = self.order[self.order != leaving[0]]
        else:
            self.order = self.order[~np.isin(self.order, leaving)]

    def tokens_at(self, rows: Int64, starts: Int64, counts: Int64) -> Int32:
        """Token ids of the chunks, ragged; PENDING where the token is still in flight."""
        last = self.last_token[rows]
        last[self.pending[rows] > 0] = PENDING
        chunks = (starts < self.feed_tokens[rows]).nonzero()[0].tolist()
        if not chunks:
            return last
        pieces: list[Int32] = []
        done = 0
        for i in chunks:
            start = int(starts[i])
            pieces += (last[done:i], self._fed(int(rows[i]))[start : start + int(counts[i])])
            done = i + 1
        return np.concatenate((*pieces, last[done:]))

    def tokens_between(self, row: int, first: int, end: int) -> Int32:
        """Known tokens first .. end - 1 of the row's sequence."""
        feed, prompt = self._fed(row), int(self.prompt[row])
        if end <= len(feed):
            return feed[first:end]
        outputs = self.outputs[row, max(0, len(feed) - prompt, first - prompt) : end - prompt]
        return np.concatenate([feed[first:], outputs]) if first < len(feed) else outputs

    def learn(self, rows: Int64, tokens: Int32) -> None:
        """Each row's next token has become known."""
        known = self.known[rows]
        index = known - self.prompt[rows]
        self._widen_outputs(int(np.maximum.reduce(index, initial=-1)) + 1)
        self.outputs[rows, index] = tokens
        self.last_token[rows] = tokens
        self.known[rows] = known + 1
        self.pending[rows] -= 1

    def learn_repeated(self, rows: Int64, tokens: Int32, steps: int) -> None:
        """`steps` further tokens of each row have become known, all of them the row's entry of `tokens`."""
        first = self.known[rows] - self.prompt[rows]
        self._widen_outputs(int(np.maximum.reduce(first, initial=-steps)) + steps)
        outputs = self.outputs
        if steps <= _FEW:
            outputs[rows[:, None], first[:, None] + _LATER[:steps]] = tokens[:, None]
        else:
            for row, begin, token in zip(rows.tolist(), first.tolist(), tokens.tolist(), strict=True):
                outputs[row, begin : begin + steps] = token
        self.last_token[rows] = tokens
        self.known[rows] += steps

    def relearn_last(self, rows: Int64, tokens: Int32) -> None:
        """Each row's last token turned out to be this one."""
        self.outputs[rows, self.known[rows] - self.prompt[rows] - 1] = tokens
        self.last_token[rows] = tokens

    def ended_by(self, rows: Int64, tokens: Int32) -> tuple[np.ndarray, np.ndarray]:
        """Two masks: the token is one of the row's stop ids; the row has reached its limit."""
        stops = self.stop_ids[rows]
        stopped = stops[:, 0] == tokens
        for place in range(1, stops.shape[1]):
            stopped |= stops[:, place] == tokens
        return stopped, self.known[rows] >= self.limit[rows]

    def _fed(self, row: int) -> Int32:
        feed = self.feed[row]
        assert feed is not None, f"row {row} is empty"
        return feed

    def _set_stops(self, row: int, stop_ids: tuple[int, ...]) -> None:
        if len(stop_ids) > self.stop_ids.shape[1]:
            wider = np.full((self.rows, len(stop_ids)), _NO_STOP, dtype=np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        if stop_ids != self._stops[row]:
            self._stops[row] = stop_ids
            self.stop_ids[row] = _NO_STOP
            self.stop_ids[row, : len(stop_ids)] = stop_ids

    def _widen_outputs(self, width: int) -> None:
        if width <= self.outputs.shape[1]:
            return
        # Zeroed pages are not touched until a row reaches them, so width costs little.
        wider = np.zeros((self.rows, max(width, 2 * self.outputs.shape[1])), dtype=np.int32)
        wider[:, : self.outputs.shape[1]] = self.outputs
        self.outputs = wider
