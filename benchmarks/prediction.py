"""Predicted beside measured: calibrate, then run workloads by the real engine and by the simulator.

Calibrates the embedded model on this machine (or reads `--calibration`), runs W1 to W4, Poisson arrivals at shares of
what the replica can do, and W2 in too few blocks with a host tier, none of them used to fit, and simulates the same.
Calibrates in several processes, and runs each workload in a process of its own: predictions are of a process that
nobody has measured. Prints each predicted and measured figure beside its goal, how often single steps lie in their
intervals and how wide those are, then one JSON line. Keep the machine otherwise idle; or, with `--own-time`, take
seconds that the process computed in one thread, which others on the machine change little.

    python benchmarks/prediction.py                       within nine minutes
    python benchmarks/prediction.py --scale 0.25 --calibrate 40 --within 200 --loads 0.8
    python benchmarks/prediction.py --own-time
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from engine import UNWANTED
from machine_facts import described, machine_facts, torch_facts
from prediction_engine import (
    BLOCK_TOKENS,
    MOST_RUNS,
    at_speed,
    engine_of,
    engine_options,
    run_apart,
    run_here,
    warm_up,
)
from prediction_runs import Ran, Timed
from prediction_steps import kinds_told, print_kinds, record_of
from workloads import NAMES, SEED, Job, drawn_workloads, find_file, read_workloads

GOALS = {"tokens_per_s": 0.05, "tpot_mean_s": 0.05, "ttft_p50_s": 0.10, "ttft_p99_s": 0.20}
TITLES = {"tokens_per_s": "tokens/s", "tpot_mean_s": "TPOT mean", "ttft_p50_s": "TTFT p50", "ttft_p99_s": "TTFT p99"}
COVERAGE, WIDTH = (0.75, 0.85), 0.25
_LEAST_S = 10.0
"""Of arrivals of a Poisson run, however little time is left."""
_START_S = 12.0
"""Of a process, until it has loaded its model and warmed up."""


def main(arguments: Sequence[str] | None = None) -> None:
    begun = time.monotonic()
    options = parsed(arguments)
    from octavo.cost.calibration import read_calibration, written
    from octavo.cost.learn import usual_steps
    from octavo.cost.speeds import Speed
    from octavo.planner.asked import Asked
    from octavo.simulate.calibrated import calibrated_replica

    facts = machine_facts() | torch_facts()
    print(f"{options.model or 'the embedded model'}, {options.dtype}; {described(facts)}")
    here = Here(options) if options.processes == 1 else None
    samples: list[Any] = []
    runs: dict[str, list[Ran]] = {}
    calibration = read_calibration(options.calibration) if options.calibration else calibrated(options, here, samples)
    if options.keep is not None:
        options.keep.write_text(written(calibration), encoding="utf-8")
    print_fit(calibration)
    replica = calibrated_replica(calibration, Asked())
    reports = []
    for timed in timed_workloads(options, replica, calibration, begun):
        real = (
            run_apart(vars_of(options, calibration), timed, options.repeat, blocks_of(options))
            if here is None
            else here.run(timed)
        )
        runs[timed.name] = real
        reports.append(told_of(report_of(timed, real, replica, calibration)))
    if here is not None:
        here.engine.close()
    if options.tiered:
        report, runs["W2 tiered"] = tiered(options, replica, calibration, apart=here is None)
        reports.append(told_of(report))
    pooled = pooled_coverage(reports)
    print_table(reports, pooled)
    speed = Speed.of(calibration.about)
    usual, _ = usual_steps(samples)
    kinds = kinds_told(calibration, usual, {name: at_speed(ran, speed) for name, ran in runs.items()}, speed)
    print_kinds(kinds)
    if options.record is not None:
        options.record.write_text(json.dumps(record_of(calibration, samples, runs)), encoding="utf-8")
    took = time.monotonic() - begun
    print(f"all of it took {took:.0f} s")
    told = {"benchmark": "prediction", "model": calibration.model_name, "dtype": options.dtype, "machine": facts,
            "clock": "own" if options.own_time else "wall", "processes": options.processes, "seconds": took,
            "over": options.over,
            "scale": options.scale, "repeat": options.repeat, "reuse": "none", "host_bytes": 0,
            "preemption": "recompute", "errors": dict(calibration.errors),
            "terms": {t.name: s for t, s in zip(calibration.step.terms, calibration.step.seconds, strict=True)},
            "workloads": reports, "steps": pooled, "kinds": kinds}  # fmt: skip
    print(json.dumps(told))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", nargs="?", type=Path, help="workloads.json; without it the shared one, else drawn from a seed")
    add("--model", help="directory, hub id or GGUF file; the embedded SmolLM2-135M-Instruct if not given")
    add("--dtype", default="float32", help="of weights, activations and KV cache (default float32)")
    add("--calibration", type=Path, help="a file of octavo calibrate with this engine's options, instead of measuring")
    add("--keep", type=Path, help="write the calibration here")
    add("--record", type=Path, help="keep all steps here, for prediction_steps.py")
    add("--calibrate", type=float, default=120.0, help="seconds of calibrating (default 120)")
    add("--processes", type=int, default=8, help="that calibrate in turn (default 8); 1: all runs in this one process")
    add("--over", type=float, default=0.0, help="seconds over which they begin, idle in between (default 0: one after "
        "the other); this time comes on top of --within")  # fmt: skip
    add("--workloads", default=",".join(NAMES), help="by commas (default all four; none for none)")
    add("--loads", default="0.5,0.8,0.95", help="Poisson arrivals at these shares of capacity (none for none)")
    add("--tiered", type=float, default=0.3, help="also W2 with this share of its blocks and a host tier (0: not)")
    add("--seconds", type=float, default=60.0, help="of arrivals of each Poisson run at most (default 60)")
    add(
        "--within",
        type=float,
        default=560.0,
        help="seconds for all of it: Poisson runs take what is left (default 560)",
    )
    add("--patience", type=float, default=60.0, help="seconds a workload may wait, and run again, for the "
        "calibration's speed of memory on a machine that has two (default 60)")  # fmt: skip
    add("--scale", type=float, default=1.0, help="lengths of prompts and outputs times this")
    add("--repeat", type=int, default=1, help="runs of the real engine; figures are their medians (default 1)")
    add("--least-s", type=float, default=5.0, help="shorter workloads run again, five times at most (default 5)")
    add("--max-num-seqs", type=int, default=32)
    add("--max-num-batched-tokens", type=int, default=1024)
    add("--kv-tokens", type=int, default=40_000, help="of the pool (default 40000)")
    add("--max-model-len", type=int, default=4352)
    add("--threads", type=int, help="torch threads; octavo's own choice if not given")
    add("--own-time", action="store_true", help="one thread, by its processor time instead of the wall")
    options = parser.parse_args(arguments)
    if options.own_time:
        if options.threads not in (None, 1):
            parser.error("--own-time is of one thread: leave --threads out")
        options.threads = 1
    if options.repeat < 1 or not 0 < options.scale <= 1 or options.seconds <= 0 or options.calibrate <= 0:
        parser.error("--repeat must be at least 1, --scale above 0 and at most 1, --seconds and --calibrate above 0")
    if options.processes < 1 or options.within <= 0:
        parser.error("--processes must be at least 1, --within above 0")
    options.workloads = [] if options.workloads == "none" else options.workloads.split(",")
    options.loads = [] if options.loads == "none" else [float(load) for load in options.loads.split(",")]
    if any(not 0 < load < 1 for load in options.loads):
        parser.error("--loads must be between 0 and 1")
    return options


def vars_of(options: argparse.Namespace, calibration: Any = None) -> dict[str, Any]:
    """What an engine needs to know, as JSON: once something is calibrated, with the linear kernels that it is of."""
    from octavo.cost.speeds import Speed
    from octavo.runtime.calibrate_rounds import linear_backend_of

    names = ("model", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    told = {name: getattr(options, name) for name in (*names, "threads", "own_time", "least_s", "patience")}
    if calibration is None:
        return told
    speed = Speed.of(calibration.about)
    told |= {"linear": linear_backend_of(calibration.engine)}
    return told if speed is None else told | {"speed": [speed.usual, speed.other]}


def blocks_of(options: argparse.Namespace) -> int:
    return -(-options.kv_tokens // BLOCK_TOKENS)


class Here:
    """One engine in this process, for the calibration and all runs but the tiered one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.asked = vars_of(options)
        self.engine, self.loaded = engine_of(self.asked, blocks_of(options))
        warm_up(self.asked, self.engine, Timed("nothing", (), ()))

    def run(self, timed: Any) -> list[Any]:
        return run_here(self.asked, self.engine, timed, self.options.repeat)


