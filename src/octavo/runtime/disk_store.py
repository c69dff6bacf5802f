"""What a store of blocks on disk offers, whichever form it has, and what it counts.

A store has slots, chosen by its caller, and says of every block that it does not keep or serve why not. Owns the
words, the counting, and the second thread of a read; opens nothing.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

from octavo.errors import InvariantViolation
from octavo.runtime.disk_format import KEY_BYTES, Buffer, Reason

Item = TypeVar("Item")


class Placed(NamedTuple):
    """A block to write to its slot, or the memory to read it into."""

    slot: int
    key: bytes
    block: Buffer


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Counted since the store was opened, except `slots` and `blocks`, which are now."""

    slots: int
    blocks: int
    block_bytes: int
    file_bytes: int
    hits: int
    writes: int
    evictions: int
    misses: Mapping[Reason, int]
    refusals: Mapping[Reason, int]
    """Writes that were not kept."""
    found: int
    """Blocks of an earlier run that this one may serve."""
    left_aside: Mapping[Reason, int]
    """Blocks of an earlier run that this one may not serve."""

    @property
    def bytes_read(self) -> int:
        return self.hits * self.block_bytes

    @property
    def bytes_written(self) -> int:
        return self.writes * self.block_bytes


class DiskStore(Protocol):
    """Of one group. Called from any thread; `stored` and `stats` wait for no disk."""

    block_bytes: int
    slots: int

    def stored(self) -> list[tuple[bytes, int]]:
        """Key and slot of what is thought to be here, the one to go first foremost; only `read` proves it."""
        ...

    def write(self, blocks: Sequence[Placed]) -> list[Reason | None]:
        """Write each block to its slot, over what is there; of each that is not kept, why."""
        ...

    def read(self, blocks: Sequence[Placed]) -> list[Reason | None]:
        """Fill each block's memory; of each that is not served, why, and its memory holds nothing to rely on."""
        ...

    def forget(self, slots: Sequence[int]) -> None:
        """What these hold is not found by a later run either, if the disk can be written."""
        ...

    def stats(self) -> DiskStats: ...

    def close(self) -> None:
        """Give the store up; what is in it stays. Later reads and writes say `closed`."""
        ...


class Counts:
    """What came of reads and writes, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.hits = self.writes = 0
        self._misses: Counter[Reason] = Counter()
        self._refusals: Counter[Reason] = Counter()

    def read(self, reasons: Sequence[Reason | None]) -> None:
        with self._lock:
            self.hits += reasons.count(None)
            self._misses.update(reason for reason in reasons if reason is not None)

    def written(self, reasons: Sequence[Reason | None]) -> None:
        with self._lock:
            self.writes += reasons.count(None)
            self._refusals.update(reason for reason in reasons if reason is not None)

    @property
    def misses(self) -> Mapping[Reason, int]:
        with self._lock:
            return MappingProxyType(dict(self._misses))

    @property
    def refusals(self) -> Mapping[Reason, int]:
        with self._lock:
            return MappingProxyType(dict(self._refusals))


class Helped:
    """Work on a list by the caller and one thread beside it: while one copies, the other hashes."""

    def __init__(self, name: str) -> None:
        self._helper = ThreadPoolExecutor(1, name)

    def each(self, act: Callable[[Item], None], items: Sequence[Item]) -> None:
        """Return when all are done. A helper that is not free leaves everything to the caller."""
        left = deque(items)

        def work() -> None:
            while left:
                try:
                    item = left.popleft()
                except IndexError:  # the other one was quicker
                    return
                act(item)

        helper = self._helper.submit(work) if len(items) > 1 else None
        work()
        if helper is not None and not helper.cancel():
            helper.result()

    def close(self) -> None:
        self._helper.shutdown()


def check_block(placed: Placed, slots: int, block_bytes: int) -> None:
    """Raises `InvariantViolation` for what no store of such slots and blocks can be asked for."""
    slot, key, block = placed
    size = memoryview(block).nbytes
    if not 0 <= slot < slots or len(key) != KEY_BYTES or size != block_bytes:
        raise InvariantViolation(
            "disk-block",
            f"slot {slot}, key of {len(key)} bytes and block of {size}, where 0..{slots - 1}, {KEY_BYTES} and "
            f"{block_bytes} belong",
        )
