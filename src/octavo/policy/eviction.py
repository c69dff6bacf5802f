"""Eviction: which cached block goes when room is needed.

Only leaves are offered: blocks that nobody references and that no kept block follows. A policy answers with one
of them, group by group; the mechanism gives it up. It is told of each offer, each withdrawal and what has gone, by
key, so that policies with a memory of their own (ghost lists) fit the same seam.

- `lru`: the one used longest ago, of equals the deepest.
- `cheapest_to_rebuild`: the one that costs least to compute again, aged by what has gone before it: GreedyDual
  (Young, "On-line file caching", 1994; Cao and Irani, "Cost-aware WWW proxy caching algorithms", 1997).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

from octavo.errors import ConfigError


@dataclass(slots=True)
class Evictable:
    """Nobody changes it; not frozen, since one is made for every block kept, and freezing takes thrice as long."""

    group: int
    slot: int
    last_used: int
    """Larger is later."""
    index: int
    """Which block of its sequence."""
    key: bytes = b""
    """Of what it holds: the same whenever the same text is computed again, in whatever slot."""


class Eviction(Protocol):
    name: str

    def offer(self, block: Evictable) -> None:
        """This block may go."""
        ...

    def withdraw(self, group: int, slot: int) -> None:
        """It may not any more: it was hit, or another block now follows it. It may never have been offered."""
        ...

    def choose(self, group: int) -> Evictable | None:
        """Which block of the group goes first; None when none was offered. Changes nothing that is seen outside."""
        ...

    def gone(self, block: Evictable) -> None:
        """The block has been given up."""
        ...

    def go_next(self, group: int, blocks: Sequence[tuple[int, int, int]]) -> int:
        """How many of these blocks (slot, last_used, index) would surely be chosen next, one after the other, if each
        were offered once the one before it has gone. So many count as offered, chosen and gone: it spares the offers.
        0 where it wants to be told of each.
        """
        ...


_STALE = 4
"""How many times as many entries as offers a heap may have, and some more: hits leave stale ones behind."""


class _Ranked:
    """Offers in heaps by group; stale entries are skipped when they come up, and swept where too many lie about."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[float, int, int]]] = {}
        self._offered: dict[tuple[int, int], tuple[float, Evictable]] = {}

    def rank(self, last_used: int, index: int) -> float:
        """The lowest goes first."""
        raise TypeError(f"{type(self).__name__} has no rank")

    def ages(self, rank: float) -> None:
        """One of this rank is gone."""

    def offer(self, block: Evictable) -> None:
        rank = self.rank(block.last_used, block.index)
        group, slot = block.group, block.slot
        self._offered[group, slot] = (rank, block)
        heap = self._heaps.get(group)
        if heap is None:
            heap = self._heaps[group] = []
        heappush(heap, (rank, -block.index, slot))
        if len(heap) > 64 + _STALE * len(self._offered):
            self._sweep(group)

    def withdraw(self, group: int, slot: int) -> None:
        self._offered.pop((group, slot), None)

    def choose(self, group: int) -> Evictable | None:
        heap, offered = self._heaps.get(group), self._offered
        while heap:
            rank, depth, slot = heap[0]
            found = offered.get((group, slot))
            if found is not None and found[0] == rank and found[1].index == -depth:
                return found[1]
            heappop(heap)
        return None

    def gone(self, block: Evictable) -> None:
        found = self._offered.pop((block.group, block.slot), None)
        if found is not None:
            self.ages(found[0])

    def go_next(self, group: int, blocks: Sequence[tuple[int, int, int]]) -> int:
        self.choose(group)  # what is stale goes from the top of the heap
        heap = self._heaps.get(group)
        for many, (slot, last_used, index) in enumerate(blocks):
            rank = self.rank(last_used, index)
            if heap and (rank, -index, slot) > heap[0]:
                return many
            self.ages(rank)
        return len(blocks)

    def _sweep(self, group: int) -> None:
        offered = (found for (of, _), found in self._offered.items() if of == group)
        heap = [(rank, -block.index, block.slot) for rank, block in offered]
        heapify(heap)
        self._heaps[group] = heap


class LeastRecentlyUsed(_Ranked):
    name = "lru"

    def rank(self, last_used: int, index: int) -> float:
        return float(last_used)

    def go_next(self, group: int, blocks: Sequence[tuple[int, int, int]]) -> int:
        self.choose(group)
        heap = self._heaps.get(group)
        if heap:
            first = heap[0]
            for many, (slot, last_used, index) in enumerate(blocks):
                if (last_used, -index, slot) > first:
                    return many
        return len(blocks)


class CheapestToRebuild(_Ranked):
    """`cost` of a block by its place in its sequence; by default a block costs more the deeper it lies."""

    name = "cheapest_to_rebuild"

    def __init__(self, cost: Callable[[int], float] = lambda index: 1.0 + index / 64) -> None:
        super().__init__()
        self._cost = cost
        self._age = 0.0

    def rank(self, last_used: int, index: int) -> float:
        return self._age + self._cost(index)

    def ages(self, rank: float) -> None:
        self._age = max(self._age, rank)


EVICTIONS: dict[str, type[LeastRecentlyUsed | CheapestToRebuild]] = {
    "lru": LeastRecentlyUsed,
    "cheapest_to_rebuild": CheapestToRebuild,
}


def eviction_named(name: str, *, field: str = "eviction") -> Eviction:
    """Raises `ConfigError` for `field`."""
    if name not in EVICTIONS:
        raise ConfigError(field, name, f"use one of {', '.join(EVICTIONS)}")
    return EVICTIONS[name]()
