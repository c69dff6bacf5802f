"""Every invariant, by name, in seeded random worlds: what `octavo check` prints.

A world is a toy engine (`explore_worlds`) under random traffic: submissions, aborts, resets, steps, unpredictable
ends, failures of single sequences and, where there are tiers below the device, copies that fail or come late.
After every operation each invariant runs; what it saw is counted as distinct states. The same
seed gives the same answer. Owns no invariant but those of whole runs, at the end of this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any

import numpy as np

from octavo.errors import InvariantViolation, RequestError
from octavo.memory.check import INVARIANTS as MEMORY_INVARIANTS
from octavo.memory.check import is_empty
from octavo.memory.check_tiers import INVARIANTS as TIER_INVARIANTS
from octavo.memory.check_tiers import at_rest
from octavo.memory.slots import LEGAL_MOVES, GroupSlots, SlotState
from octavo.memory.tiering import Tiering
from octavo.scheduling.audit import INVARIANTS as SCHEDULING_INVARIANTS
from octavo.scheduling.events import Event, Finished, Preempted, StepTokens
from octavo.scheduling.request import Request
from octavo.simulate.explore_worlds import CONTEXT, World, all_worlds
from octavo.simulate.handover import walk_through
from octavo.simulate.toy_model import VOCAB, toy_request

MAX_DRAIN_STEPS = 5_000
WHOLE_RUN = (
    "slot-moves",
    "progress",
    "in-flight-slots",
    "executor-tables",
    "all-requests-answered",
    "tokens-unchanged-by-policy",
    "guarantee-never-pauses",
    "empty-after-drain",
    "tiers-at-rest",
    "handover",
)


@dataclass(frozen=True, slots=True)
class Explored:
    """One invariant: whether it held wherever it was looked at, and in how many distinct states that was."""

    name: str
    passed: bool
    states_visited: int
    detail: str


def explore(seed: int = 0, steps: int = 4_800, worlds: tuple[World, ...] | None = None) -> list[Explored]:
    """Run `steps` operations in all, spread over the worlds, and report on each invariant by name."""
    chosen = all_worlds() if worlds is None else worlds
    findings = _Findings()
    _try_every_slot_move(findings)
    for depth in (0, 1):
        _walk_the_handover(findings, depth)
    for world in chosen:
        _Run(world, seed, findings).run(max(1, steps // len(chosen)))
    return findings.report(f"{len(chosen)} worlds of {max(1, steps // len(chosen))} operations")


@dataclass(slots=True)
class _Findings:
    states: dict[str, set[bytes]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def saw(self, name: str, *state: Any) -> None:
        self.count(name, _digest(state))

    def count(self, name: str, digest: bytes) -> None:
        self.states.setdefault(name, set()).add(digest)

    def failed(self, name: str, detail: str) -> None:
        self.failures.setdefault(name, detail)

    def report(self, size: str) -> list[Explored]:
        known = (*MEMORY_INVARIANTS, *SCHEDULING_INVARIANTS, *TIER_INVARIANTS, *WHOLE_RUN)
        names = dict.fromkeys((*known, *self.failures))
        return [
            Explored(
                name,
                passed=name not in self.failures and bool(self.states.get(name)),
                states_visited=len(self.states.get(name, ())),
                detail=self.failures.get(name, size),
            )
            for name in names
        ]


class _Run:
    """One world under random traffic."""

    def __init__(self, world: World, seed: int, findings: _Findings) -> None:
        self.world = world
        self.findings = findings
        self.random = Random(f"{seed} {world.label}")
        self.core, self.model = world.build(self.random)
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.endings: dict[int, list[Finished]] = {}
        self.operations = 0

    def run(self, operations: int) -> None:
        try:
            for _ in range(operations):
                self._operate()
                self._check()
            self._drain()
        except InvariantViolation as violation:
            self.findings.failed(violation.name, f"{self.world.label}, operation {self.operations}: {violation.detail}")

    def _operate(self) -> None:
        self.operations += 1
        drawn = self.random.random()
        if drawn < 0.3 and len(self.core.scheduler.waiting) < 12:
            self._submit()
        elif drawn < 0.38 and self.requests:
            self.core.abort(self.random.choice(list(self.requests)), 0.0)
        elif drawn > 0.99:
            self.core.reset_kept(0.0)
        else:
            self._step()

    def _submit(self) -> None:
        longest = 60 if self.random.random() < 0.1 else 14
        prompt = [self.random.randrange(1, VOCAB) for _ in range(self.random.randint(1, longest))]
        if self.requests and self.random.random() < 0.6:  # one that begins like an earlier one
            like = self.requests[self.random.choice(list(self.requests))].prompt_token_ids.tolist()
            prompt = like[: self.random.randint(1, len(like))] + prompt[: self.random.randint(0, 3)]
        max_tokens = self.random.choice((0, 1, 2, 5, 9, 14, 14, 30, None))
        priority = self.random.choice((0, 0, 0, -1, 2))
        salt = self.random.choice(("", "", "another"))
        asked = toy_request(f"r{self.operations}", prompt, max_tokens, priority=priority, cache_salt=salt)
        try:
            sequence_id = self.core.submit(asked, 0.0)
        except RequestError:
            return  # refused with a reason: that is an answer
        self.requests[sequence_id] = asked

    def _step(self) -> None:
        scheduler = self.core.scheduler
        stuck = not len(scheduler.running) and not scheduler.in_flight and len(scheduler.waiting)
        self._learn(self.core.step(0.0))
        copying = scheduler.tiering is not None and scheduler.tiering.pending
        if stuck and not copying:
            self.findings.saw("progress", self.world, self._traffic())
            _require("progress", len(scheduler.running) or len(scheduler.waiting) < stuck, f"{stuck} wait, none enters")

    def _learn(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, StepTokens):
                for sequence_id, token in event.pairs():
                    self.tokens.setdefault(sequence_id, []).append(token)
            elif isinstance(event, Finished):
                self.endings.setdefault(event.sequence_id, []).append(event)
            elif isinstance(event, Preempted):
                _require("guarantee-never-pauses", not self._guaranteed, f"sequence {event.sequence_id} was paused")

    def _check(self) -> None:
        scheduler = self.core.scheduler
        cache = scheduler.cache
        columns = zip(cache.pool.slots, cache.tables, strict=True)
        blocks = [
            (slots.state.tobytes(), slots.refs.tobytes(), table.counts.tobytes(), table.firsts.tobytes())
            for slots, table in columns
        ]
        groups = (self.world.heads, self.world.laws)
        memory = _digest((groups, blocks, cache.committed.tobytes()))
        traffic = _digest((groups, self._traffic()))
        where = {"contiguous-runs": cache.pool.contiguous, "held-within-charge": cache.gives_up}
        for name, of_cache in MEMORY_INVARIANTS.items():
            of_cache(cache)
            if where.get(name, True):
                self.findings.count(name, memory)
        for name, of_scheduler in SCHEDULING_INVARIANTS.items():
            of_scheduler(scheduler)
            if where.get(name, True):
                self.findings.count(name, traffic)
        if self._guaranteed:
            self.findings.count("guarantee-never-pauses", traffic)
        if scheduler.in_flight:
            self.findings.count("in-flight-slots", memory + traffic)
        self.findings.count("executor-tables", memory + traffic)
        if scheduler.tiering is not None:
            self._check_tiers(scheduler.tiering)

    def _check_tiers(self, tiering: Tiering) -> None:
        columns = [(slots.state.tobytes(), slots.refs.tobytes()) for slots in tiering.host.pool.slots]
        on_disk = [] if tiering.disk is None else tiering.disk.blocks
        below = _digest((self.world.heads, columns, on_disk, [order.number for order in tiering.errands.orders]))
        for name, of_tiers in TIER_INVARIANTS.items():
            of_tiers(tiering)
            if name != "disk-accounting" or tiering.disk is not None:
                self.findings.count(name, below)

    @property
    def _guaranteed(self) -> bool:
        return self.world.admission == "guaranteed_no_evict"

    def _traffic(self) -> tuple[Any, ...]:
        scheduler = self.core.scheduler
        running, rows = scheduler.running, scheduler.running.order
        columns = (running.known, running.pending, running.computed, running.limit, running.done)
        return (*(c[rows].tolist() for c in columns), len(scheduler.waiting), scheduler.in_flight)

    def _drain(self) -> None:
        steps = 0
        tiering = self.core.scheduler.tiering
        while self.core.has_work or (tiering is not None and tiering.pending):
            steps += 1
            _require("progress", steps <= MAX_DRAIN_STEPS, f"work is left after {steps} steps without new requests")
            self._step()
            self._check()
        self._learn(self.core.scheduler.drain_events())
        cache = self.core.scheduler.cache
        self.findings.saw("empty-after-drain", self.world, self.operations)
        _require("empty-after-drain", is_empty(cache), f"{cache.pool.free.count} of {cache.pool.slabs} slabs are free")
        if tiering is not None:
            self.findings.saw("tiers-at-rest", self.world, self.operations)
            _require("tiers-at-rest", at_rest(tiering), f"copies hold {tiering.held()[:3]} (tier, group, slot)")
        for sequence_id in self.requests:
            self._check_answer(sequence_id)

    def _check_answer(self, sequence_id: int) -> None:
        asked, endings = self.requests[sequence_id], self.endings.get(sequence_id, [])
        self.findings.saw("all-requests-answered", asked.prompt_token_ids.tolist(), asked.params.max_tokens)
        _require("all-requests-answered", len(endings) == 1, f"sequence {sequence_id} ended {len(endings)} times")
        most = asked.params.max_tokens
        pool_tokens = self.core.scheduler.cache.max_tokens_per_sequence()
        limit = min(CONTEXT, pool_tokens + 1) if most is None else asked.prompt_tokens + most
        got, reason = self.tokens.get(sequence_id, []), endings[0].reason
        self.findings.saw("tokens-unchanged-by-policy", asked.prompt_token_ids.tolist(), got, reason)
        _require(
            "tokens-unchanged-by-policy",
            self.model.answered(asked, limit, got, reason, kept=self.world.reuse != "none"),
            f"sequence {sequence_id}: {got} ({reason}), alone {self.model.answer(asked, limit)}",
        )


def _try_every_slot_move(findings: _Findings) -> None:
    """All pairs of states: exactly the legal moves work, and an illegal one changes nothing."""
    for before in SlotState:
        for after in SlotState:
            columns = GroupSlots(2)
            columns.state[:] = before
            try:
                columns.move(np.array([0, 1], dtype=np.int32), after)
            except InvariantViolation:
                moved = False
            else:
                moved = True
            findings.saw("slot-moves", before, after)
            held = columns.state.tolist() == [after if moved else before] * 2
            if moved != ((before, after) in LEGAL_MOVES) or not held:
                findings.failed("slot-moves", f"{before.name} -> {after.name}: moved is {moved}")


def _walk_the_handover(findings: _Findings, depth: int) -> None:
    try:
        for line in walk_through(depth):
            findings.saw("handover", depth, line)
    except InvariantViolation as violation:
        findings.failed(violation.name, f"depth {depth}: {violation.detail}")


def _digest(state: tuple[Any, ...]) -> bytes:
    return blake2b(repr(state).encode(), digest_size=8).digest()


def _require(name: str, holds: object, detail: str) -> None:
    if not holds:
        raise InvariantViolation(name, detail)
