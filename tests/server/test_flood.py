"""Crowds of clients of every kind at once, with reuse, pins, a host and a disk below: all are answered or let go.

Owns what many do at the same moment: hundreds of connections, resets in the middle of a stream, bodies of any
shape, readers that read a byte now and then, pins and resets in between, a signal amid it all. Each scenario ends
by asking for what must hold after any: the engine is alive, nothing is held in any tier, answers are right.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.server.serving import Running, served_engine
from tests.server.test_serve_command import started
from tests.torch.checkpoints import tiny_llama

from octavo.config import Config
from octavo.engine.build import build_engine
from octavo.memory.check_tiers import at_rest

COMPLETIONS = "/v1/completions"
SHARED = [3 + (7 * i) % 29 for i in range(24)]
RESET = struct.pack("ii", 1, 0)
"""Closing a socket with it sends a reset."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), initializer_range=0.5, max_position_embeddings=256)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with flooded(checkpoint, tmp_path_factory.mktemp("disk")) as running:
        yield running


@contextmanager
def flooded(checkpoint: Path, disk: Path, **settings: Any) -> Iterator[Running]:
    """A small pool that overflows into a host that overflows into a disk, every step checked."""
    asked: dict[str, Any] = {
        "dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 96, "max_num_seqs": 16, "reuse": "prefix",
        "host_bytes": 1 << 18, "placement": "write_through", "disk_path": str(disk), "disk_bytes": 1 << 20,
        "audit": True, "threads": 1,
    }  # fmt: skip
    engine = build_engine(Config.from_kwargs(model=str(checkpoint), **asked))
    try:
        with served_engine(engine, **({"max_waiting_requests": 200, "send_timeout_s": 1.0} | settings)) as running:
            yield running
    finally:
        engine.close()


def require_at_rest(server: Running) -> None:
    """What must hold after any crowd."""
    scheduler = server.core.scheduler
    assert scheduler.tiering is not None
    server.until(lambda: not server.core.has_work, "nothing is left to do")
    server.until(lambda: at_rest(scheduler.tiering), "nothing is held below")
    server.until(lambda: not (scheduler.cache.pool.slots[0].refs > 0).any(), "no block is referenced")
    assert server.get("/health").status_code == 200
    assert server.service.lifecycle.in_progress == 0
    alone = server.post(COMPLETIONS, {"prompt": SHARED, "max_tokens": 4, "temperature": 0}).json()
    assert alone["usage"]["completion_tokens"] == 4
    assert not [line for line in server.log() if line["event"] == "trouble"]


async def exchange(server: Running, body: bytes, *, path: str = COMPLETIONS, head: str = "") -> bytes:
    """One request on a connection of its own, the whole answer."""
    async with opened(server.url) as (reader, writer):
        writer.write(request(body, path, head))
        return await asyncio.wait_for(reader.read(), 60)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def request(body: bytes, path: str = COMPLETIONS, head: str = "") -> bytes:
    lines = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n{head}"
    return f"{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def asking(draw: random.Random, **more: Any) -> bytes:
    prompt = SHARED[: draw.randint(8, 24)] + [draw.randrange(3, 32) for _ in range(draw.randint(1, 12))]
    body = {"prompt": prompt, "max_tokens": draw.randint(1, 6), "ignore_eos": True, "stream": True,
            "priority": draw.randint(0, 2)}  # fmt: skip
    return json.dumps(body | more).encode()


def test_five_hundred_connections_at_once_are_streamed_to_the_end_or_told_to_come_back(server: Running) -> None:
    async def crowd() -> Counter[str]:
        draws = [random.Random(i) for i in range(500)]
        answers = await asyncio.gather(*[exchange(server, asking(draw)) for draw in draws])
        kinds: Counter[str] = Counter()
        for answer in answers:
            status = answer.split(b" ", 2)[1].decode()
            kinds[status] += 1
            if status == "200":
                assert b"data: [DONE]" in answer
                assert b'"finish_reason":"length"' in answer.replace(b": ", b":")
            else:
                assert b"etry-" in answer
        return kinds

    kinds = asyncio.run(crowd())
    assert set(kinds) <= {"200", "429"}
    assert kinds["200"] >= 200
    require_at_rest(server)


