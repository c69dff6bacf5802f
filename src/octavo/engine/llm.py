"""`LLM`: a model in this process, for scripts. Steps run in the caller's thread.

Text of whole outputs is decoded beside the steps, by a thread that lives no longer than the call; that of a stream,
or where stop strings may end it, after each step.

Invariant: whoever steps the engine, every call gets what belongs to its own prompts, so that calls may be
made while a stream is open, and from several threads: they take turns, step by step.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.config import Config
from octavo.deployment import Deployment
from octavo.engine.engine import Engine
from octavo.engine.intake import Prompt, salted
from octavo.engine.outputs import Delta, RequestOutput
from octavo.engine.start import start_engine
from octavo.errors import EngineDeadError, RequestError
from octavo.memory.pins import Pin
from octavo.scheduling.request import SamplingParams

Message = Mapping[str, Any]


@dataclass(slots=True, eq=False)
class _Reader:
    """What one call waits for: its requests that have not ended, and what came for it meanwhile.

    Whoever steps puts things in before it takes a request off `left`; the call alone takes them out.
    """

    left: set[str]
    index: dict[str, str] | None = None
    """Of a stream: each request's place among the prompts, as text."""
    deltas: deque[Delta] = field(default_factory=deque)
    """Of a stream: those not yielded yet."""
    ended: deque[str] = field(default_factory=deque)
    """Requests that have ended and are not being decoded yet."""


