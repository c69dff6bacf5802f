"""What a simulation came to: a fold over the core's events, runs of steps included.

Owns the figures of a report and how they are counted: times are virtual, percentiles over requests (gaps between
tokens over tokens). A run of decode steps is counted whole, not step by step. Looks at the cache only at rest, and
keeps a bounded number of such looks: when there are too many, every other one goes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.cost.step import Float64
from octavo.errors import ConfigError
from octavo.memory.waste import looked_at
from octavo.scheduling.events import (
    Admitted,
    Arrived,
    Finished,
    Preempted,
    Refused,
    RequestRecord,
    Restarted,
    StepEnded,
    StepPlanned,
    StepTokens,
    Submitted,
    Transferred,
)
from octavo.scheduling.leap import DecodeRun
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.drive import Happening
from octavo.simulate.executors import seconds
from octavo.simulate.gaps import Gaps

_MOST_LOOKS = 256
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request has to meet to count as goodput; None: anything will do."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(name, value, "must be above 0 seconds")

    @property
    def any(self) -> bool:
        return (self.ttft_s, self.tpot_s, self.e2e_s) != (None, None, None)


@dataclass(frozen=True, slots=True)
class Look:
    """The cache at one moment, in bytes."""

    at_s: float
    used: int
    """Not available to a newcomer."""
    useful: int
    reserved: int
    internal: int
    padding: int
    external: int
    running: int
    waiting: int
    kept: int
    """For reuse alone, referenced by nobody; part of what is not used."""
    bound_s: dict[str, float]
    """Seconds of steps so far, by what bound them."""


@dataclass(slots=True)
class Moved:
    """Copies between two tiers."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failed_blocks: int = 0


