"""What lies where below the device: `HostTier`, an arena of the device's layout, and `DiskTier`, slots by group.

    device slot --demote--> host slot --store--> disk slot
                <-promote--           <--load---

Own slots and who holds them; the copies between tiers, and when they are made, are `tiering`'s. Host blocks are
those of the prefix directory, of suspended sequences, and of copies under way. Disk blocks are found by the identity
of their text alone, so that those of an earlier run serve too.

Invariant: a slot is handed out at most once until it is given back, and never while a copy touches it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.errors import PolicyError
from octavo.memory.layout import Layout
from octavo.memory.nodes import NO_SLOT, Node
from octavo.memory.pool import BlockPool
from octavo.memory.prefix import PrefixDirectory
from octavo.memory.shelf import Shelf
from octavo.memory.slots import SlotState
from octavo.memory.values import Int64, Shortfall
from octavo.policy.eviction import Evictable, Eviction

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
    """`stored[group]`: (identity, slot) of what an earlier run left, the oldest use first.

    What a node stands for goes by the policy, and a leaf only. What an earlier run left and nobody has asked for since
    has none: where it lies in a text is not known, and it goes before all else, the oldest use first.
    """

    def __init__(
        self,
        slots: Sequence[int],
        directory: PrefixDirectory,
        eviction: Eviction,
        stored: Sequence[Sequence[tuple[bytes, int]]] = (),
    ) -> None:
        self.slots = tuple(slots)
        self.directory = directory
        self.eviction = eviction
        self.evicted_blocks = 0
        self._found: tuple[dict[bytes, int], ...] = tuple({} for _ in slots)
        """By group: what is whole on the disk."""
        self._left: tuple[dict[bytes, None], ...] = tuple({} for _ in slots)
        """By group: of these, what an earlier run left and no node stands for, the oldest use first."""
        self._said: tuple[dict[int, bytes], ...] = tuple({} for _ in slots)
        """By group and slot: what is found there."""
        self._used: tuple[dict[int, int], ...] = tuple({} for _ in slots)
        """By group and slot: its last use, as the policy was told."""
        self._busy: dict[tuple[int, int], int] = {}
        """Copies that touch a slot."""
        self._homeless: dict[tuple[int, int], None] = {}
        """Slots that are free once their copies have ended."""
        for group, found in enumerate(stored):
            for identity, slot in found:
                self._found[group][identity] = slot
                self._said[group][slot] = identity
                self._left[group][identity] = None
        self._free = tuple(
            [slot for slot in range(n - 1, -1, -1) if slot not in said]
            for n, said in zip(self.slots, self._said, strict=True)
        )

    @property
    def blocks(self) -> list[int]:
        """By group: how many blocks can be found."""
        return [len(found) for found in self._found]

    def use(self, group: int, identity: bytes) -> None:
        """Somebody reads it, later than all that was used so far."""
        slot = self._found[group].get(identity)
        if slot is None:
            return
        self.directory.uses += 1
        self._used[group][slot] = self.directory.uses
        if identity in self._left[group]:
            del self._left[group][identity]
            self._left[group][identity] = None
        self._offer(group, slot)

    def reach(self, identities: Sequence[bytes]) -> int:
        """How many of a text's blocks lead up to, and include, the last that can be found."""
        for index in range(len(identities) - 1, -1, -1):
            if any(identities[index] in found for found in self._found):
                return index + 1
        return 0

    def take(self, group: int) -> int | None:
        """A slot to write in, held; if need be that of a block that goes. None while none may, for copies."""
        slot = self._room(group)
        if slot is not None:
            self.hold(group, slot)
        return slot

    def _room(self, group: int) -> int | None:
        if self._free[group]:
            return self._free[group].pop()
        slot = self._first(group)
        if slot is None:
            return None
        self._lose(group, self._said[group][slot])
        self.evicted_blocks += 1
        return slot

    def _first(self, group: int) -> int | None:
        """Who goes: the policy's choice, which knows of every use, one on another tier as well."""
        for identity in self._left[group]:
            if (group, self._found[group][identity]) not in self._busy:
                return self._found[group][identity]
        while (block := self.eviction.choose(group)) is not None:
            slot = block.slot
            if not self._may_go(group, slot):
                raise PolicyError(f"eviction {self.eviction.name!r} chose slot {slot} of the disk, which may not go")
            if self._last_use(group, slot) == block.last_used:
                self.eviction.gone(block)
                return slot
            self._offer(group, slot)
        return None

    def _last_use(self, group: int, slot: int) -> int:
        on_any_tier = self.directory.node_of(group, slot, DISK_TIER).last_used if self._stands(group, slot) else 0
        return max(on_any_tier, self._used[group].get(slot, 0))

    def _may_go(self, group: int, slot: int) -> bool:
        """Whether it is found, touched by no copy, and of use to nothing after it."""
        if slot not in self._said[group] or (group, slot) in self._busy:
            return False
        if not self.directory.grows[group] or not self._stands(group, slot):
            return True
        return not self.directory.node_of(group, slot, DISK_TIER).children_in[DISK_TIER][group]

    def _stands(self, group: int, slot: int) -> bool:
        """Whether a node stands for what is there."""
        return bool(self.directory.keyed_in[DISK_TIER][group][slot])

    def _offer(self, group: int, slot: int) -> None:
        """To the policy, anew, if it may go."""
        self.eviction.withdraw(group, slot)
        identity = self._said[group].get(slot)
        if identity is None or identity in self._left[group] or not self._may_go(group, slot):
            return
        used = self._last_use(group, slot)
        index = self.directory.node_of(group, slot, DISK_TIER).index if self._stands(group, slot) else 0
        self.eviction.offer(Evictable(group, slot, used, index, identity))

    def _offer_before(self, node: Node, group: int) -> None:
        """What comes before this node may go, or may not any more."""
        if node.parent is not None and (slot := node.parent.places[DISK_TIER][group]) != NO_SLOT:
            self._offer(group, slot)

    def appear(self, group: int, identities: Sequence[bytes]) -> None:
        """Another process has left these on a disk that both use: each is found in a slot of this one's own."""
        for identity in identities:
            slot = None if identity in self._found[group] else self._room(group)
            if slot is not None:
                self.directory.uses += 1
                self._find(group, identity, slot, self.directory.uses)
                self._offer(group, slot)

    def hold(self, group: int, slot: int) -> None:
        """A copy touches this slot."""
        self._busy[group, slot] = self._busy.get((group, slot), 0) + 1
        self.eviction.withdraw(group, slot)

    def let_go(self, group: int, slot: int) -> None:
        """It does no more."""
        left = self._busy.pop((group, slot)) - 1
        if left:
            self._busy[group, slot] = left
        elif (group, slot) in self._homeless:
            del self._homeless[group, slot]
            self._free[group].append(slot)
        else:
            self._offer(group, slot)

    def publish(self, node: Node, group: int, slot: int) -> None:
        """The block of `node` is whole in this slot, which is held."""
        self.withdraw(node.identity, group)
        self._find(group, node.identity, slot, node.last_used)
        self.adopt(node, group)

    def abandon(self, group: int, slot: int) -> None:
        """A held slot that holds nothing whole: free once it is let go."""
        self._homeless[group, slot] = None

    def adopt(self, node: Node, group: int) -> None:
        """The node may be started from what the disk has of it."""
        slot = self._found[group].get(node.identity)
        if slot is not None and node.places[DISK_TIER][group] == NO_SLOT:
            self._left[group].pop(node.identity, None)
            self.directory.place(node, group, slot, DISK_TIER)
            self._offer(group, slot)
            self._offer_before(node, group)

    def withdraw(self, identity: bytes, group: int) -> None:
        """What the disk has of this text cannot be read: it is found no more."""
        slot = self._lose(group, identity)
        if slot is None:
            return
        self.eviction.withdraw(group, slot)
        if (group, slot) in self._busy:
            self._homeless[group, slot] = None
        else:
            self._free[group].append(slot)

    def forget_all(self) -> list[list[int]]:
        """Nothing is found any more. By group: the slots whose records a later run must not find either."""
        gone = []
        for group, found in enumerate(self._found):
            gone.append(list(found.values()))
            for identity in list(found):
                self.withdraw(identity, group)
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

    def _find(self, group: int, identity: bytes, slot: int, used: int) -> None:
        self._found[group][identity] = slot
        self._said[group][slot] = identity
        self._used[group][slot] = used

    def _lose(self, group: int, identity: bytes) -> int | None:
        """It is found no more; the slot that it was found in, which is nobody's then."""
        slot = self._found[group].pop(identity, None)
        if slot is None:
            return None
        self._left[group].pop(identity, None)
        self._used[group].pop(slot, None)
        del self._said[group][slot]
        if self._stands(group, slot):
            self._offer_before(self.directory.displace(group, slot, DISK_TIER), group)
        return slot
