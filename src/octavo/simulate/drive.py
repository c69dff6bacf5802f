"""The driver of virtual time: arrivals in, octavo's own core in the middle, events out.

Owns the clock, whole nanoseconds, and nothing of what is decided: `EngineCore` plans and learns as it does
anywhere. Where the scheduler is sure that only decode steps follow, they are taken at once (`scheduling.leap`);
`leap=False` takes them singly, to the same events.

    due arrivals --submit--> core --step or leap--> events --> whoever watches
          ^                                            |
          +---------- a user whose request ended ------+

Invariant: the clock never goes back, and never reads any other clock.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from octavo.errors import ConfigError, InvariantViolation, RequestError
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Admitted, Event, Finished, Preempted, Resource, StepEnded, StepPlanned
from octavo.scheduling.leap import DecodeRun, advance, quiet_steps
from octavo.scheduling.leap_ahead import advance_ahead, quiet_steps_ahead
from octavo.scheduling.request import Request
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.executors import NANOSECONDS, SimExecutor, nanoseconds, seconds
from octavo.simulate.links import SimMover

Happening = Event | DecodeRun

_CHANGES = (Admitted, Preempted, Finished)
"""Events of a step after which the next one may decide otherwise."""
_MOST_STEPS = 1024
"""In one leap: so much is computed ahead at most."""
_IDLE_STEPS = 4
"""Steps in a row that plan nothing although there is work: more are a fault."""
_YOUNG = 100_000
"""More objects than this have to be made, and kept, before cycles are looked for."""
_MOST_WAITS = 10_000
"""Times in a row that the clock goes on to the word of a copy, a sequence waits, and nothing is planned then: more are
a fault. When all have ended, a large host may have more than that to write to the disk."""


class Source(Protocol):
    """Where requests come from."""

    def next_ns(self) -> int | None:
        """When the next request that is known of arrives; None: none is known now."""
        ...

    def pop(self) -> Request:
        """That request."""
        ...

    def ended(self, request_id: str, now_ns: int) -> None:
        """A request has ended, or was refused. Others may be known of from now on."""
        ...


class Watcher(Protocol):
    def observe(self, happenings: Sequence[Happening]) -> None: ...

    def at_rest(self, now_ns: int, scheduler: Scheduler) -> None:
        """Between two steps: the scheduler may be looked at."""
        ...


class Simulation:
    def __init__(
        self, core: EngineCore, source: Source, watchers: Sequence[Watcher] = (), *, leap: bool = True
    ) -> None:
        if not isinstance(core.executor, SimExecutor):
            raise ConfigError("executor", type(core.executor).__name__, "virtual time needs a SimExecutor")
        if not isinstance(core.mover, SimMover | None):
            raise ConfigError("mover", type(core.mover).__name__, "virtual time needs a SimMover")
        self.core = core
        self.executor = core.executor
        self.mover = core.mover
        self.source = source
        self.watchers = tuple(watchers)
        self.now_ns = 0
        self.leaps = 0
        self.steps = 0
        """Single ones, beside those of leaps."""
        self.first_refusal: RequestError | None = None
        """Why the first request that was refused was."""
        self._leap = None if not leap else self._take_leap if core.depth == 0 else self._take_leap_ahead
        self._refused_for: Resource | None = None
        """What bound the last step, as `quiet_steps` wants it."""

    def run(self, until_s: float | None = None) -> None:
        """Until nothing is left to do, or the clock has passed `until_s`."""
        with _rarely_collected():
            self._run(until_s)

    def _run(self, until_s: float | None) -> None:
        idle = waits = 0
        while until_s is None or self.now_ns < until_s * NANOSECONDS:
            self._take_arrivals()
            if not self.core.has_work:
                self._tell(self.core.scheduler.drain_events())
                coming = self.source.next_ns()
                if coming is None:
                    return
                self.now_ns = max(self.now_ns, coming)
                continue
            if self._leap is not None and self._leap():
                idle = 0
                continue
            if self._take_step():
                idle = waits = 0
            elif self._await_copies():
                idle, waits = 0, waits + self.core.scheduler.has_work
            else:
                idle += 1
            if idle > _IDLE_STEPS or waits > _MOST_WAITS:
                raise InvariantViolation("progress", f"{idle or waits} steps plan nothing although there is work")

    def _take_arrivals(self) -> None:
        while True:
            coming = self.source.next_ns()
            if coming is None or coming > self.now_ns:
                return
            request = self.source.pop()
            self._refused_for = None
            try:
                self.core.submit(request, seconds(coming))
            except RequestError as error:
                self.first_refusal = self.first_refusal or error
                self.source.ended(request.request_id, self.now_ns)

    def _take_step(self) -> bool:
        """One step of the core; whether it planned or learned anything."""
        events = self.core.step(seconds(self.now_ns))
        planned: StepPlanned | None = None
        ended: StepEnded | None = None
        steady = True
        for event in events:
            if isinstance(event, StepPlanned):
                planned = event
            elif isinstance(event, StepEnded):
                ended = event
            elif type(event) in _CHANGES:
                steady = False
        # A prompt chunk takes budget that is free again in the step after it.
        alike = planned is not None and planned.prefill_tokens == 0
        self._refused_for = planned.resource if planned is not None and steady and alike else None
        if ended is not None:
            self.now_ns = max(self.now_ns, nanoseconds(ended.now))
        self.steps += 1
        self._tell(events)
        return planned is not None or ended is not None

    def _await_copies(self) -> bool:
        """Nothing can be computed: the clock goes on to the next word of a copy, or to an arrival before it."""
        due = None if self.mover is None else self.mover.next_ns()
        if due is None or due <= self.now_ns:
            return False
        coming = self.source.next_ns()
        self.now_ns = due if coming is None else min(due, max(coming, self.now_ns))
        return True

    def _take_leap(self) -> bool:
        scheduler = self.core.scheduler
        steps = min(quiet_steps(scheduler, self._refused_for), _MOST_STEPS)
        if not steps:
            return False
        rows = scheduler.running.live_rows()
        positions = scheduler.running.computed[rows]
        stop = self.executor.steps_before_a_stop(rows, positions) + 1
        steps = min(steps, stop)
        moments = self.executor.run_ns(positions, self.now_ns, steps)
        for coming in (self.source.next_ns(), None if self.mover is None else self.mover.next_ns()):
            if coming is not None:
                # A step that is planned at the moment of an arrival, or of word of a copy, plans with it.
                steps = min(steps, int(moments[:-1].searchsorted(coming)))
        if not steps:
            return False
        tokens = self.executor.tokens_between_stops(rows)
        last = self.executor.tokens_at(rows, positions + steps) if steps == stop else None
        before = scheduler.drain_events()
        run = advance(scheduler, tokens, moments[: steps + 1] / NANOSECONDS, self._refused_for, last)
        if run is None:
            self._tell(before)
            return False
        self.now_ns = self.executor.clock_ns = int(moments[run.steps])
        self.core.leapt(float(run.moments[-2]))
        self.leaps += 1
        if run.ended:
            self._refused_for = None
        self._tell([*before, run] if before else (run,))
        return True

    def _take_leap_ahead(self) -> bool:
        """The same with a plan in flight."""
        scheduler, flying = self.core.scheduler, self.core.flying
        if flying is None:
            return False
        steps = min(quiet_steps_ahead(scheduler, flying, self._refused_for), _MOST_STEPS)
        if not steps:
            return False
        positions = scheduler.running.computed[flying.rows]
        # The token of the plan in flight stands at these positions.
        steps = min(steps, self.executor.steps_before_a_stop(flying.rows, positions) + 1)
        if steps < 1:
            return False
        planned, done = self.executor.ahead_ns(positions, self.now_ns, steps)
        coming = self.source.next_ns()
        if coming is not None:
            planned = planned[: bisect_left(planned, coming)]
        if not planned:
            return False
        moments = [seconds(at) for at in planned], [seconds(at) for at in done]
        before = scheduler.drain_events()
        tokens = self.executor.tokens_between_stops(flying.rows)
        run = advance_ahead(scheduler, flying, tokens, moments, self._refused_for)
        if run is None:
            self._tell(before)
            return False
        self.executor.leapt_ahead(run.last, done[len(run.planned)])
        self.core.leapt_ahead(run.last)
        self.now_ns = done[len(run.planned) - 1]
        self.leaps += 1
        self._tell([*before, *run.events()])
        return True

    def _tell(self, happenings: Sequence[Happening]) -> None:
        for event in happenings:
            if isinstance(event, Finished):
                self.source.ended(event.record.request_id, self.now_ns)
            elif isinstance(event, DecodeRun):
                for end in event.ended:
                    self.source.ended(end.record.request_id, self.now_ns)
        for watcher in self.watchers:
            watcher.observe(happenings)
            watcher.at_rest(self.now_ns, self.core.scheduler)


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """What comes and goes in a simulation is freed by counting; to look for cycles among all kept blocks, again and
    again, costs a twentieth of it."""
    before = gc.get_threshold()
    if before[0]:  # 0: never
        gc.set_threshold(max(before[0], _YOUNG), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
