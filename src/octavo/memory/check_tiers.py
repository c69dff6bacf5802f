"""The accounting invariants of the tiers below the device, each by name, as `check` has those of the device.

Reads only; raises `InvariantViolation` at the first that does not hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from octavo.errors import InvariantViolation
from octavo.memory.slots import SlotState
from octavo.memory.tiering import Tiering
from octavo.memory.tiers import DISK_TIER, HOST_TIER
from octavo.memory.transfers import SIDES, Tier
from octavo.memory.values import HOST


def host_references_equal_occurrences(tiering: Tiering) -> None:
    """A host slot's references are the suspensions and copies that name it, no more and no less."""
    for group, columns in enumerate(tiering.host.pool.slots):
        listed = [slot for tier, g, slot in tiering.held() if tier == HOST_TIER and g == group]
        for value in tiering.cache.suspensions.values():
            listed += [slot for tier, slot in value.slots[group] if tier == HOST]
        found = np.bincount(np.array(listed, dtype=np.int64), minlength=len(columns.refs))
        odd = np.flatnonzero(found != columns.refs)
        detail = "" if not len(odd) else f"{columns.refs[odd[0]]} references, {found[odd[0]]} occurrences"
        _require("host-references", not len(odd), f"group {group} slot {odd[:1].tolist()}: {detail}")


def host_slots_are_accounted(tiering: Tiering) -> None:
    """EMPTY host slots are unreferenced, others are referenced or cached; nothing drains; slabs are free or used."""
    pool = tiering.host.pool
    for group, columns in enumerate(pool.slots):
        shelf = tiering.host.shelf
        keyed = np.zeros(len(columns.refs), dtype=bool) if shelf is None else shelf.directory.keyed_in[HOST_TIER][group]
        empty, cached = columns.state == SlotState.EMPTY, keyed & (columns.refs == 0)
        odd = np.flatnonzero((empty | cached) != (columns.refs == 0))
        _require("host-accounting", not len(odd), f"group {group} slot {odd[:1].tolist()} is held by nobody")
        _require("host-accounting", not (keyed & empty).any(), f"group {group}: an EMPTY slot is found")
        counted = pool.cached[group]
        _require("host-accounting", counted == int(cached.sum()), f"group {group}: {counted} counted as cached")
        used = (~empty).reshape(pool.slabs, -1).sum(axis=1)
        owned = np.where(pool.owner == group, pool.used, 0)
        _require("host-accounting", bool((used == owned).all()), f"group {group}: slabs are counted wrongly")
    free = pool.free.count + int(np.count_nonzero(pool.owner >= 0))
    _require("host-accounting", free == pool.slabs, f"{free} of {pool.slabs} slabs are free or owned")


def disk_slots_are_accounted(tiering: Tiering) -> None:
    """A disk slot is free, found, or touched by a copy: each exactly one of the first two, none lost."""
    disk = tiering.disk
    if disk is None:
        return
    for group, total in enumerate(disk.slots):
        free, found, busy = disk.free_slots(group), disk.found_slots(group), disk.busy_slots(group)
        listed = np.bincount(np.array(free + found, dtype=np.int64), minlength=total)
        _require("disk-accounting", bool((listed <= 1).all()), f"group {group}: a slot is listed twice")
        lost = sorted(frozenset(range(total)) - frozenset(free) - frozenset(found) - frozenset(busy))
        _require("disk-accounting", not lost, f"group {group}: slots {lost[:3]} are lost")
        both = frozenset(free) & frozenset(busy)
        _require("disk-accounting", not both, f"group {group}: {len(both)} free slots are touched by copies")
        held = sorted({slot for tier, g, slot in tiering.held() if tier == DISK_TIER and g == group})
        _require("disk-accounting", held == sorted(busy), f"group {group}: held {held}, busy {sorted(busy)}")


def what_is_found_is_there(tiering: Tiering) -> None:
    """Every place of every node, in every tier, is READY there, or found on the disk under the node's identity."""
    sharing, disk = tiering.cache.sharing, tiering.disk
    if sharing is None:
        return
    for node in sharing.directory.nodes():
        for group in range(len(tiering.cache.tables)):
            slot = node.places[HOST_TIER][group] if len(node.places) > HOST_TIER else -1
            if slot >= 0:
                state = SlotState(int(tiering.host.pool.slots[group].state[slot]))
                _require("below-is-there", state is SlotState.READY, f"node {node.number}: host slot {slot} is {state}")
            slot = node.places[DISK_TIER][group] if len(node.places) > DISK_TIER else -1
            if slot >= 0 and disk is not None:
                _require("below-is-there", slot in disk.found_slots(group), f"node {node.number}: disk slot {slot}")


def copies_do_not_meet(tiering: Tiering) -> None:
    """A slot that a copy writes is touched by no other copy; one that is read may be read by several."""
    read: set[tuple[Tier, int, int]] = set()
    written: list[tuple[Tier, int, int]] = []
    for order in tiering.errands.orders:
        source, target = SIDES[order.route]
        read.update((source, order.group, slot) for slot in order.sources)
        written += [(target, order.group, slot) for slot in order.targets]
    twice = [place for place, times in Counter(written).items() if times > 1 or place in read]
    _require("copies-do-not-meet", not twice, f"{twice[:1]} (tier, group, slot) is written and touched by another copy")


INVARIANTS: dict[str, Callable[[Tiering], None]] = {
    "host-references": host_references_equal_occurrences,
    "host-accounting": host_slots_are_accounted,
    "disk-accounting": disk_slots_are_accounted,
    "below-is-there": what_is_found_is_there,
    "copies-do-not-meet": copies_do_not_meet,
}


def check_tiers(tiering: Tiering) -> None:
    """All of them."""
    for invariant in INVARIANTS.values():
        invariant(tiering)


def at_rest(tiering: Tiering) -> bool:
    """Nothing is under way, and every host slot that is not free can be given up at once."""
    pool = tiering.host.pool
    return not tiering.pending and pool.available_slabs == pool.slabs and not tiering.held()


def _require(name: str, holds: bool, detail: str) -> None:
    if not holds:
        raise InvariantViolation(name, detail)
