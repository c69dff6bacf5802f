"""Values that cross the seams of `memory`: what was reserved, what fell short, what was suspended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)
"""From the fastest down; `places` of a node and the arrays by tier are in this order."""


@dataclass(frozen=True, slots=True, eq=False)
class NewBlocks:
    """Blocks of one group appended to tables: `tables[rows[i], indices[i]] = slots[i]`."""

    group: int
    rows: Int64
    indices: Int64
    slots: Int64


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Room was found: the blocks that were appended, one entry per group that grew."""

    new_blocks: tuple[NewBlocks, ...] = ()


NOTHING_NEW = Reservation()


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopies:
    """Whole blocks of one group to be copied on the device: `sources[i]` to `targets[i]`."""

    group: int
    sources: Int64
    targets: Int64


@dataclass(frozen=True, slots=True, eq=False)
class Adoption:
    """A row starts from blocks that were kept: all its blocks, and what must be copied into its own first."""

    tokens: int
    """Positions that need not be computed."""
    new_blocks: tuple[NewBlocks, ...]
    copies: tuple[BlockCopies, ...]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Room was not found and nothing changed. All figures are slabs (blocks, for a one-group model).

    `needed` cannot be met by `free + evictable`; `draining` will be free once plans and copies in flight
    have completed. `largest_run` is set for contiguous allocation, where `free` may suffice and
    yet lie in pieces: then the cause is external fragmentation.
    """

    needed: int
    free: int
    evictable: int = 0
    draining: int = 0
    largest_run: int | None = None

    @property
    def waits_for_draining(self) -> bool:
        """True when completing what is in flight is enough, so that nobody need give way."""
        return self.draining > 0 and self.needed <= self.free + self.evictable + self.draining

    @property
    def fragmented(self) -> bool:
        return self.largest_run is not None and self.needed <= self.free


@dataclass(frozen=True, slots=True)
class Suspended:
    """A sequence's state taken out of its tables, whole: partial last block and all.

    `slots[group]` names (tier, slot) for each block in order, from block `firsts[group]` on. It stays
    allocated until it is resumed or dropped.
    """

    ticket: int
    tokens: int
    touched: int
    firsts: tuple[int, ...]
    slots: tuple[tuple[tuple[str, int], ...], ...]
