"""Predicted beside measured: calibrate, then run workloads by the real engine and by the simulator.

Calibrates the embedded model on this machine (or reads `--calibration`), runs W1 to W4, Poisson arrivals at shares of
what the replica can do, and W2 in too few blocks with a host tier, none of them used to fit, and simulates the same.
Prints a table of predicted and measured figures beside the goals, how often single steps lie in their intervals and
how wide those are, then one JSON line. Keep the machine otherwise idle; or, with `--own-time`, take seconds that the
process computed in one thread, which others on the machine change little.

    python benchmarks/prediction.py                       about ten minutes
    python benchmarks/prediction.py --scale 0.25 --calibrate 40 --seconds 15 --loads 0.8
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
from workloads import NAMES, SEED, Job, drawn_workloads, find_file, read_workloads

GOALS = {"tokens_per_s": 0.05, "tpot_mean_s": 0.05, "ttft_p50_s": 0.10, "ttft_p99_s": 0.20}
TITLES = {"tokens_per_s": "tokens/s", "tpot_mean_s": "TPOT mean", "ttft_p50_s": "TTFT p50", "ttft_p99_s": "TTFT p99"}
COVERAGE, WIDTH = (0.75, 0.85), 0.25
BLOCK_TOKENS = 16


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    import torch
    from prediction_runs import OwnClock, Timed, WallClock, run_really

    from octavo.cost.calibration import read_calibration
    from octavo.simulate.calibrated import calibrated_replica

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    clock = OwnClock() if options.own_time else WallClock()
    engine, loaded = engine_of(options, -(-options.kv_tokens // BLOCK_TOKENS))
    facts = machine_facts() | torch_facts()
    print(f"{loaded.name}, {options.dtype}; {described(facts)}")
    calibration = read_calibration(options.calibration) if options.calibration else calibrated(engine, loaded, options)
    if options.keep is not None:
        from octavo.cost.calibration import written

        options.keep.write_text(written(calibration), encoding="utf-8")
    print_fit(calibration)
    from octavo.planner.asked import Asked

    replica = calibrated_replica(calibration, Asked())
    run_really(engine, Timed("warm-up", (Job(tuple(range(3, 30)), 4),), (0.0,)), clock)
    reports = []
    for timed in timed_workloads(options, loaded, replica):
        real = [run_really(engine, timed, clock) for _ in range(options.repeat)]
        reports.append(report_of(timed, real, replica, calibration))
        print(f"  {timed.name}: {[round(one.span_s, 2) for one in real]} s", file=sys.stderr, flush=True)
    engine.close()
    if options.tiered:
        reports.append(tiered(options, loaded, replica, calibration, clock))
    pooled = pooled_coverage(reports)
    print_table(reports, pooled)
    told = {"benchmark": "prediction", "model": loaded.name, "dtype": options.dtype, "machine": facts,
            "clock": "own" if options.own_time else "wall",
            "scale": options.scale, "repeat": options.repeat, "errors": dict(calibration.errors),
            "terms": {t.name: s for t, s in zip(calibration.step.terms, calibration.step.seconds, strict=True)},
            "workloads": reports, "steps": pooled}  # fmt: skip
    print(json.dumps(told))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", nargs="?", type=Path, help="workloads.json; without it the shared one, else drawn from a seed")
    add("--model", help="directory, hub id or GGUF file; the embedded SmolLM2-135M-Instruct if not given")
    add("--dtype", default="float32", help="of weights, activations and KV cache (default float32)")
    add("--calibration", type=Path, help="a file of octavo calibrate with this engine's options, instead of measuring")
    add("--keep", type=Path, help="write the calibration here")
    add("--calibrate", type=float, default=180.0, help="seconds of calibrating (default 180)")
    add("--workloads", default=",".join(NAMES), help="by commas (default all four; none for none)")
    add("--loads", default="0.5,0.8,0.95", help="Poisson arrivals at these shares of capacity (none for none)")
    add("--tiered", type=float, default=0.3, help="also W2 with this share of its blocks and a host tier (0: not)")
    add("--seconds", type=float, default=60.0, help="of arrivals of each Poisson run (default 60)")
    add("--scale", type=float, default=1.0, help="lengths of prompts and outputs times this")
    add("--repeat", type=int, default=1, help="runs of the real engine; figures are their medians (default 1)")
    add("--max-num-seqs", type=int, default=32)
    add("--max-num-batched-tokens", type=int, default=1024)
    add("--kv-tokens", type=int, default=40_000, help="of the pool (default 40000)")
    add("--max-model-len", type=int, default=4352)
    add("--threads", type=int, help="torch threads; torch's own choice if not given")
    add("--own-time", action="store_true", help="one thread, by its processor time instead of the wall")
    options = parser.parse_args(arguments)
    if options.own_time:
        if options.threads not in (None, 1):
            parser.error("--own-time is of one thread: leave --threads out")
        options.threads = 1
    if options.repeat < 1 or not 0 < options.scale <= 1 or options.seconds <= 0 or options.calibrate <= 0:
        parser.error("--repeat must be at least 1, --scale above 0 and at most 1, --seconds and --calibrate above 0")
    options.workloads = [] if options.workloads == "none" else options.workloads.split(",")
    options.loads = [] if options.loads == "none" else [float(load) for load in options.loads.split(",")]
    if any(not 0 < load < 1 for load in options.loads):
        parser.error("--loads must be between 0 and 1")
    return options


def engine_of(options: argparse.Namespace, blocks: int, **more: Any) -> Any:
    """An engine and the model that was loaded for it: layers may be fused for one engine only."""
    import torch
    from transformers.utils import logging

    from octavo.config import Config
    from octavo.engine.build import engine_for
    from octavo.models.load import load_checkpoint

    logging.set_verbosity_error()
    loaded = load_checkpoint(options.model, dtype=options.dtype, skip_tokenizer_init=True)

    config = Config.from_kwargs(
        skip_tokenizer_init=True,
        max_model_len=options.max_model_len,
        num_gpu_blocks_override=blocks,
        block_size=BLOCK_TOKENS,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        reuse="none",
        device="cpu",
        **more,
    )
    return engine_for(config, loaded, torch.device("cpu")), loaded


def calibrated(engine: Any, loaded: Any, options: argparse.Namespace) -> Any:
    from octavo.cli.calibrate_machine import machine_fields
    from octavo.runtime.calibrate import Measuring
    from octavo.runtime.calibrate_record import calibrate

    said = 0.0

    def tell(share: float, text: str) -> None:
        nonlocal said
        if share >= said:
            said = share + 0.1
            print(f"  calibrating, {share:.0%}: {text}", file=sys.stderr, flush=True)

    measuring = Measuring(seconds=options.calibrate, timer=time.process_time if options.own_time else time.perf_counter)
    return calibrate(engine, loaded.config_json, machine_fields(), measuring, tell=tell)


def known_workloads(options: argparse.Namespace, loaded: Any) -> dict[str, Any]:
    path = find_file(options.file, Path(__file__).resolve().parent)
    return read_workloads(path) if path is not None else drawn_workloads(loaded.config_json["vocab_size"])


def timed_workloads(options: argparse.Namespace, loaded: Any, replica: Any) -> list[Any]:
    """W1 to W4, all at once, and Poisson runs at shares of what the replica is predicted to do at most."""
    from prediction_runs import Timed, run_virtually

    vocabulary = loaded.config_json["vocab_size"]
    known = known_workloads(options, loaded)
    unknown = [name for name in options.workloads if name not in known]
    if unknown:
        raise SystemExit(f"--workloads: {', '.join(unknown)} not there; there are {', '.join(known)}")
    chosen = [known[name].scaled(options.scale) for name in options.workloads]
    found = [Timed(one.name, one.jobs, (0.0,) * len(one.jobs)) for one in chosen]
    crowd = tuple(_job(Random(SEED + 1 + number), vocabulary, options.scale) for number in range(128))
    capacity = len(crowd) / run_virtually(replica, Timed("capacity", crowd, (0.0,) * len(crowd))).span_s
    for load in options.loads:
        random = Random(round(1000 * load))
        moments: list[float] = []
        at = random.expovariate(load * capacity)
        while at < options.seconds or len(moments) < 8:
            moments.append(at)
            at += random.expovariate(load * capacity)
        jobs = tuple(_job(random, vocabulary, options.scale) for _ in moments)
        found.append(Timed(f"Poisson {load:.0%}", jobs, tuple(moments)))
    return found


def _job(random: Random, vocabulary: int, scale: float) -> Job:
    length = round(math.exp(random.uniform(math.log(32), math.log(1024))) * scale)
    prompt = tuple(random.randrange(vocabulary) for _ in range(max(1, length)))
    return Job(prompt, max(2, round(random.randint(16, 256) * scale)))


def tiered(options: argparse.Namespace, loaded: Any, replica: Any, calibration: Any, clock: Any) -> dict[str, Any]:
    """W2 in a pool for a share of it: who gives way is moved to the host, and back."""
    from dataclasses import replace

    from prediction_runs import Timed, run_really

    from octavo.simulate.deploy import Lower

    jobs = known_workloads(options, loaded)["W2"].scaled(options.scale).jobs
    needs = [-(-job.positions // BLOCK_TOKENS) for job in jobs]
    blocks = max(max(needs) + 1, round(options.tiered * sum(needs)))
    host_bytes = sum(needs) * replica.layout.slab_bytes
    small, _ = engine_of(options, blocks, host_bytes=host_bytes, preemption="offload")
    timed = Timed("W2 tiered", jobs, (0.0,) * len(jobs))
    real = [run_really(small, timed, clock) for _ in range(options.repeat)]
    small.close()
    print(f"  {timed.name}: {[round(one.span_s, 2) for one in real]} s", file=sys.stderr, flush=True)
    return report_of(timed, real, replace(replica, slabs=blocks), calibration, Lower(host_bytes=host_bytes))


def report_of(timed: Any, real: list[Any], replica: Any, calibration: Any, lower: Any = None) -> dict[str, Any]:
    import numpy as np
    from prediction_runs import FIGURES, run_virtually, step_coverage

    virtual = run_virtually(replica, timed, lower=lower)
    ends = [run_virtually(replica, timed, factor, lower) for factor in calibration.run_interval]
    rows = {}
    for name in FIGURES:
        measured = float(np.median([one.figures[name] for one in real]))
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
    steps = [step for one in real for step in one.steps]
    return {
        "name": timed.name,
        "requests": len(timed.jobs),
        "span_s": [one.span_s for one in real],
        "figures": rows,
        "steps": step_coverage(calibration, steps),
    }


def pooled_coverage(reports: list[dict[str, Any]]) -> dict[str, float]:
    """Over all steps of all workloads."""
    if not reports:
        return {"steps": 0, "inside": float("nan"), "median_width": float("nan")}
    count = sum(one["steps"]["steps"] for one in reports)
    inside = sum(one["steps"]["inside"] * one["steps"]["steps"] for one in reports) / count
    widths = sorted((one["steps"]["median_width"], one["steps"]["steps"]) for one in reports)
    passed = 0
    for width, steps in widths:
        passed += steps
        if 2 * passed >= count:
            return {"steps": count, "inside": inside, "median_width": width}
    return {"steps": count, "inside": inside, "median_width": widths[-1][0]}


def print_fit(calibration: Any) -> None:
    errors, about = calibration.errors, calibration.about
    print(
        f"calibration: {about['steps']} steps of {about['scenes']} scenes; steps left out are off by "
        f"{errors['together_median']:.1%} in the middle, a repetition by {errors['noise_median']:.1%}"
    )
    for term, seconds in zip(calibration.step.terms, calibration.step.seconds, strict=True):
        if seconds:
            print(f"  {1e6 * seconds:>12.4f} us  {term.name}")


def print_table(reports: list[dict[str, Any]], pooled: dict[str, float]) -> None:
    print(f"\n{'':12}" + "".join(f"{title:>30}" for title in TITLES.values()) + f"{'steps':>26}")
    print(
        f"{'goal':12}" + "".join(f"{f'within {GOALS[name]:.0%}':>30}" for name in TITLES) + f"{'75% to 85% inside':>26}"
    )
    for one in reports:
        cells = [_cell(name, one["figures"][name]) for name in TITLES]
        steps = one["steps"]
        last = f"{steps['inside']:.0%} of {steps['steps']}, width {steps['median_width']:.0%}"
        print(f"{one['name']:12}" + "".join(f"{cell:>30}" for cell in cells) + f"{last:>26}")
    print("predicted/measured, what it is off by; * outside the goal, ! measured outside the predicted interval")
    if reports:
        rows = [row for one in reports for row in one["figures"].values()]
        met, inside = sum(row["met"] for row in rows), sum(row["inside"] for row in rows)
        print(f"goals met: {met} of {len(rows)}; measured inside the predicted interval: {inside} of {len(rows)}")
        low, high = COVERAGE
        print(
            f"all {pooled['steps']} steps: {pooled['inside']:.1%} inside (goal {low:.0%} to {high:.0%}), median width "
            f"{pooled['median_width']:.1%} (goal under {WIDTH:.0%})"
        )


def _cell(name: str, row: dict[str, Any]) -> str:
    unit = 1.0 if name == "tokens_per_s" else 1e3
    marks = ("" if row["met"] else "*") + ("" if row["inside"] else "!")
    return f"{row['predicted'] * unit:.4g}/{row['measured'] * unit:.4g} {row['off']:+.1%}{marks}"


if __name__ == "__main__":
    if UNWANTED in os.environ:
        # It is read when numpy is loaded, so the process has to start again without it.
        kept = {name: value for name, value in os.environ.items() if name != UNWANTED}
        os.execve(sys.executable, sys.orig_argv, kept)
    main()
