"""Writes what was generated to stdout, and nothing else: text as it comes, or one JSON object a prompt.

With one output its text is all there is. With several, each has a block under a line that names it;
blocks come in the order of the prompts, the first unfinished one live, those behind it kept until
their turn. A reader that goes away ends the program quietly, as it does any filter.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from octavo.engine.outputs import CompletionOutput, RequestOutput
    from octavo.scheduling.events import RequestRecord

READER_LEFT = 141
"""What a shell reports of a program ended by SIGPIPE."""
_HEADER_CHARS = 60


def write(text: str) -> None:
    """To stdout at once. A character that its encoding lacks is escaped, not fatal."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        write(text.encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError:
        # What is still in the buffer has nowhere to go; without this the interpreter complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(READER_LEFT) from None


def write_line(line: str) -> None:
    write(f"{line}\n")


class Blocks:
    """The outputs of `prompts`, `choices` each. Feed it with `add` and `end`, in any order of outputs."""

    def __init__(self, prompts: list[str], choices: int) -> None:
        self._keys = [(prompt, choice) for prompt in range(len(prompts)) for choice in range(choices)]
        self._prompts = prompts
        self._choices = choices
        self._kept: dict[tuple[int, int], list[str]] = {key: [] for key in self._keys}
        self._ended: set[tuple[int, int]] = set()
        self._at = -1
        self._line_open = False
        self._advance()

    def add(self, prompt: int, choice: int, text: str) -> None:
        if not text:
            return
        if self._keys[self._at] == (prompt, choice):
            self._write(text)
        else:
            self._kept[prompt, choice].append(text)

    def end(self, prompt: int, choice: int) -> None:
        self._ended.add((prompt, choice))
        while self._at < len(self._keys) and self._keys[self._at] in self._ended:
            self.close()
            self._advance()

    def close(self) -> None:
        """End the line that is being written, if any: the next thing printed starts on its own."""
        if self._line_open:
            self._write("\n")

    def _advance(self) -> None:
        self._at += 1
        if self._at >= len(self._keys):
            return
        key = self._keys[self._at]
        if len(self._keys) > 1:
            self._write(self._header(*key))
        self._write("".join(self._kept.pop(key)))

    def _header(self, prompt: int, choice: int) -> str:
        text = self._prompts[prompt]
        shown = text if len(text) <= _HEADER_CHARS else f"{text[:_HEADER_CHARS]}..."
        of = f" choice {choice + 1}/{self._choices}" if self._choices > 1 else ""
        gap = "\n" if self._at else ""
        return f"{gap}== {prompt + 1}/{len(self._prompts)}{of}: {shown!r}\n"

    def _write(self, text: str) -> None:
        if text:
            write(text)
            self._line_open = not text.endswith("\n")


def json_line(output: RequestOutput, prompt: str) -> str:
    """One prompt and all of its choices, with what each cost, on one line."""
    value = {
        "prompt": prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "outputs": [_choice(choice) for choice in output.outputs],
    }
    plain = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"  # JSON has escapes of its own
    return json.dumps(value, ensure_ascii=plain) + "\n"


def _choice(choice: CompletionOutput) -> dict[str, Any]:
    value: dict[str, Any] = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.logprobs is not None:
        value["cumulative_logprob"] = choice.cumulative_logprob
        value["logprobs"] = [dataclasses.asdict(item) for item in choice.logprobs]
    if choice.error is not None:
        value["error"] = choice.error
    if choice.record is not None:
        value["record"] = dataclasses.asdict(choice.record) | {
            "ttft": ttft_s(choice.record),
            "tpot": tpot_s(choice.record),
        }
    return value


def ttft_s(record: RequestRecord) -> float | None:
    """Arrival to first token; None when there was none."""
    return None if record.first_token_s is None else record.first_token_s - record.arrival_s


def tpot_s(record: RequestRecord) -> float | None:
    """(last - first) / (n - 1); None for fewer than two tokens."""
    return record.decode_time / (record.output_tokens - 1) if record.output_tokens > 1 else None
