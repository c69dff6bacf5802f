"""Every metric, against books kept by hand: random traffic with preemption, aborts, refusals and failures."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pure.metrics_by_hand import (
    ByHand,
    Series,
    arguments,
    assert_histogram,
    differences,
    positions,
    scraped,
    total,
    value,
)

from octavo.memory.cache import KVCache
from octavo.observe.fold import BUSY_WINDOW_S
from octavo.observe.names import NAMES
from octavo.scheduling.sequence import SequenceState

WORLDS: list[dict[str, Any]] = [
    {"groups": groups, "depth": depth, "allocation": allocation, "batching": batching, "admission": admission}
    for groups, allocation in ((1, "paged"), (2, "paged"), (1, "contiguous-max"), (2, "contiguous-pow2"))
    for batching, admission in (
        ("iteration", "max_utilization"),
        ("iteration", "guaranteed_no_evict"),
        ("request", "max_utilization"),
    )
    for depth in (0, 1)
]
everywhere = pytest.mark.parametrize("world", WORLDS, ids=arguments)


@everywhere
def test_counters_and_histograms_are_what_was_asked_planned_and_answered(world: dict[str, Any]) -> None:
    for seed in range(2):
        hand = ByHand(seed, **world)
        hand.run(200)
        hand.drain()
        series = scraped(hand.metrics)
        assert_counters(hand, series)
        assert_steps(hand, series)
        assert_latencies(hand, series)


def assert_counters(hand: ByHand, series: Series) -> None:
    policies = hand.core.scheduler.policies
    admission, victim = policies.admission.name, policies.victim.name
    assert value(series, "admissions_total", policy=admission) == hand.counts["admissions"]
    assert value(series, "resumes_total", policy=admission) == hand.counts["resumes"]
    assert value(series, "preemptions_total", action="recompute", policy=victim) == hand.counts["preemptions"]
    assert value(series, "recomputed_tokens_total") == hand.counts["recomputed"]
    for reason in ("never_fits", "queue_full", "invalid"):
        assert value(series, "refusals_total", reason=reason) == hand.refused[reason]
    for reason in ("stop", "length", "abort", "error"):
        assert value(series, "finished_total", reason=reason) == sum(r == reason for r, _ in hand.ended.values())
    assert value(series, "aborted_total") == sum(r == "abort" for r, _ in hand.ended.values())
    assert total(series, "admission_blocked_seconds_total") == pytest.approx(hand.blocked_s, abs=1e-6)


def assert_steps(hand: ByHand, series: Series) -> None:
    plans = hand.executor.plans
    assert_histogram(series, "batch_size_by_iteration", [len(plan.rows) for plan in plans])
    for kind, expected in positions(plans, hand.asked).items():
        assert_histogram(series, "batch_tokens_by_iteration", expected, kind=kind)
    assert total(series, "limiting_resource_steps_total") == len(plans)
    assert value(series, "device_busy_ratio") == pytest.approx(hand.busy_ratio(BUSY_WINDOW_S), abs=1e-6)


def assert_latencies(hand: ByHand, series: Series) -> None:
    times, arrived, scheduled = hand.times, hand.arrived, hand.scheduled
    well = {i: at for i, (reason, at) in hand.ended.items() if reason in ("stop", "length")}
    got = {i: at for i, at in times.items() if at}
    expected = {
        "queue_seconds": [at - arrived[i] for i, at in scheduled.items()],
        "time_to_first_token_seconds": [at[0] - arrived[i] for i, at in got.items()],
        "prefill_seconds": [at[0] - scheduled[i] for i, at in got.items()],
        "inter_token_latency_seconds": [gap for at in got.values() for gap in differences(at)],
        "e2e_request_latency_seconds": [end - arrived[i] for i, end in well.items()],
        "decode_seconds": [end - got[i][0] for i, end in well.items() if i in got],
        "time_per_output_token_seconds": [
            (got[i][-1] - got[i][0]) / (len(got[i]) - 1) for i in well if i in got and len(got[i]) > 1
        ],
    }
    for name, values in expected.items():
        assert_histogram(series, name, values)


@everywhere
def test_gauges_are_what_tables_and_slots_say_after_every_operation(world: dict[str, Any]) -> None:
    hand = ByHand(3, **world)
    for operation in range(100):
        hand.run(1)
        if operation % 3 == 0:
            assert_gauges(hand, scraped(hand.metrics))
    hand.drain()
    series = scraped(hand.metrics)
    assert_gauges(hand, series)
    assert total(series, "kv_bytes_used") == 0


def assert_gauges(hand: ByHand, series: Series) -> None:
    cache: KVCache = hand.cache
    assert value(series, "kv_capacity_bytes") == cache.pool.slabs * cache.layout.slab_bytes
    for index, group in enumerate(cache.layout.groups):
        held = hand.held(index)
        assert value(series, "kv_bytes_used", group=group.name) == len(held) * group.block_bytes
        assert value(series, "kv_blocks_total", group=group.name) == cache.pool.slabs * group.blocks_per_slab
        assert value(series, "kv_blocks_free", group=group.name) == hand.free(index)
        assert value(series, "kv_blocks_cached", group=group.name) == len(hand.findable(index))
        saved = sum(sequences - 1 for sequences in hand.listed(index).values())
        assert value(series, "kv_bytes_shared", group=group.name) == saved * group.block_bytes
        if cache.sharing is None:
            assert not hand.findable(index)
            assert not saved
    for cause, lost in hand.waste().items():
        assert value(series, "kv_waste_bytes", cause=cause) == lost
    assert value(series, "live_cached_tokens") == sum(hand.kept.values())
    assert value(series, "active_sequences") == hand.count(SequenceState.RUNNING)
    assert total(series, "waiting_sequences") == hand.count(SequenceState.WAITING)
    if value(series, "active_sequences"):
        assert total(series, "kv_bytes_used") > 0, "something runs and nothing is used"


@everywhere
def test_no_counter_ever_goes_down(world: dict[str, Any]) -> None:
    hand = ByHand(9, **world)
    counters = {name.full for name in NAMES if name.kind == "counter"}
    before: Series = {}
    for _ in range(20):
        hand.run(6)
        series = scraped(hand.metrics)
        for key, number in series.items():
            if key[0] in counters or key[0].endswith(("_bucket", "_count", "_sum")):
                assert number >= before.get(key, 0)
        assert before.keys() <= series.keys(), "a series has vanished"
        before = series


def test_the_random_worlds_have_seen_everything() -> None:
    """The tests above would be worth little if nothing were ever preempted, refused or failed."""
    seen = dict.fromkeys(("preempted", "never_fits", "queue_full", "invalid", "stop", "length", "abort", "error"), 0)
    for world in WORLDS[:12]:
        for seed in range(2):
            hand = ByHand(seed, **world)
            hand.run(200)
            seen["preempted"] += hand.counts["preemptions"]
            for reason, count in hand.refused.items():
                seen[reason] += count
            for reason, _ in hand.ended.values():
                seen[reason] += 1
    assert {what: count for what, count in seen.items() if count < 10} == {}
