"""The line at the end of a run: what it cost, from the records of its requests.

Owns `Ended`, how one output ended, and `RunWatch`, the fold over events that knows the pool's peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from octavo.cli.writing import tpot_s, ttft_s
from octavo.engine.engine import Engine
from octavo.scheduling.events import Event, FinishReason, RequestRecord, StepPlanned


@dataclass(frozen=True, slots=True)
class Ended:
    prompt: int
    choice: int
    reason: FinishReason | None
    record: RequestRecord | None
    error: str | None


class RunWatch:
    """Follows an engine's events from now on."""

    def __init__(self, engine: Engine) -> None:
        pool = engine.core.scheduler.cache.pool
        groups = engine.core.scheduler.cache.layout.groups
        self._slabs = pool.slabs
        self._blocks_per_slab = groups[0].blocks_per_slab if len(groups) == 1 else 1
        self._what = "blocks" if len(groups) == 1 else "slabs"
        self._least_free = pool.slabs
        engine.observers.append(self._fold)

    @property
    def peak(self) -> str:
        used = self._slabs - self._least_free
        return f"peak {used * self._blocks_per_slab:,} of {self._slabs * self._blocks_per_slab:,} {self._what}"

    def _fold(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, StepPlanned):
                self._least_free = min(self._least_free, event.free_slabs)


def closing_line(ended: Sequence[Ended], watch: RunWatch) -> str:
    """TTFT, TPOT, tokens/s, peak blocks and preemptions, on one line. Medians where there are several outputs."""
    records = [item.record for item in ended if item.record is not None]
    tokens = sum(record.output_tokens for record in records)
    seconds = max((r.finished_s for r in records), default=0.0) - min((r.arrival_s for r in records), default=0.0)
    kind = " (median)" if len(records) > 1 else ""
    parts = [
        f"{len(records)} outputs, {tokens:,} tokens" if len(records) > 1 else f"{tokens:,} tokens",
        f"TTFT {_typical(records, ttft_s)}{kind}",
        f"TPOT {_typical(records, tpot_s)}{kind}",
        f"{tokens / seconds:.1f} tokens/s" if seconds > 0 else "0 tokens/s",
        watch.peak,
        f"{sum(record.preemptions for record in records)} preemptions",
        f"ended by {_reasons(ended)}",
    ]
    return ", ".join(parts)


def _typical(records: Sequence[RequestRecord], figure: Callable[[RequestRecord], float | None]) -> str:
    values = [value for record in records if (value := figure(record)) is not None]
    if not values:
        return "none"
    seconds = median(values)
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _reasons(ended: Sequence[Ended]) -> str:
    counts: dict[str, int] = {}
    for item in ended:
        counts[str(item.reason)] = counts.get(str(item.reason), 0) + 1
    if len(counts) == 1:
        return next(iter(counts), "nothing")
    return ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
