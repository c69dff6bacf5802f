"""How large a slab is: the unit of bytes that moves between groups of different block bytes.

    block bytes 10 and 52     slab 52:  5 x 10 (3.8% lost)   1 x 52
                              slab 160: 16 x 10              3 x 52 (2.5% lost)   <- the first under 3%

The smallest slab in which every group wastes less than `ENOUGH` is taken; where none up to the bound is so
good, the one whose worst group wastes least. A larger slab pads less and is left half used more often.
"""

from __future__ import annotations

from collections.abc import Sequence

ENOUGH = 0.03
"""Padding that is small enough not to look further, as a share of a slab."""
SLABS_AT_LEAST = 64
"""A slab that holds blocks of several sizes is at most one part in so many of the KV cache."""
_SMALL = 128
"""Blocks this many times smaller than the largest fill any slab well: their multiples are no candidates."""


def slab_bytes_for(block_bytes: Sequence[int], most_bytes: int = 0) -> int:
    """Bytes of a slab for groups of these block bytes: at least the largest, at most `most_bytes` beyond it."""
    largest = max(block_bytes)
    bound = max(largest, most_bytes)
    candidates = {largest}
    for size in block_bytes:
        if size * _SMALL >= largest:
            candidates.update(range(-(-largest // size) * size, min(bound, _SMALL * largest) + 1, size))
    best, least = largest, worst_padding(block_bytes, largest)
    for slab in sorted(candidates):
        padding = worst_padding(block_bytes, slab)
        if padding < least:
            best, least = slab, padding
        if least < ENOUGH:
            break
    return best


def worst_padding(block_bytes: Sequence[int], slab_bytes: int) -> float:
    """The largest share of a slab that one of the groups cannot use."""
    return max(slab_bytes % size for size in block_bytes) / slab_bytes
