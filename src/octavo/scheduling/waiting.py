"""The waiting queue: by priority, then arrival; leaving from anywhere costs O(1).

Newcomers arrive in order and are appended. Those who return after a preemption are few and are
inserted where their arrival puts them. A place whose ticket is stale is skipped, and forgotten
before stale ones outnumber those who wait.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from heapq import merge

from octavo.scheduling.sequence import Sequence, SequenceState

_Place = tuple[int, int, Sequence]  # (arrival, ticket, sequence)
_STALE_AT_MOST = 64  # besides as many as there are waiting


class WaitingQueue:
    def __init__(self) -> None:
        self._newcomers: dict[int, deque[_Place]] = {}
        self._returned: dict[int, list[_Place]] = {}
        self._priorities: list[int] = []
        self._count = 0
        self._places = 0
        """Places of newcomers, stale ones included."""
        self._tickets = 0

    def __len__(self) -> int:
        return self._count

    def push(self, sequence: Sequence, *, returned: bool = False) -> None:
        """Not while iterating."""
        if self._places > 2 * self._count + _STALE_AT_MOST:
            self._forget_stale()
        priority = sequence.request.priority
        if priority not in self._newcomers:
            insort(self._priorities, priority)
            self._newcomers[priority] = deque()
            self._returned[priority] = []
        self._tickets += 1
        sequence.ticket = self._tickets
        sequence.state = SequenceState.WAITING
        place = (sequence.sequence_id, sequence.ticket, sequence)
        if returned:
            insort(self._returned[priority], place)
        else:
            self._newcomers[priority].append(place)
            self._places += 1
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        """The sequence leaves the queue, wherever it stands in it."""
        sequence.ticket = 0
        self._count -= 1

    def __iter__(self) -> Iterator[Sequence]:
        """In order. Removing the sequence just yielded is allowed."""
        for priority in tuple(self._priorities):
            newcomers, returned = self._newcomers[priority], self._returned[priority]
            while newcomers and _stale(newcomers[0]):
                newcomers.popleft()
                self._places -= 1
            if returned:
                returned[:] = [place for place in returned if not _stale(place)]
            if not newcomers and not returned:
                self._priorities.remove(priority)
                del self._newcomers[priority], self._returned[priority]
                continue
            places = merge(tuple(returned), newcomers) if returned else iter(newcomers)
            for place in places:
                if not _stale(place):
                    yield place[2]

    def _forget_stale(self) -> None:
        for priority, newcomers in self._newcomers.items():
            self._newcomers[priority] = deque(place for place in newcomers if not _stale(place))
        self._places = sum(len(newcomers) for newcomers in self._newcomers.values())


def _stale(place: _Place) -> bool:
    return place[1] != place[2].ticket
