"""One step's plan while it is being made: what running sequences get, who gives way, who enters."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.memory.values import BlockCopies, Int64, NewBlocks
from octavo.scheduling.events import Resource
from octavo.scheduling.plan import Admission


@dataclass(slots=True, eq=False)
class Draft:
    now: float
    rows: Int64
    """Running rows at the start of the step, in order of admission."""
    given: Int64
    """Positions for each of `rows`."""
    budget: int
    """Tokens of the step not yet given away."""
    new_blocks: list[NewBlocks] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    copies: list[tuple[int, BlockCopies]] = field(default_factory=list)
    """By row."""
    entered_rows: list[int] = field(default_factory=list)
    entered_counts: list[int] = field(default_factory=list)
    preempted: int = 0
    stalled: int = 0
    """Sequences that get nothing in this step because blocks are still draining."""
    bound_by: Resource | None = None

    def take_over(self, left: Draft) -> None:
        """What an earlier draft, of which no plan was made, still has to tell the executor."""
        self.new_blocks = left.new_blocks + self.new_blocks
        self.admissions = left.admissions + self.admissions
        self.copies = left.copies + self.copies

    def withdraw(self, row: int) -> list[BlockCopies]:
        """The row has left: nothing of it may reach the plan. Returns the copies that are not made after all."""
        withdrawn = [copies for owner, copies in self.copies if owner == row]
        self.given[self.rows == row] = 0
        self.admissions = [admission for admission in self.admissions if admission.row != row]
        self.copies = [copy for copy in self.copies if copy[0] != row]
        kept = []
        for blocks in self.new_blocks:
            keep = blocks.rows != row
            if keep.all():
                kept.append(blocks)
            elif keep.any():
                kept.append(NewBlocks(blocks.group, blocks.rows[keep], blocks.indices[keep], blocks.slots[keep]))
        self.new_blocks = kept
        return withdrawn

    def chunks(self) -> tuple[Int64, Int64]:
        """Rows and counts of the plan: the running ones that got something, then who entered."""
        going = self.given.nonzero()[0]
        rows, counts = self.rows[going], self.given[going]
        if not self.entered_rows:
            return rows, counts
        computing = [(row, count) for row, count in zip(self.entered_rows, self.entered_counts, strict=True) if count]
        entered = np.array(computing, dtype=np.int64).reshape(-1, 2)
        return np.concatenate((rows, entered[:, 0])), np.concatenate((counts, entered[:, 1]))

    def merged_blocks(self) -> tuple[NewBlocks, ...]:
        """One entry per group, in the order in which blocks were appended."""
        if len(self.new_blocks) <= 1:
            return tuple(self.new_blocks)
        merged = []
        for group in sorted({blocks.group for blocks in self.new_blocks}):
            parts = [blocks for blocks in self.new_blocks if blocks.group == group]
            merged.append(
                NewBlocks(
                    group,
                    np.concatenate([p.rows for p in parts]),
                    np.concatenate([p.indices for p in parts]),
                    np.concatenate([p.slots for p in parts]),
                )
            )
        return tuple(merged)
