"""Drives an executor through a hard little workload without a scheduler: `run_trial`.

Owns random but repeatable plans: ragged mixtures of prefill chunks and decodes, scattered slots,
rows that change hands, blocks given up once no later query can read them, and a sequence that is
paused, loses its blocks and is computed again. A slot that is free can be spoiled, so that whoever
reads it shows. Used to check an architecture when it is loaded, and by tests. It serves nobody: decisions of a
running engine belong to `scheduling`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo.errors import InvariantViolation
from octavo.memory.layout import Layout
from octavo.scheduling.plan import PENDING, Admission, Executor, NewBlocks, StepPlan, StepResult
from octavo.scheduling.request import Request, SamplingParams

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Subject:
    """One sequence of a trial: its prompt, what it has generated, and where it stands."""

    sequence_id: int
    request: Request
    wanted: int
    outputs: list[int] = field(default_factory=list)
    computed: int = 0
    row: int | None = None
    slots: list[list[int]] = field(default_factory=list)
    """Per group, the blocks that it holds."""
    firsts: list[int] = field(default_factory=list)
    """Per group, the blocks given up at the front."""
    sampled_here: bool = False
    """Whether the executor sampled its last token in its present row, and so knows it."""
    pauses_at: int | None = None
    """Output length at which it is paused, once."""
    failure: str | None = None

    @property
    def known(self) -> int:
        return self.request.prompt_tokens + len(self.outputs)

    @property
    def done(self) -> bool:
        return len(self.outputs) >= self.wanted or self.failure is not None

    def tokens(self, start: int, count: int) -> list[int]:
        prompt = self.request.prompt_token_ids.tolist()
        return [*prompt, *self.outputs][start : start + count]


def subjects(prompts: Sequence[Sequence[int]], wanted: int, *, pause: int | None = None) -> list[Subject]:
    """Greedy subjects for these prompts; subject number `pause` is paused halfway."""
    params = SamplingParams(temperature=0.0, max_tokens=wanted, seed=0).with_defaults({})
    made = []
    for number, prompt in enumerate(prompts):
        request = Request(request_id=f"trial-{number}", prompt_token_ids=np.asarray(prompt, np.int32), params=params)
        made.append(Subject(number, request, wanted, pauses_at=wanted // 2 if number == pause else None))
    return made


class Trial:
    """See the module docstring. All choices come from `seed`. `spoil(group, slot)` is told of each free slot."""

    def __init__(
        self,
        executor: Executor,
        layout: Layout,
        n_slabs: int,
        rows: int,
        *,
        seed: int = 0,
        spoil: Callable[[int, int], None] | None = None,
    ) -> None:
        self._executor = executor
        self._layout = layout
        self._spoil = spoil
        self._random = np.random.default_rng(seed)
        self._rows = list(range(rows))
        self._free = _slots_by_group(layout, n_slabs)
        for group, slots in enumerate(self._free):
            self._random.shuffle(slots)
            self._spoiled(group, slots)
        self._number = 0
        self.plans: list[StepPlan] = []
        self.given_up = 0
        """Blocks given up by sequences that went on."""
        self.pauses = 0

    def run(self, waiting: Sequence[Subject], *, longest_chunk: int = 7) -> None:
        """Until every subject has the outputs it wants."""
        pending = list(waiting)
        running: list[Subject] = []
        while pending or running:
            admissions = []
            while pending and self._rows and (not running or self._random.random() < 0.7):
                admissions.append(self._admit(pending.pop(0)))
                running.append(admissions[-1][0])
            chunks = self._choose(running, longest_chunk)
            plan = self._plan(chunks, tuple(admission for _, admission in admissions))
            self.plans.append(plan)
            self._executor.submit(plan)
            self._learn(chunks, self._executor.collect())
            for subject in list(running):
                paused = subject.pauses_at is not None and len(subject.outputs) >= subject.pauses_at
                if subject.done or paused:
                    running.remove(subject)
                    self._release(subject)
                    if not subject.done:
                        self.pauses += 1
                        subject.pauses_at = None
                        pending.append(subject)

    def _admit(self, subject: Subject) -> tuple[Subject, Admission]:
        subject.row = self._rows.pop(int(self._random.integers(len(self._rows))))
        subject.slots = [[] for _ in self._free]
        subject.firsts = [0 for _ in self._free]
        outputs = np.asarray(subject.outputs, np.int32)
        return subject, Admission(subject.row, subject.sequence_id, subject.request, outputs)

    def _release(self, subject: Subject) -> None:
        if subject.row is not None:
            self._rows.append(subject.row)
        subject.row = None
        subject.computed = 0
        subject.sampled_here = False
        for group, slots in enumerate(subject.slots):
            self._give(group, slots)

    def _give(self, group: int, slots: Sequence[int]) -> None:
        self._spoiled(group, slots)
        self._free[group].extend(slots)
        self._random.shuffle(self._free[group])

    def _spoiled(self, group: int, slots: Sequence[int]) -> None:
        if self._spoil is not None:
            for slot in slots:
                self._spoil(group, slot)

    def _slide(self, subject: Subject) -> None:
        """Its next query is at `computed`: what no query from there on can read is anybody's at once."""
        for group, layout in enumerate(self._layout.groups):
            if not layout.slides:
                continue
            first = int(layout.first_block(np.array([subject.computed]))[0])
            cut = min(first - subject.firsts[group], len(subject.slots[group]))
            if cut > 0:
                gone = subject.slots[group][:cut]
                del subject.slots[group][:cut]
                subject.firsts[group] += cut
                self.given_up += cut
                self._give(group, gone)

    def _choose(self, running: Sequence[Subject], longest_chunk: int) -> list[tuple[Subject, int]]:
        chosen = []
        for at in self._random.permutation(len(running)):
            subject = running[at]
            remaining = subject.known - subject.computed
            if remaining == 1:
                if self._random.random() < 0.85:
                    chosen.append((subject, 1))
            else:
                chosen.append((subject, min(remaining, int(self._random.integers(1, longest_chunk + 1)))))
        return chosen or [(running[0], 1)]

    def _plan(self, chunks: Sequence[tuple[Subject, int]], admissions: tuple[Admission, ...]) -> StepPlan:
        ids: list[int] = []
        for subject, count in chunks:
            tokens = subject.tokens(subject.computed, count)
            fresh = count == 1 and subject.sampled_here and subject.computed + 1 == subject.known
            ids.extend([PENDING] if fresh and self._random.random() < 0.5 else tokens)
        self._number += 1
        for subject, _ in chunks:
            self._slide(subject)
        new_blocks = tuple(
            blocks for group in range(len(self._free)) if len((blocks := self._grow(chunks, group)).rows)
        )
        return StepPlan(
            number=self._number,
            planned_s=0.0,
            sequence_ids=np.asarray([subject.sequence_id for subject, _ in chunks], np.int64),
            rows=np.asarray([subject.row for subject, _ in chunks], np.int32),
            starts=np.asarray([subject.computed for subject, _ in chunks], np.int32),
            counts=np.asarray([count for _, count in chunks], np.int32),
            samples=np.asarray([subject.computed + count == subject.known for subject, count in chunks], np.bool_),
            token_ids=np.asarray(ids, np.int32),
            admissions=admissions,
            new_blocks=new_blocks,
        )

    def _grow(self, chunks: Sequence[tuple[Subject, int]], group: int) -> NewBlocks:
        rows: list[int] = []
        indices: list[int] = []
        slots: list[int] = []
        for subject, count in chunks:
            held, first = subject.slots[group], subject.firsts[group]
            while first + len(held) < self._layout.groups[group].blocks_for(subject.computed + count):
                if not self._free[group]:
                    raise InvariantViolation("trial", "its arena is too small for its subjects")
                rows.append(subject.row or 0)
                indices.append(first + len(held))
                slots.append(self._free[group].pop())
                held.append(slots[-1])
        return NewBlocks(group, np.asarray(rows, np.int32), np.asarray(indices, np.int32), np.asarray(slots, np.int32))

    def _learn(self, chunks: Sequence[tuple[Subject, int]], result: StepResult) -> None:
        failed = dict(result.failures)
        for i, (subject, count) in enumerate(chunks):
            sampled = subject.computed + count == subject.known
            subject.computed += count
            if i in failed:
                subject.failure = failed[i]
            elif sampled:
                subject.outputs.append(int(result.tokens[i]))
                subject.sampled_here = True


def _slots_by_group(layout: Layout, n_slabs: int) -> list[list[int]]:
    """The slabs dealt out to the groups in turn, as slots."""
    groups = layout.groups
    return [
        [
            slab * group.blocks_per_slab + inner
            for slab in range(index, n_slabs, len(groups))
            for inner in range(group.blocks_per_slab)
        ]
        for index, group in enumerate(groups)
    ]
