"""What a store of blocks on disk offers, whichever form it has, what it knows of them and what it counts.

A store has slots, chosen by its caller, and says of every block that it does not keep or serve why not. Owns the
words, which key is thought to lie in which slot, the counting, and the second thread of a read; opens nothing.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from octavo.errors import ConfigError
from octavo.runtime.disk_batch import Batch, Placed
from octavo.runtime.disk_format import Reason

Item = TypeVar("Item")
Blocks = Batch | Sequence[Placed]
THREADS = 2
"""That move a batch, the lane's own among them. More wait for one writer of a file, and compete with what computes."""


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

    def write(self, blocks: Blocks) -> list[Reason | None]:
        """Write each block to its slot, over what is there; of each that is not kept, why."""
        ...

    def read(self, blocks: Blocks) -> list[Reason | None]:
        """Fill each block's memory; of each that is not served, why, and its memory holds nothing to rely on."""
        ...

    def forget(self, slots: Sequence[int]) -> None:
        """What these hold is not found by a later run either, if the disk can be written."""
        ...

    def stats(self) -> DiskStats: ...

    def close(self) -> None:
        """Give the store up; what is in it stays. Later reads and writes say `closed`."""
        ...


class Known:
    """Which key is thought to lie in which slot, of which keys an earlier run left what may not be served, and what
    came of reads and writes. Called from any thread; never waits for a disk."""

    def __init__(self) -> None:
        self.left: Counter[Reason] = Counter()
        """Blocks of an earlier run that may not be served."""
        self.aside: dict[bytes, Reason] = {}
        self.found = 0
        self._lock = threading.Lock()
        self._keys: dict[int, bytes] = {}
        self._hits = self._writes = 0
        self._misses: Counter[Reason] = Counter()
        self._refusals: Counter[Reason] = Counter()

    def restore(self, keys: Mapping[int, bytes]) -> None:
        """What an earlier run left, the one to go first foremost."""
        self._keys.update(keys)
        self.found = len(keys)

    def stored(self) -> list[tuple[bytes, int]]:
        with self._lock:
            return [(key, slot) for slot, key in self._keys.items()]

    def keys(self) -> set[bytes]:
        with self._lock:
            return set(self._keys.values())

    def lies_in(self, batch: Batch) -> list[Reason | None]:
        """None of each block whose key lies in its slot, of others why not."""
        with self._lock:
            there = list(map(self._keys.get, batch.slots.tolist()))
            if there == list(batch.keys):
                return [None] * len(there)
            absent: Reason = "absent"
            pairs = zip(there, batch.keys, strict=True)
            return [None if found == key else self.aside.get(key, absent) for found, key in pairs]

    def remove(self, slots: Sequence[int]) -> list[bytes]:
        """What lay in them."""
        with self._lock:
            return [key for key in map(self._keys.pop, slots, repeat(None)) if key is not None]

    def written(self, batch: Batch, reasons: Sequence[Reason | None]) -> None:
        """Into slots that `remove` has emptied."""
        with self._lock:
            self._note(batch, reasons)
            self._writes += reasons.count(None)
            self._refusals.update(reason for reason in reasons if reason is not None)

    def read(self, batch: Batch, reasons: Sequence[Reason | None], *, from_anywhere: bool = False) -> None:
        """What was asked for and could not be read lies there no more. `from_anywhere`: what could be read lies where
        it was asked for, whatever was known."""
        with self._lock:
            self._hits += reasons.count(None)
            if from_anywhere:
                self._note(batch, reasons)
            if reasons.count(None) == len(reasons):
                return
            for slot, key, reason in zip(batch.slots.tolist(), batch.keys, reasons, strict=True):
                if reason not in (None, "closed") and self._keys.get(slot) == key:
                    del self._keys[slot]
            self._misses.update(reason for reason in reasons if reason is not None)

    def _note(self, batch: Batch, reasons: Sequence[Reason | None]) -> None:
        pairs = zip(batch.slots.tolist(), batch.keys, strict=True)
        if reasons.count(None) == len(reasons):
            self._keys.update(pairs)
        else:
            self._keys.update(pair for pair, reason in zip(pairs, reasons, strict=True) if reason is None)

    def stats(self, slots: int, block_bytes: int, file_bytes: int, evictions: int = 0) -> DiskStats:
        with self._lock:
            return DiskStats(
                slots=slots,
                blocks=len(self._keys),
                block_bytes=block_bytes,
                file_bytes=file_bytes,
                hits=self._hits,
                writes=self._writes,
                evictions=evictions,
                misses=MappingProxyType(dict(self._misses)),
                refusals=MappingProxyType(dict(self._refusals)),
                found=self.found,
                left_aside=MappingProxyType(dict(self.left)),
            )


class Helped:
    """Work by the caller and by threads beside it: a native crew for whole batches, one of Python's for single runs."""

    def __init__(self, name: str, threads: int = THREADS) -> None:
        self._threads = threads
        self._helper = ThreadPoolExecutor(1, name)
        self._crew: Any = None

    def crew(self, native: Any) -> Any:
        """For the extension's calls, which start its threads when they are needed."""
        if self._crew is None:
            self._crew = native.Crew(self._threads - 1)
        return self._crew

    def each(self, act: Callable[[Item], None], items: Sequence[Item]) -> None:
        """Do it for each item, in whichever thread is free. A helper that is not free leaves it to the caller."""
        left = deque(items)

        def work() -> None:
            while left:
                try:
                    item = left.popleft()
                except IndexError:  # the other one was quicker
                    return
                act(item)

        if len(items) < 2 or self._threads < 2:
            work()
            return
        helper = self._helper.submit(work)
        work()
        if not helper.cancel():
            helper.result()

    def close(self) -> None:
        self._helper.shutdown()
        if self._crew is not None:
            self._crew.close()


def slots_of(capacity_bytes: int, slots: int, block_bytes: int, need: int) -> int:
    """The slots, where there is one. Raises `ConfigError`; `need`: bytes that one block takes."""
    if block_bytes < 1 or slots < 1:
        raise ConfigError("disk_bytes", capacity_bytes, f"one block of {block_bytes} bytes takes {need}; give more")
    return slots
