"""Metrics of tiers, against books kept by hand and in worlds small enough to count; gauges beside copies under way."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from tests.pure.metrics_by_hand import MODEL, Series, assert_histogram, scraped, total, value
from tests.pure.metrics_by_hand_tiers import TIERS, Slots, Watched, a_world
from tests.pure.test_reuse import World
from tests.pure.tier_worlds import TierWorld, text
from tests.pure.worlds import ToyWorld

from octavo.memory.keys import KeySpace
from octavo.memory.nodes import Run
from octavo.memory.prefix import PrefixDirectory
from octavo.observe.metadata import directory_bytes
from octavo.observe.metrics import Metrics
from octavo.observe.names import FAILURES
from octavo.observe.recorder import event_fields, state_of
from octavo.scheduling.events import Finished
from octavo.simulate.toy_laws import toy_layout
from octavo.simulate.toy_mover import ToyFaults


def assert_copies(watched: Watched, series: Series) -> None:
    counts = watched.books.counts
    routes = ["demote", "promote"] + (["store", "load"] if watched.world.tiering.disk is not None else [])
    for route in routes:
        assert value(series, "transfer_bytes_total", route=route) == counts[f"{route} bytes"]
        assert value(series, "transfer_seconds_total", route=route) == pytest.approx(0.001 * counts[f"{route} ends"])
        for reason in FAILURES:
            assert value(series, "transfer_failures_total", route=route, reason=reason) == counts[f"{route} {reason}"]
    assert value(series, "host_offload_bytes_total") == counts["demote bytes"]
    assert value(series, "host_promotions_total") == counts["promote blocks"]
    assert value(series, "host_promotion_bytes_total") == counts["promote bytes"]
    assert_histogram(series, "promotion_seconds", watched.books.promotions)
    assert_histogram(series, "transfer_stall_seconds", watched.books.stalls)


def assert_reuse(watched: Watched, series: Series) -> None:
    counts, disk = watched.books.counts, watched.world.tiering.disk
    queries = value(series, "prefix_cache_queries_total")
    assert queries == counts["queries"]
    kept = watched.world.scheduler.kept  # what goes after the last step is told with the next one
    untold = dict(zip(TIERS, (kept.evictions_untold(), *kept.evictions_below_untold()), strict=True))
    for tier in TIERS if disk is not None else TIERS[:2]:
        assert value(series, "prefix_cache_hits_total", tier=tier) == counts[f"{tier} hits"], tier
        assert value(series, "evictions_total", tier=tier) + untold[tier] == counts[f"evicted {tier}"], tier
        for reason in ("absent", "incomplete", "no_room") if tier == "device" else FAILURES:
            told = value(series, "prefix_cache_misses_total", tier=tier, reason=reason)
            assert told == counts[reason if tier == "device" else f"{tier} {reason}"], (tier, reason)
    assert queries == total(series, "prefix_cache_hits_total") + total(series, "prefix_cache_misses_total")


def assert_sequences(watched: Watched, series: Series) -> None:
    counts, policies = watched.books.counts, watched.world.scheduler.policies
    restarts = sum(counts[f"restart {reason}"] for reason in FAILURES)
    for reason in FAILURES:
        assert value(series, "restarts_total", reason=reason) == counts[f"restart {reason}"]
    victim, admission = policies.victim.name, policies.admission.name
    given_up = counts["returned"] - restarts - counts["offload"]
    assert value(series, "preemptions_total", action="offload", policy=victim) == counts["offload"]
    assert value(series, "preemptions_total", action="recompute", policy=victim) == given_up
    assert value(series, "admissions_total", policy=admission) == counts["first"]
    assert value(series, "resumes_total", policy=admission) == counts["again"]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("preemption", ["recompute", "offload", "auto"])
def test_counters_are_what_movers_look_ups_and_seats_say(depth: int, preemption: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        watched = a_world(seed, depth=depth, preemption=preemption, rows=4)
        watched.run(seed, requests=14, aborts=0.01 * (seed % 3))
        series = scraped(watched.metrics)
        assert_copies(watched, series)
        assert_reuse(watched, series)
        assert_sequences(watched, series)
        assert_cached_tokens_are_those_never_computed(watched)
        seen += watched.books.counts
    wanted = ["demote bytes", "promote bytes", "host hits", "device hits", "absent", "incomplete", "evicted host"]
    wanted += ["offload"] if preemption == "offload" else []
    assert {name: seen[name] for name in wanted if not seen[name]} == {}, dict(seen)


def test_what_does_not_come_is_a_miss_of_its_tier_by_reason_and_nothing_is_counted_twice() -> None:
    seen: Counter[str] = Counter()
    for seed in range(16):
        faults = (ToyFaults(0.1, 0.35, 2, 8), ToyFaults(0.1), ToyFaults(0.2, most_polls=6))[seed % 3]
        watched = a_world(seed, reuse=True, faults=faults, disk_slots=(60, 14)[seed % 2], heads=[2], laws=["full"],
                          placement="write_through", slabs=13, host_slabs=(8, 24)[seed % 2], block_tokens=4,
                          slab_bytes=0)  # fmt: skip
        watched.run(seed, requests=16, aborts=0.01)
        series = scraped(watched.metrics)
        assert_copies(watched, series)
        assert_reuse(watched, series)
        assert_sequences(watched, series)
        assert_cached_tokens_are_those_never_computed(watched)
        seen += watched.books.counts
    seen["timed_out"] = seen["host timed_out"] + seen["disk timed_out"]
    wanted = ["host error", "disk error", "disk hits", "timed_out", "restart error", "evicted disk", "load error"]
    assert {name: seen[name] for name in wanted if not seen[name]} == {}, dict(seen)


def assert_cached_tokens_are_those_never_computed(watched: Watched) -> None:
    """Of who was never preempted: what the usage tells as cached is what no plan has computed of the prompt."""
    world = watched.world
    computed: Counter[int] = Counter()
    for plan in watched.books.plans:
        for number, start, count in zip(
            plan.sequence_ids.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True
        ):
            computed[number] += max(0, min(start + count, world.asked[number].prompt_tokens) - start)
    for number, request in world.asked.items():
        record = world.of(Finished, number)[0].record
        if record.output_tokens and not record.preemptions:
            assert sum(record.cached_tokens.values()) == request.prompt_tokens - computed[number]


@pytest.mark.parametrize("fails", [0.0, 0.2])
@pytest.mark.parametrize("preemption", ["recompute", "offload"])
def test_recomputed_tokens_are_positions_that_plans_compute_twice_also_after_copies_that_did_not_come(
    fails: float, preemption: str
) -> None:
    """On a host too small for all who give way."""
    twice = told = 0
    for seed in range(6):
        watched = a_world(seed, reuse=True, heads=[2], laws=["full"], slabs=12, host_slabs=8, block_tokens=4, rows=4,
                          slab_bytes=0, admission="max_utilization", depth=0, fails_every=0, faults=ToyFaults(fails),
                          placement="write_back", preemption=preemption, disk_slots=0)  # fmt: skip
        watched.run(seed, requests=16, resets=0.0)
        reached: Counter[int] = Counter()
        for plan in watched.books.plans:
            for number, start, count in zip(
                plan.sequence_ids.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True
            ):
                twice += max(0, min(start + count, reached[number]) - start)
                reached[number] = max(reached[number], start + count)
        told += int(value(scraped(watched.metrics), "recomputed_tokens_total"))
    # What others had computed first, and it lost, is told too.
    assert 0 < twice <= told <= twice * (1.5 if fails else 1)


# -- gauges -------------------------------------------------------------------------------------------


def assert_gauges(watched: Watched) -> None:
    world, series, slots = watched.world, scraped(watched.metrics), Slots(watched.world)
    pool = world.cache.pool
    assert value(series, "kv_capacity_bytes") == pool.slabs * world.layout.slab_bytes
    for group, layout in enumerate(world.layout.groups):
        named = {"group": layout.name}
        assert value(series, "kv_bytes_used", **named) == len(slots.held(group)) * layout.block_bytes
        assert value(series, "kv_blocks_free", **named) == slots.free(group)
        assert value(series, "kv_blocks_cached", **named) == len(slots.findable(group))
        shared = sum(n - 1 for n in slots.in_sequences(group).values())
        assert value(series, "kv_bytes_shared", **named) == shared * layout.block_bytes
    if all(layout.block_tokens and not layout.slides for layout in world.layout.groups):
        for cause, lost in slots.waste().items():
            assert value(series, "kv_waste_bytes", cause=cause) == lost, cause
    below = [("host", 1, world.tiering.host.pool.slabs * world.layout.slab_bytes)]
    if world.tiering.disk is not None:
        sizes = [layout.block_bytes for layout in world.layout.groups]
        below.append(("disk", 2, sum(n * size for n, size in zip(world.tiering.disk.slots, sizes, strict=True))))
    for name, tier, capacity in below:
        used, kept = slots.below(tier)
        assert value(series, "tier_capacity_bytes", tier=name) == capacity >= used + kept
        assert value(series, "tier_bytes_used", tier=name) == used
        assert value(series, "tier_bytes_cached", tier=name) == kept
    waiting = list(world.scheduler.waiting)
    suspended = [sequence for sequence in waiting if sequence.suspended is not None]
    assert value(series, "suspended_sequences") == len(suspended)
    assert value(series, "loading_sequences") == len(watched.to_come)
    assert total(series, "waiting_sequences") == len(waiting)
    watched.books.counts["was suspended"] += bool(suspended)
    watched.books.counts["was loading"] += bool(watched.to_come)
    watched.books.counts["host was used"] += slots.below(1)[0] > 0


@pytest.mark.parametrize("laws", [("full",), ("full", "full"), ("full", "constant"), ("full", "window_6")])
def test_gauges_are_what_tables_slots_and_copies_say_after_every_third_step(laws: tuple[str, ...]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        watched = a_world(seed, heads=[2, 3][: len(laws)], laws=laws, reuse=seed != 3, preemption="offload",
                          placement="write_back", block_tokens=4, admission="max_utilization", rows=4,
                          host_slabs=40, disk_slots=20 if seed % 2 else 0)  # fmt: skip
        watched.run(seed, requests=12, aborts=0.02, every=assert_gauges)
        assert_gauges(watched)
        series = scraped(watched.metrics)
        assert total(series, "kv_bytes_used") == total(series, "kv_bytes_shared") == 0
        assert value(series, "tier_bytes_used", tier="host") == value(series, "suspended_sequences") == 0
        seen += watched.books.counts
    wanted = ("was suspended", "was loading", "host was used")
    assert {name: seen[name] for name in wanted if not seen[name]} == {}, dict(seen)


# -- in worlds small enough to count ------------------------------------------------------------------


def hits(series: Series) -> dict[str, float]:
    return {tier: value(series, "prefix_cache_hits_total", tier=tier) for tier in TIERS}


def test_one_prompt_goes_down_comes_back_and_is_counted_on_ones_fingers() -> None:
    world = TierWorld(slabs=8, host_slabs=4, disk_slots=40, placement="write_through", block_tokens=4)
    watched = Watched(world)
    prompt, block = text(17, 1), world.layout.groups[0].block_bytes
    world.serve(prompt)
    watched.observe()
    series = scraped(watched.metrics)
    assert hits(series) == {"device": 0, "host": 0, "disk": 0}
    assert value(series, "transfer_bytes_total", route="demote") == 4 * block, "each full block once"
    assert value(series, "tier_bytes_cached", tier="disk") > 0
    world.crowd_out()
    assert world.cached(world.serve(prompt)) == {"disk": 16}
    assert world.cached(world.serve(prompt)) == {"device": 16}
    watched.observe()
    series = scraped(watched.metrics)
    assert hits(series) == {"device": 16, "host": 0, "disk": 16}
    assert value(series, "host_promotions_total") == 4
    assert value(series, "transfer_bytes_total", route="load") == 4 * block
    assert value(series, "transfer_stall_seconds_count") == 1
    assert value(series, "transfer_stall_seconds_sum") > 0


def test_who_leaves_before_its_copies_end_is_in_no_hit_and_no_miss() -> None:
    world = TierWorld(slabs=8, placement="write_through", by_hand=True)
    watched = Watched(world)
    prompt = text(17, 1)
    world.serve(prompt)
    world.crowd_out()
    watched.observe()
    before = scraped(watched.metrics)
    world.hold("promote")
    number = world.ask(prompt, 3)
    world.step(2)
    watched.observe()
    assert value(scraped(watched.metrics), "loading_sequences") == 1
    world.core.abort(number, world.time)
    world.step()
    world.mover.end()
    world.finish()
    watched.observe()
    after = scraped(watched.metrics)
    for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "prefix_cache_misses_total"):
        assert total(after, name) == total(before, name)
    assert value(after, "transfer_stall_seconds_count") == value(before, "transfer_stall_seconds_count")
    assert value(after, "loading_sequences") == 0


def test_a_dump_tells_of_the_tiers_below_of_what_is_under_way_and_of_pins() -> None:
    world = TierWorld(slabs=8, placement="write_through", by_hand=True, disk_slots=20)
    prompt = text(17, 1)
    world.serve(prompt)
    world.core.pin(np.array(prompt[:9], dtype=np.int32), "", world.time, 1e6)
    world.crowd_out()
    world.hold("promote")
    number = world.ask(prompt, 3)
    world.step(2)
    told = json.loads(json.dumps([state_of(world.core), *map(event_fields, world.events)]))
    below = told[0]["below"]
    assert told[0]["pins"] == ["pin-1"]
    assert (below["loading"], below["orders_under_way"], below["reach"], below["suspended"]) == (1, 1, 3, [])
    assert below["host_groups"]["g0"]["ready"] > 0
    assert sum(below["disk_blocks"]) > 0
    assert {event["event"] for event in told[1:]} >= {"Transferred", "Admitted", "StepEnded"}
    assert state_of(ToyWorld().core)["below"] is None
    world.core.abort(number, world.time)
    world.mover.end()
    world.finish()


def test_the_directory_is_weighed_within_a_fifth_of_what_python_takes_for_it() -> None:
    for groups, tiers in ((1, 1), (2, 3)):
        layout = toy_layout([2] * groups, 16)
        space = KeySpace("toy", 16)
        keys, root = [], space.root("")
        said = [np.array(text(16, i), dtype=np.int32) for i in range(4_000)]
        tracemalloc.start()
        directory = PrefixDirectory(layout.groups, [[len(said)] * groups] * tiers, space)
        top = directory.root(root)
        assert top is not None
        before = tracemalloc.get_traced_memory()[0]
        node = top
        for i, tokens in enumerate(said):
            parent = top if i % 40 == 0 else node
            keys.append(space.child(parent.key, tokens.tobytes()))
            found = directory.child(parent, keys[-1], tokens)
            assert found is not None
            node = found
            for group in range(groups):
                directory.place(node, group, i, i % tiers)
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        columns = sum(slots.nbytes for tier in directory.keyed_in for slots in tier)
        assert directory_bytes(directory) - columns == pytest.approx(taken, rel=0.2)


def test_runs_of_blocks_are_weighed_as_runs_and_stay_runs() -> None:
    layout, space, per = toy_layout([2], 16), KeySpace("toy", 16), 40
    for partly in (0, 20):  # of every second run, so many blocks have been found again
        said = [np.array(text(16, i), dtype=np.int32).tobytes() for i in range(4_000)]
        root = space.root("")
        directory = PrefixDirectory(layout.groups, [[2**20 + len(said)]], space)
        top = directory.root(root)
        assert top is not None
        gc.collect()
        tracemalloc.start()
        for first in range(0, len(said), per):
            top.held += 1
            keys, key = [], top.key
            for one in said[first : first + per]:
                key = space.child(key, one)
                keys.append(key)
            run, _ = directory.grow(
                top, keys, b"".join(said[first : first + per]), list(range(2**20 + first, 2**20 + first + per))
            )
            assert isinstance(run, Run)
            if partly and first // per % 2:
                directory.unfold(run, partly)
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        columns = sum(column.nbytes for tier in directory.keyed_in for column in tier)
        in_runs = directory.in_runs
        assert directory_bytes(directory) - columns == pytest.approx(taken, rel=0.2)
        assert in_runs == directory.in_runs == len(said) - len(said) // per // 2 * partly, "weighing unfolds nothing"


def test_blocks_in_runs_are_counted_until_there_are_none() -> None:
    world = World(slabs=12)
    directory = world.cache.sharing.directory
    world.core.audit = None  # it looks at all nodes
    for number in range(4):
        world.ask(text(30, number), 4)
        while world.core.has_work:
            world.events += world.core.step(world.time)
        assert directory.in_runs == sum(isinstance(one, Run) for one in directory._nodes.values()) > 0
    world.core.reset_kept(world.time)
    assert (directory.in_runs, len(directory)) == (0, 0)


def test_metadata_grows_with_what_is_kept() -> None:
    world = TierWorld(slabs=12)
    metrics = Metrics(world.core, MODEL, clock=lambda: 0.0)
    before = value(scraped(metrics), "kv_metadata_bytes")
    world.serve(text(33, 1))
    after = value(scraped(metrics), "kv_metadata_bytes")
    assert 8 * 500 < after - before < 8 * 3000, "eight nodes"
