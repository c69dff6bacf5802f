"""A run, recorded and replayed in memory: the plans are identical, and a changed policy is found at its first step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
from tests.pure.worlds import engine, request

from octavo.cost.step import LinearCost
from octavo.cost.transfer import TransferLaw
from octavo.memory.keys import KeySpace
from octavo.memory.tiering import Below, tiered_cache
from octavo.memory.transfers import Order
from octavo.policy.allocation import allocation_named
from octavo.policy.bundle import Policies
from octavo.policy.chaos import Chaos
from octavo.scheduling.audit import Audit
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Preempted
from octavo.scheduling.limits import Limits
from octavo.scheduling.plan import Executor
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.executors import EchoExecutor, SimExecutor
from octavo.simulate.links import Links, SeededFaults, SimMover
from octavo.simulate.recording import (
    Cancelled,
    Divergence,
    Forgotten,
    RecordedExecutor,
    RecordedMover,
    Recorder,
    Recording,
    RecordingExecutor,
    RecordingMover,
    replay,
)
from octavo.simulate.toy_model import ToyExecutor, ToyModel, toy_layout

HEADS = (4, 2)


def core(executor: Executor, policies: Policies | None = None, **changed: Any) -> EngineCore:
    settings: dict[str, Any] = {"slabs": 18, "seqs": 5, "budget": 9, **changed}
    return engine(layout=toy_layout(HEADS), executor=executor, policies=policies, **settings)


def recorded(policies: Policies | None = None, inner: Executor | None = None, **changed: Any) -> Recording:
    """Traffic with unpredictable ends, failures of single sequences, and aborts."""
    recording = Recording()
    executor = inner or ToyExecutor(ToyModel(ends_every=15), toy_layout(HEADS), 18, 5)
    run = Recorder(core(RecordingExecutor(executor, recording), policies, **changed), recording)
    rng, now = Random(3), 0.0
    ids: list[int] = []
    for i in range(60):
        now += rng.random()
        if i < 40 and rng.random() < 0.5:
            asked = request(
                rng.randint(1, 14), rng.randint(1, 16), seed=i, name=f"r{i}", eos=(0,), priority=rng.choice((0, 0, 2))
            )
            ids.append(run.submit(asked, now))
        if ids and rng.random() < 0.08:
            run.abort(rng.choice(ids), now)
        run.step(now)
    while run.has_work:
        now += 1.0
        run.step(now)
    return recording


def chaotic() -> Policies:
    chaos = Chaos(9)
    return Policies(allocation_named("paged"), batching=chaos, admission=chaos, victim=chaos)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("allocation", "batching", "admission"),
    list(
        product(
            ("paged", "contiguous-max", "contiguous-pow2"),
            ("iteration", "request"),
            ("max_utilization", "guaranteed_no_evict"),
        )
    ),
)
def test_a_replay_plans_the_same_under_every_policy(allocation: str, batching: str, admission: str, depth: int) -> None:
    policies = Policies.named(allocation=allocation, batching=batching, admission=admission)
    recording = recorded(policies, depth=depth)
    assert len(recording.plans) > 30
    again = core(RecordedExecutor(recording), policies, depth=depth)
    assert replay(recording, again) == len(recording.plans)
    assert not again.has_work


@pytest.mark.parametrize("depth", [0, 1])
def test_chaos_of_the_same_seed_replays_too(depth: int) -> None:
    recording = recorded(chaotic(), depth=depth)
    assert replay(recording, core(RecordedExecutor(recording), chaotic(), depth=depth)) == len(recording.plans)


def test_a_recording_can_be_replayed_any_number_of_times() -> None:
    recording = recorded()
    for _ in range(3):
        assert replay(recording, core(RecordedExecutor(recording))) == len(recording.plans)


@pytest.mark.parametrize("inner", [EchoExecutor, lambda: SimExecutor(LinearCost())], ids=["echo", "sim"])
def test_a_run_of_any_executor_replays_with_its_times(inner: Any) -> None:
    recording = recorded(inner=inner())
    assert replay(recording, core(RecordedExecutor(recording))) == len(recording.plans)
    assert recording.finished_s == sorted(recording.finished_s)


def test_the_recorded_traffic_is_worth_replaying() -> None:
    recording = Recording()
    executor = RecordingExecutor(ToyExecutor(ToyModel(), toy_layout(HEADS), 12, 5), recording)
    run = Recorder(core(executor, slabs=12), recording)
    for i in range(6):
        run.submit(request(5, 14, seed=i), 0.0)
    events = []
    while run.has_work:
        events += run.step(0.0)
    assert any(isinstance(event, Preempted) for event in events)
    assert replay(recording, core(RecordedExecutor(recording), slabs=12)) == len(recording.plans)


@pytest.mark.parametrize(
    "changed",
    [
        {"budget": 8},
        {"seqs": 2},
        {"slabs": 16},
        {"depth": 1},
        {"policies": Policies.named(admission="guaranteed_no_evict")},
        {"policies": Policies.named(batching="request")},
        {"policies": Policies.named(allocation="contiguous")},
        {"policies": chaotic()},
    ],
    ids=["budget", "seats", "blocks", "depth", "admission", "batching", "allocation", "chaos"],
)
def test_one_changed_setting_diverges_and_the_step_is_named(changed: dict[str, Any]) -> None:
    recording = recorded()
    with pytest.raises(Divergence) as caught:
        replay(recording, core(RecordedExecutor(recording), **changed))
    step = caught.value.step
    assert 0 <= step < len(recording.plans)
    assert str(caught.value).startswith(f"step {step}: ")


def test_the_first_difference_is_the_one_that_is_named() -> None:
    recording = recorded()
    fifth = dict(recording.plans[5])
    fifth["counts"] = [count + 1 for count in fifth["counts"]]
    recording.plans[5] = fifth
    with pytest.raises(Divergence, match=r"step 5: counts is .*, was ") as caught:
        replay(recording, core(RecordedExecutor(recording)))
    assert caught.value.step == 5


def test_a_request_that_the_replay_refuses_is_a_divergence() -> None:
    recording = recorded()
    with pytest.raises(Divergence, match="a request that the run took is refused"):
        replay(recording, core(RecordedExecutor(recording), slabs=4))


def test_a_replay_that_makes_fewer_or_more_plans_diverges() -> None:
    recording = recorded()
    shorter = replace_inputs(recording, len(recording.inputs) - 3)
    with pytest.raises(Divergence, match="the replay made"):
        replay(shorter, core(RecordedExecutor(shorter)))
    fewer = replace(recording, plans=recording.plans[:-2])
    with pytest.raises(Divergence, match="made no further plan"):
        replay(fewer, core(RecordedExecutor(fewer)))


def replace_inputs(recording: Recording, count: int) -> Recording:
    return replace(recording, inputs=recording.inputs[:count])


def test_what_was_never_sampled_is_not_made_up() -> None:
    recording = recorded()
    gone = next(iter(recording.tokens))
    del recording.tokens[gone]
    with pytest.raises(Divergence, match=f"step {gone[0]}: sequence {gone[1]} position {gone[2]} was not sampled"):
        replay(recording, core(RecordedExecutor(recording)))


# -- with tiers -----------------------------------------------------------------------------------------


def tiered(executor: Executor, mover: Any, *, host_slabs: int = 8, depth: int = 0) -> EngineCore:
    layout = toy_layout(HEADS)
    policies = Policies.named(reuse="prefix", preemption="offload")
    below = Below(host_slabs, disk_slots=(40,) * len(layout.groups), timeout_s=3.0)
    cache, tiering = tiered_cache(layout, 14, 4, below, keys=KeySpace("toy", layout.groups[0].block_tokens))
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=40, max_model_len=512, vocab_size=1000)
    scheduler = Scheduler(cache, limits, policies, tiering)
    return EngineCore(scheduler, executor, depth=depth, audit=Audit(full_every=1), mover=mover)


def recorded_with_tiers(depth: int = 0) -> Recording:
    """Conversations that come back, over links that are slow and fail, with aborts."""
    recording = Recording()
    layout = toy_layout(HEADS)
    faults = SeededFaults(5, fails=0.02, stalls=0.05, stall_s=8.0, loses_word=0.02)
    links = Links({"promote": TransferLaw(1e9, 0.7), "load": TransferLaw(1e9, 0.7)})
    mover = SimMover([group.block_bytes for group in layout.groups], links, faults=faults)
    core = tiered(RecordingExecutor(EchoExecutor(), recording), RecordingMover(mover, recording), depth=depth)
    run = Recorder(core, recording)
    rng, now = Random(4), 0.0
    ids: list[int] = []
    for i in range(400):
        if i < 120 and rng.random() < 0.4:
            asked = request(rng.choice((9, 14, 22)), rng.randint(4, 12), seed=rng.randrange(6), name=f"r{i}")
            ids.append(run.submit(asked, now))
        if ids and rng.random() < 0.1:
            run.abort(rng.choice(ids[-3:]), now)
        if not run.has_work and i >= 120:
            break
        run.step(now)
        now += rng.choice((0.01, 0.5, 1.0))
    assert not run.has_work
    return recording


@pytest.mark.parametrize("depth", [0, 1])
def test_a_run_with_tiers_replays_from_what_became_of_its_transfers(depth: int) -> None:
    recording = recorded_with_tiers(depth)
    orders = [one for one in recording.asked if isinstance(one, Order)]
    assert {order.route for order in orders} >= {"demote", "promote", "store"}
    reasons = {
        reason for poll in recording.polls for notice in poll.notices for reason in getattr(notice, "reasons", ())
    }
    assert len(reasons) > 2
    again = tiered(RecordedExecutor(recording), RecordedMover(recording), depth=depth)
    assert replay(recording, again) == len(recording.plans) > 30
    assert not again.has_work


def test_other_tiers_are_a_divergence_that_names_the_step() -> None:
    recording = recorded_with_tiers()
    again = tiered(RecordedExecutor(recording), RecordedMover(recording), host_slabs=7)
    with pytest.raises(Divergence, match=r"^step \d+: ") as caught:
        replay(recording, again)
    assert 0 < caught.value.step < len(recording.plans)


def test_another_outcome_of_a_transfer_is_not_hidden() -> None:
    recording = recorded_with_tiers()
    place, poll = next(
        (i, poll) for i, poll in enumerate(recording.polls) if any(getattr(n, "bytes", 0) for n in poll.notices)
    )
    lost = [
        replace(n, status="failed", bytes=0, reasons=("lost_completion",) * n.order.blocks)
        if hasattr(n, "order")
        else n
        for n in poll.notices
    ]
    recording.polls[place] = replace(poll, notices=tuple(lost))
    with pytest.raises(Divergence) as caught:
        replay(recording, tiered(RecordedExecutor(recording), RecordedMover(recording)))
    assert caught.value.step >= poll.plans


ORDER = Order(1, "demote", 0, (2,), (3,))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"number": 2}, "number of order 2 is 2, was 1"),
        ({"route": "promote"}, "route of order 1 is promote, was demote"),
        ({"group": 1}, "group of order 1 is 1, was 0"),
        ({"sources": (4,)}, r"sources of order 1 is \(4,\), was \(2,\)"),
        ({"targets": (5,)}, r"targets of order 1 is \(5,\), was \(3,\)"),
    ],
)
def test_an_order_that_differs_is_named_with_what_differs(changed: dict[str, Any], told: str) -> None:
    recording = polled()
    mover = RecordedMover(recording)
    mover.poll(0.0)
    with pytest.raises(Divergence, match=told) as caught:
        mover.submit(replace(ORDER, **changed))
    assert caught.value.step == 7


def polled() -> Recording:
    """A poll when seven plans had been made, an order, an erasure, a cancellation, and another poll."""
    recording = Recording(plans=[{}] * 7)
    mover = RecordingMover(SimMover([100]), recording)
    mover.poll(0.0)
    mover.submit(ORDER)
    mover.forget(0, [4])
    mover.cancel(1)
    mover.poll(1.0)
    return recording


def test_what_a_mover_was_not_asked_for_or_no_more_or_not_in_turn_diverges() -> None:
    recording = polled()
    assert recording.asked == [ORDER, Forgotten(0, (4,)), Cancelled(1)]
    mover = RecordedMover(recording)
    mover.poll(0.0)
    with pytest.raises(Divergence, match="step 7: the recorded run asked its mover for Order"):
        mover.poll(1.0)
    with pytest.raises(Divergence, match="the mover is asked for Cancelled"):
        mover.cancel(1)
    mover.submit(ORDER)
    mover.forget(0, (4,))
    with pytest.raises(Divergence, match=r"asked its mover for Cancelled\(order=1\) here"):
        mover.finish()
    mover.cancel(1)
    assert [notice.number for notice in mover.poll(1.0)] == [1]
    mover.finish()
    with pytest.raises(Divergence, match="did not ask its mover for Cancelled"):
        mover.cancel(2)
    with pytest.raises(Divergence, match="any more"):
        mover.poll(2.0)
