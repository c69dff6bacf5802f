"""Executors that run no model: they keep the executor seam honest.

`EchoExecutor` answers at once with the prompt's own tokens, over and over. `SimExecutor` moves a
virtual clock by a cost model. Both answer per (sequence, position) alone, like a seeded model, so
that neither batch-mates nor preemption may change a token.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from octavo.cost.step import CostModel, StepShape
from octavo.scheduling.plan import NO_TOKEN, StepPlan, StepResult
from octavo.scheduling.request import Request


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


class SimExecutor(EchoExecutor):
    """Steps take the cost model's time, one after the other. A request with a known true length
    and a stop id ends exactly there."""

    def __init__(self, cost: CostModel) -> None:
        super().__init__()
        self.cost = cost
        self.clock_s = 0.0

    def _run(self, plan: StepPlan) -> StepResult:
        result = super()._run(plan)
        self.clock_s = max(self.clock_s, plan.planned_s) + self.cost.step_seconds(StepShape.of(plan))
        return StepResult(plan.number, result.tokens, self.clock_s)

    def token(self, request: Request, position: int) -> int:
        true_length = request.true_output_tokens
        if true_length is not None and request.stop_ids and position == request.prompt_tokens + true_length - 1:
            return request.stop_ids[0]
        token = super().token(request, position)
        return token + 1 if token in request.stop_ids else token
