"""Where messages come from: a person at a terminal, or a pipe. One message may span several lines.

Owns the forms of a message: a line; lines that end in a backslash and the one after them; everything
between two triple quotes, of which nothing is a command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.errors import RequestError

FENCE = '"""'
PROMPT, MORE = "> ", "| "


@dataclass(frozen=True, slots=True)
class Typed:
    text: str
    may_be_command: bool


class Lines(Protocol):
    def line(self, prompt: str) -> str | None:
        """The next line without its end; None when there are no more."""


class TerminalLines:
    """Lines of a person, with editing, history and completion of commands where there is a readline."""

    def __init__(self, commands: Sequence[str]) -> None:
        _set_up_readline(commands)

    def line(self, prompt: str) -> str | None:
        if not sys.stdout.isatty():  # stdout belongs to the answers
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        try:
            return input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return None
        except UnicodeDecodeError as error:
            raise RequestError("message", error.object, "is not UTF-8; send well-formed text") from None


class PipedLines:
    """Lines of a file or a program, in UTF-8."""

    def __init__(self) -> None:
        self._number = 0

    def line(self, prompt: str) -> str | None:
        raw = sys.stdin.buffer.readline()
        self._number += 1
        if not raw:
            return None
        try:
            return raw.decode("utf-8-sig" if self._number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise RequestError(
                "message", raw, f"line {self._number} is not UTF-8 (byte {error.start}); send well-formed text"
            ) from None


def read_message(lines: Lines) -> Typed | None:
    """The next message, or None at the end. Blank ones are left out. Raises `RequestError` for one that is broken."""
    while (line := lines.line(PROMPT)) is not None:
        begun = line.strip()
        if begun.startswith(FENCE):
            text = _fenced(lines, begun.removeprefix(FENCE))
            fenced = True
        else:
            text, fenced = _continued(lines, line), False
        if text.strip():
            return Typed(text, not fenced)
    return None


def _fenced(lines: Lines, line: str | None) -> str:
    parts: list[str] = []
    while line is not None:
        if line.rstrip().endswith(FENCE):
            parts.append(line.rstrip().removesuffix(FENCE))
            return "\n".join(parts).strip("\n")
        parts.append(line)
        line = lines.line(MORE)
    raise RequestError("message", "\n".join(parts), f"began with {FENCE} and was never ended; nothing was sent")


def _continued(lines: Lines, line: str) -> str:
    parts: list[str] = []
    more: str | None = line
    while more is not None and more.endswith("\\"):
        parts.append(more.removesuffix("\\"))
        more = lines.line(MORE)
    return "\n".join([*parts, more] if more is not None else parts)


def _set_up_readline(commands: Sequence[str]) -> None:
    try:
        import readline
    except ImportError:  # some builds of Python have none: lines can then be typed, but not edited
        return
    matching: list[str] = []

    def complete(text: str, state: int) -> Any:
        if state == 0:
            matching[:] = [name for name in commands if name.startswith(text)] if text.startswith("/") else []
        return matching[state] if state < len(matching) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    if "libedit" in (readline.__doc__ or ""):
        readline.parse_and_bind("bind ^I rl_complete")
    else:
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted text of several lines is one message
