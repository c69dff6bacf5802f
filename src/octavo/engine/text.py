"""Token ids into text, for one stream: incremental decoding, and the places where text must stop.

Owns `Detokenizer` (ids to text, never half a character), `StopChecker` (stop strings, found across tokens,
never sent in part) and `TextStream`, which joins them with stop tokens. It knows nothing of asyncio, torch
or the scheduler: it takes any tokenizer that decodes a list of ids.

Invariant: the pieces of a stream, joined, are what decoding the whole output after its prompt gives,
whatever the chunks in which tokens come; the work per token does not grow with the text.

    window   [ context | emitted ............ | pending ]      the last few ids of the sequence
    decoded  |<-------- done --------->|<-- held -->|          `held`: at most 3 U+FFFD, not sent yet
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from octavo.scheduling.request import Request

BROKEN = "\N{REPLACEMENT CHARACTER}"
MAX_HELD = 3
"""An unfinished UTF-8 character has at most 3 bytes; a byte-fallback tokenizer shows each as one U+FFFD."""
CONTEXT_TOKENS = 6
"""Ids that stay in front of new ones: they decide about leading spaces."""
WINDOW_TOKENS = 16
"""Beyond this many ids the window is cut, at the next boundary of a character."""
MAX_WINDOW_TOKENS = 48
"""Beyond this many it is cut anyway: bytes that never become characters must not stall the stream."""


class Decoder(Protocol):
    """What this module asks of a tokenizer: `tokenizers.Tokenizer` has it, and so do fakes of a few lines."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class _PlainDecode:
    """A Python tokenizer of Transformers, kept from "cleaning up" spaces: that rewrites text already sent."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)


def decoder_of(tokenizer: Any) -> Decoder:
    """The plain decoder of a tokenizer: Transformers' (fast or Python), `tokenizers`' or any `Decoder`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "decode"):
        decoder: Decoder = backend
        return decoder
    if hasattr(tokenizer, "clean_up_tokenization_spaces"):
        return _PlainDecode(tokenizer)
    plain: Decoder = tokenizer
    return plain


class Detokenizer:
    """Turns the output tokens of one sequence into pieces of text that never split a character.

    Bytes that are not valid UTF-8 come out as U+FFFD, at most `MAX_HELD` characters late. With byte-fallback
    tokenizers alone, how many U+FFFD stand for a run of invalid bytes can differ from decoding all at once,
    because there one bad byte also spoils its good neighbours, which a stream has sent by then (and a U+FFFD
    that the model spells out in bytes counts as one).
    """

    def __init__(
        self, tokenizer: Any, prompt_ids: Sequence[int] | npt.NDArray[np.int32], *, skip_special_tokens: bool
    ) -> None:
        self._decoder = decoder_of(tokenizer)
        self._skip = skip_special_tokens
        self._window, self._done = self._context([int(i) for i in prompt_ids[-CONTEXT_TOKENS:]], prompt_ids)
        self._clean = len(self._window)
        self._cut = 0 if self._done.endswith(BROKEN) else self._clean

    def _context(self, window: list[int], prompt_ids: Sequence[int] | npt.NDArray[np.int32]) -> tuple[list[int], str]:
        """The end of the prompt and its text: some text, and not from the middle of a character, where it can be."""
        text = self._decoder.decode(window, skip_special_tokens=self._skip)
        back = 0  # a character may begin this many ids further back
        while len(window) < len(prompt_ids) and (not text or (text.startswith(BROKEN) and back < MAX_HELD)):
            count = len(window) + 1 if text else 4 * len(window)  # no text: special tokens only, look far
            back = back + 1 if text else 0
            window = [int(i) for i in prompt_ids[-count:]]
            text = self._decoder.decode(window, skip_special_tokens=self._skip)
        return window, text

    def push(self, token_id: int) -> str:
        """The text that this token completes; often one word, or nothing yet."""
        self._window.append(int(token_id))
        text = self._decode()
        if not text.endswith(BROKEN):
            return self._settle(text)
        if not self._fits(text):
            # The context has become part of a run of bytes that is not whole, so it looks broken too: go on
            # without it. It ended with a whole character, and bytes need no context for their spaces.
            del self._window[: self._clean]
            self._clean, self._cut, self._done = 0, 0, ""
            text = self._decode()
        sure = text[: len(text) - _held(text)]
        piece = sure[len(self._done) :]
        if piece:
            self._done = sure
        return piece + self._cut_anyway(text)

    def flush(self) -> str:
        """What was held back: the sequence has ended, so an unfinished character stays unfinished."""
        text = self._decode()
        piece, self._done = self._fresh(text), text
        self._clean = len(self._window)
        return piece

    def _settle(self, text: str) -> str:
        """Send all of `text`: it ends with a whole character."""
        if text and text == self._done:
            self._window.pop()  # a token without text (special, or unknown to the tokenizer) is no context
        piece, self._done = self._fresh(text), text
        self._clean = len(self._window)
        if 0 < self._cut < self._clean and self._clean > WINDOW_TOKENS:
            del self._window[: self._cut]
            self._clean, self._cut = len(self._window), 0
            self._done = self._decode()
        elif self._cut == 0 and self._clean > CONTEXT_TOKENS:
            self._cut = self._clean
        return piece

    def _cut_anyway(self, text: str) -> str:
        """Shorten a window in which no token ended with a whole character. UTF-8 finds its feet again by itself."""
        if len(self._window) < MAX_WINDOW_TOKENS:
            return ""
        late = text[len(self._done) :]
        del self._window[:-WINDOW_TOKENS]
        self._clean, self._cut = len(self._window), 0
        shorter = self._decode()
        if _held(shorter) == len(late):
            self._done = shorter[: len(shorter) - len(late)]
            return ""
        self._done = shorter
        return late

    def _fits(self, text: str) -> bool:
        """Whether `text` goes on from what was done, or departs from it in unfinished characters alone."""
        if text.startswith(self._done):
            return True
        pairs = enumerate(zip(self._done, text, strict=False))
        agreed = next((i for i, (old, new) in pairs if old != new), len(text))
        if self._done[agreed:].strip(BROKEN):
            return False
        self._done = self._done[:agreed]
        return True

    def _fresh(self, text: str) -> str:
        """What `text` adds to what was done; by itself, where the context has changed its looks."""
        return text[len(self._done) :] if self._fits(text) else self._decode(self._clean)

    def _decode(self, start: int = 0) -> str:
        return self._decoder.decode(self._window[start:], skip_special_tokens=self._skip)


