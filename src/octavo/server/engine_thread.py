"""The core in a thread of its own. The only place where octavo starts one for the engine.

    any thread --post--> inbox --> [engine thread: submit, abort, step] --deliver--> one call a step

Commands and replies are values; the core is touched by the engine thread alone. `deliver` is
called in the engine thread and must return at once. A request has arrived when it is posted, whatever
step the engine is in. Another thread may read the core's state while it holds `core.guard`.

Invariant: every command but `End` gets exactly one reply, also when the engine dies or is shut down.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.engine.engine import submit_all
from octavo.engine.intake import Prepared
from octavo.errors import EngineDeadError, OctavoError, RequestError
from octavo.memory.values import Int32
from octavo.observe.recorder import FlightRecorder
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Event, FinishReason
from octavo.server.host import Host

SWITCH_INTERVAL_S = 1e-3
"""A busy Python thread elsewhere must not hold the interpreter for long while a step is being planned."""

Answered = Sequence[int]
"""The sequence ids of a `Submit`; the blocks of each group that a `Reset` freed."""
Reply = Callable[[Answered | OctavoError], None]


@dataclass(frozen=True, slots=True)
class LivePin:
    name: str
    tokens: int
    expires_in: float
    """Seconds."""


PinReply = Callable[[list[LivePin] | OctavoError], None]
"""Called in the engine thread with the pins asked about, or with why not."""


@dataclass(frozen=True, slots=True)
class Submit:
    prepared: Prepared
    reply: Reply
    """Called in the engine thread with the sequence ids, or with why not."""
    arrived_s: float | None = None
    """When it reached whoever posts it, on the engine's clock; unset: when it is posted."""


@dataclass(frozen=True, slots=True)
class End:
    sequence_ids: tuple[int, ...]
    reason: FinishReason = "abort"


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget what is kept for reuse."""

    reply: Reply
    """Called in the engine thread with the blocks of each group that it freed, or with why not."""


@dataclass(frozen=True, slots=True)
class PinPrefix:
    """What is kept of this text goes last."""

    token_ids: Int32
    salt: str
    ttl_s: float
    reply: PinReply


@dataclass(frozen=True, slots=True)
class UnpinPrefix:
    name: str
    owner: str
    """Pins whose salt begins with it are the asker's; others there are not, for the asker."""
    reply: PinReply
    """Called with the pin that has ended, or with nothing."""


@dataclass(frozen=True, slots=True)
class ListPins:
    owner: str
    reply: PinReply


PinCommand = PinPrefix | UnpinPrefix | ListPins
Command = Submit | End | Reset | PinCommand


class EngineThread:
    def __init__(
        self,
        core: EngineCore,
        deliver: Callable[[list[Event]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        recorder: FlightRecorder | None = None,
        host: Host | None = None,
    ) -> None:
        core.guard = threading.Lock()
        core.timer = time.perf_counter
        self._core = core
        self._recorder = recorder or FlightRecorder()
        self._deliver = deliver
        self._clock = clock
        self._inbox: deque[tuple[Command, float]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._draining = False
        self.dead: EngineDeadError | None = None
        """Set once the engine serves no more."""
        self._host = host or Host()
        """Ideally the thread in which the model was loaded."""

    def start(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._host.finish(self._run)

    @property
    def alive(self) -> bool:
        return self._host.alive and self.dead is None

    def post(self, command: Command) -> None:
        """Hand a command over; returns at once. Raises `EngineDeadError` when nobody would read it."""
        with self._changed:
            if self._closing or self.dead is not None:
                raise self.dead or EngineDeadError("the engine is shutting down")
            arrived_s = command.arrived_s if isinstance(command, Submit) else None
            self._inbox.append((command, self._clock() if arrived_s is None else arrived_s))
            self._changed.notify()

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> bool:
        """Stop the thread: after what is running when `drain`, else at once. False when it did not in time."""
        with self._changed:
            self._closing, self._draining = True, drain
            self._changed.notify()
        self._host.join(timeout_s)
        return not self._host.alive

    # -- the engine thread --------------------------------------------------------------------

    def _run(self) -> None:
        reason, pending = "the engine was shut down", list[Event]()
        try:
            while self._wait_for_work():
                self._obey()
                self._hand_over(self._core.step(self._clock()))
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may be left waiting
            reason = f"the engine has failed: {type(error).__name__}: {error}"
            pending = self._core.scheduler.drain_events()
            self._recorder.dump(self._core, error, pending)
        self._end(reason, pending)

    def _wait_for_work(self) -> bool:
        """False when it is time to stop."""
        with self._changed:
            while not self._inbox and not self._core.has_work and not self._closing:
                self._changed.wait()
            return not self._closing or (self._draining and (bool(self._inbox) or self._core.has_work))

    def _obey(self) -> None:
        while self._inbox:
            command, arrived_s = self._inbox.popleft()
            if isinstance(command, Submit):
                self._submit(command, arrived_s)
            elif isinstance(command, Reset):
                command.reply(self._core.reset_kept(self._clock()))
            elif isinstance(command, PinCommand):
                self._pins(command, self._clock())
            else:
                for sequence_id in command.sequence_ids:
                    self._core.abort(sequence_id, self._clock(), command.reason)

    def _submit(self, command: Submit, arrived_s: float) -> None:
        try:
            accepted = submit_all(self._core, command.prepared, arrived_s)
        except RequestError as error:
            # Told before the answer, not after the next step: whoever reads the answer finds it counted.
            self._hand_over(self._core.scheduler.drain_events())
            command.reply(error)
        else:
            command.reply(accepted)

    def _pins(self, command: PinCommand, now: float) -> None:
        try:
            if isinstance(command, PinPrefix):
                found = [self._core.pin(command.token_ids, command.salt, now, command.ttl_s)]
            else:
                found = [pin for pin in self._core.live_pins(now) if pin.salt.startswith(command.owner)]
            if isinstance(command, UnpinPrefix):
                found = [pin for pin in found if pin.name == command.name and self._core.unpin(pin.name)]
        except RequestError as error:
            command.reply(error)
        else:
            command.reply([LivePin(pin.name, pin.tokens, pin.until_s - now) for pin in found])

    def _hand_over(self, events: list[Event]) -> None:
        self._recorder.observe(events)
        self._deliver(events)

    def _end(self, reason: str, pending: list[Event]) -> None:
        """Last words, after the `pending` events: every open sequence ends with an error, every command in
        the inbox is answered."""
        with self._changed:
            self.dead = EngineDeadError(reason)
            left = [command for command, _ in self._inbox]
            self._inbox.clear()
        for command in left:
            if not isinstance(command, End):
                command.reply(self.dead)
        self._hand_over(pending + self._core.fail(reason, self._clock()))
        self._core.close()
