"""Reuse of finished blocks: what keeps them findable, shares them, and gives them up. `KVCache` calls it.

    row's block full --key--> READY at a node --last reference gone--> cached --hit--> referenced again
                                                                          |
                                                                          +--room is needed, a leaf--> EMPTY

Owns the directory, where each row stands in it, and the eviction policy's offers. Slots and references are the
pool's. A block that is completed a second time takes the place of the first one, unless somebody references that:
then it stays private to its row, which holds a reference to the first one too, so that what follows it is never kept
without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.errors import InvariantViolation, PolicyError
from octavo.memory.keys import Chain, KeySpace
from octavo.memory.pool import BlockPool
from octavo.memory.prefix import NO_SLOT, Match, Node, PrefixDirectory
from octavo.memory.slots import SlotState
from octavo.memory.tables import BlockTables
from octavo.memory.values import Int32
from octavo.policy.eviction import Evictable, Eviction


@dataclass(slots=True, eq=False)
class _Standing:
    """Where a sequence stands in the directory."""

    tail: Node | None = None
    """Its last keyed block; None: it keys nothing."""
    doubles: list[tuple[int, int]] = field(default_factory=list)
    """(group, slot) of blocks that it has a copy of its own of."""
    completed: int = 0
    """While it is suspended: as `Sharing.completed`."""
    announced: list[bytes] = field(default_factory=list)
    """Keys of blocks it has yet to complete, the next one last."""


class Sharing:
    def __init__(self, pool: BlockPool, rows: int, space: KeySpace, eviction: Eviction) -> None:
        self.pool = pool
        self.eviction = eviction
        self.directory = PrefixDirectory(pool.layout.groups, [len(s.state) for s in pool.slots], space)
        self.evicted_blocks = 0
        self.replaced_blocks = 0
        """Cached blocks whose place another copy has taken, which somebody references."""
        self.frugal = False
        """Give up cached blocks of begun slabs before a free slab is begun: somebody counts on every free slab."""
        self.completed = np.zeros(rows, dtype=np.int64)
        """Blocks of each row that are full and were offered to the directory, or came from it."""
        self._at: list[_Standing] = [_Standing() for _ in range(rows)]
        self.computing: dict[bytes, int] = {}
        """Keys of blocks that running rows have yet to complete, and how many rows each."""
        self._parked: dict[int, _Standing] = {}
        """Of suspended sequences, by ticket."""
        self._uses = 0
        self._grows = tuple(g.block_tokens > 0 and not g.slides for g in pool.layout.groups)
        self.all_grow = all(self._grows)
        """Whether blocks of every group are shared whole from the start, and none is given up before the end."""

    # -- rows ---------------------------------------------------------------------------------

    def match(self, chain: Chain, tokens: Int32, limit: int) -> Match:
        """The longest start of `tokens`, at most `limit` positions, that can be had; `chain` has its keys."""
        return self.directory.match(chain.keys, chain.root, tokens, limit)

    def begin(self, row: int, match: Match, chain: Chain) -> None:
        """The row starts from this match, or from the root of its chain, and computes the other blocks."""
        at = self._at[row]
        self.completed[row] = len(match.path)
        self._hold(at, match.path[-1] if match.path else self.directory.root(chain.root))
        at.announced = chain.keys[len(match.path) :][::-1]
        for key in at.announced:
            self.computing[key] = self.computing.get(key, 0) + 1

    def awaited(self, match: Match, chain: Chain) -> bool:
        """Whether a running row is computing the very block that comes after the match."""
        return len(match.path) < len(chain.keys) and chain.keys[len(match.path)] in self.computing

    def end(self, row: int) -> list[tuple[int, int]]:
        """The row's sequence leaves; (group, slot) of what it referenced besides its tables."""
        return self._end(self._at[row])

    def park(self, row: int, ticket: int) -> None:
        """The row's sequence is suspended."""
        self._at[row].completed = int(self.completed[row])
        self._parked[ticket], self._at[row] = self._at[row], _Standing()

    def unpark(self, row: int, ticket: int) -> None:
        """It is resumed in this row."""
        self._at[row] = self._parked.pop(ticket)
        self.completed[row] = self._at[row].completed

    def drop(self, ticket: int) -> list[tuple[int, int]]:
        """A suspended sequence is given up; as `end`."""
        return self._end(self._parked.pop(ticket))

    def doubles(self) -> list[tuple[int, int]]:
        """All that is referenced besides tables, for the invariants."""
        return [double for at in (*self._at, *self._parked.values()) for double in at.doubles]

    def tail(self, row: int) -> Node | None:
        """The row's last keyed block."""
        return self._at[row].tail

    def _end(self, at: _Standing) -> list[tuple[int, int]]:
        self._hold(at, None)
        for key in at.announced:
            self._computed(key)
        at.announced = []
        doubles, at.doubles = at.doubles, []
        return doubles

    def _computed(self, key: bytes) -> None:
        left = self.computing[key] - 1
        if left:
            self.computing[key] = left
        else:
            del self.computing[key]

    def _hold(self, at: _Standing, node: Node | None) -> None:
        before, at.tail = at.tail, node
        if node is not None:
            node.held += 1
        if before is not None:
            before.held -= 1
            self.directory.forget_if_bare(before)

    def key(self, row: int, tables: Sequence[BlockTables], keys: Sequence[bytes], tokens: Int32) -> None:
        """The row's next blocks are full: `keys` and `tokens` are theirs. Their slots become findable."""
        size = self.directory.space.block_tokens
        at = self._at[row]
        self.completed[row] += len(keys)
        for i, key in enumerate(keys):
            if at.announced:
                self._computed(at.announced.pop())
            if at.tail is None:
                return
            self._hold(at, self.directory.child(at.tail, key, tokens[i * size : (i + 1) * size]))
            if at.tail is None:  # another text has this key: nothing after it can be found either
                return
            for group, table in enumerate(tables):
                if self.pool.layout.groups[group].block_tokens and table.firsts[row] <= at.tail.index:
                    self._place(at, group, int(table.slots[row, at.tail.index]))

    def _place(self, at: _Standing, group: int, slot: int) -> None:
        """The state of the row's tail is in `slot`."""
        node = at.tail
        assert node is not None
        kept = node.slots[group]
        if kept != NO_SLOT and self._grows[group]:
            if self.pool.slots[group].refs[kept]:
                self.take_up(group, np.array([kept], dtype=np.int32))
                at.doubles.append((group, kept))
                return
            # Nobody references it: holding both would take room that nobody was charged for.
            self.replaced_blocks += 1
            self._retire(group, kept)
            kept = NO_SLOT
        if kept == NO_SLOT:
            self.directory.place(node, group, slot)
            if self._grows[group] and node.parent is not None and node.parent.slots[group] != NO_SLOT:
                self.eviction.withdraw(group, node.parent.slots[group])

    def _retire(self, group: int, kept: int) -> None:
        """An unreferenced slot is found no more; one that still drains is EMPTY once its plan has completed."""
        slots = np.array([kept], dtype=np.int32)
        self.directory.displace(group, kept)
        if self.pool.slots[group].state[kept] == SlotState.READY:
            self.eviction.withdraw(group, kept)
            self.pool.count_cached(group, slots, -1)
            self.pool.give(group, slots)

    # -- references ---------------------------------------------------------------------------

    def keep(self, group: int, slots: Int32) -> None:
        """READY slots at nodes have lost their last reference: they are cached."""
        self.pool.count_cached(group, slots, +1)
        self._uses += 1
        for slot in slots.tolist():
            node = self.directory.node_of(group, slot)
            node.last_used = self._uses
            self._offer(node, group)

    def take_up(self, group: int, slots: Int32) -> None:
        """Slots at nodes gain a reference: cached ones are not evictable any more, draining ones stay."""
        columns = self.pool.slots[group]
        draining = slots[columns.state[slots] == SlotState.DRAINING]
        if len(draining):
            self.pool.undrain(group, draining)
        idle = slots[(columns.refs[slots] == 0) & ~np.isin(slots, draining)]
        self.pool.count_cached(group, idle, -1)
        columns.refs[slots] += 1
        for slot in idle.tolist():
            self.eviction.withdraw(group, slot)

    def _offer(self, node: Node, group: int) -> None:
        if not (self._grows[group] and node.children_in[group]):
            self.eviction.offer(Evictable(group, node.slots[group], node.last_used, node.index))

    # -- giving up ----------------------------------------------------------------------------

    def evict_for(self, counts: Sequence[int]) -> None:
        """Give up cached blocks until these can be taken; the pool has said that it is possible."""
        if self.frugal:
            self._make_room_in_begun_slabs(counts)
        while self.pool.slabs_needed(counts) > self.pool.free.count:
            self._evict(self._choose(counts))

    def _make_room_in_begun_slabs(self, counts: Sequence[int]) -> None:
        for group, per_slab in enumerate(self.pool.blocks_per_slab):
            while per_slab > 1 and counts[group] > self.pool.free_in_begun(group):
                block = self.eviction.choose(group)
                if block is None:
                    break
                self._evict(block)

    def give_up(self, group: int, slot: int) -> None:
        """Nobody will want this block: if it is cached, it goes now."""
        columns = self.pool.slots[group]
        if slot != NO_SLOT and columns.refs[slot] == 0 and columns.state[slot] == SlotState.READY:
            node = self.directory.node_of(group, slot)
            self._evict(Evictable(group, slot, node.last_used, node.index))

    def forget_all(self) -> list[int]:
        """Nothing kept or held now is found again; returns how many cached blocks of each group that freed."""
        freed = list(self.pool.cached)
        self.clear()
        for group, keyed in enumerate(self.directory.keyed):
            for slot in np.flatnonzero(keyed).tolist():
                self.directory.displace(group, slot)
        for at in (*self._at, *self._parked.values()):
            self._hold(at, None)
        return freed

    def clear(self) -> int:
        """Give up every cached block; returns how many."""
        before = self.evicted_blocks
        for group in range(len(self.pool.slots)):
            while (block := self.eviction.choose(group)) is not None:
                self._evict(block)
        return self.evicted_blocks - before

    def _choose(self, counts: Sequence[int]) -> Evictable:
        """The block to go: of a group that lacks room where it has one, else the one used longest ago."""
        wanting = [g for g, n in enumerate(counts) if n and self.pool.cached[g]]
        for groups in (wanting, range(len(counts))):
            offered = [block for g in groups if (block := self.eviction.choose(g)) is not None]
            if offered:
                return min(offered, key=lambda block: (block.last_used, block.group))
        raise InvariantViolation("eviction", f"cached blocks {self.pool.cached}, and none is offered")

    def _evict(self, block: Evictable) -> None:
        columns, slots = self.pool.slots[block.group], np.array([block.slot], dtype=np.int32)
        if columns.refs[block.slot] or not self.directory.keyed[block.group][block.slot]:
            raise PolicyError(f"eviction {self.eviction.name!r} chose slot {block.slot}, which is not evictable")
        self.eviction.gone(block)
        self.pool.count_cached(block.group, slots, -1)
        node = self.directory.displace(block.group, block.slot)
        self.pool.give(block.group, slots)
        self.evicted_blocks += 1
        parent = node.parent
        if parent is None or not self._grows[block.group] or parent.slots[block.group] == NO_SLOT:
            return
        slot = parent.slots[block.group]
        if columns.refs[slot] == 0 and columns.state[slot] == SlotState.READY:
            self._offer(parent, block.group)
