"""What lies where below the device: `HostTier`, an arena of the device's layout, and `DiskTier`, slots by group.

    device slot --demote--> host slot --store--> disk slot
                <-promote--           <--load---

Own slots and who holds them; the copies between tiers, and when they are made, are `tiering`'s. Host blocks are
those of the prefix directory, of suspended sequences, and of copies under way. Disk blocks are found by the identity
of their text alone, so that those of an earlier run serve too.

Invariant: a slot is handed out at most once until it is given back, and never while a copy touches it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from octavo.memory.layout import Layout
from octavo.memory.nodes import NO_SLOT, Node
from octavo.memory.pool import BlockPool
from octavo.memory.prefix import PrefixDirectory
from octavo.memory.shelf import Shelf
from octavo.memory.slots import SlotState
from octavo.memory.values import Int64, Shortfall
from octavo.policy.eviction import Eviction

HOST_TIER, DISK_TIER = 1, 2


class HostTier:
    def __init__(self, layout: Layout, slabs: int, directory: PrefixDirectory | None, eviction: Eviction) -> None:
        self.pool = BlockPool(layout, slabs)
        self.taken = 0
        """Slots that were asked for and had."""
        self.lacked = 0
        """Blocks that somebody asked for and did not have, since copies ahead were last thought of."""
        self.shelf = None if directory is None else Shelf(directory, self.pool, eviction, HOST_TIER)

    def has_room(self, counts: Sequence[int]) -> bool:
        """Whether these blocks can be had, if need be by giving up cached ones, saved or not."""
        needed, free = self.pool.room_for(counts)
        return needed <= free

    def take(self, counts: Sequence[int]) -> tuple[Int64, ...] | None:
        """`counts[g]` slots of each group g with one reference each, or None. Never waits for the disk."""
        if not self.has_room(counts):
            return None
        if self.shelf is not None and not self.shelf.evict_for(counts):
            return None
        got = self.pool.take(counts)
        if isinstance(got, Shortfall):
            return None
        self.taken += sum(counts)
        return got

    def room_after(self, held: int) -> int:
        """Blocks that could be had once copies no longer hold so many slots; of large and small ones, some more."""
        return self.pool.available_slabs * max(self.pool.blocks_per_slab) + held

    def take_one(self, group: int) -> int | None:
        got = self.take([int(g == group) for g in range(len(self.pool.slots))])
        return None if got is None else int(got[group][0])

    def reference(self, group: int, slots: Int64) -> None:
        """Somebody more needs the state of each of these slots."""
        if self.shelf is None:
            self.pool.slots[group].refs[slots] += 1
            return
        keyed = self.shelf.directory.keyed_in[HOST_TIER][group][slots]
        self.shelf.take_up(group, slots[keyed])
        self.pool.slots[group].refs[slots[~keyed]] += 1

    def unreference(self, group: int, slots: Int64, *, used: bool = False) -> None:
        """Somebody less does: with the last one a slot is cached where it can be found, else EMPTY.

        `used`: it has been read for a sequence, so that it is among the last to be evicted.
        """
        refs = self.pool.slots[group].refs
        refs[slots] -= 1
        gone = slots[refs[slots] == 0]
        if self.shelf is not None:
            keyed = self.shelf.directory.keyed_in[HOST_TIER][group][gone]
            if keyed.any():
                self.shelf.keep(group, gone[keyed], used=used)
            gone = gone[~keyed]
        if len(gone):
            self.pool.give(group, gone)

    def publish(self, node: Node, group: int, slot: int) -> None:
        """The copy of `node` in this referenced slot is whole."""
        assert self.shelf is not None
        columns = self.pool.slots[group]
        if columns.state[slot] == SlotState.FILLING:
            columns.move(np.array([slot], dtype=np.int64), SlotState.READY)
        self.shelf.place(node, group, slot)

    def withdraw(self, node: Node, group: int) -> None:
        """What this tier has of the node cannot be read: it is found no more."""
        slot = node.places[HOST_TIER][group]
        if slot != NO_SLOT and self.shelf is not None:
            self.shelf.lose(group, slot)


class DiskTier:
    """`stored[group]`: (identity, slot) of what an earlier run left, the oldest use first."""

    def __init__(
        self,
        slots: Sequence[int],
        directory: PrefixDirectory | None,
        stored: Sequence[Sequence[tuple[bytes, int]]] = (),
    ) -> None:
        self.slots = tuple(slots)
        self.directory = directory
        self.evicted_blocks = 0
        self._found: tuple[OrderedDict[bytes, int], ...] = tuple(OrderedDict() for _ in slots)
        """By group: what is whole on the disk, the one used longest ago first."""
        self._seen: tuple[dict[int, int], ...] = tuple({} for _ in slots)
        """By group and slot: the last use of its node that its place in that order stands for."""
        self._busy: dict[tuple[int, int], int] = {}
        """Copies that touch a slot."""
        self._homeless: dict[tuple[int, int], None] = {}
        """Slots that are free once their copies have ended."""
        for group, left in enumerate(stored):
            self._found[group].update(left)
        self._free = tuple(
            [slot for slot in range(n - 1, -1, -1) if slot not in taken]
            for n, taken in zip(self.slots, (frozenset(found.values()) for found in self._found), strict=True)
        )

    @property
    def blocks(self) -> list[int]:
        """By group: how many blocks can be found."""
        return [len(found) for found in self._found]

    def find(self, group: int, identity: bytes) -> int | None:
        """Where a block lies; it counts as used."""
        slot = self._found[group].get(identity)
        if slot is not None:
            self._found[group].move_to_end(identity)
        return slot

    def reach(self, identities: Sequence[bytes]) -> int:
        """How many of a text's blocks lead up to, and include, the last that can be found."""
        for index in range(len(identities) - 1, -1, -1):
            if any(identities[index] in found for found in self._found):
                return index + 1
        return 0

    def take(self, group: int) -> int | None:
        """A slot to write in, held; if need be that of the block used longest ago. None while all are being copied."""
        slot = self._room(group)
        if slot is not None:
            self.hold(group, slot)
        return slot

    def _room(self, group: int) -> int | None:
        if self._free[group]:
            return self._free[group].pop()
        oldest = self._oldest(group)
        if oldest is None:
            return None
        slot = self._found[group].pop(oldest)
        self._displace(group, slot)
        self.evicted_blocks += 1
        return slot

    def _oldest(self, group: int) -> bytes | None:
        """Of those that no copy touches. What was used on another tier since it was stored is passed over once."""
        while True:
            oldest = next((i for i, s in self._found[group].items() if (group, s) not in self._busy), None)
            if oldest is None or self.directory is None:
                return oldest
            slot = self._found[group][oldest]
            if not self.directory.keyed_in[DISK_TIER][group][slot]:
                return oldest
            used = self.directory.node_of(group, slot, DISK_TIER).last_used
            if used <= self._seen[group].get(slot, 0):
                return oldest
            self._seen[group][slot] = used
            self._found[group].move_to_end(oldest)

    def appear(self, group: int, identities: Sequence[bytes]) -> None:
        """Another process has left these on a disk that both use: each is found in a slot of this one's own."""
        for identity in identities:
            slot = None if identity in self._found[group] else self._room(group)
            if slot is not None:
                self._found[group][identity] = slot
                self._seen[group][slot] = 0

    def hold(self, group: int, slot: int) -> None:
        """A copy touches this slot."""
        self._busy[group, slot] = self._busy.get((group, slot), 0) + 1

    def let_go(self, group: int, slot: int) -> None:
        """It does no more."""
        left = self._busy.pop((group, slot)) - 1
        if left:
            self._busy[group, slot] = left
        elif (group, slot) in self._homeless:
            del self._homeless[group, slot]
            self._free[group].append(slot)

    def publish(self, node: Node, group: int, slot: int) -> None:
        """The block of `node` is whole in this slot, which is held."""
        before = self._found[group].pop(node.identity, None)
        if before is not None:
            self._give(group, before)
        self._found[group][node.identity] = slot
        self._seen[group][slot] = node.last_used
        self.adopt(node, group)

    def abandon(self, group: int, slot: int) -> None:
        """A held slot that holds nothing whole: free once it is let go."""
        self._homeless[group, slot] = None

    def adopt(self, node: Node, group: int) -> None:
        """The node may be started from what the disk has of it."""
        slot = self._found[group].get(node.identity)
        if slot is not None and self.directory is not None and node.places[DISK_TIER][group] == NO_SLOT:
            self.directory.place(node, group, slot, DISK_TIER)

    def withdraw(self, identity: bytes, group: int) -> None:
        """What the disk has of this text cannot be read: it is found no more."""
        slot = self._found[group].pop(identity, None)
        if slot is not None:
            self._give(group, slot)

    def forget_all(self) -> list[list[int]]:
        """Nothing is found any more. By group: the slots whose records a later run must not find either."""
        gone = []
        for group, found in enumerate(self._found):
            slots = list(found.values())
            found.clear()
            for slot in slots:
                self._give(group, slot)
            gone.append(slots)
        return gone

    def free_slots(self, group: int) -> list[int]:
        """For the invariants."""
        return list(self._free[group])

    def found_slots(self, group: int) -> list[int]:
        """For the invariants."""
        return list(self._found[group].values())

    def busy_slots(self, group: int) -> list[int]:
        """For the invariants."""
        return [slot for g, slot in self._busy if g == group]

    def _give(self, group: int, slot: int) -> None:
        self._displace(group, slot)
        if (group, slot) in self._busy:
            self._homeless[group, slot] = None
        else:
            self._free[group].append(slot)

    def _displace(self, group: int, slot: int) -> None:
        if self.directory is not None and self.directory.keyed_in[DISK_TIER][group][slot]:
            self.directory.displace(group, slot, DISK_TIER)