def test_clients_that_reset_their_connection_at_any_moment_leave_nothing(server: Running) -> None:
    async def leave(draw: random.Random) -> None:
        sent = request(asking(draw, max_tokens=60, n=draw.choice((1, 1, 3)), stream=draw.random() < 0.8))
        when = draw.random()
        async with opened(server.url) as (reader, writer):
            writer.write(sent if when > 0.2 else sent[: draw.randrange(len(sent))])
            if when > 0.5:
                await asyncio.wait_for(reader.read(draw.randint(1, 2000)), 30)
            else:
                await asyncio.sleep(draw.random() * 0.2)
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, RESET)
            writer.transport.abort()

    async def crowd() -> None:
        everyone = [leave(random.Random(i)) for i in range(150)]
        staying = [exchange(server, asking(random.Random(-i))) for i in range(1, 20)]
        answers = (await asyncio.gather(*everyone, *staying))[150:]
        assert all(b"[DONE]" in answer or b" 429 " in answer[:20] for answer in answers)

    asyncio.run(crowd())
    require_at_rest(server)


ODD = (
    "NaN",
    "-Infinity",
    "1e999",
    "9" * 400,
    "-1",
    "0",
    "1",
    "2",
    "1.5",
    "true",
    "null",
    '""',
    '"hello"',
    "[]",
    "{}",
    "[[]]",
    "[null]",
    '"\\ud800"',
    '"\\u0000"',
    '"\U0001f469\u200d\U0001f467"',
    "[1e18]",
    "[" * 60 + "]" * 60,
    "[" * 5000,
    '{"a":' * 120 + "1" + "}" * 120,
    "[-1, 3]",
    "[2147483648]",
    "[5]",
    '["a", "b"]',
    '"' + "x" * 3000 + '"',
    '{"type": "text"}',
    '[{"role": "user", "content": "hi"}]',
    '[{"role": "user"}]',
    '{"json": {"type": "object"}}',
    '{"type": "json_object"}',
    '{"5": -100}',
    '{"5": 1e40}',
)
FIELDS = (
    "prompt", "max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "stream", "stream_options",
    "logprobs", "top_logprobs", "logit_bias", "priority", "cache_salt", "structured_outputs", "response_format",
    "messages", "ttl", "id", "tokens", "min_tokens", "stop_token_ids", "echo", "best_of", "user", "tools", "model",
    "ignore_eos", "repetition_penalty", "presence_penalty", "return_token_ids", "prompt_logprobs",
    "skip_special_tokens",
)  # fmt: skip
PLAIN = {
    COMPLETIONS: {"prompt": json.dumps(SHARED), "max_tokens": "2"},
    "/v1/chat/completions": {"messages": '[{"role": "user", "content": "hello"}]', "max_tokens": "2"},
    "/v1/cache/pin": {"prompt": json.dumps(SHARED), "ttl": "0.1"},
    "/v1/cache/unpin": {"id": '"pin-1"'},
    "/v1/cache/reset": {},
    "/tokenize": {"prompt": '"hello"'},
    "/detokenize": {"tokens": "[3, 4]"},
}


def odd_body(draw: random.Random) -> tuple[str, bytes]:
    """A path, and a body with a field or two that may be anything; one in ten is broken below the level of fields."""
    path = draw.choice([COMPLETIONS, COMPLETIONS, *PLAIN])
    written = PLAIN[path] | {draw.choice(FIELDS): draw.choice(ODD) for _ in range(draw.choice((0, 1, 1, 1, 2, 3)))}
    body = ("{" + ", ".join(f'"{name}": {value}' for name, value in written.items()) + "}").encode()
    spoilt = draw.random()
    if spoilt < 0.05:
        body = body[: draw.randrange(len(body))]
    elif spoilt < 0.1:
        place = draw.randrange(len(body))
        body = body[:place] + bytes([draw.randrange(256)]) + body[place:]
    return path, body


async def odd_crowd(server: Running, draw: random.Random, rounds: int) -> Counter[int]:
    kinds: Counter[int] = Counter()
    for _ in range(rounds):
        sent = [odd_body(draw) for _ in range(60)]
        answers = await asyncio.gather(*[exchange(server, body, path=path) for path, body in sent])
        for (path, body), answer in zip(sent, answers, strict=True):
            status = int(answer.split(b" ", 2)[1])
            kinds[status] += 1
            assert status < 500, (path, body[:300], answer[:600])
            if status >= 400:
                told = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
                assert set(told) == {"message", "type", "param", "code"}
                assert len(told["message"]) < 1000, (path, body[:300], answer[:600])
    return kinds


