"""What one request cost, as plain values: the same fields in a response, in the log and in a benchmark's row.

`record_fields` owns the names and their order; `log_fields` adds which request it was and how it
ended. `RequestLog` is the fold that writes one line of JSON for each sequence that ends. Neither
holds any text or token of the request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from octavo.scheduling.events import Event, Finished, RequestRecord

FIELDS = (
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "allocated_blocks",
    "attention_mode",
    "cache_dtype",
    "queue_time",
    "prefill_time",
    "decode_time",
    "preempted_time",
    "preemptions",
)
"""Fixed: clients and dashboards read them. Times in seconds."""


def record_fields(record: RequestRecord) -> dict[str, Any]:
    """The per-request record under its fixed names."""
    return {name: getattr(record, name) for name in FIELDS}


def log_fields(event: Finished) -> dict[str, Any]:
    """The record with the request's id, its choice, and how it ended (`error` is None unless it failed)."""
    return {
        "request_id": event.record.request_id,
        "choice": event.record.choice,
        "finish_reason": event.reason,
        "error": event.error,
        **record_fields(event.record),
    }


class RequestLog:
    """`write` gets whole lines; `clock` is the time of day, for whoever reads the log."""

    def __init__(self, write: Callable[[str], Any], *, clock: Callable[[], float] = time.time) -> None:
        self._write = write
        self._clock = clock

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                line = {"event": "request", "time": round(self._clock(), 3), **log_fields(event)}
                self._write(json.dumps(line) + "\n")
