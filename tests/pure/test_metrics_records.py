"""What else is folded from the events: the record of a request, the flight recorder, the Chrome trace."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from tests.pure.metrics_by_hand import ByHand
from tests.pure.worlds import VOCAB, Watched, drain, endings, engine, request

from octavo.cost.step import LinearCost
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.errors import EngineDeadError, InvariantViolation
from octavo.observe.chrome_trace import ENGINE, SEQUENCES, ChromeTrace
from octavo.observe.recorder import MOST_ITEMS, ON_STDERR, FlightRecorder, event_fields
from octavo.observe.request_record import record_fields
from octavo.scheduling.events import Event, Finished, StepTokens
from octavo.scheduling.plan import StepResult
from octavo.scheduling.request import SamplingParams
from octavo.simulate.executors import EchoExecutor, SimExecutor

NAMES_OF_THE_RECORD = (
    *("input_tokens", "cached_tokens", "output_tokens", "allocated_blocks", "attention_mode", "cache_dtype"),
    *("queue_time", "prefill_time", "decode_time", "preempted_time", "preemptions"),
)
SECRET = 777
"""A token that must not appear in what may be sent to somebody."""


def pressed() -> list[Event]:
    """The events of twelve requests in a pool that is too small for them, in simulated time."""
    core = engine(slabs=12, depth=1, executor=SimExecutor(LinearCost(step_s=0.5)))
    for i in range(12):
        core.submit(request(6, 9, name=f"r{i}", seed=i), 0.25 * i)
    events, now = [], 3.0
    while core.has_work:
        events += core.step(now)
        now += 0.6
    return events + core.scheduler.drain_events()


# -- the record ---------------------------------------------------------------------------------


def test_the_record_has_its_fixed_names_and_nothing_else() -> None:
    for end in endings(pressed()).values():
        fields = record_fields(end.record)
        assert tuple(fields) == NAMES_OF_THE_RECORD
        assert json.loads(json.dumps(fields)) == fields


@pytest.mark.parametrize("depth", [0, 1])
def test_the_record_says_what_was_asked_planned_and_answered(depth: int) -> None:
    preempted = 0
    for seed in range(12):
        hand = ByHand(seed, depth=depth)
        events: list[Event] = []
        hand.metrics.observe = events.extend  # type: ignore[method-assign]
        hand.run(150)
        hand.drain()
        finished = [event for event in events if isinstance(event, Finished)]
        ends = {end.record.request_id: end for end in finished}
        assert len(ends) == len(finished) == len(hand.asked)
        for i, asked in hand.asked.items():
            end, times = ends[asked.request_id], hand.times[i]
            line = record_fields(end.record)
            reason, at = hand.ended[i]
            assert (end.reason, end.record.choice) == (reason, 0)
            assert end.error == ("it is sick" if reason == "error" else None)
            assert (line["input_tokens"], line["output_tokens"]) == (asked.prompt_tokens, len(times))
            assert line["cached_tokens"] == {}
            assert sum(line[k] for k in ("queue_time", "prefill_time", "decode_time")) == pytest.approx(
                at - hand.arrived[i], abs=1e-6
            )
            if times:
                assert line["queue_time"] + line["prefill_time"] == pytest.approx(times[0] - hand.arrived[i], abs=1e-6)
            assert (line["preempted_time"] > 0) <= (line["preemptions"] > 0)
            # The most positions it ever had a place for: those of its chunks.
            most = max(
                (
                    int(p.starts[k] + p.counts[k])
                    for p in hand.executor.plans
                    for k in (p.sequence_ids == i).nonzero()[0]
                ),
                default=0,
            )
            assert line["allocated_blocks"]["full"] == -(-most // 4)
            preempted += line["preemptions"]
    assert preempted > 5


def test_a_record_holds_no_token() -> None:
    core = engine()
    core.submit(request([SECRET, 5], 3), 0.0)
    (end,) = endings(drain(core)).values()
    assert str(SECRET) not in json.dumps(record_fields(end.record))


# -- the flight recorder ------------------------------------------------------------------------


class Broken(EchoExecutor):
    def __init__(self, after: int, error: Exception) -> None:
        super().__init__()
        self.after, self.error = after, error

    def collect(self) -> StepResult:
        self.after -= 1
        if self.after < 0:
            raise self.error
        return super().collect()


def failing(error: Exception, path: Path | None, after: int = 4) -> Engine:
    """An engine that has failed with three requests running and the rest waiting."""
    served = Engine(
        engine(slabs=12, seqs=3, executor=Broken(after, error)),
        Intake(None, defaults={}, eos_token_ids=(), vocab_size=VOCAB),
    )
    served.recorder.path = path
    for i in range(5):
        served.add(f"r{i}", [SECRET, 2, 3, 4, 5], SamplingParams(max_tokens=20))
    for _ in range(after + 1):
        served.step()
    with pytest.raises(EngineDeadError):
        served.step()
    return served


def test_when_the_engine_fails_the_tables_of_that_moment_and_the_last_events_are_written(tmp_path: Path) -> None:
    failing(RuntimeError("the device is gone"), tmp_path / "dump.jsonl")
    header, state, *events = map(json.loads, (tmp_path / "dump.jsonl").read_text().splitlines())
    assert header["error"] == "RuntimeError: the device is gone"
    assert header["events"] == len(events)
    assert state["state"]["running"] == len(state["state"]["rows"]) == 3
    assert state["state"]["waiting"] == 2
    # four answered steps: 5 prompt positions and 3 outputs are kept, in two blocks; the fifth step needs a third
    assert [row["committed"] for row in state["state"]["rows"]] == [8, 8, 8]
    assert state["state"]["groups"] == {"full": {"empty": 3, "filling": 3, "ready": 6, "draining": 0}}
    assert re.fullmatch(
        r"full: sequence 0 block 0 -> \d+ ready, sequence 0 block 1 -> \d+ ready, sequence 0 block 2 -> \d+ filling",
        state["state"]["tables"][0],
    )
    kinds = [event["event"] for event in events]
    assert kinds[:5] == ["Submitted"] * 5
    assert kinds[-1] == "StepPlanned", "the step that failed was planned, and nothing is cleared away yet"
    assert "Finished" not in kinds


def test_a_dump_has_no_token_in_it(tmp_path: Path) -> None:
    failing(RuntimeError("gone"), tmp_path / "dump.jsonl")
    lines = (tmp_path / "dump.jsonl").read_text().splitlines()
    numbers = [number for line in lines for number in re.findall(r"(?<![\d.])\d+(?![\d.])", line)]
    assert str(SECRET) not in numbers
    tokens = [json.loads(line) for line in lines if '"StepTokens"' in line]
    assert [event["tokens"] for event in tokens] == [3] * 4
    assert tokens[0]["sequence_ids"] == [0, 1, 2]


def test_a_broken_invariant_is_named_and_without_a_file_the_end_goes_to_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing(InvariantViolation("slot-moves", "slot 7 moved twice"), None, after=30)
    lines = capsys.readouterr().err.splitlines()
    header = json.loads(lines[0])
    assert (header["invariant"], header["detail"]) == ("slot-moves", "slot 7 moved twice")
    assert len(lines) == 2 + ON_STDERR


def test_a_dump_that_cannot_be_written_hides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = failing(RuntimeError("the device is gone"), tmp_path / "no" / "such" / "folder")
    assert served.dead == "RuntimeError: the device is gone"
    assert [served.take(f"r{i}").outputs[0].finish_reason for i in range(5)] == ["error"] * 5
    assert "could not write its dump" in capsys.readouterr().err


def test_the_recorder_keeps_the_last_events_only_and_shortens_what_is_long(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "dump.jsonl", capacity=10)
    core = engine(slabs=400, seqs=100, budget=400)
    for i in range(100):
        core.submit(request([1], 3, name=f"r{i}"), 0.0)
    events = core.step(0.0)
    recorder.observe(events)
    recorder.dump(core, RuntimeError("gone"))
    _, state, *kept = map(json.loads, (tmp_path / "dump.jsonl").read_text().splitlines())
    assert [event["event"] for event in kept] == [type(event).__name__ for event in events[-10:]]
    (tokens,) = [event_fields(event) for event in events if isinstance(event, StepTokens)]
    assert tokens["tokens"] == 100
    assert len(tokens["sequence_ids"]) == MOST_ITEMS
    assert len(state["state"]["tables"]) == MOST_ITEMS
    assert state["state"]["tables_left_out"] == 100 - MOST_ITEMS


def test_every_kind_of_event_can_be_written_as_json() -> None:
    for event in pressed():
        plain = json.loads(json.dumps(event_fields(event)))
        assert plain["event"] == type(event).__name__
        if isinstance(event, Finished):
            assert plain["record"]["request_id"] == event.record.request_id


# -- the Chrome trace ---------------------------------------------------------------------------


def test_a_lane_shows_waiting_computing_and_standing_aside_without_gaps() -> None:
    events = pressed()
    trace = ChromeTrace()
    trace.observe(events)
    value = json.loads(trace.json())
    slices = [one for one in value["traceEvents"] if one["ph"] == "X"]
    preemptions = 0
    for i, end in endings(events).items():
        lane = [one for one in slices if one["pid"] == SEQUENCES and one["tid"] == i]
        assert {one["args"]["request"] for one in lane} == {f"r{i}"}
        assert [lane[0]["name"], lane[1]["name"], lane[-1]["name"]] == ["waiting", "prefill", "decode"]
        for before, after in pairwise(lane):
            assert before["ts"] + before["dur"] == pytest.approx(after["ts"])
        assert lane[0]["ts"] == pytest.approx(end.record.arrival_s * 1e6)
        assert lane[-1]["ts"] + lane[-1]["dur"] == pytest.approx(end.record.finished_s * 1e6)
        aside = [one["dur"] for one in lane if one["name"] == "preempted"]
        assert len(aside) == end.record.preemptions
        assert sum(aside) == pytest.approx(end.record.preempted_time * 1e6)
        preemptions += len(aside)
    assert preemptions > 3


def test_steps_lie_one_after_the_other_and_say_what_they_computed() -> None:
    executor = Watched(SimExecutor(LinearCost(step_s=0.5)))
    core = engine(slabs=12, depth=1, executor=executor)
    for i in range(6):
        core.submit(request(6, 9, seed=i), 0.0)
    trace = ChromeTrace()
    trace.observe(drain(core))
    steps = [one for one in trace.value()["traceEvents"] if one["ph"] == "X" and one["pid"] == ENGINE]
    assert [one["args"]["number"] for one in steps] == [plan.number for plan in executor.plans]
    assert [one["args"]["sequences"] for one in steps] == [len(plan.rows) for plan in executor.plans]
    assert sum(one["args"]["decode_tokens"] + one["args"]["prefill_tokens"] for one in steps) == sum(
        int(plan.counts.sum()) for plan in executor.plans
    )
    for before, after in pairwise(steps):
        assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
        assert before["dur"] > 0.5e6


def test_a_trace_keeps_the_last_slices_only() -> None:
    trace = ChromeTrace(capacity=7)
    trace.observe(pressed())
    assert len([one for one in trace.value()["traceEvents"] if one["ph"] == "X"]) == 7
