"""The flight recorder: the last events of an engine, and on failure a dump of them with the block tables.

A dump is JSON lines: a header with the error, one line with pools and tables as they were, then the
events, oldest first. It holds ids, counts and times, and neither tokens nor texts of requests: it
can be sent to somebody. Records in whatever thread drives the core; keeps no more than `capacity`.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from octavo.errors import InvariantViolation
from octavo.memory.cache import KVCache
from octavo.memory.inspect import cached_lines, table_lines
from octavo.memory.slots import SlotState
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Event, Finished
from octavo.scheduling.scheduler import Scheduler

CAPACITY = 2_000
ON_STDERR = 40
"""Events in a dump that nobody gave a file for."""
MOST_ITEMS = 64
"""Of an array or of the lines of tables; the rest is counted."""
_LEFT_OUT = ("tokens", "logprobs")


class FlightRecorder:
    def __init__(self, path: Path | None = None, capacity: int = CAPACITY) -> None:
        self.path = path
        """Where dumps are appended; None for stderr, which gets the last few events only."""
        self._events: deque[Event] = deque(maxlen=capacity)

    def observe(self, events: Iterable[Event]) -> None:
        self._events.extend(events)

    def dump(self, core: EngineCore, error: BaseException, pending: Iterable[Event] = ()) -> None:
        """Write down what is known, before anything is cleared away. Never raises: it runs when all is lost anyway.

        `pending` are events that no observer has seen yet.
        """
        events = list(chain(self._events, pending))
        try:
            if self.path is None:
                _write(sys.stderr, core, error, events[-ON_STDERR:])
                sys.stderr.flush()
            else:
                with self.path.open("a", encoding="utf-8") as file:
                    _write(file, core, error, events)
        except Exception as trouble:  # noqa: BLE001 - a dump that fails must not hide the first error
            sys.stderr.write(f"the flight recorder could not write its dump: {trouble!r}\n")


def _write(out: TextIO, core: EngineCore, error: BaseException, events: list[Event]) -> None:
    header: dict[str, Any] = {
        "dump": "octavo",
        "time": round(time.time(), 3),
        "error": f"{type(error).__name__}: {error}",
    }
    if isinstance(error, InvariantViolation):
        header |= {"invariant": error.name, "detail": error.detail}
    header["events"] = len(events)
    lines = chain((header, {"state": state_of(core)}), map(event_fields, events))
    out.writelines(json.dumps(line) + "\n" for line in lines)


def event_fields(event: Event) -> dict[str, Any]:
    """An event as plain values, its kind first. Tokens are counted, not shown."""
    plain: dict[str, Any] = {"event": type(event).__name__}
    for field in fields(event):
        value = getattr(event, field.name)
        if field.name not in _LEFT_OUT:
            plain[field.name] = value.tolist()[:MOST_ITEMS] if isinstance(value, np.ndarray) else value
        elif isinstance(value, np.ndarray):
            plain[field.name] = len(value)
    if isinstance(event, Finished):
        plain["record"] = {field.name: getattr(event.record, field.name) for field in fields(event.record)}
    return plain


def state_of(core: EngineCore) -> dict[str, Any]:
    """Pools, running rows and block tables, short enough to read."""
    scheduler = core.scheduler
    running, cache = scheduler.running, scheduler.cache
    rows = running.order.tolist()
    lines = table_lines(cache, {row: f"sequence {int(running.sequence_id[row])} block " for row in rows})
    return {
        "running": len(rows),
        "waiting": len(scheduler.waiting),
        "steps_in_flight": scheduler.in_flight,
        "slabs": cache.pool.slabs,
        "free_slabs": cache.pool.free.count,
        "groups": _groups(cache),
        "cached": cached_lines(cache),
        "below": _below(scheduler),
        "pins": [] if scheduler.kept.pins is None else [one.name for one in scheduler.kept.pins.live()][:MOST_ITEMS],
        "rows": [
            {
                "row": row,
                "sequence_id": int(running.sequence_id[row]),
                "known": int(running.known[row]),
                "pending": int(running.pending[row]),
                "computed": int(running.computed[row]),
                "committed": int(cache.committed[row]),
                "limit": int(running.limit[row]),
                "done": bool(running.done[row]),
            }
            for row in rows[:MOST_ITEMS]
        ],
        "tables": lines[:MOST_ITEMS],
        "tables_left_out": max(0, len(lines) - MOST_ITEMS),
    }


def _below(scheduler: Scheduler) -> dict[str, Any] | None:
    """The tiers below the device, and what is on its way between them."""
    tiering = scheduler.tiering
    if tiering is None:
        return None
    groups, pool = scheduler.cache.layout.groups, tiering.host.pool
    suspended = scheduler.cache.suspensions.values()
    return {
        "host_slabs": pool.slabs,
        "host_free_slabs": pool.free.count,
        "host_groups": {
            group.name: {state.name.lower(): slots.count(state) for state in SlotState}
            for group, slots in zip(groups, pool.slots, strict=True)
        },
        "disk_blocks": None if tiering.disk is None else tiering.disk.blocks,
        "orders_under_way": len(tiering.errands),
        "loading": len(tiering.loading),
        "suspended": [{"ticket": value.ticket, "tokens": value.tokens} for value in suspended][:MOST_ITEMS],
        "reach": tiering.reach,
    }


def _groups(cache: KVCache) -> dict[str, dict[str, int]]:
    return {
        group.name: {state.name.lower(): slots.count(state) for state in SlotState}
        for group, slots in zip(cache.layout.groups, cache.pool.slots, strict=True)
    }
