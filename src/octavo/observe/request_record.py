"""What one request cost, as plain values: the same fields in a response, in the log and in a benchmark's row.

Owns their names and their order. They hold no text and no token of the request.
"""

from __future__ import annotations

from typing import Any

from octavo.scheduling.events import RequestRecord

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
