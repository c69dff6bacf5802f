"""Who gives way when blocks run out, and that giving way changes nothing but time."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from tests.pure.worlds import ToyWorld, endings

from octavo.policy.admission import AdmissionView, MaxUtilization
from octavo.policy.bundle import Policies
from octavo.policy.chaos import Chaos
from octavo.policy.preemption import Candidate, LatestLowest
from octavo.scheduling.events import Admitted, Event, Preempted
from octavo.simulate.toy_model import ToyModel


class Always(MaxUtilization):
    """Admits whoever asks: what keeps order then is the mechanism alone."""

    def admits(self, view: AdmissionView) -> bool:
        return True


def preempted(events: list[Event]) -> list[int]:
    return [event.sequence_id for event in events if isinstance(event, Preempted)]


@pytest.mark.parametrize("heads", [(2,), (4, 2), (6, 2), (5, 2)])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_preempted_sequence_gets_the_tokens_it_would_have_had_alone(heads: tuple[int, ...], depth: int) -> None:
    world = ToyWorld(heads=heads, slabs=14, depth=depth, budget=16, model=ToyModel(ends_every=40))
    for i in range(10):
        world.ask(3 + i % 5, 20, eos=(0,))
    world.finish()
    world.assert_all_answered()
    assert world.count(Preempted) >= 5


def test_what_was_generated_before_a_pause_is_computed_again_and_not_generated_again() -> None:
    world = ToyWorld(slabs=9)
    old, young = world.ask(8, 24), world.ask(8, 16)
    while not preempted(world.events):
        world.step()
    had = len(world.tokens(young))
    assert had > 1
    assert preempted(world.events) == [young]
    world.finish()
    chunks = world.executor.computed_by(young)
    again = next(i for i, (_, start, _) in enumerate(chunks) if i and start == 0)
    assert chunks[again][2] == 8 + had, "prompt and answer so far, in one go"
    assert len(world.tokens(young)) == 16
    record = endings(world.events)[young].record
    assert record.preemptions == 1
    assert record.recomputed_tokens == 8 + had - 1
    assert record.preempted_time > 0
    assert [number for number, _, _ in world.executor.computed_by(old)] == list(range(24)), "the old one never waited"
    world.assert_all_answered()


def test_the_victim_is_the_lowest_priority_and_then_the_latest_arrival() -> None:
    world = ToyWorld(slabs=17)
    ids = [world.ask(12, 28, priority=priority) for priority in (0, 5, 0, 5, 0)]
    while len(preempted(world.events)) < 4:
        world.step()
    assert preempted(world.events) == [ids[i] for i in (3, 1, 4, 2)]
    world.finish()
    world.assert_all_answered()


def test_the_oldest_running_sequence_is_never_the_victim_however_low_its_priority() -> None:
    world = ToyWorld(slabs=12)
    oldest = world.ask(8, 30, priority=9)
    for _ in range(4):
        world.ask(8, 20, priority=-1)
    world.finish()
    world.assert_all_answered()
    assert oldest not in preempted(world.events)
    assert len(preempted(world.events)) >= 3


def test_the_oldest_is_never_offered_to_the_policy() -> None:
    offered: list[tuple[list[int], list[int]]] = []

    class Watching(LatestLowest):
        def victim(self, candidates: Sequence[Candidate]) -> int:
            offered.append(([c.sequence_id for c in candidates], list(world.running)))
            assert all(c.blocks > 0 for c in candidates)
            return super().victim(candidates)

    world = ToyWorld(slabs=10, policies=Policies(victim=Watching()))
    for _ in range(8):
        world.ask(6, 20)
    world.finish()
    assert offered
    assert all(min(running) not in candidates for candidates, running in offered)


def test_a_preempted_sequence_is_not_considered_again_in_the_same_step() -> None:
    """Fault 16: pushed to the front of the queue and tried again in the same loop."""
    # With a small budget the first chunk of a paused sequence would fit at once into what it gave up.
    world = ToyWorld(slabs=20, seqs=8, budget=10, policies=Policies(admission=Always()))
    for _ in range(30):
        world.ask(6, 20)
    steps_with_preemption = 0
    while world.core.has_work:
        new = world.step()
        paused = preempted(new)
        entered = [event.sequence_id for event in new if isinstance(event, Admitted)]
        assert len(paused) == len(set(paused))
        assert not paused or not entered, "somebody entered in a step that had to pause somebody"
        steps_with_preemption += bool(paused)
    assert steps_with_preemption >= 5
    world.finish()
    world.assert_all_answered()


def test_the_work_of_deciding_one_step_is_bounded() -> None:
    """Fault 16: the scheduler loops inside one step. Thirty requests under pressure, asks counted."""
    asks = [0]

    class Counting(LatestLowest):
        def victim(self, candidates: Sequence[Candidate]) -> int:
            asks[0] += 1
            return super().victim(candidates)

    world = ToyWorld(slabs=24, seqs=30, budget=64, policies=Policies(victim=Counting()))
    for _ in range(30):
        world.ask(3, 18)
    steps = 0
    while world.core.has_work:
        asks[0] = 0
        world.step()
        steps += 1
        assert asks[0] < 30, "more victims than running sequences in one step"
        assert steps < 30 * 20, "more steps than serving them one after the other"
    world.assert_all_answered()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chaos", [False, True])
def test_in_a_pool_of_one_and_a_fifth_requests_ten_finish_and_preemptions_are_bounded(depth: int, chaos: bool) -> None:
    """Fault 15: evict, queue again, prefill again, for ever."""
    policies = Policies(victim=Chaos(3)) if chaos else Policies()
    world = ToyWorld(slabs=12, seqs=10, depth=depth, policies=policies)  # one request takes ten blocks
    for _ in range(10):
        world.ask(8, 33)
    world.finish(most=10 * 45)
    world.assert_all_answered()
    assert max(end.record.preemptions for end in endings(world.events).values()) <= 10
    computed = sum(plan.tokens for plan in world.executor.plans)
    assert computed <= 2 * 10 * 40, "more is computed again than is computed"


def test_many_requests_in_a_pool_below_two_of_them_all_finish() -> None:
    """Fault 15 at a higher rate: 200 requests, a pool under the peak of two."""
    rng = Random(4)
    world = ToyWorld(slabs=9, seqs=8, audit=False)
    while len(world.asked) < 200:
        for _ in range(rng.randint(0, 3)):
            world.ask(rng.randint(1, 8), rng.randint(1, 16))
        world.step()
    world.finish(most=200 * 24)
    world.assert_all_answered()
    assert max(end.record.preemptions for end in endings(world.events).values()) <= 20


def test_those_who_were_paused_come_back_in_order_of_arrival_and_before_newcomers() -> None:
    world = ToyWorld(slabs=16)
    ids = [world.ask(12, 24) for _ in range(4)]
    while len(preempted(world.events)) < 3:
        world.step()
    assert preempted(world.events) == [ids[3], ids[2], ids[1]]
    newcomer = world.ask(12, 4)
    world.finish()
    entered = [event for event in world.events if isinstance(event, Admitted)]
    assert [event.sequence_id for event in entered[4:]] == [ids[1], ids[2], ids[3], newcomer]
    assert [event.resumed for event in entered] == [False] * 4 + [True] * 3 + [False]
    world.assert_all_answered()


def test_a_sequence_comes_back_only_when_the_running_ones_can_go_on_beside_it() -> None:
    """Coming back only to be paused again costs a whole prefill: a block is kept for each running sequence."""
    world = ToyWorld(slabs=12)
    world.ask(16, 24)
    young = world.ask(16, 12)
    world.finish()
    assert endings(world.events)[young].record.preemptions == 1


def test_blocks_that_drain_are_waited_for_before_anybody_gives_way() -> None:
    world = ToyWorld(slabs=6, depth=1)
    old, young = world.ask(8, 10), world.ask(7, 9)
    third = world.ask(4, 3)
    world.step(2)
    world.core.abort(third, world.time)
    world.finish()
    world.assert_all_answered()
    assert old not in preempted(world.events)
    assert endings(world.events)[young].record.preemptions <= 1


@pytest.mark.parametrize("depth", [0, 1])
def test_nobody_enters_while_a_running_sequence_waits_for_blocks(depth: int) -> None:
    world = ToyWorld(slabs=20, seqs=8, depth=depth, policies=Policies(admission=Always()))
    rng = Random(2)
    entries = 0
    for _ in range(30):
        world.ask(rng.randint(2, 9), rng.randint(2, 20))
    while world.core.has_work:
        rows = world.scheduler.running.order
        wanting = set(world.scheduler.running.sequence_id[rows[world.scheduler.running.wanted(rows) > 0]].tolist())
        entered = any(isinstance(event, Admitted) for event in world.step())
        if entered:
            assert wanting <= set(world.executor.plans[-1].sequence_ids.tolist())
        entries += entered
    assert entries > 10
    world.assert_all_answered()


@pytest.mark.parametrize("heads", [(4, 2), (6, 2)])
def test_sequences_that_each_need_the_whole_pool_all_finish_whatever_groups_share_it(heads: tuple[int, ...]) -> None:
    for seed in range(12):
        rng = Random(seed)
        world = ToyWorld(heads=heads, slabs=rng.randint(6, 9), seqs=4)
        capacity = world.cache.max_tokens_per_sequence()
        for _ in range(5):
            prompt = rng.randint(1, capacity // 2)
            world.ask(prompt, capacity + 1 - prompt - rng.randint(0, 2))
            world.step(rng.randint(0, 4))
        world.finish(most=600)
        world.assert_all_answered()


def test_after_every_step_somebody_runs_or_enters_next_or_nobody_waits() -> None:
    for seed in range(6):
        rng = Random(seed)
        world = ToyWorld(slabs=10, seqs=3, depth=seed % 2, budget=7)
        for _ in range(60):
            if rng.random() < 0.4:
                world.ask(rng.randint(1, 12), rng.randint(1, 18))
            idle = not world.running and not world.scheduler.in_flight and len(world.scheduler.waiting)
            world.step()
            assert not idle or world.running or len(world.scheduler.waiting) < idle
        world.finish()
        world.assert_all_answered()
