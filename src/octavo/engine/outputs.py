"""What a caller gets back. Names and meanings follow vLLM where it has them."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.scheduling.events import FinishReason, RequestRecord
from octavo.scheduling.plan import TokenLogprobs


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    """None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for the model's own end of sequence."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    record: RequestRecord | None = None
    """What it cost; there once it has ended."""
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All choices of one prompt so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one choice: the unit of streaming."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    record: RequestRecord | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What folding one step's events came to."""

    deltas: tuple[Delta, ...] = ()
    stopped: tuple[int, ...] = ()
    """Sequences that met a stop string: the core must end them."""
    finished: tuple[str, ...] = field(default=())
    """Requests whose last choice has ended."""
