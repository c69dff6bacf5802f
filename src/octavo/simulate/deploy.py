"""From a model and a device to a core in virtual time: the planner's arithmetic, octavo's own scheduler.

Owns nothing that is decided: memory, blocks and limits come from the planner, and are counted as the engine
counts them. Without weights or a device there is no time and no pool: the `ConfigError` says what to give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cost.roofline import RooflineCost
from octavo.cost.step import CostModel
from octavo.errors import ConfigError
from octavo.memory.cache import KVCache
from octavo.memory.groups import served_groups
from octavo.memory.keys import KeySpace
from octavo.memory.layout import Layout, make_layout
from octavo.planner.asked import Asked
from octavo.planner.build import ground_of, machine_of, plan_for
from octavo.policy.bundle import Policies
from octavo.policy.eviction import eviction_named
from octavo.scheduling.core import EngineCore
from octavo.scheduling.limits import Limits
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.executors import SimExecutor
from octavo.simulate.trace import VOCABULARY

BLOCK_TOKENS = 16


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

    @property
    def kv_tokens(self) -> int:
        return self.layout.most_tokens(self.slabs)

    def core(self, policies: Policies | None = None, *, cost: CostModel | None = None, eviction: str = "lru",
             depth: int = 0) -> EngineCore:  # fmt: skip
        """A fresh core with an executor of its own."""
        chosen = policies or Policies()
        block = max(group.block_tokens for group in self.layout.groups)
        cache = KVCache(
            self.layout,
            self.slabs,
            self.max_num_seqs,
            contiguous=chosen.allocation.contiguous,
            keys=KeySpace(self.model, block) if chosen.reuse.shares else None,
            eviction=eviction_named(eviction),
        )
        limits = Limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            vocab_size=VOCABULARY,
            attention_mode=self.attention_mode,
            cache_dtype=self.cache_dtype,
        )
        return EngineCore(Scheduler(cache, limits, chosen), SimExecutor(cost or self.cost), depth=depth)


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
        raise ConfigError("device", asked.device, f"has {kv_bytes:,} B left for the KV cache, less than one block")
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
    )
