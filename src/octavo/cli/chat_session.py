"""A chat: what was said, how answers are drawn, and what they cost so far.

Owns the order of things for one message: it is kept in the history only with an answer to it. Text of
answers goes to stdout, all else to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from octavo.cli.chat_answer import Answer, Answering
from octavo.cli.chat_history import History
from octavo.cli.chat_sampling import checked
from octavo.cli.writing import write
from octavo.errors import RequestError
from octavo.scheduling.events import RequestRecord

CONTROL = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
CONTROL |= {127: "\N{SYMBOL FOR DELETE}"} | dict.fromkeys(range(128, 160), "\N{REPLACEMENT CHARACTER}")
"""What would command the terminal is shown instead: an answer is text."""


class Session:
    def __init__(
        self, answering: Answering, console: Console, sampling: Mapping[str, Any], *, system: str | None, quiet: bool
    ) -> None:
        self.answering = answering
        self.console = console
        self.quiet = quiet
        self.history = History()
        self.sampling = dict(sampling)
        self.records: list[RequestRecord] = []
        self.last: Answer | None = None
        self.files: set[Path] = set()
        """Saved to or loaded from: these may be written over."""
        self.failures = 0
        self._is_terminal = sys.stdout.isatty()
        self._cut_explained = False
        self.set_system(system)

    def say(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def tell(self, text: str) -> None:
        """What is only for the curious."""
        if not self.quiet:
            self.say(text, "dim")

    def fail(self, error: RequestError) -> None:
        self.failures += 1
        self.say(f"error: {error}", "red")

    def set(self, name: str, value: Any) -> None:
        """Raises `RequestError`, having changed nothing. A value of None takes the default again."""
        asked = {**self.sampling, name: value}
        if value is None:
            del asked[name]
        checked(asked)
        self.sampling = asked

    def set_system(self, text: str | None) -> None:
        """Raises `RequestError` where the model's template knows no system message."""
        if text:
            trial = [{"role": "system", "content": text}, {"role": "user", "content": "?"}]
            self.answering.tokens_of(trial)
        self.history.system = text or None

    def ask(self, text: str) -> None:
        """Answer a message. Raises `RequestError` when it cannot be, and has then forgotten it."""
        kept = len(self.history.turns)
        self.history.add("user", text)
        try:
            answer = self._answer()
        except BaseException:
            del self.history.turns[kept:]
            raise
        if answer.text:
            self.history.add("assistant", answer.text)
        else:
            del self.history.turns[kept:]
            self.tell("nothing was answered, so your message is not kept")

    def retry(self) -> None:
        """Answer the last message of the user once more, in place of the answer it had."""
        before = list(self.history.turns)
        text = self.history.undo()
        kept = len(self.history.turns)
        if text is None:
            raise RequestError("retry", None, "there is no message to answer; write one")
        try:
            self.ask(text)
        except BaseException:
            self.history.turns = before
            raise
        if len(self.history.turns) == kept:
            self.history.turns = before

    def _answer(self) -> Answer:
        pieces = _Pieces(self._is_terminal)
        try:
            answer = self.answering.answer(self.history.messages, checked(self.sampling), pieces.write)
        finally:
            pieces.end()
        self.last = answer
        if answer.record is not None:
            self.records.append(answer.record)
        self.tell(self.answering.cost(answer))
        self._explain_cut(answer)
        return answer

    def _explain_cut(self, answer: Answer) -> None:
        if answer.reason != "length" or answer.record is None:
            return
        if answer.record.input_tokens + answer.record.output_tokens >= self.answering.context:
            self.tell("the context is full: /undo takes back the last exchange, /clear begins anew")
        elif not self._cut_explained:
            self._cut_explained = True
            self.tell("cut by max_tokens: /set max_tokens allows more")


class _Pieces:
    """Writes an answer piece by piece, and ends its line."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._open = False

    def write(self, text: str) -> None:
        write(text.translate(CONTROL) if self._is_terminal else text)
        self._open = not text.endswith("\n")

    def end(self) -> None:
        if self._open:
            write("\n")
            self._open = False
