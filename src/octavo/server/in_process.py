"""The app called in this process, without a socket: the same checks, answers and errors as over HTTP.

Owns one request and its answer as ASGI messages. Knows no route and no field.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

_HEADERS = [(b"content-type", b"application/json")]


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    request_id: str | None
    body: Any


async def post(app: ASGIApp, path: str, body: bytes) -> Reply:
    """POST a JSON body. Whoever cancels this has left, as a client that closes its connection."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": _HEADERS,
        "client": None, "server": None,
    }  # fmt: skip
    unsent: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not unsent:
            await asyncio.Event().wait()  # the client stays: this never comes back, and is cancelled in the end
        return unsent.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    with suppress(Exception):  # the app has logged it, and answered 500
        await app(scope, receive, send)
    return _reply(sent)


def _reply(sent: list[Message]) -> Reply:
    start = next(message for message in sent if message["type"] == "http.response.start")
    raw = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
    headers = dict(start["headers"])
    request_id = headers.get(b"x-request-id")
    return Reply(start["status"], None if request_id is None else request_id.decode(), json.loads(raw))
