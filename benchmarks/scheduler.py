"""What the scheduler itself costs: no model, every sequence decoding, blocks of 16 tokens.

A step is `schedule`, then `commit` of the executor's answer, then the hand-over: the events drained
and turned into the list of (sequence, token) pairs that a front end takes. The executor answers at
once with tokens drawn beforehand, outside the clock. One sequence in sixteen crosses a block
boundary in every step, as in steady decoding.

Every repetition makes the identical steps, so the least time of a step over the repetitions is what
it costs when nothing disturbs it; median and p99 are taken over those. The plain median over
everything is reported beside it. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from machine_facts import described, machine_facts

from octavo.geometry.dtypes import BF16
from octavo.geometry.state import Component
from octavo.memory.cache import KVCache
from octavo.memory.groups import StateGroup
from octavo.memory.layout import Layout, make_layout
from octavo.scheduling.audit import Audit
from octavo.scheduling.events import StepTokens
from octavo.scheduling.limits import Limits
from octavo.scheduling.plan import StepResult
from octavo.scheduling.request import Request, SamplingParams
from octavo.scheduling.scheduler import Scheduler

BLOCK_TOKENS = 16
PROMPT_TOKENS = 128
VOCAB = 32_000
EOS = 2
PARTS = ("schedule", "commit", "hand_over", "audit")

VLLM_MS = {64: 0.82, 256: 3.2, 1024: 14.0}
"""vLLM 0.32.0's own `Scheduler`, median of schedule + update a step, all sequences decoding: measured on
another machine (2 virtual cores of a Sapphire-Rapids-class Xeon, 24 GiB), as a reference for the ratio."""
GOALS = {256: 0.1, 1024: 1 / 15}
"""Share of vLLM's time that octavo means to stay under."""


@dataclass(frozen=True, slots=True)
class Measured:
    running: int
    steps: int
    audit: bool
    times: np.ndarray
    """Nanoseconds, [repetitions, steps, parts]."""

    @property
    def least(self) -> np.ndarray:
        """Milliseconds of each part of each step, undisturbed: [steps, parts]."""
        return self.times.min(axis=0) / 1e6

    def summary(self) -> dict[str, float]:
        total = self.least.sum(axis=1)
        row = {"median_ms": float(np.median(total)), "p99_ms": float(np.percentile(total, 99))}
        row["plain_median_ms"] = float(np.median(self.times.sum(axis=2))) / 1e6
        row |= {f"{part}_ms": float(np.median(self.least[:, i])) for i, part in enumerate(PARTS)}
        row["us_per_request"] = 1e3 * row["median_ms"] / self.running
        return row


def layout() -> Layout:
    kv = (Component("k", (8, 128), BF16), Component("v", (8, 128), BF16))
    return make_layout([StateGroup("full", (0, 1), (kv, kv))], BLOCK_TOKENS)


