"""Keeps an output inside the language it was asked for: compiles languages, and follows one output in each.

Owns the compiled grammars (a bounded cache, by specification) and the matcher of one output. It does not own
the logits, nor when a sequence ends. xgrammar compiles and matches; it is imported with the first structured
request, or when a server that is ready has time for it (`warm`).

    intake, caller's thread    check(asked)                       -> RequestError, or the grammar is compiled
    sampler, on admission      follow(asked, stop ids, outputs)   -> Follower, advanced over those outputs
    sampler, each step         Follower.allowed() -> mask; Follower.accept(token)

The end of an output is one token beyond the vocabulary, which no model can choose: where the grammar allows
it, the request's own stop ids stand for it, and nowhere else. Special tokens are never content.

Compiling is bounded: the text by `MAX_SPEC_CHARS`, a schema by `json_schema`, and the automaton by
`MAX_AUTOMATON_BYTES`, which is known before the costly part, the token masks, begins. Those of a large
automaton are made when a sequence first needs them. Following is bounded too: the time that an ambiguous
grammar takes grows with the output, so each output has processor time to spend (`RESERVE_S`, `PER_TOKEN_S`);
one that has spent it fails alone, and its neighbours have waited no longer than that.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from octavo.errors import RequestError
from octavo.memory.values import Int32
from octavo.runtime.json_schema import SchemaError, exact_schema
from octavo.scheduling.request import SamplingParams, StructuredOutputs

FIELD = "structured_outputs"
KINDS = ("json_object", "json_schema", "regex", "ebnf")
MAX_SPEC_CHARS = 64 * 1024
MAX_AUTOMATON_BYTES = 1536 * 1024
EAGER_BYTES = 64 * 1024
"""Automata up to this have all their masks made when they are compiled."""
MAX_CACHED_BYTES = 64 * 1024 * 1024
MAX_WHITESPACE = 32
"""Blanks in a row between the parts of a JSON text: a model cannot put off its answer for ever."""

Mask = npt.NDArray[np.int32]
RESERVE_S = 2.0
PER_TOKEN_S = 0.01
"""Processor time that following one output may take: so much at once, and so much more for every token."""
_MISSING = "needs the package xgrammar: install it with pip install 'octavo[structured]'"


class Follower(Protocol):
    """One output on its way through a language."""

    must_end: bool
    """At the last `allowed()`: nothing but an end was possible."""

    def allowed(self) -> Mask:
        """Bit i of the mask, from the lowest of the first word up: whether token i may come next."""
        ...

    def accept(self, token: int) -> None: ...


class Languages(Protocol):
    """What the sampler asks for."""

    def follow(self, asked: StructuredOutputs, stop_ids: tuple[int, ...], outputs: Int32) -> Follower: ...


class Grammars:
    """Languages over the tokens of one tokenizer. Any thread may call it.

    `vocab_size` is the width of the logits, which may exceed the tokenizer's.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._cached: OrderedDict[StructuredOutputs, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        self._compilers: tuple[Any, Any] | None = None
        self._wordless: frozenset[int] = frozenset()

    def check(self, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
        """Compile what `params` asks for. Raises `RequestError` if that, or the rest of `params`, cannot be served."""
        asked = params.structured_outputs
        if asked is None:
            return
        _check_form(asked)
        if not params.stop_token_ids and (params.ignore_eos or not eos_token_ids):
            raise RequestError(FIELD, asked.kind, "nothing could end the output: "
                               + ("ignore_eos is set" if params.ignore_eos else "this model has no end token")
                               + "; give stop_token_ids")  # fmt: skip
        self.compiled(asked)

    def warm(self) -> None:
        """Load what the first structured request would wait for. Where that cannot be had, the request is told."""
        with suppress(RequestError):
            self.compiled(StructuredOutputs("json_object"))

    def follow(self, asked: StructuredOutputs, stop_ids: tuple[int, ...], outputs: Int32) -> Follower:
        grammar = self.compiled(asked)
        made = _Follower(grammar, self.vocab_size, stop_ids, self._wordless)
        for token in outputs.tolist():
            made.accept(token)
        return made

    def compiled(self, asked: StructuredOutputs) -> Any:
        """The compiled grammar, from the cache where it is there."""
        with self._lock:
            found = self._cached.get(asked)
            if found is not None:
                self._cached.move_to_end(asked)
                return found
        with self._compiling:
            made = self._compile(asked)
        with self._lock:
            self._cached[asked] = made
            total = sum(grammar.memory_size_bytes for grammar in self._cached.values())
            while total > MAX_CACHED_BYTES and len(self._cached) > 1:
                total -= self._cached.popitem(last=False)[1].memory_size_bytes
        return made

    @property
    def cached(self) -> int:
        """Grammars in the cache."""
        return len(self._cached)

    def _compile(self, asked: StructuredOutputs) -> Any:
        lazy, eager = self._compilers_of()
        spec = _checked_spec(asked)
        try:
            made = _compile_with(lazy, asked.kind, spec)
            size = made.memory_size_bytes
            if size > MAX_AUTOMATON_BYTES:
                raise RequestError(FIELD, asked.spec, f"comes to {size:,} bytes once compiled, of at most "
                                                      f"{MAX_AUTOMATON_BYTES:,}; make it simpler")  # fmt: skip
            if size <= EAGER_BYTES:
                made = _compile_with(eager, asked.kind, spec)
            begins = _Follower(made, self.vocab_size).begins()
        except (RuntimeError, ValueError, UnicodeError) as error:
            raise RequestError(FIELD, asked.spec, f"cannot be compiled: {_said(error)}") from None
        if not begins:
            raise RequestError(FIELD, asked.spec, "no output belongs to it: no token could come first")
        return made

    def _compilers_of(self) -> tuple[Any, Any]:
        if self._compilers is None:
            try:
                import xgrammar
            except ImportError:
                raise RequestError(FIELD, "xgrammar", _MISSING) from None
            info, self._wordless = _tokenizer_info(xgrammar, self._tokenizer, self.vocab_size)
            lazy, eager = (
                xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False, enable_dynamic_compilation=later)
                for later in (True, False)
            )
            self._compilers = lazy, eager
        return self._compilers


