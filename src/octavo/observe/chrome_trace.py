"""A run as a Chrome trace (chrome://tracing, Perfetto): a lane for the steps, a lane for each sequence.

A fold over events. A sequence's lane shows when it waited, computed its prompt, generated, and stood
aside; the steps' lane what each step computed and what bound it. Times are microseconds on the
engine's time line. Keeps the last `capacity` slices.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from octavo.scheduling.events import (
    Admitted,
    Event,
    Finished,
    Preempted,
    StepEnded,
    StepPlanned,
    StepTokens,
    Submitted,
)
from octavo.scheduling.leap import DecodeRun

ENGINE, SEQUENCES = 1, 2
"""The two processes of the trace: their ids."""


@dataclass(slots=True, eq=False)
class _Lane:
    name: str
    phase: str
    since_s: float
    has_tokens: bool = False


class ChromeTrace:
    def __init__(self, capacity: int = 200_000) -> None:
        self._slices: deque[dict[str, Any]] = deque(maxlen=capacity)
        self._lanes: dict[int, _Lane] = {}
        self._planned: dict[int, StepPlanned] = {}
        self._step_end_s = float("-inf")

    def observe(self, events: Iterable[Event | DecodeRun]) -> None:
        for event in events:
            if isinstance(event, StepPlanned):
                self._planned[event.number] = event
            elif isinstance(event, StepEnded):
                self._step(event)
            elif isinstance(event, StepTokens):
                self._first_tokens(event)
            elif isinstance(event, Submitted):
                self._lanes[event.sequence_id] = _Lane(event.request_id, "waiting", event.now)
            elif isinstance(event, Admitted):
                lane = self._lanes.get(event.sequence_id)
                self._turn(event.sequence_id, event.now, "recompute" if lane and lane.has_tokens else "prefill")
            elif isinstance(event, Preempted):
                self._turn(event.sequence_id, event.now, "preempted", blocks=event.blocks)
            elif isinstance(event, Finished):
                self._finish(event)
            elif isinstance(event, DecodeRun):
                self._run(event)

    def at_rest(self, now_ns: int, scheduler: object) -> None:
        """Nothing is looked at between steps: events say it all."""

    def value(self) -> dict[str, Any]:
        """The trace as JSON values; open slices are left out."""
        named = [_named("process_name", ENGINE, 0, "engine"), _named("process_name", SEQUENCES, 0, "sequences")]
        return {"traceEvents": [*named, *self._slices], "displayTimeUnit": "ms"}

    def json(self) -> str:
        return json.dumps(self.value())

    def _finish(self, event: Finished) -> None:
        self._turn(event.sequence_id, event.now, "", finish_reason=event.reason)
        self._lanes.pop(event.sequence_id, None)

    def _run(self, run: DecodeRun) -> None:
        """Steps taken at once are one slice: everybody in them generated before, and went on."""
        begin, end = float(run.moments[0]), float(run.moments[-1])
        about = {
            "number": run.first,
            "steps": run.steps,
            "sequences": len(run.rows),
            "decode_tokens": run.steps * len(run.rows),
            "waiting": run.waiting,
            "bound_by": run.resource,
        }
        self._slices.append(_slice(f"{run.steps} steps", ENGINE, 0, (max(begin, self._step_end_s), end), about))
        self._step_end_s = end
        for ended in run.ended:
            self._finish(ended)

    def _first_tokens(self, event: StepTokens) -> None:
        """Whoever got a token is generating from then on."""
        for sequence_id in event.sequence_ids.tolist():
            lane = self._lanes.get(sequence_id)
            if lane is not None and lane.phase != "decode":
                lane.has_tokens = True
                self._turn(sequence_id, event.now, "decode")

    def _turn(self, sequence_id: int, now: float, phase: str, **more: Any) -> None:
        """The lane's phase ends and the next one begins; `more` is said of the one that ends."""
        lane = self._lanes.get(sequence_id)
        if lane is None:
            return
        about = {"request": lane.name, **more}
        self._slices.append(_slice(lane.phase, SEQUENCES, sequence_id, (lane.since_s, now), about))
        lane.phase, lane.since_s = phase, now

    def _step(self, event: StepEnded) -> None:
        planned = self._planned.pop(event.number, None)
        begin = max(event.planned_s, self._step_end_s)
        self._step_end_s = event.now
        about: dict[str, Any] = {"number": event.number}
        if planned is not None:
            about |= {
                "sequences": planned.running,
                "decode_tokens": planned.decode_tokens,
                "prefill_tokens": planned.prefill_tokens,
                "waiting": planned.waiting,
                "bound_by": planned.resource,
            }
        self._slices.append(_slice("step", ENGINE, 0, (begin, event.now), about))


def _slice(name: str, process: int, lane: int, span: tuple[float, float], about: dict[str, Any]) -> dict[str, Any]:
    begin, end = span
    return {
        "name": name, "ph": "X", "pid": process, "tid": lane, "ts": begin * 1e6, "dur": max(0.0, end - begin) * 1e6,
        "args": about,
    }  # fmt: skip


def _named(kind: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": lane, "args": {"name": name}}