def decoding(running: int, steps: int, waiting: int = 0) -> Scheduler:
    """A scheduler with `running` sequences that have their first token and room for `steps` more.

    All seats are taken, so whoever waits goes on waiting.
    """
    longest = PROMPT_TOKENS + BLOCK_TOKENS + steps + 2
    slabs = running * (-(-longest // BLOCK_TOKENS) + 1)
    prompts = [PROMPT_TOKENS + i % BLOCK_TOKENS for i in range(running + waiting)]
    limits = Limits(running, sum(prompts), longest + 1, VOCAB)
    scheduler = Scheduler(KVCache(layout(), slabs, running), limits)
    params = SamplingParams(max_tokens=steps + 2, temperature=0.0, seed=0).with_defaults({})
    draw = np.random.default_rng(0)
    for i, length in enumerate(prompts):
        ids = draw.integers(EOS + 1, VOCAB, length, dtype=np.int32)
        scheduler.submit(Request(request_id=f"r{i}", prompt_token_ids=ids, params=params, eos_token_ids=(EOS,)), 0.0)
    plan = scheduler.schedule(0.0)
    if plan is None or plan.chunks != running:
        raise SystemExit(f"only {0 if plan is None else plan.chunks} of {running} sequences were seated")
    scheduler.commit(plan, StepResult(plan.number, np.full(running, EOS + 1, dtype=np.int32), 0.0), 0.0)
    scheduler.drain_events()
    return scheduler


def measure(running: int, steps: int, repetitions: int, *, waiting: int, audit: bool) -> Measured:
    times = np.zeros((repetitions, steps, len(PARTS)), dtype=np.int64)
    answers = np.random.default_rng(1).integers(EOS + 1, VOCAB, (steps, running), dtype=np.int32)
    for repetition in range(repetitions):
        scheduler = decoding(running, steps, waiting)
        watch = Audit() if audit else None
        for step in range(steps):
            times[repetition, step] = _one_step(scheduler, answers[step], float(step), watch)
    return Measured(running, steps, audit, times)


def _one_step(scheduler: Scheduler, answer: np.ndarray, now: float, watch: Audit | None) -> tuple[int, int, int, int]:
    start = perf_counter_ns()
    plan = scheduler.schedule(now)
    scheduled = perf_counter_ns()
    result = StepResult(plan.number, answer, now)
    returned = perf_counter_ns()
    scheduler.commit(plan, result, now)
    committed = perf_counter_ns()
    if watch is not None:
        watch.after_step(scheduler, plan)
    audited = perf_counter_ns()
    lists = [event.pairs() for event in scheduler.drain_events() if isinstance(event, StepTokens)]
    handed_over = perf_counter_ns()
    if len(lists) != 1 or len(lists[0]) != len(answer):
        raise SystemExit(f"step {now:.0f} handed over {[len(pairs) for pairs in lists]} tokens of {len(answer)}")
    return scheduled - start, committed - returned, handed_over - audited, audited - committed


def print_table(measured: Sequence[Measured]) -> None:
    print("Milliseconds a step, all sequences decoding. vLLM's figures are another machine's: see the note below.")
    print(
        f"{'running':>7} {'audit':>5} {'median':>7} {'p99':>7} {'schedule':>8} {'commit':>7} {'hand over':>9} "
        f"{'audit':>7} {'us/request':>10} {'vLLM':>6} {'ratio':>6}  goal"
    )
    for one in measured:
        row = one.summary()
        peer = VLLM_MS.get(one.running)
        compared = "" if peer is None else f"{peer:>6.2f} {row['median_ms'] / peer:>6.3f}"
        goal = "" if one.audit else _verdict(one.running, row["median_ms"])
        print(
            f"{one.running:>7} {'on' if one.audit else 'off':>5} {row['median_ms']:>7.3f} {row['p99_ms']:>7.3f} "
            f"{row['schedule_ms']:>8.3f} {row['commit_ms']:>7.3f} {row['hand_over_ms']:>9.3f} {row['audit_ms']:>7.3f} "
            f"{row['us_per_request']:>10.3f} {compared:>13}  {goal}"
        )
    first = measured[0]
    print(
        f"\nMedian and p99 over {first.steps} steps, each the least of {first.times.shape[0]} identical repetitions.\n"
        "vLLM 0.32.0's Scheduler alone (schedule + update): 0.82, 3.2 and 14.0 ms at 64, 256 and 1024 running,\n"
        "measured on 2 virtual cores of a Sapphire-Rapids-class Xeon, not here: read the ratio as an order of size."
    )


def _verdict(running: int, median_ms: float) -> str:
    if running not in GOALS:
        return ""
    goal_ms = GOALS[running] * VLLM_MS[running]
    return f"{'met' if median_ms <= goal_ms else 'missed'}: under {goal_ms:.2f} ms"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="64,256,1024,4096", help="numbers of running sequences, by commas")
    parser.add_argument("--steps", type=int, default=320, help="steps measured in each repetition (default 320)")
    parser.add_argument("--repeat", type=int, default=5, help="identical repetitions (default 5)")
    parser.add_argument("--waiting", type=int, default=0, help="requests that wait, all seats being taken (default 0)")
    parser.add_argument("--no-audit", action="store_true", help="leave out the runs with every invariant checked")
    options = parser.parse_args(arguments)
    sizes = [int(text) for text in options.running.split(",")]
    if min(*sizes, options.steps, options.repeat) < 1:
        parser.error("--running, --steps and --repeat must be at least 1")
    audits = (False,) if options.no_audit else (False, True)
    facts = machine_facts()
    measured = [
        measure(n, options.steps, options.repeat, waiting=options.waiting, audit=audit)
        for audit in audits
        for n in sizes
    ]
    print_table(measured)
    print(described(facts))
    rows = [{"running": m.running, "audit": m.audit, **_rounded(m.summary())} for m in measured]
    report = {
        "benchmark": "scheduler",
        "machine": facts,
        "steps": options.steps,
        "repeat": options.repeat,
        "waiting": options.waiting,
    }
    print(json.dumps(report | {"block_tokens": BLOCK_TOKENS, "vllm_ms_elsewhere": VLLM_MS, "rows": rows}))


def _rounded(row: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in row.items()}


if __name__ == "__main__":
    main()
