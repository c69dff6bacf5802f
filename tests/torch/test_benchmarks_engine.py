"""The engine benchmark on a tiny model: every engine answers alike, and the report holds what it promises."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from checkpoints import tiny_llama

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MECHANISMS = {"allocation", "batching", "admission", "preemption", "reuse", "tiering"}


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    sys.path.append(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("engine_benchmark", BENCHMARKS / "engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=False, max_position_embeddings=128)


@pytest.fixture(scope="module")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six requests of mixed lengths, some of which would meet the end-of-sequence token."""
    requests = [
        {"prompt": [(7 * i + 3 * j) % 29 + 3 for j in range(5 + 6 * i)], "max_tokens": 4 + 5 * (i % 3)}
        for i in range(6)
    ]
    path = tmp_path_factory.mktemp("data") / "workloads.json"
    path.write_text(json.dumps({"W2": {"desc": "mixed", "requests": requests}}))
    return path


def run(benchmark: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, dict[str, Any]]:
    benchmark.main([str(argument) for argument in arguments])
    printed = capsys.readouterr().out
    return printed, json.loads(printed.splitlines()[-1])


def test_all_engines_give_the_same_tokens_and_their_exact_number(
    benchmark: ModuleType, model: Path, workloads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, report = run(
        benchmark, capsys, workloads, "--model", model, "--workloads", "W2", "--repeat", 1, "--padded-batch", 4
    )
    rows = report["workloads"][0]["rows"]
    assert [row["engine"] for row in rows] == ["octavo", "hf-padded", "hf-continuous"]
    assert [row["equal_outputs"] for row in rows] == [6, 6, 6]
    for row in rows:
        assert row["output_tokens_per_s"] * row["seconds"] == pytest.approx(54)
        assert set(row["policies"]) == MECHANISMS
        assert row["ttft_p50_s"] > 0
        assert sum(row["batch_size_by_iteration"].values()) == row["steps"]
        assert 0 < row["kv_used_mean"] <= row["kv_used_peak"] <= 1
    assert report["machine"]["torch"]
    assert "sequences in an iteration" in printed


def test_the_baselines_give_the_same_tokens_and_waste_what_they_reserve(
    benchmark: ModuleType, model: Path, workloads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = "paged/iteration,contiguous-max/iteration,paged/request,contiguous-max/request"
    _, report = run(
        benchmark, capsys, workloads, "--model", model, "--workloads", "W2", "--repeat", 1, "--engines", "octavo",
        "--policies", pairs, "--block-size", 4, "--kv-share", 0.5, "--max-num-batched-tokens", 32,
    )  # fmt: skip
    rows = {row["engine"]: row for row in report["workloads"][0]["rows"]}
    assert len(rows) == 4
    assert {row["equal_outputs"] for row in rows.values()} == {6}
    assert rows["octavo"]["waste_mean"]["reserved"] < rows["octavo contiguous-max/iteration"]["waste_mean"]["reserved"]
    assert rows["octavo"]["steps"] <= rows["octavo paged/request"]["steps"]
    assert rows["octavo"]["limiting_resource_steps"].get("kv_blocks", 0) > 0


def test_bfloat16_runs_and_says_so(
    benchmark: ModuleType, model: Path, workloads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = run(
        benchmark, capsys, workloads, "--model", model, "--workloads", "W2", "--repeat", 1, "--scale", 0.3,
        "--dtype", "bf16",
    )  # fmt: skip
    assert (report["dtype"], report["scale"]) == ("bf16", 0.3)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--engines", "vllm"), "must be out of octavo"),
        (("--policies", "paged"), "pairs such as paged/iteration"),
        (("--scale", "0"), "above 0"),
        (("--repeat", "0"), "--repeat must be at least 1"),
        (("--threads", "0"), "--threads must be at least 1"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_in_words(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(list(arguments))
    assert complaint in capsys.readouterr().err


def test_a_workload_that_is_not_in_the_file_is_named(benchmark: ModuleType, model: Path, workloads: Path) -> None:
    with pytest.raises(SystemExit, match=r"W9 not there; there are W2"):
        benchmark.main([str(workloads), "--model", str(model), "--workloads", "W9"])
