"""Single steps of calibrations and of the runs that they predict, by kind: where a law is off, and where a run is.

Owns what is read off the steps, beyond how often they lie in their intervals, and the file that keeps them. Where steps
of a kind are as long as predicted in the calibration but not in a run, the law is right and the run differs: another
mood of the machine, another process. Where they differ in both alike, a term is missing.

    python benchmarks/prediction.py --record FILE         keeps all steps
    python benchmarks/prediction_steps.py FILE            fits them again and says how often intervals hold
    python benchmarks/prediction_steps.py FILE --first 4  by the first four processes alone
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from prediction_engine import at_speed
from prediction_runs import Ran, step_coverage

from octavo.cost.calibration import Calibration, calibration_of, written
from octavo.cost.fitted import FittedCost
from octavo.cost.laws import Law
from octavo.cost.learn import Sample, learn, usual_steps
from octavo.cost.speeds import Speed
from octavo.cost.step import StepShape

Steps = Iterable[tuple[StepShape, float]]
KINDS = ("1 row", "2 rows", "3 or 4", "5 to 8", "9 to 16", "17 and more", "up to 64 tokens", "up to 256", "more")
_ROWS, _TOKENS = (1, 2, 4, 8, 16), (64, 256)
RESTED = "after a rest"


def kind_of(shape: StepShape) -> str:
    """Of steps in which all decode by their number, of others by their tokens."""
    if shape.tokens == shape.chunks:
        return KINDS[int(np.searchsorted(_ROWS, shape.chunks))]
    return KINDS[len(_ROWS) + 1 + int(np.searchsorted(_TOKENS, shape.tokens))]


def by_kind(calibration: Calibration, steps: Steps) -> dict[str, dict[str, float]]:
    """How many there are of each kind, and what their prediction is off by in the middle and altogether."""
    cost = FittedCost(calibration)
    found: dict[str, list[tuple[float, float]]] = {}
    for shape, took in steps:
        expected = cost.step_seconds(shape) + cost.host_seconds(shape)
        found.setdefault(kind_of(shape), []).append((expected, took))
    told = {}
    for kind in KINDS:
        if kind in found:
            expected, took = np.array(found[kind]).T
            told[kind] = {"steps": len(took), "off": float(np.median(expected / took) - 1),
                          "total": float(expected.sum() / took.sum() - 1)}  # fmt: skip
    return told


def rested(calibration: Calibration, runs: Iterable[Ran]) -> dict[str, dict[str, float]]:
    """The same of steps before which the engine had nothing to do, whatever their kind."""
    cost = FittedCost(calibration)
    ratios = [
        (cost.step_seconds(shape) + cost.host_seconds(shape)) / took
        for one in runs
        for shape, took in (one.steps[number] for number in one.rested if number < len(one.steps))
    ]
    return {RESTED: {"steps": len(ratios), "off": float(np.median(ratios) - 1)}} if ratios else {}


def kinds_told(
    calibration: Calibration, samples: Sequence[Sample], runs: dict[str, list[Ran]], speed: Speed | None
) -> dict[str, Any]:
    """Of the calibration's own steps, and of all runs', those at its speed of memory."""
    everything = [one for several in runs.values() for one in several]
    steps = (step for one in everything for step in one.steps_at(speed))
    ran = by_kind(calibration, steps) | rested(calibration, everything)
    return {
        "calibration": by_kind(calibration, ((one.shape, one.device_s + one.host_s) for one in samples)),
        "runs": ran,
    }


def print_kinds(told: dict[str, Any]) -> None:
    """What predictions are off by, in the middle: of the steps that were fitted, and of those that were not."""
    if not told["runs"]:
        return
    print(f"\n{'steps of':18}{'calibrated':>12}{'off':>8}{'run':>8}{'off':>8}")
    for kind in (*KINDS, RESTED):
        cells = [told[which].get(kind) for which in ("calibration", "runs")]
        if any(cells):
            words = [f"{one['steps']:>{wide}}{one['off']:>+8.1%}" if one else " " * (wide + 8)
                     for one, wide in zip(cells, (12, 8), strict=True)]  # fmt: skip
            print(f"{kind:18}" + "".join(words))


def record_of(calibration: Calibration, samples: Sequence[Sample], runs: dict[str, list[Ran]]) -> dict[str, Any]:
    """As JSON."""
    steps = [[one.scene, one.step, one.shape.starts.tolist(), one.shape.counts.tolist(), one.shape.sampled,
              one.device_s, one.host_s, one.process, one.rates] for one in samples]  # fmt: skip
    told = {name: [one.told() for one in several] for name, several in runs.items()}
    return {"calibration": json.loads(written(calibration)), "samples": steps, "runs": told}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="of prediction.py --record")
    parser.add_argument("--first", type=int, help="processes of the calibration to use (default all)")
    options = parser.parse_args(arguments)
    record = json.loads(options.file.read_text())
    samples = [
        Sample(scene, step, StepShape.from_chunks(starts, counts, sampled), device_s, host_s, process, tuple(rates))
        for scene, step, starts, counts, sampled, device_s, host_s, process, rates in record["samples"]
        if options.first is None or process < options.first
    ]
    if not samples:
        raise SystemExit(f"{options.file} holds no steps of a calibration: record one by several processes")
    measured = len(samples)
    samples, speed = usual_steps(samples)
    before = calibration_of(record["calibration"])
    names = sorted({term.quantity.partition(":")[2] for term in before.step.terms if ":" in term.quantity})
    learned = learn(samples, [Law(kind, int(reach)) for kind, reach in (name.split(":") for name in names)])
    calibration = replace(
        before, step=learned.step.sum, host=learned.host.sum, knots=learned.knots, run_interval=learned.run_interval,
        errors=learned.errors,
    )  # fmt: skip
    runs = {name: at_speed([Ran.of(one) for one in several], speed) for name, several in record["runs"].items()}
    processes = len({one.process for one in samples})
    print(f"{len(samples)} steps of {processes} processes; {measured - len(samples)} at another speed of memory")
    for knot in calibration.knots:
        print(f"  {knot.low:.3f} to {knot.high:.3f} around {1e3 * knot.seconds:.3g} ms")
    told = {}
    everything = {"all": [one for several in runs.values() for one in several]}
    for name, several in (runs | everything).items():
        told[name] = step_coverage(calibration, [step for one in several for step in one.steps_at(speed)])
        print(
            f"{name:14}{told[name]['inside']:>6.1%} of {told[name]['steps']:>5} inside, median width "
            f"{told[name]['median_width']:.1%}, all together {told[name]['total']:+.1%}"
        )
    kinds = kinds_told(calibration, samples, runs, speed)
    print_kinds(kinds)
    errors = dict(calibration.errors)
    print(json.dumps({"benchmark": "prediction_steps", "first": options.first, "errors": errors, "steps": told,
                      "kinds": kinds}))  # fmt: skip


if __name__ == "__main__":
    main()
