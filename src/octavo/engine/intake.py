"""From what a caller passes to what the core takes: a prompt and parameters become `Request`s.

Owns tokenising, the checkpoint's defaults, seeds for requests without one, and `n` choices as
independent requests. Whether a request fits is the core's question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from octavo.errors import RequestError, shorten
from octavo.memory.values import Int32
from octavo.runtime.grammar import Grammars
from octavo.scheduling.request import MAX_SEED, Request, SamplingParams, prompt_array

Prompt = str | Mapping[str, Any] | Sequence[int]
"""Text, `{"prompt": text}`, `{"prompt_token_ids": [...]}`, or a list of token ids.

`{"prompt": text, "add_special_tokens": False}` keeps the tokenizer from putting a beginning before the text.
"""

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "add_special_tokens", "cache_salt")
MAX_SALT_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    """One prompt, ready to be submitted: one core request for each of its `n` choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    requests: tuple[Request, ...]


class Intake:
    def __init__(
        self,
        tokenizer: Any | None,
        *,
        defaults: Mapping[str, Any],
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        seed: int = 0,
        grammars: Grammars | None = None,
        sanitize_control_tokens: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self._grammars = grammars
        self.sanitize_control_tokens = sanitize_control_tokens
        self.eos_token_ids = eos_token_ids
        self.defaults = defaults
        self._vocab_size = vocab_size
        self._seeds = Random(seed)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, through the model's chat template. Raises `RequestError` naming `messages`."""
        if self.tokenizer is None:
            raise RequestError(
                "messages", messages, "there is no tokenizer (skip_tokenizer_init); pass prompt_token_ids instead"
            )
        from octavo.models.tokenizer import encode_messages

        return encode_messages(
            self.tokenizer,
            messages,
            tools=tools,
            template=template,
            options=options,
            sanitize_control_tokens=self.sanitize_control_tokens,
        )

    def prepare(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> Prepared:
        """Raises `RequestError` naming the field that is wrong."""
        if params is None:
            params = SamplingParams()
        elif not isinstance(params, SamplingParams):
            raise RequestError("sampling_params", params, "must be a SamplingParams")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError("priority", priority, "must be an integer; lower goes first")
        text, token_ids = self._tokens_of(prompt)
        salt = salt_of(prompt.get("cache_salt")) if isinstance(prompt, Mapping) else ""
        array = prompt_array(token_ids, vocab_size=self._vocab_size)
        if self.tokenizer is None and params.stop:
            raise RequestError("stop", params.stop, "there is no tokenizer to find strings with; use stop_token_ids")
        self._compile(params)
        final = params.with_defaults(self.defaults)
        if final.seed is None:
            final = replace(final, seed=self._seeds.randint(0, MAX_SEED))
        requests = tuple(
            Request(
                request_id=request_id,
                prompt_token_ids=array,
                params=final,
                eos_token_ids=self.eos_token_ids,
                choice=choice,
                priority=priority,
                cache_salt=salt,
            )
            for choice in range(final.n)
        )
        return Prepared(request_id, text, tuple(array.tolist()), final, requests)

    def text_of(self, prompt: Prompt) -> tuple[Int32, str]:
        """Token ids of a prompt, and its `cache_salt`. Raises `RequestError` naming the field that is wrong."""
        token_ids = self._tokens_of(prompt)[1]
        salt = salt_of(prompt.get("cache_salt")) if isinstance(prompt, Mapping) else ""
        return prompt_array(token_ids, vocab_size=self._vocab_size), salt

    def warm(self) -> None:
        """Load now what the first structured request would wait for. Any thread may call it."""
        if self._grammars is not None:
            self._grammars.warm()

    def _compile(self, params: SamplingParams) -> None:
        """Compile the grammar here, in the caller's thread, so that no step waits for it."""
        asked = params.structured_outputs
        if asked is None:
            return
        if self._grammars is None:
            remedy = "nothing computes here that could keep to a language; leave it out"
            if self.tokenizer is None:
                remedy = "needs a tokenizer; leave out skip_tokenizer_init"
            raise RequestError("structured_outputs", asked.kind, remedy)
        self._grammars.check(params, self.eos_token_ids)

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, Any]:
        if isinstance(prompt, str):
            return prompt, self._encode(prompt)
        if isinstance(prompt, Mapping):
            unknown = [key for key in prompt if key not in _PROMPT_KEYS]
            if unknown:
                raise RequestError("prompt", unknown, f"unknown keys; a prompt has {' or '.join(_PROMPT_KEYS)}")
            added = prompt.get("add_special_tokens", True)
            if not isinstance(added, bool):
                raise RequestError("add_special_tokens", added, "must be true or false")
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), prompt["prompt_token_ids"]
            if isinstance(prompt.get("prompt"), str):
                return prompt["prompt"], self._encode(prompt["prompt"], add_special_tokens=added)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            return None, prompt
        raise RequestError(
            "prompt", shorten(prompt), 'must be a text, a list of token ids, or {"prompt_token_ids": [...]}'
        )

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(
                "prompt", text, "there is no tokenizer (skip_tokenizer_init); pass prompt_token_ids instead"
            )
        if not text:
            raise RequestError("prompt", text, "is empty; give at least one character")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "prompt", text, f"is not valid Unicode ({error.reason}); send well-formed text"
            ) from None
        from octavo.models.tokenizer import encode_prompt

        return encode_prompt(self.tokenizer, text, add_special_tokens=add_special_tokens)


def salted(prompt: Prompt, cache_salt: str | None) -> Prompt:
    """The prompt with this salt. Raises `RequestError` where it has one already."""
    if cache_salt is None:
        return prompt
    if isinstance(prompt, Mapping):
        if prompt.get("cache_salt") is not None:
            raise RequestError("cache_salt", cache_salt, "the prompt has one already; give one of them")
        return {**prompt, "cache_salt": cache_salt}
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": cache_salt}


def salt_of(given: Any) -> str:
    """A request's `cache_salt`; none is the empty one. Raises `RequestError`."""
    if given is None:
        return ""
    if not isinstance(given, str) or not given or len(given) > MAX_SALT_CHARS:
        raise RequestError("cache_salt", given, f"must be a string of 1 to {MAX_SALT_CHARS} characters")
    try:
        given.encode()
    except UnicodeEncodeError:
        raise RequestError("cache_salt", given, "is not valid Unicode; send well-formed text") from None
    return given
