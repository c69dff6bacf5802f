"""The fold from events to what callers see: text, stop strings, choices, final outputs.

One `Streams` holds the open requests of one front end. It runs no model and knows no thread: feed
it every event of the core in order, and tell the core to end the sequences it names as stopped.

Where nobody follows a request step by step and no stop string can end it, its tokens are only kept, and decoded
when `output` is asked for; of a request that has finished, any one thread may ask.

Invariant: a request that was opened ends in exactly one finished output for each choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.intake import Prepared
from octavo.engine.outputs import Batch, CompletionOutput, Delta, RequestOutput
from octavo.engine.text import TextStream
from octavo.scheduling.events import EngineFailed, Event, Finished, FinishReason, RequestRecord, StepTokens
from octavo.scheduling.plan import TokenLogprobs


@dataclass(slots=True, eq=False)
class _Choice:
    request_id: str
    index: int
    text: TextStream | None
    wants_logprobs: bool
    later: bool
    """Whether nobody needs its text before its output is asked for."""
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stopped_by: str | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    record: RequestRecord | None = None
    error: str | None = None
    held: bool = False
    """Ended, and what its text still holds back is not among the parts yet."""

    def decode(self) -> None:
        """Text of the tokens that have none yet."""
        if self.text is None or not self.later:
            return
        self.parts.append(self.text.push(self.token_ids[self.text.tokens :]).text)
        if self.held:
            self.held = False
            self.parts.append(self.text.finish())

    def output(self) -> CompletionOutput:
        self.decode()
        logprobs = tuple(self.logprobs) if self.wants_logprobs else None
        return CompletionOutput(
            index=self.index,
            text="".join(self.parts),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=sum(item.logprob for item in logprobs) if logprobs is not None else None,
            record=self.record,
            error=self.error,
        )


@dataclass(slots=True, eq=False)
class _Open:
    prepared: Prepared
    choices: list[_Choice]


class Streams:
    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _Open] = {}
        self._choices: dict[int, _Choice] = {}
        self._sequence_ids: dict[str, list[int]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def open(self, prepared: Prepared, sequence_ids: Sequence[int], *, followed: bool = True) -> None:
        """The core took the request: `sequence_ids` are those of its choices, in order.

        Where it is not `followed` step by step, no deltas of its tokens need be made.
        """
        params = prepared.params
        later = not followed and not params.stop
        choices = []
        for request, sequence_id in zip(prepared.requests, sequence_ids, strict=True):
            text = None
            if self._tokenizer is not None and params.detokenize:
                text = TextStream(self._tokenizer, request)
            choice = _Choice(prepared.request_id, request.choice, text, params.logprobs is not None, later)
            choices.append(choice)
            self._choices[sequence_id] = choice
        self._requests[prepared.request_id] = _Open(prepared, choices)
        self._sequence_ids[prepared.request_id] = list(sequence_ids)

    def sequence_ids(self, request_id: str) -> tuple[int, ...]:
        """The core's ids of a request's choices; empty when it is not open."""
        return tuple(self._sequence_ids.get(request_id, ()))

    def request_ids(self) -> tuple[str, ...]:
        return tuple(self._requests)

    def fold(self, events: Iterable[Event]) -> Batch:
        """Take events in; what each open request got from them comes out."""
        deltas: list[Delta] = []
        stopped: list[int] = []
        finished: list[str] = []
        for event in events:
            if isinstance(event, StepTokens):
                self._fold_tokens(event, deltas, stopped)
            elif isinstance(event, Finished):
                self._fold_end(event, deltas, finished)
            elif isinstance(event, EngineFailed):
                self._fold_failure(event, deltas, finished)
        return Batch(tuple(deltas), tuple(stopped), tuple(finished))

    def output(self, request_id: str) -> RequestOutput:
        """Everything the request has so far."""
        opened = self._requests[request_id]
        prepared = opened.prepared
        outputs = tuple(choice.output() for choice in opened.choices)
        return RequestOutput(request_id, prepared.prompt, prepared.prompt_token_ids, outputs)

    def close(self, request_id: str) -> RequestOutput:
        """Forget a request; returns its last output."""
        output = self.output(request_id)
        self.forget(request_id)
        return output

    def forget(self, request_id: str) -> None:
        """The same where nobody wants its output."""
        del self._requests[request_id]
        for sequence_id in self._sequence_ids.pop(request_id):
            self._choices.pop(sequence_id, None)

    def _fold_tokens(self, event: StepTokens, deltas: list[Delta], stopped: list[int]) -> None:
        for sequence_id, token in event.pairs():
            choice = self._choices.get(sequence_id)
            if choice is None or choice.stopped_by is not None:
                continue
            choice.token_ids.append(token)
            logprobs: tuple[TokenLogprobs, ...] = ()
            if sequence_id in event.logprobs:
                logprobs = (event.logprobs[sequence_id],)
                choice.logprobs.extend(logprobs)
            if choice.later:
                continue
            text = ""
            if choice.text is not None:
                pushed = choice.text.push([token])
                text = pushed.text
                if pushed.stopped is not None:
                    choice.stopped_by = pushed.stopped
                    stopped.append(sequence_id)
            if text:
                choice.parts.append(text)
            deltas.append(Delta(choice.request_id, choice.index, text, (token,), logprobs))

    def _fold_end(self, event: Finished, deltas: list[Delta], finished: list[str]) -> None:
        choice = self._choices.pop(event.sequence_id, None)
        if choice is None:
            return
        text = ""
        if choice.later:
            choice.held = True
        elif choice.text is not None and choice.stopped_by is None:
            text = choice.text.finish()
            choice.parts.append(text)
            choice.stopped_by = choice.text.stopped
        choice.finish_reason = event.reason
        choice.record = event.record
        choice.error = event.error
        if choice.stopped_by is not None:
            choice.finish_reason, choice.stop_reason = "stop", choice.stopped_by
        else:
            opened = self._requests[choice.request_id]
            asked = opened.prepared.params.stop_token_ids
            choice.stop_reason = event.stop_token_id if event.stop_token_id in asked else None
        deltas.append(
            Delta(
                choice.request_id,
                choice.index,
                text,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                record=event.record,
                error=event.error,
            )
        )
        if all(c.finish_reason is not None for c in self._requests[choice.request_id].choices):
            finished.append(choice.request_id)

    def _fold_failure(self, event: EngineFailed, deltas: list[Delta], finished: list[str]) -> None:
        """What the core could not end any more ends here."""
        for request_id, opened in self._requests.items():
            left = [choice for choice in opened.choices if choice.finish_reason is None]
            for choice in left:
                choice.finish_reason, choice.error = "error", event.error
                deltas.append(Delta(request_id, choice.index, "", finish_reason="error", error=event.error))
            if left:
                finished.append(request_id)
        self._choices.clear()
