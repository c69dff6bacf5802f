"""Starting a sequence from blocks that were kept: `adopt`.

    match        | whole block | whole block | part of a block |
    row's table  |   shared    |   shared    |  own, a copy    |  own, new  |

Whole blocks are shared by reference. A block wanted in part, and constant state, are copied into blocks of the
row's own by the plan that it enters with; what is copied from stays referenced until that plan has completed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.errors import InvariantViolation
from octavo.memory.cache import KVCache
from octavo.memory.keys import Chain
from octavo.memory.prefix import Match
from octavo.memory.values import Adoption, BlockCopies, Int32, NewBlocks, Shortfall


@dataclass(frozen=True, slots=True)
class _Source:
    group: int
    slot: Int32
    """One slot."""
    index: int
    """Where its copy stands in the row's table."""


def adopt(cache: KVCache, row: int, match: Match, chain: Chain, upto: int, plan: int) -> Adoption | Shortfall:
    """Start an empty row from what was matched, with room for positions 0 .. upto - 1; all or nothing.

    `plan` is the number of the plan that makes the copies.
    """
    sharing = cache.sharing
    if sharing is None:
        raise InvariantViolation("reuse", f"row {row} starts from kept blocks, and nothing is kept")
    sharing.begin(row, match, chain)
    sources = _sources(cache, match)
    for group, layout in enumerate(cache.layout.groups):
        if layout.block_tokens:
            first = first_shared(cache, group, match)
            shared = np.array([node.slots[group] for node in match.path[first:]], dtype=np.int32)
            sharing.shelf.take_up(group, shared)
            cache.tables[group].adopt(row, first, shared)
    for source in sources:
        sharing.shelf.take_up(source.group, source.slot)
    cache.committed[row] = match.tokens
    more = cache.reserve(row, upto)
    if isinstance(more, Shortfall):
        for source in sources:
            cache.unreference(source.group, source.slot, -1)
        cache.release(row)
        return more
    if sources:
        cache.pins.setdefault(plan, []).extend((source.group, source.slot) for source in sources)
    copies = tuple(
        BlockCopies(s.group, s.slot, cache.tables[s.group].slots[row, s.index : s.index + 1].copy()) for s in sources
    )
    return Adoption(match.tokens, _all_blocks(cache, row), copies)


def shared_blocks(cache: KVCache, match: Match) -> list[int]:
    """Blocks of each group that starting from the match takes from nobody: others reference them already."""
    counts = [0] * len(cache.tables)
    for group, layout in enumerate(cache.layout.groups):
        if layout.block_tokens:
            slots = [node.slots[group] for node in match.path[first_shared(cache, group, match) :]]
            counts[group] = int(np.count_nonzero(cache.pool.slots[group].refs[slots])) if slots else 0
    return counts


def first_shared(cache: KVCache, group: int, match: Match) -> int:
    """The first block of the match that a query after it can read in this group."""
    first = int(cache.layout.groups[group].first_block(np.array([match.tokens]))[0])
    return min(first, len(match.path))


def _sources(cache: KVCache, match: Match) -> list[_Source]:
    """What is copied rather than shared."""
    found = []
    for group, layout in enumerate(cache.layout.groups):
        if not layout.block_tokens and match.tokens:
            found.append(_Source(group, np.array([match.path[-1].slots[group]], dtype=np.int32), 0))
        elif layout.block_tokens and match.partial is not None:
            found.append(_Source(group, np.array([match.partial.slots[group]], dtype=np.int32), len(match.path)))
    return found


def _all_blocks(cache: KVCache, row: int) -> tuple[NewBlocks, ...]:
    new = []
    for group, table in enumerate(cache.tables):
        slots = table.row(row).copy()
        if len(slots):
            indices = np.arange(table.firsts[row], table.counts[row], dtype=np.int32)
            new.append(NewBlocks(group, np.full(len(slots), row, dtype=np.int32), indices, slots))
    return tuple(new)
