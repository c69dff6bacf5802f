"""The comparison with peers, without any: its arithmetic and table, engines that die or hang, choices as written."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "peers"))

import environments
import rounds as rounds_module
from child import Broken, Child
from comparison import COLUMNS, Asked, Line, Run, rows, table
from engines import DEFAULT, ENGINES, chosen
from environments import Bare, Recipe, Unavailable, make_environment, requirements
from rounds import Bounds, Ready, Rounds
from workloads import Job, Workload

ASKED = Asked(inputs=(10, 20), outputs=(2, 4))
ONE = Asked(inputs=(128,), outputs=(5,))


def run(seconds: float, outputs: list[list[int]] | None = None, **changes: object) -> Run:
    given = {"seconds": seconds, "cpu_seconds": 2 * seconds, "outputs": outputs or [[1, 2], [3, 4, 5, 6]],
             "first_s": [0.25, 0.75], "last_s": [seconds, seconds], "peak_bytes": 10**9, "ready_s": 3.0}  # fmt: skip
    return Run(**(given | changes))


def line(engine: str, *runs: Run, reuse: bool = False, reason: str = "") -> Line:
    return Line(engine, engine.partition(":")[0], reuse, list(runs), reason)


# -- arithmetic ---------------------------------------------------------------------------------


def test_a_row_is_the_median_of_its_runs_with_their_spread() -> None:
    (row,) = rows(ASKED, [line("octavo", run(4.0), run(2.0), run(3.0, peak_bytes=2 * 10**9))])
    assert (row["seconds"], row["seconds_min"], row["seconds_max"]) == (3.0, 2.0, 4.0)
    assert row["output_tokens_per_s"] == pytest.approx(6 / 3)
    assert row["ttft_p50_s"] == 0.5
    assert (row["cpu_seconds"], row["peak_bytes"], row["runs"]) == (6.0, 2 * 10**9, 3)
    assert row["all_seconds"] == [4.0, 2.0, 3.0]


def test_runs_at_the_usual_speed_of_memory_are_compared() -> None:
    slow, fast = {"memory_rates": (29e9, 30e9)}, {"memory_rates": (40e9, 41e9)}
    own = line("octavo", run(4.0, **slow), run(4.2, **slow), run(4.1, **slow), run(2.0, **fast))
    peer = line("vllm", run(6.0, **slow), run(3.0, **fast), run(3.1, memory_rates=(29e9, 40e9)))
    unlucky = line("openvino", run(5.0, **fast))
    rows_of = {row["engine"]: row for row in rows(ASKED, [own, peer, unlucky])}
    assert rows_of["octavo"]["all_seconds"] == [4.0, 4.2, 4.1]
    assert rows_of["vllm"]["all_seconds"] == [6.0]
    assert (rows_of["openvino"]["all_seconds"], rows_of["openvino"]["memory_bytes_per_s"]) == ([5.0], 40.5e9)
    (alone,) = rows(ASKED, [line("octavo", run(4.0), run(2.0))])
    assert (alone["all_seconds"], alone["memory_bytes_per_s"]) == ([4.0, 2.0], None)


def test_a_single_sequence_is_compared_by_its_decode_speed() -> None:
    slow_start = run(9.0, [[1, 2, 3, 4, 5]], first_s=[8.0], last_s=[9.0])
    slow_decode = run(5.0, [[1, 2, 3, 4, 5]], first_s=[1.0], last_s=[5.0])
    own, peer = rows(ONE, [line("octavo", slow_start), line("vllm", slow_decode)])
    assert (own["prefill_tokens_per_s"], own["decode_tokens_per_s"]) == (16.0, 4.0)
    assert (peer["prefill_tokens_per_s"], peer["decode_tokens_per_s"]) == (128.0, 1.0)
    assert own["over_best_peer"] == 4.0
    assert peer["of_first"] == 0.25


def test_octavo_is_set_beside_the_fastest_peer_of_the_same_kind() -> None:
    made = rows(
        ASKED,
        [
            line("octavo", run(2.0)),
            line("octavo:reuse", run(1.0), reuse=True),
            line("vllm", run(3.0)),
            line("openvino", run(2.5)),
            line("vllm:reuse", run(1.5), reuse=True),
        ],
    )
    assert [(row["best_peer"], row["over_best_peer"]) for row in made] == [
        ("openvino", pytest.approx(2.5 / 2.0)),
        ("vllm:reuse", pytest.approx(1.5)),
        (None, None),
        (None, None),
        (None, None),
    ]


def test_equal_outputs_are_counted_against_the_first_engine_that_ran_in_its_worst_run() -> None:
    other = [[1, 2], [3, 4, 5, 7]]
    made = rows(
        ASKED, [line("octavo", reason="gone"), line("vllm", run(1.0)), line("openvino", run(1.0), run(1.0, other))]
    )
    assert [row["equal_outputs"] for row in made] == [None, 2, 1]


def test_a_request_with_too_few_tokens_is_noticed() -> None:
    assert ASKED.wrong_counts(run(1.0)) == 0
    assert ASKED.wrong_counts(run(1.0, [[1], [3, 4, 5, 6]])) == 1


def test_every_engine_that_was_asked_for_has_a_line_of_the_table() -> None:
    made = rows(
        ASKED,
        [
            line("octavo", run(2.0)),
            line("vllm", reason="its environment could not be made: no such wheel"),
            line("openvino", run(3.0), reason="no answer within 5 s"),
        ],
    )
    text = table(made)
    assert any(one.startswith("vllm") and "no such wheel" in one for one in text)
    assert any(one.startswith("openvino") and "0.67x" in one for one in text)
    assert any("after 1 of its runs: no answer within 5 s" in one for one in text)
    assert text[-1] == "octavo: 1.50x the best peer without reuse, openvino"
    assert len(text[1]) == len(text[0]) == sum(abs(width) for width in COLUMNS.values())


def test_a_workload_that_nobody_could_play_still_has_its_table() -> None:
    made = rows(ASKED, [line("octavo", reason="one"), line("vllm", reason="other")])
    assert [one.split()[-1] for one in table(made)[1:]] == ["one", "other"]
    json.dumps(made)


# -- choices ------------------------------------------------------------------------------------


def test_a_choice_is_an_engine_with_options_and_workloads() -> None:
    plain, reusing, other = chosen("vllm,octavo:reuse:only=W1+W4,octavo:linear_backend=torch")
    assert (plain.label, plain.options, plain.plays("W3")) == ("vllm", {}, True)
    assert (reusing.label, reusing.options) == ("octavo:reuse", {"reuse": "on"})
    assert [reusing.plays(name) for name in ("W1", "W2", "W4")] == [True, False, True]
    assert (other.label, other.options) == ("octavo:linear_backend=torch", {"linear_backend": "torch"})


def test_a_name_in_capitals_is_a_variable_of_the_environment() -> None:
    (choice,) = chosen("hf-padded:OMP_WAIT_POLICY=passive:batch=8")
    assert choice.variables == {"OMP_WAIT_POLICY": "passive"}
    assert choice.asked == {"batching": "padded", "batch": "8"}
    assert choice.label == "hf-padded:OMP_WAIT_POLICY=passive:batch=8"


def test_the_default_choice_has_every_engine() -> None:
    assert {choice.engine.name for choice in chosen(DEFAULT)} == set(ENGINES)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("vlm", "no such engine"),
        ("vllm:spec", "no option 'spec'"),
        ("octavo,octavo", "octavo twice"),
        ("", "at least one"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused_in_words(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        chosen(text)


# -- an engine's process ------------------------------------------------------------------------

ECHO = """
import json, sys, time, subprocess, os
for line in sys.stdin:
    asked = json.loads(line)
    what = asked["do"]
    if what == "die": sys.exit("out of luck")
    if what == "crash": os.kill(os.getpid(), 6)
    if what == "hang": time.sleep(600)
    if what == "babble": print("Loading weights"); sys.stdout.flush(); continue
    if what == "spawn":
        held = subprocess.Popen([sys.executable, "-c", "import time; b = bytearray(60_000_000); time.sleep(600)"],
                                start_new_session=True)
        time.sleep(1); print(json.dumps({"pid": held.pid})); sys.stdout.flush(); continue
    print(json.dumps({"did": what})); sys.stdout.flush()
