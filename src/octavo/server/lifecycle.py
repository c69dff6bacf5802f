"""Whether the server takes requests: starting, ready, draining, or its engine is dead.

Owns the count of generations in progress and the end of a drain. Knows no signal and no socket.

    starting -> ready -> draining -> (nothing in progress) -> the process may end
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from octavo.server.errors import engine_dead, unavailable

State = Literal["starting", "ready", "draining", "dead"]
RETRY_AFTER_S = 5


class Lifecycle:
    def __init__(self, is_alive: Callable[[], bool]) -> None:
        self._is_alive = is_alive
        self._ready = False
        self._draining = False
        self._in_progress = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def state(self) -> State:
        if self._draining:
            return "draining"
        if not self._ready:
            return "starting"
        return "ready" if self._is_alive() else "dead"

    @property
    def in_progress(self) -> int:
        """Generations whose answer is not sent yet."""
        return self._in_progress

    @property
    def engine_alive(self) -> bool:
        return self._is_alive()

    def now_ready(self) -> None:
        self._ready = True

    def start_draining(self) -> None:
        """Take no new generation from now on."""
        self._draining = True

    def require_open(self) -> None:
        """Raises `ApiError` (503) unless a new generation may begin."""
        if self.state == "draining":
            raise unavailable("draining", "the server is shutting down; send the request to another one",
                              retry_after_s=RETRY_AFTER_S)  # fmt: skip
        if self.state == "starting":
            raise unavailable("starting", "the server is starting; wait until /ready answers 200",
                              retry_after_s=RETRY_AFTER_S)  # fmt: skip
        if self.state == "dead":
            raise engine_dead()

    @contextmanager
    def generation(self) -> Iterator[None]:
        """One generation, from its submission until its answer is sent."""
        self.require_open()
        self._in_progress += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_progress -= 1
            if not self._in_progress:
                self._idle.set()

    async def idle(self) -> None:
        """Until nothing is in progress."""
        await self._idle.wait()
