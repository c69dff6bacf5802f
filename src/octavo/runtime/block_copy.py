"""Copies of whole blocks between two arenas of one layout, as few and as long as the slots allow.

Owns addressing, its bounds and the device's stream; knows no threads, budgets or deadlines. On CPU a list of blocks is
one call of the extension, without the interpreter's lock. Where it was not built, blocks that are neighbours on one
side are one call of numpy's, and on a CUDA device neighbours on both sides are one copy.
Invariant: when `copy` returns, the bytes have arrived, on a CUDA device as well, and only in the slots named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import ConfigError, InvariantViolation
from octavo.memory.layout import Layout
from octavo.runtime.arena import Arena
from octavo.runtime.disk_batch import Batch, Int64, are_below, extension, numbers


def runs(layout: Layout, group: int, sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """(source byte, target byte, bytes) of each copy; runs never span a slab's padding."""
    size = layout.groups[group].block_bytes
    found: list[tuple[int, int, int]] = []
    for source, target in zip(sources, targets, strict=True):
        start, end = layout.address(group, source), layout.address(group, target)
        if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == (start, end):
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + size)
        else:
            found.append((start, end, size))
    return found


SlotList = Sequence[int] | Int64
Rows = npt.NDArray[np.uint8]
"""[slots, bytes of a block]"""
_FEW = 4
"""Blocks in one call that are worth looking for them."""


def copy_rows(written: Rows, read: Rows, sources: Sequence[int], targets: Sequence[int]) -> None:
    """`written[targets[i]] = read[sources[i]]`, each target once; in a call for each run of neighbours on one side, and
    block by block where too few are neighbours on either."""
    gathered = _Neighbours(np.array(targets), np.array(sources))
    if len(gathered) <= len(targets) // _FEW:
        for first, rows in gathered.runs():
            into = written[first : first + len(rows)]
            if rows[-1] - rows[0] == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all()):
                into[:] = read[rows[0] : rows[-1] + 1]
            else:
                np.take(read, rows, axis=0, out=into, mode="clip")  # any other mode copies twice
        return
    scattered = _Neighbours(gathered.others, gathered.slots)
    if len(scattered) <= len(targets) // _FEW:
        for first, rows in scattered.runs():
            written[rows] = read[first : first + len(rows)]
        return
    for source, target in zip(sources, targets, strict=True):
        written[target] = read[source]


class _Neighbours:
    """Slots of one side in ascending order, with those they go with; apart wherever a slot is left out."""

    def __init__(self, slots: npt.NDArray[np.int64], others: npt.NDArray[np.int64]) -> None:
        order = np.argsort(slots)
        self.slots, self.others = slots[order], others[order]
        self._cuts = np.flatnonzero(self.slots[1:] - self.slots[:-1] != 1) + 1

    def __len__(self) -> int:
        """Runs."""
        return len(self._cuts) + 1

    def runs(self) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """The first slot of each, and what its slots go with."""
        edges = [0, *self._cuts.tolist(), len(self.slots)]
        for begin, end in pairwise(edges):
            yield int(self.slots[begin]), self.others[begin:end]


class BlockCopier:
    """Between `device` and `host`; on CUDA over a stream of its own, with the host arena's memory pinned."""

    def __init__(self, device: Arena, host: Arena) -> None:
        if device.layout.signature != host.layout.signature or device.layout.slab_bytes != host.layout.slab_bytes:
            raise ConfigError("host_bytes", "an arena", "is laid out otherwise than the device's; use one layout")
        self.device, self.host = device, host
        self._host_bytes = host.bytes.numpy()  # kept: after a batch of megabytes no call of torch's is a cheap one
        self.native = extension() if device.device.type == "cpu" else None
        self.stream: Any = None
        if device.device.type == "cuda":
            code = int(torch.cuda.cudart().cudaHostRegister(host.bytes.data_ptr(), host.bytes.numel(), 0))
            if code:
                raise ConfigError(
                    "host_bytes", host.bytes.numel(), f"cannot be pinned (CUDA error {code}); ask for less"
                )
            self.stream = torch.cuda.Stream(device.device)

    def mark(self) -> Any:
        """Taken by the engine's thread: the copy is ordered after what its stream has been given until now."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device.device))
        return event

    def copy(self, down: bool, group: int, sources: SlotList, targets: SlotList, after: Any = None) -> None:
        """Device to host if `down`, else host to device."""
        source, target = (self.device, self.host) if down else (self.host, self.device)
        read, written = _within(source, group, sources), _within(target, group, targets)
        if self.native is not None:
            size = self.device.layout.groups[group].block_bytes
            self.native.copy_blocks(_side(target, group), _side(source, group), size, read, written)
        elif self.stream is None:
            self._by_numpy(target, source, group, read, written)
        else:
            self._by_stream(target, source, runs(self.device.layout, group, read.tolist(), written.tolist()), after)

    def _by_numpy(self, target: Arena, source: Arena, group: int, read: Int64, written: Int64) -> None:
        here, there = target.bytes.numpy(), source.bytes.numpy()  # cheaper to slice than tensors are
        if len(read) >= _FEW and self._fills(group):
            size = self.device.layout.groups[group].block_bytes
            copy_rows(here.reshape(-1, size), there.reshape(-1, size), read.tolist(), written.tolist())
            return
        for start, end, size in runs(self.device.layout, group, read.tolist(), written.tolist()):
            here[end : end + size] = there[start : start + size]

    def _by_stream(self, target: Arena, source: Arena, spans: list[tuple[int, int, int]], after: Any) -> None:
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            for start, end, size in spans:
                target.bytes[end : end + size].copy_(source.bytes[start : start + size], non_blocking=True)
        self.stream.synchronize()

    def _fills(self, group: int) -> bool:
        """Whether the group's blocks fill their slabs, so that slots are rows of the arena."""
        layout = self.device.layout
        return bool(layout.groups[group].blocks_per_slab * layout.groups[group].block_bytes == layout.slab_bytes)

    def host_blocks(self, group: int, slots: SlotList, on_disk: SlotList, keys: Sequence[bytes]) -> Batch:
        """Blocks of the host arena, in place, for a store that keeps them under these keys in slots of its own."""
        layout = self.host.layout.groups[group]
        starts = _within(self.host, group, slots)
        if layout.blocks_per_slab == 1:
            starts = starts * self.host.layout.slab_bytes
        else:
            slabs, places = np.divmod(starts, layout.blocks_per_slab)
            starts = slabs * self.host.layout.slab_bytes + places * layout.block_bytes
        return Batch(on_disk, keys, self._host_bytes, starts, layout.block_bytes)

    def close(self) -> None:
        if self.stream is not None:
            torch.cuda.cudart().cudaHostUnregister(self.host.bytes.data_ptr())
            self.stream = None


def _within(arena: Arena, group: int, slots: SlotList) -> Int64:
    """The slots, all of which the arena has."""
    asked = numbers(slots)
    most = arena.n_slabs * arena.layout.groups[group].blocks_per_slab
    if not are_below(asked, most):
        raise InvariantViolation("block-copy", f"a slot of {slots} is outside 0..{most - 1}")
    return asked


def _side(arena: Arena, group: int) -> list[int]:
    """For the extension: address, slots of a slab, bytes of a slab."""
    return [arena.bytes.data_ptr(), arena.layout.groups[group].blocks_per_slab, arena.layout.slab_bytes]