def calibrated(options: argparse.Namespace, here: Here | None, samples: list[Any]) -> Any:
    from octavo.cli.calibrate_machine import machine_fields

    said = 0.0

    def tell(share: float, text: str) -> None:
        nonlocal said
        if share >= said:
            said = share + 0.1
            print(f"  calibrating, {share:.0%}: {text}", file=sys.stderr, flush=True)

    if here is None:
        from octavo.runtime.calibrate_rounds import Rounds, calibrate_rounds

        rounds = Rounds(
            config=engine_options(vars_of(options), blocks_of(options)), seconds=options.calibrate,
            processes=options.processes, over_s=options.over, clock="own" if options.own_time else "wall",
            threads=options.threads,
        )  # fmt: skip
        return calibrate_rounds(rounds, machine_fields(), tell, samples.extend)
    from octavo.runtime.calibrate import Measuring
    from octavo.runtime.calibrate_record import calibrate

    measuring = Measuring(seconds=options.calibrate, timer=time.process_time if options.own_time else time.perf_counter)
    return calibrate(here.engine, here.loaded.config_json, machine_fields(), measuring, tell=tell)


def told_of(report: dict[str, Any]) -> dict[str, Any]:
    print(f"  {report['name']}: {[round(span, 2) for span in report['span_s']]} s", file=sys.stderr, flush=True)
    return report


