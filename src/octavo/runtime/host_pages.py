"""Pages of an arena, asked of the system shortly before they are first written, by a thread that is idle.

The first write to a page costs five times the copy itself: 188 MB took 100 ms of processor time, and 18 ms where the
pages were there. Owns how far that has come; writes nothing. Invariant: at most `ahead_bytes` beyond what has been used
are asked for, so that an arena that is never filled takes no memory that it does not need.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

Advise = Callable[[int, int, int], int]
"""`madvise`: address, bytes, advice; 0 if it was done."""

AHEAD_BYTES = 256 << 20
CHUNK_BYTES = 16 << 20
"""Asked for at a time: a copy that comes meanwhile waits for that much."""
_POPULATE_WRITE = 23
"""Linux 5.14 and later: make the pages present, as a write would, and change nothing in them."""


def madvise(address: int, size: int, advice: int) -> int:
    try:
        call = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return -1
    return int(call(ctypes.c_void_p(address), ctypes.c_size_t(size), advice))


class PagesAhead:
    """`size` bytes from `address`, of which at most `ahead_bytes` are asked for beyond what has been used."""

    def __init__(
        self,
        address: int,
        size: int,
        advise: Advise = madvise,
        *,
        ahead_bytes: int = AHEAD_BYTES,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._address = address
        self._size = size
        self._advise = advise
        self._ahead_bytes = ahead_bytes
        self._chunk_bytes = chunk_bytes
        self._done = self._wanted = 0

    def used(self, end: int) -> None:
        """The arena is written up to this byte, or is about to be."""
        self._wanted = max(self._wanted, min(self._size, end + self._ahead_bytes))

    @property
    def lacking(self) -> bool:
        """Whether there is something to ask for now."""
        return self._done < self._wanted

    @property
    def lacking_bytes(self) -> int:
        return max(0, self._wanted - self._done)

    def ask(self) -> None:
        """For the next pages. Where the system does not know how, pages come with their first write, as ever."""
        size = min(self._chunk_bytes, self._wanted - self._done)
        if self._advise(self._address + self._done, size, _POPULATE_WRITE):
            self._done = self._size
        else:
            self._done += size
