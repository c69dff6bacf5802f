"""How sequences end: aborted at any moment, failed alone, failed all together; and what is left: nothing."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from tests.pure.worlds import ToyWorld, drain, endings, engine, outputs, request

from octavo.memory.check import is_empty
from octavo.policy.bundle import Policies
from octavo.scheduling.events import Finished, Preempted
from octavo.simulate.toy_model import ToyModel


def waiting(world: ToyWorld) -> int:
    world.ask(6, 20)
    return world.ask(6, 5)


def prefilling(world: ToyWorld) -> int:
    only = world.ask(20, 5)
    world.step()
    assert world.executor.computed_by(only) == [(0, 0, 8)]
    return only


def decoding(world: ToyWorld) -> int:
    only = world.ask(6, 9)
    world.step(4)
    assert len(world.tokens(only)) >= 2
    return only


def paused(world: ToyWorld) -> int:
    world.ask(8, 34)
    young = world.ask(8, 20)
    while not world.count(Preempted):
        world.step()
    assert young not in world.running
    assert len(world.tokens(young)) > 0
    return young


def resumed(world: ToyWorld) -> int:
    young = paused(world)
    while young not in world.running:
        world.step()
    return young


def just_submitted(world: ToyWorld) -> int:
    return world.ask(6, 5)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batching", ["iteration", "request"])
@pytest.mark.parametrize("state", [just_submitted, waiting, prefilling, decoding, paused, resumed])
def test_an_abort_returns_every_block_whatever_the_sequence_was_doing(
    state: Callable[[ToyWorld], int], batching: str, depth: int
) -> None:
    world = ToyWorld(slabs=11, seqs=4, budget=8, depth=depth, policies=Policies.named(batching=batching))
    gone = state(world)
    had = world.tokens(gone)
    assert world.core.abort(gone, world.time)
    assert not world.core.abort(gone, world.time), "it has ended already"
    world.step()
    assert world.tokens(gone) == had, "no token after the end"
    world.finish()
    end = endings(world.events)[gone]
    assert (end.reason, end.record.output_tokens) == ("abort", len(had))
    world.assert_all_answered()


def test_an_abort_with_a_plan_in_flight_keeps_the_blocks_until_it_has_completed() -> None:
    world = ToyWorld(slabs=8, depth=1)
    gone = world.ask(20, 5)
    world.step()
    assert world.scheduler.in_flight == 1
    world.core.abort(gone, world.time)
    assert world.cache.pool.draining == [5]
    assert world.cache.pool.free.count == 3
    heir = world.ask(24, 2)
    world.step()
    assert heir not in world.running
    world.finish()
    world.assert_all_answered()


def test_an_abort_can_say_that_a_stop_string_was_met() -> None:
    world = ToyWorld()
    only = world.ask(5, 9)
    world.step(3)
    world.core.abort(only, world.time, "stop")
    world.finish()
    assert endings(world.events)[only].reason == "stop"


def test_aborting_what_never_was_is_no_error() -> None:
    world = ToyWorld()
    assert not world.core.abort(12, 0.0)


@pytest.mark.parametrize("depth", [0, 1])
def test_random_aborts_leave_the_others_as_they_would_be_alone_and_the_pool_empty(depth: int) -> None:
    rng = Random(8)
    world = ToyWorld(slabs=14, seqs=6, budget=10, depth=depth, model=ToyModel(ends_every=30))
    for _ in range(300):
        if len(world.asked) < 80 and rng.random() < 0.5:
            world.ask(rng.randint(1, 16), rng.randint(1, 20), eos=(0,))
        if world.asked and rng.random() < 0.1:
            world.core.abort(rng.choice(list(world.asked)), world.time)
        world.step()
    world.finish()
    world.assert_all_answered()
    reasons = [end.reason for end in endings(world.events).values()]
    assert min(reasons.count(reason) for reason in ("abort", "stop", "length")) >= 5


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("batching", ["iteration", "request"])
def test_a_failure_of_one_sequence_ends_it_with_its_reason_and_touches_no_other(batching: str, depth: int) -> None:
    world = ToyWorld(
        slabs=20, depth=depth, budget=12, model=ToyModel(fails_every=40), policies=Policies.named(batching=batching)
    )
    for _ in range(16):
        world.ask(5, 9)
    world.finish()
    world.assert_all_answered()
    ends = endings(world.events).values()
    errors = [end for end in ends if end.reason == "error"]
    assert 3 <= len(errors) <= 13
    assert all("cannot be computed" in (end.error or "") for end in errors)
    assert all(end.error is None for end in ends if end.reason != "error")


@pytest.mark.parametrize("depth", [0, 1])
def test_when_the_engine_fails_everybody_is_told_and_nobody_is_left_waiting(depth: int) -> None:
    world = ToyWorld(slabs=12, seqs=3, depth=depth)
    ids = [world.ask(6, 20) for _ in range(8)]
    world.step(12)
    events = world.events + world.core.fail("the device is gone", world.time)
    ends = [event for event in events if isinstance(event, Finished)]
    assert sorted(end.sequence_id for end in ends) == ids
    assert {(end.reason, end.error) for end in ends} == {("error", "the device is gone")}
    assert (world.running, len(world.scheduler.waiting)) == ([], 0)


# -- over time --------------------------------------------------------------------------------------


def test_two_thousand_requests_later_the_engine_is_as_it_was() -> None:
    """Faults 1 and 42: a block a request never returned; blocks kept although nothing is reused."""
    core = engine(slabs=40, seqs=8, audit=False)
    cache, rng = core.scheduler.cache, Random(1)
    total = cache.pool.free.count
    used_when_idle = []
    served = 0
    while served < 2_000:
        batch = [request(rng.randint(1, 20), rng.randint(1, 8), seed=i) for i in range(80)]
        ids = {core.submit(asked, 0.0): asked for asked in batch}
        events = drain(core)
        got = outputs(events)
        assert sorted(endings(events)) == sorted(ids)
        assert all(len(got[i]) == asked.params.max_tokens for i, asked in ids.items())
        used_when_idle.append(total - cache.pool.free.count)
        served += len(batch)
    assert used_when_idle == [0] * 25
    assert is_empty(cache)
    assert not cache._draining
    assert not cache.suspensions
    assert not core.scheduler._sequences
    assert list(core.scheduler.waiting) == []
    assert not core.scheduler.waiting._newcomers
    assert len(core.scheduler.running._free_rows) == core.scheduler.running.rows
    assert all(not columns.refs.any() for columns in cache.pool.slots)


def test_used_blocks_return_to_the_idle_figure_after_each_burst() -> None:
    """Fault 1 as reported: 120 short requests, idle, 24 more."""
    world = ToyWorld(slabs=20, audit=False)
    for burst in (120, 24):
        for _ in range(burst):
            world.ask(3, 3)
        world.finish()
        assert world.cache.pool.free.count == 20


@pytest.mark.parametrize("blocked_head", [False, True])
def test_a_queue_forgets_those_who_left_it_even_behind_one_that_waits(blocked_head: bool) -> None:
    world = ToyWorld(slabs=40, seqs=1, audit=False)
    world.ask(3, 60)
    world.step()
    if blocked_head:
        world.ask(3, 2)
    for _ in range(400):
        world.core.abort(world.ask(3, 2), world.time)
    queue = world.scheduler.waiting
    assert len(queue) == len(list(queue)) == blocked_head
    assert sum(len(places) for places in queue._newcomers.values()) <= 70
    world.finish()
    world.assert_all_answered()


def test_the_queue_keeps_its_order_when_it_forgets() -> None:
    world = ToyWorld(slabs=40, seqs=1, audit=False)
    world.ask(3, 4)
    world.step()
    kept = []
    for i in range(300):
        newest = world.ask(3, 1, priority=i % 3)
        if i % 20:
            world.core.abort(newest, world.time)
        else:
            kept.append(newest)
    order = [sequence.sequence_id for sequence in world.scheduler.waiting]
    assert order == sorted(kept, key=lambda i: (world.asked[i].priority, i))
    world.finish()
    world.assert_all_answered()
