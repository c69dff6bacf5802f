"""What a sequence leaves for others while it runs: blocks that become findable, copies of its constant state.

Owns no state: functions of the scheduler, as `growth` and `entry` are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.memory.sharing import Sharing
from octavo.memory.values import BlockCopies, Int64

if TYPE_CHECKING:
    from octavo.scheduling.scheduler import Scheduler
    from octavo.scheduling.sequence import Sequence


def key_filled(scheduler: Scheduler, sharing: Sharing, rows: Int64, ends: Int64) -> None:
    """Blocks that these rows have filled become findable."""
    size = sharing.directory.space.block_tokens
    for index in (ends // size > sharing.completed[rows]).nonzero()[0].tolist():
        row, full = int(rows[index]), int(ends[index]) // size
        chain, first = scheduler.running.sequence(row).chain, int(sharing.completed[row])
        assert chain is not None
        tokens = scheduler.running.tokens_between(row, first * size, full * size)
        chain.extend(tokens, first)
        sharing.key(row, scheduler.cache.tables, chain.keys[first:full], tokens)


def copies_after(scheduler: Scheduler, number: int, rows: Int64, ends: Int64) -> tuple[BlockCopies, ...]:
    """Constant state to be kept as it stands when the plan has been computed."""
    sharing = scheduler.cache.sharing
    assert sharing is not None
    size = sharing.directory.space.block_tokens
    copies: list[BlockCopies] = []
    for index in np.flatnonzero(ends % size == 0).tolist():
        row, end = int(rows[index]), int(ends[index])
        if scheduler.policies.reuse.snapshot(end, int(scheduler.running.prompt[row]), size):
            copies.extend(scheduler.snapshots.take(number, row, end // size))
    return tuple(copies)


def cut(scheduler: Scheduler, sequence: Sequence) -> int:
    """Where a chunk of its prompt ends so that its constant state can be copied; 0: nowhere in particular."""
    sharing = scheduler.cache.sharing
    if not scheduler.snapshots.needed or sharing is None:
        return 0
    return scheduler.policies.reuse.cut(sequence.request.prompt_tokens, sharing.directory.space.block_tokens)
