"""Blocks that go to a store or come from it together, as columns: what holds for all of them is said once.

    slots      4 0 5 1        of the store
    keys       k k k k        SHA-256
    addresses  a a a a        of the memory that the blocks are written from, or read into

Owns checking that a batch fits its store, and the arguments of native/copies_module.cpp. Opens nothing. Invariant:
every address that is handed on is that of a whole block, in memory which the batch keeps alive.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.errors import InvariantViolation
from octavo.runtime.disk_format import KEY_BYTES, Buffer

Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


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
        self.slots = np.array(slots, np.int64)
        self.keys = keys
        self.block_bytes = block_bytes
        self._memory: list[Bytes] = [memory]
        self._starts = starts
        self.addresses = starts + memory.__array_interface__["data"][0]
        inside = not len(starts) or (starts.min() >= 0 and starts.max() + block_bytes <= memory.nbytes)
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

    @property
    def writable(self) -> bool:
        return all(memory.flags.writeable for memory in self._memory)

    def require(self, slots: int, block_bytes: int, *, writable: bool = False) -> None:
        """Raises `InvariantViolation` for what no store of such slots and blocks can be asked for."""
        lengths = set(map(len, self.keys)) - {KEY_BYTES}
        inside = not len(self) or 0 <= self.slots.min() <= self.slots.max() < slots
        if not inside or lengths or self.block_bytes != block_bytes or (writable and not self.writable):
            raise InvariantViolation(
                "disk-block",
                f"slots {self.slots.tolist()}, keys of {sorted(lengths) or KEY_BYTES} bytes and blocks of "
                f"{self.block_bytes}, where 0..{slots - 1}, {KEY_BYTES} and {block_bytes} belong, writable to be read",
            )

    def in_order(self, indices: Int64) -> Int64:
        """The indices by slot, those of one slot as they were."""
        slots: Int64 = self.slots[indices]
        if not bool((slots[1:] > slots[:-1]).all()):
            indices = indices[np.argsort(slots, kind="stable")]
        return indices

    def arguments(self, indices: Int64, heading: bytes, states: Bytes) -> tuple[Any, ...]:
        """Of the extension, for these blocks: addresses, bytes of a block, keys, heading, and states to fill."""
        joined = b"".join(self.keys)
        if len(indices) != len(self) or bool((indices[1:] < indices[:-1]).any()):
            joined = np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)[indices].tobytes()
        return self.addresses[indices], self.block_bytes, joined, heading, states


@functools.cache
def extension() -> Any | None:
    """The native module, if it was built and copies blocks; one of an older build does not. Copies need no torch."""
    try:
        native = importlib.import_module("octavo.kernels._native")
    except ImportError:
        return None
    return native if hasattr(native, "Crew") else None


def batch_of(blocks: Batch | Sequence[Placed], slots: int, block_bytes: int, *, writable: bool = False) -> Batch:
    """Checked, for a store of such slots and blocks; `writable` to be read into."""
    batch = blocks if isinstance(blocks, Batch) else Batch.of(blocks, block_bytes)
    batch.require(slots, block_bytes, writable=writable)
    return batch
