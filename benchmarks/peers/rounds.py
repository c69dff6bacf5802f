"""Rounds of a comparison: what each engine needs, then each in turn through its workloads, within bounds.

Owns the order and the clocks that are not an engine's own: when a process was started, how long it may take,
when the whole is over. A failure belongs to the engine and the workload it happened in; the next workload
gets a new process, and an engine that cannot load is not tried again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from child import Broken, Child
from comparison import Asked, Line, Run
from engines import Choice
from environments import Environment, Unavailable, make_environment, peer_variables
from model_forms import make_checkpoint, tools
from protocol import Job, Setup
from workloads import Workload

HERE = Path(__file__).resolve().parent
BLOCK_TOKENS = 16
"""octavo's."""
LARGE_BLOCK_TOKENS = 256
"""No engine that is told bytes has larger ones."""
LOAD_LIMIT_S = 400.0
WARM_PROMPT, WARM_OUTPUT = 48, 4


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine that can be started."""

    choice: Choice
    python: Path
    checkpoint: Path
    tools: dict[str, str]


@dataclass(frozen=True, slots=True)
class Bounds:
    deadline: float
    limit_s: float
    minutes: float

    def left(self, most: float) -> float:
        """Seconds that the next question may take. Raises `Broken` when the whole is over."""
        left = min(most, self.deadline - time.monotonic())
        if left <= 0:
            raise Broken(f"the {self.minutes:g} minutes of the comparison were over")
        return left


def prepared(
    choices: Sequence[Choice], model: str, dtype: str, cache: Path, limit_s: float
) -> dict[str, Ready | Unavailable]:
    """By label, in the order asked: what is needed to start each engine, or why it cannot be had."""
    deadline = time.monotonic() + limit_s
    made: dict[str, Ready | Unavailable] = {}
    for choice in choices:
        made[choice.label] = _prepared(choice, model, dtype, cache, deadline)
    return made


def _prepared(choice: Choice, model: str, dtype: str, cache: Path, deadline: float) -> Ready | Unavailable:
    if dtype not in choice.engine.dtypes:
        return Unavailable(f"is not compared with weights in {dtype}")
    environment: Environment | None = None
    if choice.engine.environment:
        found = make_environment(choice.engine.environment, cache, max(0.0, deadline - time.monotonic()), say)
        if isinstance(found, Unavailable):
            return found
        environment = found
    checkpoint = make_checkpoint(choice.engine.form, model, dtype, cache / "checkpoints", deadline, say)
    if isinstance(checkpoint, Unavailable):
        return checkpoint
    python = Path(sys.executable) if environment is None else environment.python
    return Ready(choice, python, checkpoint, tools(environment, cache))


class Rounds:
    """All engines of one precision. `lines` has every workload's line for every engine that plays it."""

    def __init__(
        self,
        engines: dict[str, Ready | Unavailable],
        workloads: Sequence[Workload],
        dtype: str,
        options: argparse.Namespace,
        bounds: Bounds,
        rate: Callable[[], float] | None = None,
    ) -> None:
        """`rate` reads the memory's speed before and after each run."""
        self._ready = {label: made for label, made in engines.items() if isinstance(made, Ready)}
        self._workloads, self._dtype, self._options, self._bounds = workloads, dtype, options, bounds
        self._rate = rate
        self.settings: dict[str, dict[str, Any]] = {}
        self.lines: dict[str, list[Line]] = {workload.name: [] for workload in workloads}
        self._of: dict[tuple[str, str], Line] = {}
        """The same lines by engine and workload."""
        for choice in options.choices:
            made = engines[choice.label]
            reason = made.reason if isinstance(made, Unavailable) else ""
            reuse = choice.options.get("reuse") in ("on", "true", "prefix")
            for workload in workloads:
                if choice.plays(workload.name):
                    line = Line(choice.label, choice.engine.name, reuse, reason=reason)
                    self.lines[workload.name].append(line)
                    self._of[choice.label, workload.name] = line

    def play(self, repeat: int) -> None:
        for number in range(repeat):
            for label, ready in self._ready.items():
                say(f"round {number + 1} of {repeat}: {self._dtype} {label}")
                left = [w for w in self._workloads if ready.choice.plays(w.name) and not self._of[label, w.name].reason]
                while left:
                    # another process for what comes after the workload that broke the one before
                    left = left[self._play(ready, left) :]

    def _play(self, ready: Ready, workloads: Sequence[Workload]) -> int:
        """One process through the workloads; how many of them are dealt with, one way or the other."""
        label = ready.choice.label
        with Child(self._command(ready), self._log(label), self._variables(ready)) as child:
            try:
                self._load(child, ready)
            except Broken as error:
                for workload in workloads:
                    self._of[label, workload.name].reason = f"did not load: {error}"
                say(f"  {label} did not load: {error}")
                return len(workloads)
            ready_s = child.age_s
            for count, workload in enumerate(workloads, start=1):
                line = self._of[label, workload.name]
                try:
                    line.runs.append(self._run(child, workload, ready_s))
                except Broken as error:
                    line.reason = str(error)
                    say(f"  {workload.name} {label}: {error}")
                    return count
                say(f"  {workload.name} {label}: {line.runs[-1].seconds:.2f} s")
        return len(workloads)

    def _load(self, child: Child, ready: Ready) -> None:
        setup = _setup(ready, self._workloads, self._dtype, self._options)
        answer = child.ask({"do": "load", **asdict(setup)}, self._bounds.left(LOAD_LIMIT_S))
        self.settings[ready.choice.label] = answer["settings"]
        # other tokens than any workload begins with, so that nothing of it can be reused
        prompt = [(11 * i) % 29 + 3 for i in range(min(WARM_PROMPT, setup.longest - WARM_OUTPUT))]
        warm = [asdict(Job(prompt, WARM_OUTPUT)) for _ in range(min(2, setup.sequences))]
        for what in ("prepare", "play"):
            child.ask({"do": what, "jobs": warm}, self._bounds.left(self._bounds.limit_s))

    def _run(self, child: Child, workload: Workload, ready_s: float) -> Run:
        jobs = [asdict(Job(list(job.prompt), job.max_tokens)) for job in workload.jobs]
        child.ask({"do": "prepare", "jobs": jobs}, self._bounds.left(self._bounds.limit_s))
        rates = self._rates()
        before = child.cpu_seconds()
        answer = child.ask({"do": "play", "jobs": jobs}, self._bounds.left(self._bounds.limit_s))
        rates += self._rates()
        run = Run(
            seconds=answer["seconds"],
            cpu_seconds=child.cpu_seconds() - before,
            outputs=answer["outputs"],
            first_s=answer["first_s"],
            last_s=answer["last_s"],
            peak_bytes=child.peak_bytes,
            ready_s=ready_s,
            memory_rates=tuple(rates),
        )
        asked = Asked(tuple(len(j.prompt) for j in workload.jobs), tuple(j.max_tokens for j in workload.jobs))
        wrong = asked.wrong_counts(run)
        if wrong:
            raise Broken(f"{wrong} of {len(jobs)} requests got another number of tokens than asked")
        return run

    def _rates(self) -> list[float]:
        return [] if self._rate is None else [self._rate()]

    def _command(self, ready: Ready) -> list[str]:
        return [str(ready.python), str(HERE / "worker.py"), ready.choice.engine.player]

    def _log(self, label: str) -> Path:
        name = "".join(letter if letter.isalnum() else "-" for letter in f"{label}-{self._dtype}")
        return self._options.cache / "logs" / f"{name}.log"

    def _variables(self, ready: Ready) -> dict[str, str]:
        """Offline, so many threads, then what was written; where octavo is found only for octavo itself."""
        variables = peer_variables() | {"OMP_NUM_THREADS": str(self._options.threads), "HF_HUB_OFFLINE": "1"}
        variables |= ready.choice.variables
        if ready.choice.engine.environment:
            return variables
        import octavo

        return variables | {"PYTHONPATH": str(Path(octavo.__file__).resolve().parents[1])}


