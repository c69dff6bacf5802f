"""Our record of one request: what is not a per-step column. See `RunningSet` for those.

While a sequence runs, the columns of its row are the truth; `outputs` is written back when it
leaves the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from octavo.memory.keys import Chain
from octavo.memory.values import Int32
from octavo.scheduling.refusal import Refusal
from octavo.scheduling.request import Request


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    sequence_id: int
    """Also its order of arrival."""
    request: Request
    arrival_s: float
    limit: int
    """Prompt and output tokens at most."""
    state: SequenceState = SequenceState.WAITING
    row: int = -1
    outputs: Int32 = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    ticket: int = 0
    """Stamp of its place in the waiting queue; older places of it are stale."""
    refusal: Refusal | None = None
    """How it was last refused for want of blocks, while that need not be weighed again."""
    passed: int = 0
    """How often a later sequence was admitted ahead of it."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    paused_at_s: float | None = None
    preempted_s: float = 0.0
    preemptions: int = 0
    recomputed_tokens: int = 0
    given_up_tokens: int = 0
    """Positions it had computed when it last gave way; 0 once it has resumed."""
    chain: Chain | None = None
    """Keys of its full blocks, where blocks are reused."""
    suspended: int | None = None
    """Ticket of its state, while that is kept as it was for it to resume."""
    restored_tokens: int = 0
    """Of suspended state that is on its way back to the device."""
    spared_tokens: int = 0
    """Positions it had before it gave way, and computes again if what it waits for does not come."""
    waits_since_s: float = 0.0
    """When it was last seated to wait for copies."""
    cached_tokens: dict[str, int] | None = None
    """Prompt tokens that its first admission found kept, by tier."""
    peak_blocks: list[int] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: lower priority value, then earlier arrival."""
        return self.request.priority, self.sequence_id

    @property
    def known_tokens(self) -> int:
        """Tokens it has while it is not running."""
        return self.request.prompt_tokens + len(self.outputs)

    def tokens(self) -> Int32:
        """All tokens it has while it is not running."""
        if not len(self.outputs):
            return self.request.prompt_token_ids
        return np.concatenate([self.request.prompt_token_ids, self.outputs])
