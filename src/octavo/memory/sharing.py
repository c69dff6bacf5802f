"""Reuse of finished blocks: what keeps them findable, shares them, and gives them up. `KVCache` calls it.

    row's block full --key--> READY at a node --last reference gone--> cached --hit--> referenced again
                                                                          |
                                                                          +--room is needed, a leaf--> EMPTY

Owns the directory and where each row stands in it; what is cached is the shelf's, slots and references the pool's.
A block that is completed a second time takes the place of the first one, unless somebody references that: then it
stays private to its row, which holds a reference to the first one too, so that what follows it is never kept
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.memory.keys import TOKEN_BYTES, Chain, KeySpace, token_bytes
from octavo.memory.nodes import NO_SLOT, Node, Run
from octavo.memory.pool import BlockPool
from octavo.memory.prefix import Match, PrefixDirectory
from octavo.memory.shelf import Shelf
from octavo.memory.tables import BlockTables
from octavo.memory.values import Int32
from octavo.policy.eviction import Eviction


@dataclass(slots=True, eq=False)
class _Standing:
    """Where a sequence stands in the directory."""

    tail: Node | Run | None = None
    """Its last keyed block, or the run that ends with it; None: it keys nothing."""
    doubles: list[tuple[int, int]] = field(default_factory=list)
    """(group, slot) of blocks that it has a copy of its own of."""
    completed: int = 0
    """While it is suspended: as `Sharing.completed`."""
    announced: list[bytes] = field(default_factory=list)
    """Keys of blocks it has yet to complete, the next one last."""


class Sharing:
    def __init__(
        self, pool: BlockPool, rows: int, space: KeySpace, eviction: Eviction, below: Sequence[Sequence[int]] = ()
    ) -> None:
        """`below[tier][group]`: slots of the tiers below the device."""
        self.pool = pool
        slots = [[len(s.state) for s in pool.slots], *below]
        self.directory = PrefixDirectory(pool.layout.groups, slots, space)
        self.shelf = Shelf(self.directory, pool, eviction)
        self.replaced_blocks = 0
        """Cached blocks whose place another copy has taken, which somebody references."""
        self.filled: Callable[[Node, int], None] | None = None
        """Told of each (node, group) whose block is full and findable."""
        self.completed = np.zeros(rows, dtype=np.int64)
        """Blocks of each row that are full and were offered to the directory, or came from it."""
        self._at: list[_Standing] = [_Standing() for _ in range(rows)]
        self.computing: dict[bytes, int] = {}
        """Keys of blocks that running rows have yet to complete, and how many rows each."""
        self._parked: dict[int, _Standing] = {}
        """Of suspended sequences, by ticket."""
        self.all_grow = all(self.directory.grows)
        """Whether blocks of every group are shared whole from the start, and none is given up before the end."""

    # -- rows ---------------------------------------------------------------------------------

    def match(self, chain: Chain, tokens: Int32, limit: int, tiers: int = 1) -> Match:
        """The longest start of `tokens`, at most `limit` positions, that the first `tiers` tiers keep."""
        return self.directory.match(chain.keys, chain.root, tokens, limit, tiers)

    def begin(self, row: int, match: Match, chain: Chain) -> None:
        """The row starts from this match, or from the root of its chain, and computes the other blocks."""
        at = self._at[row]
        self.completed[row] = len(match.path)
        self._hold(at, match.path[-1] if match.path else self.directory.root(chain.root))
        at.announced = chain.keys[len(match.path) :][::-1]
        self._announce(at)

    def awaited(self, match: Match, chain: Chain, tokens: int = 1) -> bool:
        """Whether the `tokens` positions after the match are being computed, or a block of the match being copied."""
        return any(node.coming for node in match.path) or self.computes(chain, len(match.path), tokens)

    def computes(self, chain: Chain, first: int, tokens: int) -> bool:
        """Whether running rows have yet to complete block `first` and those after it, up to so many positions."""
        blocks = -(-tokens // self.directory.space.block_tokens)
        if len(chain.keys) < first + blocks:
            return False
        return all(chain.keys[place] in self.computing for place in range(first, first + blocks))

    def end(self, row: int) -> list[tuple[int, int]]:
        """The row's sequence leaves; (group, slot) of what it referenced besides its tables."""
        return self._end(self._at[row])

    def park(self, row: int, ticket: int) -> None:
        """The row's sequence is suspended: it computes nothing, so that nobody waits for what it would."""
        at = self._at[row]
        at.completed = int(self.completed[row])
        self._computed(at.announced)
        self._parked[ticket], self._at[row] = at, _Standing()

    def unpark(self, row: int, ticket: int) -> None:
        """It is resumed in this row."""
        at = self._at[row] = self._parked.pop(ticket)
        self.completed[row] = at.completed
        self._announce(at)

    def drop(self, ticket: int) -> list[tuple[int, int]]:
        """A suspended sequence is given up; as `end`."""
        at = self._parked.pop(ticket)
        at.announced = []
        return self._end(at)

    def doubles(self) -> list[tuple[int, int]]:
        """All that is referenced besides tables, for the invariants."""
        return [double for at in (*self._at, *self._parked.values()) for double in at.doubles]

    def lineage(self, ticket: int) -> list[Node]:
        """The keyed blocks of a suspended sequence, from the start on."""
        found: list[Node] = []
        node = self._node(self._parked[ticket])
        while node is not None and node.index >= 0:
            found.append(node)
            node = node.parent
        return found[::-1]

    def drop_doubles(self, ticket: int) -> list[tuple[int, int]]:
        """A suspended sequence needs its blocks in one place only; (group, slot) of what it referenced besides."""
        at = self._parked[ticket]
        doubles, at.doubles = at.doubles, []
        return doubles

    def tail(self, row: int) -> Node | None:
        """The row's last keyed block."""
        return self._node(self._at[row])

    def _end(self, at: _Standing) -> list[tuple[int, int]]:
        self._hold(at, None)
        self._computed(at.announced)
        at.announced = []
        doubles, at.doubles = at.doubles, []
        return doubles

    def _announce(self, at: _Standing) -> None:
        once = dict.fromkeys(at.announced, 1)
        if len(once) == len(at.announced) and self.computing.keys().isdisjoint(once):  # as most often
            self.computing.update(once)
            return
        for key in at.announced:
            self.computing[key] = self.computing.get(key, 0) + 1

    def _computed(self, keys: Sequence[bytes]) -> None:
        computing = self.computing
        for key in keys:
            left = computing.pop(key) - 1
            if left:
                computing[key] = left

    def _hold(self, at: _Standing, node: Node | None) -> None:
        before, at.tail = _tail(at), node
        if node is not None:
            node.held += 1
        if before is not None:
            before.held -= 1
            if isinstance(before, Node):
                self.directory.forget_if_bare(before)

    def _node(self, at: _Standing) -> Node | None:
        """Its last keyed block."""
        tail = _tail(at)
        if isinstance(tail, Run):
            tail = at.tail = self.directory.unfold(tail, len(tail.keys))[-1]
        return tail

    def key(self, row: int, tables: Sequence[BlockTables], keys: Sequence[bytes], tokens: Int32) -> None:
        """The row's next blocks are full: `keys` and `tokens` are theirs. Their slots become findable."""
        width, said = TOKEN_BYTES * self.directory.space.block_tokens, token_bytes(tokens)
        at = self._at[row]
        self.completed[row] += len(keys)
        if at.announced:
            self._computed(at.announced[-len(keys) :])
            del at.announced[-len(keys) :]
        tail = _tail(at)
        if tail is None:
            return
        begin, done = tail.index + (len(tail.keys) if isinstance(tail, Run) else 1), 0
        end, plain = begin + len(keys), self.directory.plain
        if plain:
            held = [(0, 0, tables[0].slots[row, begin:end].tolist())]
        else:
            held = [
                (group, int(table.firsts[row]), table.slots[row, begin:end].tolist())
                for group, table in enumerate(tables)
                if self.pool.layout.groups[group].block_tokens
            ]
        while done < len(keys):
            if plain and keys[done] not in self.directory:
                tail, many = self.shelf.grow(tail, keys[done:], said[done * width :], held[0][2][done:])
                at.tail = tail
                done += many
                continue
            if isinstance(tail, Run):
                tail = self.directory.unfold(tail, len(tail.keys))[-1]
            child = self.directory.child_that_says(tail, keys[done], said[done * width : (done + 1) * width])
            if child is None:  # another text has this key: nothing after it can be found either
                self._hold(at, None)
                return
            tail.held -= 1
            child.held += 1
            at.tail = tail = child
            for group, first, slots in held:
                if first <= child.index:
                    self._place(at, child, group, slots[done])
            done += 1

    def _place(self, at: _Standing, node: Node, group: int, slot: int) -> None:
        """The state of the row's tail, `node`, is in `slot`."""
        kept = node.slots[group]
        if kept != NO_SLOT and self.directory.grows[group]:
            if self.pool.slots[group].refs[kept]:
                self.shelf.take_up(group, np.array([kept], dtype=np.int64))
                at.doubles.append((group, kept))
                return
            # Nobody references it: holding both would take room that nobody was charged for.
            self.replaced_blocks += 1
            self.shelf.remove(group, kept)
            kept = NO_SLOT
        if kept == NO_SLOT:
            self.shelf.place(node, group, slot)
            if self.filled is not None:
                self.filled(node, group)

    def arrived(self, row: int | None, node: Node, group: int, slot: int) -> None:
        """The state of `node` has been copied into `slot`, of a row that starts from it or of one that has left."""
        kept = node.slots[group]
        if kept == NO_SLOT:
            self.shelf.place(node, group, slot)
        elif row is not None and self.directory.grows[group]:
            self.shelf.take_up(group, np.array([kept], dtype=np.int64))
            self._at[row].doubles.append((group, kept))

    def forget_all(self) -> list[int]:
        """Nothing kept or held now is found again; returns how many cached blocks of each group that freed."""
        freed = self.shelf.forget_all()
        for at in (*self._at, *self._parked.values()):
            self._hold(at, None)
        return freed


def _tail(at: _Standing) -> Node | Run | None:
    """Where it stands; a run that has been unfolded to its end is one no more."""
    if isinstance(at.tail, Run) and at.tail.last is not None:
        at.tail = at.tail.last
    return at.tail