class Measured:
    """A watcher of a `Simulation`."""

    def __init__(self) -> None:
        self.submitted = 0
        self.refused: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.preemptions = 0
        self.offloads = 0
        """Of those, how many had their state moved to the host."""
        self.moved: dict[str, Moved] = {}
        """By route."""
        self.waited_for_copies_s = 0.0
        """Of sequences that were seated, together."""
        self.restarts = 0
        """Sequences whose state did not come."""
        self.cached_by_tier: Counter[str] = Counter()
        """Prompt tokens that were not computed."""
        self.lost_tokens = 0
        """Positions given up by preemption, and computed again."""
        self.steps = 0
        self.busy_s = 0.0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.running_steps = 0
        """Sum over steps of the sequences in them."""
        self.bound_by: Counter[str] = Counter()
        self.bound_s: dict[str, float] = {}
        """Seconds of steps, by what bound them."""
        self._resource = "none"
        self.used_slab_s = 0.0
        self.peak_slabs = 0
        self.looks: list[Look] = []
        self._stride_s, self._next_look_s = 0.0, 0.0
        self._records: dict[str, array[float]] = {name: array("d") for name in _COLUMNS}
        self._last_s = np.full(1024, np.nan)
        """When each sequence got its last token."""
        self._gaps = Gaps()
        self.slabs = 0
        self._free = 0
        self.slab_bytes = 0
        self.end_s = 0.0
        self._told: dict[type, Callable[[Any], None]] = {
            StepPlanned: self._planned, StepTokens: self._tokens, StepEnded: self._ended, DecodeRun: self._run,
            Finished: self._finished, Preempted: self._preempted, Transferred: self._transferred,
            Arrived: self._arrived, Restarted: self._restarted, Admitted: self._admitted,
            Submitted: self._submitted, Refused: self._refused,
        }  # fmt: skip

    # -- the fold -----------------------------------------------------------------------------

    def observe(self, happenings: Sequence[Happening]) -> None:
        for one in happenings:
            told = self._told.get(type(one))
            if told is not None:
                told(one)

    def at_rest(self, now_ns: int, scheduler: Scheduler) -> None:
        now = seconds(now_ns)
        pool = scheduler.cache.pool
        self.slabs, self.slab_bytes = pool.slabs, pool.layout.slab_bytes
        if now < self._next_look_s:
            return
        useful, lost = looked_at(scheduler.cache)
        used = (pool.slabs - pool.available_slabs) * pool.layout.slab_bytes
        self.looks.append(
            Look(now, used, useful, lost.reserved_bytes, lost.internal_bytes,
                 lost.padding_bytes, lost.external_bytes, len(scheduler.running), len(scheduler.waiting),
                 (pool.available_slabs - pool.free.count) * pool.layout.slab_bytes, dict(self.bound_s))
        )  # fmt: skip
        if len(self.looks) > _MOST_LOOKS:
            self.looks = self.looks[::2]
            self._stride_s = 2 * max(self._stride_s, now / _MOST_LOOKS)
        self._next_look_s = now + self._stride_s

    def _submitted(self, _: Submitted) -> None:
        self.submitted += 1

    def _refused(self, refusal: Refused) -> None:
        self.refused[refusal.reason] += 1

    def _admitted(self, admission: Admitted) -> None:
        self.lost_tokens += admission.recomputed_tokens
        self._widen(admission.sequence_id)

    def _preempted(self, pause: Preempted) -> None:
        self.preemptions += 1
        self.offloads += pause.action == "offload"

    def _arrived(self, copies: Arrived) -> None:
        self.waited_for_copies_s += copies.waited_s

    def _restarted(self, _: Restarted) -> None:
        self.restarts += 1

    def _finished(self, end: Finished) -> None:
        self.ended[end.reason] += 1
        self._record(end.record)

    def _ended(self, step: StepEnded) -> None:
        took = step.now - max(step.planned_s, self.end_s)  # planned ahead, it began when the last one ended
        self._worked(took, self._free)
        self._bound(self._resource, took)
        self.end_s = step.now

    def _planned(self, step: StepPlanned) -> None:
        self.steps += 1
        self.prefill_tokens += step.prefill_tokens
        self.decode_tokens += step.decode_tokens
        self.running_steps += step.running
        self.bound_by[step.resource] += 1
        self._free, self._resource = step.free_slabs, step.resource

    def _transferred(self, copies: Transferred) -> None:
        so_far = self.moved.setdefault(copies.route, Moved())
        so_far.blocks += copies.blocks
        so_far.bytes += copies.bytes
        so_far.seconds += copies.seconds
        so_far.failed_blocks += len(copies.reasons)

    def _worked(self, took_s: float, free: int) -> None:
        self.busy_s += took_s
        self.used_slab_s += took_s * (self.slabs - free)
        self.peak_slabs = max(self.peak_slabs, self.slabs - free)

    def _bound(self, resource: str, took_s: float) -> None:
        self.bound_s[resource] = self.bound_s.get(resource, 0.0) + took_s

    def _tokens(self, step: StepTokens) -> None:
        ids = step.sequence_ids
        gaps = step.now - self._last_s[ids]
        self._last_s[ids] = step.now
        gaps = gaps[~np.isnan(gaps)]
        if len(gaps):
            self._gaps.add(gaps)

    def _run(self, run: DecodeRun) -> None:
        ids, steps, sequences = run.sequence_ids, run.steps, len(run.rows)
        moments = run.moments
        took = moments[1:] - moments[:-1]
        self.steps += steps
        self.decode_tokens += steps * sequences
        self.running_steps += steps * sequences
        self.bound_by[run.resource] += steps
        busy = float(np.add.reduce(took))
        self.busy_s += busy
        self._bound(run.resource, busy)
        used = self.slabs - run.free_slabs
        self.used_slab_s += float(took.dot(used))
        self.peak_slabs = max(self.peak_slabs, int(np.maximum.reduce(used)))
        self._gaps.add(moments[1] - self._last_s[ids])
        self._gaps.add(took[1:], sequences)
        self.end_s = end = float(moments[-1])
        self._last_s[ids] = end
        for one in run.ended:
            self._finished(one)

    def _widen(self, sequence_id: int) -> None:
        if sequence_id >= len(self._last_s):
            more = np.full(max(sequence_id + 1, 2 * len(self._last_s)) - len(self._last_s), np.nan)
            self._last_s = np.concatenate([self._last_s, more])

    def _record(self, record: RequestRecord) -> None:
        for tier, tokens in record.cached_tokens.items():
            self.cached_by_tier[tier] += tokens
        first = record.first_token_s
        decoded = record.output_tokens - 1
        values = (
            record.arrival_s,
            np.nan if first is None else first - record.arrival_s,
            record.decode_time / decoded if decoded > 0 else np.nan,
            record.finished_s - record.arrival_s,
            record.queue_time,
            record.preempted_time,
            record.input_tokens,
            record.output_tokens,
            sum(record.cached_tokens.values()),
            record.recomputed_tokens,
        )
        for column, value in zip(self._records.values(), values, strict=True):
            column.append(value)

    # -- the figures --------------------------------------------------------------------------

    def column(self, name: str) -> Float64:
        """One figure of every request that ended: a name of `COLUMNS`."""
        return np.array(self._records[name], dtype=np.float64)

    def gaps(self) -> tuple[Float64, Float64]:
        """Times between consecutive tokens of a sequence, and how many there were of each."""
        return self._gaps.all()

    def good(self, objectives: Objectives) -> int:
        """Requests that met all objectives."""
        met = np.ones(len(self.column("e2e")), dtype=bool)
        for name, most in (("ttft", objectives.ttft_s), ("tpot", objectives.tpot_s), ("e2e", objectives.e2e_s)):
            if most is not None:
                values = self.column(name)
                met &= (values <= most) | (np.isnan(values) & (name == "tpot"))
        return int(met.sum())


_COLUMNS = ("arrival", "ttft", "tpot", "e2e", "queue", "preempted", "input_tokens", "output_tokens", "cached_tokens",
            "recomputed_tokens")  # fmt: skip


def quantiles(values: Float64, weights: Float64 | None = None) -> dict[str, float] | None:
    """Mean and the usual percentiles (the smallest value that enough are at most); None of nothing."""
    kept = ~np.isnan(values)
    values = values[kept]
    if not len(values):
        return None
    counts = np.ones(len(values)) if weights is None else weights[kept]
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(counts[order])
    found = {"mean": float((values * counts).sum() / reached[-1])}
    for share in QUANTILES:
        at = min(int(np.searchsorted(reached, share * reached[-1] * (1 - 1e-12))), len(values) - 1)
        found[f"p{round(100 * share)}"] = float(values[order][at])
    found["max"] = float(values[order][-1])
    return found
