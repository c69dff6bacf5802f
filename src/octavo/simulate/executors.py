"""Executors that run no model: they keep the executor seam honest.

`EchoExecutor` answers at once with the prompt's own tokens, over and over. `SimExecutor` moves a
virtual clock by a cost model. Both answer per (sequence, position) alone, like a seeded model, so
that neither batch-mates nor preemption may change a token.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from octavo.cost.step import CostModel, HasHostTime, HasRuns, StepShape, run_seconds
from octavo.memory.values import Int32, Int64
from octavo.scheduling.plan import NO_TOKEN, Admission, StepPlan, StepResult
from octavo.scheduling.request import Request

NANOSECONDS = 10**9
NEVER = 2**62


def seconds(nanoseconds: int) -> float:
    """A moment of the virtual clock as the core takes it."""
    return nanoseconds / NANOSECONDS


def nanoseconds(moment_s: float) -> int:
    """The moment that `seconds` made this of; exact for the first hundred days of virtual time."""
    return round(moment_s * NANOSECONDS)


class EchoExecutor:
    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._results.append(self._run(plan))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()

    def _run(self, plan: StepPlan) -> StepResult:
        for admission in plan.admissions:
            self._requests[admission.row] = admission.request
        tokens = np.full(plan.chunks, NO_TOKEN, dtype=np.int32)
        for i in np.flatnonzero(plan.samples).tolist():
            request = self._requests[int(plan.rows[i])]
            tokens[i] = self.token(request, int(plan.starts[i] + plan.counts[i]))
        return StepResult(plan.number, tokens, plan.planned_s)

    def token(self, request: Request, position: int) -> int:
        """The token at `position` of this request: its prompt, repeated."""
        return int(request.prompt_token_ids[position % request.prompt_tokens])


class SimExecutor:
    """Steps take the cost model's time, one after the other, on a clock of whole nanoseconds.

    A step begins when the host has made it ready and the device is done with the one before. Every request
    answers with one token over and over; one with a known true length and a stop id ends exactly there.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.clock_ns = 0
        """When the device has done all that it was given."""
        self._host = cost if isinstance(cost, HasHostTime) else None
        self._runs = cost if isinstance(cost, HasRuns) else None
        self._requests: dict[int, Request] = {}
        self._results: deque[StepResult] = deque()
        self._filler = np.zeros(0, dtype=np.int32)
        """By row: the token that is no end."""
        self._stop = np.zeros(0, dtype=np.int32)
        self._stop_at = np.zeros(0, dtype=np.int64)
        """By row: the position of the stop token, or NEVER, beyond all others."""

    @property
    def clock_s(self) -> float:
        return seconds(self.clock_ns)

    @clock_s.setter
    def clock_s(self, moment: float) -> None:
        self.clock_ns = nanoseconds(moment)

    def submit(self, plan: StepPlan) -> None:
        self._results.append(self._run(plan))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()

    def _run(self, plan: StepPlan) -> StepResult:
        for admission in plan.admissions:
            self._seat(admission)
        shape = StepShape.of(plan)
        ready_ns = nanoseconds(plan.planned_s) + self._host_ns(shape)
        self.clock_ns = max(self.clock_ns, ready_ns) + nanoseconds(self.cost.step_seconds(shape))
        positions = plan.starts + plan.counts
        tokens = self.tokens_at(plan.rows, positions)
        tokens[~plan.samples] = NO_TOKEN
        return StepResult(plan.number, tokens, self.clock_s)

    # -- many steps at once, for whoever knows that nothing else happens in them ----------------

    def steps_before_a_stop(self, rows: Int64, positions: Int64) -> int:
        """Decode steps from these positions on that yield no stop token."""
        return int(np.minimum.reduce(self._stop_at[rows] - positions, initial=NEVER)) - 1

    def tokens_at(self, rows: Int64, positions: Int64) -> Int32:
        """What each row's token at this position would be."""
        return np.where(positions == self._stop_at[rows], self._stop[rows], self._filler[rows])

    def tokens_between_stops(self, rows: Int64) -> Int32:
        return self._filler[rows]

    def run_ns(self, positions: Int64, now_ns: int, steps: int) -> Int64:
        """When each of `steps` decode steps would be planned, and when the last one would be done: steps + 1 moments.

        With nothing in flight, each step is planned when the one before is done.
        """
        shape = StepShape.decode(positions)
        runs = run_seconds(self.cost, shape, steps) if self._runs is None else self._runs.run_seconds(shape, steps)
        moments = np.empty(steps + 1, dtype=np.int64)
        moments[0] = now_ns
        moments[1:] = np.rint(runs * NANOSECONDS)
        moments[1:] += self._host_ns(shape)
        return moments.cumsum()

    def ahead_ns(self, positions: Int64, now_ns: int, steps: int) -> tuple[list[int], list[int]]:
        """When each of `steps` further decode steps would be planned, one being in flight, and when each is done that
        is learned of in turn: the one in flight first, and the last planned one at the end, one more."""
        shape = StepShape.decode(positions)
        runs = run_seconds(self.cost, shape, steps) if self._runs is None else self._runs.run_seconds(shape, steps)
        host_ns, planned, done = self._host_ns(shape), [now_ns], [self.clock_ns]
        for took in np.rint(runs * NANOSECONDS).astype(np.int64).tolist():
            done.append(max(done[-1], planned[-1] + host_ns) + took)
            planned.append(done[-2])
        return planned[:-1], done

    def leapt_ahead(self, plan: StepPlan, done_ns: int) -> None:
        """Steps were taken at once, and this plan is in flight now, done at this moment."""
        self.clock_ns = done_ns
        self._results.clear()
        self._results.append(
            StepResult(plan.number, self.tokens_at(plan.rows, plan.starts + plan.counts), self.clock_s)
        )

    def _host_ns(self, shape: StepShape) -> int:
        return 0 if self._host is None else nanoseconds(self._host.host_seconds(shape))

    def _seat(self, admission: Admission) -> None:
        row, request = admission.row, admission.request
        self._requests[row] = request
        if row >= len(self._stop_at):
            more = max(row + 1, 2 * len(self._stop_at)) - len(self._stop_at)
            self._filler = np.append(self._filler, np.zeros(more, dtype=np.int32))
            self._stop = np.append(self._stop, np.zeros(more, dtype=np.int32))
            self._stop_at = np.append(self._stop_at, np.full(more, NEVER, dtype=np.int64))
        stop_ids = request.stop_ids
        self._filler[row] = next(token for token in range(len(stop_ids) + 1) if token not in stop_ids)
        self._stop_at[row] = NEVER
        if request.true_output_tokens is not None and stop_ids:
            self._stop[row] = stop_ids[0]
            self._stop_at[row] = request.prompt_tokens + max(1, request.true_output_tokens) - 1
