"""How often intervals from few processes hold, where the laws that steps are drawn from are known. Measures no engine.

Processes are off by a factor each, and so is every step; calibrations of few processes make intervals, and further
processes are held against them. Beside octavo's way of making them: plain quantiles of every process over the others
(as conformal prediction takes them), a normal law for what the next process is off by, Student's law for that, and for
all of the spread. The same number of steps each, by four processes or by eight. Prints how often each holds, how
unequally calibrations do (nine in ten of them hold more often than `least`), and the width, then one JSON line.

    python benchmarks/intervals.py                      ten seconds of one core
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from octavo.cost.interval import FACTORS, Between, Unseen, interval_of, of_another_process, student

CASES = ((0.0, 0.05), (0.03, 0.05), (0.03, 0.10), (0.08, 0.02))
"""Deviations: of processes, and of the steps of one."""
STEPS = 240
REPEATS = 2
NEXT = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrations", type=int, default=200, help="of each case (default 200)")
    options = parser.parse_args()
    print(f"{'':42}" + "".join(f"{f'{apart:.0%} apart, {noise:.0%} steps':>26}" for apart, noise in CASES))
    print(f"{'':42}" + f"{'holds':>10}{'least':>8}{'width':>8}" * len(CASES))
    told = []
    for processes in (4, 8):
        found = [case(processes, *one, options.calibrations) for one in CASES]
        for name in WAYS:
            rows = [each[name] for each in found]
            cells = (f"{row['holds']:>10.1%}{row['least']:>8.0%}{row['width']:>8.1%}" for row in rows)
            print(f"{f'{processes} processes, {name}':42}" + "".join(cells))
            told.append({"processes": processes, "way": name, "cases": rows})
    print(json.dumps({"benchmark": "intervals", "calibrations": options.calibrations, "cases": CASES, "rows": told}))


def case(processes: int, apart: float, noise: float, calibrations: int) -> dict[str, dict[str, float]]:
    random = np.random.default_rng(1)
    held: dict[str, list[float]] = {name: [] for name in WAYS}
    widths: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(calibrations):
        parts, expected = measured(random, processes, apart, noise)
        took = np.exp(apart * random.standard_normal(NEXT) + noise * random.standard_normal(NEXT)) / expected
        for name, way in WAYS.items():
            low, high = way(parts)
            held[name].append(float(((low <= took) & (took <= high)).mean()))
            widths[name].append(high - low)
    return {
        name: {
            "holds": float(np.mean(held[name])),
            "least": float(np.quantile(held[name], 0.1)),
            "width": float(np.mean(widths[name])),
        }
        for name in WAYS
    }


def measured(
    random: np.random.Generator, processes: int, apart: float, noise: float
) -> tuple[list[Unseen], float]:  # fmt: skip
    """Steps of each process beside what the others let expect, and what a fit over all would expect."""
    points = STEPS // REPEATS // processes
    off = apart * random.standard_normal(processes)
    logs = off[:, None, None] + noise * random.standard_normal((processes, points, REPEATS))
    means = logs.mean(axis=(1, 2))
    parts = []
    for number in range(processes):
        seconds = np.exp(logs[number])
        expected = np.full(points, np.exp(np.delete(means, number).mean()))
        # No scene is another process's as well: what several say of one would only tell more.
        names = np.arange(points) + number * points
        parts.append(Unseen.of(names, seconds.mean(axis=1), list(seconds), expected))
    return parts, float(np.exp(means.mean()))


def plain(parts: Sequence[Unseen]) -> tuple[float, float]:
    singly = np.concatenate([part.singly for part in parts])
    return interval_of(singly, np.ones(len(singly)), Between(1))


def octavos(parts: Sequence[Unseen]) -> tuple[float, float]:
    found = of_another_process(parts)
    return interval_of(found.singly, found.weights, found.between)


def normals(parts: Sequence[Unseen]) -> tuple[float, float]:
    found = of_another_process(parts)
    return interval_of(found.singly, found.weights, replace(found.between, raw=0.0))


def mixed(parts: Sequence[Unseen]) -> tuple[float, float]:
    """As it was: every step as often as Student's law says that the next process is so far off."""
    found, freedom = of_another_process(parts), len(parts) - 1
    drawn = np.random.default_rng(0).standard_t(freedom, 20_001)
    off = found.between.next_one * np.quantile(drawn, (np.arange(FACTORS) + 0.5) / FACTORS)
    steps = found.singly.reshape(-1, FACTORS)[:, FACTORS // 2]  # those of no factor
    singly = np.outer(steps, np.exp(off)).ravel()
    return interval_of(singly, np.ones(len(singly)), Between(1))


def students(parts: Sequence[Unseen]) -> tuple[float, float]:
    low, high = normals(parts)
    middle, wider = float(np.sqrt(low * high)), student(len(parts) - 1) / student(1e4)
    return middle * (low / middle) ** wider, middle * (high / middle) ** wider


WAYS: dict[str, Callable[[Sequence[Unseen]], tuple[float, float]]] = {
    "plain quantiles": plain,
    "normal law": normals,
    "Student's law for processes": mixed,
    "Student's law for all": students,
    "octavo": octavos,
}


if __name__ == "__main__":
    main()
