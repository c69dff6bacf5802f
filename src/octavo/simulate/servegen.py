"""Workloads drawn from ServeGen's client pools: who sends how often and how burstily, and how long what they send is.

A pool has two files a client: `chunk-N-trace.csv`, for each window of time a rate, a coefficient of variation and a
law of the gaps (Gamma or Weibull, with shape and scale), and `chunk-N-dataset.json`, for spans of time the shares of
input and output lengths. Owns reading them and drawing from them; archives are opened by whoever has them. One seed
gives one workload.
"""

from __future__ import annotations

import csv
import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gamma, isfinite
from typing import Any

import numpy as np

from octavo.errors import ConfigError
from octavo.memory.values import Int64
from octavo.simulate.executors import NANOSECONDS
from octavo.simulate.trace import TraceRequest

_FILE = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)$")
_SHARE = re.compile(r"(\d+)\s*:\s*([0-9.eE+-]+)")
_TRACE_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class Window:
    """Arrivals from `begin_s` until the next window."""

    begin_s: float
    rate: float
    law: str
    """Gamma, Weibull, or empty: Poisson."""
    shape: float
    scale: float

    def gaps(self, generator: np.random.Generator, count: int) -> np.ndarray:
        if self.law == "Gamma":
            return generator.gamma(self.shape, self.scale, count)
        if self.law == "Weibull":
            return generator.weibull(self.shape, count) * self.scale
        return generator.exponential(1 / self.rate, count)

    @property
    def mean_gap_s(self) -> float:
        if self.law == "Gamma":
            return self.shape * self.scale
        return self.scale * gamma(1 + 1 / self.shape) if self.law == "Weibull" else 1 / self.rate


@dataclass(frozen=True, slots=True)
class Shares:
    """Lengths that were seen, and how often at most so much."""

    lengths: Int64
    reached: np.ndarray

    def draw(self, generator: np.random.Generator, count: int) -> Int64:
        at = np.searchsorted(self.reached, generator.random(count) * self.reached[-1], side="right")
        drawn: Int64 = self.lengths[np.minimum(at, len(self.lengths) - 1)]
        return drawn


@dataclass(frozen=True, slots=True)
class Several:
    """What a prompt of text, images, sounds and films is long, all together: each so many times."""

    parts: tuple[tuple[Shares | None, Shares], ...]
    """How many (None: one), and tokens of each."""

    def draw(self, generator: np.random.Generator, count: int) -> Int64:
        total = np.zeros(count, dtype=np.int64)
        for times, tokens in self.parts:
            drawn = tokens.draw(generator, count)
            total += drawn if times is None else drawn * times.draw(generator, count)
        whole: Int64 = np.maximum(total, 1)
        return whole


@dataclass(frozen=True, slots=True)
class Span:
    """Lengths of what a client sends from `begin_s` on."""

    begin_s: float
    inputs: Shares | Several
    outputs: Shares


@dataclass(frozen=True, slots=True)
class Client:
    number: int
    windows: tuple[Window, ...]
    spans: tuple[Span, ...]
    """Those that have lengths, in order."""

    def arrivals_s(self, generator: np.random.Generator, begin_s: float, end_s: float) -> np.ndarray:
        """Moments in [begin, end), window by window."""
        begins = [window.begin_s for window in self.windows]
        found = []
        for index, window in enumerate(self.windows):
            until = begins[index + 1] if index + 1 < len(begins) else window.begin_s + (begins[-1] - begins[-2])
            low, high = max(window.begin_s, begin_s), min(until, end_s)
            if high > low and window.rate > 0:
                found.append(low + _moments(window, generator, high - low))
        return np.concatenate(found) if found else np.empty(0)

    def span_at(self, moment_s: float) -> Span:
        """The lengths in force then; before the first that is known, the first."""
        at = bisect_right([span.begin_s for span in self.spans], moment_s) - 1
        return self.spans[max(0, at)]


def _moments(window: Window, generator: np.random.Generator, length_s: float) -> np.ndarray:
    """Arrivals of one law within so many seconds. The first gap begins somewhere in the one before."""
    expected = length_s / window.mean_gap_s
    moments, at = [], -float(generator.random()) * float(window.gaps(generator, 1)[0])
    while at < length_s:
        more = at + np.cumsum(window.gaps(generator, int(expected * 1.2) + 8))
        moments.append(more)
        at = float(more[-1])
    drawn = np.concatenate(moments) if moments else np.empty(0)
    return drawn[(drawn >= 0) & (drawn < length_s)]


def clients_of(files: Mapping[str, bytes], source: str) -> tuple[Client, ...]:
    """The clients of a pool, given its files by name. A client without lengths sends nothing and is left out."""
    parts: dict[int, dict[str, bytes]] = {}
    for name, data in files.items():
        found = _FILE.search(name)
        if found:
            parts.setdefault(int(found[1]), {})[found[2]] = data
    if not parts:
        raise ConfigError("trace", source, "holds no chunk-N-trace.csv with its chunk-N-dataset.json: no ServeGen pool")
    clients = []
    for number in sorted(parts):
        if len(parts[number]) < 2:
            continue
        where = f"{source}: client {number}"
        windows = _windows(parts[number]["trace.csv"], where)
        spans = _spans(parts[number]["dataset.json"], where)
        if spans and len(windows) > 1:
            clients.append(Client(number, windows, spans))
    if not clients:
        raise ConfigError("trace", source, "has no client with both arrivals and lengths")
    return tuple(clients)


