"""The end of a client's time to send: uvicorn's HTTP protocol, with a clock for requests that stop arriving.

Owns how long a connection may wait for the rest of a request. Uvicorn itself waits for ever, so that
connections which never finish their first line would fill the process's table of files.

    nothing yet ----------> closed after KEEP_ALIVE_S, as between requests
    a part of the head ---> 408 after `receive_timeout_s`, however slowly the rest drips in
    a part of the body ---> 408 after `receive_timeout_s` in which none of it came
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.server.errors import ApiError

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that they close them and never meet a closed one."""

Awaited = Literal["anything", "head", "body", "nothing"]


class ArrivingProtocol(H11Protocol):
    """One connection. Made by `arriving_within`."""

    receive_timeout_s: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._awaited: Awaited = "nothing"
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._set_clock("nothing")

    def _await(self) -> None:
        awaited = self._what_is_awaited()
        if awaited != self._awaited or awaited == "body":
            self._set_clock(awaited)

    def _what_is_awaited(self) -> Awaited:
        if self.transport.is_closing():
            return "nothing"
        if self.conn.their_state is h11.SEND_BODY:
            return "body"
        if self.conn.their_state is not h11.IDLE:
            return "nothing"
        if self.conn.trailing_data[0]:
            return "head"
        return "anything" if self.timeout_keep_alive_task is None else "nothing"

    def _set_clock(self, awaited: Awaited) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        self._awaited = awaited
        if awaited != "nothing":
            seconds = KEEP_ALIVE_S if awaited == "anything" else self.receive_timeout_s
            self._clock = self.loop.call_later(seconds, self._is_late)

    def _is_late(self) -> None:
        self._clock = None
        awaited, self._awaited = self._awaited, "nothing"
        if awaited == "body" and self.flow.read_paused:  # we are the ones who do not read
            self._await()
            return
        if awaited != "anything" and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self._has_begun():
            self.transport.write(_late(awaited, self.receive_timeout_s))
        self.transport.close()

    def _has_begun(self) -> bool:
        """Whether a part of this request's answer has been sent."""
        return self.conn.their_state is h11.SEND_BODY and self.cycle.response_started


def arriving_within(receive_timeout_s: float) -> type[ArrivingProtocol]:
    """The protocol for `uvicorn.Config(http=...)`."""
    return type("ArrivingProtocol", (ArrivingProtocol,), {"receive_timeout_s": receive_timeout_s})


def _late(awaited: Awaited, seconds: float) -> bytes:
    error = ApiError(
        408,
        f"the {awaited} of the request did not arrive within {seconds:g} s; send it again, or start the server "
        "with a longer --receive-timeout",
        code="request_timeout",
    )
    answer = error.response()
    head = f"HTTP/1.1 408 Request Timeout\r\nContent-Length: {len(answer.body)}\r\n"
    return f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + bytes(answer.body)
