"""Worlds with tiers, drawn from seeds: answers are those of the toy model alone, and every pool is whole at the end.

Each test also counts what happened over all of its worlds, so that none of them passes by doing nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.random_tier_worlds import random_world
from tests.pure.tier_worlds import TierWorld

from octavo.policy.eviction import EVICTIONS
from octavo.policy.placement import PLACEMENTS
from octavo.policy.preemption import PREEMPTIONS
from octavo.scheduling.events import Transferred
from octavo.simulate.toy_laws import toy_layout
from octavo.simulate.toy_mover import ToyFaults

CHOICES = list(itertools.product((*PLACEMENTS, "chaos"), (*PREEMPTIONS, "chaos"), (*EVICTIONS, "chaos")))
TIGHT: dict[str, Any] = {
    "rows": 4,
    "budget": 12,
    "admission": "max_utilization",
    "context": 40,
    "block_tokens": 4,
    "slab_bytes": 0,
    "fails_every": 0,
}


def tight(laws: tuple[str, ...], more: int = 2) -> dict[str, Any]:
    """Room for one sequence of full length, and not for two."""
    heads = [2] * len(laws)
    one = toy_layout(heads, 4, laws).slabs_for(40, 12 if "window_6" in laws else None)
    return TIGHT | {"heads": heads, "laws": laws, "slabs": one + more}


def counted(worlds: Iterable[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for found in worlds:
        total += found
    return total


def require(total: Counter[str], *names: str) -> None:
    assert {name: total[name] for name in names if not total[name]} == {}, f"of {dict(total)}"


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_are_those_of_the_model_alone_under_every_placement_action_and_eviction(depth: int) -> None:
    found = []
    for number, (placement, preemption, eviction) in enumerate(CHOICES):
        world, seen = random_world(
            7_000 + number,
            requests=8,
            depth=depth,
            placement=placement,
            preemption=preemption,
            eviction=eviction,
            host_eviction=CHOICES[-1 - number][2],
        )
        found.append(seen)
        _bytes_are_blocks_times_block_bytes(world)
    require(
        counted(found),
        *("demote", "promote", "store", "load", "host tokens", "disk tokens", "device tokens", "waited for"),
        *("offload", "recompute", "restored tokens", "CacheReset", "Restarted"),
        *("evicted from the host", "evicted from the disk", "demote failed", "promote failed"),
    )


def _bytes_are_blocks_times_block_bytes(world: TierWorld) -> None:
    copied: Counter[str] = Counter()
    for event in world.of(Transferred):
        assert event.bytes == event.blocks * world.layout.groups[event.group].block_bytes
        copied[event.route] += event.blocks
    assert {route: n for route, n in world.mover.copied.items() if n} == {r: n for r, n in copied.items() if n}


@pytest.mark.parametrize(
    "laws", [("full",), ("full", "window_6"), ("full", "constant"), ("window_6", "full", "constant")]
)
def test_a_tight_device_offloads_often_and_what_comes_back_is_exact(laws: tuple[str, ...]) -> None:
    found = [
        random_world(
            seed,
            **tight(laws),
            reuse=seed % 3 > 0,
            preemption="offload",
            host_slabs=60,
            faults=ToyFaults(most_polls=3),
            depth=seed % 2,
        )[1]
        for seed in range(100, 112)
    ]
    total = counted(found)
    require(total, "offload", "promote", "restored tokens")
    assert total["offload"] >= 8, dict(total)
    assert total["offload"] > total["recompute"]


def test_a_small_device_over_a_slow_disk_hits_promotes_stores_and_loads() -> None:
    found = [
        random_world(
            seed,
            **tight(("full",)),
            reuse=True,
            placement="write_through" if seed % 2 else "write_back",
            preemption="auto",
            host_slabs=10,
            disk_slots=[80],
            faults=ToyFaults(most_polls=6),
            resets=0.0,
            requests=24,
        )[1]
        for seed in range(200, 212)
    ]
    total = counted(found)
    require(total, "promote", "store", "load", "host tokens", "disk tokens", "waited for", "evicted from the host")
    assert total["disk tokens"] > 100, dict(total)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    depth=st.sampled_from((0, 1)),
    aborts=st.sampled_from((0.05, 0.15)),
    polls=st.sampled_from((1, 6, 25)),
    times_out=st.sampled_from((0.0, 0.3)),
    preemption=st.sampled_from(("offload", "auto", "recompute")),
)
def test_aborts_at_any_moment_with_a_slow_tier_leave_every_pool_as_it_was(
    seed: int, depth: int, aborts: float, polls: int, times_out: float, preemption: str
) -> None:
    faults = ToyFaults(times_out=times_out, most_polls=polls, most_late_polls=60)
    random_world(seed, requests=10, depth=depth, aborts=aborts, faults=faults, preemption=preemption)


def test_with_failing_blocks_and_late_ends_nothing_hangs_and_nothing_is_wrong() -> None:
    found = [
        random_world(
            seed,
            **tight(("full",), 4),
            faults=(ToyFaults(0.25, 0.25, 4, 80), ToyFaults(0.25), ToyFaults(0.0, 0.2, 4, 80))[seed % 3],
            aborts=0.02,
            disk_slots=[30],
            reuse=True,
        )[1]
        for seed in range(300, 316)
    ]
    require(
        counted(found),
        *("demote failed", "store failed", "promote failed", "abort"),
        *("restarted: timed_out", "restarted: error: injected"),
    )


def test_guaranteed_no_evict_never_preempts_with_tiers_either() -> None:
    found = [
        random_world(seed, admission="guaranteed_no_evict", reuse=True, preemption="offload")[1]
        for seed in range(400, 414)
    ]
    total = counted(found)
    assert total["Preempted"] == 0
    require(total, "promote", "demote", "host tokens")
