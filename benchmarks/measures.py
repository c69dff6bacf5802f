"""What one replay of a workload came to, the same for every engine, and its figures.

Times are seconds from the moment the first request was submitted. TTFT runs from a request's arrival
to its first token; TPOT is (last - first) / (n - 1), and there is none for a single token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Iteration:
    """One forward pass."""

    running: int
    """Sequences in it."""
    kv_used: float
    """Share of the KV cache that is allocated while it runs; for padded batches, of cells that hold a token."""
    tokens: int = 0
    """Positions computed."""
    waste: dict[str, float] = field(default_factory=dict)
    """Share of the KV cache that is allocated, or unusable, and holds nothing: by cause."""
    bound_by: str = ""


@dataclass(frozen=True, slots=True)
class Replay:
    engine: str
    seconds: float
    cpu_seconds: float
    """Of the whole process, all threads: with one thread, what `seconds` would be on a machine left alone."""
    outputs: list[tuple[int, ...]]
    """In the order of the jobs."""
    ttft_s: list[float]
    tpot_s: list[float]
    iterations: list[Iteration]
    policies: dict[str, str]
    """Which of the five mechanisms ran, by name."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    parts_s: dict[str, float] = field(default_factory=dict)
    """Seconds by part of a step, where the engine tells them."""

    @property
    def output_tokens(self) -> int:
        return sum(len(output) for output in self.outputs)


def figures(replay: Replay, input_tokens: int) -> dict[str, Any]:
    """One row of the table, as plain numbers."""
    made = replay.output_tokens
    row: dict[str, Any] = {
        "engine": replay.engine,
        "seconds": replay.seconds,
        "cpu_seconds": replay.cpu_seconds,
        "output_tokens_per_s": made / replay.seconds,
        "total_tokens_per_s": (made + input_tokens) / replay.seconds,
        "steps": len(replay.iterations),
        "preemptions": replay.preemptions,
        "recomputed_tokens": replay.recomputed_tokens,
    }
    for name, values in (("ttft", replay.ttft_s), ("tpot", replay.tpot_s)):
        for percent in (50, 99):
            row[f"{name}_p{percent}_s"] = float(np.percentile(values, percent)) if values else None
    used = [iteration.kv_used for iteration in replay.iterations]
    row["kv_used_mean"], row["kv_used_peak"] = (float(np.mean(used)), max(used)) if used else (None, None)
    row["batch_size_by_iteration"] = batch_sizes(replay)
    row["waste_mean"] = mean_waste(replay)
    row["limiting_resource_steps"] = dict(Counter(i.bound_by for i in replay.iterations if i.bound_by))
    row["parts_s"] = replay.parts_s
    row["policies"] = replay.policies
    return row


def batch_sizes(replay: Replay) -> dict[str, int]:
    """Iterations by the number of sequences in them, in classes that double."""
    counts: Counter[int] = Counter()
    for iteration in replay.iterations:
        counts[max(0, iteration.running - 1).bit_length()] += 1
    return {_class_name(power): counts[power] for power in sorted(counts)}


def _class_name(power: int) -> str:
    high = 1 << power
    low = high // 2 + 1
    return str(high) if low >= high else f"{low}-{high}"


def mean_waste(replay: Replay) -> dict[str, float]:
    causes = list(dict.fromkeys(cause for i in replay.iterations for cause in i.waste))
    return {cause: float(np.mean([i.waste.get(cause, 0.0) for i in replay.iterations])) for cause in causes}


def sparkline(replay: Replay, width: int = 60) -> str:
    """KV use over the iterations, each character a stretch of equal length; full height is the whole cache."""
    used = np.array([iteration.kv_used for iteration in replay.iterations])
    if not len(used):
        return ""
    pieces = np.array_split(used, min(width, len(used)))
    heights = [min(len(SPARKS) - 1, int(piece.mean() * len(SPARKS))) for piece in pieces]
    return "".join(SPARKS[height] for height in heights)


def median_replay(replays: list[Replay]) -> Replay:
    """The one whose time is in the middle (the faster of the two when their number is even)."""
    return sorted(replays, key=lambda replay: replay.seconds)[(len(replays) - 1) // 2]


def equal_outputs(one: Replay, other: Replay) -> int:
    """Requests that both answered with the same tokens."""
    return sum(a == b for a, b in zip(one.outputs, other.outputs, strict=True))
