"""What a client asked: `SamplingParams` and `Request`, frozen and checked when made.

Owns the validation of one request's own fields. What depends on the engine (context limit,
vocabulary, pool) is checked by `Scheduler.submit`, which knows those.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from octavo.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_BIASES = 4096


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A language that the output must belong to. `spec` is a JSON schema, a regular expression or an EBNF grammar."""

    kind: Literal["json_object", "json_schema", "regex", "ebnf"]
    spec: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when a request ends. Names and meanings follow vLLM.

    `None` means "not asked": the checkpoint's `generation_config.json` decides, then the value
    named here. All names and values are checked at construction; a wrong one raises `RequestError`.
    """

    n: int = 1
    """Independent choices to generate for one prompt."""
    temperature: float | None = None
    """0 is greedy; unset: 1.0."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0 or -1 keeps all; unset: all."""
    top_p: float | None = None
    """Keep the smallest set of likeliest tokens whose probability reaches p; unset: 1.0."""
    min_p: float | None = None
    """Drop tokens less likely than min_p times the likeliest; unset: 0."""
    repetition_penalty: float | None = None
    """Above 1 discourages tokens of the prompt and of the output; unset: 1.0."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as it is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; a single string is accepted."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the sequence, besides the model's own."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    max_tokens: int | None = None
    """Tokens to generate at most; unset: what the context still holds."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are impossible before this many."""
    seed: int | None = None
    """Makes the choice a function of (seed, choice, position) alone."""
    logprobs: int | None = None
    """Report this many likeliest tokens beside the chosen one, 0 for the chosen alone."""
    structured_outputs: StructuredOutputs | None = None
    """Tokens that would leave this language are impossible."""
    skip_special_tokens: bool = True
    detokenize: bool = True
    """False returns token ids only; stop strings then cannot be used."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "stop", _strings("stop", self.stop))
        set_(self, "stop_token_ids", tuple(_token_ids("stop_token_ids", self.stop_token_ids)))
        set_(self, "logit_bias", _bias(self.logit_bias))
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, 1e4, "use 0 for greedy, or up to about 2")
        if self.top_k is not None:
            _integer("top_k", self.top_k, -1, 2**31 - 1, "use a positive number, or 0 or -1 for all tokens")
        _number("top_p", self.top_p, 0.0, 1.0, "use a number above 0 and up to 1", open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0, "use a number from 0 to 1")
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e4, "use a number above 0", open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "use a number from -2 to 2", required=True)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "use a number from -2 to 2", required=True)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, getattr(self, name), "must be true or false")
        if self.stop and not self.detokenize:
            raise RequestError("stop", self.stop, "stop strings need detokenize=True; use stop_token_ids instead")

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Fill what was not asked from `defaults` (the checkpoint's), then from the constants."""
        final = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        filled: dict[str, Any] = {
            name: defaults.get(name, fallback) if defaults.get(name) is not None else fallback
            for name, fallback in final.items()
            if getattr(self, name) is None
        }
        return replace(self, **filled) if filled else self

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))


_ELSEWHERE: Mapping[str, tuple[Any, str]] = {
    "best_of": (None, "is not served: every choice is returned; use n"),
    "use_beam_search": (False, "is not served: every choice is sampled; use n and temperature"),
    "prompt_logprobs": (None, "is not served: log-probabilities are of the output alone; use logprobs"),
    "bad_words": (None, "is not served; use logit_bias with -100 for single token ids, or structured_outputs"),
    "guided_decoding": (None, "is spelled structured_outputs here"),
}
"""vLLM's names that people bring along: the value that changes nothing, and why no other is taken."""


def _checks_names(make: Callable[..., None]) -> Callable[..., None]:
    """A constructor that refuses names as it refuses values. Python's own `TypeError` offers no remedy."""

    @functools.wraps(make)
    def checked(self: SamplingParams, *positional: Any, **asked: Any) -> None:
        known = self.names()
        for name in [name for name in asked if name not in known]:
            if name not in _ELSEWHERE:
                raise RequestError(name, asked[name], _near(name, known))
            harmless, reason = _ELSEWHERE[name]
            if asked[name] is not harmless:
                raise RequestError(name, asked[name], reason)
            del asked[name]
        make(self, *positional, **asked)

    return checked


