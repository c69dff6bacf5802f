"""What happened, as values. Metrics, traces, the front end and tests are folds over this stream.

`StepTokens` is columnar: one event a step, whatever the number of running sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from octavo.memory.transfers import Route, Status
from octavo.memory.values import Int32, Int64
from octavo.scheduling.plan import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]
Resource = Literal["none", "kv_blocks", "token_budget", "sequence_limit", "compute"]
"""What bound a step: `compute` when nothing waits, `none` when work waits and nothing bound it."""
RefusalReason = Literal["never_fits", "queue_full", "invalid"]
"""Larger than the whole pool; too many wait already; wrong in itself (a field, a type, past the context)."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What one request cost; the names are those of responses, logs and benchmark rows. Times in seconds."""

    request_id: str
    choice: int
    input_tokens: int
    cached_tokens: dict[str, int]
    """Prompt tokens not recomputed, by tier."""
    output_tokens: int
    allocated_blocks: dict[str, int]
    """Peak, by group."""
    attention_mode: str
    cache_dtype: str
    queue_time: float
    """Arrival to first scheduling."""
    prefill_time: float
    """First scheduling to first token."""
    decode_time: float
    """First token to the end."""
    preempted_time: float
    preemptions: int
    arrival_s: float
    first_token_s: float | None
    finished_s: float
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Submitted:
    now: float
    sequence_id: int
    request_id: str
    input_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was turned away. The core emits it for what it refuses, a front end for what never reached the core."""

    now: float
    request_id: str
    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class Admitted:
    now: float
    sequence_id: int
    row: int
    resumed: bool
    cached_tokens: int = 0
    """Positions that it does not compute because their state was kept."""
    looked_up_tokens: int = 0
    """Positions that were looked up among what is kept: all but the last, whose logits it needs. 0 without reuse."""
    known_tokens: int = 0
    """Of those, positions whose text was known, whether or not its state could be used."""
    unused_tokens: int = 0
    """Of those, positions whose state was found, and left alone because there was no room to copy from it."""
    recomputed_tokens: int = 0
    """Of a resumed one: positions that it gave up and now has to compute again."""
    cached_by_tier: tuple[tuple[str, int], ...] = ()
    """`cached_tokens` by the lowest tier that any of their state comes from."""
    restored_tokens: int = 0
    """Of a resumed one: positions whose state was suspended, and is its own again."""


@dataclass(frozen=True, slots=True)
class Preempted:
    now: float
    sequence_id: int
    action: Literal["recompute", "offload"]
    computed_tokens: int
    """Positions whose state is given up; what is not found again when it resumes will be computed again."""
    blocks: int


@dataclass(frozen=True, slots=True)
class Transferred:
    """Copies between two tiers have ended."""

    now: float
    route: Route
    group: int
    blocks: int
    """Those that arrived whole."""
    bytes: int
    seconds: float
    """From the start of the copy."""
    status: Status
    reasons: tuple[str, ...] = ()
    """Why others did not, one for each."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """All that a sequence waited for is on the device: it computes from the next step on."""

    now: float
    sequence_id: int
    waited_s: float
    """Since it was seated."""


@dataclass(frozen=True, slots=True)
class Restarted:
    """State that a sequence waited for did not come: it goes back to the queue, and starts without it."""

    now: float
    sequence_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepPlanned:
    now: float
    number: int
    running: int
    waiting: int
    decode_tokens: int
    prefill_tokens: int
    free_slabs: int
    resource: Resource


@dataclass(frozen=True, slots=True, eq=False)
class StepTokens:
    """The tokens of one step: `tokens[i]` is the next token of `sequence_ids[i]`."""

    now: float
    number: int
    sequence_ids: Int64
    tokens: Int32
    rows: Int64
    """Seat of each sequence, as in its last `Admitted`."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By sequence id."""

    def pairs(self) -> list[tuple[int, int]]:
        """(sequence id, token id), the form handed to a front end."""
        return list(zip(self.sequence_ids.tolist(), self.tokens.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A plan has been learned of; every plan gets one, whether it yielded tokens or not.

    The parts are seconds of the thread that drives the core, all for this plan: deciding it, in the
    executor (submitting and collecting), learning of it. None where the core has no timer.
    """

    now: float
    """When the executor finished, on the time line of `planned_s`."""
    number: int
    planned_s: float
    schedule_s: float | None = None
    execute_s: float | None = None
    commit_s: float | None = None
    evicted_blocks: int = 0
    """Kept blocks given up on the device since the last such event."""
    evicted_below: tuple[int, int] = (0, 0)
    """The same of the host and the disk."""


@dataclass(frozen=True, slots=True)
class Finished:
    now: float
    sequence_id: int
    reason: FinishReason
    stop_token_id: int | None
    """The token that ended it, for reason `stop`."""
    record: RequestRecord
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CacheReset:
    """Nothing that was computed before is found again."""

    now: float
    evicted_blocks: int
    """Kept blocks given up by it, and before it since the last `StepEnded`."""


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The last event of an engine. Whatever has not ended by now ends with `error`."""

    now: float
    error: str


Event = (
    Submitted | Refused | Admitted | Preempted | Transferred | Arrived | Restarted | StepPlanned | StepTokens
    | StepEnded | Finished | CacheReset | EngineFailed
)  # fmt: skip