def test_bodies_of_any_shape_get_an_answer_that_is_no_fault_of_the_server(server: Running) -> None:
    kinds = asyncio.run(odd_crowd(server, random.Random(6), 20))
    assert kinds[200] > 100
    assert kinds[400] > 400
    require_at_rest(server)


def test_readers_of_a_byte_now_and_then_slow_nobody_and_are_not_waited_for_for_ever(server: Running) -> None:
    async def dawdle(draw: random.Random) -> int:
        got = 0
        async with opened(server.url) as (reader, writer):
            writer.write(request(asking(draw, max_tokens=100, logprobs=5)))
            for _ in range(20):
                got += len(await asyncio.wait_for(reader.read(draw.randint(1, 40)), 30))
                await asyncio.sleep(0.02)
            writer.transport.abort()
        return got

    async def crowd() -> None:
        slow = [asyncio.create_task(dawdle(random.Random(i))) for i in range(40)]
        quick = await asyncio.gather(*[exchange(server, asking(random.Random(i))) for i in range(40)])
        assert all(b"[DONE]" in answer for answer in quick)
        assert min(await asyncio.gather(*slow)) > 0

    asyncio.run(crowd())
    require_at_rest(server)


def test_pins_and_resets_amid_a_crowd_lose_nothing_and_serve_nothing_wrong(server: Running) -> None:
    """Greedy answers to one prompt stay the same, whatever is pinned, moved, forgotten or left meanwhile."""
    fixed = {"prompt": [*SHARED, 5, 9], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    right = server.post(COMPLETIONS, fixed).json()["choices"][0]["token_ids"]

    async def meddle(draw: random.Random) -> None:
        for _ in range(6):
            what = draw.choice(("pin", "reset", "pins"))
            body: dict[str, Any] = {}
            if what == "pin":
                body = {"prompt": SHARED[: draw.randint(4, 24)], "ttl": draw.choice((0.05, 1, 30))}
            if what == "pins":
                await asyncio.to_thread(server.get, "/v1/cache/pins")
            else:
                await exchange(server, json.dumps(body).encode(), path=f"/v1/cache/{what}")
            await asyncio.sleep(0.02 * draw.random())

    async def same() -> None:
        for _ in range(8):
            answer = await exchange(server, json.dumps(fixed).encode())
            told = json.loads(answer.partition(b"\r\n\r\n")[2])
            assert told["choices"][0]["token_ids"] == right

    async def crowd() -> None:
        others = [exchange(server, asking(random.Random(i))) for i in range(120)]
        await asyncio.gather(*others, *[meddle(random.Random(i)) for i in range(6)], *[same() for _ in range(4)])

    asyncio.run(crowd())
    server.post("/v1/cache/reset", {})
    assert server.get("/v1/cache/pins").json()["data"] == []
    require_at_rest(server)


def test_a_signal_amid_a_crowd_lets_what_has_begun_end_and_exits_cleanly(checkpoint: Path, tmp_path: Path) -> None:
    flags = ("--num-gpu-blocks-override", "48", "--block-size", "4", "--max-num-seqs", "8", "--reuse", "prefix",
             "--host-bytes", "256KiB", "--placement", "write_through", "--disk-path", str(tmp_path),
             "--disk-bytes", "1MiB", "--threads", "1")  # fmt: skip
    with started(str(checkpoint), *flags) as process:

        async def one(i: int) -> bytes:
            with suppress(ConnectionError):
                async with opened(process.url) as (reader, writer):
                    writer.write(request(asking(random.Random(i), max_tokens=12)))
                    return await asyncio.wait_for(reader.read(), 60)
            return b""

        async def crowd() -> list[bytes]:
            early = [asyncio.create_task(one(i)) for i in range(60)]
            await asyncio.wait(early, return_when=asyncio.FIRST_COMPLETED)
            process.child.send_signal(signal.SIGTERM)
            late = [asyncio.create_task(one(i)) for i in range(60, 90)]
            return await asyncio.gather(*early, *late)

        answers = asyncio.run(crowd())
        assert process.child.wait(30) == 0
    whole = [answer for answer in answers if answer.startswith(b"HTTP/1.1 200")]
    assert whole
    assert all(answer.endswith(b"0\r\n\r\n") and b"[DONE]" in answer for answer in whole)
    others = {answer.split(b" ", 2)[1] for answer in answers if answer and answer not in whole}
    assert others <= {b"503"}