def _setup(ready: Ready, workloads: Sequence[Workload], dtype: str, options: argparse.Namespace) -> Setup:
    """The same room for every engine: what all requests of the largest workload need at once, in its blocks."""
    kv_tokens = max(_room(workload, BLOCK_TOKENS) for workload in workloads)
    kv_bytes = max(_room(workload, LARGE_BLOCK_TOKENS) for workload in workloads)
    kv_bytes *= kv_bytes_per_token(ready.checkpoint, dtype)
    return Setup(
        checkpoint=str(ready.checkpoint),
        dtype=dtype,
        threads=options.threads,
        sequences=max(2, *(len(w.jobs) for w in workloads)),
        longest=max(64, *(w.longest for w in workloads)),
        kv_tokens=kv_tokens,
        kv_bytes=kv_bytes,
        batched_tokens=max(options.max_num_batched_tokens, *(len(w.jobs) for w in workloads)),
        options=ready.choice.asked,
        tools=ready.tools,
    )


def _room(workload: Workload, block_tokens: int) -> int:
    """Positions of its requests together, each in whole blocks; enough for the warm-up too."""
    blocks = sum(-(-(len(job.prompt) + job.max_tokens) // block_tokens) for job in workload.jobs)
    return max(blocks * block_tokens, LARGE_BLOCK_TOKENS)


def kv_bytes_per_token(checkpoint: Path, dtype: str) -> int:
    """By octavo's geometry, from the config beside the weights; of a single file, which holds none, 0."""
    from octavo.geometry.dtypes import dtype_named
    from octavo.geometry.from_config import geometry_from_config

    if not checkpoint.is_dir():
        return 0
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    return geometry_from_config(config, dtype_named("bf16" if dtype == "int8" else dtype)).bytes_per_token


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
