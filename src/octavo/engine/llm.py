"""`LLM`: a model in this process, for scripts. Everything runs in the caller's thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo.config import Config
from octavo.deployment import Deployment
from octavo.engine.engine import Engine
from octavo.engine.intake import Prompt
from octavo.engine.outputs import Delta, RequestOutput
from octavo.errors import EngineDeadError, RequestError
from octavo.scheduling.request import SamplingParams

Message = Mapping[str, Any]


class LLM:
    """`LLM(model=None, **options)`: options are those of `Config`, by vLLM's names.

    Raises `ConfigError` or `ModelError` when the engine cannot be built as asked. One object is
    for one thread.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        from octavo.engine.build import build_engine

        self.engine: Engine = build_engine(Config.from_kwargs(model=model, **options))
        self._count = 0

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Around an engine built elsewhere."""
        llm = cls.__new__(cls)
        llm.engine = engine
        llm._count = 0
        return llm

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
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the order of the prompts.

        Raises `RequestError` for the first prompt that cannot be served, before anything runs.
        A sequence that fails alone has `finish_reason == "error"`; `EngineDeadError` means that the
        engine itself failed, and all with it.
        """
        asked = _as_prompts(prompts)
        return self._run(self._add_all(asked, _one_each("sampling_params", sampling_params, len(asked)), priority))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
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
        names = self._add_all(asked, _one_each("sampling_params", sampling_params, len(asked)), None)
        index = {name: str(i) for i, name in enumerate(names)}
        return self._streaming(names, index)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """One conversation, streamed."""
        return self.stream(self.engine.intake.encode_chat(messages), sampling_params)

    # -- inside -------------------------------------------------------------------------------

    def _streaming(self, names: list[str], index: dict[str, str]) -> Iterator[Delta]:
        left = set(names)
        try:
            while left:
                batch = self.engine.step()
                left.difference_update(batch.finished)
                for delta in batch.deltas:
                    if delta.request_id in index:
                        yield replace(delta, request_id=index[delta.request_id])
        finally:
            for name in names:
                self.engine.discard(name)

    def _add_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None], priority: Sequence[int] | None
    ) -> list[str]:
        priorities = [0] * len(prompts) if priority is None else list(priority)
        if len(priorities) != len(prompts):
            raise RequestError("priority", priority, f"give one for each of the {len(prompts)} prompts")
        names: list[str] = []
        try:
            for prompt, one, order in zip(prompts, params, priorities, strict=True):
                name = f"llm-{self._count}"
                self._count += 1
                self.engine.add(name, prompt, one, priority=order)
                names.append(name)
        except (RequestError, EngineDeadError):
            for name in names:
                self.engine.discard(name)
            raise
        return names

    def _run(self, names: list[str]) -> list[RequestOutput]:
        left = set(names)
        try:
            while left:
                left.difference_update(self.engine.step().finished)
        except BaseException:
            for name in names:
                self.engine.discard(name)
            raise
        outputs = [self.engine.take(name) for name in names]
        if self.engine.dead is not None:
            raise EngineDeadError(f"the engine failed: {self.engine.dead}") from self.engine.cause
        return outputs


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
