"""The arithmetic of the engine benchmark: workloads and what is made of a replay. No model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from measures import Iteration, Replay, batch_sizes, equal_outputs, figures, mean_waste, median_replay, sparkline
from workloads import DEFAULT_FILE, Job, Workload, drawn_workloads, find_file, read_workloads


def replay(seconds: float = 2.0, iterations: list[Iteration] | None = None, **changes: object) -> Replay:
    given = {"engine": "e", "seconds": seconds, "cpu_seconds": seconds, "outputs": [(1, 2), (3,)], "ttft_s": [0.5, 1.5],
             "tpot_s": [0.25], "iterations": iterations or [], "policies": {}}  # fmt: skip
    return Replay(**(given | changes))


def test_drawn_workloads_are_what_the_read_ones_say_of_themselves() -> None:
    drawn = drawn_workloads(1000)
    assert [(len(w.jobs), w.input_tokens, w.output_tokens) for w in drawn.values() if w.name != "W2"] == [
        (1, 128, 128),
        (8, 32768, 512),
        (32, 33792, 1024),
    ]
    mixed = drawn["W2"].jobs
    assert len(mixed) == 32
    assert all(32 <= len(job.prompt) <= 1024 and 16 <= job.max_tokens <= 256 for job in mixed)
    assert len({job.prompt[:1024] for job in drawn["W4"].jobs}) == 1
    assert len({job.prompt for job in drawn["W4"].jobs}) == 32
    assert max(token for w in drawn.values() for job in w.jobs for token in job.prompt) < 1000


def test_drawing_twice_gives_the_same_tokens() -> None:
    assert drawn_workloads(1000) == drawn_workloads(1000)
    assert drawn_workloads(1000) != drawn_workloads(1000, seed=3)


def test_scaling_keeps_what_differs_between_prompts() -> None:
    scaled = drawn_workloads(1000)["W4"].scaled(0.1)
    assert {len(job.prompt) for job in scaled.jobs} == {106}
    assert len({job.prompt for job in scaled.jobs}) == 32
    assert {job.max_tokens for job in scaled.jobs} == {3}
    tiny = Workload("w", "", (Job((5, 6), 3),)).scaled(0.01)
    assert tiny.jobs == (Job((6,), 1),)


def test_a_workloads_file_is_found_above_and_read(tmp_path: Path) -> None:
    path = tmp_path / DEFAULT_FILE
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"W1": {"desc": "one", "requests": [{"prompt": [1, 2], "max_tokens": 3}]}}))
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert find_file(None, below) == path
    assert find_file(Path("other.json"), below) == Path("other.json")
    assert read_workloads(path) == {"W1": Workload("W1", "one", (Job((1, 2), 3),))}


@pytest.mark.parametrize("text", ["", "[]", '{"W1": {}}', '{"W1": {"desc": "", "requests": [{"prompt": 3}]}}'])
def test_a_file_that_is_no_workloads_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match=r"odd\.json: not a workloads file"):
        read_workloads(path)


def test_throughput_counts_made_tokens_and_all_tokens() -> None:
    row = figures(replay(2.0), input_tokens=7)
    assert (row["output_tokens_per_s"], row["total_tokens_per_s"]) == (1.5, 5.0)
    assert (row["ttft_p50_s"], row["tpot_p99_s"]) == (1.0, 0.25)
    assert row["ttft_p99_s"] == pytest.approx(1.49)


def test_a_replay_of_single_tokens_has_no_tpot() -> None:
    row = figures(replay(tpot_s=[]), input_tokens=1)
    assert (row["tpot_p50_s"], row["tpot_p99_s"]) == (None, None)


def test_batch_sizes_fall_into_classes_that_double() -> None:
    sizes = [1, 2, 3, 4, 5, 8, 9, 16, 17, 32]
    counted = batch_sizes(replay(iterations=[Iteration(n, 0.0) for n in sizes]))
    assert counted == {"1": 1, "2": 1, "3-4": 2, "5-8": 2, "9-16": 2, "17-32": 2}


def test_waste_is_averaged_over_iterations_by_cause() -> None:
    steps = [Iteration(1, 0.5, waste={"reserved": 0.2, "internal": 0.1}), Iteration(1, 0.5, waste={"reserved": 0.4})]
    assert mean_waste(replay(iterations=steps)) == pytest.approx({"reserved": 0.3, "internal": 0.05})


def test_the_sparkline_rises_with_use_and_is_full_at_the_whole_cache() -> None:
    drawn = sparkline(replay(iterations=[Iteration(1, share) for share in (0.0, 0.5, 1.0)]))
    assert (drawn[0], drawn[-1], len(drawn)) == ("▁", "█", 3)
    assert len(sparkline(replay(iterations=[Iteration(1, 0.1)] * 1000), width=40)) == 40


def test_the_median_replay_is_a_real_one() -> None:
    assert median_replay([replay(3.0), replay(1.0), replay(2.0)]).seconds == 2.0
    assert median_replay([replay(2.0), replay(1.0)]).seconds == 1.0


def test_equal_outputs_are_counted_by_request() -> None:
    assert equal_outputs(replay(), replay(outputs=[(1, 2), (4,)])) == 1


def test_whoever_measures_tiers_records_the_larger_cache_and_the_suspending_apart() -> None:
    """The two are switched apart, and a figure that does not say which ran says nothing."""
    folder = Path(__file__).parents[2] / "benchmarks"
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    tiered = {name: text for name, text in texts.items() if "host_bytes" in text}
    assert len(tiered) >= 3
    for name, text in tiered.items():
        assert '"placement": ' in text or '"reuse": "none"' in text, name
        assert '"preemption": ' in text, name
