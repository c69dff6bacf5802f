"""The pages of the KV pool on a CPU, asked of the system at the start and while the engine is idle: `PoolPages`.

Slots are handed out in the order of their addresses, so what is asked for next is what will be written next. Owns
when that is done and by which thread; which bytes are used is the executor's to say, and what is in them no matter
here. Where the system does not know how, pages come with their first write, as ever.

Invariant: nothing is asked for while a step runs, but for the piece that was begun before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from octavo.errors import ConfigError
from octavo.machine import read_machine
from octavo.runtime.host_pages import Advise, PagesAhead, madvise

AHEAD_BYTES = 128 << 20
"""Kept ahead of what is used of a pool that is a share of memory or a limit in bytes: a few long prompts."""
MOST_OF_FREE = 4
"""At most this part of the memory that is free is asked for ahead of its use, whatever the pool."""
PIECE_BYTES = 2 << 20
"""A huge page: where a virtual machine has to get it from its host first, that alone takes some milliseconds."""
START_S = 3.0
"""The longest that a start waits for pages of a pool that is there to be filled; the rest comes while idle."""
QUIET_S = 0.1
"""Without a step for that long, the engine is idle."""
_GROWS_BY = 16 << 20
"""No thread is started for less."""
_NODES = Path("/sys/devices/system/node/has_memory")


class PoolPages:
    """See the module docstring. One thread, alive only while there is something to ask for."""

    def __init__(
        self,
        memory: torch.Tensor,
        ahead_bytes: int,
        *,
        advise: Advise = madvise,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory  # held, so that it is there for as long as the thread is
        size = memory.numel()
        self._pages = PagesAhead(memory.data_ptr(), size, advise, ahead_bytes=ahead_bytes, chunk_bytes=PIECE_BYTES)
        self._clock = clock
        self._stepping = False
        self._quiet_from = clock() + QUIET_S
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def used(self, end: int) -> None:
        """The pool is written up to this byte, or is about to be."""
        self._pages.used(end)
        if self._pages.lacking_bytes >= _GROWS_BY:
            self._start()

    def ask_now(self, seconds: float) -> None:
        """In the caller's own thread, before there is another, and for so long at most."""
        self._pages.used(0)
        until = self._clock() + seconds
        while self._pages.lacking_bytes and self._clock() < until:
            self._pages.ask()

    def step_begins(self) -> None:
        self._stepping = True

    def step_ended(self) -> None:
        self._quiet_from = self._clock() + QUIET_S
        self._stepping = False

    def close(self) -> None:
        self._closing.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        if self._closing.is_set() or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._ask, name="octavo-pool-pages", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while self._pages.lacking_bytes and not self._closing.is_set():
            if self._stepping or self._clock() < self._quiet_from:
                self._closing.wait(QUIET_S)
            else:
                self._pages.ask()


def ahead_bytes(size: int, named: bool) -> int:
    """How much of a pool of `size` bytes to ask for ahead of its use.

    `named`: the user has named blocks or positions, which are there to be filled; otherwise the pool is a limit.
    Nothing where memory belongs to several nodes: there pages should come where they are first written.
    """
    if _nodes() > 1:
        return 0
    try:
        free = read_machine().available_bytes
    except ConfigError:
        return 0
    return min(size if named else AHEAD_BYTES, free // MOST_OF_FREE)


def _nodes(path: Path = _NODES) -> int:
    """Nodes that have memory; one where the system tells of none. The file is a list such as `0-1,3`."""
    try:
        spans = [part.split("-") for part in path.read_text(encoding="ascii").strip().split(",")]
        return max(1, sum(int(span[-1]) - int(span[0]) + 1 for span in spans))
    except (OSError, ValueError):
        return 1
