"""Many decode steps at once are those that single steps would have been: events, tables, columns, counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.worlds import VOCAB, one_group, two_groups

from octavo.cost.step import LinearCost
from octavo.cost.transfer import TransferLaw
from octavo.errors import InvariantViolation
from octavo.memory.cache import KVCache
from octavo.memory.check import check, is_empty
from octavo.memory.keys import KeySpace
from octavo.memory.tiering import Below, tiered_cache
from octavo.policy.bundle import Policies
from octavo.policy.chaos import Chaos
from octavo.policy.eviction import eviction_named
from octavo.policy.placement import placement_named
from octavo.scheduling import entry
from octavo.scheduling.audit import check_all
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Event, Finished, Preempted, StepEnded, StepTokens, Transferred
from octavo.scheduling.leap import DecodeRun, advance, expand, quiet_steps
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request, SamplingParams
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.drive import Happening, Simulation
from octavo.simulate.executors import SimExecutor
from octavo.simulate.links import Links, SeededFaults, SimMover
from octavo.simulate.toy_model import toy_layout

STOP = 0
World = Callable[[int], tuple[EngineCore, list[tuple[int, Request]]]]


class Arrivals:
    """Requests at given moments."""

    def __init__(self, requests: list[tuple[int, Request]]) -> None:
        self._left = requests[::-1]

    def next_ns(self) -> int | None:
        return self._left[-1][0] if self._left else None

    def pop(self) -> Request:
        return self._left.pop()[1]

    def ended(self, request_id: str, now_ns: int) -> None:
        pass


class Kept:
    """Everything that happened, runs told step by step; the invariants hold between steps."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.runs: list[DecodeRun] = []
        self._looks = 0

    def observe(self, happenings: list[Happening]) -> None:
        for one in happenings:
            if isinstance(one, DecodeRun):
                self.runs.append(one)
                self.events.extend(expand(one))
            else:
                self.events.append(one)

    def at_rest(self, now_ns: int, scheduler: Scheduler) -> None:
        self._looks += 1
        if self._looks % 4 == 1:  # it takes longer than all else
            check_all(scheduler)


def plain(event: Event) -> object:
    if isinstance(event, StepTokens):
        pairs = event.pairs()
        return ("tokens", event.now, event.number, pairs, event.rows.tolist())
    return (type(event).__name__, asdict(event))


def state(scheduler: Scheduler) -> object:
    running, cache = scheduler.running, scheduler.cache
    rows = running.order
    columns = [running.known, running.pending, running.computed, running.last_token, cache.committed, cache.touched]
    return (
        rows.tolist(),
        [column[rows].tolist() for column in columns],
        [[table.row(row).tolist() for row in rows.tolist()] for table in cache.tables],
        [slots.state.tolist() for slots in cache.pool.slots],
        [slots.refs.tolist() for slots in cache.pool.slots],
        cache.settled,
        scheduler.next_plan,
    )


def world(seed: int) -> tuple[EngineCore, list[tuple[int, Request]]]:
    random = Random(seed)
    size = random.choice((2, 4, 16))
    laws = random.choice((("full", "window_9"), ("window_6",), ("full", "chunk_8"), ("full", "constant")))
    layout = random.choice(
        (one_group(size), one_group(size), two_groups(size), toy_layout((2, 2)[: len(laws)], size, laws=laws))
    )
    admission = random.choice(("max_utilization", "guaranteed_no_evict"))
    batching = random.choice(("iteration", "iteration", "request"))
    allocation = random.choice(("paged", "paged", "paged", "contiguous-max"))
    policies = Policies.named(admission=admission, batching=batching, allocation=allocation)
    rows = random.choice((2, 5, 9))
    slabs = random.choice((8, 14, 40))
    keys = KeySpace("toy", size) if allocation == "paged" and random.random() < 0.4 else None
    cache = KVCache(layout, slabs, rows, contiguous=policies.allocation.contiguous, keys=keys)
    limits = Limits(rows, random.choice((rows, 12, 64)), 96, VOCAB)
    cost = LinearCost(step_s=random.choice((0.001, 0.0137)), token_s=1e-5, context_token_s=3.3e-7)
    core = EngineCore(Scheduler(cache, limits, policies), SimExecutor(cost))
    arrivals = []
    now = 0
    texts = [[random.randrange(1, VOCAB) for _ in range(40)] for _ in range(3)]
    for index in range(random.randint(1, 14)):
        now += random.choice((0, 0, 1_000_000, 30_000_000, 400_000_000))
        prompt = random.choice(texts)[: random.randint(1, 40)]
        output = random.randint(1, 50)
        true = random.choice((None, random.randint(1, output)))
        asked = Request(
            request_id=f"r{index}",
            prompt_token_ids=np.array(prompt, dtype=np.int32),
            params=SamplingParams(max_tokens=output, temperature=0.0).with_defaults({}),
            eos_token_ids=() if true is None else (STOP,),
            priority=random.choice((0, 0, 1)),
            true_output_tokens=true,
        )
        arrivals.append((now, asked))
    return core, arrivals


