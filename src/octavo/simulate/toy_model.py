"""A toy model whose attention state is real: what it answers depends on what it reads from the arena.

`ToyModel` is the arithmetic: the next token is a hash of all tokens before it. `ToyExecutor` gets
the same figure the way a real one does, by writing an imprint of every position into the slots of
its block tables and reading them back. A slot that is lost, shared or used too early changes a
token, or is caught as `InvariantViolation`. Owns no policy; the answer never depends on one.

    token t at position p --> imprint(t, p) --> written to every cell of p in every group
    next token            <-- hash(sum of all cells of positions 0 .. p)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import InvariantViolation
from octavo.geometry.dtypes import BF16
from octavo.geometry.state import Component
from octavo.memory.groups import StateGroup
from octavo.memory.layout import Layout, make_layout
from octavo.memory.values import Int32
from octavo.scheduling.events import FinishReason
from octavo.scheduling.plan import NO_TOKEN, PENDING, StepPlan, StepResult
from octavo.scheduling.request import Request, SamplingParams

UInt64 = npt.NDArray[np.uint64]

VOCAB = 1000
STOP_ID = 0
_WORD = 2**64 - 1


def toy_layout(heads: Sequence[int] = (2,), block_tokens: int = 4) -> Layout:
    """One group of one layer for each entry, with that many key heads: (4, 2) packs two of the second in a slab."""
    groups = [
        StateGroup(f"g{i}", (i,), ((Component("k", (n, 2), BF16), Component("v", (n, 2), BF16)),))
        for i, n in enumerate(heads)
    ]
    return make_layout(groups, block_tokens)


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

    def next_token(self, context: int) -> int:
        drawn = _scrambled(context)
        if self.ends_every and drawn % self.ends_every == 0:
            return STOP_ID
        return 1 + (drawn >> 20) % (VOCAB - 1)

    def failing(self, identity: int, start: int, end: int) -> bool:
        """Whether one of the positions start .. end - 1 of this prompt's sequence cannot be computed."""
        if not self.fails_every:
            return False
        return any(_scrambled(identity ^ (p * 0x9E37)) % self.fails_every == 0 for p in range(start, end))

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
        context = int(imprints(prompt, 0).sum())
        while True:
            position = len(prompt) + len(tokens)
            tokens.append(self.next_token(context & _WORD))
            if tokens[-1] in request.stop_ids:
                return Answer(tokens, "stop")
            if len(tokens) == room:
                return Answer(tokens, "length")
            if self.failing(identity, position, position + 1):
                return Answer(tokens, "error")
            context += int(imprints(np.array(tokens[-1:], dtype=np.int32), position)[0])


def identity_of(prompt: Int32) -> int:
    return int(imprints(prompt, 0).sum())