def draw(
    clients: Sequence[Client], *, begin_s: float = 0.0, length_s: float = 600.0, limit: int | None = None, seed: int = 0
) -> tuple[TraceRequest, ...]:
    """The requests of all clients in this stretch of time, in order of arrival, from 0 on."""
    if not 0 <= begin_s < float("inf"):
        raise ConfigError("begin", begin_s, "must be at least 0 seconds")
    if not 0 < length_s < float("inf"):
        raise ConfigError("length", length_s, "must be above 0 seconds")
    if seed < 0:
        raise ConfigError("seed", seed, "must be at least 0")
    if limit is not None and limit < 1:
        raise ConfigError("requests", limit, "must be at least 1")
    generator = np.random.default_rng(seed)
    moments, inputs, outputs = [], [], []
    for client in clients:
        arrivals = client.arrivals_s(generator, begin_s, begin_s + length_s)
        for moment in arrivals.tolist():
            span = client.span_at(moment)
            inputs.append(int(span.inputs.draw(generator, 1)[0]))
            outputs.append(int(span.outputs.draw(generator, 1)[0]))
        moments.append(arrivals)
    at = np.concatenate(moments)
    if not len(at):
        raise ConfigError("begin", begin_s, f"nobody sends anything in the {length_s:g} s from then on")
    order = np.argsort(at, kind="stable")[:limit]
    ns = np.rint((at - begin_s) * NANOSECONDS).astype(np.int64)
    return tuple(
        TraceRequest(arrival_ns=int(ns[i]), input_tokens=inputs[i], output_tokens=outputs[i]) for i in order.tolist()
    )


def _windows(data: bytes, where: str) -> tuple[Window, ...]:
    windows: list[Window] = []
    for number, row in enumerate(csv.reader(data.decode("utf-8", "replace").splitlines()), 1):
        if not row:
            continue
        if len(row) < _TRACE_COLUMNS:
            raise ConfigError("trace", where, f"line {number} has {len(row)} of {_TRACE_COLUMNS} columns")
        try:
            begin, rate, shape, scale = (float(row[i] or 0) for i in (0, 1, 4, 5))
        except ValueError:
            raise ConfigError("trace", where, f"line {number} is no window: {','.join(row)[:80]}") from None
        law = row[3].strip()
        numbers = (begin, rate, shape, scale)
        if not all(isfinite(value) and value >= 0 for value in numbers) or (windows and begin <= windows[-1].begin_s):
            raise ConfigError("trace", where, f"line {number}: times must rise, and no figure be below 0")
        if law not in ("Gamma", "Weibull", "") or (rate and law and not (shape and scale)):
            raise ConfigError(
                "trace", where, f"line {number}: {law!r} is neither Gamma nor Weibull with shape and scale"
            )
        windows.append(Window(begin, rate, law, shape, scale))
    return tuple(windows)


def _spans(data: bytes, where: str) -> tuple[Span, ...]:
    try:
        told: Any = json.loads(data)
        begins = sorted(((float(begin), span) for begin, span in told.items()), key=lambda pair: pair[0])
    except (ValueError, AttributeError, RecursionError):
        raise ConfigError("trace", where, "its data set is no JSON object of times") from None
    spans = []
    for begin, span in begins:
        if not isinstance(span, dict):
            continue
        inputs, outputs = _inputs(span), _shares(span.get("output_tokens"))
        if inputs is not None and outputs is not None:
            spans.append(Span(begin, inputs, outputs))
    return tuple(spans)


_KINDS = ("image", "audio", "video")


def _inputs(span: Mapping[str, Any]) -> Shares | Several | None:
    """Of a pool of text alone its input tokens; else those of all kinds together. None where nothing was sent."""
    if "text_tokens" not in span:
        return _shares(span.get("input_tokens"))
    text = _shares(span["text_tokens"])
    parts: list[tuple[Shares | None, Shares]] = [] if text is None else [(None, text)]
    for kind in _KINDS:
        tokens, times = _shares(span.get(f"{kind}_tokens")), _shares(span.get(f"{kind}_count"), least=0)
        if tokens is not None and times is not None:
            parts.append((times, tokens))
    return Several(tuple(parts)) if parts else None


def _shares(text: Any, least: int = 1) -> Shares | None:
    """`{50: 0.04, 51: 0.08}`; None where nothing was sent."""
    found = sorted(
        (int(length), float(share)) for length, share in _SHARE.findall(text if isinstance(text, str) else "")
    )
    kept = [(length, share) for length, share in found if length >= least and share > 0]
    if not kept:
        return None
    lengths, shares = (np.array(column) for column in zip(*kept, strict=True))
    return Shares(lengths.astype(np.int64), np.cumsum(shares))
