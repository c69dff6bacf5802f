"""One workload run twice: by the real engine, and by the simulator with the calibrated costs of that engine.

Owns how both are driven and what is read off them: the same figures from request records, and of the real run every
step's shape with its wall time. Requests arrive at moments drawn beforehand; those that are due are added between
steps, and their times count from the moment they were due.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from workloads import Job

from octavo.cost.calibration import Calibration
from octavo.cost.speeds import Speed
from octavo.cost.step import Scaled, StepShape
from octavo.engine.engine import Engine
from octavo.policy.bundle import Policies
from octavo.scheduling.plan import StepPlan, StepResult
from octavo.scheduling.request import SamplingParams
from octavo.simulate.deploy import Lower, Replica
from octavo.simulate.drive import Simulation
from octavo.simulate.measure import Measured
from octavo.simulate.sources import OpenLoop
from octavo.simulate.trace import TraceRequest

RATES_S = 1.0
"""Between two reads of memory."""
FIGURES = ("tokens_per_s", "tpot_mean_s", "ttft_p50_s", "ttft_p99_s")


@dataclass(frozen=True, slots=True)
class Timed:
    """Jobs with the seconds at which they arrive."""

    name: str
    jobs: tuple[Job, ...]
    arrivals: tuple[float, ...]

    @property
    def output_tokens(self) -> int:
        return sum(job.max_tokens for job in self.jobs)


@dataclass(frozen=True, slots=True)
class Ran:
    figures: dict[str, float]
    span_s: float
    steps: list[tuple[StepShape, float]] = field(default_factory=list)
    stolen: float = 0.0
    """Of the machine's processor time meanwhile, the share that other machines on the same host took."""
    rested: list[int] = field(default_factory=list)
    """Numbers of the steps before which nothing was there to do."""
    rates: list[tuple[int, float]] = field(default_factory=list)
    """Bytes a second that memory was read at now and then, each with the number of the step before which it was."""

    def share_at(self, speed: Speed | None) -> float:
        """Of the reads, those at this speed."""
        return float(np.mean([speed.at(rate) for _, rate in self.rates])) if speed and self.rates else 1.0

    def steps_at(self, speed: Speed | None) -> list[tuple[StepShape, float]]:
        """Those between two reads at this speed; all where nobody looked."""
        if speed is None or not self.rates:
            return self.steps
        at, good = zip(*((number, speed.at(rate)) for number, rate in self.rates), strict=True)
        before = np.searchsorted(at, np.arange(len(self.steps)), side="right") - 1
        return [
            step
            for step, place in zip(self.steps, before, strict=True)
            if good[place] and good[min(place + 1, len(good) - 1)]
        ]

    def told(self) -> list[object]:
        """As JSON."""
        steps = [(shape.starts.tolist(), shape.counts.tolist(), shape.sampled, took) for shape, took in self.steps]
        return [self.figures, self.span_s, steps, self.stolen, self.rested, self.rates]

    @classmethod
    def of(cls, told: list[object]) -> Ran:
        figures, span_s, steps, stolen, rested, rates = told
        return cls(
            figures, span_s,
            [(StepShape.from_chunks(starts, counts, sampled), took) for starts, counts, sampled, took in steps], stolen,
            rested, [(number, rate) for number, rate in rates],
        )  # fmt: skip


class Watching:
    """Between a core and its executor: remembers the shape of the last plan."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.shape: StepShape | None = None

    def submit(self, plan: StepPlan) -> None:
        self.shape = StepShape.of(plan)
        self.inner.submit(plan)

    def collect(self) -> StepResult:
        return self.inner.collect()

    def close(self) -> None:
        self.inner.close()


class WallClock:
    """Seconds as they pass, but for those in which memory is read."""

    def __init__(self, rate: Callable[[], float] | None = None) -> None:
        self._rate = rate
        self._reading_s = 0.0
        self._due = 0.0

    def now(self) -> float:
        return time.perf_counter() - self._reading_s

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def rate(self, *, now: bool = False) -> float | None:
        """Of memory, where it is due or asked for now."""
        begun = time.perf_counter()
        if self._rate is None or (begun < self._due and not now):
            return None
        found = self._rate()
        ended = time.perf_counter()
        self._reading_s += ended - begun
        self._due = ended + RATES_S
        return found


class OwnClock:
    """Seconds that this process computed: of one thread, what they would be on a machine left alone. Waiting skips."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def now(self) -> float:
        return time.process_time() + self._skipped

    def wait(self, seconds: float) -> None:
        self._skipped += seconds

    def rate(self, *, now: bool = False) -> float | None:
        """A thread that is counted by itself is not asked how fast memory was."""
        return None


Clock = WallClock | OwnClock


