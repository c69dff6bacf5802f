"""A real run, recorded and replayed: proof that the scheduler is the same one everywhere.

A recording holds what came from outside (submissions, aborts, the times of steps) and what the
executor answered (token per sequence and position, finishing time). It also holds the plans, for
comparison alone: a replay is never shown them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.errors import OctavoError, RequestError
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Event
from octavo.scheduling.plan import NO_TOKEN, Executor, StepPlan, StepResult
from octavo.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Submission:
    now: float
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    now: float
    sequence_id: int


@dataclass(frozen=True, slots=True)
class Step:
    now: float


@dataclass(slots=True)
class Recording:
    inputs: list[Submission | Abort | Step] = field(default_factory=list)
    tokens: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(plan, sequence, position) -> token sampled."""
    finished_s: list[float] = field(default_factory=list)
    """By plan."""
    plans: list[dict[str, Any]] = field(default_factory=list)


class RecordingExecutor:
    """Passes everything through to another executor and writes down what it answered."""

    def __init__(self, inner: Executor, recording: Recording) -> None:
        self.inner = inner
        self.recording = recording
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self.recording.plans.append(plan.decisions())
        self._plans.append(plan)
        self.inner.submit(plan)

    def collect(self) -> StepResult:
        plan, result = self._plans.popleft(), self.inner.collect()
        for i in np.flatnonzero(plan.samples).tolist():
            key = (plan.number, int(plan.sequence_ids[i]), int(plan.starts[i] + plan.counts[i]))
            self.recording.tokens[key] = int(result.tokens[i])
        self.recording.finished_s.append(result.finished_s)
        return result

    def close(self) -> None:
        self.inner.close()


class RecordedExecutor:
    """Answers from a recording, by (plan, sequence, position); refuses what was never computed."""

    def __init__(self, recording: Recording) -> None:
        self._tokens: Mapping[tuple[int, int, int], int] = recording.tokens
        self._finished_s = recording.finished_s
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        tokens = np.full(plan.chunks, NO_TOKEN, dtype=np.int32)
        for i in np.flatnonzero(plan.samples).tolist():
            key = (plan.number, int(plan.sequence_ids[i]), int(plan.starts[i] + plan.counts[i]))
            if key not in self._tokens:
                raise Divergence(
                    plan.number, f"sequence {key[1]} position {key[2]} was not sampled in the recorded run"
                )
            tokens[i] = self._tokens[key]
        return StepResult(plan.number, tokens, self._finished_s[plan.number])

    def close(self) -> None:
        self._plans.clear()


class Divergence(OctavoError):
    """A replay decided otherwise than the recorded run: `step` is the plan's number."""

    def __init__(self, step: int, detail: str) -> None:
        self.step = step
        super().__init__(f"step {step}: {detail}")


class Recorder:
    """An `EngineCore` whose inputs are written down."""

    def __init__(self, core: EngineCore, recording: Recording) -> None:
        self.core = core
        self.recording = recording

    def submit(self, request: Request, now: float) -> int:
        sequence_id = self.core.submit(request, now)
        self.recording.inputs.append(Submission(now, request))
        return sequence_id

    def abort(self, sequence_id: int, now: float) -> bool:
        self.recording.inputs.append(Abort(now, sequence_id))
        return self.core.abort(sequence_id, now)

    def step(self, now: float) -> list[Event]:
        self.recording.inputs.append(Step(now))
        return self.core.step(now)

    @property
    def has_work(self) -> bool:
        return self.core.has_work


def replay(recording: Recording, core: EngineCore) -> int:
    """Run the recorded inputs through `core`, whose executor is a `RecordedExecutor` of the same recording.

    Returns the number of plans compared. Raises `Divergence` naming the first step that was
    planned otherwise, and what differs in it.
    """
    compared = _Comparing(core.executor, recording)
    core.executor = compared
    for entry in recording.inputs:
        match entry:
            case Submission(now, request):
                try:
                    core.submit(request, now)
                except RequestError as error:
                    raise Divergence(compared.count, f"a request that the run took is refused: {error}") from error
            case Abort(now, sequence_id):
                core.abort(sequence_id, now)
            case Step(now):
                core.step(now)
    if compared.count != len(recording.plans):
        raise Divergence(compared.count, f"the replay made {compared.count} plans, the run {len(recording.plans)}")
    return compared.count


class _Comparing:
    def __init__(self, inner: Executor, recording: Recording) -> None:
        self._inner = inner
        self._plans = recording.plans
        self.count = 0

    def submit(self, plan: StepPlan) -> None:
        if self.count >= len(self._plans):
            raise Divergence(self.count, "the recorded run made no further plan")
        mine, theirs = plan.decisions(), self._plans[self.count]
        for name, value in mine.items():
            if value != theirs[name]:
                raise Divergence(self.count, f"{name} is {value}, was {theirs[name]}")
        self.count += 1
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        return self._inner.collect()

    def close(self) -> None:
        self._inner.close()
