"""Bytes that are allocated, or unusable, and hold no computed position: by cause.

- reserved: whole blocks set aside beyond the last position computed;
- internal: the empty tail of the block that holds the last position computed, and positions that have left
  their window or chunk in blocks that still hold others;
- padding: what a slab has beyond its blocks, and blocks of it that its group does not use;
- external: free slabs that no request can have because they lie outside the largest free run
  (contiguous allocation alone; any free block serves a paged request).

Blocks kept for reuse alone are not held: whoever needs their room has it. A shared block is counted once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.memory.cache import KVCache
from octavo.memory.layout import GroupLayout
from octavo.memory.pool import BlockPool
from octavo.memory.values import Int64


@dataclass(frozen=True, slots=True)
class Waste:
    reserved_bytes: int
    internal_bytes: int
    padding_bytes: int
    external_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.reserved_bytes + self.internal_bytes + self.padding_bytes + self.external_bytes


def useful_bytes(cache: KVCache) -> int:
    """Bytes of the computed positions of all live rows that a later position may read."""
    return looked_at(cache)[0]


def waste(cache: KVCache) -> Waste:
    return looked_at(cache)[1]


def looked_at(cache: KVCache) -> tuple[int, Waste]:
    """`useful_bytes` and `waste`, of one look."""
    useful = reserved = internal = padding = 0
    pool = cache.pool
    for group, (layout, table) in enumerate(zip(cache.layout.groups, cache.tables, strict=True)):
        slabs, used = _owned(pool, group)
        unused = layout.blocks_per_slab * slabs - used
        slab_padding = pool.layout.slab_bytes - layout.blocks_per_slab * layout.block_bytes
        padding += unused * layout.block_bytes + slab_padding * slabs
        if not layout.block_tokens:
            useful += int(np.count_nonzero(table.counts)) * layout.block_bytes
            continue
        if cache.sharing is not None:
            slots = _by_slot(cache, group)
            readable = int(slots.readable.sum())
            reserved += int(np.count_nonzero(slots.held & ~slots.begun)) * layout.block_bytes
            useless = int(np.count_nonzero(slots.begun)) * layout.block_tokens - readable
        else:
            readable = int(_readable(cache, layout).sum())
            blocks_used = np.minimum(table.counts, np.maximum(table.firsts, -(-cache.committed // layout.block_tokens)))
            reserved += int((table.counts - blocks_used).sum()) * layout.block_bytes
            useless = int((blocks_used - table.firsts).sum()) * layout.block_tokens - readable
        useful += readable * layout.block_bytes // layout.block_tokens
        internal += useless * layout.block_bytes // layout.block_tokens
    external = pool.free.count - pool.free.largest_run() if pool.contiguous else 0
    return useful, Waste(reserved, internal, padding, external * pool.layout.slab_bytes)


def _owned(pool: BlockPool, group: int) -> tuple[int, int]:
    """Slabs of this group that hold more than cached blocks, and how many blocks of them are in use."""
    if pool.blocks_per_slab == (1,) and not pool.contiguous:
        slabs = pool.slabs - pool.available_slabs
        return slabs, slabs
    owned = (pool.owner == group) & ~pool.only_cached()
    return int(owned.sum()), int(pool.used[owned].sum())


def _readable(cache: KVCache, layout: GroupLayout) -> Int64:
    """Computed positions of each row that its next one, or a later one, may read."""
    if cache.pool.contiguous:
        return cache.committed
    return cache.committed - layout.first_readable(cache.committed)


@dataclass(frozen=True, slots=True)
class _BySlot:
    held: npt.NDArray[np.bool_]
    """In some row's table."""
    begun: npt.NDArray[np.bool_]
    """Of those, with a computed position."""
    readable: Int64
    """Positions that some row's next one, or a later one, may read."""


def _by_slot(cache: KVCache, group: int) -> _BySlot:
    """A block that several rows share is full in each of them: who reads most of it reads all that anybody reads."""
    layout, table = cache.layout.groups[group], cache.tables[group]
    size = layout.block_tokens
    live = np.flatnonzero(table.counts)
    columns = np.arange(int(table.counts.max(initial=0)))
    rows, blocks = np.nonzero((columns < table.counts[live, None]) & (columns >= table.firsts[live, None]))
    rows = live[rows]
    slots, committed = table.slots[rows, blocks], cache.committed[rows]
    first = layout.first_readable(cache.committed)[rows]
    readable = np.zeros(len(cache.pool.slots[group].refs), dtype=np.int64)
    np.maximum.at(
        readable, slots, np.maximum(0, np.minimum(committed, (blocks + 1) * size) - np.maximum(first, blocks * size))
    )
    held, begun = np.zeros(len(readable), dtype=bool), np.zeros(len(readable), dtype=bool)
    held[slots] = True
    begun[slots[blocks * size < committed]] = True
    return _BySlot(held, begun, readable)
