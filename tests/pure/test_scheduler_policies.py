"""Policies state preferences and the mechanism holds the truth: no answer of one changes a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.pure.worlds import ToyWorld, endings

from octavo.errors import ConfigError, PolicyError
from octavo.memory.values import Int64
from octavo.policy.admission import AdmissionView, GuaranteedNoEvict, MaxUtilization
from octavo.policy.allocation import Extent, Paged, allocation_named
from octavo.policy.batching import IterationBatching, decodes_first
from octavo.policy.bundle import Policies
from octavo.policy.chaos import Chaos
from octavo.policy.placement import PLACEMENTS, Bargain, placement_named
from octavo.policy.preemption import Candidate, LatestLowest
from octavo.policy.rates import Rates
from octavo.simulate.toy_model import ToyModel


@pytest.mark.parametrize("heads", [(2,), (4, 2)])
@pytest.mark.parametrize("allocation", ["paged", "contiguous-max"])
def test_chaos_never_changes_a_token(heads: tuple[int, ...], allocation: str) -> None:
    answers = []
    for seed in (None, 1, 2, 3, 4):
        chaos = Chaos(seed or 0)
        chaotic = Policies(allocation_named(allocation), batching=chaos, admission=chaos, victim=chaos)
        policies = Policies.named(allocation=allocation) if seed is None else chaotic
        rng = Random(6)
        world = ToyWorld(
            heads=heads, slabs=14, seqs=5, budget=9, depth=(seed or 0) % 2, policies=policies, model=ToyModel(20)
        )
        for _ in range(15):
            world.ask(rng.randint(1, 12), rng.randint(1, 14), eos=(0,))
            world.step(rng.randint(0, 2))
        world.finish()
        world.assert_all_answered()
        answers.append({i: (world.tokens(i), endings(world.events)[i].reason) for i in world.asked})
    assert all(answer == answers[0] for answer in answers)


class Splitting(IterationBatching):
    """Answers whatever it is told to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def split(self, wanted: Int64, budget: int) -> Int64:
        return np.asarray(self.answer(wanted, budget), dtype=np.int64)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (lambda wanted, budget: wanted + 1, "more than was wanted or allowed"),
        (lambda wanted, budget: wanted, "more than was wanted or allowed"),
        (lambda wanted, budget: -wanted, "more than was wanted or allowed"),
        (lambda wanted, budget: wanted[:-1], "more than was wanted or allowed"),
        (lambda wanted, budget: wanted * 0, "gave nothing"),
    ],
    ids=["more than wanted", "more than the budget", "negative", "too few", "nothing"],
)
def test_a_split_of_the_budget_that_cannot_be_is_refused(answer: Any, complaint: str) -> None:
    world = ToyWorld(slabs=30, seqs=4, budget=8, policies=Policies(batching=Splitting(answer)))
    world.ask(4, 9)  # decodes beside the other's chunks: together they want more than a step has
    world.ask(30, 3)
    with pytest.raises(PolicyError, match=complaint):
        world.step(3)


def test_a_victim_that_was_not_offered_is_refused() -> None:
    class Elsewhere(LatestLowest):
        def victim(self, candidates: Sequence[Candidate]) -> int:
            return len(candidates)

    world = ToyWorld(slabs=9, policies=Policies(victim=Elsewhere()))
    world.ask(8, 24)
    world.ask(8, 24)
    with pytest.raises(PolicyError, match="'latest_lowest' chose 1 of 1"):
        world.step(40)


def test_an_admission_that_would_stop_the_world_is_refused() -> None:
    class Never(MaxUtilization):
        def admits(self, view: AdmissionView) -> bool:
            return False

    world = ToyWorld(policies=Policies(admission=Never()))
    world.ask(5, 5)
    with pytest.raises(PolicyError, match="refuses although nothing runs"):
        world.step()


def test_an_allocation_that_gives_too_little_room_is_refused() -> None:
    class Mean(Paged):
        def reserve_tokens(self, extent: Extent) -> int:
            return extent.upto - 1

    world = ToyWorld(policies=Policies(allocation=Mean()))
    world.ask(5, 5)
    with pytest.raises(PolicyError, match="gave room for 4 of 5 positions"):
        world.step()


