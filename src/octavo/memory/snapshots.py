"""Copies of constant state, so that another sequence can go on from where it stood: `Snapshots`.

    plan n    ... chunk ends at a block boundary --copies_after--> a slot of its own, FILLING, pinned by plan n
    commit n  the block is keyed: the slot is READY and stands at its node
    settle n  the pin goes: the slot is cached, and may be evicted

Owns what was taken and not yet learned of. Where to take one, and how many to keep, is the reuse policy's choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.memory.cache import KVCache
from octavo.memory.nodes import NO_SLOT, Node
from octavo.memory.slots import SlotState
from octavo.memory.values import BlockCopies, Int64, Shortfall


@dataclass(frozen=True, slots=True)
class _Taken:
    row: int
    blocks: int
    """Whole blocks that the row had computed."""
    slots: tuple[tuple[int, Int64], ...]
    """(group, slot)"""


class Snapshots:
    def __init__(self, cache: KVCache, keeps: int = 1) -> None:
        """`keeps`: of a row that generates the latest so many are kept."""
        self._cache = cache
        self._keeps = keeps
        self._groups = tuple(g for g, layout in enumerate(cache.layout.groups) if not layout.block_tokens)
        self._taken: dict[int, list[_Taken]] = {}
        self._latest: dict[int, list[Node]] = {}
        """By row: where its latest snapshots past the prompt stand."""

    @property
    def needed(self) -> bool:
        """Whether any state is constant, and blocks are shared."""
        return bool(self._groups) and self._cache.sharing is not None

    def take(self, plan: int, row: int, blocks: int) -> tuple[BlockCopies, ...]:
        """Copies to make when the plan has been computed; none where there is no room for them."""
        counts = [int(group in self._groups) for group in range(len(self._cache.tables))]
        taken = self._cache.take(counts)
        if isinstance(taken, Shortfall):
            return ()
        slots = tuple((group, taken[group]) for group in self._groups)
        self._cache.pins.setdefault(plan, []).extend(slots)
        self._taken.setdefault(plan, []).append(_Taken(row, blocks, slots))
        return tuple(BlockCopies(group, self._cache.tables[group].row(row).copy(), slot) for group, slot in slots)

    def learn(self, plan: int, rows: Iterable[int], generating: Iterable[bool]) -> None:
        """The plan has completed: snapshots of `rows`, which are still there, stand at their last keyed block.

        Of a row that generates only the latest ones are kept. Before the plan is settled.
        """
        due = self._taken.pop(plan, None)
        if due is None:
            return
        alive = dict(zip(rows, generating, strict=True))
        for one in due:
            if one.row in alive:
                self._place(one, generating=alive[one.row])

    def forget(self, row: int) -> None:
        """The row's sequence leaves; its latest snapshots stay."""
        self._latest.pop(row, None)

    def forget_all(self) -> None:
        """What was kept stands nowhere any more."""
        self._latest.clear()

    def _place(self, one: _Taken, *, generating: bool) -> None:
        sharing = self._cache.sharing
        assert sharing is not None
        node = sharing.tail(one.row)
        if node is None or node.index + 1 != one.blocks:
            return
        for group, slot in one.slots:
            if node.slots[group] == NO_SLOT:
                self._cache.pool.slots[group].move(slot, SlotState.READY)
                sharing.shelf.place(node, group, int(slot[0]))
                if sharing.filled is not None:
                    sharing.filled(node, group)
        if not generating:
            return
        latest = self._latest.setdefault(one.row, [])
        if node not in latest:
            latest.append(node)
        while len(latest) > self._keeps:
            before = latest.pop(0)
            for group in self._groups:
                sharing.shelf.give_up(group, before.slots[group])
