"""Weights out of the file that they are mapped from, so that nothing done to the file later reaches them.

Transformers maps checkpoints. Reading each tensor's bytes straight into memory of its own touches no mapped
page: nothing is held twice on the way, and it takes a third of the time of copying through the mapping.
Where the system does not tell what is mapped, or another file has taken the name, tensors are copied.

Invariant: afterwards no parameter or buffer of the model lies in a mapped file.
"""

from __future__ import annotations

import mmap
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.errors import ModelError

MAPS = Path("/proc/self/maps")
LARGE_BYTES = 1 << 18
OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if sys.platform == "linux" else 0
"""Of a mapping that is memory alone. Used where `/proc` tells what is mapped."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """Addresses that show a stretch of a file."""

    start: int
    end: int
    offset: int
    """Of `start`, in the file."""
    inode: int
    """0: what is there is the process's own."""
    path: str


def leave_files(model: Any) -> None:
    """Give every parameter and buffer that is mapped from a file memory of its own."""
    tensors = [*model.parameters(), *model.buffers()]
    mappings = read_mappings()
    if mappings is None:
        for tensor in tensors:
            tensor.data = tensor.data.clone()
        return
    files: dict[int, int | None] = {}
    try:
        for tensor, mapping in _mapped(tensors, mappings):
            if mapping.inode not in files:
                files[mapping.inode] = _opened(mapping)
            descriptor = files[mapping.inode]
            whole = tensor.is_contiguous() and tensor.data_ptr() + tensor.nbytes <= mapping.end
            if descriptor is None or not whole:
                tensor.data = tensor.data.clone()
            else:
                offset = mapping.offset + tensor.data_ptr() - mapping.start
                tensor.data = _read(descriptor, offset, tensor.data, mapping.path)
    finally:
        for descriptor in files.values():
            if descriptor is not None:
                os.close(descriptor)


def read_mappings() -> list[Mapping] | None:
    """What this process has mapped from files, by address; None where the system does not tell."""
    if sys.platform != "linux":
        return None
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        addresses, _, offset, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(word, 16) for word in addresses.split("-"))
        found.append(Mapping(start, end, int(offset, 16), int(inode), path[0] if path else ""))
    return sorted(found, key=lambda mapping: mapping.start)


def _mapped(tensors: Iterable[torch.Tensor], mappings: list[Mapping]) -> Iterable[tuple[torch.Tensor, Mapping]]:
    """Those that lie in a file, each with its mapping."""
    starts = [mapping.start for mapping in mappings]
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.nbytes:
            continue
        place = bisect_right(starts, tensor.data_ptr()) - 1
        if place >= 0 and tensor.data_ptr() < mappings[place].end and mappings[place].inode:
            yield tensor, mappings[place]


def _opened(mapping: Mapping) -> int | None:
    """The mapped file, open; None when its name leads to it no more."""
    try:
        descriptor = os.open(mapping.path, os.O_RDONLY)
    except OSError:
        return None
    if os.fstat(descriptor).st_ino == mapping.inode:
        return descriptor
    os.close(descriptor)
    return None


def _read(descriptor: int, offset: int, like: torch.Tensor, path: str) -> torch.Tensor:
    """The bytes there, as a tensor of its own."""
    made = _room(like.nbytes)
    left = memoryview(made.numpy())
    while left:
        got = os.preadv(descriptor, [left], offset)
        if not got:
            raise ModelError("model", path, "became shorter while it was loaded; load it again once it is complete")
        left, offset = left[got:], offset + got
    return made.view(like.dtype).view(like.shape)


def _room(size: int) -> torch.Tensor:
    """So many bytes. Large ones go back to the system with their tensor, which the allocator's heap would not do:
    a layer whose weights have been packed elsewhere gives room for the next."""
    if size < LARGE_BYTES:
        return torch.empty(size, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size, flags=OWN), dtype=torch.uint8)
