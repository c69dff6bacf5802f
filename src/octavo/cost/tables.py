"""Seconds of a step from timings of single kernels: tables of dense layers, attention and the head, interpolated.

Owns the reading of the tables and how a step is put together from them. Dense layers take all tokens of a step at
once; attention is looked up for the largest chunk and all single tokens together, as they run in one kernel; what
other chunks take above a smallest one is added; tensor ranks exchange activations twice a layer.

    dense.csv         layer, tokens, time_us        kernels of a layer; embedding and final_layernorm once a step
    per_sequence.csv  layer, sequences, time_us     head and sampler, by rows of logits
    attention.csv     prefill_chunk, kv_prefill, n_decode, kv_decode, time_us     of one layer

The files may be gzipped. Invariant: of a run of decode steps, seconds equal those of each of its steps, bit for bit.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.cost.roofline import Factor
from octavo.cost.step import Float64, StepShape
from octavo.errors import ConfigError
from octavo.memory.values import Int64
from octavo.text_files import read_text

_ONCE = ("embedding", "final_layernorm")
_TWICE = ("layernorm", "qk_norm")
"""In a layer: before attention and before the feed-forward part; of queries and of keys."""
_NEEDED = ("qkv_proj", "o_proj", "down_proj")
_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_MICRO = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """Seconds over a count, linear between what was measured and beyond it."""

    at: Float64
    seconds: Float64

    def of(self, count: float) -> float:
        place = min(max(int(np.searchsorted(self.at, count)), 1), len(self.at) - 1)
        low, high = float(self.at[place - 1]), float(self.at[place])
        share = (count - low) / (high - low)
        below, above = float(self.seconds[place - 1]), float(self.seconds[place])
        return max(0.0, below + share * (above - below))


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Seconds of one layer's attention on a grid of (chunk, its context, single tokens, their mean context)."""

    axes: tuple[Float64, Float64, Float64, Float64]
    seconds: npt.NDArray[np.float64]

    @property
    def smallest_chunk(self) -> float:
        return float(self.axes[0][1])

    def of(self, chunk: Float64, before: Float64, decodes: Float64, context: Float64) -> Float64:
        """Linear between the grid's points and beyond it: arrays of one length."""
        places, shares = [], []
        for axis, wanted in zip(self.axes, (chunk, before, decodes, context), strict=True):
            place = np.clip(np.searchsorted(axis, wanted, side="right") - 1, 0, len(axis) - 2)
            places.append(place)
            shares.append((wanted - axis[place]) / (axis[place + 1] - axis[place]))
        total = np.zeros(len(chunk))
        for corner in range(16):
            weight = np.ones(len(chunk))
            index = []
            for side, (place, share) in enumerate(zip(places, shares, strict=True)):
                upper = corner >> side & 1
                weight = weight * (share if upper else 1 - share)
                index.append(place + upper)
            total = total + weight * self.seconds[tuple(index)]
        return np.maximum(total, 0.0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tables:
    """What one directory of kernel timings says of one device's share."""

    layer: Line
    """All dense kernels of a layer, by tokens."""
    once: Line
    head: Line
    """Head and sampler, by rows of logits."""
    attention: Attention
    source: str = ""

    @classmethod
    def read(cls, folder: Path) -> Tables:
        """Raises `ConfigError` where a table is missing or is not what it should be."""
        dense = _by_layer(folder, "dense", "tokens")
        missing = [name for name in _NEEDED if name not in dense]
        if missing:
            raise ConfigError("tables", str(folder), f"dense.csv has no timings of {missing[0]}")
        layers = {name: line for name, line in dense.items() if name not in _ONCE}
        factors = {name: 2.0 if name in _TWICE else 1.0 for name in layers}
        once = {name: line for name, line in dense.items() if name in _ONCE}
        return cls(
            layer=_summed(layers, factors),
            once=_summed(once, {}) if once else Line(np.array([0.0, 1.0]), np.zeros(2)),
            head=_summed(_by_layer(folder, "per_sequence", "sequences"), {}),
            attention=_attention(folder),
            source=str(folder),
        )


@dataclass(frozen=True, slots=True)
class Link:
    """Between tensor ranks."""

    bytes_per_s: float
    latency_s: float
    source: str = ""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TablesCost:
    tables: Tables
    layers: int
    hidden_size: int
    ranks: int = 1
    link: Link | None = None
    host_s: Factor = field(default_factory=lambda: Factor(1e-3, "assumed: deciding, preparing and sampling a step"))
    interval: tuple[float, float] = (0.93, 1.07)
    interval_source: str = "mean TPOT of three published runs of vLLM was met within 7%: benchmarks/prediction_vllm.py"

    def __post_init__(self) -> None:
        if self.ranks > 1 and self.link is None:
            raise ConfigError("tp", self.ranks, "tables say nothing of the link between ranks: give one")

    def host_seconds(self, shape: StepShape) -> float:
        return self.host_s.value

    def step_interval(self, shape: StepShape) -> tuple[float, float]:
        seconds = self.step_seconds(shape) + self.host_seconds(shape)
        return seconds * self.interval[0], seconds * self.interval[1]

    def step_seconds(self, shape: StepShape) -> float:
        long = shape.counts > 1
        single = ~long
        decodes = int(np.count_nonzero(single))
        context = float(shape.starts[single].sum() + decodes) / decodes if decodes else 0.0
        attention = self._attention_s(shape.starts[long], shape.counts[long], decodes, np.array([context]))
        return float((self._fixed_s(shape) + attention)[0])

    def run_seconds(self, shape: StepShape, steps: int) -> Float64:
        contexts = (shape.context_tokens + np.arange(steps, dtype=np.int64) * shape.chunks) / shape.chunks
        none = np.empty(0, dtype=np.int64)
        seconds: Float64 = self._fixed_s(shape) + self._attention_s(none, none, shape.chunks, contexts)
        return seconds

    def _fixed_s(self, shape: StepShape) -> float:
        tables = self.tables
        dense = self.layers * tables.layer.of(shape.tokens) + tables.once.of(shape.tokens)
        head = tables.head.of(shape.sampled) if shape.sampled else 0.0
        return dense + head + self._exchange_s(shape.tokens)

    def _exchange_s(self, tokens: int) -> float:
        if self.link is None or self.ranks == 1:
            return 0.0
        moved = 2 * (self.ranks - 1) / self.ranks * tokens * self.hidden_size * 2
        return 2 * self.layers * (moved / self.link.bytes_per_s + self.link.latency_s)

    def _attention_s(self, starts: Int64, counts: Int64, decodes: int, contexts: Float64) -> Float64:
        """Of all layers: the largest chunk together with the single tokens, and what further chunks add to it."""
        one = np.ones_like(contexts)
        zero = np.zeros(1)
        if not len(counts):
            return self.layers * self.tables.attention.of(0 * one, 0 * one, decodes * one, contexts)
        order = np.argsort(-(counts * (starts + counts)), kind="stable")
        first, others = order[0], order[1:]
        together = self.tables.attention.of(counts[first] * one, starts[first] * one, decodes * one, contexts)
        if len(others):
            least = self.tables.attention.of(zero + self.tables.attention.smallest_chunk, zero, zero, zero)
            each = self.tables.attention.of(
                counts[others].astype(np.float64), starts[others].astype(np.float64), np.zeros(len(others)),
                np.zeros(len(others)),
            )  # fmt: skip
            together = together + np.maximum(each - least, 0.0).sum()
        return self.layers * together


def _rows(folder: Path, name: str) -> Iterator[dict[str, str]]:
    for path in (folder / f"{name}.csv.gz", folder / f"{name}.csv"):
        if path.exists():
            try:
                yield from csv.DictReader(io.StringIO(read_text(path, "tables")))
            except csv.Error as error:
                raise ConfigError("tables", str(path), f"is no CSV ({error})") from None
            return
    raise ConfigError(
        "tables", str(folder), f"has no {name}.csv or {name}.csv.gz; name a directory such as .../bf16/tp1"
    )


def _number(row: Mapping[str, Any], name: str, folder: Path, line: int) -> float:
    try:
        value = float(row[name])
    except (KeyError, TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(
            "tables", str(folder), f"row {line} has no number of at least 0 for {name}: {row.get(name)!r}"
        )
    return value


def _by_layer(folder: Path, name: str, count: str) -> dict[str, Line]:
    found: dict[str, dict[float, float]] = {}
    for line, row in enumerate(_rows(folder, name), start=2):
        points = found.setdefault(str(row.get("layer")), {})
        points[_number(row, count, folder, line)] = _number(row, "time_us", folder, line) * _MICRO
    lines = {}
    for layer, points in found.items():
        if len(points) < 2:
            raise ConfigError("tables", str(folder), f"{name}.csv has fewer than two rows of {layer}")
        at = sorted(points)
        lines[layer] = Line(np.array(at), np.array([points[one] for one in at]))
    if not lines:
        raise ConfigError("tables", str(folder), f"{name}.csv has no rows")
    return lines


def _summed(lines: Mapping[str, Line], factors: Mapping[str, float]) -> Line:
    """All of them as one line over every count that any of them has."""
    at = np.unique(np.concatenate([line.at for line in lines.values()]))
    total = np.zeros(len(at))
    for name, line in lines.items():
        total = total + factors.get(name, 1.0) * np.array([line.of(float(count)) for count in at])
    return Line(at, total)


def _attention(folder: Path) -> Attention:
    """The grid of powers of two. Chunks beside the most single tokens, which no step had, go on as those below."""
    known: dict[tuple[float, ...], float] = {}
    for line, row in enumerate(_rows(folder, "attention"), start=2):
        key = tuple(_number(row, name, folder, line) for name in _AXES)
        if all(value == 0 or math.log2(value).is_integer() for value in key):
            known[key] = _number(row, "time_us", folder, line) * _MICRO
    axes = [sorted({key[place] for key in known} | ({0.0} if place in (0, 2) else set())) for place in range(4)]
    chunks, befores, decodes, contexts = axes
    contexts = [context for context in contexts if context > 0]
    if min(len(axis) for axis in (chunks, befores, decodes, contexts)) < 2:
        raise ConfigError("tables", str(folder), "attention.csv has no grid of powers of two on its four axes")
    grid = np.full((len(chunks), len(befores), len(decodes), len(contexts)), np.nan)
    for i, chunk in enumerate(chunks):
        for j, before in enumerate(befores):
            for k, count in enumerate(decodes):
                for m, context in enumerate(contexts):
                    key = (chunk, before if chunk else 0.0, count, context if count else 0.0)
                    grid[i, j, k, m] = 0.0 if not chunk and not count else known.get(key, np.nan)
    _extended(grid, decodes)
    lacking = np.argwhere(np.isnan(grid))
    if len(lacking):
        i, j, k, m = lacking[0]
        where = dict(zip(_AXES, (chunks[i], befores[j], decodes[k], contexts[m]), strict=True))
        raise ConfigError("tables", str(folder), f"attention.csv lacks the row of {where}")
    return Attention((np.array(chunks), np.array(befores), np.array(decodes), np.array(contexts)), grid)


def _extended(grid: npt.NDArray[np.float64], decodes: Sequence[float]) -> None:
    """Fill what is missing at the largest number of single tokens from the two below it."""
    if len(decodes) < 4:
        return
    share = (decodes[-1] - decodes[-2]) / (decodes[-2] - decodes[-3])
    beyond = grid[:, :, -2] + share * (grid[:, :, -2] - grid[:, :, -3])
    grid[:, :, -1] = np.where(np.isnan(grid[:, :, -1]), np.maximum(beyond, grid[:, :, -2]), grid[:, :, -1])