def tier_world(seed: int) -> tuple[EngineCore, list[tuple[int, Request]]]:
    """Tiers below the device, each placement and action, copies as fast as a step or much slower, some of them lost."""
    random = Random(f"tiers {seed}")
    size = random.choice((2, 4, 4))
    laws = random.choice((("full",), ("full",), ("full",), ("full", "window_6"), ("full", "constant")))
    layout = one_group(size) if laws == ("full",) else toy_layout((2,) * len(laws), size, laws=laws)
    shares, longest = random.random() < 0.8, 60
    needs = layout.slabs_for(longest, None if laws == ("full",) else 12)
    below = Below(
        random.choice((needs, 3 * needs, 10 * needs)),
        placement_named(random.choice(("drop", "write_back", "write_back", "write_through", "break_even"))),
        disk_slots=(random.choice((6, 60)),) * len(laws) if shares and random.random() < 0.4 else (),
        timeout_s=random.choice((None, 0.5)),
    )
    rows = random.choice((2, 4, 6))
    cache, tiering = tiered_cache(
        layout,
        needs + random.choice((0, needs // 2, 2 * needs)),
        rows,
        below,
        keys=KeySpace("toy", size) if shares else None,
        eviction=eviction_named(random.choice(("lru", "cheapest_to_rebuild"))),
    )
    policies = Policies.named(
        admission=random.choice(("max_utilization", "guaranteed_no_evict")),
        preemption=random.choice(("recompute", "offload", "auto")),
        reuse="prefix" if shares else "none",
    )
    law = TransferLaw(random.choice((1e5, 1e6, 1e8)), random.choice((1e-5, 3e-3, 0.1)))
    links = Links(dict.fromkeys(("demote", "promote", "store", "load"), law))
    faults = random.choice((None, None, SeededFaults(seed, fails=0.1, stalls=0.2, loses_word=0.05)))
    mover = SimMover([group.block_bytes for group in layout.groups], links, faults=faults)
    limits = Limits(rows, random.choice((rows, 12, 64)), longest, VOCAB)
    cost = LinearCost(step_s=random.choice((0.001, 0.0137)), token_s=1e-5, context_token_s=3.3e-7)
    core = EngineCore(Scheduler(cache, limits, policies, tiering), SimExecutor(cost), mover=mover)
    return core, requests_of(random, most_output=25)


def requests_of(random: Random, *, most_output: int) -> list[tuple[int, Request]]:
    arrivals = []
    now = 0
    texts = [[random.randrange(1, VOCAB) for _ in range(34)] for _ in range(3)]
    for index in range(random.randint(4, 16)):
        now += random.choice((0, 1_000_000, 30_000_000, 400_000_000))
        output = random.randint(1, most_output)
        true = random.choice((None, random.randint(1, output)))
        asked = Request(
            request_id=f"r{index}",
            prompt_token_ids=np.array(random.choice(texts)[: random.randint(1, 34)], dtype=np.int32),
            params=SamplingParams(max_tokens=output, temperature=0.0).with_defaults({}),
            eos_token_ids=() if true is None else (STOP,),
            priority=random.choice((0, 0, 1)),
            true_output_tokens=true,
        )
        arrivals.append((now, asked))
    return arrivals


def simulate(seed: int, *, leap: bool, of: World = world) -> tuple[Kept, Simulation]:
    core, arrivals = of(seed)
    kept = Kept()
    simulation = Simulation(core, Arrivals(arrivals), [kept], leap=leap)
    simulation.run()
    return kept, simulation


def assert_same(seed: int, of: World = world) -> Kept:
    singly, one_by_one = simulate(seed, leap=False, of=of)
    at_once, leaping = simulate(seed, leap=True, of=of)
    assert not singly.runs
    assert [plain(e) for e in at_once.events] == [plain(e) for e in singly.events]
    assert leaping.now_ns == one_by_one.now_ns
    assert state(leaping.core.scheduler) == state(one_by_one.core.scheduler)
    return at_once


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40))
def test_leaps_and_single_steps_tell_the_same_events(seed: int) -> None:
    assert_same(seed)


def test_the_worlds_leap_and_preempt_and_wait_and_share() -> None:
    """The property above is worth what its worlds contain."""
    runs = preempted = waiting = crossing = shared = 0
    for seed in range(60):
        kept = assert_same(seed)
        runs += len(kept.runs)
        waiting += sum(run.waiting > 0 for run in kept.runs)
        crossing += sum(run.free_slabs[0] != run.free_slabs[-1] for run in kept.runs)
        preempted += sum(isinstance(event, Preempted) for event in kept.events)
        shared += sum(bool(e.record.cached_tokens) for e in kept.events if isinstance(e, Finished))
    assert min(runs, waiting, crossing, preempted, shared) > 8


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**40))
def test_with_tiers_leaps_and_single_steps_tell_the_same_events(seed: int) -> None:
    assert_same(seed, tier_world)


