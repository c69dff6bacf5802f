"""Server-sent events: one `data:` line of JSON for each chunk, and `[DONE]`.

Owns the response's life: headers at once, chunks as fast as the client reads, the last words when the
engine fails. A reader that is slow is waited for here alone; meanwhile its deltas are merged. One that
reads nothing for `send_timeout_s` counts as gone.
"""

from __future__ import annotations

import asyncio
import functools
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import encode_json, internal_error
from octavo.server.generation import ClientLeft

DONE = b"data: [DONE]\n\n"

Batches = AsyncIterator[Sequence[Mapping[str, Any]]]


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + encode_json(chunk) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Life:
    """Who is told how a stream ends."""

    finish: Callable[[], None]
    """Called once, in the end, whatever happened."""
    lost: Callable[[], None]
    """Nobody reads any more."""
    trouble: Callable[[str], None]
    """Something is wrong inside; for the log."""


class EventStream(Response):
    """Sends what `batches` yields."""

    media_type = "text/event-stream"

    def __init__(self, batches: Batches, life: Life, *, headers: Mapping[str, str], send_timeout_s: float) -> None:
        super().__init__(None, 200, {**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._batches = batches
        self._life = life
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await self._within(send(start))
            async for body in self._encoded():
                await self._within(send({"type": "http.response.body", "body": body, "more_body": True}))
            await self._within(send({"type": "http.response.body", "body": DONE}))
        except (ClientLeft, TimeoutError, OSError):
            self._life.lost()  # without its last event the connection is closed by the server
        finally:
            self._life.finish()

    async def _encoded(self) -> AsyncIterator[bytes]:
        """The events; one last event where something is wrong inside, which the log is told."""
        try:
            async for batch in self._batches:
                yield b"".join(_event(chunk) for chunk in batch)
        except ClientLeft:
            raise
        except Exception:  # noqa: BLE001 - whatever it is, the client gets an answer and the log the cause
            self._life.trouble(traceback.format_exc())
            yield _event(internal_error().body())

    async def _within(self, sending: Awaitable[None]) -> None:
        """Send, for at most `send_timeout_s`. A clock is set only for a client that has to be waited for: few are."""
        steps = sending.__await__()
        try:
            waits_for = next(steps)
        except StopIteration:
            return
        async with asyncio.timeout(self._send_timeout_s):
            await _Rest(waits_for, steps)


class _Rest:
    """What is left of an awaitable that has begun to wait."""

    def __init__(self, waits_for: Any, steps: Generator[Any, Any, None]) -> None:
        self._waits_for = waits_for
        self._steps = steps

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001 - a cancellation belongs to whoever waits inside
                step = functools.partial(self._steps.throw, error)
            else:
                step = functools.partial(self._steps.send, sent)
            try:
                waits_for = step()
            except StopIteration:
                return
