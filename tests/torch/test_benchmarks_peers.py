"""The comparison with peers and the limits, as commands on a tiny model. octavo alone: no peer is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_llama

ROOT = Path(__file__).parents[2]
COMPARISON = ROOT / "benchmarks" / "peers" / "run.py"
LIMITS = ROOT / "benchmarks" / "limits.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=False, max_position_embeddings=128)


@pytest.fixture(scope="module")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One request, then four with a common beginning."""
    shared = [(5 * i) % 29 + 3 for i in range(40)]
    many = [{"prompt": [*shared, 4 + i, 9], "max_tokens": 3 + i} for i in range(4)]
    path = tmp_path_factory.mktemp("data") / "workloads.json"
    one = {"desc": "one", "requests": [{"prompt": [7, 8, 9], "max_tokens": 5}]}
    path.write_text(json.dumps({"W1": one, "W4": {"desc": "shared", "requests": many}}))
    return path


def command(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, env=variables, timeout=170, check=False)


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_octavo_plays_the_workloads_with_and_without_reuse_and_an_absent_peer_is_named(
    model: Path, workloads: Path, tmp_path: Path
) -> None:
    done = command(
        COMPARISON, workloads, "--model", model, "--workloads", "W1,W4", "--threads", 1, "--cache", tmp_path,
        "--engines", "octavo,octavo:reuse:only=W4,octavo:attention_backend=nonsense",
    )  # fmt: skip
    told = report(done)
    first, last = told["dtypes"][0]["workloads"]
    rows = {row["engine"]: row for row in last["rows"]}
    assert list(rows) == ["octavo", "octavo:reuse", "octavo:attention_backend=nonsense"]
    for name in ("octavo", "octavo:reuse"):
        assert (rows[name]["runs"], rows[name]["equal_outputs"]) == (1, 4)
        assert rows[name]["output_tokens_per_s"] * rows[name]["seconds"] == pytest.approx(18)
    assert "did not load" in rows["octavo:attention_backend=nonsense"]["reason"]
    assert [row["engine"] for row in first["rows"]] == ["octavo", "octavo:attention_backend=nonsense"]
    assert first["rows"][0]["decode_tokens_per_s"] > 0
    assert told["dtypes"][0]["settings"]["octavo:reuse"]["reuse"] == "prefix"
    assert "nonsense" in done.stdout.split("W4")[1]
    assert rows["octavo"]["peak_bytes"] > 50_000_000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--engines", "vlm"), "no such engine"),
        (("--scale", "0"), "above 0"),
        (("--dtype", "int3"), "out of fp32"),
        (("--model", "nowhere"), "is no directory"),
        (("--cache", str(ROOT / "cache")), "inside the checkout"),
        (("--minutes", "0"), "--minutes must be above 0"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_in_words(arguments: tuple[str, ...], complaint: str) -> None:
    done = command(COMPARISON, *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr


@pytest.mark.slow
def test_limits_print_the_share_that_each_step_reaches(model: Path) -> None:
    done = command(
        LIMITS, "--model", model, "--dtype", "fp32", "--batches", "1,3", "--context", 20, "--steps", 3, "--prefill", 64,
        "--repeat", 1, "--threads", 1, "--megabytes", 16,
    )  # fmt: skip
    told = report(done)
    rows = {row["step"]: row for row in told["rows"]}
    assert list(rows) == ["decode, 1", "decode, 3", "prefill, 64"]
    for row in rows.values():
        assert 0 < row["of_limit"] < 1
    # two layers, two heads of 4 as keys and as values, four bytes each
    per_position = 2 * 2 * 2 * 4 * 4
    assert rows["prefill, 64"]["state_bytes"] == 64 * per_position
    assert rows["decode, 3"]["state_bytes"] % per_position == 0
    assert 3 * 21 <= rows["decode, 3"]["state_bytes"] // per_position <= 3 * 28
    assert rows["decode, 1"]["weight_bytes"] == rows["decode, 3"]["weight_bytes"]
    assert told["rates"]["read_bytes_per_s"] > 0
