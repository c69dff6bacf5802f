"""Slots of all groups on one tier, cut from shared slabs.

Owns which slab belongs to which group and which slots of it are free. A group takes a free slot
from its fullest slab first, then a free slab; a slab whose last slot is freed goes back to all.
Does not know sequences: `KVCache` says who holds what. Slots that are kept for reuse alone are counted as
`cached`: they can be had, but somebody has to choose which of them go.

Invariant: every slab is either free, or owned by one group with at least one slot not EMPTY.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.memory.free import FreeRuns, FreeSlabs, FreeStack
from octavo.memory.layout import Layout
from octavo.memory.slots import GroupSlots, SlotState
from octavo.memory.values import Int64, Shortfall

NO_OWNER = -1
_DRAINING = int(SlotState.DRAINING)


class BlockPool:
    def __init__(self, layout: Layout, slabs: int, *, contiguous: bool = False) -> None:
        self.layout = layout
        self.slabs = slabs
        self.contiguous = contiguous
        self.blocks_per_slab = tuple(g.blocks_per_slab for g in layout.groups)
        self.slots = tuple(GroupSlots(slabs * n) for n in self.blocks_per_slab)
        self.owner = np.full(slabs, NO_OWNER, dtype=np.int8)
        self.used = np.zeros(slabs, dtype=np.int32)
        """Slots of a slab that are not EMPTY."""
        self.free: FreeSlabs = FreeRuns(slabs) if contiguous else FreeStack(slabs)
        self.draining = [0] * len(self.slots)
        """DRAINING slots, by group."""
        self.cached = [0] * len(self.slots)
        """READY slots that nobody references, by group."""
        self.unsaved = [0] * len(self.slots)
        """Of these, by group, those that a copy must be made of before they go."""
        self._cached_in = np.zeros(slabs, dtype=np.int32)
        self._unsaved_in = np.zeros(slabs, dtype=np.int32)
        # Slabs with a free slot, by how full they are; a dict keeps its insertion order.
        self._partial: tuple[tuple[dict[int, None], ...], ...] = tuple(
            tuple({} for _ in range(n)) for n in self.blocks_per_slab
        )
        self._partial_free = [0] * len(self.slots)
        self._plain = self.blocks_per_slab == (1,) and not contiguous
        """One group, a block a slab, any free one will do: then blocks and slabs are counted alike."""

    def available(self, group: int) -> int:
        """Blocks of this group that could be taken now, if need be by giving up cached ones."""
        free, partial_free = self._without_cached() if any(self.cached) else (self.free.count, self._partial_free)
        return partial_free[group] + self.blocks_per_slab[group] * free

    def free_in_begun(self, group: int) -> int:
        """Free slots of slabs that the group has begun."""
        return self._partial_free[group]

    def slabs_needed(self, counts: Sequence[int]) -> int:
        """Free slabs that taking `counts[g]` blocks of each group g would consume."""
        if self._plain:
            return counts[0]
        return _slabs_beyond(counts, self._partial_free, self.blocks_per_slab)

    def shortfall(self, counts: Sequence[int]) -> Shortfall | None:
        """None when these blocks can be had, if need be by giving up cached ones that may go at once."""
        if self._plain and counts[0] <= self.free.count + self.cached[0] - self.unsaved[0]:
            return None
        needed = self.slabs_needed(counts)
        run = self.free.largest_run() if self.contiguous else None
        # Two groups of a contiguous pool ask for one run that holds both: sufficient, and simple.
        if needed <= (self.free.count if run is None else run):
            return None
        evictable = 0
        if any(self.cached):
            free, partial_free = self._without_cached(at_once=True)
            needed, evictable = _slabs_beyond(counts, partial_free, self.blocks_per_slab), free - self.free.count
            if needed <= free:
                return None
        draining = self._slabs_from_draining(counts, needed)
        if any(self.unsaved):
            draining += self._without_cached()[0] - self.free.count - evictable
        return Shortfall(needed, self.free.count, evictable, draining=draining, largest_run=run)

    def room_for(self, counts: Sequence[int]) -> tuple[int, int]:
        """(slabs needed, slabs to be had) for `counts[g]` blocks of each group g, cached blocks given up."""
        if self._plain:
            return counts[0], self.free.count + self.cached[0]
        free, partial_free = self._without_cached() if any(self.cached) else (self.free.count, self._partial_free)
        return _slabs_beyond(counts, partial_free, self.blocks_per_slab), free

    @property
    def available_slabs(self) -> int:
        """Free slabs, and those that hold nothing but cached blocks."""
        if self._plain:
            return self.free.count + self.cached[0]
        return self._without_cached()[0] if any(self.cached) else self.free.count

    def _without_cached(self, *, at_once: bool = False) -> tuple[int, list[int]]:
        """Free slabs, and free slots in begun ones, once cached blocks are given up: all, or those that may go now."""
        if max(self.blocks_per_slab) == 1:
            return self.free.count + sum(self.cached) - at_once * sum(self.unsaved), self._partial_free
        going = self._cached_in - self._unsaved_in if at_once else self._cached_in
        emptied = (going > 0) & (going == self.used)
        partial_free = list(self._partial_free)
        for group, per_slab in enumerate(self.blocks_per_slab):
            owned = self.owner == group
            partial_free[group] += int(going[owned & ~emptied].sum())
            partial_free[group] -= int((per_slab - self.used[owned & emptied]).sum())
        return self.free.count + int(np.count_nonzero(emptied)), partial_free

    def only_cached(self) -> npt.NDArray[np.bool_]:
        """By slab: whether it holds nothing but cached blocks."""
        only: npt.NDArray[np.bool_] = (self._cached_in > 0) & (self._cached_in == self.used)
        return only

    def count_cached(self, group: int, slots: Int64, change: int) -> None:
        """These READY slots have lost their last reference (+1), or gained their first or are to go (-1)."""
        self.cached[group] += change * len(slots)
        if len(slots) == 1:
            self._cached_in[int(slots[0]) // self.blocks_per_slab[group]] += change
            return
        if self.blocks_per_slab[group] == 1:  # none comes twice
            self._cached_in[slots] += change
            return
        np.add.at(self._cached_in, slots // self.blocks_per_slab[group], change)

    def count_unsaved(self, group: int, slot: int, change: int) -> None:
        """A cached slot must be copied before it goes (+1), or need not any more (-1)."""
        self.unsaved[group] += change
        self._unsaved_in[slot // self.blocks_per_slab[group]] += change

    def _slabs_from_draining(self, counts: Sequence[int], needed: int) -> int:
        """By how many slabs the need shrinks or the free ones grow once all DRAINING slots are EMPTY."""
        if not any(self.draining):
            return 0
        gained = 0
        partial_then = list(self._partial_free)
        for group, per_slab in enumerate(self.blocks_per_slab):
            draining = (self.slots[group].state == SlotState.DRAINING).reshape(-1, per_slab).sum(axis=1)
            emptied = (draining > 0) & (draining + self._cached_in == self.used)
            gained += int(np.count_nonzero(emptied))
            if not self.contiguous:
                lost = int((per_slab - self.used[emptied]).sum())
                partial_then[group] += int(draining[~emptied].sum()) - lost
        return gained + needed - _slabs_beyond(counts, partial_then, self.blocks_per_slab)

    def take(self, counts: Sequence[int]) -> tuple[Int64, ...] | Shortfall:
        """`counts[g]` slots of each group, moved EMPTY -> FILLING with one reference; all or nothing.

        Whoever keeps cached blocks has given up enough of them before.
        """
        if self._plain and counts[0] <= self.free.count:
            return (self._take(0, counts[0]),)
        short = self.shortfall(counts)
        if short is not None:
            return short
        return tuple([self._take(group, n) for group, n in enumerate(counts)])

    def _take(self, group: int, n: int) -> Int64:
        if n == 0:
            return np.empty(0, dtype=np.int64)
        per_slab = self.blocks_per_slab[group]
        columns = self.slots[group]
        if per_slab == 1 or self.contiguous:
            slabs = self.free.take(-(-n // per_slab))
            slots = slabs if per_slab == 1 else np.arange(slabs[0] * per_slab, slabs[0] * per_slab + n, dtype=np.int64)
            self.owner[slabs] = group
            self.used[slabs] = 1 if per_slab == 1 else np.minimum(per_slab, n - np.arange(len(slabs)) * per_slab)
            columns.move(slots, SlotState.FILLING)
        else:
            slots = np.empty(n, dtype=np.int64)
            for i in range(n):
                slots[i] = self._take_one(group)
        columns.refs[slots] = 1
        return slots

    def _take_one(self, group: int) -> int:
        per_slab = self.blocks_per_slab[group]
        buckets = self._partial[group]
        for used in range(per_slab - 1, 0, -1):
            if buckets[used]:
                slab = next(iter(buckets[used]))
                del buckets[used][slab]
                break
        else:
            slab, used = int(self.free.take(1)[0]), 0
            self.owner[slab] = group
            self._partial_free[group] += per_slab
        first = slab * per_slab
        slot = first + int(np.argmax(self.slots[group].state[first : first + per_slab] == SlotState.EMPTY))
        self.slots[group].move(np.array([slot], dtype=np.int64), SlotState.FILLING)
        self._partial_free[group] -= 1
        self.used[slab] = used + 1
        if used + 1 < per_slab:
            buckets[used + 1][slab] = None
        return slot

    def drain(self, group: int, slots: Int64) -> None:
        """Unreferenced slots -> DRAINING: plans up to each one's `last_plan` may still touch it."""
        self.slots[group].move(slots, SlotState.DRAINING)
        self.draining[group] += len(slots)

    def undrain(self, group: int, slots: Int64) -> None:
        """DRAINING slots whose state is wanted after all -> READY."""
        self.slots[group].move(slots, SlotState.READY)
        self.draining[group] -= len(slots)

    def give(self, group: int, slots: Int64) -> None:
        """Unreferenced slots -> EMPTY; a slab left without a slot in use is free for every group."""
        columns = self.slots[group]
        if len(slots) == 1:  # cached blocks are given up one by one, very many of them
            slot = int(slots[0])
            self.draining[group] -= columns.move_one(slot, SlotState.EMPTY) == _DRAINING
            if self.blocks_per_slab[group] == 1:
                self.used[slot] = 0
                self.owner[slot] = NO_OWNER
                self.free.give(slots)
            else:
                self._give_one(group, slot // self.blocks_per_slab[group])
            return
        if self.draining[group]:
            self.draining[group] -= int(np.count_nonzero(columns.state[slots] == _DRAINING))
        columns.move(slots, SlotState.EMPTY)
        per_slab = self.blocks_per_slab[group]
        if per_slab == 1:
            self.used[slots] = 0
            self.owner[slots] = NO_OWNER
            self.free.give(slots)
            return
        for slab in (slots // per_slab).tolist():
            self._give_one(group, slab)

    def _give_one(self, group: int, slab: int) -> None:
        per_slab = self.blocks_per_slab[group]
        used = int(self.used[slab])
        self.used[slab] = used - 1
        if not self.contiguous:
            if used < per_slab:
                del self._partial[group][used][slab]
            self._partial_free[group] += 1
        if used > 1:
            if not self.contiguous:
                self._partial[group][used - 1][slab] = None
            return
        if not self.contiguous:
            self._partial_free[group] -= per_slab
        self.owner[slab] = NO_OWNER
        self.free.give(np.array([slab], dtype=np.int64))


def _slabs_beyond(counts: Sequence[int], partial_free: Sequence[int], per_slab: Sequence[int]) -> int:
    needed = 0
    for n, have, per in zip(counts, partial_free, per_slab, strict=True):
        if n > have:
            needed += -(-(n - have) // per)
    return needed
