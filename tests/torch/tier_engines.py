"""Engines over tiny models with a host and a disk below the device, where whatever is free is not a number.

`TieredEngine` runs conversations to their end and keeps what happened. The moment a slot of either arena is given up
its bytes are spoilt, so that a copy which is skipped, late, or made from the wrong place changes tokens. Every
accounting invariant runs after each step, and a run that takes too long fails rather than hangs.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Self

import numpy as np
from hard_run import Careless
from test_reuse import BLOCK
from tiny import Bench

from octavo.memory.check import is_empty
from octavo.memory.check_tiers import at_rest
from octavo.memory.keys import Digest, KeySpace, sha256
from octavo.memory.tiering import Below, tiered_cache
from octavo.models.verify import SPOILT
from octavo.policy.bundle import Policies
from octavo.policy.chaos import Chaos
from octavo.policy.eviction import EVICTIONS, eviction_named
from octavo.policy.placement import PLACEMENTS, placement_named
from octavo.policy.preemption import PREEMPTIONS, preemption_named
from octavo.policy.rates import Rates
from octavo.policy.reuse import NoReuse, PrefixReuse
from octavo.runtime.tiers import DiskAsked, open_tiers
from octavo.scheduling.audit import Audit, check_all
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Admitted, Arrived, Event, Finished, Preempted, Restarted, StepTokens, Transferred
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request
from octavo.scheduling.request import SamplingParams as Params
from octavo.scheduling.scheduler import Scheduler

ROWS, BUDGET = 8, 24
PATIENCE_S = 60.0
AXES: dict[str, tuple[str, ...]] = {
    "placement": (*PLACEMENTS, "chaos"),
    "eviction": (*EVICTIONS, "chaos"),
    "host_eviction": (*EVICTIONS, "chaos"),
    "disk_eviction": (*EVICTIONS, "chaos"),
    "preemption": (*PREEMPTIONS, "chaos"),
}


class Eager(Careless):
    guarantees = False


def costly(first: int, end: int) -> float:
    """Seconds to compute positions: more than any copy takes, but for the first few, which cost nothing."""
    return 1e6 * max(0, end - max(first, 2 * BLOCK))


def poison(arena, pool) -> None:
    """Spoil what is free, now and whenever something is given up."""
    arena.bytes.fill_(SPOILT)
    give, layout = pool.give, arena.layout

    def spoil_and_give(group, slots):
        for slot in slots.tolist():
            start = layout.address(group, slot)
            arena.bytes[start : start + layout.groups[group].block_bytes].fill_(SPOILT)
        give(group, slots)

    pool.give = spoil_and_give


class TieredEngine:
    """Without `path` there is no disk. What a seam is called `chaos` there is random, by `seed`."""

    def __init__(
        self,
        made: Bench,
        *,
        slabs: int,
        rows: int = ROWS,
        host_slabs: int = 400,
        path: Path | None = None,
        disk_bytes: int = 64 << 20,
        shared: bool = False,
        placement: str = "write_back",
        eviction: str = "lru",
        host_eviction: str = "lru",
        disk_eviction: str = "lru",
        preemption: str = "recompute",
        reuse: bool = True,
        depth: int = 0,
        block_tokens: int = BLOCK,
        model: str = "tiny",
        digest: Digest = sha256,
        faults=None,
        timeout_s: float | None = 30.0,
        seed: int = 0,
    ) -> None:
        executor, layout = made.executor(block_tokens=block_tokens, n_slabs=slabs, rows=rows)
        keys = KeySpace(f"{model} {layout.signature}", block_tokens, digest) if reuse else None
        self.path = path
        disk = None if path is None else DiskAsked(path, disk_bytes, shared)
        fingerprint = keys.fingerprint if keys else ""
        self.tiers = open_tiers(
            executor.arena, host_slabs, fingerprint=fingerprint, disk=disk, faults=faults, look_s=0.02
        )
        below = Below(
            host_slabs,
            Chaos(seed) if placement == "chaos" else placement_named(placement),
            Chaos(seed + 1) if host_eviction == "chaos" else eviction_named(host_eviction),
            disk_slots=self.tiers.disk_slots,
            stored=self.tiers.stored,
            timeout_s=timeout_s,
            rates=Rates(costly),
            disk_eviction=Chaos(seed + 3) if disk_eviction == "chaos" else eviction_named(disk_eviction),
        )
        chosen = Chaos(seed + 2) if eviction == "chaos" else eviction_named(eviction)
        self.cache, self.tiering = tiered_cache(layout, slabs, rows, below, keys=keys, eviction=chosen)
        self.executor, self.layout = executor, layout
        poison(executor.arena, self.cache.pool)
        poison(self.tiers.host, self.tiering.host.pool)
        self.copied: Counter[tuple[str, int]] = Counter()
        self._count_copies()
        policies = Policies(
            admission=Eager(),
            preemption=Chaos(seed + 3) if preemption == "chaos" else preemption_named(preemption),
            reuse=PrefixReuse(2) if reuse else NoReuse(),
        )
        scheduler = Scheduler(self.cache, Limits(rows, BUDGET, 256, made.vocab_size), policies, self.tiering)
        self.core = EngineCore(scheduler, executor, depth=depth, audit=Audit(full_every=1), mover=self.tiers.mover)
        self.events: list[Event] = []

    def _count_copies(self) -> None:
        """Count blocks as the copier is given them, apart from what the mover says of them."""
        copier = self.tiers.mover.copier
        copy = copier.copy

        def counted(down, group, sources, targets, after=None):
            copy(down, group, sources, targets, after)
            self.copied["demote" if down else "promote", group] += len(sources)

        copier.copy = counted

    # -- driving ------------------------------------------------------------------------------

    def ask(self, prompt: list[int], wanted: int, salt: str = "") -> int:
        params = Params(temperature=0.0, max_tokens=wanted, seed=0).with_defaults({})
        request = Request(request_id="r", prompt_token_ids=np.asarray(prompt, np.int32), params=params, cache_salt=salt)
        return self.core.submit(request, time.monotonic())

    def step(self) -> list[Event]:
        new = self.core.step(time.monotonic())
        self.events += new
        return new

    def finish(self) -> None:
        """Until nothing is left to do; what is late has ended too."""
        until = time.monotonic() + PATIENCE_S
        while self.core.has_work or self.tiering.pending:
            assert time.monotonic() < until, "still at work"
            self.step()
        self.events += self.core.scheduler.drain_events()

    def run(self, prompts: list[list[int]], wanted: int, salt: str = "") -> list[list[int]]:
        made = [self.ask(prompt, wanted, salt) for prompt in prompts]
        first = len(self.events)
        self.finish()
        tokens: dict[int, list[int]] = {number: [] for number in made}
        for event in self.events[first:]:
            if isinstance(event, StepTokens):
                for number, token in event.pairs():
                    if number in tokens:
                        tokens[number].append(token)
        return [tokens[number] for number in made]

    def assert_at_rest(self, *, counted: bool = True) -> None:
        """Nothing is held or under way anywhere, and, if `counted`, what events tell is what was copied."""
        check_all(self.core.scheduler)
        assert is_empty(self.cache)
        assert at_rest(self.tiering)
        if counted:
            self._assert_counted()

    def _assert_counted(self) -> None:
        told: Counter[tuple[str, int]] = Counter()
        for event in self.of(Transferred):
            told[event.route, event.group] += event.blocks
            assert event.bytes == event.blocks * self.layout.groups[event.group].block_bytes
        for group in range(len(self.layout.groups)):
            for route in ("demote", "promote"):
                assert told[route, group] == self.copied[route, group]
            if self.tiers.disk:
                stats = self.tiers.disk[group].stats()
                assert (told["store", group], told["load", group]) == (stats.writes, stats.hits)
                size = self.layout.groups[group].block_bytes
                assert (stats.bytes_written, stats.bytes_read) == (stats.writes * size, stats.hits * size)

    def close(self) -> None:
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- looking ------------------------------------------------------------------------------

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def cached(self, number: int) -> dict[str, int]:
        """Prompt tokens that it did not compute, by tier."""
        return next(event.record.cached_tokens for event in self.of(Finished) if event.sequence_id == number)

    def tally(self) -> Counter[str]:
        """How often each thing happened."""
        found: Counter[str] = Counter()
        for event in self.events:
            match event:
                case Preempted():
                    found[event.action] += 1
                case Transferred():
                    found[event.route] += event.blocks
                    for reason in event.reasons:
                        found[f"{event.route}: {reason}"] += 1
                case Admitted():
                    for tier, tokens in event.cached_by_tier:
                        found[f"{tier} tokens"] += tokens
                    found["resumed"] += event.restored_tokens > 0
                case Restarted():
                    found[f"restarted: {event.reason}"] += 1
                case Arrived():
                    found["arrived"] += 1
        host, disk = self.tiering.evicted_blocks
        found["evicted from the host"], found["evicted from the disk"] = host, disk
        return found


# -- conversations ----------------------------------------------------------------------------


def converse(run, *, turns: int = 3, wanted: int = 10) -> list[list[int]]:
    """Eight conversations of several turns, each with facts of its own and an opening that all share; their texts."""
    random = np.random.default_rng(11)
    opening = random.integers(3, 120, size=9).tolist()
    texts = [opening + random.integers(3, 120, size=5 + i).tolist() for i in range(8)]
    for turn in range(turns):
        # Back and forth, so that some come again before they had to go.
        order = texts if turn % 2 == 0 else texts[::-1]
        for text, answer in zip(order, run(order, wanted), strict=True):
            text += answer + random.integers(3, 120, size=3).tolist()
    return texts


LONGEST = 9 + 12 + 3 * (10 + 3)


def room_for_two(layout) -> int:
    """Slabs that hold two of the conversations at their longest."""
    return 2 * layout.slabs_for(LONGEST, BUDGET)
