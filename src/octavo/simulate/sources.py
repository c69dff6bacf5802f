"""Where a simulation's requests come from: an open stream, sessions, or users who send again when answered.

All three keep what is due in one heap by (moment, number), so that equal moments go in the order of the workload.
Prompts are made when a request is sent, not before: a trace of millions of tokens takes no memory of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from octavo.errors import ConfigError
from octavo.scheduling.request import Request
from octavo.simulate.executors import NANOSECONDS
from octavo.simulate.trace import MOST_NS, TraceRequest, request_of

_MOST_SPEED = 1_000_000


class OpenLoop:
    """Requests arrive when the workload says, answered or not; of a session, after the one before has ended."""

    def __init__(self, requests: Sequence[TraceRequest], *, speed: float = 1.0) -> None:
        if not 1 / _MOST_SPEED <= speed <= _MOST_SPEED:
            raise ConfigError("speed", speed, f"must be above 0; 2 sends twice as fast; {_MOST_SPEED:,} at most")
        self._requests = requests
        self._speed = speed
        if requests:
            _countable(self._moment(requests[-1]))
        self._open = 0
        """Requests before this one have been sent or queued behind others of their session."""
        self._due: list[tuple[int, int]] = []
        self._behind: dict[str, deque[int]] = {}
        """Of each session that has one under way: those that wait for it."""
        self._pull()

    def next_ns(self) -> int | None:
        return self._due[0][0] if self._due else None

    def pop(self) -> Request:
        _, number = heappop(self._due)
        self._pull()
        return request_of(self._requests[number], number)

    def ended(self, request_id: str, now_ns: int) -> None:
        session = self._requests[int(request_id)].session
        if session is None:
            return
        behind = self._behind[session]
        if not behind:
            del self._behind[session]
            return
        number = behind.popleft()
        entry = self._requests[number]
        heappush(self._due, (_countable(max(self._moment(entry), now_ns + entry.think_ns)), number))

    def _moment(self, entry: TraceRequest) -> int:
        return entry.arrival_ns if self._speed == 1 else round(entry.arrival_ns / self._speed)

    def _pull(self) -> None:
        """Keep at least one request of those still to come in the heap, if there is one."""
        while self._open < len(self._requests) and (
            not self._due or self._moment(self._requests[self._open]) <= self._due[0][0]
        ):
            number, entry = self._open, self._requests[self._open]
            self._open += 1
            if entry.session is None:
                heappush(self._due, (self._moment(entry), number))
            elif entry.session in self._behind:
                self._behind[entry.session].append(number)
            else:
                self._behind[entry.session] = deque()
                heappush(self._due, (self._moment(entry), number))


class ClosedLoop:
    """`users` who each send the next request of the workload when theirs has ended, after `think_s`."""

    def __init__(self, requests: Sequence[TraceRequest], users: int, *, think_s: float = 0.0) -> None:
        if users < 1:
            raise ConfigError("users", users, "must be at least 1")
        if not 0 <= think_s <= MOST_NS / NANOSECONDS:
            raise ConfigError("think_s", think_s, "must be at least 0 seconds, and no hundred years")
        self._requests = requests
        self._think_ns = round(think_s * NANOSECONDS)
        self._next = 0
        self._due: list[tuple[int, int]] = []
        for _ in range(min(users, len(requests))):
            self._send(0)

    def next_ns(self) -> int | None:
        return self._due[0][0] if self._due else None

    def pop(self) -> Request:
        _, number = heappop(self._due)
        return request_of(self._requests[number], number)

    def ended(self, request_id: str, now_ns: int) -> None:
        if self._next < len(self._requests):
            self._send(now_ns + self._think_ns + self._requests[self._next].think_ns)

    def _send(self, at_ns: int) -> None:
        heappush(self._due, (_countable(at_ns), self._next))
        self._next += 1


def _countable(at_ns: int) -> int:
    """The same moment, where the clock can reach it. Raises `ConfigError`."""
    if at_ns > MOST_NS:
        remedy = (
            f"is later than virtual time counts, {MOST_NS / NANOSECONDS:,.0f} s; send faster, or think for less long"
        )
        raise ConfigError("arrival", f"{at_ns / NANOSECONDS:.3g} s", remedy)
    return at_ns
