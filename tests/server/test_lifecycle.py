"""Clients that leave, clients that are slow, a queue that is full, a drain, an engine that dies."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from tests.server.serving import PATIENCE_S, Running, Slow, make_core, served

from octavo.engine.intake import Intake
from octavo.scheduling.core import EngineCore
from octavo.server.running import drain, tell

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS: dict[str, Any] = {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True}


def begin(server: Running, body: dict[str, Any], path: str = COMPLETIONS) -> http.client.HTTPConnection:
    return server.begin(path, body)


# -- clients that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_its_blocks_on_the_next_step(stream: bool, n: int) -> None:
    core = make_core(Slow(0.01))
    with served(core) as server:
        opened = begin(server, ENDLESS | {"stream": stream, "n": n})
        if stream:
            opened.getresponse().read(20)
        server.until(lambda: len(core.scheduler.running.order) == n, "all choices run")
        opened.close()
        server.until_empty()
        steps = core.scheduler._next_plan
        server.until(lambda: bool(server.lines), "the request is logged")
        assert steps < 300, "it was told long before its 2,000 tokens"
        (line,) = server.log()
        assert line["client_left"] is True
        # The engine frees blocks first; what it counts crosses to the event loop afterwards.
        server.until(lambda: server.get("/stats").json()["finished_total"]["abort"] == n, "the aborts are counted")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_waits_is_forgotten(stream: bool) -> None:
    core = make_core(Slow(0.005), seqs=1)
    with served(core) as server:
        first = begin(server, ENDLESS | {"stream": True})
        first.getresponse().read(20)
        waiting = begin(server, {"prompt": "xyz", "max_tokens": 5, "stream": stream})
        server.until(lambda: server.service.room.requests == 1, "the second waits")
        waiting.close()
        server.until(lambda: server.service.room.requests == 0, "the second is forgotten")
        assert len(core.scheduler.running.order) == 1
        first.close()
        server.until_empty()


def test_many_clients_that_leave_at_any_moment_lose_no_block() -> None:
    core = make_core(Slow(0.001), slabs=60, seqs=6)
    with served(core) as server:

        def visit(i: int) -> None:
            body = {"prompt": "ab" * (1 + i % 20), "max_tokens": 40, "n": 1 + i % 3, "stream": i % 2 == 0}
            opened = begin(server, body)
            time.sleep((i * 7 % 13) / 300)
            opened.close()

        threads = [threading.Thread(target=visit, args=(i,)) for i in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.until(lambda: len(server.lines) == 60, "the server has noticed everybody's leave")
        server.until_empty()
        # What the engine has ended is counted in the event loop a moment later.
        server.until(lambda: server.service.room.requests == server.service.room.tokens == 0, "nobody waits")
        assert server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 4}).json()["choices"][0]["text"] == "abca"
        assert server.service.lifecycle.in_progress == 0


# -- clients that are slow ------------------------------------------------------------------------


def narrow_reader(server: Running, body: dict[str, Any]) -> socket.socket:
    """Sends a request through a socket that takes little before it is read."""
    raw = json.dumps(body).encode()
    host, port = urlsplit(server.url).netloc.split(":")
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW)
    opened.settimeout(PATIENCE_S)
    opened.connect((host, int(port)))
    opened.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw
    )  # fmt: skip
    return opened


MUCH: dict[str, Any] = {"prompt": "abc", "max_tokens": 3_000, "stream": True, "logprobs": 20}
"""A megabyte of events: more than a narrow reader and a small send buffer hold."""
NARROW = 16_384


def roomy_core() -> EngineCore:
    return make_core(slabs=30_000, context=60_000, audit=False)


def test_a_reader_that_reads_nothing_stalls_nobody_and_misses_nothing() -> None:
    core = roomy_core()
    with served(core, send_buffer=NARROW) as server, narrow_reader(server, MUCH) as slow:
        server.until(lambda: bool(core.scheduler.running.order.size), "the slow one runs")
        for i in range(20):
            answer = server.post(COMPLETIONS, {"prompt": f"n{i:02d}", "max_tokens": 3})
            assert answer.json()["choices"][0]["text"] == f"n{i:02d}"
        server.until(lambda: not core.has_work, "the engine has finished the slow one's answer")
        raw = b""
        while part := slow.recv(65536):
            raw += part
    # Events are found whatever sizes of chunks lie between.
    chunks = [json.loads(part.split(b"\n\n")[0]) for part in raw.split(b"data: ")[1:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc" * 1_000
    assert len(chunks) < 2_000, "what a slow reader has not read is merged"
    assert b"data: [DONE]" in raw[-60:]


def test_a_reader_that_reads_nothing_for_too_long_counts_as_gone() -> None:
    with served(roomy_core(), send_buffer=NARROW, send_timeout_s=0.3) as server, narrow_reader(server, MUCH):
        server.until(lambda: bool(server.lines), "it is given up")
        assert server.log()[0]["client_left"] is True
        server.until_empty()


# -- the queue ------------------------------------------------------------------------------------


def test_a_full_queue_answers_429_and_when_to_come_back() -> None:
    executor = Slow()
    core = make_core(executor, seqs=1)
    with served(core, max_waiting_requests=3, max_waiting_tokens=50) as server:
        executor.gate.clear()
        opened = [begin(server, {"prompt": "abc", "max_tokens": 2})]
        server.until(lambda: bool(core.scheduler.running.order.size), "one runs")
        opened += [begin(server, {"prompt": "abc", "max_tokens": 2}) for _ in range(2)]
        server.until(lambda: server.service.room.requests == 2, "two wait")
        for body in ({"prompt": "abc", "n": 2}, {"prompt": ["abc", "abc"]}, {"prompt": "a" * 48}):
            answer = server.post(COMPLETIONS, body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
        never = server.post(COMPLETIONS, {"prompt": "a" * 51})
        assert (never.status_code, never.json()["error"]["code"]) == (400, "queue_limit")
        assert "--max-waiting-tokens 50" in never.json()["error"]["message"]
        assert server.get("/stats").json()["refusals_total"]["queue_full"] == 3
        executor.gate.set()
        for one in opened:
            assert one.getresponse().status == 200
        server.until_empty()
        assert server.post(COMPLETIONS, {"prompt": "abc", "n": 2, "max_tokens": 1}).status_code == 200


# -- the end --------------------------------------------------------------------------------------


def test_a_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    core = make_core(Slow(0.002))
    with served(core) as server:
        whole = begin(server, {"prompt": "abc", "max_tokens": 200})
        streamed = begin(server, {"prompt": "abc", "max_tokens": 200, "stream": True})
        server.until(lambda: len(core.scheduler.running.order) == 2, "both run")
        loop = server.service.llm._loop
        ended = threading.Event()

        class Server:
            should_exit = False

        pretended = Server()

        async def draining() -> None:
            await drain(server.service, pretended)  # type: ignore[arg-type]
            ended.set()

        asyncio.run_coroutine_threadsafe(draining(), loop)
        server.until(lambda: server.get("/ready").status_code == 503, "it is no longer ready")
        refused = server.post(COMPLETIONS, {"prompt": "abc"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["Retry-After"]) > 0
        assert server.get("/health").status_code == 200
        assert not ended.is_set()
        assert json.loads(whole.getresponse().read())["usage"]["completion_tokens"] == 200
        assert streamed.getresponse().read().endswith(b"data: [DONE]\n\n")
        assert ended.wait(PATIENCE_S)
        assert pretended.should_exit


def test_when_the_engine_dies_everybody_is_told_and_health_turns_red() -> None:
    executor = Slow()
    core = make_core(executor, seqs=2)
    with served(core) as server:
        executor.gate.clear()
        whole = begin(server, ENDLESS)
        streamed = begin(server, ENDLESS | {"stream": True, "stream_options": {"include_usage": True}})
        waiting = begin(server, ENDLESS)
        server.until(lambda: bool(core.scheduler.running.order.size), "one runs")
        server.until(lambda: server.service.lifecycle.in_progress == 3, "the others have come")
        executor.broken = True
        executor.gate.set()
        answers = [opened.getresponse() for opened in (whole, streamed, waiting)]
        bodies = [answer.read() for answer in answers]
        for answer, body in zip(answers, bodies, strict=True):
            assert answer.status in (200, 500, 503)
            assert b"/dev/secret" not in body, "what is inside is for the log"
            if answer.status == 200:
                events = [part for part in body.split(b"\n\n") if part]
                assert json.loads(events[-2].removeprefix(b"data: "))["error"]["type"] == "server_error"
                assert events[-1] == b"data: [DONE]"
            else:
                assert json.loads(body)["error"]["code"] in ("engine_error", "engine_dead")
        server.until(lambda: server.get("/health").status_code == 503, "health is red")
        assert server.get("/ready").json() == {"status": "dead"}
        late = server.post(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_dead")
        assert server.get("/metrics").status_code == 200
        assert any("/dev/secret" in line for line in server.lines)


def test_a_mistake_inside_is_told_to_the_log_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as server:

        def fails(*_: Any) -> None:
            raise ZeroDivisionError("the secret cause")

        monkeypatch.setattr(server.service, "require_fits", fails)
        answer = server.post(COMPLETIONS, {"prompt": "abc"})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "secret" not in answer.text
        server.until(lambda: any("the secret cause" in line for line in server.lines), "the log has it")
        monkeypatch.undo()
        assert server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 1}).status_code == 200


# -- what is said ---------------------------------------------------------------------------------


def test_each_request_is_one_line_of_json_with_its_records() -> None:
    with served() as server:
        answer = server.post(COMPLETIONS, {"prompt": "secret", "max_tokens": 3, "n": 2}).json()
        server.until(lambda: len(server.lines) == 1, "the line is written")
        assert server.lines[0].count("\n") == 1
        (line,) = server.log()
        assert line["records"] == answer["usage"]["octavo"]
        assert (line["request_id"], line["path"], line["stream"]) == (answer["id"], COMPLETIONS, False)
        assert (line["choices"], line["finish_reasons"], line["client_left"]) == (2, ["length", "length"], False)
        assert "secret" not in server.lines[0]


def test_a_prompt_is_logged_where_it_is_asked_for_and_lines_can_be_turned_off() -> None:
    with served(max_log_len=4) as server:
        server.post(COMPLETIONS, {"prompt": "se\ncret", "max_tokens": 1})
        server.until(lambda: len(server.lines) == 1, "the line is written")
        assert server.log()[0]["prompt"] == "se\nc"
        assert server.lines[0].count("\n") == 1
    with served(enable_log_requests=False) as server:
        server.post(COMPLETIONS, {"prompt": "secret", "max_tokens": 1})
    assert server.lines == []


def test_it_says_that_it_is_ready_when_it_can_answer_and_how_to_ask() -> None:
    with served(api_keys=("k",), served_model_names=("mine",)) as server:
        assert len(server.said) == 1
        assert f"ready: {server.url} serves mine" in server.said[0]
        assert f"curl {server.url}/v1/chat/completions" in server.said[0]
        assert "Authorization: Bearer $KEY" in server.said[0]
        assert server.get("/ready").json() == {"status": "ready"}


def test_once_it_is_ready_it_loads_what_a_first_structured_request_would_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warmed = threading.Event()
    monkeypatch.setattr(Intake, "warm", lambda _: (time.sleep(0.3), warmed.set()))
    with served() as server:
        assert not warmed.is_set(), "nobody waits for it"
        assert server.get("/ready").status_code == 200
        assert warmed.wait(PATIENCE_S)


def test_the_first_token_of_all_is_not_in_the_figures() -> None:
    with served() as server:
        assert server.get("/stats").json()["admissions_total"] == 0
        assert "octavo_admissions_total" in server.get("/metrics").text


def test_time_to_the_first_token_counts_the_wait() -> None:
    executor = Slow()
    with served(make_core(executor, seqs=1)) as server:
        executor.gate.clear()
        first = begin(server, {"prompt": "abc", "max_tokens": 1})
        second = begin(server, {"prompt": "abc", "max_tokens": 1})
        server.until(lambda: server.service.lifecycle.in_progress == 2, "both are in")
        time.sleep(0.3)
        executor.gate.set()
        records = [json.loads(x.getresponse().read())["usage"]["octavo"][0] for x in (first, second)]
        assert max(record["queue_time"] for record in records) > 0.25


def test_requests_that_come_one_by_one_on_one_connection_are_answered() -> None:
    with served() as server, httpx.Client(base_url=server.url, timeout=PATIENCE_S, verify=False) as client:
        for i in range(50):
            path, body = (COMPLETIONS, {"prompt": "abc", "max_tokens": 3}) if i % 5 else ("/nowhere", {})
            assert client.post(path, json=body).status_code == (200 if i % 5 else 404)


def test_a_listener_that_has_gone_or_reads_no_more_keeps_nobody_from_going_on() -> None:
    def gone(text: str) -> None:
        raise BrokenPipeError(text)

    def full(text: str) -> None:
        stuck.wait(PATIENCE_S)

    heard: list[str] = []
    stuck = threading.Event()
    begun = time.monotonic()
    for say in (gone, full, heard.append):
        tell(say, "SIGTERM")
    stuck.set()
    assert time.monotonic() - begun < PATIENCE_S / 2
    assert heard == ["SIGTERM"]
