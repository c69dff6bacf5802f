"""State machines for Hypothesis: random operations on the KV cache, and on the whole engine.

The cache is held against a model that knows which slots every row should hold and which of them a
plan in flight still touches. The engine is held against a toy model whose tokens depend on what it
reads from the slots, so that a wrong block changes an answer. Every invariant runs after each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.errors import InvariantViolation, RequestError
from octavo.memory.cache import KVCache
from octavo.memory.check import check, is_empty
from octavo.memory.keys import KeySpace
from octavo.memory.layout import Layout
from octavo.memory.values import Reservation, Shortfall, Suspended
from octavo.policy.allocation import allocation_named
from octavo.policy.bundle import Policies
from octavo.policy.chaos import Chaos
from octavo.policy.eviction import EVICTIONS, eviction_named
from octavo.policy.reuse import reuse_named
from octavo.scheduling.audit import check_all
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Event, Finished, Preempted, StepTokens
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.toy_laws import law_of, toy_layout
from octavo.simulate.toy_model import VOCAB, ToyExecutor, toy_model, toy_request

ROWS = 4
LAWS = ("full", "full", "window_1", "window_4", "window_6", "chunk_2", "chunk_5", "chunk_8", "constant")
ONE_TO_THREE_GROUPS = st.lists(st.tuples(st.integers(1, 6), st.sampled_from(LAWS)), min_size=1, max_size=3)
"""Heads and law of each group: one group, equal blocks, several of a group's blocks in a slab, padded slabs."""
SLAB_BYTES = st.sampled_from((0, 0, 300, 1500))
"""Up to several of the largest blocks in a slab."""


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    groups = draw(ONE_TO_THREE_GROUPS)
    heads, laws = [n for n, _ in groups], [law for _, law in groups]
    return toy_layout(heads, draw(st.sampled_from((1, 4))), laws, most_slab_bytes=draw(SLAB_BYTES))


@dataclass
class Held:
    """What one row, or one suspended state, should hold."""

    slots: list[list[int]]
    firsts: list[int]
    """Blocks given up at the front, by group."""
    committed: int = 0
    touched: int = -1

    @staticmethod
    def nothing(groups: int) -> Held:
        return Held([[] for _ in range(groups)], [0] * groups)

    def ever(self, group: int) -> int:
        """Blocks that it holds or has given up."""
        return self.firsts[group] + len(self.slots[group])


@dataclass
class Expected:
    rows: list[Held] = field(default_factory=list)
    suspended: list[tuple[Suspended, Held]] = field(default_factory=list)
    draining: list[tuple[int, int, int]] = field(default_factory=list)
    """(group, slot, plan)"""
    plans: int = 0
    settled: int = -1


