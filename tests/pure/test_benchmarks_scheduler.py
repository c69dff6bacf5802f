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
