"""Worlds with tiers below the device, for the pure tests: an engine over the toy model, and movers that copy its cells.

`TierWorld` is driven by hand, `HandMover` ends each copy when it is told to. Every invariant runs after each step, and
`assert_right` holds answers and pools against what they must be. Worlds drawn from seeds are in random_tier_worlds.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from tests.pure.worlds import VOCAB, endings, outputs

from octavo.memory.check import is_empty
from octavo.memory.check_tiers import at_rest
from octavo.memory.keys import Chain, Digest, KeySpace, sha256
from octavo.memory.layout import Layout
from octavo.memory.tiering import Below, tiered_cache
from octavo.memory.transfers import Order
from octavo.memory.values import TIERS
from octavo.policy.admission import admission_named
from octavo.policy.bundle import Policies
from octavo.policy.eviction import Eviction, eviction_named
from octavo.policy.placement import Placement, placement_named
from octavo.policy.preemption import PreemptionAction, preemption_named
from octavo.policy.rates import Rates
from octavo.policy.reuse import NoReuse, PrefixReuse
from octavo.scheduling.audit import Audit, check_all
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Event, Transferred
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.toy_laws import toy_layout
from octavo.simulate.toy_model import Answer, ToyExecutor, toy_model, toy_request
from octavo.simulate.toy_mover import DiskGroup, ToyFaults, ToyMover

NEVER = 10**9


class HandMover(ToyMover):
    """Ends an order of a route in `holds`, or lets its deadline pass, when it is told to; others as they come."""

    holds: frozenset[str] = frozenset()
    failing: frozenset[int] = frozenset()

    def submit(self, order: Order) -> None:
        super().submit(order)
        if order.route in self.holds:
            self._open[order.number].due = NEVER

    def under_way(self, *routes: str) -> list[Order]:
        return [one.order for one in self._open.values() if not routes or one.order.route in routes]

    def end(self, *routes: str, failing: Sequence[int] = ()) -> int:
        """Let all of these routes end by the next step, but for the blocks at `failing` of each; returns how many."""
        self.failing = frozenset(failing)
        orders = self.under_way(*routes)
        for order in orders:
            self._open[order.number].due = 0
        return len(orders)

    def fails(self, order: Order, i: int) -> bool:
        return i in self.failing

    def pass_deadline(self, *routes: str) -> None:
        for order in self.under_way(*routes):
            self._open[order.number].told_late = 0


class TierWorld:
    """An engine over the toy model, with a host and, where it has slots, a disk.

    `left` is what the disk of an earlier world holds: `world.mover.disk`.
    """

    def __init__(
        self,
        *,
        heads: Sequence[int] = (2,),
        laws: Sequence[str] = (),
        block_tokens: int = 4,
        slab_bytes: int = 0,
        slabs: int = 8,
        host_slabs: int = 32,
        disk_slots: int | Sequence[int] = 0,
        rows: int = 4,
        budget: int = 64,
        context: int = 48,
        depth: int = 0,
        reuse: bool = True,
        model_name: str = "toy",
        digest: Digest = sha256,
        placement: str | Placement = "write_back",
        preemption: str | PreemptionAction = "recompute",
        admission: str = "max_utilization",
        eviction: str | Eviction = "lru",
        host_eviction: str | Eviction = "lru",
        disk_eviction: str | Eviction = "lru",
        rates: Rates | None = None,
        faults: ToyFaults | None = None,
        by_hand: bool = False,
        seed: int = 0,
        ends_every: int = 0,
        fails_every: int = 0,
        left: Sequence[DiskGroup] = (),
        audit: bool = True,
    ) -> None:
        self.layout: Layout = toy_layout(heads, block_tokens, laws, most_slab_bytes=slab_bytes)
        self.model = toy_model(self.layout, ends_every, fails_every)
        self.reuse, self.block_tokens = reuse, block_tokens
        slots = [disk_slots] * len(heads) if isinstance(disk_slots, int) else disk_slots
        below = Below(
            host_slabs,
            placement_named(placement) if isinstance(placement, str) else placement,
            eviction_named(host_eviction) if isinstance(host_eviction, str) else host_eviction,
            tuple(slots) if any(slots) else (),
            tuple(tuple((key, slot) for slot, (key, _) in group.items()) for group in left),
            rates=rates or Rates(),
            disk_eviction=eviction_named(disk_eviction) if isinstance(disk_eviction, str) else disk_eviction,
        )
        self.cache, self.tiering = tiered_cache(
            self.layout,
            slabs,
            rows,
            below,
            keys=KeySpace(model_name, block_tokens, digest) if reuse else None,
            eviction=eviction_named(eviction) if isinstance(eviction, str) else eviction,
        )
        policies = Policies(
            admission=admission_named(admission),
            preemption=preemption_named(preemption) if isinstance(preemption, str) else preemption,
            reuse=PrefixReuse(2) if reuse else NoReuse(),
        )
        self.executor = ToyExecutor(self.model, self.layout, slabs, rows)
        kind = HandMover if by_hand else ToyMover
        self.mover: Any = kind(self.executor, host_slabs, below.disk_slots, faults=faults, seed=seed, disk=left)
        self.limits = Limits(rows, max(rows, budget), context, VOCAB)
        self.scheduler = Scheduler(self.cache, self.limits, policies, self.tiering)
        self.core = EngineCore(
            self.scheduler,
            self.executor,
            depth=depth,
            audit=Audit(full_every=1) if audit else None,
            mover=self.mover,
        )
        self.asked: dict[int, Request] = {}
        self.events: list[Event] = []
        self.time = 0.0

    # -- driving ------------------------------------------------------------------------------

    def ask(self, prompt: list[int], max_tokens: int = 1, salt: str = "", **fields: Any) -> int:
        request = toy_request(f"r{len(self.asked)}", prompt, max_tokens, cache_salt=salt, **fields)
        number = self.core.submit(request, self.time)
        self.asked[number] = request
        return number

    def step(self, steps: int = 1) -> list[Event]:
        new: list[Event] = []
        for _ in range(steps):
            new += self.core.step(self.time)
            self.time += 1.0
        self.events += new
        return new

    def until(self, kind: type, most: int = 200) -> Any:
        """Step until an event of this kind; returns the first."""
        for _ in range(most):
            for event in self.step():
                if isinstance(event, kind):
                    return event
        raise AssertionError(f"no {kind.__name__} in {most} steps")

    def finish(self, most: int = 4_000) -> None:
        """Step until nothing is left to do, and what copies are late have ended too."""
        for _ in range(most):
            if not self.core.has_work and not self.tiering.pending:
                break
            self.step()
        assert not self.core.has_work, f"still working after {most} steps"
        assert not self.tiering.pending, f"copies are still under way after {most} steps"
        self.events += self.scheduler.drain_events()

    def answer_all(self, most: int = 200) -> None:
        """Step until everybody has an answer, whatever copies are still under way."""
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"somebody has no answer after {most} steps")

    def serve(self, prompt: list[int], max_tokens: int = 1, salt: str = "") -> int:
        """One request, alone, to its end."""
        number = self.ask(prompt, max_tokens, salt)
        self.finish()
        return number

    def crowd_out(self, blocks: int = 0) -> None:
        """Other text takes all the room on the device, so that what was kept there goes."""
        size = self.block_tokens
        longest = min(self.limits.max_model_len - 2, self.cache.max_tokens_per_sequence() - 1)
        left = blocks or self.cache.pool.slabs
        while left > 0:
            tokens = min(longest, left * size)
            self.serve(text(tokens, 1000 + len(self.asked)), 1)
            left -= tokens // size

    def hold(self, *routes: str) -> None:
        """Copies of these routes end by hand from now on, others as they come."""
        self.mover.holds = frozenset(routes)

    # -- looking ------------------------------------------------------------------------------

    def tokens(self, number: int) -> list[int]:
        return outputs(self.events).get(number, [])

    def cached(self, number: int) -> dict[str, int]:
        """Prompt tokens that it did not compute, by tier."""
        return endings(self.events)[number].record.cached_tokens

    def of(self, kind: type, number: int | None = None) -> list[Any]:
        found = [event for event in self.events if isinstance(event, kind)]
        return found if number is None else [event for event in found if event.sequence_id == number]

    def kept_in(self, prompt: list[int], salt: str = "") -> list[set[str]]:
        """The tiers in which each whole block of a text can be found, in all groups."""
        by_tier = [self.slots_of(prompt, tier, salt) for tier in range(2 + (self.tiering.disk is not None))]
        return [
            {name for name, slots in zip(TIERS, of_block, strict=False) if min(slots) >= 0}
            for of_block in zip(*by_tier, strict=True)
        ]

    def slots_of(self, prompt: list[int], tier: int, salt: str = "") -> list[list[int]]:
        """Where each whole block of a text lies in a tier, by block and group; -1 where it does not."""
        sharing = self.cache.sharing
        assert sharing is not None
        chain = Chain(sharing.directory.space, salt)
        chain.extend(np.array(prompt, dtype=np.int32))
        nodes = [sharing.directory.find(key) for key in chain.keys]
        return [[-1] * len(self.cache.tables) if node is None else list(node.places[tier]) for node in nodes]

    def alone(self, number: int) -> Answer:
        request = self.asked[number]
        most = request.prompt_tokens + (request.params.max_tokens or 0)
        return self.model.answer(request, min(self.limits.max_model_len, most))

    def assert_right(self) -> None:
        """Everybody got what it gets alone, or, if it was aborted, a beginning of that; and everything is free."""
        ends, got = endings(self.events), outputs(self.events)
        assert sorted(ends) == sorted(self.asked)
        for number, request in self.asked.items():
            limit = min(self.limits.max_model_len, request.prompt_tokens + (request.params.max_tokens or 0))
            told, reason = got.get(number, []), ends[number].reason
            assert self.model.answered(request, limit, told, reason, kept=self.reuse), (
                f"sequence {number}: {told} ({reason}), alone {self.alone(number)}"
            )
        check_all(self.scheduler)
        assert is_empty(self.cache)
        assert at_rest(self.tiering)

    def assert_all_can_be_had(self) -> None:
        """Every pool is whole once what is kept is given up: nothing is stuck, and nothing is counted wrongly."""
        if self.cache.sharing is not None:
            self.cache.sharing.shelf.clear()
        if self.tiering.host.shelf is not None:
            self.tiering.host.shelf.clear()
        for pool in (self.cache.pool, self.tiering.host.pool):
            assert pool.free.count == pool.slabs
            assert not any((*pool.cached, *pool.unsaved, *pool.draining))
        disk = self.tiering.disk
        if disk is not None:
            for group, slots in enumerate(disk.slots):
                assert sorted(disk.free_slots(group) + disk.found_slots(group)) == list(range(slots))
                assert not disk.busy_slots(group)
        check_all(self.scheduler)


def text(length: int, seed: int = 0) -> list[int]:
    rng = Random(f"text {seed}")
    return [rng.randrange(1, VOCAB) for _ in range(length)]


A, B = text(17, 1), text(17, 2)
"""Four whole blocks, and one position more."""


def kept_below(tier: str, prompt: list[int] = A, **more: Any) -> TierWorld:
    """The prompt was served, and all of it is kept in this tier alone."""
    given: dict[str, Any] = {"slabs": 8, "placement": "write_through", "by_hand": True}
    if tier == "disk":
        given |= {"disk_slots": 200, "host_slabs": 16}
    world = TierWorld(**(given | more))
    world.serve(prompt)
    for _ in range(4 if tier == "disk" else 1):
        world.crowd_out()
    assert world.kept_in(prompt) == [{tier}] * (len(prompt) // world.block_tokens)
    return world


def moved(world: TierWorld, route: str) -> int:
    return sum(event.blocks for event in world.of(Transferred) if event.route == route)
