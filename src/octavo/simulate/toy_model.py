"""A toy model whose attention state is real: what it answers depends on what it reads from the arena.

`ToyModel` is the arithmetic: the next token is a hash of what its last position reads under each law (`toy_laws`).
`ToyExecutor` gets the same figure the way a real one does, by writing an imprint of every position into the slots of
its block tables and reading them back. A slot that is lost, shared, given up or used too early changes a token, or is
caught as `InvariantViolation`: a slot that is handed out is filled with rubbish first. Owns no policy.

    token t at position p --> imprint(t, p) --> written to every cell of p in every group that has positions
                                            --> folded into the running state of every constant group
    next token            <-- hash(what the last position reads of each)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import InvariantViolation
from octavo.memory.layout import Layout
from octavo.memory.values import BlockCopies, Int32, NewBlocks
from octavo.scheduling.events import FinishReason
from octavo.scheduling.plan import NO_TOKEN, PENDING, StepPlan, StepResult
from octavo.scheduling.request import Request, SamplingParams
from octavo.simulate.toy_laws import (
    FULL,
    WORD,
    Law,
    UInt64,
    advanced,
    combined,
    imprints,
    law_of,
    laws_of,
    scrambled,
    toy_layout,
)

__all__ = [
    "STOP_ID",
    "VOCAB",
    "Answer",
    "ToyExecutor",
    "ToyModel",
    "identity_of",
    "imprints",
    "toy_layout",
    "toy_model",
    "toy_request",
]

VOCAB = 1000
STOP_ID = 0
RUBBISH = np.uint64(0xDEADBEEFDEADBEEF)


def toy_request(name: str, prompt: Sequence[int], max_tokens: int | None, **fields: Any) -> Request:
    """A greedy request that `STOP_ID` ends; `fields` are those of `Request`."""
    return Request(
        request_id=name,
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0).with_defaults({}),
        eos_token_ids=(STOP_ID,),
        **fields,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class ToyModel:
    """One token in `ends_every` is the stop token; one position in `fails_every` cannot be computed. 0: none."""

    ends_every: int = 0
    fails_every: int = 0
    laws: tuple[Law, ...] = (FULL,)
    """What a position reads: those of its layout, each once, in order."""

    def next_token(self, context: int) -> int:
        drawn = scrambled(context)
        if self.ends_every and drawn % self.ends_every == 0:
            return STOP_ID
        return 1 + (drawn >> 20) % (VOCAB - 1)

    def failing(self, identity: int, start: int, end: int) -> bool:
        """Whether one of the positions start .. end - 1 of this prompt's sequence cannot be computed."""
        if not self.fails_every:
            return False
        return any(scrambled(identity ^ (p * 0x9E37)) % self.fails_every == 0 for p in range(start, end))

    def answered(self, request: Request, limit: int, got: list[int], reason: str, *, kept: bool) -> bool:
        """Whether this is what the sequence gets alone, or, if it was aborted, a beginning of that.

        Where blocks are `kept`, a position that cannot be computed may have been found, and then fails nobody.
        """
        alone = self.answer(request, limit)
        if kept and alone.reason == "error":
            whole = replace(self, fails_every=0).answer(request, limit)
            if got == whole.tokens[: len(got)] and reason == "error":
                return True
            alone = whole
        if reason == "abort":
            return got == alone.tokens[: len(got)]
        return got == alone.tokens and reason == alone.reason

    def answer(self, request: Request, limit: int) -> Answer:
        """What a sequence of at most `limit` tokens gets when it is alone in the world."""
        prompt = request.prompt_token_ids
        identity = identity_of(prompt)
        tokens: list[int] = []
        room = limit - len(prompt)
        if room <= 0:
            return Answer(tokens, "length")
        if self.failing(identity, 0, len(prompt)):
            return Answer(tokens, "error")
        past = imprints(prompt, 0)
        while True:
            position = len(prompt) + len(tokens)
            tokens.append(self.next_token(combined([law.context(past) for law in self.laws])))
            if tokens[-1] in request.stop_ids:
                return Answer(tokens, "stop")
            if len(tokens) == room:
                return Answer(tokens, "length")
            if self.failing(identity, position, position + 1):
                return Answer(tokens, "error")
            past = np.append(past, imprints(np.array(tokens[-1:], dtype=np.int32), position))


def toy_model(layout: Layout, ends_every: int = 0, fails_every: int = 0) -> ToyModel:
    """The model whose state this layout keeps."""
    return ToyModel(ends_every, fails_every, laws_of(layout))


