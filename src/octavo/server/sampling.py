"""From the fields of a request to `SamplingParams`: names, OpenAI's limits, and the format of the answer.

Owns what clients call octavo's fields, so that an error names the field that they sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.errors import RequestError, shorten
from octavo.scheduling.request import MAX_LOGPROBS, SamplingParams, StructuredOutputs
from octavo.server.errors import ApiError, refused, wrong
from octavo.server.wire import ChatBody, CompletionBody, Sampled

STRUCTURED_SERVED = False
"""Whether the sampler keeps to a format."""
_SHARED = ("n", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "top_k", "min_p",
           "repetition_penalty", "min_tokens", "ignore_eos", "include_stop_str_in_output",
           "skip_special_tokens")  # fmt: skip
_SCHEMA_FIELDS: Mapping[str, type] = {"name": str, "schema": dict, "description": str, "strict": bool}


def names_of(body: Sampled) -> Mapping[str, str]:
    """What this request calls octavo's fields, where that differs."""
    if not isinstance(body, ChatBody):
        return {"structured_outputs": "response_format", "prompt_token_ids": "prompt"}
    names = {"structured_outputs": "response_format", "logprobs": "top_logprobs", "prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


def completion_params(body: CompletionBody, *, has_tokenizer: bool) -> SamplingParams:
    if body.best_of is not None and body.best_of != body.n:
        raise wrong("best_of", body.best_of, f"must equal n={body.n}: every choice is returned; leave it out")
    if body.echo and body.logprobs is not None:
        raise wrong("echo", True, "with logprobs needs log-probabilities of the prompt, which are not served yet; "
                                  "leave out one of the two", code="unsupported_field")  # fmt: skip
    if body.max_tokens == 0 and not body.echo:
        raise wrong("max_tokens", 0, "would generate nothing; ask for at least 1, or set echo")
    return _params(body, body.max_tokens, body.logprobs, has_tokenizer=has_tokenizer)


def chat_params(body: ChatBody, *, has_tokenizer: bool) -> SamplingParams:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise wrong("max_tokens", body.max_tokens, "is the older name of max_completion_tokens; send one of the two")
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens == 0:
        raise wrong(field, 0, "would generate nothing; ask for at least 1")
    if body.top_logprobs is not None and not body.logprobs:
        raise wrong("top_logprobs", body.top_logprobs, "needs logprobs=true; set it or leave this out")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise wrong("top_logprobs", body.top_logprobs, f"must be from 0 to {MAX_LOGPROBS}")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, max_tokens, logprobs, has_tokenizer=has_tokenizer)


def _params(body: Sampled, max_tokens: int | None, logprobs: int | None, *, has_tokenizer: bool) -> SamplingParams:
    try:
        return SamplingParams(
            **{name: getattr(body, name) for name in _SHARED},
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=() if body.stop is None else body.stop,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            logit_bias=body.logit_bias or {},  # type: ignore[arg-type]  # keys are checked and made integers there
            structured_outputs=_structured(body.response_format),
            detokenize=has_tokenizer,
        )
    except RequestError as error:
        raise refused(error, names=names_of(body)) from None


def _structured(response_format: Mapping[str, Any] | None) -> StructuredOutputs | None:
    if response_format is None:
        return None
    kind = response_format.get("type")
    extra = [key for key in response_format if key not in ("type", "json_schema")]
    if extra:
        raise ApiError(400, f"response_format.{extra[0]}: is no field of it; known are type, json_schema",
                       param=f"response_format.{extra[0]}", code="unknown_field")  # fmt: skip
    if kind != "json_schema" and response_format.get("json_schema") is not None:
        raise wrong("response_format.json_schema", response_format["json_schema"], 'needs type "json_schema"')
    if kind == "text":
        return None
    if kind in ("json_object", "json_schema") and not STRUCTURED_SERVED:
        raise wrong("response_format.type", kind, "is not served yet; use text", code="unsupported_field")
    if kind == "json_object":
        return StructuredOutputs("json_object")
    if kind == "json_schema":
        return StructuredOutputs("json_schema", json.dumps(_schema(response_format.get("json_schema"))))
    raise wrong("response_format.type", kind, "use text, json_object or json_schema")


def _schema(given: Any) -> Mapping[str, Any]:
    """The schema itself. `strict` needs no case of its own: a schema is always kept to the letter."""
    at = "response_format.json_schema"
    if not isinstance(given, dict):
        raise wrong(at, given, 'must be an object with "name" and "schema"', code="invalid_type")
    for name, value in given.items():
        if value is not None and name not in _SCHEMA_FIELDS:
            path = f"{at}.{shorten(name)[1:-1]}"
            raise ApiError(400, f"{path}: is no field of it; known are {', '.join(_SCHEMA_FIELDS)}",
                           param=path, code="unknown_field")  # fmt: skip
        if value is not None and not isinstance(value, _SCHEMA_FIELDS[name]):
            kind = _SCHEMA_FIELDS[name].__name__
            raise wrong(f"{at}.{name}", value, f"must be of type {kind}", code="invalid_type")
    if given.get("schema") is None:
        raise ApiError(400, f"{at}.schema: is missing; send it", param=f"{at}.schema", code="missing_field")
    schema: Mapping[str, Any] = given["schema"]
    return schema
