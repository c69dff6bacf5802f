"""A run, recorded and replayed in memory: the plans are identical, and a changed policy is found at its first step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
from tests.pure.worlds import engine, request

from octavo.cost.step import LinearCost
from octavo.policy.allocation import allocation_named
from octavo.policy.bundle import Policies
from octavo.policy.chaos import Chaos
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Preempted
from octavo.scheduling.plan import Executor
from octavo.simulate.executors import EchoExecutor, SimExecutor
from octavo.simulate.recording import Divergence, RecordedExecutor, Recorder, Recording, RecordingExecutor, replay
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
