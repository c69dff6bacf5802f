"""The fields of requests, as pydantic models: OpenAI's, and vLLM's where OpenAI has none.

Owns names and types. Ranges are checked once, by `SamplingParams`. A field that is unknown is refused
by name, one that is known and not served by name and with the reason (see `wire_refused`); null means
"not given" everywhere.

Invariant: no field of a request is ignored, but for those that `wire_refused.WITHOUT_EFFECT` lists.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from octavo.errors import shorten
from octavo.server.errors import ApiError, wrong
from octavo.server.wire_refused import UNSERVED, WITHOUT_EFFECT, refuse_unserved


class Wire(BaseModel):
    """Strict types; nothing unknown. `parse` speaks of fields as the client knows them."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    @classmethod
    def parse(cls, body: Mapping[str, Any], *, at: str = "") -> Self:
        """Raises `ApiError` naming the first field that is wrong."""
        known = tuple(cls.model_fields)
        given: dict[str, Any] = {}
        for name, value in body.items():
            if value is None:
                continue
            if name in known:
                given[name] = value
            elif name in UNSERVED:
                refuse_unserved(f"{at}{name}", name, value)
            elif at or name not in WITHOUT_EFFECT:
                raise _unknown(at, name, known)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            path = at + _path(first["loc"])
            if first["type"] == "missing":
                raise ApiError(400, f"{path}: is missing; send it", param=path, code="missing_field") from None
            value = _value_at(given, first["loc"])
            raise wrong(path, value, _remedy(first["type"], first["msg"]), code="invalid_type") from None


class StreamOptions(Wire):
    include_usage: bool = False


class Sampled(Wire):
    """What both completions and chats have."""

    model: str | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: Any = None
    """A string or a list of strings, as `SamplingParams` checks it."""
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    return_token_ids: bool = False
    structured_outputs: dict[str, Any] | None = None

    def include_usage(self) -> bool:
        """Whether a stream ends with its usage. Raises `ApiError` for options that make no sense."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise wrong("stream_options", self.stream_options, "needs stream=true; set it or leave these out")
        return StreamOptions.parse(self.stream_options, at="stream_options.").include_usage


class CompletionBody(Sampled):
    prompt: Any
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True


class ChatBody(Sampled):
    messages: Any
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Wire):
    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool = True
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ResetBody(Wire):
    """Nothing to say: all that is kept goes."""


class PinBody(Wire):
    model: str | None = None
    prompt: Any = None
    messages: Any = None
    ttl: float
    """Seconds."""
    cache_salt: str | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class UnpinBody(Wire):
    id: str


class DetokenizeBody(Wire):
    model: str | None = None
    tokens: list[int]


def _unknown(at: str, name: str, known: tuple[str, ...]) -> ApiError:
    path = at + shorten(name)[1:-1]  # printable, whatever the key is made of
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known) or 'none'}"
    return ApiError(400, f"{path}: is no field of this request; {hint}", param=path, code="unknown_field")


def _path(parts: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{shorten(part)[1:-1]}" for part in parts)
    return text.removeprefix(".")


def _value_at(given: Mapping[str, Any], path: tuple[int | str, ...]) -> Any:
    value: Any = given
    for part in path:
        value = value[part]
    return value


_REMEDIES = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
}


def _remedy(kind: str, message: str) -> str:
    return _REMEDIES.get(kind) or message[:1].lower() + message[1:]
