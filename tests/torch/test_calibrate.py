"""`octavo calibrate` on tiny models: scenes become the steps they say, the engine is left as it was, files simulate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import tiny_llama
from recurrent_models import recurrent_config
from tiny import tiny_config
from transformers import AutoModelForCausalLM

from octavo.cli.calibrate_machine import machine_fields
from octavo.cli.main import run
from octavo.config import Config
from octavo.cost.calibration import read_calibration
from octavo.cost.design import Scene, design
from octavo.cost.fitted import FittedCost
from octavo.cost.step import StepShape
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.errors import ConfigError, OctavoError
from octavo.memory.check import is_empty
from octavo.planner.asked import Asked
from octavo.runtime import calibrate_round, calibrate_rounds
from octavo.runtime.calibrate import DECODE_STEPS, Measuring, Stage, measure_steps
from octavo.runtime.calibrate_transfers import measure_transfers
from octavo.scheduling.request import SamplingParams
from octavo.simulate.calibrated import calibrated_replica

LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 200, "block_size": 4}
FLAGS = ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "200"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=256)


def engine_of(path: Path, **options: object) -> Engine:
    return build_engine(Config.from_kwargs(model=str(path), skip_tokenizer_init=True, **(LIMITS | options)))


def as_pairs(shape: StepShape) -> list[tuple[int, int]]:
    return sorted(zip(shape.starts.tolist(), shape.counts.tolist(), strict=True))


def test_a_scene_becomes_the_step_that_it_describes(model: Path) -> None:
    engine = engine_of(model)
    stage = Stage(engine, Measuring(seconds=1))
    try:
        decodes = stage.play(Scene(decodes=(20, 20, 90)), 0)
        assert [as_pairs(sample.shape) for sample in decodes] == [
            [(20 + step, 1), (20 + step, 1), (90 + step, 1)] for step in range(1, 1 + DECODE_STEPS)
        ]
        chunk = stage.play(Scene(chunks=(24,), start=50, ends=False), 1)
        assert [as_pairs(sample.shape) for sample in chunk] == [[(50, 24)]]
        assert chunk[0].shape.sampled == 0
        prompts = stage.play(Scene(chunks=(10, 6)), 2)
        assert [as_pairs(sample.shape) for sample in prompts] == [[(0, 6), (0, 10)], [(6, 1), (10, 1)]]
        mixed = stage.play(Scene(decodes=(30, 40), chunks=(16,), start=64), 3)
        assert as_pairs(mixed[0].shape) == [(32, 1), (42, 1), (64, 16)]
        assert mixed[0].shape.sampled == 3
        assert all(sample.device_s > 0 and sample.host_s > 0 for sample in (*decodes, *chunk, *prompts, *mixed))
    finally:
        stage.close()
        engine.close()


def test_memory_is_there_behind_every_block_before_a_step_is_timed(model: Path) -> None:
    engine = engine_of(model)
    stage = Stage(engine, Measuring(seconds=1))
    try:
        scenes = design(stage.range(), 0)
        stage.rehearse(scenes)
        there = [group.copy() for group in stage.probe.touched]
        assert 0.5 < there[0].mean() < 1
        submit, used = stage.probe.executor.submit, []
        stage.probe.executor.submit = lambda plan: used.extend(plan.new_blocks) or submit(plan)
        for number, scene in enumerate(scenes[::4]):
            stage.play(scene, number)
        assert sum(len(blocks.slots) for blocks in used) > 50
        assert all(there[blocks.group][blocks.slots].all() for blocks in used)
        assert is_empty(engine.core.scheduler.cache)
    finally:
        stage.close()
        engine.close()


def test_an_engine_serves_as_before_once_it_has_been_measured(model: Path) -> None:
    def answer(engine: Engine) -> tuple[int, ...]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        engine.add("a", {"prompt_token_ids": [5, 6, 7, 8, 9]}, params)
        while engine.core.has_work:
            engine.step()
        return engine.take("a").outputs[0].token_ids

    engine = engine_of(model)
    before, limits, executor = answer(engine), engine.core.scheduler.limits, engine.core.executor
    assert measure_steps(engine, Measuring(seconds=0.5))[0]
    assert is_empty(engine.core.scheduler.cache)
    assert engine.core.scheduler.limits is limits
    assert engine.core.executor is executor
    assert answer(engine) == before
    engine.close()


@pytest.mark.parametrize("name", ["gemma3_text", "bamba", "lfm3"])
def test_windows_and_recurrent_state_are_measured_too(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny_config(name) if name == "gemma3_text" else recurrent_config(name)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = engine_of(tmp_path, max_model_len=100)
    samples, _ = measure_steps(engine, Measuring(seconds=1.5))
    assert len({sample.scene for sample in samples}) > 5
    assert is_empty(engine.core.scheduler.cache)
    engine.close()


@pytest.mark.parametrize(("chosen", "later"), [("torch", "torch"), ("native int8", "native"), (None, None)])
def test_later_processes_run_the_linear_kernels_that_the_first_one_chose(
    chosen: str | None, later: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def measured(asked: dict[str, Any], _: object) -> dict[str, Any]:
        seen.append(asked["config"].get("linear_backend"))
        described = {"engine": {"linear": chosen if len(seen) == 1 else "of another"}, "laws": []}
        return {"spent": [], "loading_s": 0.0, "samples": [], "transfers": {}, "description": described}

    monkeypatch.setattr(calibrate_rounds, "_measured", measured)
    monkeypatch.setattr(calibrate_rounds, "calibration_from", lambda *_: None)
    rounds = calibrate_rounds.Rounds(config={"model": "any"}, seconds=3.0, processes=3)
    calibrate_rounds.calibrate_rounds(rounds, {})
    assert seen == [None, later, later]
    assert rounds.config == {"model": "any"}


def test_processes_begin_evenly_over_the_time_that_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    now, began, said = [100.0], list[float](), list[str]()

    def measured(asked: dict[str, Any], _: object) -> dict[str, Any]:
        began.append(now[0])
        now[0] += 45.0 if len(began) == 2 else 7.0  # the second one is longer than its share
        described = {"engine": {}, "laws": []}
        return {"spent": [], "loading_s": 0.0, "samples": [], "transfers": {}, "description": described}

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(calibrate_rounds, "_measured", measured)
    monkeypatch.setattr(calibrate_rounds, "calibration_from", lambda *_: None)
    monkeypatch.setattr(calibrate_rounds.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(calibrate_rounds.time, "sleep", sleep)
    rounds = calibrate_rounds.Rounds(config={}, seconds=4.0, processes=4, over_s=90.0)
    calibrate_rounds.calibrate_rounds(rounds, {}, lambda share, text: said.append(text))
    assert began == [100.0, 130.0, 175.0, 190.0]
    assert "process 2 of 4: begins in 23 s" in said
    assert "process 2 of 4: begins in 1 s" in said


def test_idle_threads_of_a_measuring_process_are_told_to_sleep_soon_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told() -> None:
        raise InterruptedError

    monkeypatch.setattr(calibrate_round, "spin_briefly", told)
    with pytest.raises(InterruptedError):
        calibrate_round.measured({}, lambda share, text: None)


def test_what_cannot_be_measured_is_refused(model: Path) -> None:
    engine = engine_of(model, pipeline_depth=1)
    with pytest.raises(ConfigError, match="pipeline_depth"):
        Stage(engine, Measuring())
    engine.close()
    with pytest.raises(ConfigError, match="budget"):
        Measuring(seconds=0)


def test_transfers_between_arenas_and_a_disk_have_a_law_each(model: Path, tmp_path: Path) -> None:
    engine = engine_of(model)
    laws = measure_transfers(engine.deployment.layout, "cpu", tmp_path / "disk")
    assert sorted(laws) == ["demote", "load", "promote", "store"]
    for law in laws.values():
        assert 1e6 < law.bytes_per_s < 1e12
        assert 0 <= law.latency_s < 0.1
    assert list((tmp_path / "disk").iterdir()) == []
    assert sorted(measure_transfers(engine.deployment.layout, "cpu")) == ["demote", "promote"]
    engine.close()


@pytest.fixture(scope="module")
def calibration(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "c.json"
    flags = ["--budget", "3", "--processes", "2", "--skip-tokenizer-init", "-q", *FLAGS]
    assert run(["calibrate", str(model), "-o", str(path), *flags]) == 0
    return path


def test_a_model_is_calibrated_into_a_file_and_simulated_from_it(
    calibration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = read_calibration(calibration)
    assert told.model["layers"] == 2
    assert told.machine["cores"] == machine_fields()["cores"]
    assert told.engine["slabs"] == 200
    assert told.about["processes"] == 2
    # Where memory has two speeds, all steps of one of the two may have been measured at the other one, and be left out.
    fitted = told.about["processes_fitted"]
    assert fitted == 2 or told.about["steps_left_out"] > 0
    assert ("processes_apart" in told.errors) == (fitted == 2)
    cost = FittedCost(told)
    shape = StepShape.decode([50] * 8)
    assert 1e-5 < cost.step_seconds(shape) < 10
    low, high = cost.step_interval(shape)
    assert 0 < low < cost.step_seconds(shape) + cost.host_seconds(shape) < 3 * high
    replica = calibrated_replica(told, Asked(), here=machine_fields())
    assert replica.links.laws["demote"] == told.transfers["demote"]
    work = ["--requests", "20", "--rate", "50", "--input-tokens", "40", "--output-tokens", "10", "--json"]
    assert run(["simulate", "--cost", f"fitted:{calibration}", *work]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"]["ended"] == {"length": 20}
    assert report["kv"]["capacity_bytes"] == 200 * told.engine["slab_bytes"]
    assert 0 < report["intervals"]["tpot_s mean"][0] < report["intervals"]["tpot_s mean"][1]
    assert "measured on this machine" in report["about"][1]


def test_another_model_or_machine_is_refused_by_field_unless_asked_for(
    calibration: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = ["--requests", "3", "--input-tokens", "8", "--output-tokens", "4"]
    wide = tiny_llama(tmp_path / "wide", hidden_size=32, max_position_embeddings=256)
    mine = ["simulate", str(model), "--cost", f"fitted:{calibration}", *work]
    assert run(mine) == 0
    capsys.readouterr()
    assert run(["simulate", str(wide), "--cost", f"fitted:{calibration}", *work]) == 2
    assert "model.hidden_size=32" in capsys.readouterr().err
    told = json.loads(calibration.read_text())
    told["machine"]["cpu"] = "another"
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(json.dumps(told))
    theirs = ["simulate", str(model), "--cost", f"fitted:{elsewhere}", *work]
    assert run(theirs) == 2
    assert "machine.cpu=" in capsys.readouterr().err
    assert run([*theirs, "--foreign-calibration"]) == 0
    assert "of whatever model and machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--device", "h100-sxm"], "device='h100-sxm'"),
        (["--block-size", "8"], "engine.block_size=8"),
        (["--kv-dtype", "bf16"], "model.kv_dtype='bf16'"),
        (["--quantization", "int8"], "engine.quantization='int8'"),
        (["--tp", "2"], "tp=2"),
    ],
)
def test_options_that_a_file_cannot_answer_for_are_refused(
    calibration: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", "--cost", f"fitted:{calibration}", "--requests", "3", *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("cost", ["fitted", "fitted:", "tables", "guess", "roofline:x"])
def test_a_cost_that_is_none_is_refused(cost: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--cost", cost]) == 2
    assert "fitted:FILE" in capsys.readouterr().err


def test_the_order_and_number_of_scenes_do_not_change_what_a_scene_is(model: Path) -> None:
    engine = engine_of(model)
    samples, _ = measure_steps(engine, Measuring(seconds=1.5, max_batch=4, max_context=64, seed=3))
    shapes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for sample in samples:
        assert shapes.setdefault((sample.scene, sample.step), as_pairs(sample.shape)) == as_pairs(sample.shape)
    assert max(sample.shape.chunks for sample in samples) <= 5
    assert np.array([sample.shape.tokens for sample in samples]).max() <= 64 + 4
    engine.close()


def test_a_process_goes_on_where_the_one_before_has_stopped(model: Path) -> None:
    engine = engine_of(model)
    before, spent = measure_steps(engine, Measuring(seconds=0.3))
    played = {number for number, seconds in enumerate(spent) if seconds > 1e-6}
    assert played == {sample.scene for sample in before}
    everything = [seconds if seconds > 1e-6 else 0.0 for seconds in spent]
    everything[0] = everything[-1] = 100.0
    after, later = measure_steps(engine, Measuring(seconds=0.3), spent=everything)
    assert {0, len(spent) - 1}.isdisjoint(sample.scene for sample in after), "they have had their time"
    assert all(now >= was for now, was in zip(later, everything, strict=True))
    engine.close()


def test_what_a_measuring_process_refuses_is_said_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "c.json")
    (tmp_path / "model").mkdir()
    assert run(["calibrate", str(tmp_path / "model"), "-o", out, "-q"]) == 2
    assert "config.json" in capsys.readouterr().err
    assert run(["calibrate", "-o", out, "--processes", "0"]) == 2
    assert "processes=0" in capsys.readouterr().err
    assert run(["calibrate", "-o", out, "--budget", "nan"]) == 2
    assert "budget=nan" in capsys.readouterr().err
    assert run(["calibrate", "-o", out, "--over", "-1"]) == 2
    assert "over=-1" in capsys.readouterr().err
    assert run(["calibrate", "-o", out, "--over", "60", "--processes", "1"]) == 2
    assert "give more --processes" in capsys.readouterr().err
    assert not Path(out).exists()


def test_a_measuring_process_that_dies_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_rounds.sys, "executable", "/bin/false")
    with pytest.raises(OctavoError, match="status 1 and measured nothing"):
        calibrate_rounds.calibrate_rounds(calibrate_rounds.Rounds(config={}, seconds=1.0), {})
