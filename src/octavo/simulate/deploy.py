"""From a model and a device to a core in virtual time: the planner's arithmetic, octavo's own scheduler.

Owns nothing that is decided: memory, blocks and limits come from the planner, and are counted as the engine
counts them. Without weights or a device there is no time and no pool: the `ConfigError` says what to give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.cost.roofline import RooflineCost
from octavo.cost.step import CostModel
from octavo.cost.transfer import TransferLaw
from octavo.errors import ConfigError
from octavo.memory.cache import KVCache
from octavo.memory.groups import served_groups
from octavo.memory.keys import KeySpace, in_process
from octavo.memory.layout import Layout, make_layout
from octavo.memory.tiering import Below, tiered_cache
from octavo.planner.asked import Asked
from octavo.planner.build import ground_of, machine_of, plan_for
from octavo.policy.bundle import Policies
from octavo.policy.eviction import eviction_named
from octavo.policy.placement import placement_named
from octavo.scheduling.core import EngineCore
from octavo.scheduling.limits import Limits
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.executors import SimExecutor
from octavo.simulate.links import Links, SimMover
from octavo.simulate.trace import VOCABULARY

BLOCK_TOKENS = 16
_LINK_SHARE = 0.8
"""Of a host link's peak that copies of whole blocks reach: assumed."""
_LINK_LATENCY_S = 20e-6
_WIDEST_DISK = 2**22
"""Slots of one group on a disk at most: what is kept of each takes memory here."""
_MOST_SLABS = 2**26
"""Of a device or a host, for the same reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lower:
    """Tiers below the device, of one device's share."""

    host_bytes: int
    disk_bytes: int = 0
    placement: str = "write_back"
    host_eviction: str = "lru"
    disk_eviction: str = "lru"
    timeout_s: float = 10.0
    """That a sequence waits for its state, before it computes it again."""

    def __post_init__(self) -> None:
        if self.host_bytes < 1:
            raise ConfigError("host_bytes", self.host_bytes, "must be above 0 bytes")
        if self.disk_bytes < 0:
            raise ConfigError("disk_bytes", self.disk_bytes, "must be at least 0 bytes")
        for name in ("host_eviction", "disk_eviction"):
            eviction_named(getattr(self, name), field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What one replica of a deployment is made of."""

    model: str
    device: str
    tp: int
    layout: Layout
    slabs: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    attention_mode: str
    cache_dtype: str
    cost: CostModel
    price_per_hour: float | None = None
    """Of all its devices together."""
    vocab_size: int = VOCABULARY
    links: Links = field(default_factory=Links)
    """Between its tiers."""

    def __post_init__(self) -> None:
        _require_few("kv_cache_memory_bytes", self.slabs * self.layout.slab_bytes, self.slabs)

    @property
    def kv_tokens(self) -> int:
        return self.layout.most_tokens(self.slabs)

    def core(self, policies: Policies | None = None, *, cost: CostModel | None = None, eviction: str = "lru",
             depth: int = 0, lower: Lower | None = None) -> EngineCore:  # fmt: skip
        """A fresh core with an executor of its own, and with `lower` tiers a mover."""
        chosen = policies or Policies()
        block = max(group.block_tokens for group in self.layout.groups)
        keys = KeySpace(self.model, block, in_process) if chosen.reuse.shares else None
        tiering = mover = None
        if lower is None:
            cache = KVCache(
                self.layout,
                self.slabs,
                self.max_num_seqs,
                contiguous=chosen.allocation.contiguous,
                keys=keys,
                eviction=eviction_named(eviction),
            )
        else:
            if chosen.allocation.contiguous:
                raise ConfigError("host_bytes", chosen.allocation.name, "contiguous runs are not moved; use paged")
            below = self._below(lower)
            cache, tiering = tiered_cache(
                self.layout, self.slabs, self.max_num_seqs, below, keys=keys, eviction=eviction_named(eviction)
            )
            mover = SimMover([group.block_bytes for group in self.layout.groups], self.links)
        limits = Limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            attention_mode=self.attention_mode,
            cache_dtype=self.cache_dtype,
        )
        scheduler = Scheduler(cache, limits, chosen, tiering)
        return EngineCore(scheduler, SimExecutor(cost or self.cost), depth=depth, mover=mover)

    def _below(self, lower: Lower) -> Below:
        slabs = lower.host_bytes // self.layout.slab_bytes
        if slabs < 1:
            raise ConfigError("host_bytes", lower.host_bytes, f"holds no block of {self.layout.slab_bytes:,} B")
        _require_few("host_bytes", lower.host_bytes, slabs)
        share = lower.disk_bytes // len(self.layout.groups)
        slots = tuple(min(_WIDEST_DISK, share // group.block_bytes) for group in self.layout.groups)
        if lower.disk_bytes and not all(slots):
            raise ConfigError("disk_bytes", lower.disk_bytes, "holds no block of some group")
        return Below(
            slabs, placement_named(lower.placement), eviction_named(lower.host_eviction),
            disk_slots=slots if lower.disk_bytes else (), timeout_s=lower.timeout_s,
            disk_eviction=eviction_named(lower.disk_eviction),
        )  # fmt: skip


def replica_of(model: str | Path | Mapping[str, Any] | None, asked: Asked) -> Replica:
    """One replica of `asked`: a device, its weights, what is left for the KV cache."""
    if asked.device is None:
        raise ConfigError("device", None, "a simulation needs one, for example --device h100-sxm")
    if asked.pp != 1:
        raise ConfigError("pp", asked.pp, "pipeline stages are not simulated; use --tp")
    if asked.engine != "octavo":
        raise ConfigError("engine", asked.engine, "a simulation runs octavo's own scheduler; leave it out")
    ground = ground_of(model, asked)
    machine = machine_of(ground, ground.weights)
    if machine is None:
        raise ConfigError("weights_bytes", None, "not known of this model; give --weights-bytes of one device")
    plan = plan_for(model, asked)
    kv_bytes = asked.kv_cache_memory_bytes or (plan.budget.kv.predicted_bytes if plan.budget else 0)
    layout = make_layout(
        served_groups(ground.device.layers),
        asked.block_size or BLOCK_TOKENS,
        most_slab_bytes=kv_bytes // 64,
    )
    slabs = kv_bytes // layout.slab_bytes
    if slabs < 1:
        raise ConfigError(
            "device",
            asked.device,
            f"has {kv_bytes:,} B left for the KV cache beside weights and the largest step, less than one block of "
            f"{layout.slab_bytes:,} B; give another, more ranks, or lower limits of a step and of a sequence",
        )
    length = min(ground.context, layout.most_tokens(slabs) + 1)
    return Replica(
        model=ground.source.name,
        device=machine.accelerator.name,
        tp=asked.tp,
        layout=layout,
        slabs=slabs,
        max_num_seqs=min(ground.seqs, slabs),
        max_num_batched_tokens=ground.step_tokens,
        max_model_len=length,
        attention_mode=ground.geometry.attention_mode,
        cache_dtype=str(ground.geometry.kv_dtype),
        cost=RooflineCost(machine=machine, ranks=asked.tp),
        price_per_hour=None if asked.price is None else asked.price * asked.tp,
        links=_links(machine.accelerator.host_bytes_per_s),
    )


def _require_few(name: str, given: int, slabs: int) -> None:
    if slabs > _MOST_SLABS:
        remedy = f"is {slabs:,} blocks, and {_MOST_SLABS:,} at most are simulated; give less, or a larger --block-size"
        raise ConfigError(name, given, remedy)


def _links(host_bytes_per_s: float) -> Links:
    """Both ways of a device's link to its host; a disk keeps the stated guesses."""
    if not host_bytes_per_s:
        return Links()
    law = TransferLaw(host_bytes_per_s * _LINK_SHARE, _LINK_LATENCY_S)
    return Links({"demote": law, "promote": law})
