"""The paced executor behind `octavo serve --executor sim`: real scheduler, the cost model's pace, readable answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.pure.worlds import drain, endings, engine, outputs, request

from octavo.cli.serve_simulated import start_simulated
from octavo.cost.step import LinearCost
from octavo.cost.transfer import TransferLaw
from octavo.engine.paced import PacedExecutor, PacedMover, Speech
from octavo.errors import ConfigError
from octavo.memory.transfers import Order
from octavo.policy.bundle import Policies
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Preempted, StepTokens
from octavo.simulate.executors import SimExecutor
from octavo.simulate.lengths import Uniform
from octavo.simulate.links import Links, SimMover


class Clock:
    """Time that passes while somebody sleeps, and `busy_s` at each look."""

    def __init__(self, busy_s: float = 0.0) -> None:
        self.now = 0.0
        self.busy_s = busy_s

    def __call__(self) -> float:
        self.now += self.busy_s
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def paced(clock: Clock, speech: Speech | None = None, **options: object) -> EngineCore:
    executor = PacedExecutor(SimExecutor(LinearCost(0.01, 0.001, 0.0)), speech, clock=clock, sleep=clock.sleep)
    return engine(executor=executor, **options)  # type: ignore[arg-type]


def test_each_step_is_told_of_when_the_cost_model_says_it_is_done() -> None:
    clock = Clock()
    core = paced(clock)
    core.submit(request([5, 6, 7], 4), 0.0)
    ends = []
    while core.has_work:
        core.step(clock.now)
        ends.append(clock.now)
    assert ends == pytest.approx([0.013, 0.024, 0.035, 0.046])


def test_a_host_that_is_late_is_not_waited_for_twice() -> None:
    clock = Clock(busy_s=0.004)
    core = paced(clock)
    core.submit(request([5, 6, 7], 4), 0.0)
    while core.has_work:
        core.step(clock.now)
    assert clock.now == pytest.approx(0.046)


def test_answers_repeat_the_prompt_without_control_tokens_and_end_where_they_should() -> None:
    core = paced(Clock(), Speech(frozenset({9}), otherwise=4))
    mine = core.submit(request([9, 5, 6, 9, 7], 7), 0.0)
    silent = core.submit(request([9, 9], 3), 0.0)
    told = outputs(drain(core))
    assert told[mine] == [5, 6, 7, 5, 6, 7, 5]
    assert told[silent] == [4, 4, 4]


def test_an_answer_is_the_same_beside_others_and_after_giving_way() -> None:
    def answers(slabs: int, depth: int) -> tuple[dict[int, list[int]], int]:
        core = paced(Clock(), Speech(lengths=Uniform(3, 30)), slabs=slabs, seqs=4, depth=depth, policies=Policies())
        for number in range(6):
            asked = request(10 + number, 40, eos=(3,), seed=number, name=f"r{number}")
            core.submit(replace(asked, params=replace(asked.params, seed=number)), 0.0)
        events = drain(core)
        assert {end.reason for end in endings(events).values()} == {"stop"}
        return outputs(events), sum(isinstance(event, Preempted) for event in events)

    alone, none = answers(100, 0)
    pressed, some = answers(15, 1)
    assert (none, some > 0) == (0, True)
    assert alone == pressed
    assert len({len(tokens) for tokens in alone.values()}) > 2
    assert all(3 not in tokens[:-1] for tokens in alone.values())


def test_copies_are_waited_for_by_the_clock_of_whoever_drives() -> None:
    clock = Clock()
    links = Links({"demote": TransferLaw(1e3, 0.5)})
    mover = PacedMover(SimMover([100], links), clock=clock, sleep=clock.sleep)
    mover.poll(clock.now)
    mover.submit(Order(0, "demote", 0, (0, 1), (0, 1)))
    waits = 0
    while not (notices := mover.poll(clock.now)):
        mover.wait()
        waits += 1
    assert clock.now == pytest.approx(0.7), "half a second, and a hundred bytes twice at a thousand a second"
    assert waits == 35, "in moments, between which whoever drives may look at what else has come"
    assert len(notices) == 1
    before = clock.now
    mover.wait()
    assert clock.now - before == pytest.approx(0.02), "nothing is under way"


def test_logprobs_are_there_for_whom_asked() -> None:
    core = paced(Clock())
    asked = request([5, 6], 2)
    core.submit(replace(asked, params=replace(asked.params, logprobs=1)), 0.0)
    steps = [event for event in drain(core) if isinstance(event, StepTokens)]
    assert [step.logprobs[0].token_id for step in steps] == [5, 6]


@pytest.mark.parametrize(
    ("given", "says"),
    [({}, "model=None"), ({"model": "x", "dtype": "bfloat16"}, "dtype='bfloat16'"),
     ({"model": "x", "host_bytes": "1GB", "reuse": "prefix", "disk_shared": True, "disk_path": "d",
       "disk_bytes": "1GB"}, "disk_shared")],
)  # fmt: skip
def test_options_that_mean_nothing_without_a_model_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        start_simulated(given, {"device": "h100-sxm", "tp": 1, "cost": "roofline", "answer": None})