def _held(text: str) -> int:
    """How many characters at the end of `text` may still turn into something else."""
    return min(len(text) - len(text.rstrip(BROKEN)), MAX_HELD)


class StopChecker:
    """Finds the first of several stop strings in a stream of text, and holds back what may become one.

    The first is the one that is complete first; of those complete at the same character, the longest.
    So the answer does not depend on how the text was cut into pieces.
    """

    def __init__(self, stop: tuple[str, ...], include: bool) -> None:
        self.matched: str | None = None
        self._include = include
        self._stops = [(text, _borders(text)) for text in dict.fromkeys(stop)]
        self._states = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Text that is safe to send. After a match (see `matched`) there is none.

        Where `may_stop` is false, a stop string that this text completes is let through.
        """
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        text, start = self._held + text, len(self._held)
        for position in range(start, len(text)):
            found = self._advance(text[position])
            if found is not None and may_stop:
                self.matched, self._held = found, ""
                end = position + 1
                return text[: end if self._include else end - len(found)]
        keep = max(self._states)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back: no more text comes, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """One more character (Knuth, Morris and Pratt): the longest stop string that it completes, if any."""
        found: str | None = None
        for i, (stop, borders) in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != char:
                state = borders[state]
            state += stop[state] == char
            if state == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                state = borders[state]
            self._states[i] = state
        return found


def _borders(text: str) -> list[int]:
    """For each n, the longest proper prefix of `text[:n]` that is also its suffix."""
    borders = [0] * (len(text) + 1)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length]
        length += text[i] == text[length]
        borders[i + 1] = length
    return borders


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a stream. Where it ends: `stopped` is the stop string found, `stop_token` the stop token.

    `token_index` says which of the tokens just pushed ended it; those after it were not looked at.
    """

    text: str
    stopped: str | None = None
    stop_token: int | None = None
    token_index: int | None = None


class TextStream:
    """The text of one request, made only where its `params.detokenize` is set.

    A stop string or token counts once more than `min_tokens` tokens are there, as in vLLM. The text of a
    stop token is left out, unless `include_stop_str_in_output`.
    """

    def __init__(self, tokenizer: Any, request: Request) -> None:
        params = request.params
        self._detokenizer = Detokenizer(
            tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._checker = StopChecker(params.stop, params.include_stop_str_in_output)
        self._include = params.include_stop_str_in_output
        self._stop_ids = frozenset(request.stop_ids)
        self._min_tokens = params.min_tokens
        self._tokens = 0
        self._ended = False

    @property
    def stopped(self) -> str | None:
        """The stop string that was found, `finish` included."""
        return self._checker.matched

    @property
    def tokens(self) -> int:
        """Tokens looked at so far, the one that ended the stream included."""
        return self._tokens

    def push(self, tokens: Sequence[int]) -> TextDelta:
        """The text that these tokens add. Once the stream has ended, nothing more is added."""
        pieces: list[str] = []
        for index, token in enumerate(tokens):
            if self._ended:
                break
            self._tokens += 1
            may_stop = self._tokens > self._min_tokens
            ends = may_stop and token in self._stop_ids
            if not ends or self._include:
                pieces.append(self._checker.push(self._detokenizer.push(token), may_stop=may_stop))
            if self._checker.matched is not None:
                self._ended = True
                return TextDelta("".join(pieces), stopped=self._checker.matched, token_index=index)
            if ends:
                self._ended = True
                return TextDelta("".join(pieces), stop_token=int(token), token_index=index)
        return TextDelta("".join(pieces))

    def finish(self) -> str:
        """The text still held back. Call it once, after the last token, however the sequence ended."""
        self._ended = True
        if self._checker.matched is not None:
            return ""
        may_stop = self._tokens > self._min_tokens
        text = self._checker.push(self._detokenizer.flush(), may_stop=may_stop)
        return text + self._checker.flush()
