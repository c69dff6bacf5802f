"""What clients get back: choices as they grow, whole answers, usage. Both APIs' shapes.

Owns the JSON of answers, field by field. Neither reads the engine nor writes to a socket.

Invariant: each choice ends in exactly one `finish_reason`, and the pieces of its text, joined, are
the text that an answer without streaming has.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo import __version__
from octavo.engine.outputs import Delta
from octavo.observe.request_record import record_fields
from octavo.scheduling.events import RequestRecord
from octavo.scheduling.request import SamplingParams
from octavo.server.logprobs import TokenReport, joined_chat, joined_completion
from octavo.server.tokens import Tokens


@dataclass(slots=True)
class _Choice:
    report: TokenReport
    begun: bool = False
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Answer(ABC):
    """One answer, of one or several choices. `chunks` for a stream, `add` and `whole` for an answer in one piece."""

    object_name: str
    chunk_name: str

    def __init__(
        self,
        request_id: str,
        model: str,
        tokens: Tokens,
        params: SamplingParams,
        prompts: Sequence[Sequence[int]],
        *,
        echoes: Sequence[str] = (),
        with_token_ids: bool = False,
    ) -> None:
        self._head = {"id": request_id, "created": int(time.time()), "model": model,
                      "system_fingerprint": f"octavo-{__version__}"}  # fmt: skip
        self._params = params
        self._prompts = prompts
        self._echoes = echoes
        self._with_token_ids = with_token_ids or not tokens.has_tokenizer
        self._choices = [
            _Choice(TokenReport(tokens, params, offset=len(self._echo(i)))) for i in range(len(prompts) * params.n)
        ]

    @abstractmethod
    def _report(self, choice: _Choice, delta: Delta) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_body(self, text: str, *, first: bool) -> dict[str, Any]: ...

    @abstractmethod
    def _whole_body(self, choice: _Choice) -> dict[str, Any]: ...

    # -- streaming ------------------------------------------------------------------------------

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """The chunk for what one choice got; None where there is nothing to tell."""
        choice = self._choices[delta.index]
        first = not choice.begun
        logprobs = self._report(choice, delta) if delta.logprobs else None
        text = (self._echo(delta.index) if first else "") + delta.text
        with_ids = self._with_token_ids and bool(delta.token_ids)
        if not (text or logprobs or delta.finish_reason or with_ids):
            return None
        choice.begun = True
        body: dict[str, Any] = {"index": delta.index, **self._chunk_body(text, first=first), "logprobs": logprobs,
                                "finish_reason": delta.finish_reason}  # fmt: skip
        if delta.finish_reason is not None:
            body["stop_reason"] = delta.stop_reason
        if self._with_token_ids:
            if first:
                body["prompt_token_ids"] = list(self._prompt(delta.index))
            body["token_ids"] = list(delta.token_ids)
        return self._chunk([body])

    def usage_chunk(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_name, "choices": choices}

    # -- in one piece ---------------------------------------------------------------------------

    def add(self, delta: Delta) -> None:
        choice = self._choices[delta.index]
        if delta.logprobs:
            choice.logprobs.append(self._report(choice, delta))
        choice.text.append(delta.text)
        choice.token_ids.extend(delta.token_ids)
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def whole(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self._choices):
            choice.text.insert(0, self._echo(index))
            body = {"index": index, **self._whole_body(choice), "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason}  # fmt: skip
            if self._with_token_ids:
                body["prompt_token_ids"] = list(self._prompt(index))
                body["token_ids"] = choice.token_ids
            choices.append(body)
        return {**self._head, "object": self.object_name, "choices": choices, "usage": usage}

    def _prompt(self, index: int) -> Sequence[int]:
        return self._prompts[index // self._params.n]

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._params.n] if self._echoes else ""


class CompletionAnswer(Answer):
    object_name = chunk_name = "text_completion"

    def _report(self, choice: _Choice, delta: Delta) -> dict[str, Any]:
        return choice.report.completion(delta)

    def _chunk_body(self, text: str, *, first: bool) -> dict[str, Any]:
        return {"text": text}

    def _whole_body(self, choice: _Choice) -> dict[str, Any]:
        wanted = self._params.logprobs is not None
        return {"text": "".join(choice.text), "logprobs": joined_completion(choice.logprobs) if wanted else None}


class ChatAnswer(Answer):
    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def _report(self, choice: _Choice, delta: Delta) -> dict[str, Any]:
        return choice.report.chat(delta)

    def _chunk_body(self, text: str, *, first: bool) -> dict[str, Any]:
        if first:
            return {"delta": {"role": "assistant", "content": text}}
        return {"delta": {"content": text} if text else {}}

    def _whole_body(self, choice: _Choice) -> dict[str, Any]:
        wanted = self._params.logprobs is not None
        return {
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": joined_chat(choice.logprobs) if wanted else None,
        }


def usage_of(
    prompts: Sequence[Sequence[int]], choices: int, output_tokens: int, records: Mapping[int, RequestRecord]
) -> dict[str, Any]:
    """OpenAI's usage, and in `octavo` the record of each choice. A prompt counts once, however many choices it has.

    Its cached tokens are those that none of its choices computed.
    """
    input_tokens = sum(len(prompt) for prompt in prompts)
    found: dict[int, list[int]] = {}
    for index, record in records.items():
        found.setdefault(index // choices, []).append(sum(record.cached_tokens.values()))
    cached = sum(min(tokens) for tokens in found.values())
    return {
        "prompt_tokens": input_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": input_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "octavo": records_of(records),
    }


def records_of(records: Mapping[int, RequestRecord]) -> list[dict[str, Any]]:
    """The records, by choice, times to the microsecond."""
    return [
        {"index": index, **{name: _rounded(value) for name, value in record_fields(record).items()}}
        for index, record in sorted(records.items())
    ]


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
