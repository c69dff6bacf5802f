"""From measured steps to a calibration: the two fits, and how far single steps and kinds of steps lie from them.

Owns what is made of the measurements: of each shape the trimmed mean of its repetitions is fitted; intervals are
quantiles of single steps over what a fit that had not seen their scene says. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.cost.calibration import Knot
from octavo.cost.fit import Fit, fit_plain, fit_seconds
from octavo.cost.laws import Law
from octavo.cost.step import Float64, StepShape
from octavo.cost.terms import STEP, quantities_of
from octavo.memory.values import Int64

LOW, HIGH = 0.1, 0.9
_TRIM = 0.2
_MOST_KNOTS = 4
_LEAST_IN_A_KNOT = 60
_LEAST_POINTS_IN_A_KNOT = 20
_HOST = (STEP, "chunks", "tokens", "sampled", "long")


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One step that ran."""

    scene: int
    step: int
    """Which of the scene's steps: the same scene and step have the same shape."""
    shape: StepShape
    device_s: float
    host_s: float


@dataclass(frozen=True, slots=True)
class Learned:
    step: Fit
    host: Fit
    knots: tuple[Knot, ...]
    run_interval: tuple[float, float]
    errors: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Points:
    """Samples of one shape, taken together."""

    rows: list[dict[str, Any]]
    scenes: Int64
    device: Float64
    host: Float64
    singly: list[Float64]
    """Host and device of every repetition."""


def learn(samples: Sequence[Sample], laws: Sequence[Law]) -> Learned:
    """Raises `ConfigError` where there are too few steps to fit."""
    points = _points(samples, laws)
    step = fit_seconds(points.rows, points.device, points.scenes, laws)
    host = fit_plain(points.rows, points.host, points.scenes, _HOST)
    expected = step.left_out + host.left_out
    together = (points.device + points.host) / expected
    singly = np.concatenate([each / seconds for each, seconds in zip(points.singly, expected, strict=True)])
    repeats = np.array([len(each) for each in points.singly])
    seconds, weights = np.repeat(expected, repeats), np.repeat(1 / repeats, repeats)
    errors = {
        "step_median": step.error,
        "step_p90": float(np.quantile(np.abs(step.left_out / points.device - 1), 0.9)),
        "host_median": host.error,
        "together_median": float(np.median(np.abs(together - 1))),
        "noise_median": _noise(points.singly),
    }
    run = (float(np.quantile(together, LOW)), float(np.quantile(together, HIGH)))
    return Learned(step, host, knots_of(seconds, singly, weights), run, errors)


def knots_of(seconds: Float64, ratios: Float64, weights: Float64) -> tuple[Knot, ...]:
    """Quantiles of the ratios of steps that take about as long, in groups of equal weight."""
    order = np.argsort(seconds, kind="stable")
    reached = np.cumsum(weights[order])
    groups = max(1, min(_MOST_KNOTS, len(order) // _LEAST_IN_A_KNOT, int(reached[-1]) // _LEAST_POINTS_IN_A_KNOT))
    cuts = np.searchsorted(reached, reached[-1] * np.arange(1, groups) / groups)
    return tuple(
        Knot(
            float(np.exp(np.average(np.log(seconds[group]), weights=weights[group]))),
            weighted_quantile(ratios[group], weights[group], LOW),
            weighted_quantile(ratios[group], weights[group], HIGH),
        )
        for group in np.split(order, cuts)
    )


def weighted_quantile(values: Float64, weights: Float64, share: float) -> float:
    """The value below which `share` of the weight lies, half of a value's own weight being below it."""
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(share * weights.sum(), below, values[order]))


def _points(samples: Sequence[Sample], laws: Sequence[Law]) -> _Points:
    together: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        together.setdefault((sample.scene, sample.step), []).append(sample)
    keys = sorted(together)
    return _Points(
        rows=[quantities_of(together[key][0].shape, laws) for key in keys],
        scenes=np.array([scene for scene, _ in keys], dtype=np.int64),
        device=np.array([trimmed_mean([sample.device_s for sample in together[key]]) for key in keys]),
        host=np.array([trimmed_mean([sample.host_s for sample in together[key]]) for key in keys]),
        singly=[np.array([sample.device_s + sample.host_s for sample in together[key]]) for key in keys],
    )


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the fifth at either end: of two or three values that is their median."""
    ordered = np.sort(np.array(values, dtype=np.float64))
    cut = int(np.ceil(len(ordered) * _TRIM)) if len(ordered) > 2 else 0
    kept = ordered[cut : len(ordered) - cut] if len(ordered) > 2 * cut else ordered
    return float(kept.mean())


def _noise(singly: Sequence[Float64]) -> float:
    """How far a repetition lies from the others of its shape, in the middle."""
    several = [np.abs(each / np.median(each) - 1) for each in singly if len(each) > 1]
    return float(np.median(np.concatenate(several))) if several else 0.0
