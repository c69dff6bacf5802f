"""One line of JSON for each request, on stderr: what it asked, how it ended, what it cost.

Owns the format and a thread that writes, so that a log nobody reads never stalls the event loop. The
records in a line are those of the response's `usage`. Prompts are left out unless asked for.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MAX_UNWRITTEN = 10_000
"""Lines that may wait for the writer; beyond them lines are dropped, and the next one says how many."""


def _to_stderr(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()


class RequestLog:
    def __init__(self, *, enabled: bool, max_prompt_chars: int = 0, write: Callable[[str], Any] = _to_stderr) -> None:
        self._enabled = enabled
        self._max_prompt_chars = max_prompt_chars
        self._write = write
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_UNWRITTEN)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def request(self, *, prompt: str, **what: Any) -> None:
        """A line for a request that has ended."""
        if not self._enabled:
            return
        line = {"event": "request", "time": round(time.time(), 3), **what}
        if self._max_prompt_chars:
            line["prompt"] = prompt[: self._max_prompt_chars]
        self._put(line)

    def trouble(self, message: str, **what: Any) -> None:
        """A line for whoever runs the server; written whatever was asked of requests."""
        self._put({"event": "trouble", "time": round(time.time(), 3), "message": message, **what})

    def close(self) -> None:
        """Write what is left; waits a moment for that, not for ever."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(2.0)

    def _put(self, line: dict[str, Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="octavo-log", daemon=True)
            self._thread.start()
        if self._dropped:
            line["dropped_lines"] = self._dropped
        try:
            self._lines.put_nowait(json.dumps(line, ensure_ascii=True) + "\n")
        except queue.Full:
            self._dropped += 1
        else:
            self._dropped = 0

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except (OSError, ValueError):  # nobody reads the log: serving goes on
                return
