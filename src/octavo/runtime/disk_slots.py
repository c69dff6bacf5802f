"""Blocks in the slots of one preallocated file: written, proven when read, found again after a restart.

Owns the file and what lies in it; who chooses the slots, and what goes for want of room, is the caller's. A run of
neighbouring slots is one call to the system, into or out of the caller's own memory. A batch is one call of the
extension; what it could not do, or all where there is none, is done here run by run, and gets its reasons.

    write: old headers zeroed -> blocks written -> new headers written    a crash leaves the old block, none or the new
    read:  headers and blocks read -> header checked -> block's checksum compared -> served, or a miss with a reason

Nothing is flushed on purpose: what a power cut reorders or tears fails its checksum, and a lost block is only a
recompute. Invariant: bytes are served only under the key, model and layout that they were written with, and no fault
of the disk passes `write` or `read` as an exception.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from octavo.errors import ConfigError
from octavo.runtime.disk_batch import Batch, Chosen, Int64, Placed, ascend, batch_of
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
    POOL_BYTES,
    SEGMENT_SLOTS,
    Header,
    Identity,
    Places,
    Reason,
    block_checksum,
    checked,
    disproved,
    encoded_pool,
    heading,
    pool_stride,
)
from octavo.runtime.disk_store import THREADS, Blocks, DiskStats, Helped, Known, slots_of

RUN_BYTES = 1 << 20
"""At most, of a run of more than one block: what has been read is still in the processor's cache when it is hashed."""


NONE: Int64 = np.empty(0, np.int64)
"""No block of a batch."""