def _near(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"is no field; did you mean {' or '.join(near)}?" if near else f"is no field; there are {', '.join(known)}"


SamplingParams.__init__ = _checks_names(SamplingParams.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One choice of one prompt, as the core sees it: tokens in, tokens out.

    `params` has no `None` left that a default could fill (see `SamplingParams.with_defaults`)
    and carries a seed. `choice` is the index among the `n` asked for. Lower `priority` goes
    first. `true_output_tokens` is known for traces alone, where the `oracle` baselines use it.
    """

    request_id: str
    prompt_token_ids: npt.NDArray[np.int32]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    choice: int = 0
    priority: int = 0
    true_output_tokens: int | None = None
    cache_salt: str = ""
    """Blocks are shared only between requests of the same salt."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end this sequence, without repeats, in a fixed order."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*eos, *self.params.stop_token_ids)))


def validate_token_fields(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model does not have; only the engine knows its vocabulary."""
    ids = {"logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
    for name, values in ids.items():
        for token_id in values:
            if token_id >= vocab_size:
                raise RequestError(name, token_id, f"token ids run from 0 to {vocab_size - 1}")


def prompt_array(
    token_ids: Sequence[int] | npt.NDArray[Any], *, vocab_size: int | None = None
) -> npt.NDArray[np.int32]:
    """Checked prompt ids as int32. Raises `RequestError` on an empty, mistyped or out-of-range prompt."""
    if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, (np.ndarray, Sequence)):
        raise RequestError("prompt_token_ids", token_ids, "must be a list of integer token ids")
    if len(token_ids) == 0:
        raise RequestError("prompt", token_ids, "is empty; give at least one token")
    array = _int_array(token_ids)
    low, high = int(np.minimum.reduce(array)), int(np.maximum.reduce(array))
    limit = 2**31 if vocab_size is None else vocab_size
    if low < 0 or high >= limit:
        bad = low if low < 0 else high
        raise RequestError("prompt_token_ids", bad, f"token ids run from 0 to {limit - 1}")
    return array.astype(np.int32, copy=False)


def _int_array(token_ids: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
            raise RequestError("prompt_token_ids", token_ids, "must be one row of integers")
        return token_ids
    plain = set(map(type, token_ids)) == {int}  # of a million ids, in a hundredth of the time of the loop
    for value in () if plain else token_ids:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise RequestError("prompt_token_ids", value, "every token id must be an integer")
    try:
        return np.asarray(token_ids, dtype=np.int64)
    except OverflowError:
        raise RequestError("prompt_token_ids", "a huge integer", "token ids are below 2**31") from None


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(items, (list, tuple)):
        raise RequestError(name, value, "must be a string or a list of strings")
    if len(items) > MAX_STOPS:
        raise RequestError(name, value, f"at most {MAX_STOPS} stop strings")
    for item in items:
        if not isinstance(item, str) or not item:
            raise RequestError(name, item, "every stop string must be a non-empty string")
        if len(item) > MAX_STOP_CHARS:
            raise RequestError(name, item, f"a stop string has at most {MAX_STOP_CHARS} characters")
    return tuple(items)


def _token_ids(name: str, value: Any) -> list[int]:
    items = () if value is None else value
    if isinstance(items, (str, bytes)) or not isinstance(items, Sequence):
        raise RequestError(name, value, "must be a list of token ids")
    if len(items) > MAX_STOPS:
        raise RequestError(name, value, f"at most {MAX_STOPS} token ids")
    for item in items:
        _integer(name, item, 0, 2**31 - 1)
    return [int(item) for item in items]


def _bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError("logit_bias", value, "must map token ids to numbers")
    if len(value) > MAX_BIASES:
        raise RequestError("logit_bias", f"{len(value)} token ids", f"at most {MAX_BIASES}")
    result: dict[int, float] = {}
    for key, bias in value.items():
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
            key = int(key)
        _integer("logit_bias", key, 0, 2**31 - 1, "every key must be a token id")
        _number("logit_bias", bias, -100.0, 100.0, "every bias must be a number from -100 to 100", required=True)
        if int(key) in result:
            raise RequestError("logit_bias", int(key), "is there twice, spelled in two ways; give every token id once")
        result[int(key)] = float(bias)
    return result


def _integer(name: str, value: Any, low: int, high: int, remedy: str | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(name, value, remedy or "must be an integer")
    if not low <= int(value) <= high:
        raise RequestError(name, value, remedy or f"must be from {low} to {high}")


def _number(
    name: str, value: Any, low: float, high: float, remedy: str, *, open_low: bool = False, required: bool = False
) -> None:
    if value is None and not required:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(name, value, remedy)
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        raise RequestError(name, value, remedy) from None
    if not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
        raise RequestError(name, value, remedy)
