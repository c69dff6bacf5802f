"""Copies downwards: cached blocks to the host before their room is taken, and on to the disk.

    device: cached, unsaved --save--> referenced by the copy --ended--> cached, saved: may go at once
    host:   cached, unsaved --store-> referenced by the copy --ended--> cached, on disk too

`reserve` never waits for a copy of its own making without saying so: what is being copied is a shortfall that
drains. Both tiers are copied from ahead of need, so much that what was lately asked for at once may go at once. The
host never waits for the disk: where it is full all the same, its oldest block goes as it is. Owns copies that are
queued or under way; when they are worth it is the placement policy's choice.

Invariant: no device slot is free before its copy has ended; a copy is findable only once it is whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np

from octavo.memory.cache import KVCache
from octavo.memory.errands import Errands
from octavo.memory.nodes import NO_SLOT, Node
from octavo.memory.prefix import PrefixDirectory
from octavo.memory.sharing import Sharing
from octavo.memory.tiers import DISK_TIER, HOST_TIER, DiskTier, HostTier
from octavo.memory.transfers import Ended
from octavo.memory.values import Shortfall
from octavo.policy.placement import Bargain, Placement

_AHEAD = 16
"""One part in so many of the device, at least, is kept ready to go, so that few have to wait for a copy."""
_HOST_AHEAD = 4
"""The same of the host, which nobody may wait for."""
_LATELY = 64
"""Of the last so many times that a tier was asked for room, the largest says what may be asked for next."""
_DEMOTE_BYTES, _STORE_BYTES = 32 << 20, 8 << 20
"""Of one order to the host, and to the disk: who waits for a copy upwards waits for that much at most."""
_STORE_SECONDS = 1.0
"""Of the disk's time, as fast as it has been, are under way at most: none of it may be late."""


@dataclass(slots=True, eq=False)
class _Copy:
    group: int
    node: Node
    source: int
    target: int