"""


@pytest.fixture
def child(tmp_path: Path) -> Child:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    with Child([sys.executable, str(script)], tmp_path / "logs" / "echo.log", dict(os.environ)) as made:
        yield made


def test_an_engine_answers_one_question_after_the_other(child: Child) -> None:
    assert [child.ask({"do": word}, 30)["did"] for word in ("one", "other")] == ["one", "other"]
    assert child.peak_bytes > 10**6
    assert child.cpu_seconds() > 0


def test_an_engine_that_dies_is_reported_with_its_last_words(child: Child) -> None:
    with pytest.raises(Broken, match="ended with 1: out of luck"):
        child.ask({"do": "die"}, 30)


def test_an_engine_that_is_killed_is_reported_with_the_signal(child: Child) -> None:
    with pytest.raises(Broken, match="killed by SIGABRT"):
        child.ask({"do": "crash"}, 30)


def test_an_engine_that_hangs_is_reported_in_time_and_ended(child: Child) -> None:
    start = time.monotonic()
    with pytest.raises(Broken, match=r"no answer within 1 s"):
        child.ask({"do": "hang"}, 1.0)
    assert time.monotonic() - start < 20
    assert child._process.returncode is not None


def test_what_an_engine_prints_is_not_taken_for_an_answer(child: Child) -> None:
    with pytest.raises(Broken, match="answered with something else"):
        child.ask({"do": "babble"}, 30)


def test_processes_that_an_engine_started_are_measured_and_ended_with_it(child: Child) -> None:
    pid = child.ask({"do": "spawn"}, 30)["pid"]
    assert child.peak_bytes > 60_000_000
    child.end()
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# -- rounds -------------------------------------------------------------------------------------

PLAYER = """
import json, os, sys, time
name = sys.argv[1]
for line in sys.stdin:
    asked = json.loads(line)
    answer = {}
    if asked["do"] == "load":
        assert os.environ["SEEN"] == "yes" and not asked["options"]
        if name == "unloadable": sys.exit("no such kernel")
        answer = {"settings": {"version": "1"}}
    jobs = asked.get("jobs", [])
    if asked["do"] == "play":
        long = max(len(job["prompt"]) for job in jobs) > 100
        if long and name == "dying": sys.exit("out of memory")
        if long and name == "hanging": time.sleep(600)
        short = 1 if long and name == "cheating" else 0
        outputs = [[7] * (job["max_tokens"] - short) for job in jobs]
        answer = {"seconds": 0.5, "outputs": outputs, "first_s": [0.1] * len(jobs), "last_s": [0.5] * len(jobs)}
    print(json.dumps(answer)); sys.stdout.flush()
