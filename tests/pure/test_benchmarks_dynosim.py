"""The comparison with DynoSim: one law stated twice, requests matched, and a table whatever the other side does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from dynosim import compared
from dynosim_law import Law

from octavo.cost.step import StepShape

ROOT = Path(__file__).parents[2]
LAW = Law(prompt_token_s=1e-5, decode_s=3e-3, position_s=1e-8)


def test_a_run_of_decode_steps_takes_what_its_steps_take() -> None:
    shape = StepShape.decode([5, 700, 90_000])
    assert LAW.run_seconds(shape, 4).tolist() == [LAW.step_seconds(shape.later(step)) for step in range(4)]


def test_a_step_of_prompts_and_decodes_costs_both_parts_and_one_of_prompts_alone_only_its_tokens() -> None:
    prompts = StepShape.from_chunks([0, 512], [512, 100], 1)
    mixed = StepShape.from_chunks([0, 512, 999], [512, 100, 1], 2)
    assert LAW.step_seconds(prompts) == pytest.approx(612e-5)
    assert LAW.step_seconds(mixed) == pytest.approx(612e-5 + 3e-3 + 1000e-8)


def test_prompts_are_counted_as_so_many_times_their_mean_in_whole_tokens() -> None:
    assert LAW.step_seconds(StepShape.from_chunks([0, 0], [511, 1000], 2)) == pytest.approx(1510e-5)
    assert LAW.step_seconds(StepShape.from_chunks([3, 0], [511, 1000], 2)) == pytest.approx(1512e-5)


def test_the_law_is_written_as_dynosim_reads_it(tmp_path: Path) -> None:
    LAW.write_profile(tmp_path / "law.npz")
    with np.load(tmp_path / "law.npz") as kept:
        read = {name: kept[name] for name in kept.files}
    slope = np.diff(read["prefill_ttft_ms"]) / np.diff(read["prefill_isl"])
    assert slope == pytest.approx(1e-2)
    assert read["decode_itl"].shape == (2, 2)
    assert read["decode_itl"][0] == pytest.approx(3.0)
    far = read["decode_active_kv_tokens"][1]
    assert read["decode_itl"][1] == pytest.approx(3.0 + 1e-5 * far)


def test_requests_are_matched_whatever_their_order_and_their_differences_told() -> None:
    ours = [[0.0, 900.0, 5.0, 512.0, 0.10, 1.0], [2.0, 700.0, 3.0, 0.0, 0.30, 1.0]]
    theirs = [[2.0, 700.0, 3.0, 0.0, 0.3004, 1.2], [0.0, 900.0, 5.0, 0.0, 0.15, 1.0]]
    found = compared(ours, theirs)
    assert found["matched"]
    assert (found["same_reuse"], found["less_reuse"], found["more_reuse"]) == (0.5, 0.5, 0.0)
    assert found["same_ttft"] == 0.5
    assert found["ttft_difference_s"]["mean"] == pytest.approx((0.05 + 0.0004) / 2)
    assert found["e2e_difference_s"]["mean"] == pytest.approx(0.1)


def test_other_requests_are_not_compared() -> None:
    assert compared([[0.0, 900.0, 5.0, 0.0, 0.1, 1.0]], [[0.0, 901.0, 5.0, 0.0, 0.1, 1.0]]) == {"matched": False}
    assert compared([[0.0, 900.0, 5.0, 0.0, 0.1, 1.0]], []) == {"matched": False}


def run(folder: Path, answer: str) -> subprocess.CompletedProcess[str]:
    """The whole comparison of two requests, with a "Python" that gives this answer in DynoSim's place."""
    python, trace, config = folder / "python", folder / "trace.jsonl", folder / "config.json"
    python.write_text(f"#!/bin/sh\n{answer}\n")
    python.chmod(0o755)
    lines = [
        {"timestamp": 0, "input_length": 900, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 2000, "input_length": 700, "output_length": 3, "hash_ids": [1, 3]},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config.write_text(json.dumps(CONFIG))
    command = [sys.executable, str(ROOT / "benchmarks" / "dynosim.py"), "--python", str(python), "--repeat", "1"]
    command += ["--trace", str(trace), "--model", str(config), "--device", "h100-sxm", "--tp", "1"]
    return subprocess.run(
        [*command, "--cases", "law-reuse"], capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "vocab_size": 1000,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "tie_word_embeddings": True,
}  # fmt: skip


def rows(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = report["rows"]
    return report, ours, theirs


def test_both_sides_stand_in_the_table_and_octavos_share_is_told(tmp_path: Path) -> None:
    told = {
        "versions": {"ai-dynamo": "0"}, "requests": 2, "seconds": 1e-3, "reading_s": 1e-3, "thread_s": 1e-3,
        "wall_s": 1e-3, "peak_mib": 1.0, "hit": 0.3, "computed_tokens": 1088,
        "tpot_s": {"mean": 0.1},
        "end_s": 3.0, "preemptions": 0, "each": [[0, 900, 5, 0, 0.1, 0.2], [2, 700, 3, 512, 0.1, 0.2]],
    }  # fmt: skip
    report, ours, theirs = rows(run(tmp_path, f"echo '{json.dumps(told)}'"))
    assert (ours["requests"], ours["refused"], theirs["requests"]) == (2, 0, 2)
    assert ours["hit"] == pytest.approx(512 / 1600)
    assert theirs["ttft_s"]["mean"] == pytest.approx(0.1)
    assert theirs["rate"] == pytest.approx(2000.0)
    assert report["octavo_over_dynosim"]["law-reuse"]["rate"] == pytest.approx(ours["rate"] / 2000.0)
    assert report["differences"]["law-reuse"]["same_reuse"] == 1.0


def test_a_dynosim_that_fails_is_a_row_with_the_reason(tmp_path: Path) -> None:
    report, ours, theirs = rows(run(tmp_path, "echo 'no such engine' >&2; exit 3"))
    assert ours["requests"] == 2
    assert theirs["failed"] == "no such engine"
    assert report["octavo_over_dynosim"] == {}
