"""The table of targets: what is met and what is not, from the benchmarks' own JSON lines, in parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from target_figures import Target, own_row, peers_targets, scheduler_targets, table, w3_flops

ROOT = Path(__file__).parents[2]


def row(engine: str, speed: float | None, *, reuse: bool = False, over: float | None = None) -> dict[str, object]:
    base = engine.partition(":")[0]
    return {"engine": engine, "base": base, "reuse": reuse, "reason": "", "speed": speed, "seconds": 2.0,
            "over_best_peer": over, "best_peer": "openvino"}  # fmt: skip


def peers(*rows: dict[str, object]) -> dict[str, object]:
    return {"dtypes": [{"dtype": "bf16", "workloads": [{"name": "W2", "rows": list(rows)}]}]}


@pytest.mark.parametrize(
    ("figure", "at_most", "said"),
    [
        (1.5, False, "met"),
        (1.6, False, "goal met"),
        (1.39, False, "missed"),
        (1.39, True, "met"),
        (None, True, "no figure"),
    ],
)
def test_a_target_says_whether_gate_and_goal_are_reached(figure: float | None, at_most: bool, said: str) -> None:
    goal = 1.2 if at_most else 1.6
    assert Target("W2", "x", 1.4, goal, figure, at_most=at_most).met == said


def test_octavo_is_held_against_the_best_peer_of_its_kind() -> None:
    report = peers(
        row("octavo", 300.0, over=1.5), row("octavo:reuse", 900.0, reuse=True, over=1.2), row("openvino", 200.0)
    )
    plain, reusing = peers_targets("W2", [report], [("bf16", "W2", False, 1.4, 1.6), ("bf16", "W2", True, 1.3, None)])
    assert (plain.figure, plain.met) == (1.5, "met")
    assert plain.note == "300.0 tok/s beside openvino's 200.0"
    assert (reusing.figure, reusing.met) == (1.2, "missed")


def test_what_did_not_run_has_no_figure_and_says_why() -> None:
    alone = peers(row("octavo", 300.0), row("openvino", None))
    (target,) = peers_targets("W2", [alone], [("bf16", "W2", False, 1.4, None)])
    assert (target.met, target.note) == ("no figure", "no peer ran")
    assert own_row(alone, "fp32", "W2") is None
    assert "no peer ran" in "\n".join(table([target]))


def test_the_schedulers_share_counts_where_nothing_is_audited() -> None:
    rows = [{"running": n, "audit": audit, "median_ms": 0.2, "vllm_ms": 4.0, "of_vllm": 0.05 if not audit else 9.0}
            for audit in (True, False) for n in (256, 1024)]  # fmt: skip
    assert [target.met for target in scheduler_targets("scheduler", {"rows": rows})] == ["met", "met"]


def test_long_prompts_are_counted_position_by_position() -> None:
    class Counting:
        def step(self, starts: list[int], counts: list[int], sampled: int) -> object:
            class Work:
                flops = sum(sum(range(start, start + count)) for start, count in zip(starts, counts, strict=True))

            return Work

    assert w3_flops(Counting(), 2, tokens_in=10, tokens_out=4) == 2 * sum(range(13))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "targets.py"), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def test_parts_that_ran_before_are_shown_and_not_run_again(tmp_path: Path) -> None:
    rows = [{"running": n, "audit": False, "median_ms": 0.2, "vllm_ms": 4.0, "of_vllm": 0.05} for n in (256, 1024)]
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"scheduler": {"reports": [{"rows": rows}]}, "serve": {"failed": "serve.py: ended"}}))
    done = run("--only", "scheduler", "--results", str(kept))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [one["met"] for one in report["rows"]] == ["met", "met", "no figure"]
    assert "W2-bf16" in report["not_run"]
    assert "scheduler" not in report["not_run"]
    unknown = run("--only", "W9", "--results", str(kept))
    assert unknown.returncode == 2
    assert "no section W9" in unknown.stderr