def identity_of(prompt: Int32) -> int:
    return int(imprints(prompt, 0).sum())


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What a chunk needs to run, as it stood when its plan was submitted."""

    request: Request
    tables: list[dict[int, int]]
    """By group: slots by block, of those that the chunk reads or writes."""


class ToyExecutor:
    """Runs plans when they are collected, so that every answer comes as late as the depth allows.

    Raises `InvariantViolation` when a plan breaks the seam's contract: `executor-tables` (blocks out of order or for
    a row that has left, a chunk beyond its blocks, or one that writes where another's state is) or `in-flight-slots`
    (a slot is handed out, or copied to, while a plan that touches it has not completed).
    """

    def __init__(self, model: ToyModel, layout: Layout, slabs: int, rows: int) -> None:
        self.model = model
        self.layout = layout
        self._laws = tuple(law_of(group) for group in layout.groups)
        _require("executor-tables", laws_of(layout) == model.laws, f"the model reads {model.laws}, not {self._laws}")
        self._unit_bytes = gcd(*(g.block_bytes // max(1, g.block_tokens) for g in layout.groups), layout.slab_bytes)
        self._arena = self.new_arena(slabs)
        self._touched_by = np.full(len(self._arena), -1, dtype=np.int64)
        self._tables: list[list[dict[int, int]]] = [[] for _ in range(rows)]
        self._requests: dict[int, Request] = {}
        self._writers: dict[tuple[int, int], int] = {}
        """Who may write a slot: the row that it was handed out to, by (group, slot)."""
        self._last_token = np.full(rows, NO_TOKEN, dtype=np.int32)
        self._plans: deque[tuple[StepPlan, list[_Chunk]]] = deque()
        self._completed = -1

    # -- the seam -----------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        self._apply(plan)
        for copies in (*plan.copies_before, *plan.copies_after):
            for target in copies.targets.tolist():
                self._require_idle(plan.number, copies.group, target)
        for copies in (*plan.copies_before, *plan.copies_after):
            for slot in (*copies.sources.tolist(), *copies.targets.tolist()):
                self._touched_by[self.cells(copies.group, slot)] = plan.number
        chunks = []
        for row, start, count in zip(plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
            chunks.append(self._prepared(plan.number, row, start, start + count))
        self._plans.append((plan, chunks))

    def collect(self) -> StepResult:
        plan, chunks = self._plans.popleft()
        tokens = np.full(plan.chunks, NO_TOKEN, dtype=np.int32)
        failures = []
        fed = np.split(plan.token_ids, np.cumsum(plan.counts)[:-1])
        self._copy(plan.copies_before)
        for i, chunk in enumerate(chunks):
            row, start = int(plan.rows[i]), int(plan.starts[i])
            end = start + int(plan.counts[i])
            known = np.where(fed[i] == PENDING, self._last_token[row], fed[i])
            self._write(chunk, start, imprints(known, start))
            if self.model.failing(identity_of(chunk.request.prompt_token_ids), start, end):
                failures.append((i, f"positions {start} .. {end - 1} cannot be computed"))
            elif plan.samples[i]:
                tokens[i] = self._last_token[row] = self.model.next_token(self._context(chunk, end))
        self._copy(plan.copies_after)
        self._completed = plan.number
        return StepResult(plan.number, tokens, plan.planned_s, failures=tuple(failures))

    def close(self) -> None:
        self._plans.clear()

    # -- for whoever moves blocks -------------------------------------------------------------

    def new_arena(self, slabs: int) -> UInt64:
        """Cells of another tier, laid out as these are."""
        return np.zeros(slabs * self.layout.slab_bytes // self._unit_bytes, dtype=np.uint64)

    def read_block(self, group: int, slot: int) -> UInt64:
        return self._arena[self.cells(group, slot)]

    def write_block(self, group: int, slot: int, cells: UInt64 | np.uint64) -> None:
        self._require_idle(-1, group, slot)
        self._arena[self.cells(group, slot)] = cells

    # -- what a plan changes ------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        computed = {}
        for admission in plan.admissions:
            self._tables[admission.row] = [{} for _ in self.layout.groups]
            self._requests[admission.row] = admission.request
            computed[admission.row] = admission.computed
        seated = {*plan.rows.tolist(), *computed}
        for blocks in plan.new_blocks:
            # A row that waits for a plan in flight before it gives way may have been given blocks that it does not use.
            absent = [row for row in blocks.rows.tolist() if row not in seated and not self._tables[row]]
            _require("executor-tables", not absent, f"plan {plan.number} gives blocks to absent rows {absent}")
            self._add(plan.number, blocks, computed)

    def _add(self, number: int, blocks: NewBlocks, computed: dict[int, int]) -> None:
        group, block_tokens = blocks.group, self.layout.groups[blocks.group].block_tokens
        for row, index, slot in zip(blocks.rows.tolist(), blocks.indices.tolist(), blocks.slots.tolist(), strict=True):
            table = self._tables[row][group]
            due = max(table) + 1 if table else None
            _require("executor-tables", due in (None, index), f"row {row}: block {index} where {due} is due")
            # A block that lies before what the row computes is shared: it keeps what it holds.
            done = computed.get(row, 0)
            if not block_tokens or (index + 1) * block_tokens > done:
                self._require_idle(number, group, slot)
                self._writers[group, slot] = row
                if not done or index * block_tokens >= done > 0 < block_tokens:  # else what it goes on from is there
                    self._arena[self.cells(group, slot)] = RUBBISH
            table[index] = slot

    def _require_idle(self, number: int, group: int, slot: int) -> None:
        busy = int(self._touched_by[self.cells(group, slot)].max())
        _require(
            "in-flight-slots",
            busy <= self._completed or busy == number,
            f"plan {number} takes slot {slot} of group {group}, which plan {busy} still touches",
        )

    def _prepared(self, number: int, row: int, start: int, end: int) -> _Chunk:
        tables = []
        for group, layout in enumerate(self.layout.groups):
            first, last = 0, 0
            if layout.block_tokens:
                first, last = (
                    self._laws[group].first_read(start) // layout.block_tokens,
                    (end - 1) // layout.block_tokens,
                )
            table = self._tables[row][group]
            lacking = [index for index in range(first, last + 1) if index not in table]
            _require("executor-tables", not lacking, f"plan {number} row {row} group {group}: no blocks {lacking}")
            used = {index: table[index] for index in range(first, last + 1)}
            for index, slot in used.items():
                self._touched_by[self.cells(group, slot)] = number
                writes = not layout.block_tokens or (index + 1) * layout.block_tokens > start
                _require(
                    "executor-tables",
                    not writes or self._writers[group, slot] == row,
                    f"plan {number} row {row} writes slot {slot} of group {group}, which is not its own",
                )
            tables.append(used)
        return _Chunk(self._requests[row], tables)

    # -- the arena ----------------------------------------------------------------------------

    def _copy(self, copies: tuple[BlockCopies, ...]) -> None:
        for some in copies:
            for source, target in zip(some.sources.tolist(), some.targets.tolist(), strict=True):
                self._arena[self.cells(some.group, target)] = self._arena[self.cells(some.group, source)]

    def cells(self, group: int, slot: int) -> slice:
        first = self.layout.address(group, slot) // self._unit_bytes
        return slice(first, first + self.layout.groups[group].block_bytes // self._unit_bytes)

    def _places(self, chunk: _Chunk, group: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """The cells of positions start .. end - 1, as rows."""
        layout = self.layout.groups[group]
        positions = np.arange(start, end)
        slots = np.array([chunk.tables[group][p] for p in (positions // layout.block_tokens).tolist()], dtype=np.int64)
        bytes_ = slots // layout.blocks_per_slab * self.layout.slab_bytes
        bytes_ += slots % layout.blocks_per_slab * layout.block_bytes
        width = layout.block_bytes // layout.block_tokens // self._unit_bytes
        first = bytes_ // self._unit_bytes + positions % layout.block_tokens * width
        return first[:, None] + np.arange(width)

    def _write(self, chunk: _Chunk, start: int, values: UInt64) -> None:
        for group, law in enumerate(self._laws):
            if law.constant:
                cells = self.cells(group, chunk.tables[group][0])
                for cell in range(cells.start, cells.stop):
                    before = int(self._arena[cell]) if start else 0  # a slot that is handed out holds rubbish
                    self._arena[cell] = np.uint64(advanced(before, values))
            else:
                self._arena[self._places(chunk, group, start, start + len(values))] = values[:, None]

    def _context(self, chunk: _Chunk, end: int) -> int:
        """What position end - 1 reads, once for each cell: each must have kept the same of the sequence."""
        sums: dict[Law, list[int]] = {}
        for group, law in enumerate(self._laws):
            if law.constant:
                read = self._arena[self.cells(group, chunk.tables[group][0])][None, :]
            else:
                read = self._arena[self._places(chunk, group, law.first_read(end - 1), end)]
            sums.setdefault(law, []).extend(int(column) for column in read.sum(axis=0))
        return combined([(alike[0] if len(set(alike)) == 1 else sum(alike)) & WORD for alike in sums.values()])


def _require(name: str, holds: bool, detail: str) -> None:
    if not holds:
        raise InvariantViolation(name, detail)
