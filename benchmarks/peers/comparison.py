"""What several engines' runs of one workload came to: medians, spreads, ratios, and the table. Pure.

Every figure of a row is over that engine's own runs; a ratio is of two medians of output tokens per second
in one comparison, for a single sequence of its decode speed. octavo is set beside the fastest peer of the
same kind, with reuse or without. On a machine whose memory has two speeds an engine's runs at the usual one
count, where it has such runs. Invariant: an engine that was asked for has a row, with figures or a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from octavo.cost.speeds import Speed, speed_of

OWN = "octavo"

COLUMNS = {
    "engine": -34,
    "s": 9,
    "min": 8,
    "max": 8,
    "out tok/s": 11,
    "prefill/s": 11,
    "decode/s": 10,
    "TTFT p50": 10,
    "CPU s": 8,
    "ready s": 9,
    "peak GB": 9,
    "equal": 8,
    "speed": 8,
    "GB/s": 7,
}
"""Headings and widths; a negative one is left-aligned."""


@dataclass(frozen=True, slots=True)
class Run:
    """One engine, one workload, once."""

    seconds: float
    cpu_seconds: float
    outputs: list[list[int]]
    first_s: list[float]
    last_s: list[float]
    peak_bytes: int
    """Resident memory of all the engine's processes at their highest, summed."""
    ready_s: float
    """From starting the process until it took requests."""
    memory_rates: tuple[float, ...] = ()
    """Bytes a second that memory was read at before and after it."""


@dataclass(slots=True)
class Line:
    """What is known of one engine on one workload."""

    engine: str
    base: str
    reuse: bool
    runs: list[Run] = field(default_factory=list)
    reason: str = ""
    """Why there are no more runs, or none."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The workload, as far as figures depend on it."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def single(self) -> bool:
        return len(self.inputs) == 1

    def wrong_counts(self, run: Run) -> int:
        """Requests that did not get exactly as many tokens as asked."""
        return sum(len(made) != wanted for made, wanted in zip(run.outputs, self.outputs, strict=True))


def rows(asked: Asked, lines: Sequence[Line]) -> list[dict[str, Any]]:
    """A row for every line, in their order; those with runs are compared with the first that has some."""
    done = [line for line in lines if line.runs]
    speed = speed_of([rate for line in done for run in line.runs for rate in run.memory_rates])
    made = [_row(asked, at_speed(line, speed), done[0].runs[0] if done else None) for line in lines]
    first = next((row["speed"] for row in made if row["speed"] is not None), None)
    for row in made:
        row["of_first"] = None if row["speed"] is None else row["speed"] / first
        best = _best_peer(row, made) if row["base"] == OWN and row["speed"] is not None else None
        row["best_peer"] = None if best is None else best["engine"]
        row["over_best_peer"] = None if best is None else row["speed"] / best["speed"]
    return made


def at_speed(line: Line, speed: Speed | None) -> Line:
    """With the runs between two reads of memory at its usual speed; with all of them where there are none."""
    if speed is None or speed.other is None:
        return line
    usual = [run for run in line.runs if all(speed.at(rate) for rate in run.memory_rates)]
    return replace(line, runs=usual or line.runs)


def _row(asked: Asked, line: Line, reference: Run | None) -> dict[str, Any]:
    row: dict[str, Any] = {"engine": line.engine, "base": line.base, "reuse": line.reuse, "reason": line.reason}
    names = ("seconds", "seconds_min", "seconds_max", "output_tokens_per_s", "prefill_tokens_per_s")
    names += ("decode_tokens_per_s", "ttft_p50_s", "cpu_seconds", "ready_s", "peak_bytes", "equal_outputs", "speed")
    names += ("memory_bytes_per_s",)
    row |= dict.fromkeys(names)
    row["requests"], row["runs"] = len(asked.inputs), len(line.runs)
    if not line.runs or reference is None:
        return row
    seconds = [run.seconds for run in line.runs]
    row["seconds"], row["seconds_min"], row["seconds_max"] = median(seconds), min(seconds), max(seconds)
    row["all_seconds"] = seconds
    row["output_tokens_per_s"] = sum(asked.outputs) / row["seconds"]
    row["ttft_p50_s"] = median(median(run.first_s) for run in line.runs)
    if asked.single:
        row["prefill_tokens_per_s"] = asked.inputs[0] / row["ttft_p50_s"]
        took = median(run.last_s[0] - run.first_s[0] for run in line.runs)
        row["decode_tokens_per_s"] = (asked.outputs[0] - 1) / took if took > 0 else None
    for name in ("cpu_seconds", "ready_s"):
        row[name] = median(getattr(run, name) for run in line.runs)
    row["peak_bytes"] = max(run.peak_bytes for run in line.runs)
    row["equal_outputs"] = min(equal_outputs(reference, run) for run in line.runs)
    rates = [rate for run in line.runs for rate in run.memory_rates]
    row["memory_bytes_per_s"] = median(rates) if rates else None
    row["speed"] = row["decode_tokens_per_s"] or row["output_tokens_per_s"]
    return row


def equal_outputs(one: Run, other: Run) -> int:
    """Requests that both answered with the same tokens."""
    return sum(a == b for a, b in zip(one.outputs, other.outputs, strict=True))


def _best_peer(own: dict[str, Any], made: list[dict[str, Any]]) -> dict[str, Any] | None:
    peers = [row for row in made if row["base"] != OWN and row["reuse"] == own["reuse"] and row["speed"] is not None]
    return max(peers, key=lambda row: row["speed"], default=None)


def table(made: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of one workload's table, the reasons and octavo's ratios after it."""
    text = ["".join(_cell(name, width) for name, width in COLUMNS.items())]
    for row in made:
        if row["seconds"] is None:
            text.append(f"{row['engine']:<34} {row['reason'] or 'not run'}")
            continue
        values = _values(row)
        text.append("".join(_cell(value, width) for value, width in zip(values, COLUMNS.values(), strict=True)))
        if row["reason"]:
            text.append(f"{'':<34} after {row['runs']} of its runs: {row['reason']}")
    text += [
        f"{row['engine']}: {row['over_best_peer']:.2f}x the best peer {'with' if row['reuse'] else 'without'} reuse, "
        f"{row['best_peer']}"
        for row in made
        if row["over_best_peer"] is not None
    ]
    return text


def _values(row: dict[str, Any]) -> tuple[str, ...]:
    gigabytes = None if not row["peak_bytes"] else row["peak_bytes"] / 1e9
    return (
        row["engine"],
        _number(row["seconds"], 2),
        _number(row["seconds_min"], 2),
        _number(row["seconds_max"], 2),
        _number(row["output_tokens_per_s"], 1),
        _number(row["prefill_tokens_per_s"], 0),
        _number(row["decode_tokens_per_s"], 1),
        _number(row["ttft_p50_s"], 3),
        _number(row["cpu_seconds"], 1),
        _number(row["ready_s"], 1),
        _number(gigabytes, 2),
        f"{row['equal_outputs']}/{row['requests']}",
        f"{row['of_first']:.2f}x",
        _number(None if row["memory_bytes_per_s"] is None else row["memory_bytes_per_s"] / 1e9, 1),
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _cell(value: str, width: int) -> str:
    return f"{value:<{-width}}" if width < 0 else f"{value:>{width}}"
