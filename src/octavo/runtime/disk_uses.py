"""Which blocks of a pool on disk were used last, kept beside it: so that a later run gives up the oldest use first.

    pool.blocks        what is there
    pool.blocks.uses   8 bytes a slot: when it was last written or read

Owns that file. It is a hint: nothing is served or refused because of it, and where it is lost, damaged or cannot be
written, blocks go in the order of their writes. Invariant: no `OSError` passes, and the store behind it behaves as it
would alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from octavo.runtime.disk_batch import Batch, Int64, numbers
from octavo.runtime.disk_format import Reason
from octavo.runtime.disk_store import Blocks, DiskStats, DiskStore

BYTES_A_SLOT = 8
_BITS = 24
"""A use is a second, and so many bits that order the uses in it."""
_MOST = (1 << 34) << _BITS
"""What is beyond it, in some five hundred years, was not written here."""


_NEAR = 4096 // BYTES_A_SLOT
"""Slots apart that are noted together."""


class RemembersUses:
    """A `DiskStore` over another one of this process's own."""

    def __init__(self, inner: DiskStore, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.inner = inner
        self.block_bytes = inner.block_bytes
        self.slots = inner.slots
        self._clock = clock
        self._descriptor = -1
        self._last = np.zeros(self.slots, dtype="<u8")
        with suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            self._descriptor = os.open(path, flags, 0o600)
            os.ftruncate(self._descriptor, self.slots * BYTES_A_SLOT)
            raw = os.pread(self._descriptor, self.slots * BYTES_A_SLOT, 0)
            self._last[: len(raw) // BYTES_A_SLOT] = np.frombuffer(raw, "<u8", len(raw) // BYTES_A_SLOT)
        self._last[self._last > _MOST] = 0
        self._second = int(self._last.max(initial=0)) >> _BITS
        self._count = 1 << _BITS - 2
        """Uses in that second; an earlier run may have had any number of them."""

    def stored(self) -> list[tuple[bytes, int]]:
        """The one used longest ago first; of those of which no use is known, the oldest write."""
        return sorted(self.inner.stored(), key=lambda one: int(self._last[one[1]]))

    def write(self, blocks: Blocks) -> list[Reason | None]:
        reasons = self.inner.write(blocks)
        self._use(blocks, reasons, last_first=True)
        return reasons

    def read(self, blocks: Blocks) -> list[Reason | None]:
        reasons = self.inner.read(blocks)
        self._use(blocks, reasons, last_first=False)
        return reasons

    def forget(self, slots: Sequence[int]) -> None:
        self.inner.forget(slots)

    def stats(self) -> DiskStats:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _use(self, blocks: Blocks, reasons: Sequence[Reason | None], *, last_first: bool) -> None:
        """A block is of no use without those before it, which therefore count as used later. Texts are written from
        their last block on, and read from their first."""
        slots = blocks.slots if isinstance(blocks, Batch) else numbers([placed.slot for placed in blocks])
        if reasons.count(None) < len(reasons):
            slots = slots[np.array([reason is None for reason in reasons], np.bool_)]
        if not len(slots):
            return
        now = max(self._second, int(self._clock()))
        self._count = self._count if now == self._second else 0
        self._second = now
        uses = np.arange(self._count + 1, self._count + 1 + len(slots))
        self._count += len(slots)
        self._last[slots] = (now << _BITS) + (uses if last_first else (1 << _BITS) - uses)
        if self._descriptor >= 0:
            self._note(np.sort(slots))

    def _note(self, slots: Int64) -> None:
        """Neighbours in one call, with what lies between them: it is written as it is."""
        for near in np.split(slots, np.flatnonzero(slots[1:] - slots[:-1] > _NEAR) + 1):
            first, last = int(near[0]), int(near[-1])
            with suppress(OSError):
                os.pwrite(self._descriptor, self._last[first : last + 1].tobytes(), first * BYTES_A_SLOT)
