"""With a step in flight leaps and single steps tell the same events, and end in the same state."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.test_simulate_leap import Arrivals, Kept, World, plain, requests_of, simulate, state, world
from tests.pure.worlds import VOCAB, one_group

from octavo.cost.step import LinearCost, StepShape
from octavo.memory.cache import KVCache
from octavo.policy.bundle import Policies
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Event, Preempted
from octavo.scheduling.leap_ahead import quiet_steps_ahead
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request, SamplingParams
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.drive import Simulation
from octavo.simulate.executors import SimExecutor


@dataclass(frozen=True, kw_only=True)
class Hosted(LinearCost):
    """A host that takes less than a step, or more."""

    host_s: float

    def host_seconds(self, shape: StepShape) -> float:
        return self.host_s


def ahead(seed: int) -> tuple[EngineCore, list[tuple[int, Request]]]:
    """Any of the worlds of leaps, a step in flight."""
    core, arrivals = world(seed)
    return EngineCore(core.scheduler, core.executor, depth=1), arrivals


def simple(seed: int) -> tuple[EngineCore, list[tuple[int, Request]]]:
    """One group and nothing shared, so that leaps are taken; much room or little."""
    random = Random(f"ahead {seed}")
    size, rows = random.choice((2, 4, 16)), random.choice((1, 2, 5, 9))
    policies = Policies.named(admission=random.choice(("max_utilization", "guaranteed_no_evict")))
    cache = KVCache(one_group(size), -(-96 // size) + random.choice((0, 2, 20, 60)), rows)
    cost = Hosted(
        step_s=random.choice((0.001, 0.0137)), token_s=1e-5, context_token_s=3.3e-7,
        host_s=random.choice((0.0, 1e-4, 0.004, 0.03)),
    )  # fmt: skip
    limits = Limits(rows, random.choice((rows, 12, 64)), 96, VOCAB)
    core = EngineCore(Scheduler(cache, limits, policies), SimExecutor(cost), depth=1)
    return core, requests_of(random, most_output=60)


def assert_same(seed: int, of: World) -> tuple[list[Event], Simulation, Simulation]:
    singly, one_by_one = simulate(seed, leap=False, of=of)
    at_once, leaping = simulate(seed, leap=True, of=of)
    assert [plain(event) for event in at_once.events] == [plain(event) for event in singly.events]
    assert leaping.now_ns == one_by_one.now_ns
    assert leaping.executor.clock_ns == one_by_one.executor.clock_ns
    assert state(leaping.core.scheduler) == state(one_by_one.core.scheduler)
    return singly.events, one_by_one, leaping


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**40), st.sampled_from([ahead, simple, simple]))
def test_with_a_step_in_flight_leaps_and_single_steps_tell_the_same_events(seed: int, of: World) -> None:
    assert_same(seed, of)


def test_the_worlds_leap_over_most_steps_and_preempt() -> None:
    """The property above is worth what its worlds contain."""
    preempted = leaps = singly = taken = 0
    for seed in range(25):
        events, one_by_one, leaping = assert_same(seed, simple)
        preempted += sum(isinstance(event, Preempted) for event in events)
        leaps += leaping.leaps
        singly += one_by_one.steps
        taken += leaping.steps
    assert preempted > 3
    assert leaps > 100
    assert taken < 0.6 * singly


@pytest.mark.parametrize("seed", range(8))
def test_in_the_middle_of_a_run_the_state_is_that_of_single_steps(seed: int) -> None:
    _, _, whole = assert_same(seed, simple)
    for share in (0.2, 0.5, 0.8):
        stopped = []
        for leap in (False, True):
            core, arrivals = simple(seed)
            one = Simulation(core, Arrivals(arrivals), [Kept()], leap=leap)
            one.run(share * whole.now_ns / 1e9)
            stopped.append(one)
        # A leap may pass the moment; single steps go on to where it ended.
        single, leaping = stopped
        single.run(leaping.now_ns / 1e9)
        assert single.now_ns == leaping.now_ns
        assert state(single.core.scheduler) == state(leaping.core.scheduler)


def test_plans_are_quiet_until_the_one_before_somebody_ends_and_not_while_prompts_are_computed() -> None:
    core = EngineCore(Scheduler(KVCache(one_group(4), 40, 4), Limits(4, 64, 96, VOCAB)), SimExecutor(LinearCost()),
                      depth=1)  # fmt: skip
    for name in "ab":
        params = SamplingParams(max_tokens=20, temperature=0.0).with_defaults({})
        prompt = np.array([3, 4, 5], dtype=np.int32)
        core.submit(Request(request_id=name, prompt_token_ids=prompt, params=params), 0.0)
    quiet = []
    for _ in range(4):
        core.step(0.0)
        assert core.flying is not None
        quiet.append(quiet_steps_ahead(core.scheduler, core.flying, None))
    assert quiet == [0, 18, 17, 16]
    core.submit(Request(request_id="c", prompt_token_ids=prompt, params=params), 0.0)
    assert quiet_steps_ahead(core.scheduler, core.flying, None) == 0
    assert quiet_steps_ahead(core.scheduler, core.flying, "kv_blocks") == 0
