"""Log-probabilities in the shapes of both APIs.

Owns the text by which a token is named, its bytes, and the floor that keeps every number finite.

Invariant: the bytes of a chat's entries, joined, are the UTF-8 of its content, characters split over
tokens included, except that a stop string, which the content leaves out, is still in them.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from octavo.engine.outputs import Delta
from octavo.scheduling.plan import TokenLogprobs
from octavo.scheduling.request import SamplingParams
from octavo.server.tokens import Tokens

FLOOR = -9999.0
"""Stands for minus infinity, which no JSON has."""


class TokenReport:
    """What is reported of the tokens of one choice, in order."""

    def __init__(self, tokens: Tokens, params: SamplingParams, *, offset: int = 0) -> None:
        self._tokens = tokens
        self._params = params
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def chat(self, delta: Delta) -> dict[str, Any]:
        content = [
            {
                "token": self._name(item.token_id),
                "logprob": finite(item.logprob),
                "bytes": list(self._text_bytes(item.token_id, ends=ends)),
                "top_logprobs": [
                    {"token": self._name(token_id), "logprob": finite(logprob),
                     "bytes": list(self._tokens.bytes_of(token_id))}
                    for token_id, logprob in item.top
                ],
            }
            for item, ends in _entries(delta)
        ]  # fmt: skip
        return {"content": content, "refusal": None}

    def completion(self, delta: Delta) -> dict[str, Any]:
        entries = _entries(delta)
        offsets = []
        for item, ends in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._text_bytes(item.token_id, ends=ends)))
        return {
            "text_offset": offsets,
            "token_logprobs": [finite(item.logprob) for item, _ in entries],
            "tokens": [self._name(item.token_id) for item, _ in entries],
            "top_logprobs": [self._top(item) for item, _ in entries],
        }

    def _top(self, item: TokenLogprobs) -> dict[str, float]:
        """The likeliest and the chosen one, as OpenAI reports them. Of two with one text the likelier is kept."""
        found: dict[str, float] = {}
        for token_id, logprob in (*item.top, (item.token_id, item.logprob)):
            found.setdefault(self._name(token_id), finite(logprob))
        return found

    def _text_bytes(self, token_id: int, *, ends: bool) -> bytes:
        """What the token adds to the text: nothing, where it is special or the one that ended the sequence."""
        hidden = ends and not self._params.include_stop_str_in_output
        if hidden or (self._params.skip_special_tokens and self._tokens.is_special(token_id)):
            return b""
        return self._tokens.bytes_of(token_id)

    def _name(self, token_id: int) -> str:
        raw = self._tokens.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def joined_completion(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The reports of a choice's deltas as one."""
    return {
        name: [item for part in parts for item in part[name]]
        for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    }


def joined_chat(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"content": [item for part in parts for item in part["content"]], "refusal": None}


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR


def _entries(delta: Delta) -> list[tuple[TokenLogprobs, bool]]:
    """Each entry, and whether it is of the stop token that ended the sequence."""
    by_token = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str)
    last = len(delta.logprobs) - 1
    return [(item, by_token and i == last) for i, item in enumerate(delta.logprobs)]
