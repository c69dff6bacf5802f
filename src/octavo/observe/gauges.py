"""Gauges: the engine's state of one moment, read from the scheduler and the KV cache when somebody asks.

Reads only. Taken under the core's `guard`, so that what is read belongs together: the engine thread
holds it while tables and blocks change and not while a step computes, so a reader waits for a
decision at most, never for a forward pass, and holds it for some array sums.

Invariant: for each group, free + held blocks + blocks of slabs that other groups hold = total.
"""

from __future__ import annotations

import numpy as np

from octavo.memory.cache import KVCache
from octavo.memory.layout import Layout
from octavo.memory.slots import SlotState
from octavo.memory.tiering import Tiering
from octavo.memory.tiers import DISK_TIER, DiskTier, HostTier
from octavo.memory.values import DEVICE, DISK, HOST, Int32
from octavo.memory.waste import waste
from octavo.observe.metadata import metadata_bytes
from octavo.observe.names import BLOCKED_BY
from octavo.scheduling.core import EngineCore

Values = dict[str, dict[str, float]]
"""By name, then by label value ("" where there is no label)."""


def tiers_of(core: EngineCore) -> tuple[str, ...]:
    """The tiers that this engine has."""
    tiering = core.scheduler.tiering
    if tiering is None:
        return (DEVICE,)
    return (DEVICE, HOST) if tiering.disk is None else (DEVICE, HOST, DISK)


def read_gauges(core: EngineCore, bound_by: str, now: float) -> Values:
    """`bound_by` is what kept the first in line out of the last step."""
    scheduler = core.scheduler
    with core.guard:
        running = scheduler.running
        active = len(running.live_rows())
        waiting = len(scheduler.waiting)
        kept = int(scheduler.cache.committed[running.live_rows()].sum())
        kept += sum(state.tokens for state in scheduler.cache.suspensions.values())
        values = _memory(scheduler.cache, scheduler.tiering)
        if scheduler.tiering is not None:
            values |= _tiers(scheduler.cache, scheduler.tiering)
        pins = scheduler.kept.pins
        values["pinned_tokens"] = {"": 0 if pins is None else pins.tokens_at(now)}
        values["broken_pins_total"] = _broken_pins(scheduler.cache, scheduler.tiering)
    values["live_cached_tokens"] = {"": kept}
    values["active_sequences"] = {"": active}
    values["waiting_sequences"] = {reason: waiting if reason == bound_by else 0 for reason in BLOCKED_BY}
    return values


def usage(values: Values) -> float:
    """KV cache usage, 0 to 1: bytes of held blocks of all groups / bytes of the pool."""
    return sum(values["kv_bytes_used"].values()) / values["kv_capacity_bytes"][""]


def _memory(cache: KVCache, tiering: Tiering | None) -> Values:
    pool = cache.pool
    by_group: Values = {
        name: {}
        for name in ("kv_bytes_used", "kv_bytes_shared", "kv_blocks_total", "kv_blocks_free", "kv_blocks_cached")
    }
    for index, (group, slots) in enumerate(zip(cache.layout.groups, pool.slots, strict=True)):
        unreferenced = slots.refs == 0
        held = np.count_nonzero(slots.state != SlotState.EMPTY)
        cached = np.count_nonzero((slots.state == SlotState.READY) & unreferenced)
        shared = int((in_sequences(cache, index) - 1).clip(min=0).sum())
        by_group["kv_bytes_used"][group.name] = int(held - cached) * group.block_bytes
        by_group["kv_bytes_shared"][group.name] = shared * group.block_bytes
        by_group["kv_blocks_total"][group.name] = pool.slabs * group.blocks_per_slab
        by_group["kv_blocks_free"][group.name] = pool.available(index)
        by_group["kv_blocks_cached"][group.name] = int(cached)
    lost = waste(cache)
    return by_group | {
        "kv_capacity_bytes": {"": pool.slabs * cache.layout.slab_bytes},
        "kv_metadata_bytes": {"": metadata_bytes(cache, None if tiering is None else tiering.host.pool)},
        "kv_waste_bytes": {
            "reserved": lost.reserved_bytes,
            "internal": lost.internal_bytes,
            "padding": lost.padding_bytes,
            "external": lost.external_bytes,
        },
    }


def _tiers(cache: KVCache, tiering: Tiering) -> Values:
    """The tiers below the device: a block there is used, cached, or free."""
    capacity: dict[str, float] = {HOST: tiering.host.pool.slabs * cache.layout.slab_bytes}
    used: dict[str, float] = {}
    kept: dict[str, float] = {}
    used[HOST], kept[HOST] = _host_bytes(tiering.host, cache.layout)
    if tiering.disk is not None:
        sizes = [group.block_bytes for group in cache.layout.groups]
        capacity[DISK] = sum(n * size for n, size in zip(tiering.disk.slots, sizes, strict=True))
        used[DISK], kept[DISK] = _disk_bytes(tiering.disk, sizes)
    return {
        "tier_capacity_bytes": capacity,
        "tier_bytes_used": used,
        "tier_bytes_cached": kept,
        "suspended_sequences": {"": len(cache.suspensions)},
        "loading_sequences": {"": len(tiering.loading)},
    }


def _host_bytes(host: HostTier, layout: Layout) -> tuple[int, int]:
    used = kept = 0
    for group, slots in zip(layout.groups, host.pool.slots, strict=True):
        used += int(np.count_nonzero(slots.refs)) * group.block_bytes
        kept += int(np.count_nonzero((slots.state == SlotState.READY) & (slots.refs == 0))) * group.block_bytes
    return used, kept


def _disk_bytes(disk: DiskTier, sizes: list[int]) -> tuple[int, int]:
    used = kept = 0
    for group, size in enumerate(sizes):
        busy = np.array(disk.busy_slots(group), dtype=np.int64)
        # What is being read stands at a node; what is being written does not yet.
        read = 0 if disk.directory is None else int(disk.directory.keyed_in[DISK_TIER][group][busy].sum())
        used += len(busy) * size
        kept += (disk.blocks[group] - read) * size
    return used, kept


def _broken_pins(cache: KVCache, tiering: Tiering | None) -> dict[str, float]:
    broken: dict[str, float] = {DEVICE: 0 if cache.sharing is None else cache.sharing.shelf.broken_pins}
    if tiering is not None:
        broken[HOST] = 0 if tiering.host.shelf is None else tiering.host.shelf.broken_pins
    return broken


def in_sequences(cache: KVCache, group: int) -> Int32:
    """How many sequences have each slot in their tables: references that only keep it for a while count for nobody."""
    refs = cache.pool.slots[group].refs
    copied = [] if cache.copied is None else [slot for tier, of, slot in cache.copied() if (tier, of) == (0, group)]
    if cache.sharing is None and not copied:
        return refs
    held = [slots for pinned in cache.pins.values() for pinned_group, slots in pinned if pinned_group == group]
    doubles = [] if cache.sharing is None else [slot for of, slot in cache.sharing.doubles() if of == group]
    beside = np.concatenate([*held, np.array(doubles + copied, dtype=np.int32)])
    return (refs - np.bincount(beside, minlength=len(refs))).astype(np.int32)