def run_really(engine: Engine, timed: Timed, clock: Clock) -> Ran:
    inner = engine.core.executor
    engine.core.executor = watching = Watching(inner)
    kept = engine._clock, inner._clock
    engine._clock = inner._clock = clock.now
    try:
        return _driven(engine, timed, watching, clock)
    finally:
        engine.core.executor = inner
        engine._clock, inner._clock = kept


def _driven(engine: Engine, timed: Timed, watching: Watching, clock: Clock) -> Ran:
    steps: list[tuple[StepShape, float]] = []
    rested: list[int] = []
    rates: list[tuple[int, float]] = []

    def look(*, now: bool) -> None:
        if (rate := clock.rate(now=now)) is not None:
            rates.append((len(steps), rate))

    prompts = [{"prompt_token_ids": list(job.prompt)} for job in timed.jobs]
    params = [SamplingParams(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True) for job in timed.jobs]
    coming = 0
    look(now=True)
    before = _ticks()
    start = clock.now()
    while coming < len(timed.jobs) or engine.core.has_work:
        now = clock.now() - start
        while coming < len(timed.jobs) and timed.arrivals[coming] <= now:
            engine.add(f"r{coming}", prompts[coming], params[coming])
            coming += 1
        if not engine.core.has_work:
            clock.wait(max(0.0, timed.arrivals[coming] - (clock.now() - start)))
            if rested[-1:] != [len(steps)]:
                rested.append(len(steps))
            continue
        watching.shape = None
        begun = clock.now()
        engine.step()
        took = clock.now() - begun
        if watching.shape is not None:
            steps.append((watching.shape, took))
        look(now=False)
    look(now=True)
    stolen, passed = (now - then for now, then in zip(_ticks(), before, strict=True))
    records = []
    for number in range(len(timed.jobs)):
        output = engine.take(f"r{number}").outputs[0]
        if output.error is not None or output.record is None:
            raise SystemExit(f"{timed.name}: a request ended with {output.finish_reason}: {output.error}")
        records.append(output.record)
    first = np.array([record.first_token_s for record in records]) - start
    decoded = [(r.decode_time, r.output_tokens - 1) for r in records if r.output_tokens > 1]
    end = max(record.finished_s for record in records) - start
    tpot = np.array([seconds / count for seconds, count in decoded])
    figures = _figures(timed, first - np.array(timed.arrivals), tpot, end)
    return Ran(figures, end, steps, stolen / passed if passed else 0.0, rested, rates)


def _ticks() -> tuple[int, int]:
    """Of all processors: what the host gave to others, and all that passed. Zeros where the system does not say."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return ticks[7], sum(ticks)


def run_virtually(replica: Replica, timed: Timed, factor: float = 1.0, lower: Lower | None = None) -> Ran:
    """With `lower` tiers, those who give way are moved to the host."""
    requests = [
        TraceRequest(arrival_ns=round(at * 1e9), input_tokens=len(job.prompt), output_tokens=job.max_tokens)
        for job, at in zip(timed.jobs, timed.arrivals, strict=True)
    ]
    measured = Measured()
    policies = Policies.named(preemption="recompute" if lower is None else "offload")
    core = replica.core(policies, cost=Scaled(replica.cost, factor) if factor != 1 else replica.cost, lower=lower)
    Simulation(core, OpenLoop(requests), [measured]).run()
    tpot = measured.column("tpot")
    return Ran(_figures(timed, measured.column("ttft"), tpot[~np.isnan(tpot)], measured.end_s), measured.end_s)


def _figures(timed: Timed, ttft: np.ndarray, tpot: np.ndarray, end: float) -> dict[str, float]:
    return {
        "tokens_per_s": timed.output_tokens / end,
        "tpot_mean_s": float(tpot.mean()) if len(tpot) else float("nan"),
        "ttft_p50_s": float(np.quantile(ttft, 0.5)),
        "ttft_p99_s": float(np.quantile(ttft, 0.99)),
    }


def step_coverage(calibration: Calibration, steps: list[tuple[StepShape, float]]) -> dict[str, float]:
    """How often a step's wall time lies in its interval, how wide intervals are, and how far steps are off."""
    from octavo.cost.fitted import FittedCost

    cost = FittedCost(calibration)
    seconds = np.array([took for _, took in steps])
    expected = np.array([cost.step_seconds(shape) + cost.host_seconds(shape) for shape, _ in steps])
    bounds = np.array([cost.step_interval(shape) for shape, _ in steps])
    inside = (bounds[:, 0] <= seconds) & (seconds <= bounds[:, 1])
    return {
        "steps": len(steps),
        "inside": float(inside.mean()),
        "below": float((seconds < bounds[:, 0]).mean()),
        "above": float((seconds > bounds[:, 1]).mean()),
        "median_width": float(np.median((bounds[:, 1] - bounds[:, 0]) / expected)),
        "median_error": float(np.median(np.abs(expected / seconds - 1))),
        "total": float(expected.sum() / seconds.sum() - 1),
    }