"""
SHORT = Workload("short", "", (Job((1, 2, 3), 2), Job((4, 5), 3)))
LONG = Workload("long", "", (Job(tuple(range(200)), 4),))


def played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, minutes: float = 5.0, repeat: int = 1
) -> Rounds:
    """One engine of the sort `name`, through both workloads, the long one first, beside one that cannot be had."""
    script = tmp_path / "player.py"
    script.write_text(PLAYER)
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    monkeypatch.setattr(rounds_module, "kv_bytes_per_token", lambda path, dtype: 64)
    monkeypatch.setattr(Rounds, "_command", lambda self, ready: [sys.executable, str(script), name])
    choices = chosen("octavo:SEEN=yes,vllm")
    engines = {
        choices[0].label: Ready(choices[0], Path(sys.executable), checkpoint, {}),
        "vllm": Unavailable("its environment could not be made: no such wheel"),
    }
    options = argparse.Namespace(choices=choices, cache=tmp_path, threads=1, max_num_batched_tokens=64)
    bounds = Bounds(time.monotonic() + 60 * minutes, 2.0, minutes)
    made = Rounds(engines, [LONG, SHORT], "fp32", options, bounds)
    made.play(repeat)
    return made


def reasons(made: Rounds, workload: str) -> list[tuple[int, str]]:
    return [(len(one.runs), one.reason) for one in made.lines[workload]]


def test_rounds_play_every_engine_once_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = played(tmp_path, monkeypatch, "sound", repeat=2)
    gone = (0, "its environment could not be made: no such wheel")
    assert reasons(made, "long") == [(2, ""), gone]
    assert reasons(made, "short") == [(2, ""), gone]
    assert made.settings == {"octavo:SEEN=yes": {"version": "1"}}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dying", "ended with 1: out of memory"),
        ("hanging", "no answer within 2 s"),
        ("cheating", "1 of 1 requests got another number of tokens than asked"),
    ],
)
def test_an_engine_that_breaks_says_why_and_plays_the_next_workload_in_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    made = played(tmp_path, monkeypatch, name, repeat=2)
    assert reasons(made, "long")[0] == (0, reason)
    assert reasons(made, "short")[0] == (2, "")


def test_an_engine_that_does_not_load_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = played(tmp_path, monkeypatch, "unloadable", repeat=2)
    for workload in ("long", "short"):
        assert reasons(made, workload)[0] == (0, "did not load: ended with 1: no such kernel")


def test_what_the_time_does_not_allow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = played(tmp_path, monkeypatch, "sound", minutes=0.0)
    assert all("minutes of the comparison were over" in reasons(made, name)[0][1] for name in ("long", "short"))


# -- environments -------------------------------------------------------------------------------


def test_an_environment_that_cannot_be_made_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environments.RECIPES, "broken", Recipe(("no-such-file.whl",)))
    monkeypatch.setattr(environments.sys, "executable", "/bin/false")
    made = make_environment("broken", tmp_path, 60, lambda text: None)
    assert isinstance(made, Unavailable)
    assert "its environment could not be made: false -m venv" in made.reason


def test_an_environment_that_is_whole_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(("numpy",))
    monkeypatch.setitem(environments.RECIPES, "there", recipe)
    folder = tmp_path / "environments" / f"there-{recipe.key}"
    folder.mkdir(parents=True)
    (folder / "complete").touch()
    monkeypatch.setattr(environments.sys, "executable", "/bin/false")
    made = make_environment("there", tmp_path, 60, lambda text: None)
    assert made.folder == folder


def test_requirements_leave_extras_aside(tmp_path: Path) -> None:
    info = tmp_path / "lib" / "python3" / "site-packages" / "some_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        'Name: some-engine\nRequires-Dist: numpy>=1\nRequires-Dist: torchvision; platform_machine != "s390x"\n'
        'Requires-Dist: pandas; extra == "bench"\n\nAbout it.\n'
    )
    assert requirements(tmp_path, "some-engine==1.0") == ["numpy>=1", 'torchvision; platform_machine != "s390x"']
    assert "torchvision" in Bare("x", environments.NOT_NEEDED).without
