"""Block tables for people: where each logical block of a live sequence lies.

Reads only. One line for each sequence and group, logical to physical, with the state of each slot:
`full: A0 -> 7 ready x2, A1 -> 2 ready, A2 -> 11 filling`; `x2` is a slot that two reference. Never the source of a
decision.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from octavo.memory.cache import KVCache
from octavo.memory.slots import SlotState

MOST_CACHED = 32
"""Cached slots of a group that are listed; the rest is counted."""


def table_lines(cache: KVCache, names: Mapping[int, str]) -> list[str]:
    """The tables of all rows that hold blocks, and of all rows named, in order of rows; `names` is by row."""
    lines = []
    for row in range(cache.rows):
        name = names.get(row)
        for group in range(len(cache.tables)):
            blocks = _blocks(cache, row, group, f"row {row} block " if name is None else name)
            if blocks or name is not None:
                lines.append(f"{cache.layout.groups[group].name}: {blocks or f'{name} holds no blocks'}")
    return lines


def _blocks(cache: KVCache, row: int, group: int, name: str) -> str:
    columns = cache.pool.slots[group]
    slots = cache.tables[group].row(row).tolist()
    first = int(cache.tables[group].firsts[row])
    return ", ".join(
        f"{name}{i} -> {slot} {SlotState(int(columns.state[slot])).name.lower()}{_times(int(columns.refs[slot]))}"
        for i, slot in enumerate(slots, first)
    )


def _times(references: int) -> str:
    return f" x{references}" if references > 1 else ""


def cached_lines(cache: KVCache) -> list[str]:
    """Slots that nobody references and whose content can be found again, a line for each group that has any."""
    lines = []
    for group, columns in zip(cache.layout.groups, cache.pool.slots, strict=True):
        kept = np.flatnonzero((columns.state == SlotState.READY) & (columns.refs == 0)).tolist()
        if kept:
            shown = ", ".join(map(str, kept[:MOST_CACHED]))
            more = f" and {len(kept) - MOST_CACHED:,} more" if len(kept) > MOST_CACHED else ""
            lines.append(f"{group.name}: cached {shown}{more}")
    return lines
