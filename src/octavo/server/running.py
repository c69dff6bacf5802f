"""Runs the app on uvicorn: the socket, the moment of readiness, signals, the drain, the end.

    bind -> load the model -> one trial token -> listen -> "ready" -> SIGTERM -> drain -> exit

Owns signals: the first SIGTERM or SIGINT drains, the second ends the process at once. The socket listens only
when the server can answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import uvicorn

from octavo.engine.engine import Engine
from octavo.server.app import create_app
from octavo.server.arrival import KEEP_ALIVE_S, arriving_within
from octavo.server.async_llm import AsyncLLM
from octavo.server.bound import address_of, bind
from octavo.server.descriptors import tell_seldom
from octavo.server.host import Host
from octavo.server.request_log import RequestLog
from octavo.server.service import Service
from octavo.server.settings import ServerSettings

__all__ = ["address_of", "bind", "drain", "ready_line", "run", "serve_engine", "tell"]

LAST_WORDS_S = 5
SAYING_S = 0.5
"""A terminal takes a line at once; a pipe that is full and read by nobody never does."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)

Say = Callable[[str], None]


class _Server(uvicorn.Server):
    """uvicorn without its signals: here a drain comes before its shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _IntoLog(logging.Handler):
    """What uvicorn complains of, as a line of the log."""

    def __init__(self, log: RequestLog) -> None:
        super().__init__(logging.ERROR)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.trouble(record.getMessage())


def serve_engine(
    engine: Engine, settings: ServerSettings, bound: socket.socket, say: Say, host: Host | None = None
) -> int:
    """Serve an engine until a signal ends it, in the thread that loaded it. Returns the exit code."""

    async def serve() -> int:
        return await run(Service(AsyncLLM(engine, host), settings), bound, say)

    return asyncio.run(serve())


async def run(service: Service, bound: socket.socket, say: Say) -> int:
    """Serve until a signal, or until cancelled. Returns the exit code: 0 after a drain, 1 when the engine died."""
    config = uvicorn.Config(
        create_app(service),
        http=arriving_within(service.settings.receive_timeout_s),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=service.settings.root_path,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )
    server = _Server(config)
    complaints = logging.getLogger("uvicorn.error")
    complaints.addHandler(_IntoLog(service.log))
    complaints.propagate = False
    tell_seldom(asyncio.get_running_loop(), service.log.trouble)
    await service.start()
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    announcing = asyncio.create_task(_announce(server, serving, service, bound, say))
    stopping = _on_signals(service, server, say)
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise
    finally:
        announcing.cancel()
        stopping.close()
        complaints.handlers.clear()
        alive = service.lifecycle.engine_alive
        await service.stop()
    return 0 if alive else 1


async def _announce(
    server: uvicorn.Server, serving: asyncio.Task[None], service: Service, bound: socket.socket, say: Say
) -> None:
    """Say that it is ready once it is; then load, beside it, what a first structured request would wait for."""
    while not server.started and not serving.done():  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # uvicorn has no event for it
    if server.started:
        tell(say, ready_line(service, address_of(bound)))
        await asyncio.to_thread(service.llm.engine.intake.warm)


def ready_line(service: Service, url: str) -> str:
    name = service.model_names[0]
    key = ' -H "Authorization: Bearer $KEY"' if service.settings.api_keys else ""
    if service.tokens.has_chat_template:
        path, asked = "chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'
    elif service.tokens.has_tokenizer:
        path, asked = "completions", '"prompt": "Once upon a time", "max_tokens": 40'
    else:
        path, asked = "completions", '"prompt": [1, 2, 3], "max_tokens": 40'
    return (
        f"ready: {url} serves {name}. Open it in a browser, or try:\n"
        f"  curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{{{asked}}}'"
    )


def _on_signals(service: Service, server: uvicorn.Server, say: Say) -> contextlib.ExitStack:
    """The first signal drains, the second ends the process. Elsewhere than in the main thread, none is caught."""
    loop = asyncio.get_running_loop()
    stack = contextlib.ExitStack()
    drains: list[asyncio.Task[None]] = []

    def received(number: int) -> None:
        if drains:
            sys.stderr.flush()
            os._exit(128 + number)
        left = service.lifecycle.in_progress
        drains.append(loop.create_task(drain(service, server)))
        tell(say, f"{signal.Signals(number).name}: {left} to finish, no new ones are taken; again to end at once")

    for number in SIGNALS:
        try:
            loop.add_signal_handler(number, received, number)
        except (RuntimeError, ValueError):  # not the main thread: whoever runs it there ends it there
            break
        stack.callback(loop.remove_signal_handler, number)
    return stack


def tell(say: Say, text: str) -> None:
    """Say it, though whoever listened may have gone, or stopped reading: neither keeps a server from what it does."""

    def said() -> None:
        with contextlib.suppress(OSError, ValueError):
            say(text)

    speaking = threading.Thread(target=said, daemon=True)
    speaking.start()
    speaking.join(SAYING_S)


async def drain(service: Service, server: uvicorn.Server) -> None:
    """Take nothing new, let what is in progress end, then let the server end."""
    service.lifecycle.start_draining()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(service.settings.shutdown_timeout_s):
            await service.lifecycle.idle()
    server.should_exit = True