def known_workloads(options: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    path = find_file(options.file, Path(__file__).resolve().parent)
    return read_workloads(path) if path is not None else drawn_workloads(vocabulary)


def timed_workloads(options: argparse.Namespace, replica: Any, calibration: Any, begun: float) -> list[Any]:
    """W1 to W4, all at once, and Poisson runs at shares of what the replica is predicted to do at most."""
    from prediction_runs import run_virtually

    vocabulary = calibration.model["vocab_size"]
    known = known_workloads(options, vocabulary)
    unknown = [name for name in options.workloads if name not in known]
    if unknown:
        raise SystemExit(f"--workloads: {', '.join(unknown)} not there; there are {', '.join(known)}")
    chosen = [known[name].scaled(options.scale) for name in options.workloads]
    found = [Timed(one.name, one.jobs, (0.0,) * len(one.jobs)) for one in chosen]
    crowd = tuple(_job(Random(SEED + 1 + number), vocabulary, options.scale) for number in range(128))
    spans = {one.name: run_virtually(replica, one).span_s for one in found}
    capacity = len(crowd) / run_virtually(replica, Timed("capacity", crowd, (0.0,) * len(crowd))).span_s
    again = sum(max(span, min(MOST_RUNS * span, options.least_s)) for span in spans.values())
    seconds = poisson_seconds(options, again, begun)
    for load in options.loads:
        random = Random(round(1000 * load))
        moments: list[float] = []
        at = random.expovariate(load * capacity)
        while at < seconds or len(moments) < 8:
            moments.append(at)
            at += random.expovariate(load * capacity)
        jobs = tuple(_job(random, vocabulary, options.scale) for _ in moments)
        found.append(Timed(f"Poisson {load:.0%}", jobs, tuple(moments)))
    return found


def poisson_seconds(options: argparse.Namespace, others_s: float, begun: float) -> float:
    """Of arrivals of each run: what is left once all else has run as long as predicted, each in a new process."""
    if not options.loads:
        return options.seconds
    tiered_s = others_s / 2 if options.tiered else 0.0
    starts = len(options.loads) + len(options.workloads) + bool(options.tiered)
    spent = time.monotonic() - begun - options.over + options.repeat * (others_s + tiered_s) + starts * _START_S
    # The last arrivals take their time as well: about a quarter of what the whole run takes.
    each = 0.75 * (options.within - spent) / (len(options.loads) * options.repeat)
    return min(options.seconds, max(_LEAST_S, each))


def _job(random: Random, vocabulary: int, scale: float) -> Job:
    length = round(math.exp(random.uniform(math.log(32), math.log(1024))) * scale)
    prompt = tuple(random.randrange(vocabulary) for _ in range(max(1, length)))
    return Job(prompt, max(2, round(random.randint(16, 256) * scale)))


def tiered(
    options: argparse.Namespace, replica: Any, calibration: Any, *, apart: bool
) -> tuple[dict[str, Any], list[Ran]]:
    """W2 in a pool for a share of it: who gives way is moved to the host, and back."""
    from dataclasses import replace

    from octavo.simulate.deploy import Lower

    jobs = known_workloads(options, calibration.model["vocab_size"])["W2"].scaled(options.scale).jobs
    needs = [-(-job.positions // BLOCK_TOKENS) for job in jobs]
    blocks = max(max(needs) + 1, round(options.tiered * sum(needs)))
    host_bytes = sum(needs) * replica.layout.slab_bytes
    timed = Timed("W2 tiered", jobs, (0.0,) * len(jobs))
    tiers: dict[str, Any] = {"host_bytes": host_bytes, "preemption": "offload"}
    asked = vars_of(options, calibration)
    if apart:
        real = run_apart(asked, timed, options.repeat, blocks, **tiers)
    else:
        small, _ = engine_of(asked, blocks, **tiers)
        warm_up(asked, small, timed)
        real = run_here(asked, small, timed, options.repeat)
        small.close()
    report = report_of(timed, real, replace(replica, slabs=blocks), calibration, Lower(host_bytes=host_bytes))
    return report | tiers, real


def report_of(timed: Any, real: list[Any], replica: Any, calibration: Any, lower: Any = None) -> dict[str, Any]:
    import numpy as np
    from prediction_runs import FIGURES, run_virtually, step_coverage

    from octavo.cost.speeds import Speed

    speed = Speed.of(calibration.about)
    chosen = at_speed(real, speed)
    virtual = run_virtually(replica, timed, lower=lower)
    ends = [run_virtually(replica, timed, factor, lower) for factor in calibration.run_interval]
    rows = {}
    for name in FIGURES:
        measured = float(np.median([one.figures[name] for one in chosen]))
        predicted = virtual.figures[name]
        low, high = sorted(end.figures[name] for end in ends)
        rows[name] = {
            "measured": measured,
            "all": [one.figures[name] for one in real],
            "predicted": predicted,
            "off": predicted / measured - 1,
            "met": abs(predicted / measured - 1) <= GOALS[name],
            "interval": [low, high],
            "inside": low <= measured <= high,
        }
    steps = [step for one in chosen for step in one.steps_at(speed)] or [step for one in chosen for step in one.steps]
    return {
        "name": timed.name,
        "requests": len(timed.jobs),
        "span_s": [one.span_s for one in real],
        "chosen": len(chosen),
        "at_speed": min(one.share_at(speed) for one in chosen),
        "stolen": max(one.stolen for one in chosen),
        "figures": rows,
        "steps": step_coverage(calibration, steps),
    }


def pooled_coverage(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all steps of all workloads, every step counting alike."""
    import numpy as np

    if not reports:
        return {"steps": 0}
    count = sum(one["steps"]["steps"] for one in reports)
    inside = sum(one["steps"]["inside"] * one["steps"]["steps"] for one in reports) / count
    widths = sorted((one["steps"]["median_width"], one["steps"]["steps"]) for one in reports)
    passed = np.cumsum([steps for _, steps in widths])
    width = widths[int(np.searchsorted(2 * passed, count))][0]
    met = {"inside_met": COVERAGE[0] <= inside <= COVERAGE[1], "width_met": width < WIDTH}
    return {"steps": count, "inside": inside, "median_width": width, **met}


def print_fit(calibration: Any) -> None:
    errors, about = calibration.errors, calibration.about
    print(
        f"calibration: {about['steps']} steps of {about['scenes']} scenes by {about.get('processes', 1)} processes; "
        f"steps left out are off by {errors['together_median']:.1%} in the middle, a repetition by "
        f"{errors['noise_median']:.1%}"
    )
    if "inside_elsewhere" in errors:
        print(
            f"a process lies {errors['processes_apart']:.1%} from the others; intervals made without it hold "
            f"{errors['inside_elsewhere']:.0%} of its steps, median width {errors['width_elsewhere']:.0%}"
        )
    if "memory_bytes_per_s" in about:
        other = about.get("memory_bytes_per_s_other")
        print(
            f"memory is read at {about['memory_bytes_per_s'] / 1e9:.1f} GB/s"
            + (f", at other times at {other / 1e9:.1f}: {about['steps_left_out']} steps left out" if other else "")
        )
    for term, seconds in zip(calibration.step.terms, calibration.step.seconds, strict=True):
        if seconds:
            print(f"  {1e6 * seconds:>12.4f} us  {term.name}")


def print_table(reports: list[dict[str, Any]], pooled: dict[str, float]) -> None:
    """One line for each figure of each workload, beside its goal."""
    print(
        f"\n{'':14}{'':11}{'predicted':>10}{'measured':>10}{'off':>8}{'goal':>7}{'met':>5}{'interval':>26}{'holds':>7}"
    )
    for one in reports:
        for name, title in TITLES.items():
            print(f"{one['name'] if name == 'tokens_per_s' else '':14}{title:11}{_cells(name, one['figures'][name])}")
        steps = one["steps"]
        print(
            f"{'':14}{'steps':11}{steps['inside']:.0%} of {steps['steps']} inside, median width "
            f"{steps['median_width']:.0%}; all together {steps['total']:+.1%}; {one['chosen']} of "
            f"{len(one['span_s'])} runs taken, {one['at_speed']:.0%} at the calibrated speed of memory"
        )
    if not reports:
        return
    rows = [row for one in reports for row in one["figures"].values()]
    met, inside = sum(row["met"] for row in rows), sum(row["inside"] for row in rows)
    low, high = COVERAGE
    print(f"figures: {met} of {len(rows)} goals met; {inside} of {len(rows)} inside the predicted interval")
    print(
        f"all {pooled['steps']} steps: {pooled['inside']:.1%} inside, goal {low:.0%} to {high:.0%}: "
        f"{_met(pooled['inside_met'])}; median width {pooled['median_width']:.1%}, goal under {WIDTH:.0%}: "
        f"{_met(pooled['width_met'])}"
    )


def _cells(name: str, row: dict[str, Any]) -> str:
    unit = 1.0 if name == "tokens_per_s" else 1e3
    low, high = (f"{unit * end:.4g}" for end in row["interval"])
    words = "" if name == "tokens_per_s" else " ms"
    return (
        f"{unit * row['predicted']:>10.4g}{unit * row['measured']:>10.4g}{row['off']:>+8.1%}{GOALS[name]:>7.0%}"
        f"{_met(row['met']):>5}{f'{low} to {high}{words}':>26}{_met(row['inside']):>7}"
    )


def _met(yes: bool) -> str:
    return "yes" if yes else "NO"


if __name__ == "__main__":
    if UNWANTED in os.environ:
        # It is read when numpy is loaded, so the process has to start again without it.
        kept = {name: value for name, value in os.environ.items() if name != UNWANTED}
        os.execve(sys.executable, sys.orig_argv, kept)
    main()
