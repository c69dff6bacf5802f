"""Copies of whole blocks between two arenas of one layout, as few and as long as the slots allow.

Owns addressing and the device's stream; knows no threads, budgets or deadlines. Neighbouring slots on both sides are
one copy. Invariant: when `copy` returns, the bytes have arrived, on a CUDA device as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.memory.layout import Layout
from octavo.runtime.arena import Arena


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


class BlockCopier:
    """Between `device` and `host`; on CUDA over a stream of its own, with the host arena's memory pinned."""

    def __init__(self, device: Arena, host: Arena) -> None:
        if device.layout.signature != host.layout.signature or device.layout.slab_bytes != host.layout.slab_bytes:
            raise ConfigError("host_bytes", "an arena", "is laid out otherwise than the device's; use one layout")
        self.device, self.host = device, host
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

    def copy(self, down: bool, group: int, sources: Sequence[int], targets: Sequence[int], after: Any = None) -> None:
        """Device to host if `down`, else host to device."""
        read, written = (self.device.bytes, self.host.bytes) if down else (self.host.bytes, self.device.bytes)
        spans = runs(self.device.layout, group, sources, targets)
        if self.stream is None:
            here, there = written.numpy(), read.numpy()  # cheaper to slice than tensors are
            for start, end, size in spans:
                here[end : end + size] = there[start : start + size]
            return
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            for start, end, size in spans:
                written[end : end + size].copy_(read[start : start + size], non_blocking=True)
        self.stream.synchronize()

    def host_block(self, group: int, slot: int) -> memoryview:
        """The bytes of a block in the host arena, writable."""
        start = self.host.layout.address(group, slot)
        size = self.host.layout.groups[group].block_bytes
        return memoryview(self.host.bytes[start : start + size].numpy())

    def close(self) -> None:
        if self.stream is not None:
            torch.cuda.cudart().cudaHostUnregister(self.host.bytes.data_ptr())
            self.stream = None