def test_the_worlds_with_tiers_leap_beside_every_kind_of_copy() -> None:
    runs = waiting = evicted = offloaded = 0
    routes: Counter[str] = Counter()
    for seed in range(40):
        kept = assert_same(seed, tier_world)
        runs += len(kept.runs)
        waiting += sum(run.waiting > 0 for run in kept.runs)
        evicted += sum(int(run.evicted.sum()) for run in kept.runs)
        offloaded += sum(isinstance(event, Preempted) and event.action == "offload" for event in kept.events)
        routes.update(event.route for event in kept.events if isinstance(event, Transferred))
    assert min(runs, waiting, evicted, offloaded, routes["demote"], routes["promote"], routes["store"]) > 2


@pytest.mark.parametrize("seed", range(12))
def test_with_tiers_whom_the_memory_refuses_weighing_refuses_too(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    remembering, _ = simulate(seed, leap=False, of=tier_world)
    monkeypatch.setattr(entry, "still_refused", lambda *_: False)
    weighing, _ = simulate(seed, leap=False, of=tier_world)
    assert [plain(e) for e in remembering.events] == [plain(e) for e in weighing.events]


@pytest.mark.parametrize("seed", range(12))
def test_in_the_middle_of_a_run_the_state_is_that_of_single_steps(seed: int) -> None:
    def stopped(leap: bool, until_s: float | None) -> tuple[Kept, Simulation]:
        core, arrivals = world(seed)
        kept = Kept()
        simulation = Simulation(core, Arrivals(arrivals), [kept], leap=leap)
        simulation.run(until_s)
        return kept, simulation

    whole, _ = stopped(True, None)
    for run in whole.runs[:5]:
        until = float(run.moments[-1])
        _, leaping = stopped(True, until)
        _, single = stopped(False, until)
        assert leaping.now_ns == single.now_ns
        assert state(leaping.core.scheduler) == state(single.core.scheduler)


def test_every_plan_is_learned_of_and_all_blocks_return() -> None:
    kept, simulation = simulate(7, leap=True)
    assert len([e for e in kept.events if isinstance(e, StepEnded)]) == simulation.core.scheduler.next_plan
    cache = simulation.core.scheduler.cache
    check(cache)
    assert is_empty(cache)


def busy_core(policies: Policies | None = None, *, slabs: int = 40) -> EngineCore:
    cache = KVCache(one_group(4), slabs, 4)
    core = EngineCore(Scheduler(cache, Limits(4, 64, 96, VOCAB), policies), SimExecutor(LinearCost()))
    for name in "ab":
        asked = Request(
            request_id=name,
            prompt_token_ids=np.array([3, 4, 5], dtype=np.int32),
            params=SamplingParams(max_tokens=20, temperature=0.0).with_defaults({}),
        )
        core.submit(asked, 0.0)
    core.step(0.0)
    return core


def test_steps_are_quiet_up_to_the_one_that_ends_somebody() -> None:
    core = busy_core()
    assert quiet_steps(core.scheduler) == 19  # of twenty tokens the first is had, the last one ends


def test_nothing_is_quiet_while_somebody_new_may_enter() -> None:
    core = busy_core()
    core.submit(Request(request_id="c", prompt_token_ids=np.array([1], dtype=np.int32),
                        params=SamplingParams(max_tokens=3).with_defaults({})), 0.0)  # fmt: skip
    assert quiet_steps(core.scheduler) == 0
    assert quiet_steps(core.scheduler, "sequence_limit") > 0


def test_a_policy_that_may_change_its_mind_is_asked_at_every_step() -> None:
    chaos = Chaos(1)
    core = busy_core(Policies(admission=chaos))
    core.submit(Request(request_id="c", prompt_token_ids=np.array([1], dtype=np.int32),
                        params=SamplingParams(max_tokens=3).with_defaults({})), 0.0)  # fmt: skip
    assert quiet_steps(core.scheduler, "kv_blocks") == 0


def test_a_leap_takes_as_many_steps_as_there_are_blocks_for() -> None:
    core = busy_core(slabs=6)  # two blocks are held after the prompts of three and the token after them
    run = advance(core.scheduler, np.array([7, 7], dtype=np.int32), np.arange(19.0))
    assert run is not None
    assert run.steps == 9  # positions 3 .. 11 of both fill the six blocks
    assert run.free_slabs.tolist() == [4, 2, 2, 2, 2, 0, 0, 0, 0]
    assert advance(core.scheduler, np.array([7, 7], dtype=np.int32), np.arange(9.0)) is None


def test_a_leap_past_a_limit_is_refused() -> None:
    core = busy_core()
    with pytest.raises(InvariantViolation, match="passes its limit"):
        advance(core.scheduler, np.array([7, 7], dtype=np.int32), np.arange(21.0))
