"""What the scheduler itself costs: no model, every sequence decoding, blocks of 16 tokens.

A step is `schedule`, then `commit` of the executor's answer, then the hand-over: the events drained
and turned into the list of (sequence, token) pairs that a front end takes. The executor answers at
once with tokens drawn beforehand, outside the clock. One sequence in sixteen crosses a block
boundary in every step, as in steady decoding.

Every repetition makes the identical steps, so the least time of a step over the repetitions is what
it costs when nothing disturbs it; median and p99 are taken over those. The plain median over
everything is reported beside it. Times are processor time of the thread. Prints a table, then one JSON line.

With `--vllm PYTHON`, the Python of an environment that has vLLM, vLLM's own scheduler makes the same steps
in turn with octavo's (`schedule` and `update_from_output`, to the outputs that its front end takes): the same
prompts, tokens, blocks and ends. That both did the same is checked: positions computed, tokens handed over,
blocks taken.

    python benchmarks/scheduler.py --vllm ~/.cache/octavo-peers/environments/vllm-*/bin/python
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import thread_time_ns

import numpy as np
from machine_facts import described, machine_facts
from scheduler_peer import BLOCK_TOKENS, EOS, LARGEST, VOCAB, Played, Steps, Vllm

from octavo.geometry.dtypes import BF16
from octavo.geometry.state import Component
from octavo.memory.cache import KVCache
from octavo.memory.groups import StateGroup
from octavo.memory.keys import KeySpace
from octavo.memory.layout import Layout, make_layout
from octavo.policy.bundle import Policies
from octavo.scheduling.audit import Audit
from octavo.scheduling.events import StepTokens
from octavo.scheduling.limits import Limits
from octavo.scheduling.plan import StepResult
from octavo.scheduling.request import Request, SamplingParams
from octavo.scheduling.scheduler import Scheduler

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
    vllm: np.ndarray | None = None
    """The same of vLLM's scheduler, its parts `schedule` and `update`."""

    @property
    def least(self) -> np.ndarray:
        """Milliseconds of each part of each step, undisturbed: [steps, parts]."""
        return self.times.min(axis=0) / 1e6

    @property
    def vllm_ms(self) -> float | None:
        """Median of a step, undisturbed."""
        return None if self.vllm is None else float(np.median(self.vllm.min(axis=0).sum(axis=1))) / 1e6

    def summary(self) -> dict[str, float]:
        total = self.least.sum(axis=1)
        row = {"median_ms": float(np.median(total)), "p99_ms": float(np.percentile(total, 99))}
        row["plain_median_ms"] = float(np.median(self.times.sum(axis=2))) / 1e6
        row |= {f"{part}_ms": float(np.median(self.least[:, i])) for i, part in enumerate(PARTS)}
        row["us_per_request"] = 1e3 * row["median_ms"] / self.running
        if self.vllm is not None and self.vllm_ms is not None:
            row["vllm_ms"] = self.vllm_ms
            row["vllm_plain_median_ms"] = float(np.median(self.vllm.sum(axis=2))) / 1e6
            row["of_vllm"] = row["median_ms"] / self.vllm_ms
        return row


def layout() -> Layout:
    kv = (Component("k", (8, 128), BF16), Component("v", (8, 128), BF16))
    return make_layout([StateGroup("full", (0, 1), (kv, kv))], BLOCK_TOKENS)


def decoding(steps: Steps) -> Scheduler:
    """A scheduler with so many sequences that have their first token and room for all steps.

    All seats are taken, so whoever waits goes on waiting.
    """
    limits = Limits(steps.running, sum(map(len, steps.prompts)), steps.longest, VOCAB)
    keys = KeySpace("benchmark", BLOCK_TOKENS) if steps.reuse else None
    policies = Policies.named(reuse="prefix" if steps.reuse else "none")
    scheduler = Scheduler(KVCache(layout(), steps.blocks, steps.running, keys=keys), limits, policies)
    params = SamplingParams(max_tokens=len(steps.answers) + 2, temperature=0.0, seed=0).with_defaults({})
    for i, prompt in enumerate(steps.prompts):
        request = Request(request_id=f"r{i}", prompt_token_ids=prompt, params=params, eos_token_ids=(EOS,))
        scheduler.submit(request, 0.0)
    plan = scheduler.schedule(0.0)
    if plan is None or plan.chunks != steps.running:
        raise SystemExit(f"only {0 if plan is None else plan.chunks} of {steps.running} sequences were seated")
    scheduler.commit(plan, StepResult(plan.number, np.full(steps.running, EOS + 1, dtype=np.int32), 0.0), 0.0)
    scheduler.drain_events()
    gc.collect()
    gc.freeze()  # as both engines do once they have started
    return scheduler


def measure(steps: Steps, repetitions: int, *, audit: bool, vllm: Vllm | None = None) -> Measured:
    times = np.zeros((repetitions, len(steps.answers), len(PARTS)), dtype=np.int64)
    peer: list[np.ndarray] = []
    for repetition in range(repetitions):
        played = play(steps, times[repetition], Audit() if audit else None)
        if vllm is not None:
            theirs, taken = vllm.play(steps)
            if theirs != played:
                raise SystemExit(f"not the same work: octavo {played}, vLLM {theirs}")
            peer.append(taken)
    return Measured(steps.running, len(steps.answers), audit, times, np.stack(peer) if peer else None)


def play(steps: Steps, times: np.ndarray, watch: Audit | None) -> Played:
    """All steps once, their parts into `times`; what was done in them."""
    scheduler = decoding(steps)
    before, computed, handed_over = scheduler.cache.pool.available(0), 0, 0
    for number, answer in enumerate(steps.answers):
        parts, positions = _one_step(scheduler, answer, float(number), watch)
        times[number] = parts
        computed += positions
        handed_over += len(answer)
    gc.unfreeze()
    return Played(computed, handed_over, before - scheduler.cache.pool.available(0))


