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
from prediction_engine import MOST_RUNS, run_apart
from prediction_runs import Timed, run_virtually, step_coverage
from workloads import Job

from octavo.cost.calibration import read_calibration
from octavo.cost.fitted import FittedCost
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
             "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--keep", str(kept), "none.json"]  # fmt: skip
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


def test_what_was_not_measured_is_announced(ran: tuple[dict[str, object], Path]) -> None:
    calibration = read_calibration(ran[1])
    assert beyond(calibration, calibrated_replica(calibration, Asked())) == []
    wider = calibrated_replica(calibration, Asked(max_num_batched_tokens=512))
    assert any("512 are allowed" in note for note in beyond(calibration, wider))


def test_a_workload_runs_the_same_in_a_process_of_its_own(
    ran: tuple[dict[str, object], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"model": str(ran[1].parent / "model"), "dtype": "float32", "max_model_len": 400, "max_num_seqs": 8,
             "max_num_batched_tokens": 64, "threads": 1, "own_time": True, "least_s": 0.0}  # fmt: skip
    timed = Timed("two", (Job(tuple(range(3, 13)), 4), Job((5, 6), 3)), (0.0, 0.0))
    (apart,) = run_apart(asked, timed, 1, 100)
    assert [shape.counts.tolist() for shape, _ in apart.steps] == [[10, 2], [1, 1], [1, 1], [1]]
    assert apart.figures["tokens_per_s"] == pytest.approx(7 / apart.span_s)
    assert 0 <= apart.stolen <= 1
    assert len(run_apart(asked | {"least_s": 60.0}, timed, 1, 100)) == MOST_RUNS
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SystemExit, match="two: its process ended with status 1"):
        run_apart(asked, timed, 1, 100)
