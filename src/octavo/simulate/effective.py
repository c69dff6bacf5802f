"""Effective capacity: the most live state that a replica keeps while requests are answered in time, by bisection.

    load x1 kept -> x2 kept -> x4 missed -> x2.83 kept -> ... -> the largest load kept, and what was live under it

Owns what is live, the search, and the gain: tiers below the device against none of them, with the same bytes on the
device. A load is a speed of arrivals, or a number of users.

A conversation is live from its first request until the end of its last, thinking included, with all its text so far: a
later turn needs that state. A request of no conversation is live until it ends, with its prompt and what it will
generate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from octavo.errors import ConfigError
from octavo.scheduling.request import Request
from octavo.simulate.deploy import Replica
from octavo.simulate.drive import Source
from octavo.simulate.run import Asked, run_once
from octavo.simulate.trace import TraceRequest

CLOSE = 1.05
"""The search ends where the load that was missed is so many times the one that was kept, or nearer."""
FURTHEST = 4096.0
"""Times the first load, and that fraction of it: further nobody searches."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One run."""

    load: float
    share: float
    """Of requests that met the objectives."""
    sequences: int
    """Live at once at most."""
    tokens: int
    """The same, positions of text."""
    everybody: bool = False
    """All that the workload has were live at once: no load makes more."""


@dataclass(frozen=True, slots=True)
class Capacity:
    best: Tried | None
    """The largest load that kept the promise; None: none did."""
    missed: Tried | None
    """The smallest that did not; None: none was found, and more might be kept."""
    runs: int

    @property
    def at_least(self) -> bool:
        """Whether a larger workload, or load, might have shown more."""
        return self.missed is None or (self.best is not None and self.best.everybody)

    @property
    def sequences(self) -> int:
        return 0 if self.best is None else self.best.sequences

    @property
    def tokens(self) -> int:
        return 0 if self.best is None else self.best.tokens


@dataclass(frozen=True, slots=True)
class Gain:
    on: Capacity
    """With the tiers below the device."""
    off: Capacity

    @property
    def known(self) -> bool:
        """Less something that may be more says nothing."""
        return not self.off.at_least

    @property
    def sequences(self) -> int:
        return self.on.sequences - self.off.sequences

    @property
    def tokens(self) -> int:
        return self.on.tokens - self.off.tokens


@dataclass(frozen=True, slots=True)
class Loads:
    """A workload at any load."""

    requests: Sequence[TraceRequest]
    source: Callable[[float], Source]
    first: float
    most: float
    whole: bool = False
    """Loads are whole numbers."""


class Alive:
    """A source that notes how much was live at once at most."""

    def __init__(self, inner: Source, requests: Sequence[TraceRequest]) -> None:
        self._inner = inner
        self._requests = requests
        self._left = Counter(entry.session for entry in requests if entry.session is not None)
        """Turns of each conversation that have not ended."""
        self.known = len(self._left) + sum(entry.session is None for entry in requests)
        """Conversations and lone requests of the workload."""
        self._live: dict[str, int] = {}
        """Tokens of each live conversation, by its session, and of each lone request, by its own name."""
        self._tokens = 0
        self.most_sequences = 0
        self.most_tokens = 0

    def next_ns(self) -> int | None:
        return self._inner.next_ns()

    def pop(self) -> Request:
        request = self._inner.pop()
        entry = self._requests[int(request.request_id)]
        name = _name(request.request_id, entry)
        self._tokens += entry.input_tokens + entry.output_tokens - self._live.get(name, 0)
        self._live[name] = entry.input_tokens + entry.output_tokens
        self.most_sequences = max(self.most_sequences, len(self._live))
        self.most_tokens = max(self.most_tokens, self._tokens)
        return request

    def ended(self, request_id: str, now_ns: int) -> None:
        entry = self._requests[int(request_id)]
        if entry.session is not None:
            self._left[entry.session] -= 1
        if entry.session is None or not self._left[entry.session]:
            self._tokens -= self._live.pop(_name(request_id, entry))
        self._inner.ended(request_id, now_ns)


def _name(request_id: str, entry: TraceRequest) -> str:
    return f"r{request_id}" if entry.session is None else f"s{entry.session}"


def gain_of(replica: Replica, on: Asked, off: Asked, loads: Loads, promise: float) -> Gain:
    """`on` and `off` differ in the tiers below the device. The promise is a share of all requests, refused ones too,
    that meet the objectives of `on`. Raises `ConfigError`."""
    if not 0 < promise <= 1:
        raise ConfigError("slo_share", promise, "must be above 0 and at most 1")
    objectives = on.objectives
    if objectives is None or not objectives.any:
        raise ConfigError("slo_ttft", None, "there is nothing to promise; give --slo-ttft, --slo-tpot or --slo-e2e")

    def run(asked: Asked, load: float) -> Tried:
        alive = Alive(loads.source(load), loads.requests)
        measured, _ = run_once(replica, replace(asked, source=lambda: alive), replica.cost)
        share = measured.good(objectives) / max(1, len(loads.requests))
        return Tried(load, share, alive.most_sequences, alive.most_tokens, alive.most_sequences == alive.known)

    return Gain(*(capacity_of(partial(run, asked), promise, loads) for asked in (on, off)))


def capacity_of(run: Callable[[float], Tried], promise: float, loads: Loads) -> Capacity:
    """The largest load at which a share `promise` of requests is in time.

    Doubled, or halved, from the first one until the promise is kept on one side alone, then bisected by ratios. Where
    less load is missed and more is kept, the answer is one of several.
    """
    best: Tried | None = None
    missed: Tried | None = None
    runs, load = 0, loads.first
    least = 1.0 if loads.whole else loads.first / FURTHEST
    while True:
        tried = run(load)
        runs += 1
        if tried.share >= promise:
            best = tried
        else:
            missed = tried
        load = _next(best, missed, loads)
        if load in (tried.load, None if best is None else best.load) or load < least:
            return Capacity(best, missed, runs)


def _next(best: Tried | None, missed: Tried | None, loads: Loads) -> float:
    """The load to try; one that was tried where no other is worth it."""
    if best is None:
        assert missed is not None  # one was tried
        return missed.load // 2 if loads.whole else missed.load / 2
    if missed is None:
        return min(2 * best.load, loads.most)
    if missed.load <= best.load * CLOSE:
        return best.load
    middle = (best.load * missed.load) ** 0.5
    return float(int(middle)) if loads.whole else middle
