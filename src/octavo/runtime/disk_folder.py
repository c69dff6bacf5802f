"""Blocks as files in a directory that several processes share: each finds what any of them has written.

Owns which file a slot of this process stands for; the directory's room is `SharedRoom`'s. A file is called by model,
layout and key, and its bytes are those of a slot file: header, block. It appears under its name whole or not at all,
and the oldest use goes first, whoever's it was, so that a block which its slot still names may be gone: a miss.

Invariant: bytes are served only under the key, model and layout that they were written with, and no fault of the disk
or of another process passes `write` or `read` as an exception.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from octavo.errors import ConfigError
from octavo.runtime.disk_files import RealSyscalls, Syscalls, read_into, reason_of, write_all
from octavo.runtime.disk_format import HEADER_BYTES, Header, Identity, Reason, block_checksum, disproved
from octavo.runtime.disk_room import SharedRoom
from octavo.runtime.disk_store import Counts, DiskStats, Helped, Placed, check_block

NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{64})")
"""Model, layout, key."""
TOUCH_SECONDS = 60.0
"""A use is noted at most so often: it is a write."""
AT_ONCE = 16
"""Files being written at a time, by one process."""


class DiskFolder:
    """Room for `slots` blocks of one group, as a `DiskStore`; processes that share the folder share its capacity.

    Raises `ConfigError` when the folder cannot be used, or `capacity_bytes` is less than one block takes.
    """

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        block_bytes: int,
        capacity_bytes: int,
        syscalls: Syscalls | None = None,
    ) -> None:
        self.folder = folder
        self.identity = identity
        self.block_bytes = block_bytes
        self.slots = capacity_bytes // (HEADER_BYTES + block_bytes)
        if block_bytes < 1 or self.slots < 1:
            need = HEADER_BYTES + max(1, block_bytes)
            raise ConfigError("disk_bytes", capacity_bytes, f"one block of {block_bytes} bytes takes {need}; give more")
        self._calls = syscalls or RealSyscalls()
        self._turn = threading.Lock()  # one batch of reads or writes at a time
        self._index = threading.Lock()  # never held over a system call
        self._keys: dict[int, bytes] = {}
        self._seen: set[bytes] = set()
        self._aside: dict[bytes, Reason] = {}
        self._left: Counter[Reason] = Counter()
        self._counts = Counts()
        self._helped = Helped("octavo-disk-read")
        self._closed = False
        self._room = SharedRoom(folder, NAME, capacity_bytes)
        self._restore()
        self._found = len(self._keys)

    def stored(self) -> list[tuple[bytes, int]]:
        """Key and slot of what this process knows to be here, oldest use first when it was opened."""
        with self._index:
            return [(key, slot) for slot, key in self._keys.items()]

    def appeared(self) -> list[bytes]:
        """Keys that have come to be here since the last call and that no slot of this process stands for, oldest use
        first. Looks through the directory."""
        with self._turn:
            if self._closed:
                return []
            here = [key for key in map(self._key_of, self._names()) if key is not None]
            with self._index:
                known = self._seen.union(self._keys.values())
                self._seen = set(here)
        return [key for key in here if key not in known]

    def write(self, blocks: Sequence[Placed]) -> list[Reason | None]:
        """As `DiskStore.write`; a block that is there under its key already is not written again."""
        for placed in blocks:
            check_block(placed, self.slots, self.block_bytes)
        reasons: list[Reason | None] = []
        with self._turn:
            at_once = min(AT_ONCE, self.slots)
            for first in range(0, len(blocks), at_once):
                reasons += self._write(blocks[first : first + at_once])
            with self._index:
                for (slot, key, _), reason in zip(blocks, reasons, strict=True):
                    self._keys.pop(slot, None)
                    if reason is None:
                        self._keys[slot] = key
                        self._aside.pop(key, None)
        self._counts.written(reasons)
        return reasons

    def read(self, blocks: Sequence[Placed]) -> list[Reason | None]:
        """As `DiskStore.read`; the slot need not be the one under which the key was stored."""
        for placed in blocks:
            check_block(placed, self.slots, self.block_bytes)
        reasons: list[Reason | None] = [None] * len(blocks)
        with self._turn:

            def act(index: int) -> None:
                reasons[index] = "closed" if self._closed else self._read(blocks[index])

            self._helped.each(act, range(len(blocks)))
            with self._index:
                for (slot, key, _), reason in zip(blocks, reasons, strict=True):
                    if reason is None:
                        self._keys[slot] = key
                    elif reason != "closed" and self._keys.get(slot) == key:
                        del self._keys[slot]
        self._counts.read(reasons)
        return reasons

    def forget(self, slots: Sequence[int]) -> None:
        """Their blocks are gone for the other processes as well."""
        with self._turn:
            with self._index:
                keys = [self._keys.pop(slot) for slot in slots if slot in self._keys]
            if not self._closed:
                for key in keys:
                    self._room.remove(self._name(key))

    def stats(self) -> DiskStats:
        with self._index:
            blocks, left = len(self._keys), dict(self._left)
        return DiskStats(
            slots=self.slots,
            blocks=blocks,
            block_bytes=self.block_bytes,
            file_bytes=self._room.capacity_bytes,
            hits=self._counts.hits,
            writes=self._counts.writes,
            evictions=self._room.evictions,
            misses=self._counts.misses,
            refusals=self._counts.refusals,
            found=self._found,
            left_aside=MappingProxyType(left),
        )

    def close(self) -> None:
        with self._turn:
            if not self._closed:
                self._room.close()
            self._closed = True
        self._helped.close()

    # ---- files

    def _name(self, key: bytes) -> str:
        return f"{self.identity.fingerprint.hex()[:16]}-{self.identity.layout.hex()[:16]}-{key.hex()}"

    def _key_of(self, name: str) -> bytes | None:
        key = bytes.fromhex(name[-64:])
        return key if self._name(key) == name else None

    def _names(self) -> list[str]:
        with suppress(OSError):
            return [file.name for file in self._room.files()]
        return []

    def _write(self, blocks: Sequence[Placed]) -> list[Reason | None]:
        if self._closed:
            return ["closed"] * len(blocks)
        lacking = {placed.key: placed for placed in blocks if not self._touch(placed.key)}
        reasons: dict[bytes, Reason | None] = {}
        made = self._room.make(len(lacking), HEADER_BYTES + self.block_bytes) if lacking else []
        if isinstance(made, str):
            reasons = dict.fromkeys(lacking, made)
        else:
            for (key, placed), (part, descriptor) in zip(lacking.items(), made, strict=True):
                reasons[key] = self._fill(placed, part, descriptor)
        return [reasons.get(placed.key) for placed in blocks]

    def _fill(self, placed: Placed, part: str, descriptor: int) -> Reason | None:
        block = memoryview(placed.block).cast("B")
        header = Header(placed.key, self.identity, len(block), 0, block_checksum(block)).encoded()
        try:
            reason = write_all(self._calls, descriptor, [memoryview(header), block], 0)
        finally:
            os.close(descriptor)
        if reason is None:
            return self._room.publish(part, self._name(placed.key))
        self._room.remove(part)
        return reason

    def _touch(self, key: bytes) -> bool:
        """Note a use, if it is here."""
        try:
            os.utime(self._name(key), dir_fd=self._room.descriptor, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _read(self, placed: Placed) -> Reason | None:
        name = self._name(placed.key)
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=self._room.descriptor)
        except FileNotFoundError:
            return self._aside.get(placed.key, "absent")
        except OSError as error:
            return reason_of(error)
        try:
            head, block = memoryview(bytearray(HEADER_BYTES)), memoryview(placed.block).cast("B")
            reason = read_into(self._calls, descriptor, [head, block], 0)
            reason = reason or disproved(head, placed.key, self.identity, block)
            if reason is None and time.time() - os.fstat(descriptor).st_mtime > TOUCH_SECONDS:
                self._touch(placed.key)
        finally:
            os.close(descriptor)
        if reason is not None:
            self._room.remove(name)
        return reason

    def _restore(self) -> None:
        names = self._names()
        here = [key for key in map(self._key_of, names) if key is not None]
        self._seen = set(here)
        for name in names:
            model = name[:16]
            key = bytes.fromhex(name[-64:])
            if key in self._seen and self._name(key) == name:
                continue
            same_model = model == self.identity.fingerprint.hex()[:16]
            reason: Reason = "wrong_layout" if same_model else "wrong_fingerprint"
            self._left[reason] += 1
            if key not in self._seen and (same_model or key not in self._aside):
                self._aside[key] = reason
        if len(here) > self.slots:
            self._left["no_room"] += len(here) - self.slots
        self._keys.update(enumerate(here[-self.slots :]))
