"""One answer: a conversation through the engine, its text as it comes, and what it cost.

Owns the loop over the engine's steps and the way out of it: Ctrl-C is looked at between two steps, so
that no step is left half-done, and what was said until then is kept.

Invariant: when `answer` returns or raises, no sequence of it is in the engine.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.cli.chat_sampling import DEFAULT_MAX_TOKENS
from octavo.cli.writing import ttft_s
from octavo.engine.engine import Engine
from octavo.engine.outputs import Delta
from octavo.errors import EngineDeadError, RequestError
from octavo.memory.inspect import table_lines
from octavo.scheduling.events import Event, FinishReason, RequestRecord, StepPlanned
from octavo.scheduling.request import SamplingParams

INTERRUPTED = 130
_NAME = "chat"


@dataclass(slots=True)
class Answer:
    text: str = ""
    prompt_tokens: int = 0
    reason: FinishReason | None = None
    stopped: bool = False
    """By Ctrl-C."""
    record: RequestRecord | None = None
    table: list[str] = field(default_factory=list)
    """Where its blocks were when it was last seen alive."""
    least_free: int = 0


class Answering:
    """Answers one conversation at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        scheduler = engine.core.scheduler
        self._cache = scheduler.cache
        self.context = min(scheduler.limits.max_model_len, self._cache.max_tokens_per_sequence() + 1)
        """Tokens of a conversation at most, its answer included."""
        reasons = dict(engine.deployment.reasons) if engine.deployment is not None else {}
        self._why = f" ({reasons['max_model_len']})" if "max_model_len" in reasons else ""
        groups = self._cache.layout.groups
        self.blocks_per_slab = groups[0].blocks_per_slab if len(groups) == 1 else 1
        self.block_word = "blocks" if len(groups) == 1 else "slabs"
        self.slabs = self._cache.pool.slabs

    def tokens_of(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Raises `RequestError` for what the model's template or the text's encoding refuses."""
        for message in messages:
            try:
                message["content"].encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    "message", message["content"], f"is not valid Unicode ({error.reason}); send well-formed text"
                ) from None
        tokens: list[int] = self.engine.intake.encode_chat(messages)
        return tokens

    def answer(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams, write: Callable[[str], None]
    ) -> Answer:
        """Raises `RequestError` when it cannot be served, `EngineDeadError` when the engine fails on it."""
        tokens = self.tokens_of(messages)
        room = self.context - len(tokens)
        if room < 1:
            raise RequestError(
                "message", f"{len(tokens):,} tokens with all before it",
                f"no longer fits: a conversation has at most {self.context:,} tokens{self._why}; "
                "/undo takes back the last exchange, /clear begins anew",
            )  # fmt: skip
        wanted = DEFAULT_MAX_TOKENS if params.max_tokens is None else params.max_tokens
        limit = min(max(wanted, params.min_tokens), room)
        params = replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))
        answer = Answer(prompt_tokens=len(tokens), least_free=self.slabs)

        def watch(events: list[Event]) -> None:
            answer.least_free = min([answer.least_free, *(e.free_slabs for e in events if isinstance(e, StepPlanned))])

        self.engine.observers.append(watch)
        try:
            with closing(self._deltas(tokens, params, answer)) as deltas:
                for delta in deltas:
                    self._take(answer, delta)
                    if delta.text:
                        write(delta.text)
        finally:
            self.engine.observers.remove(watch)
        return answer

    def _deltas(self, tokens: list[int], params: SamplingParams, answer: Answer) -> Generator[Delta]:
        """Until it ends by itself or is stopped, which ends it in the engine too."""
        self.engine.add(_NAME, {"prompt_token_ids": tokens}, params)
        try:
            with stoppable() as stopped:
                while self.engine.has_work:
                    batch = self.engine.step()
                    yield from batch.deltas
                    if batch.finished:
                        return
                    if stopped():
                        answer.stopped = True
                        self.engine.abort(_NAME)
        finally:
            self.engine.discard(_NAME)

    def _take(self, answer: Answer, delta: Delta) -> None:
        answer.text += delta.text
        if delta.finish_reason is None:
            running = self.engine.core.scheduler.running
            rows = {int(row): "A" for row in running.order}
            answer.table = table_lines(self._cache, rows) or answer.table  # with its last token it has gone
            return
        answer.reason, answer.record = delta.finish_reason, delta.record
        if delta.error is not None:
            raise EngineDeadError(f"the engine failed: {delta.error}") from self.engine.cause

    def used(self, least_free: int) -> str:
        """Blocks in use out of all, at the fewest free slabs."""
        used, slabs = self.slabs - least_free, self.slabs
        return f"{used * self.blocks_per_slab:,}/{slabs * self.blocks_per_slab:,} {self.block_word}"

    def cost(self, answer: Answer) -> str:
        """One line: tokens, pace, TTFT, KV use, context."""
        record = answer.record
        if record is None:
            return ""
        first = ttft_s(record)
        ended = {"length": " (cut)", "abort": " (stopped)"}.get(str(answer.reason), "")
        parts = [
            f"{record.output_tokens:,} tokens{ended}",
            pace(record),
            f"TTFT {'none' if first is None else seconds(first)}",
            f"KV {self.used(answer.least_free)}",
            f"context {record.input_tokens + record.output_tokens:,}/{self.context:,}",
            *([f"{record.preemptions} preemptions"] if record.preemptions else []),
        ]
        return ", ".join(parts)


def pace(record: RequestRecord) -> str:
    """Tokens a second once the first is there; of a single token, its share of the whole time."""
    count, time_s = record.output_tokens - 1, record.decode_time
    if count < 1:
        count, time_s = record.output_tokens, record.prefill_time + record.decode_time
    return f"{count / time_s:.1f} tokens/s" if time_s > 0 else "0 tokens/s"


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted; a second one, by who does not want to wait for the step to end, ends the process."""
    pressed = False

    def press(*_: Any) -> None:
        nonlocal pressed
        if pressed:
            os._exit(INTERRUPTED)
        pressed = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