class Saving:
    def __init__(
        self,
        cache: KVCache,
        sharing: Sharing,
        host: HostTier,
        disk: DiskTier | None,
        placement: Placement,
        errands: Errands,
    ) -> None:
        self._cache = cache
        self._shelf = sharing.shelf
        self._directory: PrefixDirectory = sharing.directory
        self._host = host
        self._disk = disk
        self._placement = placement
        self._errands = errands
        self._queued: list[_Copy] = []
        self._moving: dict[_Copy, None] = {}
        """To the host: queued or under way."""
        self._storing: dict[_Copy, None] = {}
        self._lacked: deque[int] = deque(maxlen=_LATELY)
        """Slabs of the device that were asked for at once, where copies had to be made for them."""
        self._taken: deque[int] = deque(maxlen=_LATELY)
        """Blocks of the host that were taken between two steps."""
        self._taken_before = 0
        self.erase: list[tuple[int, int]] = []
        """(group, disk slot) of records that a later run must not find."""
        if placement.saves:
            self._shelf.saves = self._saves
            self._shelf.save = self._save
            cache.make_way = self._make_way
            if placement.at_once:
                sharing.filled = self._filled
            if disk is not None and host.shelf is not None:
                host.shelf.saves, host.shelf.spares_unsaved = self._stores, True

    # -- what is worth it -----------------------------------------------------------------------

    def _bargain(self, node: Node, group: int, *, disk: bool) -> Bargain:
        size, layout = self._directory.space.block_tokens, self._cache.layout.groups[group]
        first = node.index * size
        return Bargain(first, first + size, layout.block_bytes, layout.block_bytes if disk else 0)

    def _saves(self, node: Node, group: int) -> bool:
        if node.places[HOST_TIER][group] != NO_SLOT or not self._errands.answers("arenas"):
            return False
        if self._disk is not None and node.places[DISK_TIER][group] != NO_SLOT:
            return False
        return self._placement.worth_saving(self._bargain(node, group, disk=False), self._errands.rates)

    def _stores(self, node: Node, group: int) -> bool:
        if node.places[DISK_TIER][group] != NO_SLOT or not self._errands.answers("disk"):
            return False
        return self._placement.worth_saving(self._bargain(node, group, disk=True), self._errands.rates)

    # -- to the host ----------------------------------------------------------------------------

    def _filled(self, node: Node, group: int) -> None:
        """A block is full: under `write_through` it is copied at once."""
        if self._saves(node, group):
            self._save(group, node.slots[group])

    def _save(self, group: int, slot: int) -> bool:
        """Begin to copy a block; it is referenced until that has ended. False when it cannot be."""
        if not self._errands.answers("arenas"):
            return False
        target = self._host.take_one(group)
        if target is None:
            return False
        self._begin(group, slot, target)
        return True

    def _begin(self, group: int, slot: int, target: int) -> None:
        copy = _Copy(group, self._directory.node_of(group, slot), slot, target)
        self._shelf.take_up(group, np.array([slot], dtype=np.int64))
        self._queued.append(copy)
        self._moving[copy] = None

    def _make_way(self, counts: Sequence[int], short: Shortfall) -> bool:
        """Somebody lacks room that unsaved blocks take. Whether some of them may go now after all."""
        self._lacked.append(short.needed)
        missing = short.needed - short.free - short.evictable
        blocks = missing * max(self._cache.pool.blocks_per_slab)
        if self._errands.answers("arenas"):
            blocks -= sum(map(self._frees, self._moving))
        changed = False
        for group, slot in self._save_first(blocks):
            self._shelf.settle(self._directory.node_of(group, slot), group)
            changed = True
        return changed

    def _save_first(self, most: int) -> list[tuple[int, int]]:
        """Begin to copy the first so many unsaved blocks; returns those of them for which that cannot be."""
        blocks = list(islice(self._shelf.unsaved, max(0, most)))
        counts = [0] * len(self._cache.tables)
        for group, _ in blocks:
            counts[group] += 1
        room = self._host.take(counts) if blocks and self._errands.answers("arenas") else None
        if room is None:  # as many as can be, one by one
            return [(group, slot) for group, slot in blocks if not self._save(group, slot)]
        left = [iter(slots.tolist()) for slots in room]
        for group, slot in blocks:
            self._begin(group, slot, next(left[group]))
        return []

    def _frees(self, copy: _Copy) -> bool:
        return int(self._cache.pool.slots[copy.group].refs[copy.source]) == 1

    @property
    def frees_soon(self) -> bool:
        """Whether room comes back when copies under way end."""
        return self._errands.answers("arenas") and any(map(self._frees, self._moving))

    def ahead(self) -> None:
        """Copy what will have to go soon, while it need not go yet."""
        if self._shelf.unsaved:
            self._save_first(-self._spare)
        if self._disk is not None and self._host.shelf is not None:
            if self._host.taken > self._taken_before:
                self._taken.append(self._host.taken - self._taken_before)
                self._taken_before = self._host.taken
            if self._host.shelf.unsaved and self._errands.answers("disk"):
                self._store_ahead(self._disk, self._to_store())

    def _to_store(self) -> list[tuple[int, int]]:
        """(group, slot) of what should be on the disk before its room on the host is needed, the first to go first."""
        shelf, pool = self._host.shelf, self._host.pool
        assert shelf is not None
        wanted = len(shelf.unsaved)
        if not self._placement.at_once:
            # What comes while these are written has to find room too.
            lately = min(2 * max(self._taken, default=0), pool.slabs)
            ready = pool.free.count + sum(pool.cached) - wanted + len(self._storing)
            wanted = min(wanted, max(-(-pool.slabs // _HOST_AHEAD), lately) - ready)
        sizes = [group.block_bytes for group in self._cache.layout.groups]
        timeout = self._errands.timeout_s
        patience = _STORE_SECONDS if timeout is None else min(_STORE_SECONDS, timeout / 4)
        # Copies hold their sources: half of the host is left to whoever needs it meanwhile.
        room = min(
            max(_STORE_BYTES, int(self._errands.rates.bytes_a_second["store"] * patience)),
            pool.slabs * pool.layout.slab_bytes // 2,
        ) - sum(sizes[copy.group] for copy in self._storing)
        found: list[tuple[int, int]] = []
        for group, slot in islice(shelf.unsaved, max(0, wanted)):
            if room < sizes[group] and (found or self._storing):
                break
            room -= sizes[group]
            found.append((group, slot))
        return found

    def _store_ahead(self, disk: DiskTier, blocks: Sequence[tuple[int, int]]) -> None:
        copies = []
        for group, slot in blocks:
            target = disk.take(group)
            if target is None:
                break
            node = self._directory.node_of(group, slot, HOST_TIER)
            self._host.reference(group, np.array([slot], dtype=np.int64))
            copy = _Copy(group, node, slot, target)
            self._storing[copy] = None
            copies.append(copy)
        for part in self._parts(copies, _STORE_BYTES):
            self._errands.ask(
                "store", part[0].group, [(copy.source, copy.target) for copy in part], partial(self._stored, part),
                keys=tuple(copy.node.identity for copy in part),
            )  # fmt: skip

    @property
    def slack(self) -> int:
        """Blocks of the device that may be taken, one by one, before anything is copied; below 0: it is due now."""
        pool = self._cache.pool
        if self._disk is not None and self._host.shelf is not None:
            stores = self._host.shelf.unsaved and self._errands.answers("disk")
            if self._host.taken > self._taken_before or (stores and self._to_store()):
                return -1
        if not self._shelf.unsaved:
            return pool.available_slabs
        return min(pool.free.count, self._spare)

    @property
    def _spare(self) -> int:
        """Slabs of the device that could be had at once, or soon, less those that should be; below 0: so many lack."""
        pool = self._cache.pool
        lately = min(max(self._lacked, default=0), pool.slabs // 2, self._host.pool.slabs // 2)
        ready = pool.free.count + sum(pool.cached) - len(self._shelf.unsaved) + sum(map(self._frees, self._moving))
        return ready - max(-(-pool.slabs // _AHEAD), lately)

    # -- orders and their ends --------------------------------------------------------------------

    @property
    def queued(self) -> bool:
        """Whether copies wait for `give_orders`."""
        return bool(self._queued)

    def give_orders(self) -> None:
        """What was queued since the last call, in orders of one group each."""
        queued, self._queued = self._queued, []
        for part in self._parts(queued, _DEMOTE_BYTES):
            self._errands.ask(
                "demote", part[0].group, [(copy.source, copy.target) for copy in part], partial(self._saved, part)
            )

    def _parts(self, copies: Sequence[_Copy], most_bytes: int) -> Iterator[list[_Copy]]:
        """By group, and of so many bytes, or one block, at most."""
        for group, layout in enumerate(self._cache.layout.groups):
            here, most = [copy for copy in copies if copy.group == group], max(1, most_bytes // layout.block_bytes)
            for first in range(0, len(here), most):
                yield here[first : first + most]

    def _saved(self, copies: list[_Copy], ended: Ended) -> None:
        for copy, reason in zip(copies, ended.reasons, strict=True):
            del self._moving[copy]
            node, group = copy.node, copy.group
            stands = self._directory.lives(node) and node.slots[group] == copy.source
            if not reason and stands and node.places[HOST_TIER][group] == NO_SLOT:
                self._host.publish(node, group, copy.target)
            self._shelf.settle(node, group)
        group = copies[0].group
        self._host.unreference(group, np.array([copy.target for copy in copies], dtype=np.int64))
        self._cache.unreference(group, np.array([copy.source for copy in copies], dtype=np.int64), -1, used=False)

    def _stored(self, copies: list[_Copy], ended: Ended) -> None:
        assert self._disk is not None
        assert self._host.shelf is not None
        for copy, reason in zip(copies, ended.reasons, strict=True):
            del self._storing[copy]
            node, group = copy.node, copy.group
            if reason:
                self._disk.abandon(group, copy.target)
            elif self._directory.lives(node):
                self._disk.publish(node, group, copy.target)
            else:
                self._disk.abandon(group, copy.target)
                self.erase.append((group, copy.target))
            self._disk.let_go(group, copy.target)
            self._host.shelf.settle(node, group)
            self._host.unreference(group, np.array([copy.source], dtype=np.int64))

    def held(self) -> list[tuple[int, int, int]]:
        """(tier, group, slot) of what copies touch, for the invariants."""
        moving = [(tier, c.group, slot) for c in self._moving for tier, slot in ((0, c.source), (HOST_TIER, c.target))]
        storing = [
            (tier, c.group, slot)
            for c in self._storing
            for tier, slot in ((HOST_TIER, c.source), (DISK_TIER, c.target))
        ]
        return moving + storing