class DiskSlots:
    """Slots `0 .. slots - 1` for blocks of one group, at most `capacity_bytes` with the file's own overhead.

    Raises `ConfigError` when the file is another's, is in use, or cannot be given that much room. May be called from
    any thread (a `DiskStore`); reads and writes take turns.
    """

    def __init__(
        self,
        path: Path,
        identity: Identity,
        block_bytes: int,
        capacity_bytes: int,
        syscalls: Syscalls | None = None,
        *,
        threads: int = THREADS,
    ) -> None:
        self.path = path
        self.identity = identity
        self.block_bytes = block_bytes
        self.places = Places.of(max(1, block_bytes))
        need = self.places.file_bytes(1)
        self.slots = slots_of(capacity_bytes, self.places.slots_in(capacity_bytes), block_bytes, need)
        self._calls = syscalls or RealSyscalls()
        self._heading = heading(identity, block_bytes)
        self._turn = threading.Lock()  # one read or write of the file at a time
        self._known = Known(self.slots)
        self._aside_slots: dict[int, bytes] = {}
        self._age = 0
        self._helped = Helped("octavo-disk-help", threads)
        self._padding = memoryview(bytearray(self.places.stride - block_bytes))
        self._descriptor = open_alone(path)
        try:
            self._restore()
        except BaseException:
            self.close()
            raise

    def stored(self) -> list[tuple[bytes, int]]:
        """Key and slot of what is thought to be here, oldest write first."""
        return self._known.stored()

    def write(self, blocks: Blocks) -> list[Reason | None]:
        batch = batch_of(blocks, self.slots, self.block_bytes)
        reasons: list[Reason | None] = [None] * len(batch)
        with self._turn:
            self._known.empty(batch.slots)
            if self._known.aside:
                for slot, key in zip(batch.slots.tolist(), batch.keys, strict=True):
                    self._known.aside.pop(key, None)
                    self._known.aside.pop(self._aside_slots.pop(slot, b""), b"")
            order = batch.in_order()
            for run in self._runs(batch, self._write_all(batch, order)):
                self._act(self._write_run, batch, run, reasons)
            self._known.written(batch, reasons)
        return reasons

    def read(self, blocks: Blocks) -> list[Reason | None]:
        batch = batch_of(blocks, self.slots, self.block_bytes, writable=True)
        with self._turn:
            reasons: list[Reason | None] = ["closed"] * len(batch)
            if self._descriptor >= 0:
                reasons = self._known.lies_in(batch)
            order = batch.in_order()
            if reasons.count(None) < len(batch):
                here = np.array([reason is None for reason in reasons])
                order = np.arange(len(batch))[order]
                order = order[here[order]]
            runs = self._runs(batch, self._read_all(batch, order))
            self._helped.each(lambda run: self._act(self._read_run, batch, run, reasons), runs)
            self._known.read(batch, reasons)
        return reasons

    def forget(self, slots: Sequence[int]) -> None:
        """Waits for the turn under way."""
        with self._turn:
            self._known.remove(slots)
            for slot in slots:
                if self._descriptor >= 0:
                    self._unpublish(slot, 1)

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
        return self._known.stats(self.slots, self.block_bytes, self.places.file_bytes(self.slots))

    def close(self) -> None:
        """Give the file up; what is in it stays. Later reads and writes say `closed`."""
        with self._turn:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1
        self._helped.close()

    # ---- whole batches; what these return is left to do

    def _write_all(self, batch: Batch, order: Chosen) -> Chosen:
        slots = batch.slots[order]
        native = self._calls.whole_batches(self.block_bytes)
        if native is None or self._descriptor < 0 or not ascend(slots):
            return order  # of a slot that comes twice the later one would come first, if only it were left
        age = self._age + 1
        self._age += len(slots)
        return self._together(native.write_slots, batch, order, age)

    def _read_all(self, batch: Batch, order: Chosen) -> Chosen:
        native = self._calls.whole_batches(self.block_bytes)
        if native is None or not len(batch.slots[order]):
            return order
        return self._together(partial(native.read_slots, self._helped.crew(native)), batch, order)

    def _together(self, act: Callable[..., None], batch: Batch, order: Chosen, *more: int) -> Chosen:
        file = [self._descriptor, POOL_BYTES, SEGMENT_SLOTS, self.places.stride]
        slots = batch.slots[order]
        states = np.ones(len(slots), np.uint8)
        act(file, slots, *batch.arguments(order, self._heading, states), *more)
        if not np.count_nonzero(states):
            return NONE
        left: Int64 = np.arange(len(batch))[order][states != 0]
        return left

    # ---- runs of neighbouring slots

    def _act(
        self,
        on_run: Callable[[list[Placed]], list[Reason | None]],
        batch: Batch,
        run: Sequence[int],
        reasons: list[Reason | None],
    ) -> None:
        """Note what becomes of each block. A run that fails is tried block by block: one bad sector is one miss."""
        found: list[Reason | None] = ["closed"] * len(run)
        if self._descriptor >= 0:
            found = on_run([batch[index] for index in run])
            if len(run) > 1 and None not in found:
                found = [on_run([batch[index]])[0] for index in run]
        for index, reason in zip(run, found, strict=True):
            reasons[index] = reason

    def _runs(self, batch: Batch, order: Chosen) -> list[list[int]]:
        """The indices, grouped where their slots are neighbours in one segment."""
        most = max(1, RUN_BYTES // self.places.stride)
        runs: list[list[int]] = []
        before = -1
        indices = np.arange(len(batch))[order] if order is not NONE else NONE
        for index, slot in zip(indices.tolist(), batch.slots[indices].tolist(), strict=True):
            if runs and len(runs[-1]) < most and slot == before + 1 and slot % SEGMENT_SLOTS:
                runs[-1].append(index)
            else:
                runs.append([index])
            before = slot
        return runs

    def _as_in_the_file(self, blocks: list[memoryview]) -> list[memoryview]:
        """Block, padding, block, ... block: two for each slot of a segment at most, which one call may take."""
        if not len(self._padding):
            return blocks
        return [piece for block in blocks for piece in (block, self._padding)][:-1]

    def _write_run(self, run: Sequence[Placed]) -> list[Reason | None]:
        first, blocks = run[0].slot, [memoryview(placed.block).cast("B") for placed in run]
        pieces = self._as_in_the_file(blocks)
        reason = self._unpublish(first, len(run))
        reason = reason or write_all(self._calls, self._descriptor, pieces, self.places.block(first))
        if reason is None:
            headers = bytearray()
            for placed, block in zip(run, blocks, strict=True):
                self._age += 1
                header = Header(placed.key, self.identity, self.block_bytes, self._age, block_checksum(block))
                headers += header.encoded()
            reason = write_all(self._calls, self._descriptor, [memoryview(headers)], self.places.header(first))
        return [reason] * len(run)

    def _unpublish(self, slot: int, count: int) -> Reason | None:
        zeros = memoryview(bytes(count * HEADER_BYTES))
        return write_all(self._calls, self._descriptor, [zeros], self.places.header(slot))

    def _read_run(self, run: Sequence[Placed]) -> list[Reason | None]:
        first, blocks = run[0].slot, [memoryview(placed.block).cast("B") for placed in run]
        heads = memoryview(bytearray(len(run) * HEADER_BYTES))
        reason = read_into(self._calls, self._descriptor, [heads], self.places.header(first))
        pieces = self._as_in_the_file(blocks)
        reason = reason or read_into(self._calls, self._descriptor, pieces, self.places.block(first))
        if reason is not None:
            return [reason] * len(run)
        return [
            disproved(heads[at * HEADER_BYTES : (at + 1) * HEADER_BYTES], key, self.identity, blocks[at])
            for at, (_, key, _) in enumerate(run)
        ]

    # ---- what an earlier run left

    def _restore(self) -> None:
        size = os.fstat(self._descriptor).st_size
        raw = bytearray(min(size, POOL_BYTES))
        if read_into(self._calls, self._descriptor, [memoryview(raw)], 0):
            raise ConfigError(FIELD, str(self.path), "cannot be read; mend the disk or name another file")
        found = pool_stride(bytes(raw))
        if found is None:
            raise ConfigError(FIELD, str(self.path), "is not a pool of octavo's and is left alone; name another file")
        if isinstance(found, int):
            self._scan(Places(found), size)
        elif found != "absent":
            self._known.left[found] += 1
        if found != self.places.stride:
            self._format()
        preallocate(self._descriptor, self.places.file_bytes(self.slots), self.path)
        beyond = -self.slots % SEGMENT_SLOTS
        if beyond:  # a pool that shrinks and grows again finds nothing there; if this fails, checksums tell
            self._unpublish(self.slots, beyond)

    def _format(self) -> None:
        try:
            os.ftruncate(self._descriptor, 0)
        except OSError as error:
            raise ConfigError(FIELD, str(self.path), f"cannot be emptied: {error.strerror}") from None
        reason = write_all(self._calls, self._descriptor, [memoryview(encoded_pool(self.places.stride))], 0)
        if reason is not None:
            raise ConfigError(FIELD, str(self.path), f"cannot be written: {reason}; make room or name another file")

    def _scan(self, places: Places, size: int) -> None:
        """Index the blocks that may be served, and remember of the others why not."""
        newest: dict[bytes, tuple[int, int]] = {}
        for slot, header in self._headers(places, size):
            if not isinstance(header, Header):
                if header != "absent":
                    self._known.left[header] += 1
                continue
            self._age = max(self._age, header.age)
            reason = header.mismatch(self.identity, self.block_bytes)
            if reason is None and places.block(slot) + header.payload_bytes > size:
                reason = "truncated"
            if reason is None and slot >= self.slots:
                reason = "no_room"
            if reason is not None:
                self._known.left[reason] += 1
                self._known.aside[header.key] = reason
                if places == self.places:
                    self._aside_slots[slot] = header.key
            elif header.age > newest.get(header.key, (-1, 0))[0]:
                newest[header.key] = (header.age, slot)
        self._known.restore({slot: key for key, (_, slot) in sorted(newest.items(), key=lambda item: item[1])})
        for key in newest:
            self._known.aside.pop(key, None)

    def _headers(self, places: Places, size: int) -> Iterator[tuple[int, Header | Reason]]:
        for first in count(0, SEGMENT_SLOTS):
            start = places.header(first)
            if start >= size:
                return
            raw = memoryview(bytearray(min(SEGMENT_SLOTS * HEADER_BYTES, size - start)))
            whole = read_into(self._calls, self._descriptor, [raw], start) is None
            for at in range(0, len(raw), HEADER_BYTES):
                head = raw[at : at + HEADER_BYTES]
                reason = None if whole else read_into(self._calls, self._descriptor, [head], start + at)
                yield first + at // HEADER_BYTES, reason or checked(head)
