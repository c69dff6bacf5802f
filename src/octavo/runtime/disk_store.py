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
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from octavo.errors import ConfigError
from octavo.runtime.disk_batch import Batch, Int64, Placed, numbers
from octavo.runtime.disk_format import KEY_BYTES, Reason

Item = TypeVar("Item")
Blocks = Batch | Sequence[Placed]
MOST_SLOTS = 2**28
"""Of one store: what is known of each takes some 40 bytes of memory."""
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
    """Which key is thought to lie in which of so many slots, of which keys an earlier run left what may not be served,
    and what came of reads and writes. Called from any thread; never waits for a disk."""

    def __init__(self, slots: int) -> None:
        self.left: Counter[Reason] = Counter()
        """Blocks of an earlier run that may not be served."""
        self.aside: dict[bytes, Reason] = {}
        self.found = 0
        self._lock = threading.Lock()
        self._keys = np.zeros((slots, KEY_BYTES // 8), np.uint64)
        self._turns = np.zeros(slots, np.int64)
        """When what lies there came to lie there; 0 for nothing."""
        self._turn = 0
        self._hits = self._writes = 0
        self._misses: Counter[Reason] = Counter()
        self._refusals: Counter[Reason] = Counter()

    def restore(self, keys: Mapping[int, bytes]) -> None:
        """What an earlier run left, the one to go first foremost."""
        for slot, key in keys.items():
            self._keys[slot] = np.frombuffer(key, np.uint64)
        self._put(np.array(list(keys), np.int64))
        self.found = len(keys)

    def stored(self) -> list[tuple[bytes, int]]:
        with self._lock:
            slots = np.flatnonzero(self._turns)
            slots = slots[np.argsort(self._turns[slots])]
            return list(zip(self._keys_in(slots), slots.tolist(), strict=True))

    def keys(self) -> set[bytes]:
        with self._lock:
            return set(self._keys_in(np.flatnonzero(self._turns)))

    def lies_in(self, batch: Batch) -> list[Reason | None]:
        """None of each block whose key lies in its slot, of others why not."""
        with self._lock:
            some = np.count_nonzero(self._turns[batch.slots])
            if some == len(batch) and self._keys[batch.slots].tobytes() == batch.packed:
                return [None] * len(batch)
            here = self._are_in(batch)
            absent: Reason = "absent"
            pairs = zip(here.tolist(), batch.keys, strict=True)
            return [None if found else self.aside.get(key, absent) for found, key in pairs]

    def empty(self, slots: Int64) -> None:
        with self._lock:
            self._turns[slots] = 0

    def remove(self, slots: Sequence[int]) -> list[bytes]:
        """What lay in them."""
        with self._lock:
            asked = np.intersect1d(numbers(slots), np.flatnonzero(self._turns))
            self._turns[asked] = 0
            return self._keys_in(asked)

    def written(self, batch: Batch, reasons: Sequence[Reason | None]) -> None:
        """Into slots that `empty` has emptied."""
        with self._lock:
            self._note(batch, reasons, anew=True)
            written = reasons.count(None)
            self._writes += written
            if written < len(reasons):
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
            gone = np.array([reason not in (None, "closed") for reason in reasons])
            self._turns[batch.slots[gone & self._are_in(batch)]] = 0
            self._misses.update(reason for reason in reasons if reason is not None)

    def _are_in(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """Whether each block's key lies in its slot."""
        here: npt.NDArray[np.bool_] = (self._keys[batch.slots] == _rows(batch)).all(axis=1)
        here &= self._turns[batch.slots] > 0
        return here

    def _note(self, batch: Batch, reasons: Sequence[Reason | None], *, anew: bool = False) -> None:
        """What was there already keeps its turn, unless it has come `anew`."""
        slots, rows = batch.slots, _rows(batch)
        if reasons.count(None) < len(reasons):
            kept = np.array([reason is None for reason in reasons])
            slots, rows = slots[kept], rows[kept]
        self._keys[slots] = rows
        self._put(slots if anew else slots[self._turns[slots] == 0])

    def _put(self, slots: Int64) -> None:
        self._turns[slots] = np.arange(self._turn + 1, self._turn + 1 + len(slots))
        self._turn += len(slots)

    def _keys_in(self, slots: Int64) -> list[bytes]:
        packed = self._keys[slots].tobytes()
        return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]

    def stats(self, slots: int, block_bytes: int, file_bytes: int, evictions: int = 0) -> DiskStats:
        with self._lock:
            return DiskStats(
                slots=slots,
                blocks=int(np.count_nonzero(self._turns)),
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


def _rows(batch: Batch) -> npt.NDArray[np.uint64]:
    """The keys, one a row."""
    return np.frombuffer(batch.packed, np.uint64).reshape(-1, KEY_BYTES // 8)


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
    if slots > MOST_SLOTS:
        remedy = f"is room for {slots:,} blocks of {block_bytes} bytes, at most {MOST_SLOTS:,} are kept; give less"
        raise ConfigError("disk_bytes", capacity_bytes, remedy)
    return slots
