"""Clients that do what no client should: bytes that are no HTTP, leaving at each chunk, bodies that never end, and
an engine that fails in each of its parts while people wait.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.server.serving import PATIENCE_S, Running, Slow, make_core, served

COMPLETIONS = "/v1/completions"


def raw_post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def connected(server: Running) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)  # type: ignore[arg-type]


def answers(server: Running, sent: bytes, *, until: bytes | None = None) -> bytes:
    """What comes back, until the server closes or `until` has come."""
    got = b""
    with connected(server) as opened:
        opened.sendall(sent)
        try:
            while until is None or until not in got:
                part = opened.recv(65536)
                if not part:
                    break
                got += part
        except ConnectionResetError:  # it closes while we still send
            pass
    return got


ONE = {"prompt": "abc", "max_tokens": 4}


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 100) for i in range(2000)),
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
    ],
)
def test_bytes_that_are_no_http_get_400_and_the_connection_is_closed(server: Running, sent: bytes) -> None:
    got = answers(server, sent)
    assert got.startswith(b"HTTP/1.1 400") or not got  # a reset may overtake the answer while we still send
    assert server.post(COMPLETIONS, ONE).status_code == 200


def test_requests_sent_ahead_are_answered_in_order(server: Running) -> None:
    stream = raw_post(ONE | {"stream": True})
    end = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    got = answers(server, stream + raw_post(ONE) + end)
    assert got.count(b"HTTP/1.1 200") == 3
    assert got.index(b"[DONE]") < got.index(b'"usage":{')
    assert got.rstrip().endswith(b'{"status":"ok"}')


def test_bodies_that_never_end_keep_nobody_waiting(server: Running) -> None:
    half = [connected(server) for _ in range(40)]
    for opened in half:
        opened.sendall(raw_post(ONE)[:-2])
    assert server.post(COMPLETIONS, ONE).status_code == 200
    for opened in half:
        opened.close()
    server.until(lambda: server.service.lifecycle.in_progress == 0, "nothing is in progress")


def test_a_client_that_leaves_after_any_chunk_leaves_nothing() -> None:
    with served(make_core(Slow(0.001))) as server:
        for chunks in range(24):
            body = {"prompt": "abc", "max_tokens": 20, "stream": True, "n": 1 + chunks % 3}
            with connected(server) as opened:
                opened.sendall(raw_post(body))
                got = b""
                while got.count(b"data: ") < chunks and b"[DONE]" not in got:
                    got += opened.recv(100)
        server.until_empty()
        server.until(lambda: server.service.lifecycle.in_progress == 0, "nothing is in progress")
        room, llm = server.service.room, server.service.llm
        server.until(lambda: (room.requests, room.tokens, len(llm._mailboxes)) == (0, 0, 0), "nobody is counted")
        assert not llm._opening
        assert server.post(COMPLETIONS, ONE).status_code == 200


@pytest.mark.parametrize("where", ["submit", "collect", "schedule", "commit"])
def test_whatever_part_of_the_engine_fails_everybody_is_told(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(Slow(0.001))
    with served(core) as server:
        said: list[tuple[int, str]] = []

        def ask(stream: bool) -> None:
            answer = server.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 1500, "stream": stream})
            said.append((answer.status_code, answer.text))

        threads = [threading.Thread(target=ask, args=(bool(i % 2),), daemon=True) for i in range(10)]
        for thread in threads:
            thread.start()
        server.until(lambda: len(server.service.llm._mailboxes) == 10, "the engine has accepted all")

        def broken(*_: Any, **__: Any) -> Any:
            raise MemoryError("no room for a tensor")

        monkeypatch.setattr(core.executor if where in ("submit", "collect") else core.scheduler, where, broken)
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)
        assert sorted(status for status, _ in said) == [200] * 5 + [500] * 5
        assert all('"engine_error"' in text for _, text in said)
        assert (server.get("/health").status_code, server.get("/ready").status_code) == (503, 503)
        assert server.post(COMPLETIONS, ONE).status_code == 503


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(("sent", "awaited"), [(b"P", "head"), (HEAD, "head"), (raw_post(ONE)[:-2], "body")])
def test_a_request_that_stops_arriving_gets_408_and_its_connection_back(sent: bytes, awaited: str) -> None:
    with served(receive_timeout_s=0.2) as server:
        got = answers(server, sent)
        assert got.startswith(b"HTTP/1.1 408"), got
        error = json.loads(got.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "request_timeout"
        assert f"the {awaited} of the request" in error["message"]
        server.until(lambda: server.service.lifecycle.in_progress == 0, "nothing is in progress")
        assert server.post(COMPLETIONS, ONE).status_code == 200


def test_a_head_that_drips_in_is_not_waited_for_and_a_body_that_does_is() -> None:
    with served(receive_timeout_s=0.5) as server:
        with connected(server) as opened:
            opened.settimeout(0.1)
            begun = time.monotonic()
            got = b""
            for byte in HEAD:
                opened.sendall(bytes([byte]))
                try:
                    got = opened.recv(1000)
                    break
                except TimeoutError:
                    continue
            assert got.startswith(b"HTTP/1.1 408")
            assert time.monotonic() - begun < len(HEAD) * 0.1
        with connected(server) as opened:
            whole = raw_post(ONE)
            for part in (whole[:-30], *(whole[at : at + 5] for at in range(len(whole) - 30, len(whole), 5))):
                opened.sendall(part)
                time.sleep(0.15)  # all of them together take longer than the bound, no pause does
            assert opened.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_request_after_an_answer_is_timed_like_the_first() -> None:
    with served(receive_timeout_s=0.2) as server:
        got = answers(server, raw_post(ONE) + HEAD)
        assert got.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in got


def test_a_stream_longer_than_the_bound_on_arriving_is_sent_to_its_end() -> None:
    with served(make_core(Slow(0.02)), receive_timeout_s=0.1) as server:
        chunks = server.events(COMPLETIONS, ONE | {"stream": True, "max_tokens": 20})
        assert chunks[-1] == "[DONE]"
