"""Blocks on disk: one preallocated file per pool, a slot of it per block, bounded, surviving restarts.

Owns which key lies in which slot, and the order in which blocks go: oldest use first (across a restart, oldest write;
a read costs no write). Does not know tables, sequences or arenas: bytes go in and come out under a key of 32 bytes.

    put:  old header zeroed -> payload written -> new header written     a crash leaves the old block, none or the new
    get:  header and payload read -> header checked -> payload's checksum compared -> served, or a miss with a reason

Nothing is flushed on purpose: what a power cut reorders or tears fails its checksum, and a lost block is only a
recompute. Invariant: bytes are served only under the key, model and layout that they were written with, and no fault
of the disk passes `put` or `get` as an exception.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from octavo.errors import ConfigError, InvariantViolation
from octavo.runtime.disk_files import (
    FIELD,
    RealSyscalls,
    Syscalls,
    open_alone,
    preallocate,
    read_into,
    reason_of,
    write_all,
)
from octavo.runtime.disk_format import (
    HEADER_BYTES,
    KEY_BYTES,
    POOL_BYTES,
    Buffer,
    Header,
    Identity,
    Reason,
    checked,
    checksum,
    encoded_pool,
    pool_record_bytes,
    record_bytes_for,
)


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Counted since the pool was opened, except `slots` and `blocks`, which are now."""

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
    """Records of an earlier run that this one may not serve."""

    @property
    def bytes_read(self) -> int:
        return self.hits * self.block_bytes

    @property
    def bytes_written(self) -> int:
        return self.writes * self.block_bytes


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
        self.path = path
        self.identity = identity
        self.block_bytes = block_bytes
        self.record_bytes = record_bytes_for(block_bytes)
        self.slots = max(0, capacity_bytes - POOL_BYTES) // self.record_bytes
        if block_bytes < 1 or self.slots < 1:
            need = POOL_BYTES + self.record_bytes
            raise ConfigError("disk_bytes", capacity_bytes, f"one block of {block_bytes} bytes takes {need}; give more")
        self._calls = syscalls or RealSyscalls()
        self._turn = threading.Lock()  # one read or write of the file at a time
        self._index = threading.Lock()  # never held over a system call
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._aside: dict[bytes, Reason] = {}
        self._aside_slots: dict[int, bytes] = {}
        self._free: list[int] = []
        self._age = 0
        self._hits = self._writes = self._evictions = 0
        self._misses: Counter[Reason] = Counter()
        self._refusals: Counter[Reason] = Counter()
        self._left: Counter[Reason] = Counter()
        self._descriptor = open_alone(path)
        try:
            self._restore()
        except BaseException:
            self.close()
            raise
        self._found = len(self._kept)

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
        data = self._measured(key, payload)
        with self._turn:
            reason = "closed" if self._descriptor < 0 else self._write(key, data)
        with self._index:
            if reason is None:
                self._writes += 1
            else:
                self._refusals[reason] += 1
        return reason

    def get(self, key: bytes, into: Buffer) -> Reason | None:
        """Fill `into` with the block; else say why not, and `into` holds nothing to rely on."""
        data = self._measured(key, into)
        with self._turn:
            reason = "closed" if self._descriptor < 0 else self._read(key, data)
        with self._index:
            if reason is None:
                self._hits += 1
            else:
                self._misses[reason] += 1
        return reason

    def drop(self, key: bytes) -> bool:
        """Forget a block, on disk as well if it can be written; false if it was not here."""
        with self._turn:
            with self._index:
                slot = self._kept.pop(key, None)
                if slot is not None:
                    self._free.append(slot)
            if slot is not None and self._descriptor >= 0:
                self._unpublish(slot)
        return slot is not None

    def flush(self) -> Reason | None:
        """Ask the disk to have everything; nothing relies on it."""
        with self._turn:
            if self._descriptor < 0:
                return "closed"
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                return reason_of(error)
        return None

    def stats(self) -> DiskStats:
        with self._index:
            return DiskStats(
                slots=self.slots,
                blocks=len(self._kept),
                block_bytes=self.block_bytes,
                file_bytes=POOL_BYTES + self.slots * self.record_bytes,
                hits=self._hits,
                writes=self._writes,
                evictions=self._evictions,
                misses=MappingProxyType(dict(self._misses)),
                refusals=MappingProxyType(dict(self._refusals)),
                found=self._found,
                left_aside=MappingProxyType(dict(self._left)),
            )

    def close(self) -> None:
        """Give the file up; what is in it stays. Later calls of `put` and `get` say `closed`."""
        with self._turn:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the file

    def _measured(self, key: bytes, buffer: Buffer) -> memoryview:
        data = memoryview(buffer).cast("B")
        if len(key) != KEY_BYTES or len(data) != self.block_bytes:
            raise InvariantViolation(
                "disk-block",
                f"key of {len(key)} bytes and block of {len(data)}, where {KEY_BYTES} and {self.block_bytes} belong",
            )
        return data

    def _offset(self, slot: int) -> int:
        return POOL_BYTES + slot * self.record_bytes

    def _write(self, key: bytes, data: memoryview) -> Reason | None:
        slot = self._taken(key)
        reason = self._unpublish(slot)
        if reason is None:
            reason = write_all(self._calls, self._descriptor, data, self._offset(slot) + HEADER_BYTES)
        if reason is None:
            self._age += 1
            header = Header(key, self.identity, len(data), self._age, checksum(data))
            reason = write_all(self._calls, self._descriptor, memoryview(header.encoded()), self._offset(slot))
        with self._index:
            if reason is None:
                self._kept[key] = slot
            else:
                self._free.append(slot)
        return reason

    def _taken(self, key: bytes) -> int:
        """A slot to write in: the one the key has, a free one, or that of the oldest use; nothing finds it any more."""
        with self._index:
            self._aside.pop(key, None)
            if key in self._kept:
                return self._kept.pop(key)
            if self._free:
                slot = self._free.pop()
            else:
                slot = self._kept.popitem(last=False)[1]
                self._evictions += 1
            if slot in self._aside_slots:
                self._aside.pop(self._aside_slots.pop(slot), None)
            return slot

    def _unpublish(self, slot: int) -> Reason | None:
        return write_all(self._calls, self._descriptor, memoryview(bytes(HEADER_BYTES)), self._offset(slot))

    def _read(self, key: bytes, into: memoryview) -> Reason | None:
        with self._index:
            slot = self._kept.get(key)
            if slot is None:
                return self._aside.get(key, "absent")
        head = bytearray(HEADER_BYTES)
        reason = read_into(self._calls, self._descriptor, (memoryview(head), into), self._offset(slot))
        if reason is None:
            reason = self._disproved(key, head, into)
        with self._index:
            if reason is None:
                self._kept.move_to_end(key)
            else:
                del self._kept[key]
                self._free.append(slot)
        return reason

    def _disproved(self, key: bytes, head: bytearray, payload: memoryview) -> Reason | None:
        header = checked(head)
        if not isinstance(header, Header):
            return "bad_header" if header == "absent" else header  # it was here: zeros are damage
        reason = header.mismatch(self.identity, self.block_bytes)
        if reason is None and header.key != key:
            return "wrong_key"
        if reason is None and checksum(payload) != header.payload_checksum:
            return "bad_checksum"
        return reason

    # ---- what an earlier run left

    def _restore(self) -> None:
        size = os.fstat(self._descriptor).st_size
        raw = bytearray(min(size, POOL_BYTES))
        if read_into(self._calls, self._descriptor, (memoryview(raw),), 0):
            raise ConfigError(FIELD, str(self.path), "cannot be read; mend the disk or name another file")
        found = pool_record_bytes(bytes(raw))
        if found is None:
            raise ConfigError(FIELD, str(self.path), "is not a pool of octavo's and is left alone; name another file")
        whole = POOL_BYTES + self.slots * self.record_bytes
        if isinstance(found, int):
            self._scan(found, size)
        elif found != "absent":
            self._left[found] += 1
        if found != self.record_bytes:
            self._format()
        preallocate(self._descriptor, whole, self.path)
        used = set(self._kept.values())
        self._free.extend(slot for slot in reversed(range(self.slots)) if slot not in used)

    def _format(self) -> None:
        try:
            os.ftruncate(self._descriptor, 0)
        except OSError as error:
            raise ConfigError(FIELD, str(self.path), f"cannot be emptied: {error.strerror}") from None
        reason = write_all(self._calls, self._descriptor, memoryview(encoded_pool(self.record_bytes)), 0)
        if reason is not None:
            raise ConfigError(FIELD, str(self.path), f"cannot be written: {reason}; make room or name another file")

    def _scan(self, record_bytes: int, size: int) -> None:
        """Index the records that may be served, and remember of the others why not."""
        ages: dict[bytes, tuple[int, int]] = {}
        for slot in range(max(0, size - POOL_BYTES + record_bytes - 1) // record_bytes):
            start = POOL_BYTES + slot * record_bytes
            raw = bytearray(min(HEADER_BYTES, size - start))
            header = read_into(self._calls, self._descriptor, (memoryview(raw),), start) or checked(raw)
            if not isinstance(header, Header):
                if header != "absent":
                    self._left[header] += 1
                continue
            self._age = max(self._age, header.age)
            reason = header.mismatch(self.identity, self.block_bytes)
            if reason is None and start + HEADER_BYTES + header.payload_bytes > size:
                reason = "truncated"
            if reason is None and slot >= self.slots:
                reason = "no_room"
            if reason is not None:
                self._left[reason] += 1
                self._aside[header.key] = reason
                if record_bytes == self.record_bytes:
                    self._aside_slots[slot] = header.key
            elif header.age > ages.get(header.key, (-1, 0))[0]:
                ages[header.key] = (header.age, slot)
        self._kept.update((key, slot) for key, (_, slot) in sorted(ages.items(), key=lambda item: item[1]))
        for key in self._kept:
            self._aside.pop(key, None)
