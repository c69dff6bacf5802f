"""The benchmark that sets predictions beside measurements: its figures, on a tiny model and in seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import tiny_llama

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import prediction
import prediction_engine
import prediction_steps
from prediction_engine import MOST_RUNS, at_speed, run_apart
from prediction_runs import Ran, Timed, run_virtually, step_coverage
from workloads import Job

from octavo.cost.calibration import read_calibration
from octavo.cost.fitted import FittedCost
from octavo.cost.speeds import Speed
from octavo.cost.step import StepShape
from octavo.planner.asked import Asked
from octavo.simulate.calibrated import beyond, calibrated_replica


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], Path]:
    folder = tmp_path_factory.mktemp("prediction")
    model = tiny_llama(folder / "model", max_position_embeddings=512)
    kept = folder / "c.json"
    flags = ["--model", str(model), "--processes", "1", "--calibrate", "3", "--workloads", "W1,W2", "--loads", "0.5",
             "--scale", "0.05", "--seconds", "0.2", "--max-model-len", "400", "--kv-tokens", "4000",
             "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--keep", str(kept),
             "--record", str(folder / "record.json"), "none.json"]  # fmt: skip
    out: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prediction, "find_file", lambda *_: None)
        patched.setattr("builtins.print", lambda *words, **_: out.append(" ".join(map(str, words))))
        prediction.main(flags)
    return json.loads(out[-1]), kept


def test_every_workload_is_measured_and_predicted(ran: tuple[dict[str, object], Path]) -> None:
    told, _ = ran
    assert [one["name"] for one in told["workloads"]] == ["W1", "W2", "Poisson 50%", "W2 tiered"]
    for one in told["workloads"]:
        for row in one["figures"].values():
            assert row["measured"] > 0
            assert row["off"] == pytest.approx(row["predicted"] / row["measured"] - 1)
            assert row["interval"][0] <= row["predicted"] <= row["interval"][1] or row["interval"][0] > 0
        assert 0 <= one["steps"]["inside"] <= 1
    assert told["steps"]["steps"] == sum(one["steps"]["steps"] for one in told["workloads"])


def test_a_simulated_run_takes_the_steps_that_its_law_says(ran: tuple[dict[str, object], Path]) -> None:
    calibration = read_calibration(ran[1])
    replica = calibrated_replica(calibration, Asked())
    cost = FittedCost(calibration)
    job = Job(tuple(range(3, 13)), 4)
    found = run_virtually(replica, Timed("one", (job,), (0.5,)))
    first = StepShape.from_chunks([0], [10], 1)
    steps = [first, *(StepShape.decode([10 + step]) for step in range(3))]
    seconds = [cost.step_seconds(shape) + cost.host_seconds(shape) for shape in steps]
    assert found.figures["ttft_p50_s"] == pytest.approx(seconds[0], abs=1e-8)
    assert found.figures["tpot_mean_s"] == pytest.approx(sum(seconds[1:]) / 3, abs=1e-8)
    assert found.span_s == pytest.approx(0.5 + sum(seconds), abs=1e-7)


def test_coverage_counts_steps_inside_their_interval(ran: tuple[dict[str, object], Path]) -> None:
    calibration = read_calibration(ran[1])
    cost = FittedCost(calibration)
    shape = StepShape.decode([20, 30])
    low, high = cost.step_interval(shape)
    steps = [(shape, seconds) for seconds in (low * 0.9, low * 1.01, (low + high) / 2, high * 0.99, high * 1.1)]
    found = step_coverage(calibration, steps)
    assert (found["inside"], found["below"], found["above"]) == (0.6, 0.2, 0.2)
    assert found["median_width"] == pytest.approx((high - low) / (cost.step_seconds(shape) + cost.host_seconds(shape)))
    assert np.isfinite(found["total"])


def test_steps_are_told_apart_by_kind_and_after_a_rest(ran: tuple[dict[str, object], Path]) -> None:
    kinds = [prediction_steps.kind_of(StepShape.decode([9] * rows)) for rows in (1, 2, 3, 4, 5, 16, 17)]
    assert kinds == ["1 row", "2 rows", "3 or 4", "3 or 4", "5 to 8", "9 to 16", "17 and more"]
    longer = [prediction_steps.kind_of(StepShape.from_chunks([5, 0], [1, many], 2)) for many in (2, 63, 64, 256)]
    assert longer == ["up to 64 tokens", "up to 64 tokens", "up to 256", "more"]
    calibration = read_calibration(ran[1])
    cost, shape = FittedCost(calibration), StepShape.decode([20])
    expected = cost.step_seconds(shape) + cost.host_seconds(shape)
    runs = {"one": [Ran({}, 1.0, [(shape, expected), (shape, expected / 2), (shape, expected / 4)], rested=[1])]}
    told = prediction_steps.kinds_told(calibration, [], runs, None)
    assert told["calibration"] == {}
    assert told["runs"]["1 row"] == pytest.approx({"steps": 3, "off": 1.0, "total": 3 / 1.75 - 1})
    assert told["runs"]["after a rest"] == pytest.approx({"steps": 1, "off": 1.0})


def test_a_record_is_fitted_again_without_measuring(
    ran: tuple[dict[str, object], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((ran[1].parent / "record.json").read_text())
    runs = {name: [Ran.of(one) for one in several] for name, several in record["runs"].items()}
    assert list(runs) == ["W1", "W2", "Poisson 50%", "W2 tiered"]
    assert runs["Poisson 50%"][0].rested[0] == 0, "nothing is there before the first arrival"
    steps = [step for several in runs.values() for one in several for step in one.steps]
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    with pytest.raises(SystemExit, match="several processes"):
        prediction_steps.main([str(path)])
    record["samples"] = [
        [number, 0, shape.starts.tolist(), shape.counts.tolist(), shape.sampled, 0.9 * took, 0.1 * took, number % 3, []]
        for number, (shape, took) in enumerate(steps[::4])
    ]
    path.write_text(json.dumps(record))
    for first, processes in (([], 3), (["--first", "2"], 2)):
        prediction_steps.main([str(path), *first])
        out = capsys.readouterr().out
        assert f"steps of {processes} processes" in out
        told = json.loads(out.splitlines()[-1])
        assert told["steps"]["all"]["steps"] == len(steps)
        assert 0.4 < told["steps"]["all"]["inside"] <= 1
        fitted = [sample for sample in record["samples"] if sample[-2] < processes]
        assert sum(one["steps"] for one in told["kinds"]["calibration"].values()) == len(fitted)


def test_runs_at_the_calibrated_speed_of_memory_are_compared_and_of_them_the_steps_between_two_such_reads() -> None:
    speed = Speed(29e9, 40e9)
    steps = [(StepShape.decode([20 + number]), 1.0) for number in range(6)]
    mixed = Ran({}, 1.0, steps, rates=[(0, 30e9), (2, 28e9), (4, 41e9), (6, 29e9)])
    assert mixed.share_at(speed) == 0.75
    assert mixed.steps_at(speed) == steps[:2]
    fast, slow = (Ran({}, 1.0, steps, rates=[(0, rate), (6, rate)]) for rate in (40e9, 29e9))
    assert at_speed([fast, mixed, slow], speed) == [slow]
    assert at_speed([fast, mixed], speed) == [mixed]
    assert at_speed([fast], speed) == [fast]
    unseen = Ran({}, 1.0, steps)
    assert at_speed([unseen, unseen], speed) == [unseen, unseen]
    assert unseen.steps_at(speed) == steps


def test_a_run_at_another_speed_of_memory_is_run_again_while_patience_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([40e9, 29e9, 40e9, 29e9, 29e9])
    now = iter(range(100))
    monkeypatch.setattr(prediction_engine.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(prediction_engine, "wait_for", lambda *_: None)
    monkeypatch.setattr(prediction_engine, "run_really", lambda *_: Ran({}, 1.0, [], rates=[(0, next(speeds))]))
    asked = {"own_time": False, "least_s": 0.0, "speed": [29e9, 40e9], "patience": 50.0}
    timed = Timed("none", (), ())
    assert [one.rates[0][1] for one in prediction_engine.run_here(asked, None, timed, 2)] == [40e9, 29e9, 40e9, 29e9]
    speeds = iter([40e9] * 9)
    assert len(prediction_engine.run_here(asked | {"patience": 2.0}, None, timed, 1)) == 2


def test_what_was_not_measured_is_announced(ran: tuple[dict[str, object], Path]) -> None:
    calibration = read_calibration(ran[1])
    assert beyond(calibration, calibrated_replica(calibration, Asked())) == []
    wider = calibrated_replica(calibration, Asked(max_num_batched_tokens=512))
    assert any("512 are allowed" in note for note in beyond(calibration, wider))


def test_a_workload_runs_the_same_in_a_process_of_its_own(
    ran: tuple[dict[str, object], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"model": str(ran[1].parent / "model"), "dtype": "float32", "max_model_len": 400, "max_num_seqs": 8,
             "max_num_batched_tokens": 64, "threads": 1, "own_time": True, "least_s": 0.0, "patience": 0.0}  # fmt: skip
    timed = Timed("two", (Job(tuple(range(3, 13)), 4), Job((5, 6), 3)), (0.0, 0.0))
    (apart,) = run_apart(asked, timed, 1, 100)
    assert [shape.counts.tolist() for shape, _ in apart.steps] == [[10, 2], [1, 1], [1, 1], [1]]
    assert apart.figures["tokens_per_s"] == pytest.approx(7 / apart.span_s)
    assert 0 <= apart.stolen <= 1
    assert len(run_apart(asked | {"least_s": 60.0}, timed, 1, 100)) == MOST_RUNS
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit, match="two: its process ended with status 1"):
        run_apart(asked, timed, 1, 100)
