"""`AsyncLLM`: the engine for asyncio. Many coroutines, one engine thread, one event loop.

    coroutine -> prepare (tokens) -> EngineThread.post -> ... -> events -> Streams.fold -> mailbox

Events cross into the loop in one call a step. A reader that is slow finds what came meanwhile
merged in its mailbox; it stalls nobody. Leaving an iterator aborts its request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

from octavo.config import Config
from octavo.deployment import Deployment
from octavo.engine.engine import Engine, Observer, seconds_of
from octavo.engine.intake import Prepared, Prompt, salted
from octavo.engine.outputs import Delta, RequestOutput
from octavo.engine.start import start_engine
from octavo.engine.streams import Streams
from octavo.errors import EngineDeadError, OctavoError, RequestError
from octavo.scheduling.events import Event
from octavo.scheduling.request import SamplingParams
from octavo.server.engine_thread import (
    Answered,
    Command,
    End,
    EngineThread,
    ListPins,
    LivePin,
    PinCommand,
    PinPrefix,
    PinReply,
    Reply,
    Reset,
    Submit,
    UnpinPrefix,
)
from octavo.server.host import Host
from octavo.server.mailbox import Mailbox

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Opened:
    """A request that the engine has accepted. Whoever opened it closes it, whatever happens."""

    def __init__(self, llm: AsyncLLM, prepared: Prepared, mailbox: Mailbox) -> None:
        self.request_id = prepared.request_id
        self.prompt_token_ids = prepared.prompt_token_ids
        self._llm = llm
        self._mailbox = mailbox

    @property
    def ended(self) -> bool:
        """Every choice has ended, and its last delta was taken."""
        return self._mailbox.ended

    def take(self) -> list[Delta]:
        """What has come since the last call, at most one delta for each choice. Never waits."""
        return self._mailbox.take()

    async def read(self) -> list[Delta]:
        """The same, waiting until there is something; empty once every choice has ended."""
        while not self.ended:
            await self._mailbox.news.wait()
            self._mailbox.news.clear()
            deltas = self.take()
            if deltas:
                return deltas
        return []

    def output(self) -> RequestOutput:
        """Everything so far."""
        return self._llm._streams.output(self.request_id)

    def close(self) -> None:
        """Forget the request; what has not ended is aborted, which frees its blocks on the next step."""
        self._llm._leave(self.request_id)


class AsyncLLM:
    """Around an `Engine`, whose core moves to a thread. Use it from one event loop.

        async with AsyncLLM.start(model=..., **options) as llm:
            async for delta in llm.stream("Once upon a time", SamplingParams(max_tokens=16)): ...

    Options are those of `Config`. Raises `ConfigError` or `ModelError` at start, `RequestError` for
    a request that cannot be served, `EngineDeadError` once the engine has failed.
    """

    def __init__(self, engine: Engine, host: Host | None = None) -> None:
        self.engine = engine
        self.observers: list[Observer] = []
        """Called in the event loop with the events of every step."""
        self._streams = Streams(engine.intake.tokenizer)
        self._mailboxes: dict[str, Mailbox] = {}
        self._opening: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = EngineThread(engine.core, self._deliver, recorder=engine.recorder, host=host)
        self._count = 0

    @classmethod
    def start(cls, model: str | None = None, **options: Any) -> AsyncLLM:
        """Load a model and build its engine. Blocks while loading."""
        config, host = Config.from_kwargs(model=model, **options), Host()
        return cls(start_engine(config, host=host), host)

    @property
    def deployment(self) -> Deployment | None:
        return self.engine.deployment

    @property
    def is_alive(self) -> bool:
        return self._thread.alive

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Everything so far, each time there is more; the last one is finished."""
        opened = await self.submit(prompt, sampling_params, request_id, priority=priority)
        try:
            while await opened.read():
                yield opened.output()
        finally:
            opened.close()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncIterator[Delta]:
        """What each step added. Each choice ends with one delta that has a `finish_reason`."""
        opened = await self.submit(prompt, sampling_params, request_id, priority=priority)
        try:
            while deltas := await opened.read():
                for delta in deltas:
                    yield delta
        finally:
            opened.close()

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> Opened:
        """Open a request and return as soon as the engine has accepted it."""
        return await self.open(await self.prepare(prompt, sampling_params, request_id, priority=priority))

    async def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> Prepared:
        """Check and encode a request, in a thread where a grammar may have to be compiled. Raises `RequestError`."""
        prepare = functools.partial(
            self.engine.intake.prepare, self._name(request_id), prompt, sampling_params, priority=priority
        )
        if sampling_params is not None and sampling_params.structured_outputs is not None:
            return await asyncio.to_thread(prepare)
        return prepare()

    async def open(
        self, prepared: Prepared, *, arrived_s: float | None = None, news: asyncio.Event | None = None
    ) -> Opened:
        """Submit a prepared request; return as soon as the engine has accepted it.

        `news` is set whenever there is something to take. `arrived_s` is when the request reached the
        caller, on the engine's clock, where that is not now. Raises `RequestError` if it can never be served.
        """
        self._start()
        name = prepared.request_id
        if name in self._streams or name in self._opening:
            raise RequestError("request_id", name, "is in use; give every open request its own")
        mailbox = Mailbox(len(prepared.requests), news or asyncio.Event())
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opening.add(name)
        reply: Reply = lambda answer: self._call(self._opened, prepared, mailbox, accepted, answer)  # noqa: E731
        self._post(Submit(prepared, reply, arrived_s))
        try:
            await accepted
        except asyncio.CancelledError:
            if name in self._streams:  # accepted, and left before the answer was read
                self._leave(name)
            raise
        return Opened(self, prepared, mailbox)

    async def abort(self, request_id: str) -> bool:
        """End a request; its reader gets `finish_reason == "abort"`. False when it is not open."""
        sequence_ids = self._streams.sequence_ids(request_id)
        if sequence_ids:
            self._post(End(sequence_ids))
        return bool(sequence_ids)

    async def reset_prefix_cache(self) -> list[int]:
        """Nothing computed so far is found again. Returns the blocks of each group that it freed, between two steps."""
        self._start()
        done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._post(Reset(lambda answer: self._call(_resolve, done, answer)))
        return await done

    async def pin_prefix(self, prompt: Prompt, ttl: float, cache_salt: str | None = None) -> LivePin:
        """What is kept of this prompt now is given up after all else, for `ttl` seconds. Raises `RequestError`."""
        token_ids, salt = self.engine.intake.text_of(salted(prompt, cache_salt))
        seconds = seconds_of("ttl", ttl)
        return (await self._ask_pins(lambda reply: PinPrefix(token_ids, salt, seconds, reply)))[0]

    async def unpin_prefix(self, name: str, *, owner: str = "") -> bool:
        """End a pin. False when there is none of this name whose salt begins with `owner`."""
        return bool(await self._ask_pins(lambda reply: UnpinPrefix(name, owner, reply)))

    async def live_pins(self, *, owner: str = "") -> list[LivePin]:
        """Those whose salt begins with `owner`, in the order in which they were made."""
        return await self._ask_pins(lambda reply: ListPins(owner, reply))

    async def _ask_pins(self, command: Callable[[PinReply], PinCommand]) -> list[LivePin]:
        self._start()
        done: asyncio.Future[list[LivePin]] = asyncio.get_running_loop().create_future()
        self._post(command(lambda answer: self._call(_resolve, done, answer)))
        return await done

    async def shutdown(self, *, drain: bool = False) -> None:
        """Stop the engine: after what is running when `drain`, else every open request ends with an error."""
        await asyncio.to_thread(self._thread.close, drain=drain)
        await asyncio.sleep(0)  # let the last events reach their mailboxes

    # -- inside, in the event loop --------------------------------------------------------------

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._thread.start()
        elif self._loop is not loop:
            raise OctavoError("an AsyncLLM belongs to the event loop in which it was first used")

    def _name(self, request_id: str | None) -> str:
        self._count += 1
        return f"request-{self._count}" if request_id is None else request_id

    def _opened(
        self, prepared: Prepared, mailbox: Mailbox, accepted: asyncio.Future[None], answer: Answered | OctavoError
    ) -> None:
        """The engine has answered a submission. Runs before the first event of its sequences is folded."""
        self._opening.discard(prepared.request_id)
        if isinstance(answer, OctavoError):
            if not accepted.done():
                accepted.set_exception(answer)
        elif accepted.done():  # whoever asked has left
            self._post(End(tuple(answer)))
        else:
            self._streams.open(prepared, answer)
            self._mailboxes[prepared.request_id] = mailbox
            accepted.set_result(None)

    def _leave(self, name: str) -> None:
        """The reader has left, at the end or early."""
        if not self._streams.output(name).finished and self._thread.dead is None:
            self._post(End(self._streams.sequence_ids(name)))
        self._streams.close(name)
        del self._mailboxes[name]

    def _take(self, events: list[Event]) -> None:
        batch = self._streams.fold(events)
        if batch.stopped and self._thread.dead is None:
            self._post(End(batch.stopped, "stop"))
        for delta in batch.deltas:
            self._mailboxes[delta.request_id].put(delta)
        for observer in self.observers:
            try:
                observer(events)
            except Exception:  # noqa: BLE001 - whatever it is, readers come first
                _log.exception("an observer failed; readers have got what came")

    def _post(self, command: Command) -> None:
        try:
            self._thread.post(command)
        except EngineDeadError:
            # What is to be ended has ended with the engine; only a newcomer needs to know.
            if isinstance(command, Submit):
                self._opening.discard(command.prepared.request_id)
            if not isinstance(command, End):
                raise

    # -- inside, in the engine thread -----------------------------------------------------------

    def _deliver(self, events: list[Event]) -> None:
        if events:
            self._call(self._take, events)

    def _call(self, function: Any, *arguments: Any) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has been closed: nobody is left to be told
                self._loop.call_soon_threadsafe(function, *arguments)


def _resolve(done: asyncio.Future[list[T]], answer: Sequence[T] | OctavoError) -> None:
    if done.done():  # whoever asked has left
        return
    if isinstance(answer, OctavoError):
        done.set_exception(answer)
    else:
        done.set_result(list(answer))


def chat_prompt(llm: AsyncLLM, messages: Sequence[Mapping[str, Any]]) -> Prompt:
    """Token ids of a conversation, through the model's chat template."""
    return llm.engine.intake.encode_chat(messages)
