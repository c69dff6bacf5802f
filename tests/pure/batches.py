"""Batches for tests: rows, files of them, and what is in an output."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo.cli.batch_rows import BadRow, Row, RowReader, read_lines, run_digest

RUN = run_digest("a run")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def row(custom_id: str, prompt: Any = (1, 2, 3), **body: Any) -> dict[str, Any]:
    body = {"prompt": list(prompt) if isinstance(prompt, tuple) else prompt, "max_tokens": 4, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETION, "body": body}


def text_of(lines: Iterable[Any]) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


def read_rows(lines: Iterable[Any], *, run: str = RUN, seed: int = 0) -> list[Row | BadRow]:
    reader = RowReader(run, seed)
    return [reader.read(line) for line in read_lines(io.BytesIO(text_of(lines)))]


def answers(path: Path) -> list[dict[str, Any]]:
    """The rows of an output, each line whole."""
    raw = path.read_bytes()
    assert raw.endswith(b"\n") or not raw
    return [json.loads(line) for line in raw.splitlines()]
