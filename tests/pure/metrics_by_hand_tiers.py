"""What the metrics of tiers must say, computed a second time without the fold.

`Watched` listens at the seams of a toy world, to what is asked of its mover and what that answers, to where blocks lie
when somebody is looked up, and to who takes a seat. `Slots` counts memory slot by slot. Neither looks at an event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from tests.pure.metrics_by_hand import MODEL, ByHand
from tests.pure.random_tier_worlds import _ask_something, drawn
from tests.pure.test_metrics_reuse import alike, words
from tests.pure.tier_worlds import TierWorld, text

from octavo.memory.nodes import Node
from octavo.memory.prefix import Match
from octavo.memory.transfers import Ended
from octavo.observe.metrics import Metrics
from octavo.observe.names import FAILURES
from octavo.scheduling.plan import StepPlan

TIERS = ("device", "host", "disk")


@dataclass
class LookUp:
    asked: int
    known: int
    found: int
    places: list[tuple[int, ...]]
    """The tier that each block of the found start had to come from, group by group; -1: not needed."""

    def by_tier(self, tokens: int, size: int) -> dict[str, int]:
        told: Counter[str] = Counter()
        for index in range(-(-tokens // size)):
            told[TIERS[max(0, *self.places[index])]] += min(size, tokens - index * size)
        return dict(told)


@dataclass
class Books:
    """What is to be counted. `watch` it into a world before anything is asked."""

    counts: Counter[str] = field(default_factory=Counter)
    promotions: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)


class Watched:
    """A world whose every seam is listened at, with metrics beside it."""

    def __init__(self, world: TierWorld) -> None:
        self.world, self.books = world, Books()
        self.metrics = Metrics(world.core, MODEL, clock=lambda: world.time)
        self.told = 0
        self.looked_up: dict[int, LookUp] = {}
        """By the chain that was looked up last."""
        self.to_come: dict[int, tuple[LookUp | None, int, float]] = {}
        """By sequence: what it waits for, how many positions, since when."""
        self.seated = set[int]()
        self._listen_to_copies()
        self._listen_to_look_ups()
        self._listen_to_the_scheduler()

    def _listen_to_copies(self) -> None:
        world, counts = self.world, self.books.counts
        poll = world.mover.poll

        def polled(now: float) -> list[Any]:
            notices = poll(now)
            for notice in notices:
                if isinstance(notice, Ended):
                    self._ended(notice)
            return notices

        world.mover.poll = polled
        for tier, shelf in (("device", world.cache.sharing), ("host", world.tiering.host)):
            shelf = getattr(shelf, "shelf", None)
            if shelf is not None:
                self._count_calls(shelf.eviction, "gone", f"evicted {tier}")
        disk = world.tiering.disk
        if disk is not None:
            take = disk.take

            def taken(group: int) -> int | None:
                before = disk.blocks[group]
                slot = take(group)
                counts["evicted disk"] += before - disk.blocks[group]
                return slot

            disk.take = taken  # type: ignore[method-assign]

    def _count_calls(self, owner: Any, name: str, what: str) -> None:
        inner = getattr(owner, name)

        def called(*arguments: Any) -> Any:
            self.books.counts[what] += 1
            return inner(*arguments)

        setattr(owner, name, called)

    def _ended(self, notice: Ended) -> None:
        books, order = self.books, notice.order
        whole = sum(not reason for reason in notice.reasons)
        books.counts[f"{order.route} blocks"] += whole
        books.counts[f"{order.route} bytes"] += whole * self.world.layout.groups[order.group].block_bytes
        books.counts[f"{order.route} ends"] += 1
        for reason in notice.reasons:
            if reason:
                books.counts[f"{order.route} {reason if reason in FAILURES else 'error'}"] += 1
        if order.route == "promote" and whole:
            books.promotions.append(0.001)

    def _listen_to_look_ups(self) -> None:
        sharing, tiering = self.world.cache.sharing, self.world.tiering
        if sharing is None:
            return
        for owner in (sharing, tiering):
            match = owner.match  # type: ignore[attr-defined]

            def matched(chain: Any, tokens: Any, limit: int, *tiers: int, match: Any = match) -> Match:
                found: Match = match(chain, tokens, limit, *tiers)
                self.looked_up[id(chain)] = self._look_up(chain, tokens[:limit], found)
                return found

            owner.match = matched  # type: ignore[method-assign, union-attr]

    def _look_up(self, chain: Any, tokens: Sequence[int], found: Match) -> LookUp:
        assert self.world.cache.sharing is not None
        nodes = self.world.cache.sharing.directory.nodes()
        known = max((alike(words(node), tokens) for node in nodes if root_of(node).key == chain.root[0]), default=0)
        path = [*found.path, *([] if found.partial is None else [found.partial])]
        places = [self._places(node, found.tokens, len(found.path)) for node in path]
        return LookUp(len(tokens), known, found.tokens, places)

    def _places(self, node: Node, tokens: int, whole: int) -> tuple[int, ...]:
        """Where each group has what a start after so many tokens reads of this block."""
        tiers = []
        for group, layout in enumerate(self.world.layout.groups):
            if layout.block_tokens:
                needed = node.index >= int(layout.first_block(np.array([tokens]))[0])
            else:
                needed = node.index == whole - 1
            tiers.append(next(t for t, place in enumerate(node.places) if place[group] >= 0) if needed else -1)
        return tuple(tiers)

    def _listen_to_the_scheduler(self) -> None:
        world = self.world
        scheduler, tiering, submit = world.scheduler, world.tiering, world.executor.submit
        welcome, settle, push = scheduler.welcome, tiering.settle, scheduler.waiting.push

        def welcomed(sequence: Any, draft: Any, start: Any) -> None:
            welcome(sequence, draft, start)
            self._seated(sequence, draft.now)

        def settled(notices: Any) -> Any:
            arrivals = settle(notices)
            for row in arrivals.rows:
                self._came(int(scheduler.running.sequence_id[row]), "")
            for row, reason in arrivals.lost:
                self._came(int(scheduler.running.sequence_id[row]), reason)
            return arrivals

        def pushed(sequence: Any, *, returned: bool = False) -> None:
            push(sequence, returned=returned)
            self.books.counts["returned"] += returned
            self.to_come.pop(sequence.sequence_id, None)

        def submitted(plan: StepPlan) -> None:
            self.books.plans.append(plan)
            submit(plan)

        scheduler.welcome = welcomed  # type: ignore[method-assign]
        tiering.settle = settled  # type: ignore[method-assign]
        scheduler.waiting.push = pushed  # type: ignore[method-assign]
        world.executor.submit = submitted  # type: ignore[method-assign]
        park = tiering.parking.park

        def parked(row: int) -> Any:
            made = park(row)
            self.books.counts["offload"] += made is not None
            return made

        tiering.parking.park = parked  # type: ignore[method-assign]

    def _seated(self, sequence: Any, now: float) -> None:
        number, running = sequence.sequence_id, self.world.scheduler.running
        self.books.counts["again" if number in self.seated else "first"] += 1
        self.seated.add(number)
        start = int(running.computed[sequence.row])
        looked_up = None if sequence.chain is None else self.looked_up.pop(id(sequence.chain), None)
        if running.loading[sequence.row]:
            self.to_come[number] = (looked_up, start, now)
        elif looked_up is not None:
            self._count(looked_up, start)

    def _came(self, number: int, reason: str) -> None:
        looked_up, start, since = self.to_come.pop(number)
        self.books.stalls.append(self.world.time - since)
        if reason:
            self.books.counts[f"restart {reason if reason in FAILURES else 'error'}"] += 1
        if looked_up is not None:
            self._count(looked_up, start, reason)

    def _count(self, looked_up: LookUp, start: int, reason: str = "") -> None:
        counts, by_tier = self.books.counts, looked_up.by_tier(start, self.world.block_tokens)
        counts["queries"] += looked_up.asked
        counts["absent"] += looked_up.asked - looked_up.known
        counts["incomplete"] += looked_up.known - looked_up.found
        counts["no_room"] += looked_up.found - start
        if reason:
            lowest = "disk" if "disk" in by_tier else "host"
            counts[f"{lowest} {reason if reason in FAILURES else 'error'}"] += start
        else:
            for tier, tokens in by_tier.items():
                counts[f"{tier} hits"] += tokens

    # -- driving ------------------------------------------------------------------------------

    def run(self, seed: int, *, requests: int, aborts: float = 0.0, resets: float = 0.005, every: Any = None) -> None:
        rng, world = Random(f"watched {seed}"), self.world
        openings = [text(rng.randint(1, 17), rng.randrange(10**6)) for _ in range(3)]
        left = requests
        for operation in range(5_000):
            if left and len(world.scheduler.waiting) < 8 and rng.random() < 0.5:
                left -= 1
                _ask_something(world, rng, openings)
            if world.asked and rng.random() < aborts:
                world.core.abort(rng.choice(list(world.asked)), world.time)
            if rng.random() < resets:
                world.core.reset_kept(world.time)
            world.step()
            self.observe()
            if every is not None and operation % 3 == 0:
                every(self)
            if not left and not world.core.has_work:
                break
        world.finish()
        self.observe()
        world.assert_right()

    def observe(self) -> None:
        self.metrics.observe(self.world.events[self.told :])
        self.told = len(self.world.events)


def root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node


class Slots(ByHand):
    """The books of memory alone, with what copies and suspensions hold."""

    def __init__(self, world: TierWorld) -> None:
        self.world, self.cache = world, world.cache

    def suspended(self, group: int, tier: str) -> list[int]:
        return [s for value in self.cache.suspensions.values() for at, s in value.slots[group] if at == tier]

    def copied(self, group: int, tier: int) -> set[int]:
        return {slot for at, of, slot in self.world.tiering.held() if (at, of) == (tier, group)}

    def held(self, group: int) -> set[int]:
        return super().held(group) | set(self.suspended(group, "device")) | self.copied(group, 0)

    def in_sequences(self, group: int) -> Counter[int]:
        return self.listed(group) + Counter(self.suspended(group, "device"))

    def below(self, tier: int) -> tuple[int, int]:
        """Bytes used and bytes cached."""
        used = kept = 0
        for group, layout in enumerate(self.cache.layout.groups):
            busy = self.copied(group, tier) | (set(self.suspended(group, "host")) if tier == 1 else set())
            if tier == 1:
                sharing = self.cache.sharing
                found = {} if sharing is None else {n.places[1][group]: n for n in sharing.directory.nodes()}
                free = set(found) - {-1} - busy
            else:
                assert self.world.tiering.disk is not None
                free = set(self.world.tiering.disk.found_slots(group)) - busy
            used += len(busy) * layout.block_bytes
            kept += len(free) * layout.block_bytes
        return used, kept


def a_world(seed: int, **fixed: Any) -> Watched:
    return Watched(TierWorld(**drawn(Random(f"metrics {seed}"), fixed)))
