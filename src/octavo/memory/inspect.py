"""Block tables for people: where each logical block of a live sequence lies.

Reads only. One line for each sequence and group, logical to physical, with the state of each slot:
`full: A0 -> 7 ready, A1 -> 2 ready, A2 -> 11 filling`. Never the source of a decision.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.memory.cache import KVCache
from octavo.memory.slots import SlotState


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
    states = cache.pool.slots[group].state
    slots = cache.tables[group].row(row).tolist()
    first = int(cache.tables[group].firsts[row])
    return ", ".join(
        f"{name}{i} -> {slot} {SlotState(int(states[slot])).name.lower()}" for i, slot in enumerate(slots, first)
    )
