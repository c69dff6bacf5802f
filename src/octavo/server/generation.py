"""One HTTP request in the engine: its prompts submitted together, its choices read as they grow.

Owns submission (all prompts or none), the watch for a client that leaves, and the end: whatever
happens, no sequence of a request outlives its answer. Knows no wire format.

Invariant: after `close` the engine has been told to end every sequence that had not ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.engine.outputs import Delta
from octavo.errors import EngineDeadError, RequestError
from octavo.scheduling.events import RequestRecord
from octavo.scheduling.request import SamplingParams
from octavo.server.async_llm import AsyncLLM, Opened
from octavo.server.errors import ApiError, engine_dead, refused
from octavo.server.limits import WaitingRoom

Receive = Any


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What to generate. `names` says what the client calls octavo's fields."""

    request_id: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    arrived_s: float | None = None
    """When the request was read, on the engine's clock."""
    names: dict[str, str] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.params.n


class Generation:
    """Open it, iterate over it, close it."""

    def __init__(self, llm: AsyncLLM, room: WaitingRoom, asked: Asked, receive: Receive) -> None:
        self.asked = asked
        self.records: dict[int, RequestRecord] = {}
        """By choice, for those that have ended."""
        self.finish_reasons: dict[int, str] = {}
        self.output_tokens = 0
        self.error: str | None = None
        """Why the engine ended it, if it did."""
        self.left = False
        self._llm = llm
        self._room = room
        self._news = asyncio.Event()
        self._opened: dict[int, Opened] = {}
        self._watch = asyncio.create_task(self._watch_client(receive))

    async def open(self) -> None:
        """Submit every prompt. Raises `ApiError`, having left nothing in the engine, when one is refused."""
        asked = self.asked
        tokens = sum(len(prompt) for prompt in asked.prompts) * asked.params.n
        try:
            with self._room.entering(asked.choices, tokens):
                # All at once: the engine reads its inbox between two steps, and would take one a step otherwise.
                submitted = [self._submit(i, prompt) for i, prompt in enumerate(asked.prompts)]
                results = await asyncio.gather(*submitted, return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
        except BaseException:
            self.close()
            raise
        if errors:
            self.close()
            raise errors[0]

    async def _submit(self, i: int, prompt: Sequence[int]) -> None:
        asked, names = self.asked, self.asked.names
        name = asked.request_id
        if len(asked.prompts) > 1:
            name = f"{name}-{i}"
            names = names | {"prompt": f"prompt[{i}]", "prompt_token_ids": f"prompt[{i}]"}
        try:
            salted = {"prompt_token_ids": list(prompt), "cache_salt": asked.cache_salt or None}
            prepared = await self._llm.prepare(salted, asked.params, name, priority=asked.priority)
        except RequestError as error:
            raise refused(error, names=names) from None
        try:
            self._opened[i] = await self._llm.open(prepared, arrived_s=asked.arrived_s, news=self._news)
        except RequestError as error:
            raise refused(error, names=names, submitted=True) from None
        except EngineDeadError as error:
            raise engine_dead(error) from None

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        """What came since the last turn, at most one delta for each choice. Raises `ClientLeft`."""
        while not all(opened.ended for opened in self._opened.values()):
            await self._news.wait()
            self._news.clear()
            if self.left:
                raise ClientLeft
            deltas = [
                replace(delta, index=i * self.asked.params.n + delta.index) if i else delta
                for i, opened in sorted(self._opened.items())
                for delta in opened.take()
            ]
            for delta in deltas:
                self._note(delta)
            if deltas:
                yield deltas

    def lose(self) -> None:
        """Nobody reads the answer any more."""
        self.left = True

    def close(self) -> None:
        self._watch.cancel()
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()

    def _note(self, delta: Delta) -> None:
        self.output_tokens += len(delta.token_ids)
        if delta.record is not None:
            self.records[delta.index] = delta.record
        if delta.finish_reason is not None:
            self.finish_reasons[delta.index] = delta.finish_reason
        if delta.finish_reason == "error":
            self.error = delta.error or "unknown"

    async def _watch_client(self, receive: Receive) -> None:
        with suppress(asyncio.CancelledError):
            while (await receive())["type"] != "http.disconnect":
                pass
            self.lose()
            self._news.set()


def failed() -> ApiError:
    """The engine ended a request; the cause is in the log."""
    return ApiError(500, "the engine failed on this request; the server's log says why", code="engine_error")
