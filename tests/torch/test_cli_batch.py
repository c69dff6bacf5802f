"""`octavo batch` with a tiny model: answers, what is refused before loading, and runs that are killed and go on."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_llama
from tests.pure.batches import CHAT, answers, row

import octavo.server.batch
from octavo import LLM, SamplingParams
from octavo.cli.main import run
from octavo.runtime.executor import TorchExecutor
from octavo.server.batch import Ended

SOURCE = str(Path(__file__).parents[2] / "src")
OPTIONS = ["--dtype", "float32", "--max-num-seqs", "4", "--max-kv-tokens", "1024"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=128))


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def text_row(custom_id: str, prompt: str = "hello world", **body: Any) -> dict[str, Any]:
    return row(custom_id, prompt, **body)


def chat_row(custom_id: str, content: str = "hello", role: str = "user", **body: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": content}]
    return {"custom_id": custom_id, "method": "POST", "url": CHAT,
            "body": {"messages": messages, "max_tokens": 6, "temperature": 0} | body}  # fmt: skip


def batch(model: str, path: Path, out: Path | str, *more: str) -> int:
    return run(["batch", str(path), "-o", str(out), "--model", model, *OPTIONS, *more])


def by_id(out: Path) -> dict[str, Any]:
    """What was answered, without what differs from run to run: ids and times."""
    found = {}
    for answer in answers(out):
        assert answer["custom_id"] not in found, "a row is there twice"
        response = answer["response"]
        body = response and response["body"]
        kept = body and (list(body["choices"]) if "choices" in body else body)
        found[answer["custom_id"]] = (response and response["status_code"], kept, answer["error"])
    return found


# -- answers ----------------------------------------------------------------------------------------


def test_rows_are_answered_as_the_engine_alone_would(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [text_row(f"t{i}", "hello " * (1 + i), max_tokens=3 + i) for i in range(12)]
    lines += [chat_row(f"c{i}", "world " * (1 + i), max_tokens=3 + i) for i in range(12)]
    out = tmp_path / "out.jsonl"
    assert batch(model, write(tmp_path / "in.jsonl", lines), out) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "24 of 24 rows, 0 errors, " in shown.err
    assert "tokens/s, peak KV" in shown.err

    llm = LLM(model, dtype="float32")
    found = by_id(out)
    assert len(found) == 24
    for i in range(12):
        params = SamplingParams(max_tokens=3 + i, temperature=0)
        alone = llm.generate("hello " * (1 + i), params)[0].outputs[0]
        assert found[f"t{i}"][1][0]["text"] == alone.text
        assert found[f"t{i}"][1][0]["finish_reason"] == alone.finish_reason
        said = llm.chat([{"role": "user", "content": "world " * (1 + i)}], params)[0].outputs[0]
        assert found[f"c{i}"][1][0]["message"]["content"] == said.text
    usage = answers(out)[0]["response"]["body"]["usage"]
    assert usage["octavo"][0]["output_tokens"] == usage["completion_tokens"]
    assert set(usage["octavo"][0]) > {"queue_time", "prefill_time", "allocated_blocks", "attention_mode"}


def test_a_wrong_row_gets_an_error_and_the_others_go_on(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        text_row("good"), "{nope", text_row("good"), chat_row("role", role="wizard"), chat_row("long", "hello " * 500),
        text_row("bias", logit_bias={"99": 1.0}), chat_row("model", model="gpt-4"), chat_row("named", model="mine"),
    ]  # fmt: skip
    path, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert batch(model, path, out, "--served-model-name", "mine") == 0
    assert "8 of 8 rows, 6 errors" in capsys.readouterr().err
    found = answers(out)
    codes = {
        answer["custom_id"]: (answer["error"] or answer["response"]["body"].get("error") or {}).get("code")
        for answer in found
        if not (answer["custom_id"] == "good" and answer["error"])
    }
    assert codes == {
        "good": None, None: "invalid_json", "role": "invalid_value", "long": "context_length_exceeded",
        "bias": "invalid_value", "model": "model_not_found", "named": None,
    }  # fmt: skip
    assert [answer["error"]["line"] for answer in found if answer["error"]] == [2, 3]
    assert next(a for a in found if a["custom_id"] == "named")["response"]["body"]["model"] == "mine"


def test_all_done_nothing_is_loaded_and_strict_tells_of_errors(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = write(tmp_path / "in.jsonl", [text_row("a"), "{nope"]), tmp_path / "out.jsonl"
    assert batch(model, path, out, "--strict") == 1
    before = out.read_bytes()
    monkeypatch.setattr("octavo.cli.loading.start_engine", None)
    capsys.readouterr()
    assert batch(model, path, out) == 0
    assert "has all 2 rows, 1 errors" in capsys.readouterr().err
    assert batch(model, path, out, "--strict", "--quiet") == 1
    assert capsys.readouterr().err == ""
    assert out.read_bytes() == before


def test_in_order_answers_stand_as_the_rows_do(model: str, tmp_path: Path) -> None:
    lines = [text_row(f"r{i}", max_tokens=40 if i % 5 == 0 else 2, ignore_eos=True) for i in range(30)]
    path = write(tmp_path / "in.jsonl", lines)
    assert batch(model, path, tmp_path / "ordered.jsonl", "--ordered", "--quiet") == 0
    assert [found["custom_id"] for found in answers(tmp_path / "ordered.jsonl")] == [f"r{i}" for i in range(30)]
    assert batch(model, path, tmp_path / "out.jsonl", "--quiet") == 0
    assert by_id(tmp_path / "out.jsonl") == by_id(tmp_path / "ordered.jsonl")
    assert answers(tmp_path / "out.jsonl")[0]["custom_id"] != "r0"


def test_rows_may_come_from_stdin_and_answers_go_to_stdout(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write(tmp_path / "in.jsonl", [text_row("a"), text_row("b")]).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    assert run(["batch", "-", "-o", "-", "--model", model, *OPTIONS]) == 0
    shown = capfd.readouterr()
    assert sorted(json.loads(line)["custom_id"] for line in shown.out.splitlines()) == ["a", "b"]
    assert "2 of 2 rows" in shown.err


# -- what is refused before the model is loaded -----------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "name", "more", "told"),
    [
        (None, "out.jsonl", [], "cannot be read: no such file or directory; name a JSONL file"),
        ([], "out.jsonl", [], "holds no rows"),
        (["", "  "], "out.jsonl", [], "holds no rows"),
        ([row("a")], "in.jsonl", [], "is the input; name another file"),
        ([row("a")], "no/out.jsonl", [], "name a file in a folder that is there"),
        ([row("a")], "out.jsonl", ["--block-size", "0"], "block_size=0"),
        ([row("a")], "out.jsonl", ["--served-model-name", ""], "served_model_name"),
        ([row("a")], "diary.txt", [], "line 1 is no row of a batch; name another file, or start it again"),
    ],
)
def test_what_cannot_be_done_is_told_at_once(
    lines: list[Any] | None, name: str, more: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    if lines is not None:
        write(path, lines)
    (tmp_path / "diary.txt").write_text("dear diary\n")
    assert run(["batch", str(path), "-o", str(tmp_path / name), "--model", str(tmp_path / "none"), *more]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert told in " ".join(err.split())
    assert (tmp_path / "diary.txt").read_text() == "dear diary\n"


def test_another_model_or_seed_or_input_is_no_way_to_go_on(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write(tmp_path / "in.jsonl", [text_row("a"), text_row("b")]), tmp_path / "out.jsonl"
    assert batch(model, path, out, "--quiet") == 0
    before = out.read_bytes()
    assert batch(model, path, out, "--seed", "1") == 2
    assert batch(model + "/", path, out) == 2
    assert batch(model, write(tmp_path / "other.jsonl", [text_row("a", "again"), text_row("b")]), out) == 2
    assert capsys.readouterr().err.count("--overwrite") == 3
    assert out.read_bytes() == before
    assert batch(model, tmp_path / "other.jsonl", out, "--overwrite", "--quiet") == 0
    assert sorted(by_id(out)) == ["a", "b"]


# -- runs that end early ----------------------------------------------------------------------------


WARM = """
import json, os, sys
import octavo.engine.build, octavo.server.app
from octavo.cli.main import run
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os._exit(run(json.loads(line)))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""Runs one command line after the other, each in a process of its own that need not load torch again."""


@pytest.fixture
def warm() -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": SOURCE}
    command = [sys.executable, "-c", WARM]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        yield process
        process.kill()


def lines_of(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


@pytest.mark.slow
def test_a_run_that_is_killed_several_times_and_finished_has_every_row_once(
    model: str, tmp_path: Path, warm: subprocess.Popen[str]
) -> None:
    """At moments drawn at random, now and then by SIGTERM, and after SIGKILL with its last line torn."""
    moments = random.Random()
    lines: list[Any] = [
        text_row(f"r{i}", "hello " * (1 + i % 9), max_tokens=20 + i % 40, ignore_eos=True, temperature=i % 2)
        for i in range(200)
    ]
    lines.insert(50, "{nope")
    path, out, alone = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", tmp_path / "alone.jsonl"
    assert batch(model, path, alone, "--quiet") == 0

    command = json.dumps(["batch", str(path), "-o", str(out), "--model", model, *OPTIONS])
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGKILL):
        before = lines_of(out)
        print(command, file=warm.stdin, flush=True)
        pid = int(warm.stdout.readline())
        wait_for_lines(out, before + moments.randint(1, 20))
        time.sleep(moments.random() / 50)
        os.kill(pid, number)
        code = int(warm.stdout.readline())
        whole = lines_of(out)
        assert before < whole < len(lines), "it was not killed half-way"
        if number == signal.SIGKILL:
            assert code == -9
            last = out.read_bytes().rstrip(b"\n").rfind(b"\n") + 1
            os.truncate(out, moments.randint(last, out.stat().st_size))
        else:
            assert code == 128 + number
            assert len(answers(out)) == whole
    assert batch(model, path, out) == 0
    assert len(answers(out)) == len(lines)
    assert by_id(out) == by_id(alone)


def wait_for_lines(out: Path, count: int) -> None:
    end = time.monotonic() + 60
    while lines_of(out) < count:
        assert time.monotonic() < end, f"there are {lines_of(out)} rows of {count} after a minute"
        time.sleep(0.001)


def test_ctrl_c_says_how_to_go_on(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(octavo.server.batch, "answer_rows", lambda *_, **__: Ended(signal=signal.SIGINT))
    path, out = write(tmp_path / "in.jsonl", [text_row("a")]), tmp_path / "out.jsonl"
    assert batch(model, path, out) == 130
    assert f"0 of 1 rows are in {out}; the same command goes on from there" in capsys.readouterr().err


def test_an_engine_that_dies_is_told_and_the_next_run_goes_on(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = write(tmp_path / "in.jsonl", [text_row(f"r{i}") for i in range(30)]), tmp_path / "out.jsonl"
    collect = TorchExecutor.collect
    create_app = octavo.server.batch.create_app
    steps = -10_000  # until the model, which is tried when it is loaded, is served

    def create(service: Any) -> Any:
        nonlocal steps
        steps = 0
        return create_app(service)

    def failing(executor: TorchExecutor) -> Any:
        nonlocal steps
        steps += 1
        if steps == 20:
            raise RuntimeError("out of memory")
        return collect(executor)

    with monkeypatch.context() as patch:
        patch.setattr(octavo.server.batch, "create_app", create)
        patch.setattr(TorchExecutor, "collect", failing)
        assert batch(model, path, out) == 1
    err = capsys.readouterr().err
    assert "error: the engine has failed: RuntimeError: out of memory. " in err
    assert "rows are in" in err
    assert 0 < len(answers(out)) < 30
    assert batch(model, path, out, "--quiet") == 0
    assert {found[0] for found in by_id(out).values()} == {200}
    assert len(answers(out)) == 30
