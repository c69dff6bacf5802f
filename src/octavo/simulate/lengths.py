"""Distributions of lengths, by name or by numbers: what synthetic workloads draw prompts and outputs from.

Each is a frozen value with one verb, `draw`; randomness comes from the generator that is passed in. Lengths are
whole tokens from 1 on. `sharegpt` and `alpaca` are lognormal with the published means (161.31 tokens in and 337.99
out; 19.31 and 58.45); the spread is not published: a standard deviation as large as the mean is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log, sqrt
from typing import Protocol

import numpy as np

from octavo.errors import ConfigError
from octavo.memory.values import Int64
from octavo.simulate.trace import MOST_TOKENS


class Lengths(Protocol):
    def draw(self, generator: np.random.Generator, count: int) -> Int64: ...


def _length(field: str, value: int) -> None:
    if value < 1:
        raise ConfigError(field, value, "a length is at least 1 token")
    if value > MOST_TOKENS:
        raise ConfigError(field, value, f"a length is at most {MOST_TOKENS} tokens")


def _positive(field: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(field, value, "must be above 0")


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: int

    def __post_init__(self) -> None:
        _length("tokens", self.tokens)

    def draw(self, generator: np.random.Generator, count: int) -> Int64:
        return np.full(count, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    low: int
    high: int
    """Inclusive."""

    def __post_init__(self) -> None:
        _length("low", self.low)
        _length("high", max(1, self.high))
        if self.high < self.low:
            raise ConfigError("high", self.high, f"must not be below low={self.low}")

    def draw(self, generator: np.random.Generator, count: int) -> Int64:
        return generator.integers(self.low, self.high, count, endpoint=True, dtype=np.int64)


MOST_SPREAD = 1e6


@dataclass(frozen=True, slots=True)
class LogNormal:
    mean: float
    """Of the lengths themselves, not of their logarithms."""
    deviation: float
    most: int | None = None

    def __post_init__(self) -> None:
        _positive("mean", self.mean)
        _length("mean", max(1, round(self.mean)))
        _positive("deviation", self.deviation)
        if not 1 / MOST_SPREAD <= self.deviation / self.mean <= MOST_SPREAD:
            remedy = f"must be a millionth of mean={self.mean:g} at least, and {MOST_SPREAD:,.0f} times it at most"
            raise ConfigError("deviation", self.deviation, remedy)

    def draw(self, generator: np.random.Generator, count: int) -> Int64:
        variance = log(1 + (self.deviation / self.mean) ** 2)
        drawn = generator.lognormal(log(self.mean) - variance / 2, sqrt(variance), count)
        lengths: Int64 = np.clip(np.rint(drawn), 1, self.most or MOST_TOKENS).astype(np.int64)
        return lengths


@dataclass(frozen=True, slots=True)
class Zipf:
    """Length n with a probability that falls with n to the power of `exponent`, between `low` and `high`."""

    exponent: float
    low: int
    high: int

    def __post_init__(self) -> None:
        _positive("exponent", self.exponent)
        _length("low", self.low)
        _length("high", max(1, self.high))
        if self.high < self.low:
            raise ConfigError("high", self.high, f"must not be below low={self.low}")

    def draw(self, generator: np.random.Generator, count: int) -> Int64:
        lengths = np.arange(self.low, self.high + 1, dtype=np.int64)
        weights = np.cumsum((lengths / self.low) ** -self.exponent)
        drawn: Int64 = lengths[np.searchsorted(weights, generator.random(count) * weights[-1], side="right")]
        return drawn


@dataclass(frozen=True, slots=True)
class Empirical:
    """Lengths that were seen, drawn with replacement."""

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("tokens", self.tokens, "needs at least one length that was seen")
        for tokens in (min(self.tokens), max(self.tokens)):
            _length("tokens", tokens)

    def draw(self, generator: np.random.Generator, count: int) -> Int64:
        drawn: Int64 = generator.choice(np.array(self.tokens, dtype=np.int64), count)
        return drawn


NAMED: Mapping[str, tuple[Lengths, Lengths]] = {
    "sharegpt": (LogNormal(161.31, 161.31), LogNormal(337.99, 337.99)),
    "alpaca": (LogNormal(19.31, 19.31), LogNormal(58.45, 58.45)),
}
"""(prompts, outputs)."""

_KINDS: Mapping[str, tuple[int, Callable[[Sequence[float]], Lengths]]] = {
    "fixed": (1, lambda v: Fixed(int(v[0]))),
    "uniform": (2, lambda v: Uniform(int(v[0]), int(v[1]))),
    "lognormal": (2, lambda v: LogNormal(v[0], v[1])),
    "zipf": (3, lambda v: Zipf(v[0], int(v[1]), int(v[2]))),
}


def lengths_named(field: str, text: str) -> Lengths:
    """`512`, `uniform:16,256`, `lognormal:161.3,200`, `zipf:1.2,16,4096`, `empirical:12,800,90`."""
    kind, _, rest = text.partition(":")
    if not rest:
        kind, rest = "fixed", text
    try:
        values = [float(part) for part in rest.split(",")]
    except ValueError:
        values = []
    whole = values if kind in ("fixed", "uniform", "empirical") else values[1:] if kind == "zipf" else []
    good = all(isfinite(value) for value in values) and all(value == int(value) for value in whole)
    try:
        if kind == "empirical" and values and good:
            return Empirical(tuple(int(value) for value in values))
        if kind in _KINDS and len(values) == _KINDS[kind][0] and good:
            return _KINDS[kind][1](values)
    except ConfigError as error:
        raise ConfigError(field, text, f"{error.field}={error.value}: {error.remedy}") from None
    raise ConfigError(
        field,
        text,
        "use 512, uniform:16,256, lognormal:161,200 (mean, deviation), zipf:1.2,16,4096 or empirical:..",
    )
