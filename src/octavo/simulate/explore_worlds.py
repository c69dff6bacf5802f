"""The worlds that `explore` runs: a toy engine each, for every combination of mechanisms.

Owns what a world is made of, and how an engine is built of it; what happens in it, and what must hold, is `explore`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from octavo.memory.cache import KVCache
from octavo.memory.keys import KeySpace
from octavo.memory.tiering import Below, tiered_cache
from octavo.policy.allocation import allocation_named
from octavo.policy.bundle import Policies
from octavo.policy.chaos import Chaos
from octavo.policy.eviction import EVICTIONS, eviction_named
from octavo.policy.placement import placement_named
from octavo.policy.reuse import reuse_named
from octavo.scheduling.core import EngineCore
from octavo.scheduling.limits import Limits
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.toy_laws import toy_layout
from octavo.simulate.toy_model import VOCAB, ToyExecutor, ToyModel, toy_model
from octavo.simulate.toy_mover import ToyFaults, ToyMover

CONTEXT = 64
FAULTS = (ToyFaults(), ToyFaults(most_polls=8), ToyFaults(fails=0.1, times_out=0.1, most_late_polls=20))


@dataclass(frozen=True, slots=True)
class World:
    """What a random run is made of."""

    heads: tuple[int, ...] = (2,)
    """Key heads of each group: (2,) is one group, (4, 2) packs two blocks of the second in a slab."""
    laws: tuple[str, ...] = ()
    """What each group keeps, as `toy_laws` names it; all of it where this is empty."""
    slab_bytes: int = 0
    """The most that a slab may grow to, so that it pads less."""
    allocation: str = "paged"
    batching: str = "iteration"
    admission: str = "max_utilization"
    chaos: bool = False
    reuse: str = "none"
    placement: str = ""
    """How the tiers below the device are used; empty: there are none."""
    preemption: str = "recompute"
    disk_slots: int = 0
    """Of each group; 0: no disk."""
    depth: int = 0
    slabs: int = 12
    rows: int = 5

    @property
    def label(self) -> str:
        policies = "chaos" if self.chaos else f"{self.batching}+{self.admission}"
        groups = f"{self.heads} {'+'.join(self.laws)}" if self.laws else f"{self.heads}"
        tiers = f", {self.placement}+{self.preemption} disk {self.disk_slots}" if self.placement else ""
        return f"groups {groups}, {self.allocation}, {policies}, reuse {self.reuse}{tiers}, depth {self.depth}"

    def build(self, rng: Random) -> tuple[EngineCore, ToyModel]:
        """An engine, and the model that says what it must answer."""
        layout = toy_layout(self.heads, laws=self.laws, most_slab_bytes=self.slab_bytes)
        model = toy_model(layout, ends_every=12, fails_every=400)
        seed = rng.getrandbits(32)
        policies = self.policies(seed)
        keys = KeySpace("toy", 4) if policies.reuse.shares else None
        eviction = eviction_named(rng.choice(sorted(EVICTIONS)))
        limits = Limits(self.rows, rng.choice((6, 9, 32)), CONTEXT, VOCAB)
        executor = ToyExecutor(model, layout, self.slabs, self.rows)
        if not self.placement:
            contiguous = policies.allocation.contiguous
            cache = KVCache(layout, self.slabs, self.rows, contiguous=contiguous, keys=keys, eviction=eviction)
            return EngineCore(Scheduler(cache, limits, policies), executor, depth=self.depth), model
        chaotic = self.placement == "chaos"
        below = Below(
            rng.choice((2, self.slabs, 4 * self.slabs)),
            Chaos(seed) if chaotic else placement_named(self.placement),
            Chaos(seed + 1) if chaotic else eviction_named(rng.choice(sorted(EVICTIONS))),
            (self.disk_slots,) * len(self.heads) if self.disk_slots else (),
            disk_eviction=Chaos(seed + 2) if chaotic else eviction_named(sorted(EVICTIONS)[seed % len(EVICTIONS)]),
        )
        cache, tiering = tiered_cache(layout, self.slabs, self.rows, below, keys=keys, eviction=eviction)
        mover = ToyMover(executor, below.host_slabs, below.disk_slots, faults=rng.choice(FAULTS), seed=seed)
        scheduler = Scheduler(cache, limits, policies, tiering)
        return EngineCore(scheduler, executor, depth=self.depth, mover=mover), model

    def policies(self, seed: int) -> Policies:
        if not self.chaos:
            return Policies.named(
                allocation=self.allocation,
                batching=self.batching,
                admission=self.admission,
                reuse=self.reuse,
                preemption=self.preemption,
            )
        chaos = Chaos(seed)
        allocation, reuse = allocation_named(self.allocation), reuse_named(self.reuse)
        return Policies(allocation, chaos, chaos, chaos, chaos, reuse)


_GROUPS: tuple[dict[str, Any], ...] = (
    {"heads": (2,)},
    {"heads": (4, 2)},
    {"heads": (2, 2), "laws": ("full", "window_6")},
    {"heads": (3, 1, 2), "laws": ("window_5", "chunk_8", "constant"), "slab_bytes": 600},
)
"""One group; two of unequal blocks; a window beside all; everything that is given up, several blocks in any slab."""


_BELOW: tuple[dict[str, Any], ...] = (
    {"placement": "write_back", "preemption": "offload", "disk_slots": 30},
    {"placement": "write_through", "preemption": "auto", "disk_slots": 30},
    {"placement": "write_back", "admission": "guaranteed_no_evict", "disk_slots": 3},
    {"placement": "drop", "preemption": "offload"},
    {"placement": "drop", "preemption": "offload", "reuse": "none"},
    {"placement": "chaos", "chaos": True, "disk_slots": 30},
)
"""Tiers that extend reuse, that hold whom room was lacking for, and both."""


def all_worlds() -> tuple[World, ...]:
    """Every combination of groups, allocation, policies and depth; reuse, and tiers below, where blocks are paged."""
    return *_on_one_tier(), *(
        World(**{"reuse": "prefix"} | groups | below, depth=depth)
        for groups in _GROUPS
        for below in _BELOW
        for depth in (0, 1)
    )


def _on_one_tier() -> tuple[World, ...]:
    return tuple(
        World(
            **groups,
            allocation=allocation,
            batching=batching,
            admission=admission,
            chaos=chaos,
            reuse=reuse,
            depth=depth,
        )
        for groups in _GROUPS
        for allocation, reuse in (
            ("paged", "none"),
            ("paged", "prefix"),
            ("contiguous-max", "none"),
            ("contiguous-pow2", "none"),
        )
        for batching, admission, chaos in (
            ("iteration", "max_utilization", False),
            ("iteration", "guaranteed_no_evict", False),
            ("request", "max_utilization", False),
            ("request", "guaranteed_no_evict", False),
            ("", "", True),
        )
        for depth in (0, 1)
    )
