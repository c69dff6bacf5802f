"""Pins that end inside a run of decode steps: leaps and single steps tell the same events."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.test_simulate_leap import Arrivals, Kept, plain, state
from tests.pure.worlds import VOCAB, one_group, two_groups

from octavo.cost.step import LinearCost
from octavo.errors import RequestError
from octavo.memory.cache import KVCache
from octavo.memory.keys import KeySpace
from octavo.memory.tiering import Below, tiered_cache
from octavo.policy.bundle import Policies
from octavo.policy.placement import placement_named
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Finished
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request, SamplingParams
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.drive import Simulation
from octavo.simulate.executors import SimExecutor
from octavo.simulate.links import Links, SimMover

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


def pinned_at_random(seed: int, *, leap: bool) -> tuple[Kept, Simulation]:
    """Some texts are kept, pinned for random times, pressed for room by who grows, and asked for again."""
    random = Random(seed)
    size = random.choice((2, 4))
    layout = random.choice((one_group(size), one_group(size), two_groups(size)))
    slabs, keys = layout.slabs_for(80, None) + random.randint(0, 8), KeySpace("toy", size)
    policies = Policies.named(reuse="prefix")
    mover = tiering = None
    if random.random() < 0.4:
        below = Below(random.choice((4, 12)), placement_named(random.choice(("drop", "write_back", "write_through"))))
        cache, tiering = tiered_cache(layout, slabs, 4, below, keys=keys)
        mover = SimMover([group.block_bytes for group in layout.groups], Links())
    else:
        cache = KVCache(layout, slabs, 4, keys=keys)
    cost = LinearCost(step_s=0.001, token_s=1e-5, context_token_s=3.3e-7)
    core = EngineCore(Scheduler(cache, Limits(4, 64, 80, VOCAB), policies, tiering), SimExecutor(cost), mover=mover)
    texts = [[random.randrange(1, VOCAB) for _ in range(random.randint(8, 17))] for _ in range(3)]
    kept = Kept()
    before = Arrivals([(n * SECOND, ask(f"kept-{n}", text, 2)) for n, text in enumerate(texts)])
    simulation = Simulation(core, before, [kept], leap=leap)
    simulation.run()
    now = simulation.now_ns
    for text in texts:
        with suppress(RequestError):  # beyond what may be pinned
            ttl_s = random.choice((0.004, 0.02, 0.04, 0.06, 1.0))
            core.pin(np.array(text, dtype=np.int32), "", now / SECOND, ttl_s)
    pressing = [(now, ask(f"long-{n}", [90 + n, 7], random.randint(10, 60))) for n in range(random.randint(1, 2))]
    again = [(now + random.choice((40_000_000, SECOND)), ask(f"again-{n}", text, 2)) for n, text in enumerate(texts)]
    simulation.source = Arrivals(sorted(pressing + again, key=lambda one: one[0]))
    simulation.run()
    return kept, simulation


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40))
def test_in_random_worlds_pins_end_at_their_steps(seed: int) -> None:
    singly, one_by_one = pinned_at_random(seed, leap=False)
    at_once, leaping = pinned_at_random(seed, leap=True)
    assert [plain(event) for event in at_once.events] == [plain(event) for event in singly.events]
    assert leaping.now_ns == one_by_one.now_ns
    assert state(leaping.core.scheduler) == state(one_by_one.core.scheduler)
