"""The bounded queue: how many requests, and how many of their tokens, may wait at once.

Owns the count of what waits, folded from the engine's events, and the answer 429 with a time to come
back. Bounds nothing that runs: that is the scheduler's.

Invariant: requests and tokens counted are those of sequences that the engine has not admitted yet,
plus those about to be submitted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.scheduling.events import Admitted, Event, Finished, Preempted, Submitted
from octavo.server.errors import ApiError

MAX_RETRY_AFTER_S = 60
_REMEMBERED = 64
"""Admissions from which the pace of the queue is read."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 2**20


class WaitingRoom:
    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self._waiting: dict[int, int] = {}
        self._tokens = 0
        self._coming = 0
        self._coming_tokens = 0
        self._admitted_at: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def requests(self) -> int:
        return len(self._waiting) + self._coming

    @property
    def tokens(self) -> int:
        return self._tokens + self._coming_tokens

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Submitted):
                self._waiting[event.sequence_id] = event.input_tokens
                self._tokens += event.input_tokens
            elif isinstance(event, Admitted):
                self._admitted_at.append(event.now)
                self._leave(event.sequence_id)
            elif isinstance(event, Finished):
                self._leave(event.sequence_id)
            elif isinstance(event, Preempted):
                self._waiting[event.sequence_id] = event.computed_tokens
                self._tokens += event.computed_tokens

    @contextmanager
    def entering(self, requests: int, tokens: int) -> Iterator[None]:
        """Keep room for sequences while they are submitted. Raises `ApiError`: 429, or 400 where room can never be."""
        most = self.limits
        if requests > most.max_waiting_requests:
            raise _never("n", f"{requests} sequences", f"--max-waiting-requests {most.max_waiting_requests}")
        if tokens > most.max_waiting_tokens:
            raise _never("prompt", f"{tokens} tokens in all", f"--max-waiting-tokens {most.max_waiting_tokens}")
        if self.requests + requests > most.max_waiting_requests:
            raise self._full(f"{self.requests} requests wait, at most {most.max_waiting_requests} may")
        if self.tokens + tokens > most.max_waiting_tokens:
            raise self._full(f"{self.tokens} tokens wait, at most {most.max_waiting_tokens} may")
        self._coming += requests
        self._coming_tokens += tokens
        try:
            yield
        finally:
            self._coming -= requests
            self._coming_tokens -= tokens

    def _leave(self, sequence_id: int) -> None:
        self._tokens -= self._waiting.pop(sequence_id, 0)

    def _full(self, why: str) -> ApiError:
        seconds = self._retry_after_s()
        return ApiError(
            429,
            f"the queue is full: {why}; try again in {seconds} s",
            code="queue_full",
            headers={"Retry-After": str(seconds)},
        )

    def _retry_after_s(self) -> int:
        """Time in which a quarter of the queue enters, at its recent pace."""
        if len(self._admitted_at) < 2:
            return 1
        pace_s = (self._admitted_at[-1] - self._admitted_at[0]) / (len(self._admitted_at) - 1)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(pace_s * len(self._waiting) / 4)))


def _never(param: str, value: str, limit: str) -> ApiError:
    return ApiError(
        400, f"{param}={value}: more than may ever wait ({limit}); send less in one request", param=param,
        code="queue_limit",
    )  # fmt: skip
