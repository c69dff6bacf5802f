"""From measured steps to a calibration: the two fits, and how far single steps and kinds of steps lie from them.

Owns what is made of the measurements: of each shape the trimmed mean of its repetitions is fitted; intervals are
quantiles of single steps over what a fit says that had not seen their scene, nor, where several processes measured,
any step of their process: the same work takes one process longer than the next, and a prediction is of a process that
nobody has measured. Measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.cost.calibration import Knot
from octavo.cost.fit import Fit, fit_plain, fit_seconds, predicted
from octavo.cost.interval import Unseen, factors_at, of_another_process
from octavo.cost.laws import Law
from octavo.cost.speeds import Speed, speed_of
from octavo.cost.step import Float64, StepShape
from octavo.cost.terms import STEP, Term, quantities_of
from octavo.memory.values import Int64

_TRIM = 0.2
_STEPS = 64
"""More than a scene has."""
_ROUNDS = 10
"""Until rows and columns of a table are told apart."""
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
    process: int = 0
    """Which of several processes measured it."""
    rates: tuple[float, ...] = ()
    """Bytes a second that memory was read at before and after its scene; empty: nobody looked."""


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
    names: Int64
    """Of each scene and step one."""
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
    by_process = {
        number: _points([sample for sample in samples if sample.process == number], laws)
        for number in sorted({sample.process for sample in samples})
    }
    terms = (step.sum.terms, host.sum.terms)
    unseen = _unseen(points, expected) if len(by_process) == 1 else _across(samples, by_process, laws, terms)
    errors = {
        "step_median": step.error,
        "step_p90": float(np.quantile(np.abs(step.left_out / points.device - 1), 0.9)),
        "host_median": host.error,
        "together_median": float(np.median(np.abs((points.device + points.host) / expected - 1))),
        "noise_median": float(np.median(np.concatenate([_noise(each.singly) for each in by_process.values()]))),
    }
    if len(by_process) > 1:
        errors |= _between(samples, by_process, laws, terms)
    return Learned(step, host, unseen.knots(), unseen.run_interval(), errors)


def usual_steps(samples: Sequence[Sample]) -> tuple[list[Sample], Speed | None]:
    """Those that were measured between two reads at the machine's usual speed of memory; all where it has but one."""
    speed = speed_of([rate for sample in samples for rate in sample.rates])
    if speed is None or speed.other is None:
        return list(samples), speed
    return [sample for sample in samples if all(speed.at(rate) for rate in sample.rates)], speed


_Terms = tuple[Sequence[Term], Sequence[Term]]
"""Of the device's law and of the host's."""


def _across(samples: Sequence[Sample], by_process: Mapping[int, _Points], laws: Sequence[Law], terms: _Terms) -> Unseen:
    """Every process beside what the others let expect of it."""
    parts = []
    for number, mine in by_process.items():
        others = _points([sample for sample in samples if sample.process != number], laws)
        parts.append(_unseen(mine, _elsewhere(others, mine, terms)))
    return of_another_process(parts)


def _unseen(points: _Points, expected: Float64) -> Unseen:
    return Unseen.of(points.names, points.device + points.host, points.singly, expected)


def _elsewhere(others: _Points, mine: _Points, terms: _Terms) -> Float64:
    """What a law of other processes says of my points, each of a scene that it has not seen."""
    device = predicted(terms[0], (others.rows, others.device, others.scenes), (mine.rows, mine.scenes))
    host = predicted(terms[1], (others.rows, others.host, others.scenes), (mine.rows, mine.scenes))
    total: Float64 = np.maximum(device + host, 1e-3 * (mine.device + mine.host))
    return total


def _between(
    samples: Sequence[Sample], by_process: Mapping[int, _Points], laws: Sequence[Law], terms: _Terms
) -> dict[str, float]:
    """How far whole processes lie apart, and how often intervals of all but one hold in that one.

    The bounds of prices are those of all processes; the prices, and the intervals, are of the others alone.
    """
    offs, inside, widths = [], [], []
    for number, mine in by_process.items():
        others = [sample for sample in samples if sample.process != number]
        theirs = {other: points for other, points in by_process.items() if other != number}
        pooled = _points(others, laws)
        expected = _elsewhere(pooled, mine, terms)
        found = _unseen(mine, expected)
        offs.append(abs(float(np.median(found.together)) - 1))
        if len(theirs) > 1:
            knots = _across(others, theirs, laws, terms).knots()
            low, high = factors_at(knots, found.seconds)
            held = (low <= found.singly) & (found.singly <= high)
            inside.append(float(np.average(held, weights=found.weights)))
            widths.append(float(np.median(high - low)))
    told = {"processes_apart": float(np.mean(offs))}
    if inside:
        told |= {"inside_elsewhere": float(np.mean(inside)), "width_elsewhere": float(np.median(widths))}
    return told


def _points(samples: Sequence[Sample], laws: Sequence[Law]) -> _Points:
    """Of each shape what it takes the mean of all processes; of each process the trimmed mean of its repetitions."""
    together: dict[tuple[int, int], dict[int, list[Sample]]] = {}
    for sample in samples:
        together.setdefault((sample.scene, sample.step), {}).setdefault(sample.process, []).append(sample)
    keys = sorted(together)
    shapes = [next(iter(together[key].values()))[0].shape for key in keys]
    numbers = sorted({sample.process for sample in samples})
    device, host = np.full((2, len(keys), len(numbers)), np.nan)
    for row, key in enumerate(keys):
        for number, own in together[key].items():
            column = numbers.index(number)
            device[row, column] = trimmed_mean([one.device_s for one in own])
            host[row, column] = trimmed_mean([one.host_s for one in own])
    return _Points(
        rows=[quantities_of(shape, laws) for shape in shapes],
        names=np.array([_STEPS * scene + step for scene, step in keys], dtype=np.int64),
        scenes=np.array([scene for scene, _ in keys], dtype=np.int64),
        device=level(device),
        host=level(host),
        singly=[np.array([one.device_s + one.host_s for own in together[key].values() for one in own]) for key in keys],
    )


def level(table: Float64) -> Float64:
    """Of each row what all columns would have given; NaN: not measured.

    No process measures all scenes. A scene that only slow ones measured would look slow: what a process is off by,
    the median over its scenes, is taken out before the mean.
    """
    logs = np.log(table)
    off = np.zeros(logs.shape[1])
    if len(off) > 1:
        for _ in range(_ROUNDS):
            rows = np.nanmean(logs - off, axis=1, keepdims=True)
            off = np.nanmedian(logs - rows, axis=0)
            off -= off.mean()
    found: Float64 = np.nanmean(table / np.exp(off), axis=1)
    return found


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the fifth at either end: of two or three values that is their median."""
    ordered = np.sort(np.array(values, dtype=np.float64))
    cut = int(np.ceil(len(ordered) * _TRIM)) if len(ordered) > 2 else 0
    kept = ordered[cut : len(ordered) - cut] if len(ordered) > 2 * cut else ordered
    return float(kept.mean())


def _noise(singly: Sequence[Float64]) -> Float64:
    """How far repetitions of one process lie from the others of their shape; nothing where none was repeated."""
    several = [np.abs(each / np.median(each) - 1) for each in singly if len(each) > 1]
    return np.concatenate(several) if several else np.zeros(1)
