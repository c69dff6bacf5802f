"""Between which times four steps in five end, from steps beside what was expected of them.

Owns quantiles, and what few processes say of the next one: the same work takes one process longer than the next, and a
prediction is of a process that nobody has measured. What differs between processes is one part of the spread, what
differs within each another; only of the first is little known. Fits nothing.

Invariant: intervals of one process alone are plain quantiles, and more processes never make them less certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from octavo.cost.calibration import Knot
from octavo.cost.step import Float64
from octavo.memory.values import Int64

LOW, HIGH = 0.1, 0.9
_MOST_KNOTS = 4
_LEAST_IN_A_KNOT = 60
_LEAST_POINTS_IN_A_KNOT = 20
FACTORS = 15
"""That stand for the law of what a process is off by."""
_NORMAL = 1.2815515655
"""Of the normal law's deviation: nine in ten are below."""
_MOST_FREEDOM = 1e4


@dataclass(frozen=True, slots=True)
class Between:
    """What processes are off by, as a deviation of logarithms."""

    count: int
    raw: float = 0.0
    """As seen, the chance of few scenes in it."""
    true: float = 0.0
    """Without that."""

    @property
    def next_one(self) -> float:
        """Of a further process, from the mean of those that were seen."""
        return self.true * float(np.sqrt(1 + 1 / self.count))

    def widening(self, ratios: Float64, weights: Float64) -> float:
        """Times which an interval of these ratios is wider for how little so few processes say of their law.

        The variance of a step is a sum, and only what processes are off by is not well known: Student's law of as many
        degrees of freedom as the sum has, after Satterthwaite.
        """
        if self.count < 2 or not self.raw:
            return 1.0
        low, high = (weighted_quantile(ratios, weights, share) for share in (LOW, HIGH))
        whole = (np.log(high / low) / (2 * _NORMAL)) ** 2
        unknown = self.raw**2 * (1 + 1 / self.count)
        share = min(1.0, unknown / whole) if whole else 1.0
        return student(round(min(_MOST_FREEDOM, (self.count - 1) / share**2), 2)) / _NORMAL


@dataclass(frozen=True, slots=True)
class Unseen:
    """Steps beside what was expected of them by a fit that had seen neither their scene nor their process."""

    points: Int64
    """What each point is called: the same in all processes."""
    together: Float64
    """Of each point: its mean over what was expected."""
    seconds: Float64
    """Of each step: what was expected."""
    singly: Float64
    """Of each step: its time over that."""
    weights: Float64
    """Every point counts alike."""
    between: Between = Between(1)

    @classmethod
    def of(cls, points: Int64, means: Float64, singly: Sequence[Float64], expected: Float64) -> Unseen:
        """`singly`: of each point the seconds of all its repetitions; `means` the seconds it is taken as."""
        repeats = np.array([len(each) for each in singly])
        ratios = np.concatenate([each / seconds for each, seconds in zip(singly, expected, strict=True)])
        return cls(points, means / expected, np.repeat(expected, repeats), ratios, np.repeat(1 / repeats, repeats))

    def knots(self) -> tuple[Knot, ...]:
        return knots_of(self.seconds, self.singly, self.weights, self.between)

    def run_interval(self) -> tuple[float, float]:
        """Of many steps of one kind together."""
        return interval_of(self.together, np.ones(len(self.together)), self.between)


