"""Metrics in worlds small enough to count on one's fingers; faults that other engines' metrics have had; the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from tests.pure.metrics_by_hand import MODEL, scraped, total, value
from tests.pure.test_deployment import CPU, llama
from tests.pure.tier_worlds import TierWorld
from tests.pure.worlds import drain, engine, one_group, request

from octavo.config import Config
from octavo.deciding import decide
from octavo.errors import CapacityError, RequestError
from octavo.geometry.dtypes import BF16, FP32
from octavo.geometry.state import Component
from octavo.memory.cache import KVCache
from octavo.memory.groups import StateGroup
from octavo.memory.layout import make_layout
from octavo.memory.values import TIERS
from octavo.observe.histogram import GAPS, SEQUENCES, STEP_PARTS, TOKENS, WAITS, Histogram
from octavo.observe.metrics import Metrics
from octavo.observe.names import ABSENT, FAILURES, NAMES, PREFIX, failure_class, names_of, table
from octavo.policy.bundle import Policies
from octavo.runtime.disk_format import Reason
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Refused
from octavo.scheduling.limits import Limits
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.executors import EchoExecutor

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def watched(core: EngineCore) -> Metrics:
    return Metrics(core, MODEL, clock=lambda: 0.0)


# -- what binds a step, and who waits for what --------------------------------------------------


def run(core: EngineCore, metrics: Metrics, *times: float) -> None:
    for now in times:
        metrics.observe(core.step(now))


@pytest.mark.parametrize(
    ("resource", "limits"),
    [
        ("kv_blocks", {"slabs": 5, "seqs": 8, "budget": 64}),
        ("sequence_limit", {"slabs": 64, "seqs": 2, "budget": 64}),
        ("token_budget", {"slabs": 64, "seqs": 8, "budget": 8}),
    ],
)
def test_the_resource_that_keeps_the_queue_out_is_named_in_steps_waiting_and_blocked_time(
    resource: str, limits: dict[str, int]
) -> None:
    core = engine(**limits)
    metrics = watched(core)
    for _ in range(4):  # 7 tokens and two blocks each: two of them enter
        core.submit(request(7, 4), 0.0)
    run(core, metrics, 0.0)
    series = scraped(metrics)
    assert value(series, "limiting_resource_steps_total", resource=resource) == 1
    entered = value(series, "active_sequences")
    assert entered == 2
    assert value(series, "waiting_sequences", reason=resource) == 2
    assert total(series, "admission_blocked_seconds_total") == 0
    run(core, metrics, 2.5)
    assert value(scraped(metrics), "admission_blocked_seconds_total", reason=resource) == 2.5
    for sequence_id in range(4):
        core.abort(sequence_id, 3.0)
    run(core, metrics, 3.5)
    series = scraped(metrics)
    assert value(series, "admission_blocked_seconds_total", reason=resource) == 3.0, "nobody waits from 3.0 on"
    assert total(series, "admission_blocked_seconds_total") == 3.0


def test_who_has_just_arrived_is_not_blocked_by_anything() -> None:
    core = engine()
    metrics = watched(core)
    core.submit(request(3, 2), 0.0)
    assert value(scraped(metrics), "waiting_sequences", reason="none") == 1
    run(core, metrics, 0.0, 1.0)
    series = scraped(metrics)
    assert value(series, "limiting_resource_steps_total", resource="compute") == 2
    assert total(series, "admission_blocked_seconds_total") == 0


# -- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_usage_is_what_tokens_times_bytes_say_and_above_zero_whenever_something_runs(depth: int) -> None:
    """Fault 48: a hundred requests of 500 tokens, one after the other."""
    layout = one_group(16)
    core = engine(layout=layout, slabs=64, budget=512, depth=depth, audit=False)
    metrics = watched(core)
    token_bytes = layout.groups[0].block_bytes // 16
    for _ in range(100):
        sequence_id = core.submit(request(490, 10), 0.0)
        while core.has_work:
            metrics.observe(core.step(0.0))
            seen = metrics.snapshot()
            used = seen["kv_bytes_used"]["full"]
            if seen["active_sequences"]:
                assert 490 * token_bytes <= used <= (500 + 16) * token_bytes
                assert seen["kv_usage"] == used / (64 * 16 * token_bytes) > 0
        assert sequence_id not in core.scheduler._sequences
    assert metrics.snapshot()["kv_usage"] == 0


def test_a_health_probe_resets_nothing() -> None:
    """Fault 49: what is reported per batch is overwritten by the next one. Here it is counted."""
    core = engine(slabs=8, seqs=4)
    metrics = watched(core)
    for i in range(12):
        core.submit(request(6, 9, seed=i), 0.0)
    metrics.observe(drain(core))
    before = scraped(metrics)
    core.submit(request([1], 1), 0.0)
    metrics.observe(drain(core))
    after = scraped(metrics)
    changed = {key[0]: after[key] - before[key] for key in after if after[key] != before[key]}
    assert changed.pop("octavo_finished_total") == changed.pop("octavo_admissions_total") == 1
    assert all(by > 0 for by in changed.values())
    assert value(after, "preemptions_total", action="recompute", policy="latest_lowest") > 0
    for key in ("preemptions_total", "recomputed_tokens_total", "resumes_total"):
        assert total(after, key) == total(before, key)
    assert [name.name for name in NAMES if re.search("rate|per_second|percent|perc$", name.name)] == []


def test_each_pool_has_a_gauge_of_its_own() -> None:
    """Fault 50: many short requests on a hybrid model fill the states and hardly any KV."""
    kv, state = (Component("k", (8, 64), BF16), Component("v", (8, 64), BF16)), (Component("recurrent", (64, 8), FP32),)
    layout = make_layout([StateGroup("kv", (0,), (kv,)), StateGroup("state", (1,), (state,), per_sequence=True)], 16)
    core = engine(layout=layout, slabs=12, seqs=8)
    metrics = watched(core)
    for i in range(8):
        core.submit(request(4, 6, seed=i), 0.0)
    metrics.observe(core.step(0.0))
    series = scraped(metrics)
    kv_layout, state_layout = layout.groups
    assert state_layout.blocks_per_slab == 16, "the states of all eight fit in one slab"
    assert value(series, "kv_bytes_used", group="state") == 8 * 64 * 8 * 4
    assert value(series, "kv_blocks_free", group="state") == 8 + 16 * (12 - 9)
    assert value(series, "kv_bytes_used", group="kv") == 8 * kv_layout.block_bytes
    assert value(series, "kv_blocks_free", group="kv") == 12 - 9
    assert value(series, "kv_waste_bytes", cause="padding") == 8 * 64 * 8 * 4, (
        "eight state blocks of the slab are empty"
    )


def test_the_start_table_the_metrics_and_the_engine_agree_on_one_capacity() -> None:
    """Fault 63: each of the figures follows from the others, and the engine accepts exactly so much."""
    deployment = decide(Config.from_kwargs(max_kv_tokens=1000, block_size=16), llama(), CPU)
    cache = KVCache(deployment.layout, deployment.slabs, 4)
    core = EngineCore(Scheduler(cache, Limits(4, 2048, deployment.max_model_len, 1000)), EchoExecutor())
    series = scraped(watched(core))
    printed = {row.name: row.value.replace(",", "") for row in deployment.rows()}
    capacity = int(value(series, "kv_capacity_bytes"))
    blocks = int(value(series, "kv_blocks_total", group="full"))
    assert printed["KV cache"] == f"{capacity} B"
    assert int(printed["blocks"]) == blocks == 1000 // 16
    assert capacity == blocks * 16 * int(printed["bytes per token"])
    held = blocks * 16
    assert deployment.kv_tokens == cache.max_tokens_per_sequence() == held == deployment.max_model_len
    core.submit(request(held - 10, 10), 0.0)
    with pytest.raises(RequestError):
        core.submit(request(held - 10, 11), 0.0)
    drain(core)


def test_the_longest_sequence_fills_every_block_of_the_metric_and_one_more_token_is_refused() -> None:
    core = engine(slabs=10, budget=64)
    metrics = watched(core)
    tokens = int(value(scraped(metrics), "kv_blocks_total", group="full")) * 4
    core.submit(request(tokens - 5, 6), 0.0)  # its last token is never computed
    with pytest.raises(CapacityError):
        core.submit(request(tokens - 5, 7), 0.0)
    least = tokens
    while core.has_work:
        metrics.observe(core.step(0.0))
        least = min(least, int(value(scraped(metrics), "kv_blocks_free", group="full")))
    assert least == 0
    assert value(scraped(metrics), "refusals_total", reason="never_fits") == 1


# -- the rest -----------------------------------------------------------------------------------


def test_what_a_front_end_refuses_is_counted_beside_what_the_core_refuses() -> None:
    core = engine(max_waiting=1)
    metrics = watched(core)
    metrics.observe([Refused(0.0, "a", "invalid"), Refused(0.0, "b", "queue_full")])
    core.submit(request(3, 2), 0.0)
    with pytest.raises(RequestError):
        core.submit(request(3, 2), 0.0)
    metrics.observe(drain(core))
    series = scraped(metrics)
    assert [value(series, "refusals_total", reason=r) for r in ("invalid", "queue_full", "never_fits")] == [1, 2, 0]


def test_metadata_is_the_bytes_of_tables_states_and_owners() -> None:
    rows, slabs = 8, 16
    core = engine(slabs=slabs, seqs=rows)
    columns = core.scheduler.cache.pool.slots[0]
    slot_bytes = sum(column.itemsize for column in (columns.state, columns.refs, columns.last_plan))
    width = 16  # a table begins with room for 16 blocks
    expected = rows * (8 + 8) + slabs * (1 + 4) + rows * (width * 4 + 8) + slabs * slot_bytes
    assert value(scraped(watched(core)), "kv_metadata_bytes") == expected
    assert sum(a.nbytes for a in vars(core.scheduler.cache).values() if isinstance(a, np.ndarray)) == rows * 16


def test_the_policies_that_decided_are_named() -> None:
    core = engine(policies=Policies.named(admission="guaranteed_no_evict"))
    assert value(scraped(watched(core)), "admissions_total", policy="guaranteed_no_evict") == 0


def test_two_engines_in_one_process_do_not_count_for_each_other() -> None:
    one, two = engine(), engine()
    first, second = watched(one), watched(two)
    one.submit(request(3, 2), 0.0)
    first.observe(drain(one))
    assert value(scraped(first), "finished_total", reason="length") == 1
    assert value(scraped(second), "finished_total", reason="length") == 0
    assert scraped(first).keys() == scraped(second).keys()


def test_watching_may_begin_in_the_middle() -> None:
    core = engine(slabs=8, seqs=4, depth=1)
    for i in range(9):
        core.submit(request(6, 9, seed=i), 0.0)
    for _ in range(5):
        core.step(0.0)
    metrics = watched(core)
    metrics.observe(drain(core))
    assert value(scraped(metrics), "finished_total", reason="length") == 9
    assert value(scraped(metrics), "e2e_request_latency_seconds_count") == 0, "nobody was seen to arrive"


def test_a_snapshot_is_plain_and_says_the_same_as_a_scrape() -> None:
    core = engine(slabs=8)
    metrics = watched(core)
    for i in range(5):
        core.submit(request(6, 9, seed=i), 0.0)
    for _ in range(6):
        metrics.observe(core.step(0.0))
    plain, series = metrics.snapshot(), scraped(metrics)
    assert plain["model"] == MODEL
    assert plain["kv_bytes_used"]["full"] == value(series, "kv_bytes_used", group="full") > 0
    assert plain["active_sequences"] == value(series, "active_sequences")
    assert plain["batch_size_by_iteration"]["sum"] == value(series, "batch_size_by_iteration_sum")
    assert set(plain) == {name.name for name in names_of(("device",))} | {"model", "kv_usage"}


@pytest.mark.parametrize("bounds", [SEQUENCES, TOKENS, GAPS, WAITS, STEP_PARTS])
def test_a_value_on_a_bound_belongs_below_it_one_by_one_or_together(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))
    single, many = Histogram(bounds), Histogram(bounds)
    for bound in bounds:
        single.add(bound)
    single.add(bounds[-1] * 2, times=3)
    many.add_all(np.array([*bounds, *[bounds[-1] * 2] * 3]))
    assert single.read().counts == many.read().counts == (*[1] * len(bounds), 3)
    assert single.read().sum == pytest.approx(many.read().sum)
    assert single.read().mean == pytest.approx((sum(bounds) + 6 * bounds[-1]) / (len(bounds) + 3))


def exposed(metrics: Metrics) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", metrics.render().decode(), flags=re.MULTILINE))


def with_tiers() -> dict[tuple[str, ...], EngineCore]:
    """An engine of each kind, by the tiers that it has."""
    return {
        ("device",): engine(),
        ("device", "host"): TierWorld(host_slabs=4).core,
        TIERS: TierWorld(host_slabs=4, disk_slots=4).core,
    }


def test_no_series_tells_of_a_tier_that_the_engine_has_not_got() -> None:
    below = {"host": ("host", "offload", "demote", "promote"), "disk": ("disk", "store", "load")}
    for tiers, core in with_tiers().items():
        values = {value for _, pairs in scraped(watched(core)) for _, value in pairs}
        for tier, words in below.items():
            assert values & set(words) == (set(words) if tier in tiers else set())


def test_every_reason_of_a_store_or_a_mover_is_a_label_and_free_text_is_not() -> None:
    assert set(get_args(Reason)) | {"timed_out", "lost_completion", "not_begun", "error"} == set(FAILURES)
    assert [failure_class(reason) for reason in FAILURES] == list(FAILURES)
    assert failure_class("error: no such device as /dev/secret") == failure_class("") == "error"


def test_the_page_and_the_engine_have_the_same_names_types_labels_and_meanings() -> None:
    page = PAGE.read_text()
    for section in dict.fromkeys(name.section for name in NAMES):
        assert table(section) in page
    for tiers, core in with_tiers().items():
        metrics = watched(core)
        names = names_of(tiers)
        listed = {name.full: name.kind for name in names}
        assert exposed(metrics) == listed
        labels: dict[str, set[str]] = {}
        for name, pairs in scraped(metrics):
            family = name if name in listed else re.sub("_(bucket|count|sum)$", "", name)
            labels.setdefault(family, {"model"}).update(dict(pairs).keys() - {"le"})
        assert labels == {name.full: set(name.labels) for name in names}
    assert names_of(TIERS) == NAMES
    for name, meaning in ABSENT.items():
        assert f"| `{PREFIX}{name}` | gauge | `model`, `tiers` | {name.rpartition('_')[2]} | {meaning} |" in page
    assert not ABSENT.keys() & {name.name for name in NAMES}


def test_names_follow_the_rules() -> None:
    for name in NAMES:
        assert name.full.startswith(PREFIX)
        if name.kind == "counter":
            assert name.full.endswith("_total")
        if "bytes" in name.name or "seconds" in name.name:
            assert name.unit in ("bytes", "seconds")
    mentioned = re.findall(r"`?(octavo_[a-z0-9_]+)", PAGE.read_text())
    known = {name.full for name in NAMES} | {PREFIX + name for name in ABSENT}
    assert {name for name in mentioned if re.sub("_(sum|count|bucket)$", "", name) not in known} == set()
