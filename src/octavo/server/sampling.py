"""From the fields of a request to `SamplingParams`: names, and OpenAI's limits.

Owns what clients call octavo's fields, so that an error names the field that they sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.errors import RequestError
from octavo.scheduling.request import MAX_LOGPROBS, SamplingParams
from octavo.server.errors import refused, wrong
from octavo.server.formats import format_of
from octavo.server.wire import ChatBody, CompletionBody, Sampled

_SHARED = ("n", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "top_k", "min_p",
           "repetition_penalty", "min_tokens", "ignore_eos", "include_stop_str_in_output",
           "skip_special_tokens")  # fmt: skip


def names_of(body: Sampled) -> Mapping[str, str]:
    """What this request calls octavo's fields, where that differs."""
    format_field = "structured_outputs" if body.response_format is None else "response_format"
    if not isinstance(body, ChatBody):
        return {"structured_outputs": format_field, "prompt_token_ids": "prompt"}
    names = {"structured_outputs": format_field, "logprobs": "top_logprobs", "prompt": "messages"}
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
            structured_outputs=format_of(body),
            detokenize=has_tokenizer,
        )
    except RequestError as error:
        raise refused(error, names=names_of(body)) from None