def imprints(tokens: Int32, first: int) -> UInt64:
    """What positions first, first + 1, ... leave in the arena; never zero in practice."""
    values = tokens.astype(np.uint64) + (np.arange(first, first + len(tokens), dtype=np.uint64) << np.uint64(32))
    values = (values + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64 = values ^ (values >> np.uint64(29))
    return mixed


def _scrambled(value: int) -> int:
    value = (value * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 31)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 29)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What a chunk needs to run, as it stood when its plan was submitted."""

    request: Request
    tables: list[list[int]]
    """By group."""


class ToyExecutor:
    """Runs plans when they are collected, so that every answer comes as late as the depth allows.

    Raises `InvariantViolation` when a plan breaks the seam's contract: `executor-tables` (blocks out
    of order or for a row that has left, or a chunk beyond its blocks) or `in-flight-slots` (a slot
    is handed out while a plan that touches it has not completed).
    """

    def __init__(self, model: ToyModel, layout: Layout, slabs: int, rows: int) -> None:
        self.model = model
        self.layout = layout
        self._unit_bytes = gcd(*(g.block_bytes // g.block_tokens for g in layout.groups))
        self._arena = np.zeros(slabs * layout.slab_bytes // self._unit_bytes, dtype=np.uint64)
        self._touched_by = np.full(len(self._arena), -1, dtype=np.int64)
        self._tables: list[list[list[int]]] = [[] for _ in range(rows)]
        self._requests: dict[int, Request] = {}
        self._last_token = np.full(rows, NO_TOKEN, dtype=np.int32)
        self._plans: deque[tuple[StepPlan, list[_Chunk]]] = deque()
        self._completed = -1

    def submit(self, plan: StepPlan) -> None:
        self._apply(plan)
        chunks = []
        for row, end in zip(plan.rows.tolist(), (plan.starts + plan.counts).tolist(), strict=True):
            chunk = _Chunk(self._requests[row], [list(table) for table in self._tables[row]])
            for group, table in enumerate(chunk.tables):
                room = len(table) * self.layout.groups[group].block_tokens
                _require("executor-tables", end <= room, f"plan {plan.number} row {row}: {end} positions, room {room}")
                for slot in table:
                    self._touched_by[self._cells(group, slot)] = plan.number
            chunks.append(chunk)
        self._plans.append((plan, chunks))

    def collect(self) -> StepResult:
        plan, chunks = self._plans.popleft()
        tokens = np.full(plan.chunks, NO_TOKEN, dtype=np.int32)
        failures = []
        fed = np.split(plan.token_ids, np.cumsum(plan.counts)[:-1])
        for i, chunk in enumerate(chunks):
            row, start = int(plan.rows[i]), int(plan.starts[i])
            end = start + int(plan.counts[i])
            known = np.where(fed[i] == PENDING, self._last_token[row], fed[i])
            self._write(chunk, start, imprints(known, start))
            if self.model.failing(identity_of(chunk.request.prompt_token_ids), start, end):
                failures.append((i, f"positions {start} .. {end - 1} cannot be computed"))
            elif plan.samples[i]:
                tokens[i] = self._last_token[row] = self.model.next_token(self._context(chunk, end))
        self._completed = plan.number
        return StepResult(plan.number, tokens, plan.planned_s, failures=tuple(failures))

    def close(self) -> None:
        self._plans.clear()

    def _apply(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._tables[admission.row] = [[] for _ in self.layout.groups]
            self._requests[admission.row] = admission.request
        seated = {*plan.rows.tolist(), *(admission.row for admission in plan.admissions)}
        for blocks in plan.new_blocks:
            for row, index, slot in zip(
                blocks.rows.tolist(), blocks.indices.tolist(), blocks.slots.tolist(), strict=True
            ):
                _require("executor-tables", row in seated, f"plan {plan.number} gives slot {slot} to absent row {row}")
                busy = int(self._touched_by[self._cells(blocks.group, slot)].max())
                _require("in-flight-slots", busy <= self._completed, f"plan {busy} still touches slot {slot}")
                table = self._tables[row][blocks.group]
                _require("executor-tables", index == len(table), f"row {row}: block {index} after {len(table)}")
                table.append(slot)

    def _cells(self, group: int, slot: int) -> slice:
        first = self.layout.address(group, slot) // self._unit_bytes
        return slice(first, first + self.layout.groups[group].block_bytes // self._unit_bytes)

    def _places(self, chunk: _Chunk, group: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """The cells of positions start .. end - 1, as rows."""
        layout = self.layout.groups[group]
        positions = np.arange(start, end)
        slots = np.array(chunk.tables[group], dtype=np.int64)[positions // layout.block_tokens]
        bytes_ = slots // layout.blocks_per_slab * self.layout.slab_bytes
        bytes_ += slots % layout.blocks_per_slab * layout.block_bytes
        width = layout.block_bytes // layout.block_tokens // self._unit_bytes
        first = bytes_ // self._unit_bytes + positions % layout.block_tokens * width
        return first[:, None] + np.arange(width)

    def _write(self, chunk: _Chunk, start: int, values: UInt64) -> None:
        for group in range(len(self.layout.groups)):
            self._arena[self._places(chunk, group, start, start + len(values))] = values[:, None]

    def _context(self, chunk: _Chunk, end: int) -> int:
        """The sum over positions, once for each cell: each group must have kept the same sequence."""
        sums: list[int] = []
        for group in range(len(self.layout.groups)):
            read = self._arena[self._places(chunk, group, 0, end)]
            sums.extend(int(column) for column in read.sum(axis=0))
        return sums[0] if len(set(sums)) == 1 else sum(sums)


def _require(name: str, holds: bool, detail: str) -> None:
    if not holds:
        raise InvariantViolation(name, detail)
