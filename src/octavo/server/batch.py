"""Many rows through the app at once: enough of them open to keep the engine full, and no more.

Owns the bound on open rows, the order in which answers are handed on, and how a run ends early. Reads
and writes no file: rows come from an iterator, answers go to `write`.

Invariant: each row is handed to `write` at most once; when the run ends by itself, exactly once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import ASGIApp

from octavo.engine.engine import Engine, Observer
from octavo.scheduling.events import Event, Finished
from octavo.server.app import create_app
from octavo.server.async_llm import AsyncLLM
from octavo.server.host import Host
from octavo.server.in_process import Reply, post
from octavo.server.service import Service
from octavo.server.settings import ServerSettings

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SPARE_ROWS = 32
"""Open beyond those that can run, so that a seat that becomes free is taken on the next step."""
KEPT_FACTOR = 8
"""With order kept, so many times as many rows may wait for one before them."""

Write = Callable[[dict[str, Any]], None]
Result = Mapping[str, Any]


class Sendable(Protocol):
    """A row that is a request."""

    @property
    def id(self) -> str: ...
    @property
    def custom_id(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def body(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Ended:
    """Why the run ended before all rows were answered; both None when they were."""

    signal: int | None = None
    engine_died: str | None = None


def answer_rows(
    engine: Engine,
    settings: ServerSettings,
    rows: Iterator[Sendable | dict[str, Any]],
    write: Write,
    *,
    observers: list[Observer],
    keep_order: bool = False,
    host: Host | None = None,
) -> Ended:
    """Send every row, hand every answer to `write`; a dict among the rows is an answer already.

    Returns early on SIGINT or SIGTERM, and when the engine dies; what `write` raises ends the run too.
    """
    seats = engine.core.scheduler.limits.max_num_seqs + SPARE_ROWS
    most_open = seats * KEPT_FACTOR if keep_order else seats
    written = _Written(write, keep_order=keep_order)

    async def main() -> Ended:
        service = Service(AsyncLLM(engine, host), settings)
        try:
            try:
                await service.start()
            except RuntimeError as error:
                return Ended(engine_died=str(error))
            service.llm.observers += observers
            run = _Run(service, written, most_open)
            await run.until_ended(rows)
        finally:
            await service.stop()
        return run.ended  # only now: the engine's last words may come after the answers that end with it

    return asyncio.run(main())


class _Written:
    """Hands answers on as they come, or each after all those before it."""

    def __init__(self, write: Write, *, keep_order: bool) -> None:
        self._write = write
        self._keep_order = keep_order
        self._next = 0
        self._kept: dict[int, dict[str, Any]] = {}

    def put(self, place: int, answer: dict[str, Any]) -> int:
        """Returns how many were handed on."""
        if not self._keep_order:
            self._write(answer)
            return 1
        self._kept[place] = answer
        before = self._next
        while self._next in self._kept:
            self._write(self._kept.pop(self._next))
            self._next += 1
        return self._next - before


class _Run:
    def __init__(self, service: Service, written: _Written, most_open: int) -> None:
        self._service = service
        self._app: ASGIApp = create_app(service)
        self._written = written
        self._room = asyncio.Semaphore(most_open)
        self._open: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._signal: int | None = None
        self._died = False
        self._failure: BaseException | None = None
        self._cause = "the engine has failed"
        service.llm.observers.append(self._note_failure)

    @property
    def ended(self) -> Ended:
        return Ended(self._signal, self._cause if self._died else None)

    async def until_ended(self, rows: Iterator[Sendable | dict[str, Any]]) -> None:
        """Raises what `write` or the iterator raised."""
        with self._signals():
            sending = asyncio.create_task(self._send_all(rows))
            sending.add_done_callback(lambda task: self._over.set())
            await self._over.wait()
            for task in (sending, *self._open):
                task.cancel()
            results = await asyncio.gather(sending, *self._open, return_exceptions=True)
        errors = [e for e in (self._failure, *results) if isinstance(e, BaseException)]
        real = [error for error in errors if not isinstance(error, asyncio.CancelledError)]
        if real:
            raise real[0]

    async def _send_all(self, rows: Iterator[Sendable | dict[str, Any]]) -> None:
        for place, row in enumerate(rows):
            await self._room.acquire()
            if isinstance(row, dict):
                self._put(place, row)
                await asyncio.sleep(0)  # a long run of these must not keep the engine's events waiting
                continue
            task = asyncio.create_task(self._answer(place, row))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        while self._open:
            await asyncio.wait(self._open)

    async def _answer(self, place: int, row: Sendable) -> None:
        try:
            reply = await post(self._app, row.url, row.body)
            if reply.status >= 500 and not self._service.llm.is_alive:
                self._died = self._died or not self._over.is_set()
                self._over.set()
            else:
                self._put(place, _result(row, reply))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised again by `until_ended`
            self._failure = self._failure or error
            self._over.set()

    def _put(self, place: int, answer: dict[str, Any]) -> None:
        if not self._over.is_set():
            for _ in range(self._written.put(place, answer)):
                self._room.release()

    def _note_failure(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Finished) and event.error is not None:
                self._cause = event.error

    def _signals(self) -> ExitStack:
        """The first signal ends the run, the second the process. Elsewhere than in the main thread, none is caught."""
        loop = asyncio.get_running_loop()
        stack = ExitStack()

        def received(number: int) -> None:
            if self._over.is_set():
                os._exit(128 + number)
            self._signal = number
            self._over.set()

        for number in SIGNALS:
            try:
                loop.add_signal_handler(number, received, number)
            except (RuntimeError, ValueError):
                break
            stack.callback(loop.remove_signal_handler, number)
        return stack


def _result(row: Sendable, reply: Reply) -> dict[str, Any]:
    response = {"status_code": reply.status, "request_id": reply.request_id or row.id, "body": reply.body}
    return {"id": row.id, "custom_id": row.custom_id, "response": response, "error": None}
