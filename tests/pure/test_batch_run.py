"""Rows through an engine without a model: every row once, in the order asked for, however the run ends.

The engine echoes prompts of token ids, so that every answer is known.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.pure.batches import read_rows, row
from tests.pure.worlds import VOCAB, engine

from octavo.cli.batch_rows import BadRow, Row
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.errors import RequestError
from octavo.memory.check import is_empty
from octavo.observe.request_record import FIELDS
from octavo.scheduling.plan import StepResult
from octavo.server import batch, completions
from octavo.server.batch import Ended, answer_rows
from octavo.server.in_process import Reply, post
from octavo.server.prompts import read_prompts
from octavo.server.settings import ServerSettings
from octavo.simulate.executors import EchoExecutor


class Breaks(EchoExecutor):
    """Fails on its step number `after`, and calls `at` with the number of each."""

    def __init__(self, after: int | None = None, at: Callable[[int], None] = lambda number: None) -> None:
        super().__init__()
        self.after = after
        self.steps = 0
        self.at = at

    def collect(self) -> StepResult:
        self.steps += 1
        self.at(self.steps)
        if self.steps == self.after:
            raise RuntimeError("the device is gone")
        return super().collect()


def built(executor: EchoExecutor | None = None, **options: Any) -> Engine:
    core = engine(executor=executor or EchoExecutor(), **({"slabs": 400, "seqs": 4, "context": 200} | options))
    return Engine(core, Intake(None, defaults={}, eos_token_ids=(), vocab_size=VOCAB))


def sent(lines: list[Any]) -> Iterator[Row | dict[str, Any]]:
    for found in read_rows(lines):
        yield found.as_output() if isinstance(found, BadRow) else found


def run(
    lines: list[Any], made: Engine | None = None, *, write: Callable[[dict[str, Any]], None] | None = None, **more: Any
) -> tuple[list[dict[str, Any]], Ended]:
    made = made or built()
    done: list[dict[str, Any]] = []
    settings = ServerSettings(enable_log_requests=False)
    ended = answer_rows(made, settings, sent(lines), write or done.append, observers=[], **more)
    return done, ended


def tokens_of(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["response"]["body"]["choices"][0]["token_ids"]
    return found


def test_every_row_is_answered_once_with_what_it_would_have_got_alone() -> None:
    lines = [row(f"r{i}", (i + 1, i + 2), max_tokens=1 + i % 7) for i in range(100)]
    made = built()
    done, ended = run(lines, made)
    assert ended == Ended()
    assert sorted(found["custom_id"] for found in done) == sorted(f"r{i}" for i in range(100))
    for found in done:
        i = int(found["custom_id"][1:])
        assert found["error"] is None
        assert found["response"]["status_code"] == 200
        assert tokens_of(found) == [[i + 1, i + 2][k % 2] for k in range(1 + i % 7)]
    assert is_empty(made.core.scheduler.cache)


def test_an_answer_is_the_servers_with_the_record_of_the_request_in_its_usage() -> None:
    done, _ = run([row("a", (1, 2, 3), n=2, seed=3)])
    response = done[0]["response"]
    assert response["request_id"] == response["body"]["id"]
    usage = response["body"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 8)
    assert [record["index"] for record in usage["octavo"]] == [0, 1]
    assert set(usage["octavo"][0]) == {"index", *FIELDS}


def test_short_rows_are_written_before_a_long_one_that_came_first() -> None:
    lines = [row("long", max_tokens=90), *(row(f"short{i}") for i in range(20))]
    done, _ = run(lines)
    assert done[-1]["custom_id"] == "long"


def test_in_order_a_row_waits_for_those_before_it() -> None:
    lines = [row("long", max_tokens=90), *(row(f"short{i}") for i in range(400)), b"{nope", row("last")]
    done, ended = run(lines, keep_order=True)
    assert ended == Ended()
    assert [found["custom_id"] for found in done] == ["long", *(f"short{i}" for i in range(400)), None, "last"]


def test_rows_that_the_server_refuses_get_its_error_and_the_others_go_on() -> None:
    bad = [
        row("type", temperature="warm"), row("range", top_p=2), row("unknown", temprature=1), row("model", model="gpt"),
        row("long", tuple(range(1, 200)) * 2), row("empty", ()), row("ids", (VOCAB,)),
    ]  # fmt: skip
    lines = list(itertools.chain.from_iterable((line, row(f"good{i}")) for i, line in enumerate(bad)))
    done, ended = run(lines)
    assert ended == Ended()
    found = {answer["custom_id"]: answer for answer in done}
    assert len(found) == len(done) == len(lines)
    for line in bad:
        response = found[line["custom_id"]]["response"]
        assert response["status_code"] == (404 if line["custom_id"] == "model" else 400), response
        assert response["body"]["error"]["message"]
        assert response["request_id"] == found[line["custom_id"]]["id"]
    assert all(found[f"good{i}"]["response"]["status_code"] == 200 for i in range(len(bad)))


def test_a_row_on_which_the_server_itself_fails_is_an_error_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(given: Any) -> Any:
        if given == [13]:
            raise ZeroDivisionError
        return read_prompts(given)

    monkeypatch.setattr(completions, "read_prompts", broken)
    done, ended = run([row("a"), row("b", (13,)), row("c")])
    assert ended == Ended()
    assert {found["custom_id"]: found["response"]["status_code"] for found in done} == {"a": 200, "b": 500, "c": 200}
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_an_app_that_answers_and_then_raises_has_answered() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": [(b"x-request-id", b"r")]})
        await send({"type": "http.response.body", "body": b'{"error"', "more_body": True})
        await send({"type": "http.response.body", "body": b": 1}"})
        raise ZeroDivisionError

    assert asyncio.run(post(app, "/", b"{}")) == Reply(500, "r", {"error": 1})


def test_no_more_rows_are_read_than_keep_the_engine_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "SPARE_ROWS", 3)
    read = 0
    most = 0
    written = 0

    def rows() -> Iterator[Row | dict[str, Any]]:
        nonlocal read, most
        for one in sent([row(f"r{i}") for i in range(60)]):
            read += 1
            most = max(most, read - written)
            yield one

    def write(answer: dict[str, Any]) -> None:
        nonlocal written
        written += 1

    made = built()
    answer_rows(made, ServerSettings(enable_log_requests=False), rows(), write, observers=[])
    assert written == 60
    assert most == 4 + 3 + 1  # the next one is read before there is room for it


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_what_is_written(number: int) -> None:
    def at(step: int) -> None:
        if step == 12:
            os.kill(os.getpid(), number)
        time.sleep(0.002)

    made = built(Breaks(at=at))
    done, ended = run([row(f"r{i}") for i in range(200)], made)
    assert ended == Ended(signal=number)
    assert 0 < len(done) < 200
    assert all(found["response"]["status_code"] == 200 for found in done)
    assert is_empty(made.core.scheduler.cache)
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def test_an_engine_that_dies_ends_the_run_and_its_rows_are_not_answers() -> None:
    done, ended = run([row(f"r{i}") for i in range(50)], built(Breaks(after=25, at=lambda step: time.sleep(0.005))))
    assert ended.signal is None
    assert "the device is gone" in str(ended.engine_died)
    assert 0 < len(done) < 50
    assert all(found["response"]["status_code"] == 200 for found in done)


def test_an_engine_that_cannot_take_its_first_step_answers_nothing() -> None:
    done, ended = run([row("a")], built(Breaks(after=1)))
    assert done == []
    assert "the first step failed" in str(ended.engine_died)


def test_an_output_that_fails_ends_the_run_with_its_error() -> None:
    done: list[dict[str, Any]] = []

    def write(answer: dict[str, Any]) -> None:
        if len(done) == 5:
            raise RequestError("output", "out", "cannot be written (no space left on device)")
        done.append(answer)

    made = built()
    with pytest.raises(RequestError, match="no space left"):
        run([row(f"r{i}") for i in range(50)], made, write=write)
    assert len(done) == 5
    assert is_empty(made.core.scheduler.cache)


def test_an_error_row_whose_output_fails_ends_the_run_too() -> None:
    def write(answer: dict[str, Any]) -> None:
        raise RequestError("output", "out", "cannot be written")

    with pytest.raises(RequestError):
        run([b"{nope", *(row(f"r{i}") for i in range(50))], write=write)


def test_an_answer_that_cannot_be_read_ends_the_run_rather_than_losing_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 499, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr(batch, "create_app", lambda service: silent)
    with pytest.raises(ValueError, match="Expecting value"):
        run([row("a")])


def test_rows_may_run_in_a_thread_where_no_signal_arrives() -> None:
    found: list[list[dict[str, Any]]] = []
    thread = threading.Thread(target=lambda: found.append(run([row("a")])[0]))
    thread.start()
    thread.join(20)
    assert [answer["custom_id"] for answer in found[0]] == ["a"]


def test_many_error_rows_do_not_keep_an_answer_waiting() -> None:
    lines = [row("first"), *(b"{nope" for _ in range(3000))]
    done, _ = run(lines)
    assert len(done) == 3001
    place = next(i for i, found in enumerate(done) if found["custom_id"] == "first")
    assert place < 3000, "the answer came only after all error rows"


def test_what_is_sampled_does_not_depend_on_what_runs_beside_it() -> None:
    """Each row without a seed has one of its own, so that a run that goes on draws what the first would have."""
    lines = [row(f"r{i}", temperature=1.0) for i in range(6)]
    bodies = {one.custom_id: json.loads(one.body)["seed"] for one in sent(lines)}  # type: ignore[union-attr]
    later = {one.custom_id: json.loads(one.body)["seed"] for one in sent(lines[3:])}  # type: ignore[union-attr]
    assert later == {name: bodies[name] for name in later}
