"""Metrics of tiers, against books kept by hand: from what is asked of the mover and what it answers, from where blocks
lie when somebody is looked up, and from tables, slots and positions computed. The books never look at an event."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.pure.metrics_by_hand import MODEL, ByHand, Series, assert_histogram, scraped, total, value
from tests.pure.test_metrics_reuse import alike, words
from tests.pure.tier_worlds import TierWorld, _ask_something, drawn, text
from tests.pure.worlds import ToyWorld

from octavo.memory.keys import KeySpace
from octavo.memory.prefix import Match, Node, PrefixDirectory
from octavo.memory.transfers import Ended
from octavo.observe.metadata import directory_bytes
from octavo.observe.metrics import Metrics
from octavo.observe.names import FAILURES
from octavo.observe.recorder import event_fields, state_of
from octavo.scheduling.events import Finished
from octavo.scheduling.plan import StepPlan
from octavo.simulate.toy_laws import toy_layout
from octavo.simulate.toy_mover import ToyFaults

TIERS = ("device", "host", "disk")


@dataclass
class LookUp:
    asked: int
    known: int
    found: int
    places: list[tuple[int, ...]]
    """The tier that each block of the found start had to come from, group by group; -1: not needed."""

    def by_tier(self, tokens: int, size: int) -> dict[str, int]:
        told: Counter[str] = Counter()
        for index in range(-(-tokens // size)):
            told[TIERS[max(0, *self.places[index])]] += min(size, tokens - index * size)
        return dict(told)


@dataclass
class Books:
    """What is to be counted. `watch` it into a world before anything is asked."""

    counts: Counter[str] = field(default_factory=Counter)
    promotions: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)


class Watched:
    """A world whose every seam is listened at, with metrics beside it."""

    def __init__(self, world: TierWorld) -> None:
        self.world, self.books = world, Books()
        self.metrics = Metrics(world.core, MODEL, clock=lambda: world.time)
        self.told = 0
        self.looked_up: dict[int, LookUp] = {}
        """By the chain that was looked up last."""
        self.to_come: dict[int, tuple[LookUp | None, int, float]] = {}
        """By sequence: what it waits for, how many positions, since when."""
        self.seated = set[int]()
        self._listen_to_copies()
        self._listen_to_look_ups()
        self._listen_to_the_scheduler()

    def _listen_to_copies(self) -> None:
        world, counts = self.world, self.books.counts
        poll = world.mover.poll

        def polled(now: float) -> list[Any]:
            notices = poll(now)
            for notice in notices:
                if isinstance(notice, Ended):
                    self._ended(notice)
            return notices

        world.mover.poll = polled
        for tier, shelf in (("device", world.cache.sharing), ("host", world.tiering.host)):
            shelf = getattr(shelf, "shelf", None)
            if shelf is not None:
                self._count_calls(shelf.eviction, "gone", f"evicted {tier}")
        disk = world.tiering.disk
        if disk is not None:
            take = disk.take

            def taken(group: int) -> int | None:
                before = disk.blocks[group]
                slot = take(group)
                counts["evicted disk"] += before - disk.blocks[group]
                return slot

            disk.take = taken  # type: ignore[method-assign]

    def _count_calls(self, owner: Any, name: str, what: str) -> None:
        inner = getattr(owner, name)

        def called(*arguments: Any) -> Any:
            self.books.counts[what] += 1
            return inner(*arguments)

        setattr(owner, name, called)

    def _ended(self, notice: Ended) -> None:
        books, order = self.books, notice.order
        whole = sum(not reason for reason in notice.reasons)
        books.counts[f"{order.route} blocks"] += whole
        books.counts[f"{order.route} bytes"] += whole * self.world.layout.groups[order.group].block_bytes
        books.counts[f"{order.route} ends"] += 1
        for reason in notice.reasons:
            if reason:
                books.counts[f"{order.route} {reason if reason in FAILURES else 'error'}"] += 1
        if order.route == "promote" and whole:
            books.promotions.append(0.001)

    def _listen_to_look_ups(self) -> None:
        sharing, tiering = self.world.cache.sharing, self.world.tiering
        if sharing is None:
            return
        for owner in (sharing, tiering):
            match = owner.match  # type: ignore[attr-defined]

            def matched(chain: Any, tokens: Any, limit: int, *tiers: int, match: Any = match) -> Match:
                found: Match = match(chain, tokens, limit, *tiers)
                self.looked_up[id(chain)] = self._look_up(chain, tokens[:limit], found)
                return found

            owner.match = matched  # type: ignore[method-assign, union-attr]

    def _look_up(self, chain: Any, tokens: Sequence[int], found: Match) -> LookUp:
        assert self.world.cache.sharing is not None
        nodes = self.world.cache.sharing.directory.nodes()
        known = max((alike(words(node), tokens) for node in nodes if root_of(node).key == chain.root[0]), default=0)
        path = [*found.path, *([] if found.partial is None else [found.partial])]
        places = [self._places(node, found.tokens, len(found.path)) for node in path]
        return LookUp(len(tokens), known, found.tokens, places)

    def _places(self, node: Node, tokens: int, whole: int) -> tuple[int, ...]:
        """Where each group has what a start after so many tokens reads of this block."""
        tiers = []
        for group, layout in enumerate(self.world.layout.groups):
            if layout.block_tokens:
                needed = node.index >= int(layout.first_block(np.array([tokens]))[0])
            else:
                needed = node.index == whole - 1
            tiers.append(next(t for t, place in enumerate(node.places) if place[group] >= 0) if needed else -1)
        return tuple(tiers)

    def _listen_to_the_scheduler(self) -> None:
        world = self.world
        scheduler, tiering, submit = world.scheduler, world.tiering, world.executor.submit
        welcome, settle, push = scheduler.welcome, tiering.settle, scheduler.waiting.push

        def welcomed(sequence: Any, draft: Any, start: Any) -> None:
            welcome(sequence, draft, start)
            self._seated(sequence, draft.now)

        def settled(notices: Any) -> Any:
            arrivals = settle(notices)
            for row in arrivals.rows:
                self._came(int(scheduler.running.sequence_id[row]), "")
            for row, reason in arrivals.lost:
                self._came(int(scheduler.running.sequence_id[row]), reason)
            return arrivals

        def pushed(sequence: Any, *, returned: bool = False) -> None:
            push(sequence, returned=returned)
            self.books.counts["returned"] += returned
            self.to_come.pop(sequence.sequence_id, None)

        def submitted(plan: StepPlan) -> None:
            self.books.plans.append(plan)
            submit(plan)

        scheduler.welcome = welcomed  # type: ignore[method-assign]
        tiering.settle = settled  # type: ignore[method-assign]
        scheduler.waiting.push = pushed  # type: ignore[method-assign]
        world.executor.submit = submitted  # type: ignore[method-assign]
        park = tiering.parking.park

        def parked(row: int) -> Any:
            made = park(row)
            self.books.counts["offload"] += made is not None
            return made

        tiering.parking.park = parked  # type: ignore[method-assign]

    def _seated(self, sequence: Any, now: float) -> None:
        number, running = sequence.sequence_id, self.world.scheduler.running
        self.books.counts["again" if number in self.seated else "first"] += 1
        self.seated.add(number)
        start = int(running.computed[sequence.row])
        looked_up = None if sequence.chain is None else self.looked_up.pop(id(sequence.chain), None)
        if running.loading[sequence.row]:
            self.to_come[number] = (looked_up, start, now)
        elif looked_up is not None:
            self._count(looked_up, start)

    def _came(self, number: int, reason: str) -> None:
        looked_up, start, since = self.to_come.pop(number)
        self.books.stalls.append(self.world.time - since)
        if reason:
            self.books.counts[f"restart {reason if reason in FAILURES else 'error'}"] += 1
        if looked_up is not None:
            self._count(looked_up, start, reason)

    def _count(self, looked_up: LookUp, start: int, reason: str = "") -> None:
        counts, by_tier = self.books.counts, looked_up.by_tier(start, self.world.block_tokens)
        counts["queries"] += looked_up.asked
        counts["absent"] += looked_up.asked - looked_up.known
        counts["incomplete"] += looked_up.known - looked_up.found
        counts["no_room"] += looked_up.found - start
        if reason:
            lowest = "disk" if "disk" in by_tier else "host"
            counts[f"{lowest} {reason if reason in FAILURES else 'error'}"] += start
        else:
            for tier, tokens in by_tier.items():
                counts[f"{tier} hits"] += tokens

    # -- driving ------------------------------------------------------------------------------

    def run(self, seed: int, *, requests: int, aborts: float = 0.0, resets: float = 0.005, every: Any = None) -> None:
        rng, world = Random(f"watched {seed}"), self.world
        openings = [text(rng.randint(1, 17), rng.randrange(10**6)) for _ in range(3)]
        left = requests
        for operation in range(5_000):
            if left and len(world.scheduler.waiting) < 8 and rng.random() < 0.5:
                left -= 1
                _ask_something(world, rng, openings)
            if world.asked and rng.random() < aborts:
                world.core.abort(rng.choice(list(world.asked)), world.time)
            if rng.random() < resets:
                world.core.reset_kept(world.time)
            world.step()
            self.observe()
            if every is not None and operation % 3 == 0:
                every(self)
            if not left and not world.core.has_work:
                break
        world.finish()
        self.observe()
        world.assert_right()

    def observe(self) -> None:
        self.metrics.observe(self.world.events[self.told :])
        self.told = len(self.world.events)


def root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


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


def a_world(seed: int, **fixed: Any) -> Watched:
    return Watched(TierWorld(**drawn(Random(f"metrics {seed}"), fixed)))


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
    twice = told = 0
    for seed in range(6):
        watched = a_world(seed, reuse=True, heads=[2], laws=["full"], slabs=12, host_slabs=30, block_tokens=4, rows=4,
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


class Slots(ByHand):
    """The books of memory alone, with what copies and suspensions hold."""

    def __init__(self, world: TierWorld) -> None:
        self.world, self.cache = world, world.cache

    def suspended(self, group: int, tier: str) -> list[int]:
        return [s for value in self.cache.suspensions.values() for at, s in value.slots[group] if at == tier]

    def copied(self, group: int, tier: int) -> set[int]:
        return {slot for at, of, slot in self.world.tiering.held() if (at, of) == (tier, group)}

    def held(self, group: int) -> set[int]:
        return super().held(group) | set(self.suspended(group, "device")) | self.copied(group, 0)

    def in_sequences(self, group: int) -> Counter[int]:
        return self.listed(group) + Counter(self.suspended(group, "device"))

    def below(self, tier: int) -> tuple[int, int]:
        """Bytes used and bytes cached."""
        used = kept = 0
        for group, layout in enumerate(self.cache.layout.groups):
            busy = self.copied(group, tier) | (set(self.suspended(group, "host")) if tier == 1 else set())
            if tier == 1:
                sharing = self.cache.sharing
                found = {} if sharing is None else {n.places[1][group]: n for n in sharing.directory.nodes()}
                free = set(found) - {-1} - busy
            else:
                assert self.world.tiering.disk is not None
                free = set(self.world.tiering.disk.found_slots(group)) - busy
            used += len(busy) * layout.block_bytes
            kept += len(free) * layout.block_bytes
        return used, kept


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


def test_metadata_grows_with_what_is_kept() -> None:
    world = TierWorld(slabs=12)
    metrics = Metrics(world.core, MODEL, clock=lambda: 0.0)
    before = value(scraped(metrics), "kv_metadata_bytes")
    world.serve(text(33, 1))
    after = value(scraped(metrics), "kv_metadata_bytes")
    assert 8 * 500 < after - before < 8 * 3000, "eight nodes"
