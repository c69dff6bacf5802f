"""The engine under pressure: what a step holds is weighed, what nobody holds is overwritten, and it preempts.

`hard_run` puts prompts through the whole engine in a pool so small, and with an admission so careless, that
sequences are preempted; before every step it fills all free memory with what is not a number, and holds the
bytes of each sequence against its geometry.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.geometry.dtypes import FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.state import Borrowed, Constant, Stateless, parts_of
from octavo.memory.cache import KVCache
from octavo.memory.check import is_empty
from octavo.memory.pool import NO_OWNER
from octavo.memory.slots import SlotState
from octavo.models.verify import SPOILT
from octavo.policy.bundle import Policies
from octavo.scheduling.audit import Audit
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Finished, Preempted, StepTokens
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request, SamplingParams
from octavo.scheduling.scheduler import Scheduler

BUDGET = 8
"""Tokens of a step: few, so that several sequences run at once in a pool that is sized for one."""


class Careless:
    """Admits whoever waits, whether there is room or not."""

    name = "careless"
    guarantees = False

    def admits(self, view):
        return True


class Counting(KVCache):
    """Counts the blocks that sequences gave up and went on."""

    given_up = 0

    def slide(self, rows):
        before = sum(int(table.firsts.sum()) for table in self.tables)
        super().slide(rows)
        self.given_up += sum(int(table.firsts.sum()) for table in self.tables) - before


def bytes_held(layers, committed, upto, block_tokens):
    """Of a sequence with a plan up to position `upto`, known to have computed `committed`, from its geometry alone."""
    total = 0
    for state in layers:
        for part in parts_of(state):
            if isinstance(part, Constant):
                total += part.bytes_per_sequence
            elif not isinstance(part, (Borrowed, Stateless)):
                blocks = -(-upto // block_tokens) - part.first_readable(committed) // block_tokens
                total += blocks * block_tokens * part.bytes_per_token
    return total


class Watching:
    """An executor that spoils free memory and weighs what is held before it lets a plan run."""

    def __init__(self, executor, cache, layers, block_tokens):
        self._executor, self._cache, self._layers, self._block_tokens = executor, cache, layers, block_tokens
        self.weighed = 0
        self.behind = 0
        """The most positions that were computed and not yet learned of."""
        self.most_bytes = {}

    def submit(self, plan):
        self._spoil()
        layout = self._cache.layout
        for sequence, row, start, count in zip(
            plan.sequence_ids.tolist(), plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True
        ):
            tables = zip(self._cache.tables, layout.groups, strict=True)
            held = sum(int(table.held[row]) * group.block_bytes for table, group in tables)
            committed = int(self._cache.committed[row])
            assert held == bytes_held(self._layers, committed, start + count, self._block_tokens)
            self.behind = max(self.behind, start - committed)
            self.most_bytes[sequence] = max(held, self.most_bytes.get(sequence, 0))
            self.weighed += 1
        self._executor.submit(plan)

    def _spoil(self):
        pool, arena = self._cache.pool, self._executor.arena
        layout = arena.layout
        for slab in np.flatnonzero(pool.owner == NO_OWNER).tolist():
            arena.bytes[slab * layout.slab_bytes : (slab + 1) * layout.slab_bytes].fill_(SPOILT)
        for group, columns in enumerate(pool.slots):
            per_slab = layout.groups[group].blocks_per_slab
            owned = np.repeat(pool.owner == group, per_slab)
            for slot in np.flatnonzero(owned & (columns.state == SlotState.EMPTY)).tolist():
                start = layout.address(group, slot)
                arena.bytes[start : start + layout.groups[group].block_bytes].fill_(SPOILT)

    def collect(self):
        return self._executor.collect()

    def close(self):
        self._executor.close()


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    tokens: list[list[int]]
    preemptions: int
    given_up: int
    weighed: int
    most_bytes: list[int]
    """Per sequence."""
    slabs: int
    empty: bool


def hard_run(bench, prompts, wanted, *, depth=0, budget=BUDGET, block_tokens=4, rows=5, n_slabs=None):
    """Greedy tokens of every prompt. The pool holds the longest sequence, and nothing beside it, unless told."""
    layers = geometry_from_config(bench.config, FP32, model_dtype=FP32).layers
    _, layout = bench.executor(block_tokens=block_tokens, n_slabs=1, rows=rows)
    longest = max(map(len, prompts)) + wanted - 1
    slabs = n_slabs or layout.slabs_for(longest, budget)
    executor, layout = bench.executor(block_tokens=block_tokens, n_slabs=slabs, rows=rows)
    cache = Counting(layout, slabs, rows)
    watching = Watching(executor, cache, layers, block_tokens)
    policies = Policies(admission=Careless())
    limits = Limits(rows, budget, 128, bench.vocab_size)
    core = EngineCore(Scheduler(cache, limits, policies), watching, depth=depth, audit=Audit())
    params = SamplingParams(temperature=0.0, max_tokens=wanted, seed=0).with_defaults({})
    made = [
        core.submit(Request(request_id=str(i), prompt_token_ids=np.asarray(p, np.int32), params=params), 0.0)
        for i, p in enumerate(prompts)
    ]
    outputs = {sequence: [] for sequence in made}
    preemptions = finished = 0
    for now in range(10_000):
        if not core.has_work:
            break
        for event in core.step(float(now)):
            preemptions += isinstance(event, Preempted)
            finished += isinstance(event, Finished)
            if isinstance(event, StepTokens):
                for sequence, token in zip(event.sequence_ids.tolist(), event.tokens.tolist(), strict=True):
                    outputs[sequence].append(token)
    assert finished == len(made)
    assert (watching.behind > 0) == (depth > 0)
    return Outcome(
        [outputs[sequence] for sequence in made],
        preemptions,
        cache.given_up,
        watching.weighed,
        [watching.most_bytes[sequence] for sequence in made],
        slabs,
        is_empty(cache),
    )
