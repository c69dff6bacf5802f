"""An engine without a model, paced like one: what `octavo serve --executor sim` runs.

The scheduler, the cache and everything above are the real ones. A step is told of when the cost model says that the
device would be done; its tokens are those of the prompt over and over, which a client can read. Copies between tiers
are told of in the same way. Owns the waiting; what steps and copies take is `SimExecutor`'s and `SimMover`'s.

Invariant: an answer depends on its request alone, never on its batch-mates or on time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.memory.transfers import Notice, Order
from octavo.memory.values import Int32
from octavo.scheduling.plan import NO_TOKEN, Admission, StepPlan, StepResult, TokenLogprobs
from octavo.scheduling.request import Request
from octavo.simulate.executors import SimExecutor, seconds
from octavo.simulate.lengths import Lengths
from octavo.simulate.links import SimMover

_MOST_WAIT_S = 0.02
"""For a copy, before whoever drives the core may look at what else has come."""


@dataclass(frozen=True, slots=True)
class Speech:
    """What answers are made of."""

    unspoken: frozenset[int] = frozenset()
    """Tokens of the prompt that are left out: control tokens, which a client would not see."""
    otherwise: int = 0
    """Said where nothing of the prompt is left."""
    lengths: Lengths | None = None
    """Where an answer ends by itself, drawn by its seed; None: where the client says."""


class PacedExecutor:
    def __init__(
        self,
        inner: SimExecutor,
        speech: Speech | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`clock` is that of whoever drives the core."""
        self.inner = inner
        self.speech = speech or Speech()
        self._clock = clock
        self._sleep = sleep
        self._requests: dict[int, Request] = {}
        self._words: dict[int, Int32] = {}
        """By row: what its answer says over and over."""
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        if plan.admissions:
            plan = replace(plan, admissions=tuple(self._seated(admission) for admission in plan.admissions))
        self._plans.append(plan)
        self.inner.submit(plan)

    def collect(self) -> StepResult:
        plan, result = self._plans.popleft(), self.inner.collect()
        tokens, logprobs = self._said(plan, result.tokens)
        left = result.finished_s - self._clock()
        if left > 0:
            self._sleep(left)
        return replace(result, tokens=tokens, logprobs=logprobs)

    def close(self) -> None:
        self._plans.clear()
        self.inner.close()

    def _seated(self, admission: Admission) -> Admission:
        request = admission.request
        if self.speech.lengths is not None and request.stop_ids and request.true_output_tokens is None:
            generator = np.random.default_rng([request.params.seed or 0, request.choice])
            length = int(self.speech.lengths.draw(generator, 1)[0])
            request = replace(request, true_output_tokens=length)
        self._requests[admission.row] = request
        left_out = self.speech.unspoken.union(request.stop_ids)
        words = request.prompt_token_ids[~np.isin(request.prompt_token_ids, sorted(left_out))]
        self._words[admission.row] = words if len(words) else np.array([self.speech.otherwise], dtype=np.int32)
        return replace(admission, request=request)

    def _said(self, plan: StepPlan, ended: Int32) -> tuple[Int32, dict[int, TokenLogprobs]]:
        """Tokens in place of the filler; stop tokens stay."""
        tokens, logprobs = ended.copy(), {}
        for i in np.flatnonzero(ended != NO_TOKEN).tolist():
            row = int(plan.rows[i])
            request = self._requests[row]
            at = int(plan.starts[i] + plan.counts[i]) - request.prompt_tokens
            if int(ended[i]) not in request.stop_ids:
                words = self._words[row]
                tokens[i] = words[at % len(words)]
            if request.params.logprobs is not None:
                said = int(tokens[i])
                logprobs[i] = TokenLogprobs(said, 0.0, 1, ((said, 0.0),) if request.params.logprobs else ())
        return tokens, logprobs


class PacedMover:
    """Copies nothing: every order ends when its link would be done with it, by the clock of whoever drives the core."""

    def __init__(
        self,
        inner: SimMover,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inner = inner
        self._clock = clock
        self._sleep = sleep

    def submit(self, order: Order) -> None:
        self.inner.submit(order)

    def cancel(self, number: int) -> None:
        self.inner.cancel(number)

    def forget(self, group: int, slots: Sequence[int]) -> None:
        self.inner.forget(group, slots)

    def poll(self, now: float) -> list[Notice]:
        return self.inner.poll(now)

    def wait(self) -> None:
        """Until there is something to poll, or for a moment."""
        due = self.inner.next_ns()
        left = _MOST_WAIT_S if due is None else min(_MOST_WAIT_S, seconds(due) - self._clock())
        if left > 0:
            self._sleep(left)

    def close(self) -> None:
        self.inner.close()
