"""Starting a sequence from blocks that were kept: `adopt`.

    match        | whole block | whole block | part of a block |
    row's table  |   shared    |   shared    |  own, a copy    |  own, new  |

Whole blocks are shared by reference; one that the device lacks gets a slot of the row's own, to be loaded into. A
block wanted in part, and constant state, are copied into blocks of the row's own by the plan that it enters with;
what is copied from stays referenced until that plan has completed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.errors import InvariantViolation
from octavo.memory.cache import KVCache
from octavo.memory.keys import Chain
from octavo.memory.loading import Wanted
from octavo.memory.nodes import NO_SLOT
from octavo.memory.prefix import Match
from octavo.memory.values import Adoption, BlockCopies, Int64, NewBlocks, Shortfall


@dataclass(frozen=True, slots=True)
class _Source:
    group: int
    slot: Int64
    """One slot."""
    index: int
    """Where its copy stands in the row's table."""


def adopt(
    cache: KVCache,
    row: int,
    match: Match,
    chain: Chain,
    upto: int,
    plan: int,
    lower: Sequence[Wanted] = (),
) -> Adoption | Shortfall:
    """Start an empty row from what was matched, with room for positions 0 .. upto - 1; all or nothing.

    `plan` is the number of the plan that makes the copies. `lower` are the blocks of the match that the device lacks:
    each is given a slot of the row's own, to be filled by whoever holds them.
    """
    sharing = cache.sharing
    if sharing is None:
        raise InvariantViolation("reuse", f"row {row} starts from kept blocks, and nothing is kept")
    sharing.begin(row, match, chain)
    sources = _sources(cache, match)
    short = _seat(cache, row, match, sources) or cache.reserve(row, upto)
    if isinstance(short, Shortfall):
        for source in sources:
            cache.unreference(source.group, source.slot, -1, used=False)
        cache.release(row, used=False)
        return short
    if sources:
        cache.pins.setdefault(plan, []).extend((source.group, source.slot) for source in sources)
    copies = tuple(
        BlockCopies(s.group, s.slot, cache.tables[s.group].slots[row, s.index : s.index + 1].astype(np.int64))
        for s in sources
    )
    for one in lower:
        one.target = int(cache.tables[one.group].slots[row, one.index])
    return Adoption(match.tokens, _all_blocks(cache, row), copies)


def _seat(cache: KVCache, row: int, match: Match, sources: Sequence[_Source]) -> Shortfall | None:
    """Whole blocks of the match go into the row's table, referenced; what is copied from is referenced in any case."""
    assert cache.sharing is not None
    shelf = cache.sharing.shelf
    starts = [_shared(cache, group, match) for group in range(len(cache.tables))]
    for group, (_, slots) in enumerate(starts):
        shelf.take_up(group, slots[slots >= 0])
    for source in sources:
        shelf.take_up(source.group, source.slot)
    own = cache.take([int(np.count_nonzero(slots < 0)) for _, slots in starts])
    for group, (first, slots) in enumerate(starts):
        if isinstance(own, Shortfall):
            cache.unreference(group, slots[slots >= 0], -1, used=False)
        elif cache.layout.groups[group].block_tokens:
            slots[slots < 0] = own[group]
            cache.tables[group].adopt(row, first, slots)
    if isinstance(own, Shortfall):
        return own
    cache.committed[row] = match.tokens
    return None


def lower_blocks(cache: KVCache, match: Match) -> list[Wanted]:
    """What a start from the match needs and the device lacks, in order of position."""
    found: list[Wanted] = []
    for group, layout in enumerate(cache.layout.groups):
        if layout.block_tokens:
            first, slots = _shared(cache, group, match)
            found.extend(
                Wanted(group, first + at, match.path[first + at], shared=True, full=True)
                for at in np.flatnonzero(slots < 0).tolist()
            )
            if match.partial is not None and match.partial.slots[group] == NO_SLOT:
                found.append(Wanted(group, len(match.path), match.partial, shared=False))
        elif match.tokens and match.path[-1].slots[group] == NO_SLOT:
            found.append(Wanted(group, 0, match.path[-1], shared=False))
    return found


def shared_blocks(cache: KVCache, match: Match) -> list[int]:
    """Blocks of each group that starting from the match takes from nobody: others reference them already."""
    counts = [0] * len(cache.tables)
    if not match.path:
        return counts
    for group, layout in enumerate(cache.layout.groups):
        if layout.block_tokens:
            _, slots = _shared(cache, group, match)
            counts[group] = int(np.count_nonzero(cache.pool.slots[group].refs[slots[slots >= 0]]))
    return counts


def first_shared(cache: KVCache, group: int, match: Match) -> int:
    """The first block of the match that a query after it can read in this group."""
    if not cache.layout.groups[group].slides:
        return 0
    first = int(cache.layout.groups[group].first_block(np.array([match.tokens]))[0])
    return min(first, len(match.path))


def _shared(cache: KVCache, group: int, match: Match) -> tuple[int, Int64]:
    """The first block that the row shares, and the device's slots from it on; NO_SLOT where it has none."""
    if not cache.layout.groups[group].block_tokens:
        return 0, np.empty(0, dtype=np.int64)
    first = first_shared(cache, group, match)
    return first, np.array([node.slots[group] for node in match.path[first:]], dtype=np.int64)


def _sources(cache: KVCache, match: Match) -> list[_Source]:
    """What is copied on the device rather than shared."""
    found = []
    for group, layout in enumerate(cache.layout.groups):
        if not layout.block_tokens and match.tokens:
            found.append(_Source(group, np.array([match.path[-1].slots[group]], dtype=np.int64), 0))
        elif layout.block_tokens and match.partial is not None:
            found.append(_Source(group, np.array([match.partial.slots[group]], dtype=np.int64), len(match.path)))
    return [source for source in found if source.slot[0] != NO_SLOT]


def _all_blocks(cache: KVCache, row: int) -> tuple[NewBlocks, ...]:
    new = []
    for group, table in enumerate(cache.tables):
        slots = table.row(row)
        if len(slots):
            indices = np.arange(table.firsts[row], table.counts[row], dtype=np.int64)
            new.append(NewBlocks(group, np.full(len(slots), row, dtype=np.int64), indices, slots))
    return tuple(new)
