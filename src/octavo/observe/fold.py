"""The fold from events to counters and histograms. Holds no gauge of the engine's state: see `gauges`.

Knows of each live sequence when it arrived, was scheduled and got its first token; the time of its
last token stands in an array by row, so that a step costs the same however many tokens it brings.
What a sequence found in lower tiers is a hit once it has come, and a miss once it will not.

Invariant: counters never go down, and every event is counted once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import isnan, nan

import numpy as np

from octavo.memory.values import DEVICE, DISK, HOST, TIERS
from octavo.observe.histogram import BOUNDS, WAITS, Histogram
from octavo.observe.names import BLOCKED_BY, failure_class, names_of
from octavo.scheduling.events import (
    Admitted,
    Arrived,
    CacheReset,
    EngineFailed,
    Event,
    Finished,
    Preempted,
    Refused,
    Restarted,
    StepEnded,
    StepPlanned,
    StepTokens,
    Submitted,
    Transferred,
)

BUSY_WINDOW_S = 30.0
ENDED_WELL = ("stop", "length")
"""Only these count in the latencies of whole requests: an abort would make the engine look fast."""


@dataclass(slots=True, eq=False)
class _Live:
    arrived_s: float
    scheduled_s: float = nan
    first_s: float = nan
    last_s: float = nan
    """Of its last token, while it has no row."""
    row: int = -1
    seated_s: float = nan
    """The last time."""
    looked_up: Admitted | None = None
    """What it found, while some of that is still to come."""


class Fold:
    """`counters[name][label value]` and `histograms[name][label value]`; the value is "" where there is no label."""

    def __init__(self, rows: int, tiers: Collection[str] = TIERS) -> None:
        names = names_of(tiers)
        self.counters: dict[str, dict[str, float]] = {
            n.name: dict.fromkeys(n.values or ("",), 0) for n in names if n.kind == "counter"
        }
        self.histograms = {
            n.name: {value: Histogram(BOUNDS.get(n.name, WAITS)) for value in n.values or ("",)}
            for n in names
            if n.kind == "histogram"
        }
        self.bound_by = "none"
        """What bound the last step, as a reason for waiting."""
        self._live: dict[int, _Live] = {}
        self._waiting: set[int] = set()
        self._blocked_since: float | None = None
        self._last_s = np.full(rows, nan)
        self._busy: deque[tuple[float, float]] = deque()
        self._busy_until = -np.inf
        self._does = {
            Submitted: self._submitted,
            Refused: self._refused,
            Admitted: self._admitted,
            Preempted: self._preempted,
            Restarted: self._restarted,
            Transferred: self._transferred,
            Arrived: self._arrived,
            StepPlanned: self._planned,
            StepTokens: self._tokens,
            StepEnded: self._ended,
            Finished: self._finished,
            CacheReset: self._reset,
            EngineFailed: self._failed,
        }

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            self._does[type(event)](event)  # type: ignore[operator]  # each method takes its own kind

    def busy_ratio(self, now: float, since: float) -> float:
        """Share of the window before `now`, or of the time since `since` if that is shorter, spent computing."""
        window = min(BUSY_WINDOW_S, now - since)
        if window <= 0:
            return 0.0
        begin = now - window
        busy = sum(min(end, now) - max(start, begin) for start, end in self._busy if end > begin and start < now)
        return min(1.0, busy / window)

    # -- one method for each kind of event --------------------------------------------------------

    def _submitted(self, event: Submitted) -> None:
        self._live[event.sequence_id] = _Live(event.now)
        self._waiting.add(event.sequence_id)

    def _refused(self, event: Refused) -> None:
        self.counters["refusals_total"][event.reason] += 1

    def _admitted(self, event: Admitted) -> None:
        self._waiting.discard(event.sequence_id)
        self.counters["recomputed_tokens_total"][""] += event.recomputed_tokens
        live = self._live.get(event.sequence_id)
        again = event.resumed if live is None else not isnan(live.scheduled_s)
        self.counters["resumes_total" if again else "admissions_total"][""] += 1
        if live is None:  # it was here before we began to watch
            self._last_s[event.row] = nan
            self._looked_up(event)
            return
        live.row, live.seated_s = event.row, event.now
        self._last_s[event.row] = live.last_s
        if not again:
            live.scheduled_s = event.now
            self._observe("queue_seconds", event.now - live.arrived_s)
        if any(tier != DEVICE for tier, _ in event.cached_by_tier):
            live.looked_up = event
        else:
            self._looked_up(event)

    def _looked_up(self, event: Admitted, lost: str = "") -> None:
        """`lost`: why what it found below the device did not come, and it starts without any of it."""
        if not event.looked_up_tokens:
            return
        self.counters["prefix_cache_queries_total"][""] += event.looked_up_tokens
        misses = self.counters["prefix_cache_misses_total"]
        misses[f"{DEVICE}/absent"] += event.looked_up_tokens - event.known_tokens
        misses[f"{DEVICE}/incomplete"] += event.known_tokens - event.cached_tokens - event.unused_tokens
        misses[f"{DEVICE}/no_room"] += event.unused_tokens
        by_tier = dict(event.cached_by_tier)
        if lost:
            misses[f"{DISK if DISK in by_tier else HOST}/{failure_class(lost)}"] += event.cached_tokens
        else:
            for tier, tokens in by_tier.items():
                self.counters["prefix_cache_hits_total"][tier] += tokens

    def _reset(self, event: CacheReset) -> None:
        self.counters["evictions_total"][DEVICE] += event.evicted_blocks

    def _preempted(self, event: Preempted) -> None:
        self.counters["preemptions_total"][event.action] += 1
        self._back_in_line(event.sequence_id)

    def _back_in_line(self, sequence_id: int) -> None:
        self._waiting.add(sequence_id)
        live = self._live.get(sequence_id)
        if live is not None:
            live.last_s = float(self._last_s[live.row]) if live.row >= 0 else nan
            live.row = -1
            live.looked_up = None

    def _arrived(self, event: Arrived) -> None:
        self._observe("transfer_stall_seconds", event.waited_s)
        live = self._live.get(event.sequence_id)
        if live is not None and live.looked_up is not None:
            self._looked_up(live.looked_up)
            live.looked_up = None

    def _restarted(self, event: Restarted) -> None:
        self.counters["restarts_total"][failure_class(event.reason)] += 1
        live = self._live.get(event.sequence_id)
        if live is not None:
            self._observe("transfer_stall_seconds", event.now - live.seated_s)
            if live.looked_up is not None:
                self._looked_up(live.looked_up, event.reason)
        self._back_in_line(event.sequence_id)

    def _transferred(self, event: Transferred) -> None:
        counters = self.counters
        counters["transfer_bytes_total"][event.route] += event.bytes
        counters["transfer_seconds_total"][event.route] += event.seconds
        for reason in event.reasons:
            counters["transfer_failures_total"][f"{event.route}/{failure_class(reason)}"] += 1
        if event.route == "demote":
            counters["host_offload_bytes_total"][""] += event.bytes
        elif event.route == "promote" and event.blocks:
            counters["host_promotions_total"][""] += event.blocks
            counters["host_promotion_bytes_total"][""] += event.bytes
            self._observe("promotion_seconds", event.seconds)

    def _planned(self, event: StepPlanned) -> None:
        self.counters["limiting_resource_steps_total"][event.resource] += 1
        self._observe("batch_size_by_iteration", event.running)
        self._observe("batch_tokens_by_iteration", event.decode_tokens, "decode")
        self._observe("batch_tokens_by_iteration", event.prefill_tokens, "prefill")
        self._stop_blocking(event.now)
        self.bound_by = event.resource if event.resource in BLOCKED_BY else "none"
        self._blocked_since = event.now if event.waiting else None

    def _tokens(self, event: StepTokens) -> None:
        last = self._last_s[event.rows]
        first = np.isnan(last)
        if first.any():
            for index in np.flatnonzero(first).tolist():
                self._first_token(int(event.sequence_ids[index]), event.now)
            last = last[~first]
        self.histograms["inter_token_latency_seconds"][""].add_all(event.now - last)
        self._last_s[event.rows] = event.now

    def _first_token(self, sequence_id: int, now: float) -> None:
        live = self._live.get(sequence_id)
        if live is not None:
            live.first_s = now
            self._observe("time_to_first_token_seconds", now - live.arrived_s)
            self._observe("prefill_seconds", now - live.scheduled_s)

    def _ended(self, event: StepEnded) -> None:
        # Steps run one after the other: a step planned ahead waits for the one before it.
        start = max(event.planned_s, self._busy_until)
        self._busy.append((start, event.now))
        self._busy_until = max(self._busy_until, event.now)
        while self._busy[0][1] < event.now - BUSY_WINDOW_S:
            self._busy.popleft()
        evictions = self.counters["evictions_total"]
        for tier, blocks in zip(TIERS, (event.evicted_blocks, *event.evicted_below), strict=True):
            if blocks:
                evictions[tier] += blocks
        parts = (("schedule", event.schedule_s), ("execute", event.execute_s), ("commit", event.commit_s))
        for part, seconds in parts:
            if seconds is not None:
                self._observe("step_seconds", seconds, part)

    def _finished(self, event: Finished) -> None:
        self.counters["finished_total"][event.reason] += 1
        if event.reason == "abort":
            self.counters["aborted_total"][""] += 1
        self._waiting.discard(event.sequence_id)
        if not self._waiting:
            self._stop_blocking(event.now)
        live = self._live.pop(event.sequence_id, None)
        if live is None or event.reason not in ENDED_WELL:
            return
        self._observe("e2e_request_latency_seconds", event.now - live.arrived_s)
        if isnan(live.first_s):
            return
        self._observe("decode_seconds", event.now - live.first_s)
        if event.record.output_tokens > 1:
            last = live.last_s if live.row < 0 else float(self._last_s[live.row])
            self._observe("time_per_output_token_seconds", (last - live.first_s) / (event.record.output_tokens - 1))

    # -- inside -------------------------------------------------------------------------------

    def _failed(self, event: EngineFailed) -> None:
        self._stop_blocking(event.now)

    def _observe(self, name: str, value: float, label: str = "") -> None:
        self.histograms[name][label].add(value)

    def _stop_blocking(self, now: float) -> None:
        if self._blocked_since is not None:
            blocked = self.counters["admission_blocked_seconds_total"]
            blocked[self.bound_by] += max(0.0, now - self._blocked_since)
            self._blocked_since = None