@pytest.mark.parametrize(
    ("seam", "name"), [("allocation", "pages"), ("batching", "continuous"), ("admission", "greedy")]
)
def test_an_unknown_policy_is_refused_with_the_names_that_there_are(seam: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{seam}='{name}': use one of"):
        Policies.named(**{seam: name})


# -- conformance: what every policy of a seam must do ---------------------------------------------------


def view(**given: int) -> AdmissionView:
    figures = {"total": 100, "free": 100, "promised": 0, "promised_max": 0, "need": 1, "need_max": 1, "running": 0}
    return AdmissionView(**{**figures, **given}, resuming=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ({"need": 7}, 7),
        ({"need": 7, "running": 2}, 7 + 1),  # one block in a hundred is kept for those who run
        ({"need": 7, "running": 2, "total": 350}, 7 + 4),
        ({"need": 7, "running": 2, "promised": 5}, 7 + 1 + 5),
    ],
)
def test_max_utilization_admits_what_fits_beside_what_is_promised_and_a_small_reserve(
    given: dict[str, int], needed: int
) -> None:
    assert MaxUtilization().admits(view(**given, free=needed))
    assert not MaxUtilization().admits(view(**given, free=needed - 1))


@pytest.mark.parametrize(("running", "needed"), [(0, 7), (1, 8), (6, 13)])
def test_one_that_was_preempted_comes_back_when_each_running_one_can_grow_by_a_block(running: int, needed: int) -> None:
    for free in (needed - 1, needed):
        back = replace(view(need=7, running=running, free=free), resuming=True)
        assert MaxUtilization().admits(back) == (free == needed)


def test_the_guarantee_admits_when_all_declared_maxima_fit_together() -> None:
    assert GuaranteedNoEvict().admits(view(promised_max=60, need_max=40, free=100, need=90, promised=90))
    assert not GuaranteedNoEvict().admits(view(promised_max=60, need_max=41, free=100))


@pytest.mark.parametrize("split", [decodes_first, Chaos(5).split], ids=["decodes first", "chaos"])
def test_every_split_gives_no_more_than_is_wanted_and_not_nothing(split: Any) -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        wanted = rng.integers(0, 9, size=rng.integers(1, 8)).astype(np.int64)
        budget = int(rng.integers(1, 20))
        before = wanted.copy()
        given = split(wanted, budget)
        assert (wanted == before).all(), "a policy reads and never writes"
        assert (given >= 0).all()
        assert (given <= wanted).all()
        assert given.sum() <= budget
        assert given.any() or not wanted.any()


def test_decodes_come_first_and_what_is_left_goes_to_chunks_in_order() -> None:
    assert decodes_first(np.array([5, 1, 9, 1]), 10).tolist() == [5, 1, 3, 1]
    assert decodes_first(np.array([5, 1, 9, 1]), 3).tolist() == [1, 1, 0, 1]
    assert decodes_first(np.array([1, 1, 1, 1]), 3).tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("name", ["paged", "contiguous-max", "contiguous-pow2", "contiguous-oracle"])
def test_every_allocation_gives_room_for_what_the_step_needs(name: str) -> None:
    allocation = allocation_named(name)
    for declared in range(1, 70):
        for true_length in (None, 1, declared):
            upto = min(declared, true_length or declared)
            extent = Extent(upto=upto, declared=declared, true_length=true_length, context_limit=70)
            assert upto <= allocation.reserve_tokens(extent) <= 70


@pytest.mark.parametrize(("length", "reserved"), [(1, 1), (2, 2), (3, 4), (33, 64), (64, 64), (65, 70)])
def test_the_next_power_of_two_stops_at_the_context_limit(length: int, reserved: int) -> None:
    extent = Extent(upto=1, declared=length, true_length=None, context_limit=70)
    assert allocation_named("contiguous-pow2").reserve_tokens(extent) == reserved


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_placement_says_whether_costs_change_its_answers(name: str) -> None:
    policy = placement_named(name)
    bargain = Bargain(first=0, end=16, host_bytes=1_000_000)
    slow, fast = (Rates(seconds_a_token=0.001, bytes_a_second={"promote": each, "load": each}) for each in (1e6, 1e12))
    changes = policy.worth_loading(bargain, slow) != policy.worth_loading(bargain, fast)
    assert changes == (not policy.constant)
