"""The cached blocks of one tier: findable, referenced by nobody, and given up when room is needed.

    last reference gone --keep--> cached --take_up--> referenced again
                                    |
                                    +--evict, a leaf--> EMPTY

Owns the eviction policy's offers and, where blocks are saved to a lower tier before they go, which of them are not
saved yet. Slots and references are the pool's, places the directory's.

Invariant: a block is offered if and only if it is cached and, where blocks are of use only together with those
before them, no block after it is kept in this tier. Where nobody waits for copies to the tier below, unsaved ones go
only when there are no others; pinned ones go when there are none of these either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat

import numpy as np

from octavo.errors import PolicyError
from octavo.memory.nodes import NO_SLOT, Node, Run
from octavo.memory.pool import BlockPool
from octavo.memory.prefix import PrefixDirectory
from octavo.memory.slots import SlotState
from octavo.memory.values import Int64
from octavo.policy.eviction import Evictable, Eviction

_READY, _DRAINING = int(SlotState.READY), int(SlotState.DRAINING)


class Shelf:
    def __init__(self, directory: PrefixDirectory, pool: BlockPool, eviction: Eviction, tier: int = 0) -> None:
        self.directory = directory
        self.pool = pool
        self.eviction = eviction
        self.tier = tier
        self._grows = directory.grows
        self.evicted_blocks = 0
        self.frugal = False
        """Give up cached blocks of begun slabs before a free slab is begun: somebody counts on every free slab."""
        self.saves: Callable[[Node, int], bool] | None = None
        """Whether a node's block of a group should be copied to the tier below before it goes."""
        self.save: Callable[[int, int], bool] | None = None
        """Begin to copy this cached block (group, slot), which is then referenced; False when that cannot be."""
        self.unsaved: dict[tuple[int, int], None] = {}
        """(group, slot) of cached blocks that should be copied first, the one used longest ago first."""
        self.withheld: dict[tuple[int, int], None] = {}
        """(group, slot) of pinned blocks that may go when no other may, the one kept longest first."""
        self.spares_unsaved = False
        """Give up what the tier below has before what nobody else has: it is only slower to have again."""
        self.spared: dict[tuple[int, int], None] = {}
        """(group, slot) of unsaved blocks that may go when no saved one may, the one kept longest first."""
        self.broken_pins = 0
        """Pinned blocks given up all the same."""

    # -- references ---------------------------------------------------------------------------

    def keep(self, group: int, slots: Int64, *, used: bool = True) -> None:
        """READY slots at nodes have lost their last reference: they are cached. `used`: by somebody who read them."""
        self.pool.count_cached(group, slots, +1)
        self.directory.uses += used
        uses, tier, grows = self.directory.uses, self.tier, self._grows[group]
        nodes = self.directory.standing_at(group, slots.tolist(), tier)
        if self.saves is not None and len(nodes) > 1:  # the deepest goes first, and is saved first
            nodes.sort(key=lambda one: -one.index)
        for node in nodes:
            if used:
                node.last_used = uses
            if isinstance(node, Run):
                self._offer_run(node)
                continue
            if used:
                node.settled = 0
            if self.saves is not None:
                self._mark_unsaved(node, group, node.places[tier][group])
            if not (grows and node.children_in[tier][group]):
                self._offer(node, group)

    def use(self, group: int, slots: Int64) -> None:
        """Somebody who has read these slots lets them go, and others still reference them."""
        self.directory.uses += 1
        for slot in slots[self.directory.keyed_in[self.tier][group][slots]].tolist():
            self.directory.node_of(group, slot, self.tier).last_used = self.directory.uses

    def take_up(self, group: int, slots: Int64) -> None:
        """Slots at nodes gain a reference: cached ones are not evictable any more, draining ones stay."""
        columns = self.pool.slots[group]
        idle = slots[columns.refs[slots] == 0]
        if self.pool.draining[group]:
            draining = slots[columns.state[slots] == _DRAINING]
            self.pool.undrain(group, draining)
            idle = idle[~np.isin(idle, draining)]
        self.pool.count_cached(group, idle, -1)
        columns.refs[slots] += 1
        for slot in idle.tolist():
            self._forget_unsaved(group, slot)
            self._withdraw(group, slot)

    def place(self, node: Node, group: int, slot: int) -> None:
        """The state of `node` is in `slot` of this tier, which is referenced; the block before it is a leaf no more."""
        self.directory.place(node, group, slot, self.tier)
        if self.directory.grows[group] and node.parent is not None:
            before = node.parent.places[self.tier][group]
            if before != NO_SLOT:
                self._withdraw(group, before)

    def grow(
        self, tail: Node | Run, keys: Sequence[bytes], said: bytes, slots: Sequence[int]
    ) -> tuple[Node | Run, int]:
        """`place` of each block of a run that nobody knows, in one group and one tier (`PrefixDirectory.grow`)."""
        if tail.slots[-1] != NO_SLOT:
            self._withdraw(0, tail.slots[-1])
        return self.directory.grow(tail, keys, said, slots)

    def _withdraw(self, group: int, slot: int) -> None:
        self.withheld.pop((group, slot), None)
        self.spared.pop((group, slot), None)
        self.eviction.withdraw(group, slot)

    def offer_again(self, node: Node) -> None:
        """It has been pinned, or is pinned no more: what is cached of it is offered accordingly."""
        for group, slot in enumerate(node.places[self.tier]):
            columns = self.pool.slots[group]
            if slot != NO_SLOT and columns.refs[slot] == 0 and columns.state[slot] == _READY:
                self._withdraw(group, slot)
                self._offer(node, group)

    def _offer(self, node: Node, group: int) -> None:
        if self.directory.grows[group] and node.children_in[self.tier][group]:
            return
        slot = node.places[self.tier][group]
        if node.pins:
            self.withheld[group, slot] = None
        elif self.spares_unsaved and (group, slot) in self.unsaved:
            self.spared[group, slot] = None
        else:
            self.eviction.offer(Evictable(group, slot, node.last_used, node.index, node.key))

    def _offer_run(self, run: Run) -> None:
        """Its last block may go."""
        self.eviction.offer(Evictable(0, run.slots[-1], run.last_used, run.index + len(run.slots) - 1, run.keys[-1]))

    # -- saving -------------------------------------------------------------------------------

    def _mark_unsaved(self, node: Node, group: int, slot: int) -> None:
        if self.saves is not None and not node.settled & self._bit(group) and self.saves(node, group):
            self.unsaved[group, slot] = None
            self.pool.count_unsaved(group, slot, +1)

    def _forget_unsaved(self, group: int, slot: int) -> None:
        if self.unsaved and (group, slot) in self.unsaved:
            del self.unsaved[group, slot]
            self.pool.count_unsaved(group, slot, -1)

    def settle(self, node: Node, group: int) -> None:
        """A copy of it has been made, or is not to be had: until it is used again, it may go as it is."""
        node.settled |= self._bit(group)
        slot = node.places[self.tier][group]
        self._forget_unsaved(group, slot)
        if (group, slot) in self.spared:
            self._withdraw(group, slot)
            self._offer(node, group)

    def _bit(self, group: int) -> int:
        return 1 << (self.tier * len(self.directory.groups) + group)

    # -- giving up ----------------------------------------------------------------------------

    def evict_for(self, counts: Sequence[int]) -> bool:
        """Give up cached blocks until these can be taken; the pool has said that there are enough.

        False when copies have to end first: a block may not go before one after it that is being copied.
        """
        if self.frugal:
            self._make_room_in_begun_slabs(counts)
        if self.pool.blocks_per_slab == (1,) and not self.unsaved:
            self._evict_together(counts[0] - self.pool.free.count)
        while (lacking := self.pool.slabs_needed(counts) - self.pool.free.count) > 0:
            block = self.choose(counts)
            if block is None:
                return False
            if not self._saved_instead(block, lacking):
                self.evict(block)
        return True

    def _saved_instead(self, block: Evictable, lacking: int = 1) -> bool:
        """Whether a copy of it has been begun, so that another must go. Of those before it, which cannot go before it,
        as many are copied with it as are lacking: else each would wait for the copy of the next."""
        group, slot = block.group, block.slot
        if (group, slot) not in self.unsaved or self.save is None:
            return False
        before = self.directory.node_of(group, slot, self.tier).parent if self.directory.grows[group] else None
        if not self.save(group, slot):
            return False
        for _ in range(lacking - 1):
            if before is None or (group, before.places[self.tier][group]) not in self.unsaved:
                break
            if before.children_in[self.tier][group] > 1 or not self.save(group, before.places[self.tier][group]):
                break
            before = before.parent
        return True

    def _make_room_in_begun_slabs(self, counts: Sequence[int]) -> None:
        for group, per_slab in enumerate(self.pool.blocks_per_slab):
            while per_slab > 1 and counts[group] > self.pool.free_in_begun(group):
                block = self._first(group) or self._reluctantly(group)
                if block is None:
                    break
                if not self._saved_instead(block):
                    self.evict(block)

    def choose(self, counts: Sequence[int]) -> Evictable | None:
        """The block to go: of a group that lacks room where it has one, else the one used longest ago.

        None when all that are cached come before one that is being copied.
        """
        wanting = [g for g, n in enumerate(counts) if n and self.pool.cached[g]]
        for groups in (wanting, range(len(counts))):
            offered = [block for g in groups if (block := self._first(g)) is not None]
            if offered:
                return min(offered, key=lambda block: (block.last_used, block.group))
        return self._reluctantly()

    def _first(self, group: int) -> Evictable | None:
        """Whom the policy chooses, knowing of every use: one on the device is a use of what lies here as well."""
        block = self.eviction.choose(group)
        while block is not None and self.tier:
            node = self.directory.node_of(group, block.slot, self.tier)
            if node.last_used == block.last_used:
                break
            self.eviction.withdraw(group, block.slot)
            self.eviction.offer(Evictable(group, block.slot, node.last_used, node.index, node.key))
            block = self.eviction.choose(group)
        return block

    def _reluctantly(self, of: int | None = None) -> Evictable | None:
        """One of the group, or of any, that is not saved, else one that is pinned: a pin orders who goes, it takes no
        room from those who run."""
        for group, slot in chain(self.spared, self.withheld):
            if of not in (None, group):
                continue
            node = self.directory.node_of(group, slot, self.tier)
            return Evictable(group, slot, node.last_used, node.index, node.key)
        return None

    def evict(self, block: Evictable) -> None:
        columns, slots = self.pool.slots[block.group], np.array([block.slot], dtype=np.int64)
        if columns.refs[block.slot] or not self.directory.keyed_in[self.tier][block.group][block.slot]:
            raise PolicyError(f"eviction {self.eviction.name!r} chose slot {block.slot}, which is not evictable")
        if (block.group, block.slot) in self.withheld:
            del self.withheld[block.group, block.slot]
            self.broken_pins += 1
        self.spared.pop((block.group, block.slot), None)
        self.eviction.gone(block)
        self._forget_unsaved(block.group, block.slot)
        self.pool.count_cached(block.group, slots, -1)
        node = self.directory.displace(block.group, block.slot, self.tier)
        self.pool.give(block.group, slots)
        self.evicted_blocks += 1
        self._offer_again(node.parent, block.group)

    def _offer_again(self, node: Node | None, group: int) -> None:
        """A block after this one has gone: it may be a leaf now."""
        if node is None or not self.directory.grows[group]:
            return
        slot, columns = node.places[self.tier][group], self.pool.slots[group]
        if slot != NO_SLOT and columns.refs[slot] == 0 and columns.state[slot] == _READY:
            self._offer(node, group)

    def _evict_together(self, missing: int) -> None:
        """One group, a block a slab, nothing to save: as many `evict` in turn, whose slots go back at once."""
        if missing <= 0:
            return
        directory, eviction, tier = self.directory, self.eviction, self.tier
        refs, keyed = self.pool.slots[0].refs, directory.keyed_in[tier][0]
        choose = self._first if tier else eviction.choose
        gone: list[int] = []
        while len(gone) < missing and (block := choose(0)) is not None:
            slot = block.slot
            if refs[slot] or not keyed[slot]:
                raise PolicyError(f"eviction {eviction.name!r} chose slot {slot}, which is not evictable")
            eviction.gone(block)
            parent: Node | None
            if directory.plain and (run := directory.run_at(slot)) is not None and not run.held:
                parent = self._evict_end(run, missing - len(gone), gone)
            elif directory.plain:
                parent = self._evict_run(directory.node_of(0, slot), missing - len(gone), gone)
            else:
                parent = directory.displace(0, slot, tier).parent
                gone.append(slot)
            if parent is not None and not parent.children_in[tier][0]:
                self._offer_again(parent, 0)
        if gone:
            slots = np.array(gone[::-1], dtype=np.int64)  # the last one given up is the first one taken
            self.pool.count_cached(0, slots, -1)
            self.pool.give(0, slots)
            self.evicted_blocks += len(gone)

    def _evict_end(self, run: Run, missing: int, gone: list[int]) -> Node | None:
        """`_evict_run` from the end of a run on; None where some of it is left, which is offered."""
        many = min(missing, len(run.slots))
        if many > 1:
            depths = range(run.index + len(run.slots) - 2, -1, -1)
            idle = list(zip(run.slots[-many:-1][::-1], repeat(run.last_used), depths))
            many = 1 + self.eviction.go_next(0, idle)
        before = run.parent
        gone.extend(self.directory.cut(run, many))
        if not run.slots:
            return before
        self._offer_run(run)
        return None

    def _evict_run(self, leaf: Node, missing: int, gone: list[int]) -> Node | None:
        """Give up a block that was chosen and, of those before it, as many as would be chosen right after it.

        Adds their slots to `gone`; returns the block before them, which is to be offered if it is a leaf now.
        """
        columns = self.pool.slots[0]
        refs, state = columns.refs, columns.state
        run, idle, before = [leaf], [], leaf.parent
        while before is not None and len(run) < missing:
            slot = before.slots[0]
            if slot == NO_SLOT or before.pins or before.children_in[0][0] != 1 or refs.item(slot):
                break
            if state.item(slot) != _READY:
                break
            run.append(before)
            idle.append((slot, before.last_used, before.index))
            before = before.parent
        if idle:
            del run[1 + self.eviction.go_next(0, idle) :]
        before = run[-1].parent
        gone.extend(self.directory.shrink(run))
        return before

    def remove(self, group: int, slot: int) -> None:
        """A slot that nobody references is found no more; one that drains is EMPTY once its plan has completed."""
        self.directory.displace(group, slot, self.tier)
        if self.pool.slots[group].state[slot] == _READY:
            self._forget_unsaved(group, slot)
            self._withdraw(group, slot)
            slots = np.array([slot], dtype=np.int64)
            self.pool.count_cached(group, slots, -1)
            self.pool.give(group, slots)

    def lose(self, group: int, slot: int) -> None:
        """What this slot holds cannot be read: it is found no more, be it referenced or not."""
        before = self.directory.node_of(group, slot, self.tier).parent
        if self.pool.slots[group].refs[slot]:
            self.directory.displace(group, slot, self.tier)
        else:
            self.remove(group, slot)
        self._offer_again(before, group)

    def give_up(self, group: int, slot: int) -> None:
        """Nobody will want this block: if it is cached, it goes now."""
        columns = self.pool.slots[group]
        if slot != NO_SLOT and columns.refs[slot] == 0 and columns.state[slot] == _READY:
            node = self.directory.node_of(group, slot, self.tier)
            self.evict(Evictable(group, slot, node.last_used, node.index, node.key))

    def clear(self) -> int:
        """Give up every cached block; returns how many."""
        before = self.evicted_blocks
        for group in range(len(self.pool.slots)):
            while (block := self.eviction.choose(group) or self._reluctantly(group)) is not None:
                self.evict(block)
        return self.evicted_blocks - before

    def forget_all(self) -> list[int]:
        """Nothing kept or held now is found again; returns how many cached blocks of each group that freed."""
        freed = list(self.pool.cached)
        self.clear()
        for group, keyed in enumerate(self.directory.keyed_in[self.tier]):
            for slot in np.flatnonzero(keyed).tolist():
                if self.pool.slots[group].refs[slot]:
                    self.directory.displace(group, slot, self.tier)
                else:
                    self.remove(group, slot)
        return freed
