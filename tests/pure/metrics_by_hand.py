"""What the metrics must say, computed a second time without the fold.

`ByHand` drives an engine with random traffic and keeps its own books from what it asked for, from the
plans and answers that pass the executor, and from tables and slots after every operation. It never
looks at an event. `scraped` reads what a scrape gets.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from tests.pure.worlds import VOCAB, engine, one_group, request, two_groups

from octavo.cost.step import LinearCost
from octavo.errors import RequestError
from octavo.memory.cache import KVCache
from octavo.memory.slots import SlotState
from octavo.observe.metrics import Metrics
from octavo.policy.bundle import Policies
from octavo.scheduling.plan import StepPlan, StepResult
from octavo.scheduling.request import Request
from octavo.scheduling.sequence import Sequence, SequenceState
from octavo.simulate.executors import SimExecutor

EOS = VOCAB - 1
SICK = 13
"""A prompt that begins with this token fails in its third step or later."""
MODEL = 'toy "quoted" \\ model'

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(metrics: Metrics) -> Series:
    """Every sample of a scrape, by name and labels (without the model's)."""
    found: Series = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels["model"] == MODEL
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model"))
            assert (sample.name, labels) not in found, "the same series twice"
            found[sample.name, labels] = sample.value
    return found


def value(series: Series, name: str, **labels: str) -> float:
    return series[f"octavo_{name}", tuple(sorted(labels.items()))]


def total(series: Series, name: str) -> float:
    return sum(number for (found, _), number in series.items() if found == f"octavo_{name}")


class Watching(SimExecutor):
    """Takes simulated time, fails the sick, and keeps what passes."""

    def __init__(self, seed: int) -> None:
        super().__init__(LinearCost(step_s=0.01 + seed % 7 * 0.03))
        self.plans: list[StepPlan] = []
        self.collected: list[tuple[StepPlan, StepResult]] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().submit(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        self.collected.append((self.plans[len(self.collected)], result))
        return result

    def _run(self, plan: StepPlan) -> StepResult:
        result = super()._run(plan)
        sick = [
            i
            for i in range(plan.chunks)
            if self._requests[int(plan.rows[i])].prompt_token_ids[0] == SICK and plan.number % 3 == 2
        ]
        return StepResult(
            result.number, result.tokens, result.finished_s, failures=tuple((i, "it is sick") for i in sick)
        )


class ByHand:
    def __init__(self, seed: int, *, groups: int = 1, depth: int = 0, **policies: str) -> None:
        self.random = Random(f"{seed} {groups} {depth} {policies}")
        self.executor = Watching(seed)
        self.budget, self.seats = self.random.choice((8, 20, 64)), self.random.choice((4, 7, 8))
        self.core = engine(
            layout=one_group() if groups == 1 else two_groups(),
            slabs=self.random.choice((11, 11, 14, 30)) * groups,
            seqs=self.seats,
            budget=self.budget,
            context=60,
            policies=Policies.named(**policies),
            depth=depth,
            executor=self.executor,
            max_waiting=12,
        )
        self.cache: KVCache = self.core.scheduler.cache
        self.now = self.random.choice((0.0, 1e5))
        self.metrics = Metrics(self.core, MODEL, clock=lambda: self.now)
        self.began_s = self.now
        self.sequences: dict[int, Sequence] = {}
        self.asked: dict[int, Request] = {}
        self.arrived: dict[int, float] = {}
        self.scheduled: dict[int, float] = {}
        self.times: dict[int, list[float]] = defaultdict(list)
        self.ended: dict[int, tuple[str, float]] = {}
        self.kept: dict[int, int] = {}
        """Positions whose state each seated sequence has."""
        self.given_up: dict[int, int] = {}
        """Positions that each preempted sequence had."""
        self.seated_by: dict[int, int] = {}
        """The plan with which each seated sequence was seated."""
        self.refused: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.blocked_s = 0.0
        self._blocked_since: float | None = None

    # -- traffic ------------------------------------------------------------------------------

    def run(self, operations: int) -> None:
        for _ in range(operations):
            self.now += self.random.choice((0.0, 0.001, 0.07))
            drawn = self.random.random()
            if drawn < 0.35:
                self.submit(self._some_request())
            elif drawn < 0.42 and self.sequences:
                self.abort(self.random.choice(sorted(self.sequences)))
            else:
                self.step()

    def drain(self) -> None:
        for _ in range(3000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work
        self.metrics.observe(self.core.scheduler.drain_events())

    def _some_request(self) -> tuple[Request, str | None]:
        """A request and why it must be refused, if it must."""
        r = self.random
        kind, name = r.random(), f"r{len(self.asked)}"
        if kind < 0.05:
            return request([VOCAB + 5], 3, name=name), "invalid"
        if kind < 0.08:
            return request(70, 3, name=name), "invalid"
        # 59 positions: 15 blocks of 4, and where there is a second group, two of its blocks in a slab.
        if kind < 0.2 and self.cache.pool.slabs < (15 if len(self.cache.layout.groups) == 1 else 15 + 8):
            return request(58, 2, name=name), "never_fits"
        prompt = [r.randrange(20, VOCAB - 2) for _ in range(r.randint(1, 14))]
        if kind > 0.92:
            prompt[0] = SICK
        most = min(33 - len(prompt), r.choice((0, 1, 5, 9, 14, 24, 24)))
        true = r.randint(1, 20) if r.random() < 0.4 and most else None
        eos = (EOS,) if true is not None else ()
        return request(prompt, most, name=name, priority=r.choice((0, 0, 1)), eos=eos, true_output=true), None

    def submit(self, asked: tuple[Request, str | None]) -> None:
        wanted, reason = asked
        waiting = self.count(SequenceState.WAITING)
        if reason is None and waiting >= 12:
            reason = "queue_full"
        try:
            sequence_id = self.core.submit(wanted, self.now)
        except RequestError:
            assert reason is not None, f"{wanted} was refused"
            self.refused[reason] += 1
            return
        assert reason is None
        self.asked[sequence_id], self.arrived[sequence_id] = wanted, self.now
        if wanted.params.max_tokens == 0:
            self.ended[sequence_id] = ("length", self.now)
        else:
            self.sequences[sequence_id] = self.core.scheduler._sequences[sequence_id]

    def abort(self, sequence_id: int) -> None:
        del self.sequences[sequence_id]
        assert self.core.abort(sequence_id, self.now)
        self.ended[sequence_id] = ("abort", self.now)
        self.kept.pop(sequence_id, None)
        self._nobody_waits()

    def step(self) -> None:
        before = {i: (s.state, self._outputs(s)) for i, s in self.sequences.items()}
        planned, collected = len(self.executor.plans), len(self.executor.collected)
        self.metrics.observe(self.core.step(self.now))
        for i, (state, _) in before.items():
            if state is SequenceState.RUNNING and self.sequences[i].state is SequenceState.WAITING:
                self.counts["preemptions"] += 1
                self.given_up[i] = self.kept.pop(i)
        for plan in self.executor.plans[planned:]:
            self._planned(plan)
        for plan, result in self.executor.collected[collected:]:
            self._collected(plan, result, {i: outputs for i, (_, outputs) in before.items()})
            self.now = max(self.now, result.finished_s)

    # -- books --------------------------------------------------------------------------------

    def _planned(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            i = admission.sequence_id
            self.counts["resumes" if i in self.scheduled else "admissions"] += 1
            self.scheduled.setdefault(i, plan.planned_s)
            # Of a whole batch, some have no chunk in the plan with which they are seated.
            start = plan.starts[plan.sequence_ids == i]
            self.kept[i], self.seated_by[i] = int(start.sum()), plan.number
            self.counts["recomputed"] += max(0, self.given_up.pop(i, 0) - self.kept[i])
        self._close_blocked(plan.planned_s)
        if self.count(SequenceState.WAITING):
            self._blocked_since = plan.planned_s

    def _collected(self, plan: StepPlan, result: StepResult, before: dict[int, int]) -> None:
        for i, count in zip(plan.sequence_ids.tolist(), plan.counts.tolist(), strict=True):
            if i in self.kept and self.seated_by[i] <= plan.number:
                self.kept[i] += count
        for i, sequence in list(self.sequences.items()):
            if self._outputs(sequence) > before[i]:
                self.times[i].append(result.finished_s)
            if sequence.state is SequenceState.FINISHED:
                self.ended[i] = (self._reason(i), result.finished_s)
                del self.sequences[i]
                del self.kept[i]

    def _reason(self, i: int) -> str:
        """How this sequence must have ended, from what was asked and how many tokens it got."""
        asked, got = self.asked[i], len(self.times[i])
        most, true = asked.params.max_tokens, asked.true_output_tokens
        assert most is not None
        if asked.prompt_token_ids[0] == SICK and got < min(most, true or most):
            return "error"
        stops = true is not None and true <= most
        assert got == (true if stops else most)
        return "stop" if stops else "length"

    def _outputs(self, sequence: Sequence) -> int:
        running = self.core.scheduler.running
        if sequence.row >= 0:
            return int(running.known[sequence.row] - running.prompt[sequence.row])
        return len(sequence.outputs)

    def count(self, state: SequenceState) -> int:
        return sum(sequence.state is state for sequence in self.sequences.values())

    def _nobody_waits(self) -> None:
        if not self.count(SequenceState.WAITING):
            self._close_blocked(self.now)

    def _close_blocked(self, now: float) -> None:
        if self._blocked_since is not None:
            self.blocked_s += now - self._blocked_since
            self._blocked_since = None

    # -- the same for memory, slot by slot ------------------------------------------------------

    def held(self, group: int) -> set[int]:
        """Slots in a table, and slots that a step in flight may still touch, or copies from."""
        draining = {s for s, state in enumerate(self.cache.pool.slots[group].state) if state == SlotState.DRAINING}
        pinned = {int(s) for pins in self.cache.pins.values() for g, slots in pins if g == group for s in slots}
        first_ones = set[int]()  # which somebody has a copy of, and which another began
        if self.cache.sharing is not None:
            first_ones = {slot for g, slot in self.cache.sharing.doubles() if g == group}
        return set(self.listed(group)) | draining | pinned | first_ones

    def listed(self, group: int) -> Counter[int]:
        """Slots in tables, and in how many."""
        table = self.cache.tables[group]
        return Counter(int(slot) for row in range(self.cache.rows) for slot in table.row(row))

    def findable(self, group: int) -> set[int]:
        """Slots that nobody holds and whose content can be found again."""
        states = self.cache.pool.slots[group].state
        return {s for s, state in enumerate(states) if state == SlotState.READY} - self.held(group)

    def owners(self) -> dict[int, int]:
        """The group of every slab that has a held slot."""
        return {
            slot // layout.blocks_per_slab: group
            for group, layout in enumerate(self.cache.layout.groups)
            for slot in self.held(group)
        }

    def free(self, group: int) -> int:
        per_slab, owners, held = self.cache.layout.groups[group].blocks_per_slab, self.owners(), self.held(group)
        free = 0
        for slab in range(self.cache.pool.slabs):
            if slab not in owners:
                free += per_slab
            elif owners[slab] == group and not self.cache.pool.contiguous:
                free += per_slab - sum(slab * per_slab + i in held for i in range(per_slab))
        return free

    def waste(self) -> dict[str, float]:
        lost: dict[str, float] = dict.fromkeys(("reserved", "internal", "padding", "external"), 0)
        owners = self.owners()
        for group, (layout, table) in enumerate(zip(self.cache.layout.groups, self.cache.tables, strict=True)):
            token_bytes = layout.block_bytes // layout.block_tokens
            seen = set[int]()
            for row in range(self.cache.rows):
                computed = int(self.cache.committed[row])
                for block, slot in enumerate(table.row(row).tolist()):
                    if slot in seen:
                        continue
                    seen.add(slot)
                    empty = min(layout.block_tokens, max(0, (block + 1) * layout.block_tokens - computed))
                    lost["reserved" if empty == layout.block_tokens else "internal"] += empty * token_bytes
            mine = {slab for slab, owner in owners.items() if owner == group}
            kept = sum(slot // layout.blocks_per_slab in mine for slot in self.findable(group))
            full = (len(self.held(group)) + kept) * layout.block_bytes
            lost["padding"] += len(mine) * self.cache.layout.slab_bytes - full
        if self.cache.pool.contiguous:
            marks = "".join("x" if slab in owners else "." for slab in range(self.cache.pool.slabs))
            longest = max(map(len, marks.split("x")))
            lost["external"] = (marks.count(".") - longest) * self.cache.layout.slab_bytes
        return lost

    def busy_ratio(self, window_s: float) -> float:
        """The measure of the union of all [planned, finished], clipped to the window."""
        window = min(window_s, self.now - self.began_s)
        if window <= 0:
            return 0.0
        low, covered = self.now - window, 0.0
        for plan, result in self.executor.collected:  # both ends only grow
            covered += max(0.0, result.finished_s - max(low, plan.planned_s))
            low = max(low, result.finished_s)
        return covered / window


def assert_histogram(series: Series, name: str, expected: list[float], **labels: str) -> None:
    assert value(series, f"{name}_count", **labels) == len(expected), name
    assert math.isclose(value(series, f"{name}_sum", **labels), math.fsum(expected), rel_tol=1e-9, abs_tol=1e-6), name
    buckets: dict[str, float] = {}
    for (found, pairs), number in series.items():
        rest = dict(pairs)
        bound = rest.pop("le", "")
        if found == f"octavo_{name}_bucket" and rest == labels:
            buckets[bound] = number
    assert len(buckets) > 10
    for bound, number in buckets.items():
        edge = float(bound)
        # A time within rounding of a bound may fall on either side; a whole number may not.
        near = sum(math.isclose(v, edge, rel_tol=1e-6, abs_tol=1e-9) and v != int(v) for v in expected)
        assert abs(number - sum(v <= edge for v in expected)) <= near, (name, bound)


def positions(plans: list[StepPlan], asked: dict[int, Request]) -> dict[str, list[float]]:
    """Positions of each kind in every plan: a single one past the prompt is decode."""
    kinds: dict[str, list[float]] = {"decode": [], "prefill": []}
    for plan in plans:
        decode = sum(
            count == 1 and start >= asked[i].prompt_tokens
            for i, start, count in zip(plan.sequence_ids.tolist(), plan.starts, plan.counts, strict=True)
        )
        kinds["decode"].append(decode)
        kinds["prefill"].append(int(np.sum(plan.counts)) - decode)
    return kinds


def differences(times: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def arguments(world: dict[str, Any]) -> str:
    return "-".join(str(v) for v in world.values())
