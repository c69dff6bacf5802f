"""Times in the metrics: the parts of a step, a busy device, what stands aside; and when the engine may be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.pure.metrics_by_hand import MODEL, assert_histogram, scraped, value
from tests.pure.worlds import drain, engine, request

from octavo.cost.step import StepShape
from octavo.observe.metrics import Metrics
from octavo.scheduling.core import EngineCore
from octavo.simulate.executors import EchoExecutor, SimExecutor


def watched(core: EngineCore) -> Metrics:
    return Metrics(core, MODEL, clock=lambda: 0.0)


class OneSecond:
    """A cost model: every step takes a second."""

    def step_seconds(self, shape: StepShape) -> float:
        return 1.0


class Slow(EchoExecutor):
    """Moves a clock by so much for submitting and collecting."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.clock = clock

    def submit(self, plan):  # type: ignore[no-untyped-def]
        self.clock[0] += 10.0
        super().submit(plan)

    def collect(self):  # type: ignore[no-untyped-def]
        self.clock[0] += 5.0
        return super().collect()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_parts_of_a_step_are_timed_for_each_plan(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    core = engine(depth=depth, executor=Slow(clock), audit=False)
    core.timer = lambda: clock[0]
    schedule, commit = core.scheduler.schedule, core.scheduler.commit

    def slow_schedule(now: float):  # type: ignore[no-untyped-def]
        clock[0] += 3.0
        return schedule(now)

    def slow_commit(*arguments):  # type: ignore[no-untyped-def]
        clock[0] += 2.0
        commit(*arguments)

    monkeypatch.setattr(core.scheduler, "schedule", slow_schedule)
    monkeypatch.setattr(core.scheduler, "commit", slow_commit)
    metrics = watched(core)
    core.submit(request(6, 5), 0.0)
    metrics.observe(drain(core))
    series = scraped(metrics)
    for part, seconds in (("schedule", 3.0), ("execute", 15.0), ("commit", 2.0)):
        assert_histogram(series, "step_seconds", [seconds] * 5, part=part)


def test_without_a_timer_no_time_is_made_up() -> None:
    core = engine()
    metrics = watched(core)
    core.submit(request(6, 5), 0.0)
    metrics.observe(drain(core))
    assert_histogram(scraped(metrics), "step_seconds", [], part="execute")


def test_the_device_is_busy_for_the_share_of_the_window_in_which_steps_ran() -> None:
    core = engine(executor=SimExecutor(OneSecond()))
    now = [0.0]
    metrics = Metrics(core, MODEL, clock=lambda: now[0])
    assert value(scraped(metrics), "device_busy_ratio") == 0
    core.submit(request(3, 40), 0.0)
    for step in range(10):  # a second of work, three seconds of nothing
        metrics.observe(core.step(4.0 * step))
    for at, share in ((38.0, 7.5 / 30), (37.0, 8 / 30), (47.0, 5 / 30), (68.0, 0.0)):
        now[0] = at
        busy = sum(max(0.0, min(at, 4.0 * s + 1) - max(at - 30, 4.0 * s)) for s in range(10)) / 30
        assert value(scraped(metrics), "device_busy_ratio") == pytest.approx(busy)
        assert busy == pytest.approx(share, abs=0.02)


def test_a_long_step_counts_with_the_part_of_it_that_lies_in_the_window() -> None:
    cost = SimExecutor(OneSecond())
    core = engine(executor=cost)
    now = [0.0]
    metrics = Metrics(core, MODEL, clock=lambda: now[0])
    core.submit(request(3, 2), 0.0)
    cost.clock_s = 24.0  # as if the first step took from 0 to 25
    metrics.observe(core.step(0.0))
    metrics.observe(core.step(39.0))
    now[0] = 40.0
    assert value(scraped(metrics), "device_busy_ratio") == pytest.approx((25 - 10 + 1) / 30)


def test_a_sequence_that_its_stop_string_ends_while_it_stands_aside_keeps_its_own_times() -> None:
    core = engine(slabs=5, seqs=2)
    metrics = watched(core)
    first, second = core.submit(request(7, 12), 0.0), core.submit(request(7, 12, seed=1), 0.0)
    now = 0.0
    while second in core.scheduler.running.sequence_id or not now:
        metrics.observe(core.step(now))
        now += 1.0
    assert first in core.scheduler.running.sequence_id, "the younger one gave way"
    outputs = len(core.scheduler._sequences[second].outputs)
    urgent = core.submit(request(1, 3, priority=-1), now)
    for _ in range(3):
        metrics.observe(core.step(now))
        now += 1.0
    assert urgent not in core.scheduler._sequences, "it has had the seat in between"
    assert len(core.scheduler._sequences[second].outputs) == outputs
    core.abort(second, now, "stop")
    metrics.observe(core.step(now))
    series = scraped(metrics)
    assert outputs > 1
    assert value(series, "finished_total", reason="stop") == 1
    assert value(series, "time_per_output_token_seconds_count") == 2
    assert value(series, "time_per_output_token_seconds_sum") == 2.0, "both got a token a second while they had a seat"


@pytest.mark.parametrize("depth", [0, 1])
def test_the_guard_is_held_while_tables_change_and_not_while_a_step_computes(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = engine(slabs=12, depth=depth, audit=False)
    held, seen = [False], set()

    class Guard:
        def __enter__(self) -> None:
            assert not held[0]
            held[0] = True

        def __exit__(self, *error: object) -> None:
            held[0] = False

    core.guard = Guard()

    def watching(owner: object, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            assert held[0] == (owner is core.scheduler), name
            seen.add((owner is core.scheduler, name))
            return real(*arguments)

        return call

    changing = [(core.scheduler, name) for name in ("submit", "abort", "schedule", "commit", "fail_all")]
    for owner, name in [*changing, (core.executor, "submit"), (core.executor, "collect")]:
        monkeypatch.setattr(owner, name, watching(owner, name, getattr(owner, name)))
    for i in range(8):
        core.submit(request(6, 9, seed=i), 0.0)
    for _ in range(4):
        core.step(0.0)
    core.abort(2, 0.0)
    core.fail("over", 0.0)
    assert len(seen) == 7
