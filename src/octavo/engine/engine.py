"""`Engine`: the core, a tokenizer and open requests, driven by the caller. No thread of its own.

    add ----> Intake ----> EngineCore.submit
    step ---> EngineCore.step ----> Streams.fold ----> deltas        (stop strings end sequences)

`LLM` loops over `step`; `AsyncLLM` runs the same core in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo.deployment import Deployment
from octavo.engine.intake import Intake, Prepared, Prompt
from octavo.engine.outputs import Batch, RequestOutput
from octavo.engine.streams import Streams
from octavo.errors import EngineDeadError, RequestError
from octavo.memory.pins import Pin
from octavo.observe.recorder import FlightRecorder
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Event
from octavo.scheduling.request import SamplingParams

MOST_SECONDS = 1e9
"""Some thirty years."""
Observer = Callable[[list[Event]], None]


class Engine:
    """See the module docstring. `clock` gives seconds on the executor's time line."""

    def __init__(
        self,
        core: EngineCore,
        intake: Intake,
        deployment: Deployment | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.intake = intake
        self.deployment = deployment
        self.observers: list[Observer] = []
        """Called with the events of every step, in order."""
        self.recorder = FlightRecorder()
        """What is written down when the engine fails."""
        self.model_name = ""
        self.notes: tuple[str, ...] = ()
        """What loading found worth saying."""
        self.dead: str | None = None
        """Why the engine has ended, once it has."""
        self.cause: Exception | None = None
        self._streams = Streams(intake.tokenizer)
        self._clock = clock
        core.timer = time.perf_counter

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        followed: bool = True,
    ) -> Prepared:
        """Queue a prompt. Raises `RequestError`, having changed nothing, when it cannot be served.

        Where it is not `followed`, steps need not tell what they add to it: its `output` is asked for at the end.
        """
        self._require_alive()
        if request_id in self._streams:
            raise RequestError("request_id", request_id, "is in use; give every open request its own")
        prepared = self.intake.prepare(request_id, prompt, params, priority=priority)
        self._streams.open(prepared, submit_all(self.core, prepared, self._clock()), followed=followed)
        return prepared

    def abort(self, request_id: str) -> bool:
        """End a request; its choices finish with reason `abort`. False when it is not open."""
        sequence_ids = self._streams.sequence_ids(request_id)
        for sequence_id in sequence_ids:
            self.core.abort(sequence_id, self._clock())
        return bool(sequence_ids)

    def reset_kept(self) -> list[int]:
        """Nothing computed so far is found again; returns how many blocks of each group that freed at once."""
        self._require_alive()
        return self.core.reset_kept(self._clock())

    def pin(self, prompt: Prompt, ttl_s: float) -> Pin:
        """What is kept of this prompt is given up last, for `ttl_s` seconds. Raises `RequestError`."""
        self._require_alive()
        token_ids, salt = self.intake.text_of(prompt)
        return self.core.pin(token_ids, salt, self._clock(), seconds_of("ttl", ttl_s))

    def unpin(self, name: str) -> bool:
        """False when there is no such pin, or no longer."""
        self._require_alive()
        self.core.live_pins(self._clock())  # ends those whose time is over
        return self.core.unpin(name)

    @property
    def has_work(self) -> bool:
        return self.core.has_work or bool(self._streams.request_ids())

    def step(self) -> Batch:
        """Run one step; returns what it added to each open request.

        When the executor fails, every open request ends with that error and `EngineDeadError`
        follows on the next call.
        """
        self._require_alive()
        try:
            events = self.core.step(self._clock())
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may be left waiting
            self.dead, self.cause = f"{type(error).__name__}: {error}", error
            events = self.core.scheduler.drain_events()
            self.recorder.dump(self.core, error, events)
            events += self.core.fail(self.dead, self._clock())
        batch = self._observe(events)
        for sequence_id in batch.stopped:
            self.core.abort(sequence_id, self._clock(), "stop")
        if batch.stopped:
            ended = self._observe(self.core.scheduler.drain_events())
            batch = Batch(batch.deltas + ended.deltas, (), batch.finished + ended.finished)
        return batch

    def take(self, request_id: str) -> RequestOutput:
        """The last output of a finished request, which is then forgotten."""
        return self._streams.close(request_id)

    def output(self, request_id: str) -> RequestOutput:
        """What an open request has so far. Of one that has finished, another thread may ask beside a step."""
        return self._streams.output(request_id)

    def discard(self, request_id: str) -> None:
        """End a request if it is open, and forget it: nobody waits for it any more."""
        if request_id in self._streams:
            self.abort(request_id)
            self._streams.forget(request_id)

    def close(self) -> None:
        self.core.close()

    def _observe(self, events: list[Event]) -> Batch:
        self.recorder.observe(events)
        for observer in self.observers:
            observer(events)
        return self._streams.fold(events)

    def _require_alive(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(f"the engine has failed and serves no more requests: {self.dead}") from self.cause


def seconds_of(field: str, given: object) -> float:
    """A positive number of seconds. Raises `RequestError`."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < MOST_SECONDS:
        raise RequestError(field, given, f"must be a number of seconds, above 0 and below {MOST_SECONDS:.0e}")
    return float(given)


def submit_all(core: EngineCore, prepared: Prepared, now: float) -> list[int]:
    """Submit every choice of a prompt, or none of them."""
    sequence_ids: list[int] = []
    try:
        for request in prepared.requests:
            sequence_ids.append(core.submit(request, now))  # noqa: PERF401 - needed when a later one is refused
    except RequestError:
        for sequence_id in sequence_ids:
            core.abort(sequence_id, now)
        raise
    return sequence_ids
