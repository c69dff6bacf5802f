"""What crosses the executor seam: `StepPlan` down, `StepResult` up, `Executor` between them.

A plan is columnar: one entry per scheduled sequence ("chunk"), in the order in which the rows
are packed. Only what changed is in it: an executor keeps its own block tables and sampling state
per row and applies `admissions`, then `new_blocks`, then `copies_before`, runs the chunks, and then `copies_after`.
A block of a window or chunk group that no query of the plan can read may have left its sequence: its table entry
is never read again.

A row is a seat of the running set. A row named in `admissions` starts anew: whatever the
executor kept for it belongs to a sequence that has left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from octavo.memory.values import BlockCopies, Int32, Int64, NewBlocks
from octavo.scheduling.request import Request

Bool = npt.NDArray[np.bool_]

__all__ = [
    "NO_TOKEN",
    "PENDING",
    "Admission",
    "BlockCopies",
    "Executor",
    "NewBlocks",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
]

PENDING = -1
"""In `StepPlan.token_ids`: the token that this row sampled last, which only the executor knows yet."""
NO_TOKEN = -1
"""In `StepResult.tokens`: this chunk sampled nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A sequence takes a row. `outputs` are the tokens it had generated before it was preempted.

    Its first `computed` positions are in its blocks already, once `copies_before` are made.
    """

    row: int
    sequence_id: int
    request: Request
    outputs: Int32
    computed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One forward pass over a ragged batch of chunks.

    Chunk i computes positions `starts[i] .. starts[i] + counts[i] - 1` of the sequence in
    `rows[i]`; its token ids are the next `counts[i]` entries of `token_ids`. Where `samples[i]`,
    its last position yields the sequence's next token.
    """

    number: int
    planned_s: float
    sequence_ids: Int64
    rows: Int64
    starts: Int32
    counts: Int32
    samples: Bool
    token_ids: Int32
    admissions: tuple[Admission, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    copies_before: tuple[BlockCopies, ...] = ()
    """Blocks copied before anything is computed, once `new_blocks` are in place: a state to go on from."""
    copies_after: tuple[BlockCopies, ...] = ()
    """Blocks copied once the step is computed: a state as it stands at the end of a chunk, to be kept."""

    @property
    def chunks(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    def decisions(self) -> dict[str, Any]:
        """Everything decided, as plain values: two plans are the same when these are equal."""
        return {
            "number": self.number,
            "sequence_ids": self.sequence_ids.tolist(),
            "rows": self.rows.tolist(),
            "starts": self.starts.tolist(),
            "counts": self.counts.tolist(),
            "samples": self.samples.tolist(),
            "token_ids": self.token_ids.tolist(),
            "admissions": [
                (a.row, a.sequence_id, a.request.request_id, a.outputs.tolist(), a.computed) for a in self.admissions
            ],
            "new_blocks": [(b.group, b.rows.tolist(), b.indices.tolist(), b.slots.tolist()) for b in self.new_blocks],
            "copies_before": [(c.group, c.sources.tolist(), c.targets.tolist()) for c in self.copies_before],
            "copies_after": [(c.group, c.sources.tolist(), c.targets.tolist()) for c in self.copies_after],
        }


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one chosen token and of the likeliest ones, before any sampling rule.

    `top` is sorted from the likeliest down; `rank` of the chosen token counts from 1.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What one plan came to. Arrays follow the plan's chunks.

    `failures` names chunks that could not be computed (index, reason): those sequences end with
    an error and no other is touched. `finished_s` is on the time line of `StepPlan.planned_s`.
    """

    number: int
    tokens: Int32
    finished_s: float
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failures: tuple[tuple[int, str], ...] = ()


class Executor(Protocol):
    """Acts on plans, strictly in order. At most `depth + 1` plans are submitted and not collected.

    `submit` must not keep references to arrays that it changes. `collect` returns the result of
    the oldest plan not yet collected, waiting for it if need be. Neither raises for what one
    sequence did wrong (see `StepResult.failures`); an exception means that the executor is gone.
    """

    def submit(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...

    def close(self) -> None: ...
