"""Where prompts come from: the command line, a file, standard input. Reads; encodes nothing.

Invariant: what comes back is at least one prompt, each with at least one character of valid Unicode.
"""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.errors import RequestError

STDIN = "-"


def read_prompts(given: list[str], file: str | None) -> list[str]:
    """The prompts given, then those of `file`, one a line; blank lines are no prompts.

    Raises `RequestError` naming the prompt or the file that is wrong.
    """
    prompts = [*given, *_lines(file)] if file is not None else list(given)
    if not prompts:
        where = "give one, or name a file with --prompts-file (- for standard input)"
        raise RequestError(
            "prompt", None, where if file is None else f"{'standard input' if file == STDIN else file} holds none"
        )
    for prompt in prompts:
        if not prompt:
            raise RequestError("prompt", prompt, "is empty; give at least one character")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError("prompt", prompt, f"is not valid Unicode ({error.reason}); send UTF-8") from None
    return prompts


def _lines(file: str) -> list[str]:
    try:
        raw = sys.stdin.buffer.read() if file == STDIN else Path(file).expanduser().read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise RequestError("prompts_file", file, f"cannot be read: {reason.lower()}; name a text file") from None
    except ValueError:
        raise RequestError("prompts_file", file, "is no file name; name a text file") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            "prompts_file", file, f"is not UTF-8 text (byte {error.start}); save it as UTF-8, one prompt a line"
        ) from None
    return [line.rstrip("\r") for line in text.split("\n") if line.strip()]
