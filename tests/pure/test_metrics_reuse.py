"""Metrics of reuse, against books kept by hand and in worlds small enough to count; gauges beside cached blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.pure.metrics_by_hand import MODEL, ByHand, Series, arguments, scraped, total, value
from tests.pure.test_metrics import assert_counters, assert_gauges, assert_latencies, assert_steps
from tests.pure.test_reuse import World, text

from octavo.memory.nodes import Node
from octavo.memory.prefix import Match
from octavo.observe.metrics import Metrics
from octavo.policy.eviction import Evictable
from octavo.scheduling.plan import StepPlan
from octavo.scheduling.request import Request

WORLDS: list[dict[str, Any]] = [
    {"groups": groups, "depth": depth, "batching": batching, "admission": admission, "reuse": "prefix"}
    for groups in (1, 2)
    for batching, admission in (
        ("iteration", "max_utilization"),
        ("iteration", "guaranteed_no_evict"),
        ("request", "max_utilization"),
    )
    for depth in (0, 1)
]
everywhere = pytest.mark.parametrize("world", WORLDS, ids=arguments)
REASONS = ("absent", "incomplete", "no_room")


class ByHandReuse(ByHand):
    """Prompts that begin alike. What was known when somebody was looked up is searched for text by text."""

    def __init__(self, seed: int, **world: Any) -> None:
        super().__init__(seed, **world)
        sharing = self.cache.sharing
        assert sharing is not None
        self.sharing = sharing
        self.looked_up: dict[int, tuple[int, int, int]] = {}
        """Asked, known and found, by the chain that was looked up last."""
        match, gone, go_next = sharing.match, sharing.shelf.eviction.gone, sharing.shelf.eviction.go_next

        def matched(chain: Any, tokens: Any, limit: int) -> Match:
            found = match(chain, tokens, limit)
            known = max((alike(words(node), tokens[:limit]) for node in sharing.directory.nodes()), default=0)
            self.looked_up[id(chain)] = (limit, known, found.tokens)
            return found

        def went(block: Evictable) -> None:
            self.counts["evictions"] += 1
            gone(block)

        sharing.match = matched  # type: ignore[method-assign]

        def went_next(group: int, blocks: Sequence[tuple[int, int, int]]) -> int:
            many = go_next(group, blocks)
            self.counts["evictions"] += many
            return many

        sharing.shelf.eviction.gone = went  # type: ignore[method-assign]
        sharing.shelf.eviction.go_next = went_next  # type: ignore[method-assign]

    def _some_request(self) -> tuple[Request, str | None]:
        asked, reason = super()._some_request()
        prompt = asked.prompt_token_ids
        if reason is None and len(prompt) > 2:
            alike = max(self.random.randint(1, len(prompt)) for _ in range(3))
            prompt[1:alike] = np.array(text(20, self.random.randint(0, 1)), dtype=np.int32)[1:alike]
            prompt[0] = prompt[0] if prompt[0] == 13 else 7
        return asked, reason

    def _planned(self, plan: StepPlan) -> None:
        super()._planned(plan)
        for admission in plan.admissions:
            i = admission.sequence_id
            if i not in plan.sequence_ids:  # seated without a chunk, and not looked up
                continue
            start = int(plan.starts[plan.sequence_ids == i][0])
            asked, known, found = self.looked_up[id(self.sequences[i].chain)]
            assert asked == len(self.asked[i].prompt_token_ids) + len(admission.outputs) - 1
            self.counts["queries"] += asked
            self.counts["hits"] += start
            self.counts["absent"] += asked - known
            self.counts["incomplete"] += known - found
            self.counts["no_room"] += found - start


def words(node: Node | None) -> list[int]:
    """All that was said up to this node."""
    if node is None or node.parent is None:
        return []
    return [*words(node.parent), *np.frombuffer(node.said, dtype="<i4").tolist()]


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def reuse_of(series: Series) -> dict[str, float]:
    missed = {r: value(series, "prefix_cache_misses_total", tier="device", reason=r) for r in REASONS}
    return {
        "queries": value(series, "prefix_cache_queries_total"),
        "hits": value(series, "prefix_cache_hits_total", tier="device"),
        "evictions": value(series, "evictions_total", tier="device"),
        **missed,
    }


@everywhere
def test_hits_misses_and_evictions_are_what_texts_and_plans_say(world: dict[str, Any]) -> None:
    for seed in range(2):
        hand = ByHandReuse(seed, **world)
        hand.run(200)
        hand.drain()
        series = scraped(hand.metrics)
        counted = reuse_of(series)
        assert counted == {name: hand.counts[name] for name in counted}
        assert counted["queries"] == counted["hits"] + sum(counted[reason] for reason in REASONS)
        assert counted["hits"] > 0
        assert_counters(hand, series)
        assert_steps(hand, series)
        assert_latencies(hand, series)


@everywhere
def test_gauges_are_right_with_shared_and_cached_blocks_after_every_operation(world: dict[str, Any]) -> None:
    hand = ByHandReuse(3, **world)
    for operation in range(150):
        hand.run(1)
        if operation % 3 == 0:
            assert_gauges(hand, scraped(hand.metrics))
    hand.drain()
    assert sum(hand.cache.pool.cached)
    series = scraped(hand.metrics)
    assert_gauges(hand, series)
    assert total(series, "kv_bytes_used") == 0
    for group in hand.cache.layout.groups:
        whole = value(series, "kv_blocks_total", group=group.name)
        assert value(series, "kv_blocks_free", group=group.name) == whole, "whatever is cached can be had"


def test_the_random_worlds_have_seen_every_kind_of_hit_and_miss() -> None:
    seen = dict.fromkeys(("hits", "absent", "evictions", "recomputed", "preemptions", "shared"), 0)
    for world in WORLDS:
        for seed in range(2):
            hand = ByHandReuse(seed, **world)
            for _ in range(200):
                hand.run(1)
                hand.counts["shared"] += any(n > 1 for n in hand.listed(0).values())
            hand.drain()
            for name in seen:
                seen[name] += hand.counts[name]
    assert {name: count for name, count in seen.items() if count < 10} == {}


def watched(world: World) -> Metrics:
    return Metrics(world.core, MODEL, clock=lambda: 0.0)


def finished(world: World, metrics: Metrics) -> dict[str, float]:
    before = len(world.events)
    world.finish()
    metrics.observe(world.events[before:])
    return reuse_of(scraped(metrics))


def test_what_one_prompt_after_the_other_finds_counted_on_ones_fingers() -> None:
    world = World()
    metrics = watched(world)
    world.ask(text(13), 1)
    first = finished(world, metrics)
    assert first == {"queries": 12, "hits": 0, "absent": 12, "incomplete": 0, "no_room": 0, "evictions": 0}
    world.ask(text(13), 1)
    assert finished(world, metrics) == first | {"queries": 24, "hits": 12}
    world.ask(text(13), 1, salt="another tenant's")
    assert finished(world, metrics) == first | {"queries": 36, "hits": 12, "absent": 24}


def test_text_that_is_known_without_a_snapshot_there_is_incomplete_and_not_absent() -> None:
    world = World(heads=(2, 2), laws=("full", "constant"), slabs=100)
    metrics = watched(world)
    world.ask(text(17, 1), 1)
    finished(world, metrics)
    world.ask(text(11, 1) + text(9, 3), 1)
    told = finished(world, metrics)
    assert (told["hits"], told["incomplete"], told["absent"]) == (0, 11, 16 + 19 - 11)


def test_what_is_found_and_cannot_be_copied_from_has_no_room() -> None:
    world = World(slabs=4, seqs=1)
    metrics = watched(world)
    for _ in range(2):  # four blocks, all of the pool: a copy of the last one would be the fifth
        world.ask(text(16), 1)
        told = finished(world, metrics)
    assert (told["hits"], told["no_room"], told["absent"], told["incomplete"]) == (0, 15, 15, 0)
    world.assert_all_right()


def test_without_reuse_nothing_is_looked_up() -> None:
    world = World(reuse=False)
    metrics = watched(world)
    for _ in range(2):
        world.ask(text(13), 3)
    assert set(finished(world, metrics).values()) == {0}


def test_what_a_resumed_sequence_finds_kept_is_not_counted_as_computed_again() -> None:
    """Counted when it resumes, since before nobody knows what will be found: a counter never goes down."""
    world = World(slabs=12, seqs=3, budget=16)
    metrics = watched(world)
    for seed in range(3):
        world.ask(text(9, seed), 24)
    finished(world, metrics)
    given_up = sum(e.computed_tokens for e in world.events if type(e).__name__ == "Preempted")
    back = [e for e in world.events if type(e).__name__ == "Admitted" and e.resumed]  # type: ignore[union-attr]
    found = sum(e.cached_tokens for e in back)  # type: ignore[union-attr]
    assert found > 0
    assert value(scraped(metrics), "recomputed_tokens_total") == given_up - found > 0
    world.assert_all_right()


def test_a_reset_finds_nothing_again_and_counts_what_it_gave_up() -> None:
    world = World()
    metrics = watched(world)
    world.ask(text(13), 1)
    finished(world, metrics)
    kept = world.cache.pool.cached[0]
    assert world.core.reset_kept(0.0) == [kept]
    metrics.observe(world.core.scheduler.drain_events())
    assert reuse_of(scraped(metrics))["evictions"] == kept == 3
    again = world.ask(text(13), 1)
    assert finished(world, metrics)["hits"] == 0
    assert world.cached(again) == 0


def test_a_copy_in_flight_and_a_double_save_nothing() -> None:
    world = World(depth=1, seqs=3)
    metrics = watched(world)
    world.ask(text(16, 1), 20)
    for _ in range(3):
        world.events += world.core.step(0.0)
    world.ask([*text(7, 1), 1, 2, 3], 20)
    world.events += world.core.step(1.0)
    assert world.cache.pins, "the block wanted in part is being copied"
    block = world.cache.layout.groups[0].block_bytes
    assert value(scraped(metrics), "kv_bytes_shared", group="g0") == block, "one whole block is shared"
    world.finish()
    world.assert_all_right()
