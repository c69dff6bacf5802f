"""Copies upwards: a sequence is seated at once, with room for all it needs, and waits for its own blocks alone.

    hold    what it starts from is referenced in its tier, so that nothing evicts it
    begin   disk --stage--> host --promote--> slots of the row's own table
    ended   all arrived: blocks that others may share stand at their nodes, and the row computes on
            one did not: the row starts over without it; the other copies end in their own time

Owns loads under way. Invariant: a block is found on the device only once every byte of the whole load has arrived;
until its copies have ended a slot is referenced by the load, whatever became of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.errors import InvariantViolation
from octavo.memory.cache import KVCache
from octavo.memory.errands import Errands
from octavo.memory.nodes import NO_SLOT, Node
from octavo.memory.slots import SlotState
from octavo.memory.tiers import DISK_TIER, HOST_TIER, DiskTier, HostTier
from octavo.memory.transfers import Ended

STAGED_BYTES = 32 << 20
"""Of a group, read from the disk by one order: while the next is read, these go on to the device."""


@dataclass(slots=True, eq=False)
class Wanted:
    """One block that a row needs and the device lacks."""

    group: int
    index: int
    """Where it belongs in the row's table."""
    node: Node | None
    """None: the state of a suspended sequence, which nobody else may find."""
    shared: bool
    """Whether others may share it once it is there; else the row writes into it."""
    host: int = NO_SLOT
    """Held host slot; of a block on disk, where it is staged."""
    disk: int = NO_SLOT
    """Held disk slot it is read from."""
    target: int = NO_SLOT
    """Device slot."""
    full: bool = False
    """Whether all its positions are computed: nobody writes it again."""
    arrived: bool = False


@dataclass(slots=True, eq=False)
class _Load:
    row: int
    wanted: list[Wanted]
    left: int
    """Blocks whose copies have not all ended."""
    orders: list[int] = field(default_factory=list)
    given_up: bool = False
    """The row has left, or was told to start over."""


@dataclass(slots=True)
class Arrivals:
    """What loads have come to since this was last asked."""

    rows: list[int] = field(default_factory=list)
    """Everything is there."""
    lost: list[tuple[int, str]] = field(default_factory=list)
    """(row, reason): something is not."""
    misses: list[tuple[str, str]] = field(default_factory=list)
    """(tier, reason) of each block that could not be read."""


