"""The scheduler benchmark runs, and what it prints can be read by a person and by a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "scheduler.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def test_the_last_line_is_json_with_one_row_for_each_size_with_and_without_audit() -> None:
    done = run("--running", "3,40", "--steps", "20", "--repeat", "2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    asked = [(3, False), (40, False), (3, True), (40, True)]
    assert [(row["running"], row["audit"]) for row in report["rows"]] == asked
    for row in report["rows"]:
        assert 0 < row["median_ms"] <= row["p99_ms"]
        parts = sum(row[f"{part}_ms"] for part in ("schedule", "commit", "hand_over", "audit"))
        assert abs(parts - row["median_ms"]) <= 0.5 * row["median_ms"]
        assert (row["audit_ms"] > 0.005) == row["audit"]


def test_the_table_names_its_reference_as_another_machines() -> None:
    done = run("--running", "64", "--steps", "5", "--repeat", "1", "--no-audit")
    assert done.returncode == 0, done.stderr
    assert "another machine's" in done.stdout
    assert "0.82" in done.stdout


def test_no_steps_is_refused_in_words() -> None:
    done = run("--steps", "0")
    assert done.returncode == 2
    assert "at least 1" in done.stderr


def fake_vllm(folder: Path, told: dict[str, object]) -> Path:
    """A "Python" that answers whatever it is asked with the same line."""
    script = folder / "python"
    lines = ["#!/bin/sh", 'echo \'{"version": "fake"}\'', f"while read -r asked; do echo '{json.dumps(told)}'; done"]
    script.write_text("\n".join(lines))
    script.chmod(0o755)
    return script


def test_vllms_scheduler_makes_the_same_steps_in_turn_and_its_share_is_told(tmp_path: Path) -> None:
    told = {"computed": 32 * 16, "handed_over": 32 * 16, "blocks_taken": 32, "times": [[10_000_000, 10_000_000]] * 16}
    done = run(
        "--running", "32", "--steps", "16", "--repeat", "2", "--no-audit", "--vllm", str(fake_vllm(tmp_path, told))
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert row["vllm_ms"] == 20
    assert abs(row["of_vllm"] - row["median_ms"] / 20) < 1e-3
    assert "another machine's" not in done.stdout


def test_sides_that_did_not_do_the_same_are_not_compared(tmp_path: Path) -> None:
    told = {"computed": 32 * 16, "handed_over": 32 * 16, "blocks_taken": 31, "times": [[1, 1]] * 16}
    done = run(
        "--running", "32", "--steps", "16", "--repeat", "1", "--no-audit", "--vllm", str(fake_vllm(tmp_path, told))
    )
    assert done.returncode == 1
    assert "not the same work" in done.stderr


def test_a_python_without_vllm_is_told_in_words(tmp_path: Path) -> None:
    gone = run("--running", "4", "--steps", "2", "--vllm", str(tmp_path / "none"))
    without = run("--running", "4", "--steps", "2", "--vllm", sys.executable)
    assert "there is no such file" in gone.stderr
    assert "No module named 'vllm'" in without.stderr
    assert "Traceback" not in without.stderr
