"""The step loop: `EngineCore.step(now)` is the whole engine. No thread, no clock, no torch.

Depth 0: plan, run, learn. Depth 1: plan the next step before the last one is learned of, so that
deciding overlaps computing; a sequence that ended meanwhile has one step computed in vain.
"""

from __future__ import annotations

from collections import deque

from octavo.errors import ConfigError
from octavo.scheduling.audit import Audit
from octavo.scheduling.events import Event, FinishReason
from octavo.scheduling.plan import Executor, StepPlan
from octavo.scheduling.request import Request
from octavo.scheduling.scheduler import Scheduler


class EngineCore:
    def __init__(self, scheduler: Scheduler, executor: Executor, *, depth: int = 0, audit: Audit | None = None) -> None:
        if depth not in (0, 1):
            raise ConfigError("pipeline_depth", depth, "use 0 (plan, run, learn) or 1 (plan ahead by one step)")
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self._audit = audit
        self._in_flight: deque[StepPlan] = deque()

    def submit(self, request: Request, now: float) -> int:
        """Queue a request; returns its sequence id. Raises `RequestError`, having changed nothing."""
        return self.scheduler.submit(request, now)

    def abort(self, sequence_id: int, now: float, reason: FinishReason = "abort") -> bool:
        """End a sequence at any moment; `stop` when its text met a stop string. False when it has ended already."""
        return self.scheduler.abort(sequence_id, now, reason)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self, now: float) -> list[Event]:
        """Plan a step, run it, learn of the oldest one due. Returns what happened since the last call."""
        plan = self.scheduler.schedule(now)
        if plan is not None:
            self.executor.submit(plan)
            self._in_flight.append(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > self.depth):
            learned = self._in_flight.popleft()
            result = self.executor.collect()
            self.scheduler.commit(learned, result, result.finished_s)
        if self._audit is not None:
            self._audit.after_step(self.scheduler, plan)
        return self.scheduler.drain_events()

    def fail(self, error: str, now: float) -> list[Event]:
        """The executor is gone: end every sequence with `error`. No step may follow."""
        self.scheduler.fail_all(error, now)
        return self.scheduler.drain_events()
