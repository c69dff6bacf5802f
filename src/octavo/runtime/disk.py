"""Blocks on disk by key alone: slots of a file, taken and given up here; bounded, surviving restarts.

Owns which slot a key takes and the order in which blocks go: oldest use first (across a restart, oldest write; a read
costs no write). What lies in the slots, and what it must prove, is `DiskSlots`'s. Does not know tables, sequences or
arenas: bytes go in and come out under a key of 32 bytes.

Invariant: every slot is that of one key or free, and no fault of the disk passes `put` or `get` as an exception.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from octavo.runtime.disk_files import Syscalls
from octavo.runtime.disk_format import Buffer, Identity, Reason
from octavo.runtime.disk_slots import DiskSlots
from octavo.runtime.disk_store import DiskStats, Placed, check_block


class DiskPool:
    """At most `capacity_bytes` of blocks of one group at `path`, the file's own overhead included.

    Raises `ConfigError` when the file is another's, is in use, or cannot be given that much room. `put` and `get` may
    be called from any thread and take turns; `has` waits for no disk.
    """

    def __init__(
        self,
        path: Path,
        identity: Identity,
        block_bytes: int,
        capacity_bytes: int,
        syscalls: Syscalls | None = None,
    ) -> None:
        self.file = DiskSlots(path, identity, block_bytes, capacity_bytes, syscalls)
        self.block_bytes = block_bytes
        self.slots = self.file.slots
        self._turn = threading.Lock()  # from choosing slots to having written or read them
        self._index = threading.Lock()  # never held over a system call
        self._kept: OrderedDict[bytes, int] = OrderedDict(self.file.stored())
        used = set(self._kept.values())
        self._free = [slot for slot in reversed(range(self.slots)) if slot not in used]
        self._evictions = 0

    def has(self, key: bytes) -> bool:
        """Whether the key is thought to be here; only `get` proves it."""
        with self._index:
            return key in self._kept

    def keys(self) -> tuple[bytes, ...]:
        """Oldest use first."""
        with self._index:
            return tuple(self._kept)

    def put(self, key: bytes, payload: Buffer) -> Reason | None:
        """Keep a block, evicting the one of oldest use if need be; else say why it is not kept."""
        return self.put_all([key], [payload])[0]

    def get(self, key: bytes, into: Buffer) -> Reason | None:
        """Fill `into` with the block; else say why not, and `into` holds nothing to rely on."""
        return self.get_all([key], [into])[0]

    def put_all(self, keys: Sequence[bytes], payloads: Sequence[Buffer]) -> list[Reason | None]:
        """`put` each, neighbours in one call to the system; a batch that exceeds the pool keeps its last blocks."""
        for key, payload in zip(keys, payloads, strict=True):
            check_block(Placed(0, key, payload), self.slots, self.block_bytes)
        reasons: list[Reason | None] = []
        for part in self._parts(keys):
            with self._turn:
                with self._index:
                    slots = [self._taken(key) for key in keys[part]]
                found = self.file.write(list(map(Placed, slots, keys[part], payloads[part])))
                with self._index:
                    for slot, key, reason in zip(slots, keys[part], found, strict=True):
                        if reason is None:
                            self._kept[key] = slot
                        else:
                            self._free.append(slot)
            reasons += found
        return reasons

    def get_all(self, keys: Sequence[bytes], into: Sequence[Buffer]) -> list[Reason | None]:
        """`get` each, neighbours in one call to the system."""
        with self._turn:
            with self._index:
                slots = [self._kept.get(key) for key in keys]
            blocks = [Placed(s, key, block) for s, key, block in zip(slots, keys, into, strict=True) if s is not None]
            found = iter(self.file.read(blocks))
            reasons = [self.file.missing(key) if s is None else next(found) for s, key in zip(slots, keys, strict=True)]
            with self._index:
                for key, slot, reason in zip(keys, slots, reasons, strict=True):
                    if slot is None or reason == "closed":
                        continue
                    if reason is None:
                        self._kept.move_to_end(key)
                    elif self._kept.pop(key, None) is not None:
                        self._free.append(slot)
        return reasons

    def drop(self, key: bytes) -> bool:
        """Forget a block, on disk as well if it can be written; false if it was not here."""
        with self._turn:
            with self._index:
                slot = self._kept.pop(key, None)
                if slot is not None:
                    self._free.append(slot)
            if slot is not None:
                self.file.forget([slot])
        return slot is not None

    def flush(self) -> Reason | None:
        """Ask the disk to have everything; nothing relies on it."""
        return self.file.flush()

    def stats(self) -> DiskStats:
        return replace(self.file.stats(), evictions=self._evictions)

    def close(self) -> None:
        """Give the file up; what is in it stays. Later calls of `put` and `get` say `closed`."""
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _parts(self, keys: Sequence[bytes]) -> Iterator[slice]:
        """Stretches that fit the pool and name no key twice."""
        first, seen = 0, set[bytes]()
        for index, key in enumerate(keys):
            if key in seen or index - first == self.slots:
                yield slice(first, index)
                first = index
                seen.clear()
            seen.add(key)
        yield slice(first, len(keys))

    def _taken(self, key: bytes) -> int:
        """A slot to write in: the one the key has, a free one, or that of the oldest use; nothing finds it any more."""
        if key in self._kept:
            return self._kept.pop(key)
        if self._free:
            return self._free.pop()
        self._evictions += 1
        return self._kept.popitem(last=False)[1]
