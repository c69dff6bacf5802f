"""From a checked request to its answer, streamed or whole: the part that both APIs share.

Owns the order of things: open in the engine, then answer, then close, account and log. Whatever
happens on the way, the generation is closed and one line is logged.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.answers import Answer, records_of, usage_of
from octavo.server.errors import ApiError, json_response
from octavo.server.generation import Asked, ClientLeft, Generation, failed
from octavo.server.service import Service
from octavo.server.sse import EventStream, Life

CLIENT_LEFT = 499
"""Seen by nobody but the log."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """How the answer is to be sent."""

    answer: Answer
    stream: bool
    include_usage: bool
    prompt_text: str
    """For the log, where prompts are asked for."""
    headers: Mapping[str, str]


async def answer(service: Service, request: Request, asked: Asked, wanted: Wanted) -> Response:
    """Raises `ApiError` when the engine does not take the request or fails before an answer is begun."""
    with ExitStack() as stack:
        stack.enter_context(service.lifecycle.generation())
        generation = Generation(service.llm, service.room, asked, request.receive)
        stack.callback(_end, service, request, generation, wanted)
        await generation.open()
        headers = {"X-Request-Id": asked.request_id, **wanted.headers}
        if wanted.stream:
            batches = _batches(generation, wanted)
            trouble = functools.partial(service.log.trouble, request_id=asked.request_id)
            life = Life(finish=stack.pop_all().close, lost=generation.lose, trouble=trouble)
            return EventStream(batches, life, headers=headers, send_timeout_s=service.settings.send_timeout_s)
        try:
            async for deltas in generation:
                for delta in deltas:
                    wanted.answer.add(delta)
        except ClientLeft:
            return Response(status_code=CLIENT_LEFT)
        if generation.error is not None:
            raise failed()
        return json_response(wanted.answer.whole(_usage(generation)), headers=headers)


async def _batches(generation: Generation, wanted: Wanted) -> AsyncIterator[Sequence[Mapping[str, Any]]]:
    """The chunks of a stream. An engine that fails is told in the stream: its headers have been sent."""
    no_usage = {"usage": None} if wanted.include_usage else {}
    async for deltas in generation:
        if generation.error is not None:
            yield [failed().body()]
            return
        chunks = [chunk | no_usage for delta in deltas if (chunk := wanted.answer.chunk(delta)) is not None]
        if chunks:
            yield chunks
    if wanted.include_usage:
        yield [wanted.answer.usage_chunk(_usage(generation))]


def _usage(generation: Generation) -> dict[str, Any]:
    asked = generation.asked
    return usage_of(asked.prompts, asked.params.n, generation.output_tokens, generation.records)


def _end(service: Service, request: Request, generation: Generation, wanted: Wanted) -> None:
    """Close and log."""
    generation.close()
    if generation.error is not None:
        service.log.trouble(generation.error, request_id=generation.asked.request_id)
    service.log.request(
        prompt=wanted.prompt_text,
        request_id=generation.asked.request_id,
        path=request.url.path,
        client=request.client.host if request.client else None,
        stream=wanted.stream,
        choices=generation.asked.choices,
        finish_reasons=[reason for _, reason in sorted(generation.finish_reasons.items())],
        client_left=generation.left,
        records=records_of(generation.records),
    )


def require_valid_priority(priority: int) -> None:
    if not -(2**31) <= priority < 2**31:
        raise ApiError(400, f"priority={priority}: must fit in 32 bits; lower goes first",
                       param="priority", code="invalid_value")  # fmt: skip