class _Follower:
    """An xgrammar matcher, with the request's own ends in place of the artificial one."""

    def __init__(
        self,
        grammar: Any,
        vocab_size: int,
        stop_ids: tuple[int, ...] = (),
        wordless: frozenset[int] = frozenset(),
    ) -> None:
        from xgrammar import GrammarMatcher

        self.must_end = False
        self._matcher = GrammarMatcher(grammar)
        self._end = vocab_size
        self._stop_ids = tuple(token for token in stop_ids if token < vocab_size)
        self._silent = wordless.intersection(stop_ids)
        self._words = np.zeros((1, vocab_size // 32 + 1), np.int32)
        self._lost = False
        self._left_s = RESERVE_S

    def allowed(self) -> Mask:
        words: Mask = self._words[0]
        if self._lost:
            words.fill(0)
            return words
        began = time.thread_time()
        self._fill()
        self._spend(began)
        bits = words.view(np.uint32)
        complete = _has(bits, self._end)
        bits[self._end // 32] &= ~np.uint32(1 << self._end % 32)
        self.must_end = complete and not bits.any()
        if complete:
            for token in self._stop_ids:
                bits[token // 32] |= np.uint32(1 << token % 32)
        return words

    def accept(self, token: int) -> None:
        """A token that is not in the language makes every further one impossible: that sequence fails alone."""
        if self._lost or token in self._silent:
            return
        began = time.thread_time()
        self._left_s = min(RESERVE_S, self._left_s + PER_TOKEN_S)
        self._lost = not self._matcher.accept_token(token) and token not in self._stop_ids
        self._spend(began)

    def _spend(self, began: float) -> None:
        self._left_s -= time.thread_time() - began
        self._lost = self._lost or self._left_s < 0

    def begins(self) -> bool:
        self._fill()
        return bool(self._words.any())

    def _fill(self) -> None:
        # It answers False, and leaves the mask alone, when every token is allowed.
        self._words.fill(-1)
        self._matcher.fill_next_token_bitmask(self._words)


def _has(bits: npt.NDArray[np.uint32], token: int) -> bool:
    return bool(bits[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def _tokenizer_info(xgrammar: Any, tokenizer: Any, vocab_size: int) -> tuple[Any, frozenset[int]]:
    """The text of every token id below `vocab_size` and the artificial end after them; the ids without text."""
    try:
        vocabulary = tokenizer.get_vocab()
        # Asked for once to learn how this vocabulary spells bytes; special tokens are taken out below.
        found = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[0])
    except Exception as error:  # whatever its files hold: one request is refused, not the engine lost
        raise RequestError(FIELD, type(tokenizer).__name__, f"this model's tokenizer has no form that grammars can "
                                                            f"follow ({_said(error)})") from error  # fmt: skip
    special = set(tokenizer.all_special_ids)
    special.update(index for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special)
    pieces = [""] * (vocab_size + 1)
    for text, index in vocabulary.items():
        if index < vocab_size and index not in special:
            pieces[index] = text
    info = xgrammar.TokenizerInfo(pieces, vocab_type=found.vocab_type, vocab_size=vocab_size + 1,
                                  stop_token_ids=[vocab_size], add_prefix_space=found.add_prefix_space)  # fmt: skip
    return info, frozenset(index for index in range(vocab_size) if not pieces[index])


def _check_form(asked: StructuredOutputs) -> None:
    if not isinstance(asked, StructuredOutputs):
        raise RequestError(FIELD, asked, "must be a StructuredOutputs(kind, spec)")
    if asked.kind not in KINDS:
        raise RequestError(FIELD, asked.kind, f"use one of {', '.join(KINDS)}")
    if not isinstance(asked.spec, str):
        raise RequestError(FIELD, asked.spec, "spec must be a text; a schema is passed as JSON")
    if asked.kind == "json_object" and asked.spec:
        raise RequestError(FIELD, asked.spec, "json_object takes no spec; use json_schema")
    if asked.kind != "json_object" and not asked.spec.strip():
        raise RequestError(FIELD, asked.spec, f"{asked.kind} needs a spec")
    if len(asked.spec) > MAX_SPEC_CHARS:
        raise RequestError(FIELD, asked.spec, f"is longer than {MAX_SPEC_CHARS:,} characters")
    try:
        asked.spec.encode()
    except UnicodeEncodeError as error:
        raise RequestError(FIELD, asked.spec, f"is not valid Unicode ({error.reason})") from None


def _checked_spec(asked: StructuredOutputs) -> str:
    if asked.kind == "json_object":
        return '{"type": "object"}'
    if asked.kind != "json_schema":
        return asked.spec
    try:
        return exact_schema(asked.spec)
    except SchemaError as error:
        raise RequestError(FIELD, asked.spec, f"the schema cannot be kept: {error}") from None


def _compile_with(compiler: Any, kind: str, spec: str) -> Any:
    if kind == "regex":
        return compiler.compile_regex(spec)
    if kind == "ebnf":
        return compiler.compile_grammar(spec)
    return compiler.compile_json_schema(spec, max_whitespace_cnt=MAX_WHITESPACE)


def _said(error: BaseException) -> str:
    """The compiler's message without its time stamp and source line."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.partition("] ")[2] or text if text.startswith("[") else text
    if text.startswith("/") and ": " in text:
        text = text.partition(": ")[2]
    return text[:300]
