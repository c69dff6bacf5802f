"""Workload definitions of inference-perf: lengths have their moments, sessions grow, wrong fields are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.pure.test_simulate_report import BY_HAND

from octavo.cli.main import run as octavo
from octavo.errors import ConfigError
from octavo.simulate.inference_perf import Distribution, is_definition, read_definition
from octavo.simulate.servegen import clients_of, draw
from octavo.simulate.synthetic import Arrivals
from octavo.simulate.trace import prompt_of

AT_ONCE = Arrivals(rate=float("inf"))


def law(low: float, high: float, mean: float, deviation: float, kind: str | None = None) -> dict[str, Any]:
    told: dict[str, Any] = {"min": low, "max": high, "mean": mean, "standard_deviation": deviation}
    return told if kind is None else told | {"distribution_type": kind}


CHAT = {
    "input_sequence_length": law(60, 400, 100, 20, "log_normal"),
    "output_sequence_length": law(5, 90, 30, 10, "normal"),
    "number_of_turns": law(3, 3, 3, 0, "normal"),
    "time_between_turns": law(1, 9, 4, 2, "uniform"),
    "system_prompt": law(48, 48, 48, 0, "normal"),
    "input_sequence_length_per_turn": law(7, 7, 7, 0, "normal"),
    "multi_turn": True,
    "metadata": {"slos": {"ttft_p99_ms": 1000, "ttft_p99_ms_justification": "because"}},
}


def written(folder: Path, told: object) -> Path:
    path = folder / "workload.json"
    path.write_text(json.dumps(told, indent=2))
    return path


@pytest.mark.parametrize("kind", ["normal", "log_normal", "exponential", "uniform", "bimodal"])
def test_lengths_have_the_mean_that_a_definition_says(kind: str) -> None:
    generator = np.random.default_rng(1)
    low, high = (500.0, 1500.0) if kind == "uniform" else (0.0, 1e6)
    deviation = 1000.0 if kind == "exponential" else 300.0
    drawn = Distribution(low, high, 1000.0, deviation, kind).draw(generator, 40_000)
    assert drawn.mean() == pytest.approx(1000, rel=0.02)
    if kind != "uniform":
        assert drawn.std() == pytest.approx(deviation, rel=0.03)
    cut = Distribution(900.0, 1100.0, 1000.0, deviation, kind).draw(generator, 1000)
    assert 900 <= cut.min() <= cut.max() <= 1100


def test_a_session_begins_with_the_system_prompt_and_grows_by_what_was_said(tmp_path: Path) -> None:
    definition = read_definition(written(tmp_path, CHAT))
    made = definition.draw(30, Arrivals(rate=5.0), seed=3)
    assert made == definition.draw(30, Arrivals(rate=5.0), seed=3)
    assert len({entry.session for entry in made}) == 10
    for first, second, third in zip(made[::3], made[1::3], made[2::3], strict=True):
        assert first.session == second.session == third.session
        assert first.think_ns == 0
        assert 1e9 <= second.think_ns <= 9e9
        assert second.input_tokens == first.input_tokens + first.output_tokens + 7
        assert third.input_tokens == second.input_tokens + second.output_tokens + 7
        a, b = prompt_of(first, 0), prompt_of(second, 1)
        assert (b[: len(a)] == a).all()
    one, other = prompt_of(made[0], 0), prompt_of(made[3], 3)
    assert (one[:48] == other[:48]).all()
    assert one[48] != other[48]
    assert definition.objectives == {"ttft_p99_ms": 1000}
    single = read_definition(written(tmp_path, CHAT | {"multi_turn": False}))
    assert {entry.session for entry in single.draw(9, AT_ONCE)} == {None}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_sequence_length": 5}, "input_sequence_length"),
        ({"output_sequence_length": law(0, 9, 5, -1)}, "output_sequence_length.standard_deviation"),
        ({"output_sequence_length": law(0, 9, float("nan"), 1)}, "output_sequence_length.mean"),
        ({"output_sequence_length": law(6, 9, 5, 1)}, "must be from min=6 to max=9"),
        ({"input_sequence_length": law(0, 9, 5, 1, "pareto")}, "distribution_type='pareto'"),
        ({"number_of_turns": None}, "number_of_turns"),
    ],
)
def test_a_definition_that_is_wrong_is_refused_by_field(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        read_definition(written(tmp_path, CHAT | change))


def test_the_command_knows_a_definition_and_takes_arrivals_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, CHAT)
    assert is_definition(path)
    assert not is_definition(tmp_path / "none")
    flags = ["--trace", str(path), "--requests", "12", "--kv-cache-memory-bytes", "64MiB", "--no-intervals"]
    assert octavo(["simulate", *BY_HAND, *flags, "--rate", "20"]) == 0
    told = capsys.readouterr().out
    assert "12 requests as workload.json defines them (inference-perf)" in told
    assert "ttft_p99_ms 1000" in told
    assert octavo(["simulate", *BY_HAND, *flags, "--users", "3"]) == 2
    assert "has sessions" in capsys.readouterr().err
    assert octavo(["simulate", *BY_HAND, *flags, "--input-tokens", "3"]) == 2
    assert "input_tokens='3'" in capsys.readouterr().err


def test_a_prompt_of_several_kinds_is_as_long_as_all_of_them() -> None:
    span = {"text_tokens": "{50: 1.0}", "image_tokens": "{9: 1.0}", "image_count": "{0: 0.5, 2: 0.5}",
            "audio_tokens": "{0: 1.0}", "audio_count": "{0: 1.0}", "output_tokens": "{5: 1.0}"}  # fmt: skip
    files = {
        "chunk-0-trace.csv": b"0,10,1,,0,0\n600,10,1,,0,0\n",
        "chunk-0-dataset.json": json.dumps({"0": span, "600": span | {"text_tokens": "{0: 1.0}"}}).encode(),
    }
    made = draw(clients_of(files, "pool"), length_s=20.0)
    assert {entry.input_tokens for entry in made} == {50, 68}
    later = draw(clients_of(files, "pool"), begin_s=700.0, length_s=20.0)
    assert {entry.input_tokens for entry in later} == {1, 18}
