"""Server-sent events: one `data:` line of JSON for each chunk, and `[DONE]`.

Owns the response's life: headers at once, chunks as fast as the client reads, the last words when the
engine fails. A reader that is slow is waited for here alone; meanwhile its deltas are merged. One that
reads nothing for `send_timeout_s` counts as gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import encode_json
from octavo.server.generation import ClientLeft

DONE = b"data: [DONE]\n\n"

Batches = AsyncIterator[list[Mapping[str, Any]]]


class EventStream(Response):
    """Sends what `batches` yields; `finish` is called once in the end, whatever happened."""

    media_type = "text/event-stream"

    def __init__(
        self, batches: Batches, finish: Callable[[], None], *, headers: Mapping[str, str], send_timeout_s: float
    ) -> None:
        super().__init__(None, 200, {**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._batches = batches
        self._finish = finish
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await self._within(send(start))
            async for batch in self._batches:
                body = b"".join(b"data: " + encode_json(chunk) + b"\n\n" for chunk in batch)
                await self._within(send({"type": "http.response.body", "body": body, "more_body": True}))
            await self._within(send({"type": "http.response.body", "body": DONE}))
        except (ClientLeft, TimeoutError, OSError):
            pass  # nobody reads: without its last event the connection is closed by the server
        finally:
            self._finish()

    async def _within(self, sending: Awaitable[None]) -> None:
        async with asyncio.timeout(self._send_timeout_s):
            await sending
