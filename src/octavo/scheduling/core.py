"""The step loop: `EngineCore.step(now)` is the whole engine. No thread, no clock, no torch.

Depth 0: plan, run, learn. Depth 1: plan the next step before the last one is learned of, so that
deciding overlaps computing; a sequence that ended meanwhile has one step computed in vain.

Whoever drives the core may set `timer` (the parts of each step are then timed; no decision reads
it) and `guard` (held while requests, tables or blocks change, never while a step computes, so that
another thread which holds it reads them at rest).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from octavo.errors import ConfigError, InvariantViolation
from octavo.memory.pins import Pin
from octavo.memory.transfers import Mover
from octavo.memory.values import Int32
from octavo.scheduling.audit import Audit
from octavo.scheduling.events import EngineFailed, Event, FinishReason, StepEnded
from octavo.scheduling.moving import settle_transfers
from octavo.scheduling.plan import Executor, StepPlan
from octavo.scheduling.request import Request
from octavo.scheduling.scheduler import Scheduler


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        depth: int = 0,
        audit: Audit | None = None,
        mover: Mover | None = None,
    ) -> None:
        if depth not in (0, 1):
            raise ConfigError("pipeline_depth", depth, "use 0 (plan, run, learn) or 1 (plan ahead by one step)")
        if (mover is None) != (scheduler.tiering is None):
            raise ConfigError("mover", mover, "belongs to a scheduler with tiers below the device, and only to one")
        self.scheduler = scheduler
        self.executor = executor
        self.mover = mover
        """Copies between tiers, beside the steps."""
        self.depth = scheduler.plans_ahead = depth
        self.timer: Callable[[], float] | None = None
        self.guard: AbstractContextManager[Any] = nullcontext()
        self.audit = audit
        self._in_flight: deque[tuple[StepPlan, float, float]] = deque()
        """Plans with the seconds that deciding and submitting each took."""

    def submit(self, request: Request, now: float) -> int:
        """Queue a request; returns its sequence id. Raises `RequestError`, having queued nothing."""
        with self.guard:
            return self.scheduler.submit(request, now)

    def abort(self, sequence_id: int, now: float, reason: FinishReason = "abort") -> bool:
        """End a sequence at any moment; `stop` when its text met a stop string. False when it has ended already."""
        with self.guard:
            return self.scheduler.abort(sequence_id, now, reason)

    def reset_kept(self, now: float) -> list[int]:
        """Forget what is kept for reuse; returns how many blocks of each group that freed at once."""
        with self.guard:
            return self.scheduler.reset_kept(now)

    def pin(self, token_ids: Int32, salt: str, now: float, ttl_s: float) -> Pin:
        """What is kept of this text goes last for `ttl_s` seconds. Raises `RequestError`."""
        with self.guard:
            return self.scheduler.kept.pin(token_ids, salt, now, ttl_s)

    def unpin(self, name: str) -> bool:
        """False when there is no such pin, or no longer."""
        with self.guard:
            return self.scheduler.kept.unpin(name)

    def live_pins(self, now: float) -> list[Pin]:
        """In the order in which they were made."""
        with self.guard:
            return self.scheduler.kept.live_pins(now)

    @property
    def has_work(self) -> bool:
        """Whether a step may bring something: copies whose deadline has passed are not waited for."""
        tiering = self.scheduler.tiering
        return self.scheduler.has_work or (tiering is not None and tiering.awaited)

    def step(self, now: float) -> list[Event]:
        """Plan a step, run it, learn of the oldest one due. Returns what happened since the last call."""
        timer = self.timer
        begun = 0.0 if timer is None else timer()
        with self.guard:
            plan = self._plan(now)
        if plan is not None:
            scheduled = 0.0 if timer is None else timer()
            self.executor.submit(plan)
            self._in_flight.append((plan, scheduled - begun, 0.0 if timer is None else timer() - scheduled))
        ended = None
        if self._in_flight and (plan is None or len(self._in_flight) > self.depth):
            ended = self._learn(timer)
            self._copy_while_idle()
        elif plan is None and self.mover is not None and self.has_work:
            self.mover.wait()
        if self.audit is not None:
            self.audit.after_step(self.scheduler, plan)
        events = self.scheduler.drain_events()
        if ended is not None:
            events.append(ended)
        return events

    def leapt(self, planned_s: float) -> None:
        """Steps have been taken at once (`leap`), the last of them planned at this moment. Nothing came of copies
        until then."""
        if self.mover is not None:
            if self.mover.poll(planned_s):
                raise InvariantViolation("quiet-steps", f"word of a copy came before {planned_s} s")
            self._copy_while_idle()

    @property
    def flying(self) -> StepPlan | None:
        """The plan in flight, where there is one and no other."""
        return self._in_flight[0][0] if len(self._in_flight) == 1 else None

    def leapt_ahead(self, plan: StepPlan) -> None:
        """Plans have been made and learned of at once (`leap_ahead`), and this one is in flight now."""
        self._in_flight.clear()
        self._in_flight.append((plan, 0.0, 0.0))

    def _copy_while_idle(self) -> None:
        """Where nobody computes it is the time to copy ahead of who comes next."""
        if self.scheduler.tiering is not None and not self.scheduler.has_work:
            with self.guard:
                self.scheduler.tiering.prepare()
                self._order_copies()

    def _plan(self, now: float) -> StepPlan | None:
        """Learn what became of copies, plan, and give orders for others."""
        scheduler, mover = self.scheduler, self.mover
        if mover is None or scheduler.tiering is None:
            return scheduler.schedule(now)
        notices = mover.poll(now)
        if notices:
            settle_transfers(scheduler, notices, now)
        plan = scheduler.schedule(now)
        self._order_copies()
        return plan

    def _order_copies(self) -> None:
        mover, tiering = self.mover, self.scheduler.tiering
        assert mover is not None
        assert tiering is not None
        for group, slots in tiering.take_erased():
            mover.forget(group, slots)
        for order in tiering.take_orders():
            mover.submit(order)
        for number in tiering.take_cancels():
            mover.cancel(number)

    def fail(self, error: str, now: float) -> list[Event]:
        """The executor is gone: end every sequence with `error`. Never raises; no step may follow."""
        # State that is broken may be unable to end what it holds; who waits is told all the same.
        with self.guard, suppress(Exception):
            self.scheduler.fail_all(error, now)
        return [*self.scheduler.drain_events(), EngineFailed(now, error)]

    def close(self) -> None:
        """Nothing runs any more, neither steps nor copies."""
        self.executor.close()
        if self.mover is not None:
            self.mover.close()

    def _learn(self, timer: Callable[[], float] | None) -> StepEnded:
        plan, schedule_s, execute_s = self._in_flight.popleft()
        waited = 0.0 if timer is None else timer()
        result = self.executor.collect()
        collected = 0.0 if timer is None else timer()
        with self.guard:
            self.scheduler.commit(plan, result, result.finished_s)
            evicted, below = self.scheduler.kept.evictions_untold(), self.scheduler.kept.evictions_below_untold()
        if timer is None:
            return StepEnded(
                result.finished_s, plan.number, plan.planned_s, evicted_blocks=evicted, evicted_below=below
            )
        execute_s += collected - waited
        commit_s = timer() - collected
        return StepEnded(
            result.finished_s, plan.number, plan.planned_s, schedule_s, execute_s, commit_s, evicted, below
        )
