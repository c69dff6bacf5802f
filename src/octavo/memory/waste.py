"""Bytes that are allocated, or unusable, and hold no computed position: by cause.

- reserved: whole blocks set aside beyond the last position computed;
- internal: the empty tail of the block that holds the last position computed, and positions that have left
  their window or chunk in blocks that still hold others;
- padding: what a slab has beyond its blocks, and blocks of it that its group does not use;
- external: free slabs that no request can have because they lie outside the largest free run
  (contiguous allocation alone; any free block serves a paged request).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.memory.cache import KVCache
from octavo.memory.layout import GroupLayout
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
    total = 0
    for layout, table in zip(cache.layout.groups, cache.tables, strict=True):
        live = table.counts > 0
        if layout.block_tokens:
            total += int(_readable(cache, layout)[live].sum()) * layout.block_bytes // layout.block_tokens
        else:
            total += int(np.count_nonzero(live)) * layout.block_bytes
    return total


def waste(cache: KVCache) -> Waste:
    reserved = internal = padding = 0
    pool = cache.pool
    for group, (layout, table) in enumerate(zip(cache.layout.groups, cache.tables, strict=True)):
        owned = pool.owner == group
        unused = layout.blocks_per_slab * int(owned.sum()) - int(pool.used[owned].sum())
        slab_padding = pool.layout.slab_bytes - layout.blocks_per_slab * layout.block_bytes
        padding += unused * layout.block_bytes + slab_padding * int(owned.sum())
        if not layout.block_tokens:
            continue
        blocks_used = np.minimum(table.counts, np.maximum(table.firsts, -(-cache.committed // layout.block_tokens)))
        reserved += int((table.counts - blocks_used).sum()) * layout.block_bytes
        useless = (blocks_used - table.firsts) * layout.block_tokens - _readable(cache, layout)
        internal += int(useless.sum()) * layout.block_bytes // layout.block_tokens
    external = pool.free.count - pool.free.largest_run() if pool.contiguous else 0
    return Waste(reserved, internal, padding, external * pool.layout.slab_bytes)


def _readable(cache: KVCache, layout: GroupLayout) -> Int64:
    """Computed positions of each row that its next one, or a later one, may read."""
    if cache.pool.contiguous:
        return cache.committed
    return cache.committed - layout.first_readable(cache.committed)