class Loading:
    def __init__(self, cache: KVCache, host: HostTier, disk: DiskTier | None, errands: Errands) -> None:
        self._cache = cache
        self._host = host
        self._disk = disk
        self._errands = errands
        self._loads: dict[int, _Load] = {}
        """By row."""
        self._left_behind: dict[_Load, None] = {}
        """Given up, with copies that have not ended."""
        self._arrivals = Arrivals()

    def __contains__(self, row: object) -> bool:
        return row in self._loads

    def __len__(self) -> int:
        """Rows that wait for blocks."""
        return len(self._loads)

    def take_arrivals(self) -> Arrivals:
        arrivals, self._arrivals = self._arrivals, Arrivals()
        return arrivals

    # -- before a row is seated -------------------------------------------------------------------

    def hold(self, wanted: Sequence[Wanted]) -> bool:
        """Reference what is to be copied, and room to stage what is on disk; False, and nothing held, without that."""
        for one in wanted:
            if one.node is None:
                continue  # a suspension's: held already
            one.host = one.node.places[HOST_TIER][one.group]
            if one.host != NO_SLOT:
                continue
            one.disk = NO_SLOT if self._disk is None else one.node.places[DISK_TIER][one.group]
            if one.disk == NO_SLOT:
                raise InvariantViolation("kept-is-findable", f"node {one.node.number} is wanted and kept nowhere")
            if self._disk is not None:
                self._disk.hold(one.group, one.disk)
        for group in range(len(self._cache.tables)):
            here = [one.host for one in wanted if one.group == group and one.node is not None and one.host != NO_SLOT]
            self._host.reference(group, np.array(here, dtype=np.int64))
        for one in reversed(wanted):  # the beginning is the last to go: what follows it is of no use without it
            if one.disk != NO_SLOT and one.node is not None and self._disk is not None:
                self._disk.use(one.group, one.node.identity)
        staged = [0] * len(self._cache.tables)
        for one in wanted:
            staged[one.group] += one.host == NO_SLOT
        room = self._host.take(staged) if any(staged) else None
        if any(staged) and room is None:
            self.let_go(wanted)
            self._host.lacked = max(self._host.lacked, sum(staged))
            return False
        taken = [0] * len(staged)
        for one in wanted:
            if one.host == NO_SLOT and room is not None:
                one.host = int(room[one.group][taken[one.group]])
                taken[one.group] += 1
        return True

    def let_go(self, wanted: Sequence[Wanted]) -> None:
        """The row was not seated after all."""
        for group in range(len(self._cache.tables)):
            here = [one.host for one in wanted if one.group == group and one.host != NO_SLOT]
            self._host.unreference(group, np.array(here, dtype=np.int64))
        for one in wanted:
            if one.disk != NO_SLOT and self._disk is not None:
                self._disk.let_go(one.group, one.disk)
            one.host = one.disk = NO_SLOT

    # -- under way --------------------------------------------------------------------------------

    def begin(self, row: int, wanted: list[Wanted]) -> None:
        """The row is seated, `target` of each is in its table: copy."""
        load = _Load(row, wanted, left=len(wanted))
        self._loads[row] = load
        for one in wanted:
            self._cache.pool.slots[one.group].refs[one.target] += 1
            if one.node is not None and one.shared:
                one.node.coming += 1
        for group in range(len(self._cache.tables)):
            here = [one for one in wanted if one.group == group]
            self._promote(load, group, [one for one in here if one.disk == NO_SLOT])
            staged = [one for one in here if one.disk != NO_SLOT]
            at_once = max(1, STAGED_BYTES // self._cache.layout.groups[group].block_bytes)
            for first in range(0, len(staged), at_once):
                self._stage(load, group, staged[first : first + at_once])

    def _stage(self, load: _Load, group: int, parts: list[Wanted]) -> None:
        keys = tuple(one.node.identity for one in parts if one.node is not None)
        number = self._errands.ask(
            "load",
            group,
            [(one.disk, one.host) for one in parts],
            lambda ended: self._staged(load, group, parts, ended),
            late=lambda: self._give_up(load, "timed_out"),
            keys=keys,
        )
        load.orders.append(number)

    def _promote(self, load: _Load, group: int, parts: list[Wanted]) -> None:
        if not parts:
            return
        number = self._errands.ask(
            "promote",
            group,
            [(one.host, one.target) for one in parts],
            lambda ended: self._promoted(load, group, parts, ended),
            late=lambda: self._give_up(load, "timed_out"),
        )
        load.orders.append(number)

    def _staged(self, load: _Load, group: int, parts: list[Wanted], ended: Ended) -> None:
        assert self._disk is not None
        whole = []
        for one, reason in zip(parts, ended.reasons, strict=True):
            assert one.node is not None
            if reason and ended.status in ("done", "failed"):
                self._disk.withdraw(one.node.identity, group)
                self._arrivals.misses.append(("disk", reason))
            self._disk.let_go(group, one.disk)
            one.disk = NO_SLOT
            if not reason:
                self._publish(one.node, group, one.host)
                whole.append(one)
        if len(whole) < len(parts):
            self._give_up(load, next(reason for reason in ended.reasons if reason))
        if load.given_up:
            self._off_host(load, group, parts)
        else:
            self._promote(load, group, whole)
        self._finish(load)

    def _publish(self, node: Node, group: int, slot: int) -> None:
        shelf = self._host.shelf
        if shelf is not None and shelf.directory.lives(node) and node.places[HOST_TIER][group] == NO_SLOT:
            self._host.publish(node, group, slot)

    def _promoted(self, load: _Load, group: int, parts: list[Wanted], ended: Ended) -> None:
        for one, reason in zip(parts, ended.reasons, strict=True):
            one.arrived = not reason
            if reason and ended.status in ("done", "failed"):
                self._arrivals.misses.append(("host", reason))
                if one.node is not None and one.node.places[HOST_TIER][group] == one.host:
                    self._host.withdraw(one.node, group)
        self._off_host(load, group, parts)
        if any(ended.reasons):
            self._give_up(load, next(reason for reason in ended.reasons if reason))
        self._finish(load)

    def _off_host(self, load: _Load, group: int, parts: list[Wanted]) -> None:
        """No copies of these blocks are to come."""
        for used in (False, True):
            slots = [one.host for one in parts if one.arrived == used]
            self._host.unreference(group, np.array(slots, dtype=np.int64), used=used)
        for one in parts:
            one.host = NO_SLOT
        load.left -= len(parts)

    def _give_up(self, load: _Load, reason: str) -> None:
        if not load.given_up:
            self._arrivals.lost.append((load.row, reason))
            self._leave(load)

    def abandon(self, row: int) -> None:
        """The row's sequence leaves, whatever it waited for. Before its blocks are released."""
        load = self._loads.get(row)
        if load is not None:
            self._leave(load)

    def _leave(self, load: _Load) -> None:
        load.given_up = True
        del self._loads[load.row]
        self._left_behind[load] = None
        for number in load.orders:
            self._errands.cancel(number)
        for one in load.wanted:
            if one.disk != NO_SLOT:  # however long the disk takes, nothing is going to touch the device
                self._off_device(one)

    # -- the end ----------------------------------------------------------------------------------

    def _finish(self, load: _Load) -> None:
        if load.left:
            return
        sharing = self._cache.sharing
        for one in load.wanted:
            if one.target == NO_SLOT:
                continue
            if one.arrived and one.full:
                self._cache.pool.slots[one.group].move(np.array([one.target], dtype=np.int64), SlotState.READY)
            if one.arrived and one.shared and one.node is not None:
                assert sharing is not None
                if sharing.directory.lives(one.node) and self._follows(one.node, one.group):
                    sharing.arrived(None if load.given_up else load.row, one.node, one.group, one.target)
            self._off_device(one)
        if load.given_up:
            del self._left_behind[load]
        else:
            del self._loads[load.row]
            self._arrivals.rows.append(load.row)

    def _off_device(self, one: Wanted) -> None:
        """No copy touches its device slot any more."""
        if one.shared and one.node is not None:
            one.node.coming -= 1
        slots = np.array([one.target], dtype=np.int64)
        one.target = NO_SLOT
        self._cache.unreference(one.group, slots, -1, used=False)

    def _follows(self, node: Node, group: int) -> bool:
        """Whether the block may be kept on the device: what it is of use with is there too."""
        assert self._cache.sharing is not None
        before = node.parent
        if not self._cache.sharing.directory.grows[group]:
            return True
        return before is None or before.index < 0 or before.slots[group] != NO_SLOT

    def held(self) -> list[tuple[int, int, int]]:
        """(tier, group, slot) of what loads reference besides tables, for the invariants."""
        found = []
        for load in (*self._loads.values(), *self._left_behind):
            for one in load.wanted:
                if one.target != NO_SLOT:
                    found.append((0, one.group, one.target))
                if one.host != NO_SLOT:
                    found.append((HOST_TIER, one.group, one.host))
                if one.disk != NO_SLOT:
                    found.append((DISK_TIER, one.group, one.disk))
        return found
