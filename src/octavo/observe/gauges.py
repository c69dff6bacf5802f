"""Gauges: the engine's state of one moment, read from the scheduler and the KV cache when somebody asks.

Reads only. Taken under the core's `guard`, so that what is read belongs together: the engine thread
holds it while tables and blocks change and not while a step computes, so a reader waits for a
decision at most, never for a forward pass, and holds it for some array sums.

Invariant: for each group, free + held blocks + blocks of slabs that other groups hold = total.
"""

from __future__ import annotations

import numpy as np

from octavo.memory.cache import KVCache
from octavo.memory.slots import SlotState
from octavo.memory.values import Int32
from octavo.memory.waste import waste
from octavo.observe.names import BLOCKED_BY
from octavo.scheduling.core import EngineCore

Values = dict[str, dict[str, float]]
"""By name, then by label value ("" where there is no label)."""


def read_gauges(core: EngineCore, bound_by: str) -> Values:
    """`bound_by` is what kept the first in line out of the last step."""
    scheduler = core.scheduler
    with core.guard:
        running = scheduler.running
        active = len(running.live_rows())
        waiting = len(scheduler.waiting)
        kept = int(scheduler.cache.committed[running.live_rows()].sum())
        kept += sum(state.tokens for state in scheduler.cache.suspensions.values())
        values = _memory(scheduler.cache)
    values["live_cached_tokens"] = {"": kept}
    values["active_sequences"] = {"": active}
    values["waiting_sequences"] = {reason: waiting if reason == bound_by else 0 for reason in BLOCKED_BY}
    return values


def usage(values: Values) -> float:
    """KV cache usage, 0 to 1: bytes of held blocks of all groups / bytes of the pool."""
    return sum(values["kv_bytes_used"].values()) / values["kv_capacity_bytes"][""]


def _memory(cache: KVCache) -> Values:
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
        "kv_metadata_bytes": {"": _metadata_bytes(cache)},
        "kv_waste_bytes": {
            "reserved": lost.reserved_bytes,
            "internal": lost.internal_bytes,
            "padding": lost.padding_bytes,
            "external": lost.external_bytes,
        },
    }


def in_sequences(cache: KVCache, group: int) -> Int32:
    """How many sequences have each slot in their tables: references that only keep it for a while count for nobody."""
    refs = cache.pool.slots[group].refs
    if cache.sharing is None:
        return refs
    held = [slots for pinned in cache.pins.values() for pinned_group, slots in pinned if pinned_group == group]
    doubles = [slot for doubled_group, slot in cache.sharing.doubles() if doubled_group == group]
    beside = np.concatenate([*held, np.array(doubles, dtype=np.int32)])
    return (refs - np.bincount(beside, minlength=len(refs))).astype(np.int32)


def _metadata_bytes(cache: KVCache) -> int:
    arrays: list[np.ndarray] = [cache.committed, cache.touched, cache.pool.owner, cache.pool.used]
    for table, slots in zip(cache.tables, cache.pool.slots, strict=True):
        arrays += [table.slots, table.counts, slots.state, slots.refs, slots.last_plan]
    return sum(array.nbytes for array in arrays)