def of_another_process(parts: Sequence[Unseen]) -> Unseen:
    """Steps of a process that nobody has measured: those of all, as far off as processes are from each other."""
    many = len(parts)
    logs = [np.log(part.together) for part in parts]
    # What a process is off by, beside the mean of all: the others' mean lacks it, and is so much further away.
    off = np.array([float(np.median(each)) for each in logs]) * (many - 1) / many
    # Of that so much is chance, since a process measured few scenes.
    within = sum(float(((each - each.mean()) ** 2).sum()) for each in logs)
    within /= max(1, sum(len(each) for each in logs) - many)
    chance = float(np.mean([np.pi / 2 * within / len(each) for each in logs]))
    raw = float((off**2).sum()) / (many - 1)
    variance = max(0.0, raw - chance)
    between = Between(many, float(np.sqrt(raw)), float(np.sqrt(variance)))
    true = variance / raw if variance else 0.0
    factors = np.exp(between.next_one * normal(FACTORS))
    shrunk = true * off * many / (many - 1)
    singly = np.concatenate([part.singly * np.exp(-each) for part, each in zip(parts, shrunk, strict=True)])
    # Of a point all processes together: what is left of its repetitions' noise is in no run of many steps.
    points = np.concatenate([part.points for part in parts])
    names, place = np.unique(points, return_inverse=True)
    left = np.concatenate([each - by for each, by in zip(logs, shrunk, strict=True)])
    together = np.exp(np.bincount(place, left) / np.bincount(place))
    count = len(factors)
    return Unseen(
        np.repeat(names, count),
        np.outer(together, factors).ravel(),
        np.repeat(np.concatenate([part.seconds for part in parts]), count),
        np.outer(singly, factors).ravel(),
        np.repeat(np.concatenate([part.weights for part in parts]) / count, count),
        between,
    )


def factors_at(knots: Sequence[Knot], seconds: Float64) -> tuple[Float64, Float64]:
    """Between how many times their prediction four in five steps of so many predicted seconds end."""
    at = np.log([max(knot.seconds, 1e-12) for knot in knots])
    here = np.log(np.maximum(seconds, 1e-12))
    low: Float64 = np.interp(here, at, [knot.low for knot in knots])
    high: Float64 = np.interp(here, at, [knot.high for knot in knots])
    return low, high


def knots_of(seconds: Float64, ratios: Float64, weights: Float64, between: Between = Between(1)) -> tuple[Knot, ...]:
    """Intervals of steps that take about as long, in groups of equal weight."""
    order = np.argsort(seconds, kind="stable")
    reached = np.cumsum(weights[order])
    groups = max(1, min(_MOST_KNOTS, len(order) // _LEAST_IN_A_KNOT, int(reached[-1]) // _LEAST_POINTS_IN_A_KNOT))
    cuts = np.searchsorted(reached, reached[-1] * np.arange(1, groups) / groups)
    return tuple(
        Knot(
            float(np.exp(np.average(np.log(seconds[group]), weights=weights[group]))),
            *interval_of(ratios[group], weights[group], between),
        )
        for group in np.split(order, cuts)
    )


def interval_of(ratios: Float64, weights: Float64, between: Between) -> tuple[float, float]:
    """The tenth and ninetieth percentile, as far from the middle as is known of so few processes."""
    low, middle, high = (weighted_quantile(ratios, weights, share) for share in (LOW, 0.5, HIGH))
    wider = between.widening(ratios, weights)
    return middle * (low / middle) ** wider, middle * (high / middle) ** wider


def weighted_quantile(values: Float64, weights: Float64, share: float) -> float:
    """The value below which `share` of the weight lies, half of a value's own weight being below it."""
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(share * weights.sum(), below, values[order]))


@cache
def student(freedom: float) -> float:
    """Below which nine in ten values of Student's law with so many degrees of freedom lie."""
    # Over the angle whose tangent is t / sqrt(freedom), the density is a power of its cosine.
    angle = np.linspace(-np.pi / 2, np.pi / 2, 20_001)
    angles = _reaching(angle, np.maximum(np.cos(angle), 0.0) ** (freedom - 1), np.array([HIGH]))
    return float(np.sqrt(freedom) * np.tan(angles[0]))


def normal(count: int) -> Float64:
    """So many values that stand for equal shares of the normal law."""
    values = np.linspace(-8.0, 8.0, 20_001)
    return _reaching(values, np.exp(-(values**2) / 2), (np.arange(count) + 0.5) / count)


def _reaching(values: Float64, density: Float64, shares: Float64) -> Float64:
    # A value's own density is half below it.
    reached = np.cumsum(density) - density / 2
    found: Float64 = np.interp(shares, reached / density.sum(), values)
    return found