class CacheMachine(RuleBasedStateMachine):
    """Every verb of `KVCache`, in any order, on any layout."""

    @initialize(layout=layouts(), contiguous=st.sampled_from((False, False, True)), slabs=st.integers(1, 14))
    def build(self, layout: Layout, contiguous: bool, slabs: int) -> None:
        self.cache = KVCache(layout, slabs, ROWS, contiguous=contiguous)
        self.laws = [law_of(group) for group in layout.groups]
        self.block_tokens = max(group.block_tokens for group in layout.groups) or 4
        self.groups = range(len(layout.groups))
        self.model = Expected(rows=[Held.nothing(len(self.groups)) for _ in range(ROWS)])

    # -- verbs --------------------------------------------------------------------------------

    @rule(row=st.integers(0, ROWS - 1), tokens=st.integers(0, 40))
    def reserve(self, row: int, tokens: int) -> None:
        self._reserve({row: tokens}, lambda: self.cache.reserve(row, tokens))

    @rule(wanted=st.dictionaries(st.integers(0, ROWS - 1), st.integers(1, 20), min_size=1))
    def reserve_many(self, wanted: dict[int, int]) -> None:
        rows, upto = np.array(list(wanted), dtype=np.int32), np.array(list(wanted.values()), dtype=np.int64)
        self._reserve(wanted, lambda: self.cache.reserve_many(rows, upto))

    def _reserve(self, wanted: dict[int, int], act: Callable[[], Reservation | Shortfall]) -> None:
        missing = {row: self._missing(row, tokens) for row, tokens in wanted.items()}
        counts = [sum(more[g] for more in missing.values()) for g in self.groups]
        # Of a run that is there, no group may grow.
        outgrown = any(any(more) and any(self.model.rows[row].slots) for row, more in missing.items())
        if self.cache.pool.contiguous and outgrown:
            with pytest.raises(InvariantViolation, match="outgrew its run"):
                act()
            return
        needed, free, run = self._room(counts)
        got = act()
        if needed > (run if self.cache.pool.contiguous else free):
            assert isinstance(got, Shortfall)
            assert (got.needed, got.free) == (needed, free)
            assert got.fragmented == (self.cache.pool.contiguous and needed <= free)
            return
        assert isinstance(got, Reservation)
        given: dict[tuple[int, int], int] = {}
        for blocks in got.new_blocks:
            for row, index, slot in zip(blocks.rows, blocks.indices, blocks.slots, strict=True):
                slots = self.model.rows[row].slots[blocks.group]
                assert index == self.model.rows[row].ever(blocks.group)
                assert (blocks.group, slot) not in self._in_use(), "a slot was handed out twice, or too early"
                slots.append(int(slot))
                given[int(row), blocks.group] = given.get((int(row), blocks.group), 0) + 1
        assert given == {(row, g): n for row, more in missing.items() for g, n in enumerate(more) if n}

    @rule(row=st.integers(0, ROWS - 1), share=st.sampled_from((0.2, 0.5, 0.9, 1.0)), then_slide=st.booleans())
    def commit(self, row: int, share: float, then_slide: bool) -> None:
        held = self.model.rows[row]
        room = min(48, self._room_tokens(held))
        assert self.cache.room_tokens(row) == room or (room == 48 < self.cache.room_tokens(row))
        held.committed += int(max(0, room - held.committed) * share)
        self.cache.commit(np.array([row], dtype=np.int32), np.array([held.committed], dtype=np.int64))
        if then_slide:
            self.slide_rows({row})

    @rule(rows=st.sets(st.integers(0, ROWS - 1), min_size=1))
    def slide(self, rows: set[int]) -> None:
        self.slide_rows(rows)

    def slide_rows(self, rows: set[int]) -> None:
        """What no position from the first one not committed can read is free at once, whatever is in flight."""
        self.cache.slide(np.array(sorted(rows), dtype=np.int32))
        if self.cache.pool.contiguous:
            return
        for row in rows:
            held = self.model.rows[row]
            for group, law in enumerate(self.laws):
                if not law.constant:
                    first = min(law.first_read(held.committed) // self.block_tokens, held.ever(group))
                    del held.slots[group][: max(0, first - held.firsts[group])]
                    held.firsts[group] = max(first, held.firsts[group])

    @rule(rows=st.sets(st.integers(0, ROWS - 1), min_size=1))
    def touch(self, rows: set[int]) -> None:
        plan = self.model.plans
        self.model.plans += 1
        self.cache.touch(np.array(sorted(rows), dtype=np.int32), plan)
        for row in rows:
            self.model.rows[row].touched = plan

    @precondition(lambda self: self.model.settled + 1 < self.model.plans)
    @rule()
    def settle_the_oldest_plan(self) -> None:
        self.model.settled += 1
        self.cache.settle(self.model.settled)
        self.model.draining = [entry for entry in self.model.draining if entry[2] > self.model.settled]

    @rule(row=st.integers(0, ROWS - 1))
    def release(self, row: int) -> None:
        held = self.model.rows[row]
        self.model.rows[row] = Held.nothing(len(self.groups))
        assert self.cache.release(row) == sum(map(len, held.slots))
        self._let_go(held)

    @rule(row=st.integers(0, ROWS - 1))
    def suspend(self, row: int) -> None:
        held = self.model.rows[row]
        self.model.rows[row] = Held.nothing(len(self.groups))
        value = self.cache.suspend(row)
        assert [[slot for _, slot in entries] for entries in value.slots] == held.slots
        assert (list(value.firsts), value.tokens) == (held.firsts, held.committed)
        self.model.suspended.append((value, held))

    @precondition(lambda self: self.model.suspended)
    @rule(row=st.integers(0, ROWS - 1), pick=st.integers(0, 99))
    def resume(self, row: int, pick: int) -> None:
        value, held = self.model.suspended[pick % len(self.model.suspended)]
        if any(self.model.rows[row].ever(group) for group in self.groups):
            with pytest.raises(InvariantViolation, match="only an empty row"):
                self.cache.resume(row, value)
            return
        self.model.suspended.remove((value, held))
        self.model.rows[row] = held
        self.cache.resume(row, value)
        with pytest.raises(InvariantViolation, match="resumed or dropped before"):
            self.cache.drop(value)

    @precondition(lambda self: self.model.suspended)
    @rule(pick=st.integers(0, 99))
    def drop(self, pick: int) -> None:
        value, held = self.model.suspended.pop(pick % len(self.model.suspended))
        self.cache.drop(value)
        self._let_go(held)

    # -- what must hold -----------------------------------------------------------------------

    @invariant()
    def the_cache_is_as_expected(self) -> None:
        if not hasattr(self, "cache"):
            return
        check(self.cache)
        for row, held in enumerate(self.model.rows):
            assert [table.row(row).tolist() for table in self.cache.tables] == held.slots
            assert [int(table.firsts[row]) for table in self.cache.tables] == held.firsts
            assert (self.cache.committed[row], self.cache.touched[row]) == (held.committed, held.touched)
        assert self.cache.pool.draining == [sum(g == group for g, _, _ in self.model.draining) for group in self.groups]
        assert is_empty(self.cache) == (not self._in_use())
        _, free, run = self._room([0 for _ in self.groups])
        assert self.cache.pool.free.count == free
        assert self.cache.pool.free.largest_run() == (run if self.cache.pool.contiguous else free)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for value, _ in self.model.suspended:
            self.cache.drop(value)
        for row in range(ROWS):
            self.cache.release(row)
        self.cache.settle(self.model.plans)
        check(self.cache)
        assert is_empty(self.cache)

    # -- the model's own arithmetic -----------------------------------------------------------

    def _missing(self, row: int, tokens: int) -> list[int]:
        held = self.model.rows[row]
        return [
            max(0, (1 if law.constant else -(-tokens // self.block_tokens)) - held.ever(group))
            for group, law in enumerate(self.laws)
        ]

    def _room_tokens(self, held: Held) -> int:
        each = [self.block_tokens * (48 if law.constant else 1) * held.ever(g) for g, law in enumerate(self.laws)]
        return min(each)

    def _in_use(self) -> set[tuple[int, int]]:
        held = [*self.model.rows, *(held for _, held in self.model.suspended)]
        used = {(g, slot) for h in held for g, slots in enumerate(h.slots) for slot in slots}
        return used | {(g, slot) for g, slot, _ in self.model.draining}

    def _room(self, counts: list[int]) -> tuple[int, int, int]:
        """Slabs needed for these blocks, free slabs, and the longest run of free slabs."""
        pool = self.cache.pool
        used_of = [[0] * pool.slabs for _ in self.groups]
        for group, slot in self._in_use():
            used_of[group][slot // pool.blocks_per_slab[group]] += 1
        free = [all(used_of[g][slab] == 0 for g in self.groups) for slab in range(pool.slabs)]
        runs = "".join("x" if one else " " for one in free).split()
        needed = 0
        for group, n in enumerate(counts):
            per_slab = pool.blocks_per_slab[group]
            begun = 0 if pool.contiguous else sum(per_slab - used for used in used_of[group] if used)
            needed += -(-max(0, n - begun) // per_slab)
        return needed, sum(free), max(map(len, runs), default=0)

    def _let_go(self, held: Held) -> None:
        if held.touched > self.model.settled:
            self.model.draining += [(g, slot, held.touched) for g, slots in enumerate(held.slots) for slot in slots]


POLICIES = st.one_of(
    st.tuples(
        st.sampled_from(("paged", "contiguous-max", "contiguous-pow2")),
        st.sampled_from(("iteration", "request")),
        st.sampled_from(("max_utilization", "guaranteed_no_evict")),
    ),
    st.tuples(st.sampled_from(("paged", "contiguous-max")), st.just("chaos"), st.integers(0, 10)),
)


class EngineMachine(RuleBasedStateMachine):
    """Submissions, aborts and steps in any order, under any policy, with ends that nobody foresees."""

    @initialize(
        layout=layouts(),
        policies=POLICIES,
        depth=st.integers(0, 1),
        slabs=st.integers(3, 14),
        rows=st.integers(1, 5),
        more_budget=st.integers(0, 20),
        fails_every=st.sampled_from((0, 0, 150)),
        keeps=st.sampled_from((None, None, *sorted(EVICTIONS))),
    )
    def build(
        self,
        layout: Layout,
        policies: tuple[str, str, Any],
        keeps: str | None,
        depth: int,
        slabs: int,
        rows: int,
        more_budget: int,
        fails_every: int,
    ) -> None:
        self.toy = toy_model(layout, ends_every=9, fails_every=fails_every)
        bundle = _policies(*policies, reuse="prefix" if keeps and policies[0] == "paged" else "none")
        self.never_pauses = policies[2] == "guaranteed_no_evict"
        block_tokens = max(group.block_tokens for group in layout.groups) or 4
        cache = KVCache(
            layout,
            slabs,
            rows,
            contiguous=bundle.allocation.contiguous,
            keys=KeySpace("toy", block_tokens) if bundle.reuse.shares else None,
            eviction=eviction_named(keeps or "lru"),
        )
        scheduler = Scheduler(cache, Limits(rows, rows + more_budget, 48, VOCAB), bundle)
        self.core = EngineCore(scheduler, ToyExecutor(self.toy, layout, slabs, rows), depth=depth)
        self.asked: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Finished] = {}
        self.time = 0.0

    @rule(
        prompt=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=18),
        max_tokens=st.one_of(st.none(), st.integers(0, 20)),
        priority=st.sampled_from((0, 0, 0, -1, 1)),
    )
    def submit(self, prompt: list[int], max_tokens: int | None, priority: int) -> None:
        self._submit(toy_request(f"r{len(self.asked)}", prompt, max_tokens, priority=priority))

    @precondition(lambda self: self.asked)
    @rule(
        pick=st.integers(0, 10_000),
        alike=st.integers(1, 18),
        tail=st.lists(st.integers(1, VOCAB - 1), max_size=3),
        max_tokens=st.integers(0, 20),
        salt=st.sampled_from(("", "", "another")),
    )
    def submit_what_begins_alike(self, pick: int, alike: int, tail: list[int], max_tokens: int, salt: str) -> None:
        """Where blocks are kept, some of them are found; where not, it is one more request."""
        like = list(self.asked.values())[pick % len(self.asked)].prompt_token_ids.tolist()
        self._submit(toy_request(f"r{len(self.asked)}", like[:alike] + tail, max_tokens, cache_salt=salt))

    @rule()
    def reset(self) -> None:
        self.core.reset_kept(self.time)

    def _submit(self, asked: Request) -> None:
        before = self.core.scheduler.cache.pool.free.count
        try:
            self.asked[self.core.submit(asked, self.time)] = asked
        except RequestError:
            assert self.core.scheduler.cache.pool.free.count == before

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 10_000))
    def abort(self, pick: int) -> None:
        sequence_id = list(self.asked)[pick % len(self.asked)]
        alive = sequence_id not in self.ended
        self._learn(self.core.scheduler.drain_events())
        assert self.core.abort(sequence_id, self.time) == (alive and sequence_id not in self.ended)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        scheduler = self.core.scheduler
        stuck = not len(scheduler.running) and not scheduler.in_flight and len(scheduler.waiting)
        self.time += 1.0
        self._learn(self.core.step(self.time))
        check_all(scheduler)
        assert not stuck or len(scheduler.running) or len(scheduler.waiting) < stuck, "nothing ran and nobody entered"

    @invariant()
    def all_invariants_hold(self) -> None:
        if hasattr(self, "core"):
            check_all(self.core.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        steps = 0
        while self.core.has_work:
            self._step()
            steps += 1
            assert steps < 5_000, "the engine works for ever"
        self._learn(self.core.scheduler.drain_events())
        assert is_empty(self.core.scheduler.cache)
        assert sorted(self.ended) == sorted(self.asked)
        for sequence_id, asked in self.asked.items():
            self._answered_as_if_alone(sequence_id, asked)

    def _learn(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, StepTokens):
                for sequence_id, token in event.pairs():
                    assert sequence_id not in self.ended, "a token after the end"
                    self.tokens.setdefault(sequence_id, []).append(token)
            elif isinstance(event, Finished):
                assert event.sequence_id not in self.ended, "ended twice"
                self.ended[event.sequence_id] = event
            elif isinstance(event, Preempted):
                assert not self.never_pauses, "guaranteed_no_evict has let somebody in who did not fit"

    def _answered_as_if_alone(self, sequence_id: int, asked: Request) -> None:
        most = asked.params.max_tokens
        pool = self.core.scheduler.cache.max_tokens_per_sequence()
        limit = min(48, pool + 1) if most is None else asked.prompt_tokens + most
        got, end = self.tokens.get(sequence_id, []), self.ended[sequence_id]
        assert end.record.output_tokens == len(got)
        kept = self.core.scheduler.policies.reuse.shares
        assert self.toy.answered(asked, limit, got, end.reason, kept=kept), self.toy.answer(asked, limit)


def _policies(allocation: str, batching: str, admission: str | int, *, reuse: str) -> Policies:
    if isinstance(admission, str):
        return Policies.named(allocation=allocation, batching=batching, admission=admission, reuse=reuse)
    chaos = Chaos(admission)
    return Policies(
        allocation_named(allocation), batching=chaos, admission=chaos, victim=chaos, reuse=reuse_named(reuse)
    )