class LLM:
    """`LLM(model=None, **options)`: options are those of `Config`, by vLLM's names.

    Raises `ConfigError` or `ModelError` when the engine cannot be built as asked.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._set_up(start_engine(Config.from_kwargs(model=model, **options)))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Around an engine built elsewhere."""
        llm = cls.__new__(cls)
        llm._set_up(engine)
        return llm

    def _set_up(self, engine: Engine) -> None:
        self.engine: Engine = engine
        self._count = 0
        self._readers: dict[str, _Reader] = {}
        self._turn = threading.RLock()
        """Held while the engine is touched."""
        self._stepping = False
        self._forgotten: list[str] = []
        """Requests that nobody waits for any more, to be ended between two steps."""

    @property
    def deployment(self) -> Deployment | None:
        """What was decided at start, with reasons and the ledger."""
        return self.engine.deployment

    def get_tokenizer(self) -> Any:
        return self.engine.intake.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's `generation_config.json` asks for."""
        return SamplingParams().with_defaults(self.engine.intake.defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the order of the prompts.

        `use_tqdm` is taken for callers who bring it along: the library never shows a bar.
        Raises `RequestError` for the first prompt that cannot be served, before anything runs.
        A sequence that fails alone has `finish_reason == "error"`; `EngineDeadError` means that the
        engine itself failed, and all with it.
        """
        _check_brought(use_tqdm, lora_request)
        asked = _as_prompts(prompts)
        return self._run(self._add_all(asked, _one_each("sampling_params", sampling_params, len(asked)), priority))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        lora_request: None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template. No bar is shown here either."""
        _check_brought(use_tqdm, lora_request)
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: list[Any] = list(messages) if several else [messages]
        encode = self.engine.intake.encode_chat
        prompts: list[Prompt] = [encode(c, tools=tools, template=chat_template) for c in conversations]
        return self._run(self._add_all(prompts, _one_each("sampling_params", sampling_params, len(prompts)), None))

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """The same as `generate`, step by step. Leaving the iterator early aborts what is still running.

        `Delta.request_id` is the prompt's index, as text.
        """
        asked = _as_prompts(prompts)
        names = self._add_all(asked, _one_each("sampling_params", sampling_params, len(asked)), None, stream=True)
        streaming = self._streaming(names)
        weakref.finalize(streaming, self._forget, names).atexit = False  # one that is never begun has no end
        return streaming

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """One conversation, streamed."""
        return self.stream(self.engine.intake.encode_chat(messages), sampling_params)

    def reset_prefix_cache(self) -> bool:
        """Nothing computed so far is found again, whoever may be running. False where nothing is kept anyway."""
        with self._turn:
            self.engine.reset_kept()
        return self.engine.core.scheduler.policies.reuse.shares

    def pin_prefix(self, prompt: Prompt, ttl: float, cache_salt: str | None = None) -> Pin:
        """What is kept of this prompt now is given up after all else, for `ttl` seconds.

        `Pin.tokens` says how much that is: whole blocks alone, 0 where nothing is kept. Raises `RequestError` beyond
        the bound, a quarter of the positions that the device holds.
        """
        with self._turn:
            return self.engine.pin(salted(prompt, cache_salt), ttl)

    def unpin_prefix(self, name: str) -> bool:
        """End a pin by its `name`. False when there is no such pin, or no longer."""
        with self._turn:
            return self.engine.unpin(name)

    # -- inside -------------------------------------------------------------------------------

    def _streaming(self, names: list[str]) -> Iterator[Delta]:
        reader = self._readers[names[0]] if names else _Reader(set())
        index = reader.index or {}
        try:
            while reader.left or reader.deltas:
                if not reader.deltas:
                    self._step(reader)
                while reader.deltas:
                    delta = reader.deltas.popleft()
                    yield replace(delta, request_id=index[delta.request_id])
        finally:
            self._forget(names)

    def _add_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        priority: Sequence[int] | None,
        *,
        stream: bool = False,
    ) -> list[str]:
        priorities = [0] * len(prompts) if priority is None else list(priority)
        if len(priorities) != len(prompts):
            raise RequestError("priority", priority, f"give one for each of the {len(prompts)} prompts")
        names: list[str] = []
        with self._turn:
            try:
                for prompt, one, order in zip(prompts, params, priorities, strict=True):
                    name = f"llm-{self._count}"
                    self._count += 1
                    self.engine.add(name, prompt, one, priority=order, followed=stream)
                    names.append(name)
            except (RequestError, EngineDeadError):
                self._forget(names)
                raise
            reader = _Reader(set(names), {name: str(i) for i, name in enumerate(names)} if stream else None)
            self._readers.update(dict.fromkeys(names, reader))
        return names

    def _run(self, names: list[str]) -> list[RequestOutput]:
        try:
            outputs = self._outputs(self._readers[names[0]], names) if names else []
        finally:
            self._forget(names)
        if self.engine.dead is not None:
            raise EngineDeadError(f"the engine failed: {self.engine.dead}") from self.engine.cause
        return outputs

    def _outputs(self, reader: _Reader, names: list[str]) -> list[RequestOutput]:
        """Of all, in order. What has ended is decoded by a thread of its own while the others' next steps run."""
        made: dict[str, Future[RequestOutput]] = {}
        with ThreadPoolExecutor(1, "octavo-text") as decoding:
            while reader.left or reader.ended:
                self._step(reader)
                while reader.ended:
                    name = reader.ended.popleft()
                    made[name] = decoding.submit(self.engine.output, name)
        return [made[name].result() for name in names]

    def _step(self, reader: _Reader) -> None:
        """One step, unless another call has just taken the one that `reader` waited for."""
        with self._turn:
            if not reader.left or reader.deltas:
                return
            self._stepping = True
            try:
                batch = self.engine.step()
            finally:
                self._stepping = False
            for delta in batch.deltas:
                owner = self._readers.get(delta.request_id)
                if owner is not None and owner.index is not None:
                    owner.deltas.append(delta)
            for name in batch.finished:
                if name in self._readers:
                    self._readers[name].ended.append(name)
                    self._readers[name].left.discard(name)
            self._end_forgotten()

    def _forget(self, names: list[str]) -> None:
        """Nobody waits for these any more. Python may call it in the middle of a step: then they end after it."""
        self._forgotten += names
        with self._turn:
            if not self._stepping:
                self._end_forgotten()

    def _end_forgotten(self) -> None:
        while self._forgotten:
            name = self._forgotten.pop()
            self._readers.pop(name, None)
            self.engine.discard(name)


def _check_brought(use_tqdm: Any, lora_request: Any) -> None:
    """What vLLM's callers bring along and octavo has no use for."""
    if not isinstance(use_tqdm, bool):
        raise RequestError("use_tqdm", use_tqdm, "must be true or false; no bar is shown in either case")
    if lora_request is not None:
        raise RequestError("lora_request", lora_request, "adapters are not served; merge it into the weights")


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes):
        if len(prompts) and all(isinstance(item, int) and not isinstance(item, bool) for item in prompts):
            return [prompts]  # type: ignore[list-item]
        return list(prompts)  # type: ignore[arg-type]
    raise RequestError("prompts", prompts, "must be a text, a list of token ids, or a list of prompts")


def _one_each(name: str, params: Any, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or len(params) != count:
        raise RequestError(name, params, f"give one SamplingParams, or one for each of the {count} prompts")
    return list(params)