def _one_step(
    scheduler: Scheduler, answer: np.ndarray, now: float, watch: Audit | None
) -> tuple[tuple[int, int, int, int], int]:
    """Nanoseconds of each part, and positions computed."""
    start = thread_time_ns()
    plan = scheduler.schedule(now)
    scheduled = thread_time_ns()
    result = StepResult(plan.number, answer, now)
    returned = thread_time_ns()
    scheduler.commit(plan, result, now)
    committed = thread_time_ns()
    if watch is not None:
        watch.after_step(scheduler, plan)
    audited = thread_time_ns()
    lists = [event.pairs() for event in scheduler.drain_events() if isinstance(event, StepTokens)]
    handed_over = thread_time_ns()
    if len(lists) != 1 or len(lists[0]) != len(answer):
        raise SystemExit(f"step {now:.0f} handed over {[len(pairs) for pairs in lists]} tokens of {len(answer)}")
    parts = (scheduled - start, committed - returned, handed_over - audited, audited - committed)
    return parts, int(plan.counts.sum())


def print_table(measured: Sequence[Measured], vllm: Vllm | None) -> None:
    if vllm is None:
        print("Milliseconds a step, all sequences decoding. vLLM's figures are another machine's: see the note below.")
    else:
        print(f"Milliseconds a step, all sequences decoding; vLLM {vllm.version} made the same steps in turn.")
    print(
        f"{'running':>7} {'audit':>5} {'median':>7} {'p99':>7} {'schedule':>8} {'commit':>7} {'hand over':>9} "
        f"{'audit':>7} {'us/request':>10} {'vLLM':>6} {'ratio':>6}  goal"
    )
    for one in measured:
        row = one.summary()
        peer = one.vllm_ms if vllm is not None else VLLM_MS.get(one.running)
        compared = "" if peer is None else f"{peer:>6.2f} {row['median_ms'] / peer:>6.3f}"
        goal = "" if one.audit or peer is None else _verdict(one.running, row["median_ms"], peer)
        print(
            f"{one.running:>7} {'on' if one.audit else 'off':>5} {row['median_ms']:>7.3f} {row['p99_ms']:>7.3f} "
            f"{row['schedule_ms']:>8.3f} {row['commit_ms']:>7.3f} {row['hand_over_ms']:>9.3f} {row['audit_ms']:>7.3f} "
            f"{row['us_per_request']:>10.3f} {compared:>13}  {goal}"
        )
    first = measured[0]
    print(
        f"\nMedian and p99 over {first.steps} steps, each the least of {first.times.shape[0]} identical repetitions,\n"
        "in processor time of the thread."
    )
    if vllm is None:
        print(
            "vLLM 0.32.0's Scheduler alone (schedule + update): 0.82, 3.2 and 14.0 ms at 64, 256 and 1024 running,\n"
            "measured on 2 virtual cores of a Sapphire-Rapids-class Xeon, not here: read the ratio as an order of size."
        )
    else:
        print("On both sides the same positions were computed, tokens handed over and blocks taken.")


def _verdict(running: int, median_ms: float, peer_ms: float) -> str:
    if running not in GOALS:
        return ""
    goal_ms = GOALS[running] * peer_ms
    return f"{'met' if median_ms <= goal_ms else 'missed'}: under {goal_ms:.3f} ms"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="64,256,1024,4096", help="numbers of running sequences, by commas")
    parser.add_argument("--steps", type=int, default=320, help="steps measured in each repetition (default 320)")
    parser.add_argument("--repeat", type=int, default=5, help="identical repetitions (default 5)")
    parser.add_argument("--waiting", type=int, default=0, help="requests that wait, all seats being taken (default 0)")
    parser.add_argument("--no-audit", action="store_true", help="leave out the runs with every invariant checked")
    parser.add_argument("--reuse", action="store_true", help="blocks are kept for reuse on both sides")
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vLLM, to run its scheduler beside")
    options = parser.parse_args(arguments)
    sizes = [int(text) for text in options.running.split(",")]
    if min(*sizes, options.steps, options.repeat) < 1:
        parser.error("--running, --steps and --repeat must be at least 1")
    facts = machine_facts()
    if options.vllm is None:
        measured, vllm = _measured(sizes, options, None), None
    else:
        with Vllm(options.vllm) as vllm:
            measured = _measured(sizes, options, vllm)
    print_table(measured, vllm)
    print(described(facts))
    rows = [{"running": m.running, "audit": m.audit, **_rounded(m.summary())} for m in measured]
    report = {
        "benchmark": "scheduler",
        "machine": facts,
        "steps": options.steps,
        "repeat": options.repeat,
        "waiting": options.waiting,
        "reuse": options.reuse,
        "vllm": None if vllm is None else vllm.version,
    }
    print(json.dumps(report | {"block_tokens": BLOCK_TOKENS, "vllm_ms_elsewhere": VLLM_MS, "rows": rows}))


def _measured(sizes: Sequence[int], options: argparse.Namespace, vllm: Vllm | None) -> list[Measured]:
    """Without audit, vLLM in turn at sizes that it makes in seconds; then with."""
    made = []
    for audit in (False,) if options.no_audit else (False, True):
        for running in sizes:
            steps = Steps.drawn(running, options.steps, waiting=options.waiting, reuse=options.reuse)
            peer = vllm if not audit and running <= LARGEST else None
            made.append(measure(steps, options.repeat, audit=audit, vllm=peer))
    return made


def _rounded(row: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in row.items()}


if __name__ == "__main__":
    main()
