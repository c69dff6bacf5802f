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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from octavo.runtime.disk_batch import Batch, Int64, Placed, batch_of
from octavo.runtime.disk_files import RealSyscalls, Syscalls, read_into, reason_of, write_all
from octavo.runtime.disk_format import HEADER_BYTES, Header, Identity, Reason, block_checksum, disproved, heading
from octavo.runtime.disk_room import SharedRoom
from octavo.runtime.disk_store import THREADS, Blocks, DiskStats, Helped, Known, slots_of

NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{64})")
"""Model, layout, key."""
TOUCH_SECONDS = 60.0
"""A use is noted at most so often: it is a write."""
DONE, FAILED, STALE = range(3)
"""What the extension says of each block; stale: served, and last used long ago."""
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
        *,
        threads: int = THREADS,
    ) -> None:
        self.folder = folder
        self.identity = identity
        self.block_bytes = block_bytes
        need = HEADER_BYTES + max(1, block_bytes)
        self.slots = slots_of(capacity_bytes, capacity_bytes // need, block_bytes, need)
        self._calls = syscalls or RealSyscalls()
        self._heading = heading(identity, block_bytes)
        self._prefix = f"{identity.fingerprint.hex()[:16]}-{identity.layout.hex()[:16]}-"
        self._turn = threading.Lock()  # one batch of reads or writes at a time
        self._known = Known(self.slots)
        self._seen: set[bytes] = set()
        self._helped = Helped("octavo-disk-help", threads)
        self._closed = False
        self._room = SharedRoom(folder, NAME, capacity_bytes)
        self._restore()

    def stored(self) -> list[tuple[bytes, int]]:
        """Key and slot of what this process knows to be here, oldest use first when it was opened."""
        return self._known.stored()

    def appeared(self) -> list[bytes]:
        """Keys that have come to be here since the last call and that no slot of this process stands for, oldest use
        first. Looks through the directory."""
        with self._turn:
            if self._closed:
                return []
            here = [key for key in map(self._key_of, self._names()) if key is not None]
            known = self._seen | self._known.keys()
            self._seen = set(here)
        return [key for key in here if key not in known]

    def write(self, blocks: Blocks) -> list[Reason | None]:
        """As `DiskStore.write`; a block that is there under its key already is not written again."""
        batch = batch_of(blocks, self.slots, self.block_bytes)
        reasons: list[Reason | None] = []
        with self._turn:
            at_once = min(AT_ONCE, self.slots)
            for first in range(0, len(batch), at_once):
                reasons += self._write(batch, range(first, min(len(batch), first + at_once)))
            if self._known.aside:
                for key, reason in zip(batch.keys, reasons, strict=True):
                    if reason is None:
                        self._known.aside.pop(key, None)
            self._known.empty(batch.slots)
            self._known.written(batch, reasons)
        return reasons

    def read(self, blocks: Blocks) -> list[Reason | None]:
        """As `DiskStore.read`; the slot need not be the one under which the key was stored."""
        batch = batch_of(blocks, self.slots, self.block_bytes, writable=True)
        reasons: list[Reason | None] = [None] * len(batch)
        with self._turn:

            def act(index: int) -> None:
                reasons[index] = "closed" if self._closed else self._read(batch[index])

            self._helped.each(act, self._read_all(batch))
            self._known.read(batch, reasons, from_anywhere=True)
        return reasons

    def forget(self, slots: Sequence[int]) -> None:
        """Their blocks are gone for the other processes as well."""
        with self._turn:
            keys = self._known.remove(slots)
            if not self._closed:
                for key in keys:
                    self._room.remove(self._name(key))

    def stats(self) -> DiskStats:
        return self._known.stats(self.slots, self.block_bytes, self._room.capacity_bytes, self._room.evictions)

    def close(self) -> None:
        with self._turn:
            if not self._closed:
                self._room.close()
            self._closed = True
        self._helped.close()

    # ---- files

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _key_of(self, name: str) -> bytes | None:
        key = bytes.fromhex(name[-64:])
        return key if self._name(key) == name else None

    def _names(self) -> list[str]:
        with suppress(OSError):
            return [file.name for file in self._room.files()]
        return []

    # ---- whole batches

    def _read_all(self, batch: Batch) -> list[int]:
        """What is left to do."""
        everything = np.arange(len(batch))
        native = self._calls.whole_batches(self.block_bytes)
        if native is None or self._closed:
            return everything.tolist()
        fresh_since = int(time.time() - TOUCH_SECONDS)
        states = np.full(len(batch), FAILED, np.uint8)
        arguments = batch.arguments(everything, self._heading, states)
        crew = self._helped.crew(native)
        native.read_files(crew, self._room.descriptor, self._prefix, fresh_since, *arguments)
        for index in np.flatnonzero(states == STALE).tolist():
            self._touch(batch.keys[index])
        return np.flatnonzero(states == FAILED).tolist()

    def _write(self, batch: Batch, part: range) -> list[Reason | None]:
        if self._closed:
            return ["closed"] * len(part)
        lacking = {batch.keys[index]: index for index in part if not self._touch(batch.keys[index])}
        made = self._room.make(len(lacking), HEADER_BYTES + self.block_bytes) if lacking else []
        if isinstance(made, str):
            reasons: list[Reason | None] = [made] * len(lacking)
        else:
            reasons = self._fill(batch, np.array(list(lacking.values()), np.int64), made)
        found = dict(zip(lacking, reasons, strict=True))
        return [found.get(batch.keys[index]) for index in part]

    def _fill(self, batch: Batch, indices: Int64, made: list[tuple[str, int]]) -> list[Reason | None]:
        """Put each block into its file, which then has its name or is gone."""
        states = np.full(len(indices), FAILED, np.uint8)
        native = self._calls.whole_batches(self.block_bytes)
        if native is not None and made:
            descriptors = np.array([descriptor for _, descriptor in made], np.int64)
            native.write_files(descriptors, *batch.arguments(indices, self._heading, states))
        reasons: list[Reason | None] = []
        for index, state, (part, descriptor) in zip(indices.tolist(), states.tolist(), made, strict=True):
            placed = batch[index]
            reason = None if state == DONE else self._fill_one(placed, part, descriptor)
            if reason is None:
                reason = self._room.publish(part, self._name(placed.key))
            else:
                self._room.remove(part)
            reasons.append(reason)
        return reasons

    # ---- one by one

    def _fill_one(self, placed: Placed, part: str, descriptor: int) -> Reason | None:
        block = memoryview(placed.block).cast("B")
        header = Header(placed.key, self.identity, len(block), 0, block_checksum(block)).encoded()
        try:
            return write_all(self._calls, descriptor, [memoryview(header), block], 0)
        finally:
            os.close(descriptor)

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
            return self._known.aside.get(placed.key, "absent")
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
            self._known.left[reason] += 1
            if key not in self._seen and (same_model or key not in self._known.aside):
                self._known.aside[key] = reason
        if len(here) > self.slots:
            self._known.left["no_room"] += len(here) - self.slots
        self._known.restore(dict(enumerate(here[-self.slots :])))
