"""Intervals from few processes hold as often as they say, whatever the noise, and are wider the less is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from octavo.cost.interval import HIGH, LOW, Between, Unseen, interval_of, knots_of, normal, of_another_process, student

CALIBRATIONS = 60
NEXT = 2000
"""Processes that a calibration is held against."""


def measured(
    random: np.random.Generator, processes: int, points: int, apart: float, noise: float
) -> tuple[list[Unseen], float]:
    """Steps beside what all other processes let expect of them, and the mean that a fit would find."""
    off = apart * random.standard_normal(processes)
    logs = off[:, None, None] + noise * random.standard_normal((processes, points, 2))
    means = logs.mean(axis=(1, 2))
    parts = []
    for number in range(processes):
        expected = np.full(points, np.exp(np.delete(means, number).mean()))
        seconds = np.exp(logs[number])
        parts.append(Unseen.of(np.arange(points), seconds.mean(axis=1), list(seconds), expected))
    return parts, float(np.exp(means.mean()))


def coverage(processes: int, points: int, apart: float, noise: float) -> tuple[float, float]:
    """How often steps of further processes lie in their interval, over many calibrations, and its mean width."""
    random = np.random.default_rng(round(1e4 * (apart + 7 * noise)) + processes)
    held, widths = [], []
    for _ in range(CALIBRATIONS):
        parts, expected = measured(random, processes, points, apart, noise)
        (knot,) = knots_of(*one_class(of_another_process(parts)))
        took = np.exp(apart * random.standard_normal(NEXT) + noise * random.standard_normal(NEXT)) / expected
        held.append(float(((knot.low <= took) & (took <= knot.high)).mean()))
        widths.append(knot.high - knot.low)
    return float(np.mean(held)), float(np.mean(widths))


def test_the_noise_of_single_steps_is_in_no_interval_of_a_run() -> None:
    random = np.random.default_rng(6)
    apart, noise, held = 0.04, 0.08, []
    for _ in range(CALIBRATIONS):
        parts, expected = measured(random, 8, 20, apart, noise)
        low, high = of_another_process(parts).run_interval()
        runs = np.exp(apart * random.standard_normal(NEXT)) / expected
        held.append(float(((low <= runs) & (runs <= high)).mean()))
    assert 0.76 < np.mean(held) < 0.86


def one_class(found: Unseen) -> tuple[np.ndarray, np.ndarray, np.ndarray, Between]:
    assert np.ptp(np.log(found.seconds)) < 1, "all steps are alike here"
    # So little weight is one class of step length.
    return found.seconds, found.singly, found.weights / found.weights.sum(), found.between


@pytest.mark.parametrize(
    ("apart", "noise"), [(0.0, 0.03), (0.03, 0.03), (0.03, 0.10), (0.08, 0.02)],
)  # fmt: skip
@pytest.mark.parametrize(("processes", "points"), [(4, 40), (8, 20)])
def test_four_in_five_steps_of_other_processes_lie_in_their_interval(
    processes: int, points: int, apart: float, noise: float
) -> None:
    inside, width = coverage(processes, points, apart, noise)
    assert 0.76 < inside < 0.84
    known = 2 * 1.2816 * np.hypot(apart, noise)
    assert known * 0.9 < width < known * (1.55 if processes == 4 else 1.25)


@pytest.mark.parametrize(
    ("wider", "apart", "noise", "least", "most"),
    [
        (lambda between: student(between.count - 1) / student(1e4), 0.03, 0.10, 0.86, 1.0),
        (lambda between: 1.0, 0.08, 0.02, 0.0, 0.76),
    ],
    ids=["Student's law for all of it", "none"],
)
def test_simpler_intervals_would_hold_too_often_or_too_seldom(
    wider: Callable[[Between], float], apart: float, noise: float, least: float, most: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Between, "widening", lambda between, ratios, weights: wider(between))
    inside, _ = coverage(4, 40, apart, noise)
    assert least < inside < most


def test_twice_as_many_processes_of_half_the_steps_each_say_more() -> None:
    _, few = coverage(4, 40, apart=0.05, noise=0.03)
    _, many = coverage(8, 20, apart=0.05, noise=0.03)
    assert many < 0.95 * few


def test_what_few_scenes_are_off_by_is_not_taken_for_what_processes_are_off_by() -> None:
    random = np.random.default_rng(8)
    found = [of_another_process(measured(random, 8, 2, 0.0, 0.05)[0]).between for _ in range(CALIBRATIONS)]
    assert np.median([between.raw for between in found]) > 0.02
    assert np.median([between.true for between in found]) < 0.005
    apart = [of_another_process(measured(random, 8, 2, 0.1, 0.05)[0]).between.true for _ in range(CALIBRATIONS)]
    assert 0.08 < np.median(apart) < 0.12


def test_the_interval_is_wider_only_for_what_is_not_well_known() -> None:
    random = np.random.default_rng(2)
    steps, ones = np.exp(0.05 * random.standard_normal(4000)), np.ones(4000)
    plain = interval_of(steps, ones, Between(1))
    assert plain == pytest.approx((np.quantile(steps, LOW), np.quantile(steps, HIGH)), rel=1e-3)
    assert interval_of(steps, ones, Between(4, raw=0.0, true=0.0)) == plain
    little, much = (Between(4, raw=raw, true=raw).widening(steps, ones) for raw in (0.01, 0.2))
    assert 1 < little < 1.01
    assert much == pytest.approx(student(3) / student(1e4), rel=1e-3)
    assert Between(8, raw=0.2, true=0.2).widening(steps, ones) < 0.9 * much


def test_steps_that_only_others_disturb_now_and_then_leave_the_interval_where_it_was() -> None:
    random = np.random.default_rng(3)
    parts, _ = measured(random, 6, 40, apart=0.02, noise=0.03)
    wild = [
        replace(part, singly=np.where(random.random(len(part.singly)) < 0.02, 5 * part.singly, part.singly))
        for part in parts
    ]
    (calm,), (disturbed,) = (knots_of(*one_class(of_another_process(each))) for each in (parts, wild))
    assert disturbed.low == pytest.approx(calm.low, rel=0.01)
    assert disturbed.high == pytest.approx(calm.high, rel=0.02)


def test_nine_in_ten_values_of_students_law_are_below() -> None:
    for freedom, tenth in ((1, 3.078), (3, 1.638), (7, 1.415), (30, 1.310)):
        assert student(freedom) == pytest.approx(tenth, rel=1e-3)
    values = normal(2001)
    assert values[1800] == pytest.approx(1.2816, rel=2e-3)
    assert values[1000] == pytest.approx(0.0, abs=1e-3)
    assert (np.diff(values) > 0).all()
