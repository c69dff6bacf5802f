"""Pins that end inside a run of decode steps: leaps and single steps tell the same events."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.test_simulate_leap import Arrivals, Kept, World, plain, state, tier_world, world
from tests.pure.worlds import VOCAB, one_group

from octavo.cost.step import LinearCost
from octavo.errors import RequestError
from octavo.memory.cache import KVCache
from octavo.memory.keys import KeySpace
from octavo.policy.bundle import Policies
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Finished
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request, SamplingParams
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.drive import Simulation
from octavo.simulate.executors import SimExecutor

SECOND = 10**9
FIRST, SECOND_TEXT = list(range(1, 18)), list(range(20, 37))


def ask(name: str, prompt: list[int], tokens: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        params=SamplingParams(max_tokens=tokens, temperature=0.0).with_defaults({}),
    )


def pinned_for(ttl_s: float, *, leap: bool) -> tuple[Kept, Simulation]:
    """Two texts are kept, the older one is pinned; then one sequence grows into most of the room."""
    cache = KVCache(one_group(4), 24, 4, keys=KeySpace("toy", 4))
    scheduler = Scheduler(cache, Limits(4, 64, 96, VOCAB), Policies.named(reuse="prefix"))
    core = EngineCore(scheduler, SimExecutor(LinearCost(step_s=0.001, token_s=0.0, context_token_s=0.0)))
    kept = Kept()
    before = Arrivals([(0, ask("old", FIRST, 2)), (SECOND, ask("new", SECOND_TEXT, 2))])
    simulation = Simulation(core, before, [kept], leap=leap)
    simulation.run()
    now = simulation.now_ns
    core.pin(np.array(FIRST, dtype=np.int32), "", now / SECOND, ttl_s)
    simulation.source = Arrivals(
        [(now, ask("long", [40, 41, 42], 70)), (now + SECOND, ask("again", FIRST, 2))]
    )  # fmt: skip
    simulation.run()
    return kept, simulation


@pytest.mark.parametrize("ttl_s", [0.0005, 0.01, 0.055, 0.065, 10.0])
def test_a_pin_that_ends_inside_a_run_ends_at_its_step(ttl_s: float) -> None:
    singly, one_by_one = pinned_for(ttl_s, leap=False)
    at_once, leaping = pinned_for(ttl_s, leap=True)
    assert at_once.runs
    assert [plain(event) for event in at_once.events] == [plain(event) for event in singly.events]
    assert state(leaping.core.scheduler) == state(one_by_one.core.scheduler)


def test_how_much_is_found_again_goes_by_when_the_pin_ended() -> None:
    """The property above is worth something only if it matters when it ends."""
    found = []
    for ttl_s in (0.01, 0.065, 10.0):
        kept, _ = pinned_for(ttl_s, leap=True)
        last = next(event for event in reversed(kept.events) if isinstance(event, Finished))
        found.append(last.record.cached_tokens)
    assert found == [{"device": 8}, {"device": 12}, {"device": 16}]


def half_pinned(seed: int, of: World, *, leap: bool) -> tuple[Kept, Simulation]:
    """Half of a random world; then what it left is pinned for random times, and the other half comes."""
    random = Random(f"pins {seed}")
    core, arrivals = of(seed)
    kept = Kept()
    half = len(arrivals) // 2
    simulation = Simulation(core, Arrivals(arrivals[:half]), [kept], leap=leap)
    simulation.run()
    now = simulation.now_ns
    for _, request in arrivals[:half]:
        ttl_s = random.choice((0.003, 0.02, 0.1, 0.3, 1.0))
        with suppress(RequestError):  # beyond what may be pinned, or nothing is kept in this world
            core.pin(request.prompt_token_ids, "", now / SECOND, ttl_s)
    simulation.source = Arrivals([(now + at - arrivals[half][0], request) for at, request in arrivals[half:]])
    simulation.run()
    return kept, simulation


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**40), st.sampled_from([world, tier_world]))
def test_in_random_worlds_pins_end_at_their_steps(seed: int, of: World) -> None:
    singly, one_by_one = half_pinned(seed, of, leap=False)
    at_once, leaping = half_pinned(seed, of, leap=True)
    assert [plain(event) for event in at_once.events] == [plain(event) for event in singly.events]
    assert leaping.now_ns == one_by_one.now_ns
    assert state(leaping.core.scheduler) == state(one_by_one.core.scheduler)
