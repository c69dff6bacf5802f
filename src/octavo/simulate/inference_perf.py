"""Workload definitions of inference-perf: a JSON object of distributions, from which sessions of requests are drawn.

Owns the fields and what each distribution means. Arrivals are not in such a file: sessions come as `Arrivals` say.
A first prompt is as long as `input_sequence_length` says and begins with the system prompt, which all share; each
later turn has all that was said before and `input_sequence_length_per_turn` more, `time_between_turns` after the
answer. One seed gives one workload.

    normal, log_normal, exponential, uniform     cut to min and max
    bimodal                                      min, or the one other value that gives the mean and the deviation
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from octavo.cost.step import Float64
from octavo.errors import ConfigError
from octavo.simulate.executors import NANOSECONDS
from octavo.simulate.synthetic import Arrivals
from octavo.simulate.trace import MOST_NS, MOST_TOKENS, TraceRequest

_LARGEST = 2**20
_TYPES = ("normal", "log_normal", "exponential", "uniform", "bimodal")
_NEEDED = ("input_sequence_length", "output_sequence_length")


@dataclass(frozen=True, slots=True)
class Distribution:
    low: float
    high: float
    mean: float
    deviation: float
    kind: str = "log_normal"
    """Where a file does not say: log-normal."""

    def draw(self, generator: np.random.Generator, count: int) -> Float64:
        drawn = np.full(count, self.mean)
        if self.deviation > 0 and self.mean > 0:
            drawn = getattr(self, f"_{self.kind}")(generator, count)
        cut: Float64 = np.clip(drawn, self.low, self.high)
        return cut

    def _normal(self, generator: np.random.Generator, count: int) -> Float64:
        return generator.normal(self.mean, self.deviation, count)

    def _log_normal(self, generator: np.random.Generator, count: int) -> Float64:
        variance = log(1 + (self.deviation / self.mean) ** 2)
        return generator.lognormal(log(self.mean) - variance / 2, sqrt(variance), count)

    def _exponential(self, generator: np.random.Generator, count: int) -> Float64:
        shifted: Float64 = self.low + generator.exponential(max(self.mean - self.low, 1e-9), count)
        return shifted

    def _uniform(self, generator: np.random.Generator, count: int) -> Float64:
        return generator.uniform(self.low, self.high, count)

    def _bimodal(self, generator: np.random.Generator, count: int) -> Float64:
        above = self.mean - self.low
        share = above**2 / (above**2 + self.deviation**2)
        drawn: Float64 = np.where(generator.random(count) < share, self.low + above / max(share, 1e-9), self.low)
        return drawn


_NONE = Distribution(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Definition:
    source: str
    inputs: Distribution
    outputs: Distribution
    system: Distribution = _NONE
    turns: Distribution = Distribution(1, 1, 1, 0)
    more: Distribution = _NONE
    pauses: Distribution = _NONE
    objectives: Mapping[str, float] = field(default_factory=dict)
    """As the file names them, in milliseconds."""

    def draw(self, requests: int, arrivals: Arrivals, seed: int = 0) -> tuple[TraceRequest, ...]:
        """So many requests of sessions, in order of arrival; later turns arrive with their session and wait."""
        if requests < 1:
            raise ConfigError("requests", requests, "must be at least 1")
        if seed < 0:
            raise ConfigError("seed", seed, "must be at least 0")
        generator = np.random.default_rng(seed)
        turns = np.maximum(1, np.rint(self.turns.draw(generator, requests))).astype(np.int64)
        sessions = int(np.searchsorted(np.cumsum(turns), requests) + 1)
        moments = arrivals.draw_ns(generator, sessions).tolist()
        inputs, more, outputs, pauses = (
            one.draw(generator, requests) for one in (self.inputs, self.more, self.outputs, self.pauses)
        )
        system = round(float(self.system.draw(generator, 1)[0]))
        made: list[TraceRequest] = []
        for session in range(sessions):
            said = 0
            for turn in range(min(int(turns[session]), requests - len(made))):
                number = len(made)
                said = said + _tokens(more[number]) if turn else max(_tokens(inputs[number]), system + 1)
                answer = _tokens(outputs[number])
                entry = TraceRequest(
                    arrival_ns=moments[session],
                    input_tokens=min(said, MOST_TOKENS),
                    output_tokens=answer,
                    hash_ids=(0,) if system else (),
                    hash_block=system,
                    session=f"s{session}" if turns[session] > 1 else None,
                    think_ns=round(float(pauses[number]) * NANOSECONDS) if turn else 0,
                )
                made.append(entry)
                said += answer
        return tuple(made)


def _tokens(drawn: float) -> int:
    return min(MOST_TOKENS, max(1, round(float(drawn))))


def is_definition(path: str | Path) -> bool:
    """Whether a file looks like one: a JSON object over several lines that names its input lengths."""
    try:
        with Path(path).open("rb") as file:
            begin = file.read(_LARGEST)
    except OSError:
        return False
    return begin.lstrip()[:1] == b"{" and all(f'"{name}"'.encode() in begin for name in _NEEDED)


def read_definition(path: str | Path) -> Definition:
    """Raises `ConfigError` for the first field that is wrong."""
    try:
        data = Path(path).read_bytes()
        told = json.loads(data.decode("utf-8-sig")) if len(data) <= _LARGEST else None
    except OSError as error:
        raise ConfigError("trace", str(path), f"cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError("trace", str(path), f"is no JSON ({error})") from None
    if not isinstance(told, dict):
        raise ConfigError("trace", str(path), "is no JSON object of a workload")
    several = told.get("multi_turn", "number_of_turns" in told) is True
    slos = told.get("metadata", {}).get("slos", {}) if isinstance(told.get("metadata"), dict) else {}
    objectives = {
        str(name): float(value) for name, value in (slos if isinstance(slos, dict) else {}).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }  # fmt: skip
    return Definition(
        Path(path).name,
        _distribution(told, "input_sequence_length"),
        _distribution(told, "output_sequence_length"),
        _distribution(told, "system_prompt", _NONE),
        _distribution(told, "number_of_turns", Distribution(1, 1, 1, 0)) if several else Distribution(1, 1, 1, 0),
        _distribution(told, "input_sequence_length_per_turn", _NONE) if several else _NONE,
        _distribution(told, "time_between_turns", _NONE) if several else _NONE,
        objectives,
    )


def _distribution(told: Mapping[str, Any], name: str, otherwise: Distribution | None = None) -> Distribution:
    if name not in told and otherwise is not None:
        return otherwise
    one = told.get(name)
    if not isinstance(one, dict):
        raise ConfigError(name, one, "must be an object with min, max, mean and standard_deviation")
    low, high, mean, deviation = (
        _number(one.get(key), f"{name}.{key}") for key in ("min", "max", "mean", "standard_deviation")
    )
    if not low <= mean <= high:
        raise ConfigError(f"{name}.mean", mean, f"must be from min={low:g} to max={high:g}")
    kind = one.get("distribution_type", "log_normal")
    if kind not in _TYPES:
        raise ConfigError(f"{name}.distribution_type", kind, f"use {', '.join(_TYPES)}")
    return Distribution(low, high, mean, deviation, kind)


def _number(value: Any, name: str) -> float:
    most = MOST_NS / NANOSECONDS
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or not 0 <= value <= most:
        raise ConfigError(name, value, "must be a number of at least 0")
    return float(value)
