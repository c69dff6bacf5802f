"""A real run, recorded and replayed: proof that the scheduler is the same one everywhere.

A recording holds what came from outside (submissions, aborts, pins, resets, the times of steps), what the executor
answered (token per sequence and position, finishing time) and what the mover answered (notices of each
poll). It also holds the plans and what the mover was asked for, for comparison alone: a replay is never
shown them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from octavo.errors import OctavoError, RequestError
from octavo.memory.pins import Pin
from octavo.memory.transfers import Mover, Notice, Order
from octavo.memory.values import Int32
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Event, FinishReason
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
    reason: FinishReason = "abort"


@dataclass(frozen=True, slots=True)
class Reset:
    """All that was kept for reuse is forgotten."""

    now: float


@dataclass(frozen=True, slots=True)
class Pinning:
    now: float
    token_ids: tuple[int, ...]
    salt: str
    ttl_s: float
    tokens: int | None
    """How many positions it pinned, for comparison alone; None: it was refused."""


@dataclass(frozen=True, slots=True)
class Unpinning:
    name: str


@dataclass(frozen=True, slots=True)
class Looking:
    """At the pins: those whose time is over end by it."""

    now: float


@dataclass(frozen=True, slots=True)
class Step:
    now: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    order: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    group: int
    slots: tuple[int, ...]


Input = Submission | Abort | Reset | Pinning | Unpinning | Looking | Step
Asked = Order | Cancelled | Forgotten


@dataclass(frozen=True, slots=True)
class Poll:
    plans: int
    """Made before it."""
    asked: int
    """Of the mover, before it."""
    notices: tuple[Notice, ...]


@dataclass(slots=True)
class Recording:
    inputs: list[Input] = field(default_factory=list)
    tokens: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(plan, sequence, position) -> token sampled."""
    finished_s: list[float] = field(default_factory=list)
    """By plan."""
    plans: list[dict[str, Any]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    """Of the mover, in order."""
    polls: list[Poll] = field(default_factory=list)


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


class RecordingMover:
    """Passes everything through to another mover and writes down what it was asked, and what it answered."""

    def __init__(self, inner: Mover, recording: Recording) -> None:
        self.inner = inner
        self.recording = recording

    def submit(self, order: Order) -> None:
        self.recording.asked.append(order)
        self.inner.submit(order)

    def cancel(self, number: int) -> None:
        self.recording.asked.append(Cancelled(number))
        self.inner.cancel(number)

    def forget(self, group: int, slots: Sequence[int]) -> None:
        self.recording.asked.append(Forgotten(group, tuple(slots)))
        self.inner.forget(group, slots)

    def poll(self, now: float) -> list[Notice]:
        notices = self.inner.poll(now)
        recording = self.recording
        recording.polls.append(Poll(len(recording.plans), len(recording.asked), tuple(notices)))
        return notices

    def wait(self) -> None:
        self.inner.wait()

    def close(self) -> None:
        self.inner.close()


class RecordedMover:
    """Answers each poll from a recording. Raises `Divergence` where it is asked for anything else than that run asked.

    The step that it names is the plan that was due in the recorded run.
    """

    def __init__(self, recording: Recording) -> None:
        self._asked = recording.asked
        self._polls = recording.polls
        self._step = self._count = self._polled = 0

    def submit(self, order: Order) -> None:
        self._compare(order)

    def cancel(self, number: int) -> None:
        self._compare(Cancelled(number))

    def forget(self, group: int, slots: Sequence[int]) -> None:
        self._compare(Forgotten(group, tuple(slots)))

    def poll(self, now: float) -> list[Notice]:
        if self._polled >= len(self._polls):
            raise Divergence(self._step, "the recorded run did not ask its mover any more")
        poll = self._polls[self._polled]
        self._require_all(poll.asked)
        self._polled += 1
        self._step = poll.plans
        return list(poll.notices)

    def wait(self) -> None:
        """What happened while the run waited is recorded."""

    def close(self) -> None:
        """Nothing is open."""

    def finish(self) -> None:
        """Raises `Divergence` unless everything has been asked."""
        self._require_all(len(self._asked))

    def _require_all(self, count: int) -> None:
        if self._count < count:
            raise Divergence(self._step, f"the recorded run asked its mover for {self._asked[self._count]} here")

    def _compare(self, mine: Asked) -> None:
        if self._count >= len(self._asked):
            raise Divergence(self._step, f"the recorded run did not ask its mover for {mine}")
        theirs = self._asked[self._count]
        if mine != theirs:
            raise Divergence(self._step, _difference(mine, theirs))
        self._count += 1


def _difference(mine: Asked, theirs: Asked) -> str:
    if isinstance(mine, Order) and isinstance(theirs, Order):
        for name in (one.name for one in fields(Order)):
            ours, was = getattr(mine, name), getattr(theirs, name)
            if ours != was:
                return f"{name} of order {mine.number} is {ours}, was {was}"
    return f"the mover is asked for {mine}, was for {theirs}"


class Divergence(OctavoError):
    """A replay decided otherwise than the recorded run: `step` is the plan's number."""

    def __init__(self, step: int, detail: str) -> None:
        self.step = step
        super().__init__(f"step {step}: {detail}")


class Recorder(EngineCore):
    """The core it is made of, whose inputs are written down: stands wherever that core stood."""

    def __init__(self, core: EngineCore, recording: Recording) -> None:
        super().__init__(core.scheduler, core.executor, depth=core.depth, audit=core.audit, mover=core.mover)
        self.timer, self.guard = core.timer, core.guard
        self.recording = recording

    def submit(self, request: Request, now: float) -> int:
        sequence_id = super().submit(request, now)
        self.recording.inputs.append(Submission(now, request))
        return sequence_id

    def abort(self, sequence_id: int, now: float, reason: FinishReason = "abort") -> bool:
        self.recording.inputs.append(Abort(now, sequence_id, reason))
        return super().abort(sequence_id, now, reason)

    def reset_kept(self, now: float) -> list[int]:
        self.recording.inputs.append(Reset(now))
        return super().reset_kept(now)

    def pin(self, token_ids: Int32, salt: str, now: float, ttl_s: float) -> Pin:
        tokens = None
        try:
            pin = super().pin(token_ids, salt, now, ttl_s)
            tokens = pin.tokens
            return pin
        finally:
            self.recording.inputs.append(Pinning(now, tuple(map(int, token_ids)), salt, ttl_s, tokens))

    def unpin(self, name: str) -> bool:
        self.recording.inputs.append(Unpinning(name))
        return super().unpin(name)

    def live_pins(self, now: float) -> list[Pin]:
        self.recording.inputs.append(Looking(now))
        return super().live_pins(now)

    def step(self, now: float) -> list[Event]:
        self.recording.inputs.append(Step(now))
        return super().step(now)


def replay(recording: Recording, core: EngineCore) -> int:
    """Run the recorded inputs through `core`, over a `RecordedExecutor` and, with tiers, a `RecordedMover` of them.

    Returns the number of plans compared. Raises `Divergence` naming the first step that was
    planned otherwise, and what differs in it.
    """
    compared = _Comparing(core.executor, recording)
    core.executor = compared
    for entry in recording.inputs:
        _again(core, entry, compared.count)
    if compared.count != len(recording.plans):
        raise Divergence(compared.count, f"the replay made {compared.count} plans, the run {len(recording.plans)}")
    if isinstance(core.mover, RecordedMover):
        core.mover.finish()
    return compared.count


def _again(core: EngineCore, entry: Input, step: int) -> None:
    match entry:
        case Submission(now, request):
            try:
                core.submit(request, now)
            except RequestError as error:
                raise Divergence(step, f"a request that the run took is refused: {error}") from error
        case Abort(now, sequence_id, reason):
            core.abort(sequence_id, now, reason)
        case Reset(now):
            core.reset_kept(now)
        case Pinning():
            _pin_again(core, entry, step)
        case Unpinning(name):
            core.unpin(name)
        case Looking(now):
            core.live_pins(now)
        case Step(now):
            core.step(now)


def _pin_again(core: EngineCore, entry: Pinning, step: int) -> None:
    try:
        pinned = core.pin(np.array(entry.token_ids, dtype=np.int32), entry.salt, entry.now, entry.ttl_s).tokens
    except RequestError:
        pinned = None
    if pinned != entry.tokens:
        told = ["refused" if tokens is None else f"of {tokens} positions" for tokens in (pinned, entry.tokens)]
        raise Divergence(step, f"a pin is {told[0]}, was {told[1]}")


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
