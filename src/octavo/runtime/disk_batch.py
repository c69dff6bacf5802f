"""Blocks that go to a store or come from it together, as columns: what holds for all of them is said once.

    slots      4 0 5 1        of the store
    keys       k k k k        SHA-256
    addresses  a a a a        of the memory that the blocks are written from, or read into

Owns checking that a batch fits its store, and the arguments of native/copies_module.cpp. Opens nothing. Invariant:
every address that is handed on is that of a whole block, in memory which the batch keeps alive.
"""

from __future__ import annotations

import copy
import functools
import importlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.errors import InvariantViolation
from octavo.runtime.disk_format import KEY_BYTES, Buffer

Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Chosen = Int64 | slice
"""Indices of blocks of a batch, or `EACH` as they are."""
EACH = slice(None)
VERSION = 2
"""Of the extension's calls: one of another build is left alone."""


class Placed(NamedTuple):
    """A block to write to its slot, or the memory to read it into."""

    slot: int
    key: bytes
    block: Buffer


class Batch:
    """Blocks of `block_bytes` that begin at `starts` in one piece of memory."""

    def __init__(
        self, slots: Sequence[int] | Int64, keys: Sequence[bytes], memory: Bytes, starts: Int64, block_bytes: int
    ) -> None:
        self.slots = numbers(slots)
        self.keys = keys
        self.block_bytes = block_bytes
        self._memory: list[Bytes] = [memory]
        self._starts = starts
        self._packed: bytes | None = None
        self._fits: tuple[int, int, bool] | None = None
        self.addresses = starts + memory.__array_interface__["data"][0]
        inside = are_below(starts, memory.nbytes - block_bytes + 1)
        if not inside or not len(self.slots) == len(keys) == len(starts):
            raise InvariantViolation(
                "disk-block",
                f"{len(self.slots)} slots, {len(keys)} keys and {len(starts)} blocks of {block_bytes} bytes do not go "
                f"together, or not into {memory.nbytes} bytes",
            )

    @classmethod
    def of(cls, blocks: Sequence[Placed], block_bytes: int) -> Batch:
        """Of blocks that lie anywhere in memory."""
        pieces = [np.frombuffer(memoryview(block).cast("B"), np.uint8) for _, _, block in blocks]
        wrong = [piece.nbytes for piece in pieces if piece.nbytes != block_bytes]
        if wrong:
            raise InvariantViolation("disk-block", f"blocks of {wrong} bytes, where {block_bytes} belong")
        batch = cls([], [], np.empty(0, np.uint8), np.empty(0, np.int64), block_bytes)
        batch.slots = np.array([slot for slot, _, _ in blocks], np.int64)
        batch.keys = [key for _, key, _ in blocks]
        batch._memory = pieces
        batch._starts = np.zeros(len(pieces), np.int64)
        batch.addresses = np.array([piece.ctypes.data for piece in pieces], np.int64)
        return batch

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: int) -> Placed:
        memory, start = self._memory[index if len(self._memory) > 1 else 0], int(self._starts[index])
        return Placed(int(self.slots[index]), self.keys[index], memory[start : start + self.block_bytes].data)

    def part(self, first: int, end: int) -> Batch:
        """Blocks first..end - 1 alone; what has been required of all is not looked at again."""
        some = copy.copy(self)
        some.slots, some.keys = self.slots[first:end], self.keys[first:end]
        some._starts, some.addresses = self._starts[first:end], self.addresses[first:end]
        some._packed = None if self._packed is None else self._packed[first * KEY_BYTES : end * KEY_BYTES]
        if len(self._memory) > 1:
            some._memory = self._memory[first:end]
        return some

    @property
    def packed(self) -> bytes:
        """The keys, one behind the other."""
        if self._packed is None:
            self._packed = b"".join(self.keys)
        return self._packed

    @property
    def writable(self) -> bool:
        return all(memory.flags.writeable for memory in self._memory)

    def require(self, slots: int, block_bytes: int, *, writable: bool = False) -> None:
        """Raises `InvariantViolation` for what no store of such slots and blocks can be asked for."""
        if self._fits == (slots, block_bytes, writable):
            return
        lengths = set(map(len, self.keys)) - {KEY_BYTES} if not are_keys(self.keys) else set()
        if (
            not are_below(self.slots, slots)
            or lengths
            or self.block_bytes != block_bytes
            or (writable and not self.writable)
        ):
            raise InvariantViolation(
                "disk-block",
                f"slots {self.slots.tolist()}, keys of {sorted(lengths) or KEY_BYTES} bytes and blocks of "
                f"{self.block_bytes}, where 0..{slots - 1}, {KEY_BYTES} and {block_bytes} belong, writable to be read",
            )
        self._fits = (slots, block_bytes, writable)

    def in_order(self) -> Chosen:
        """All blocks by slot, those of one slot as they were."""
        return EACH if ascend(self.slots) else np.argsort(self.slots, kind="stable")

    def arguments(self, indices: Chosen, heading: bytes, states: Bytes) -> tuple[Any, ...]:
        """Of the extension, for these blocks: addresses, bytes of a block, keys, heading, and states to fill."""
        packed = self.packed
        if isinstance(indices, np.ndarray):
            packed = np.frombuffer(packed, np.uint8).reshape(-1, KEY_BYTES)[indices].tobytes()
        return self.addresses[indices], self.block_bytes, packed, heading, states


def numbers(slots: Sequence[int] | Int64) -> Int64:
    """As an array, of a list in a tenth of what numpy takes for it."""
    if isinstance(slots, np.ndarray):
        return slots
    return np.frombuffer(struct.pack(f"{len(slots)}q", *slots), np.int64)


def are_below(slots: Int64, most: int) -> bool:
    """And none is negative: seen without their sign those are the largest."""
    return not len(slots) or int(np.maximum.reduce(slots.view(np.uint64))) < most


def ascend(slots: Int64) -> bool:
    """And none comes twice."""
    return np.count_nonzero(slots[1:] > slots[:-1]) == len(slots) - 1 if len(slots) else True


def are_keys(keys: Sequence[bytes]) -> bool:
    return list(map(len, keys)).count(KEY_BYTES) == len(keys)


@functools.cache
def extension() -> Any | None:
    """The native module, if it was built and copies blocks in the way that is known here. Copies need no torch."""
    try:
        native = importlib.import_module("octavo.kernels._native")
    except ImportError:
        return None
    return native if getattr(native, "copies_version", 0) == VERSION else None


def batch_of(blocks: Batch | Sequence[Placed], slots: int, block_bytes: int, *, writable: bool = False) -> Batch:
    """Checked, for a store of such slots and blocks; `writable` to be read into."""
    batch = blocks if isinstance(blocks, Batch) else Batch.of(blocks, block_bytes)
    batch.require(slots, block_bytes, writable=writable)
    return batch
