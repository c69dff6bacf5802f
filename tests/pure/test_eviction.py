"""Eviction policies alone: the order in which offered blocks go, whatever was hit in between."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from random import Random

import pytest
from tests.pure.tier_worlds import TierWorld, text

from octavo.policy.eviction import EVICTIONS, Evictable, eviction_named


@pytest.mark.parametrize("name", list(EVICTIONS))
def test_blocks_hit_again_and_again_cost_no_memory(name: str) -> None:
    """A server whose pool never fills asks for no victim, and hits what it keeps for months."""
    policy = eviction_named(name)
    for time in range(20_000):
        policy.withdraw(time % 2, time % 7)
        policy.offer(Evictable(time % 2, time % 7, last_used=time, index=time % 5))
    assert sum(sys.getsizeof(heap) for heap in policy._heaps.values()) < 10_000


@pytest.mark.parametrize("seed", range(5))
def test_sweeping_changes_no_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same offers, hits and victims, with heaps that are never swept and with heaps swept at every offer."""
    answers = []
    for stale in (10**9, -10):
        monkeypatch.setattr("octavo.policy.eviction._STALE", stale)
        random = Random(seed)
        policy = eviction_named(list(EVICTIONS)[seed % len(EVICTIONS)])
        told = []
        for time in range(600):
            group, slot = random.randrange(3), random.randrange(40)
            what = random.random()
            if what < 0.6:
                policy.withdraw(group, slot)
                policy.offer(Evictable(group, slot, last_used=time // 3, index=random.randrange(6)))
            elif what < 0.8:
                policy.withdraw(group, slot)
            else:
                victim = policy.choose(group)
                told.append(victim)
                if victim is not None:
                    policy.gone(victim)
        answers.append(told)
    assert answers[0] == answers[1]
    assert any(victim is not None for victim in answers[0])


@pytest.mark.parametrize("seed", range(6))
def test_blocks_that_go_right_after_others_are_those_that_would_have_been_offered_and_chosen(seed: int) -> None:
    """Chains of blocks, whole or in part, given up leaf by leaf: with and without asking who goes next."""
    orders, told = [], 0
    for asks in (False, True):
        random, policy = Random(seed), eviction_named(list(EVICTIONS)[seed % len(EVICTIONS)])
        chains: list[list[Evictable]] = []
        gone: list[int] = []
        for time in range(400):
            many = random.randrange(1, 9)
            chains.append([Evictable(0, 10 * time + i, last_used=time - (i > 5), index=i) for i in range(many)])
            policy.offer(chains[-1][-1])
            room = random.randrange(2 * many)
            while room > 0 and (leaf := policy.choose(0)) is not None:
                chain = next(chain for chain in chains if chain and chain[-1] is leaf)
                policy.gone(chain.pop())
                gone.append(leaf.slot)
                room -= 1
                before = [(block.slot, block.last_used, block.index) for block in reversed(chain)][:room]
                more = policy.go_next(0, before) if asks else 0
                told += more
                room -= more
                gone.extend(chain.pop().slot for _ in range(more))
                if chain:
                    policy.offer(chain[-1])
        orders.append(gone)
    assert orders[0] == orders[1]
    assert told > (100 if seed % 2 == 0 else 0)  # where depth costs, others go first as a rule


class Remembers:
    """What comes back after it has gone was missed: it goes last, by a list of keys that are gone."""

    name = "remembers"

    def __init__(self) -> None:
        self.offered: dict[tuple[int, int], Evictable] = {}
        self.ghosts: dict[tuple[int, bytes], bool] = {}
        """By group and key: whether it has come back."""

    def offer(self, block: Evictable) -> None:
        self.offered[block.group, block.slot] = block
        if (block.group, block.key) in self.ghosts:
            self.ghosts[block.group, block.key] = True

    def withdraw(self, group: int, slot: int) -> None:
        self.offered.pop((group, slot), None)

    def choose(self, group: int) -> Evictable | None:
        return min((block for block in self.offered.values() if block.group == group), key=self._rank, default=None)

    def _rank(self, block: Evictable) -> tuple[bool, int, int]:
        return self.ghosts.get((block.group, block.key), False), block.last_used, -block.index

    def gone(self, block: Evictable) -> None:
        self.withdraw(block.group, block.slot)
        self.ghosts.setdefault((block.group, block.key), False)

    def go_next(self, group: int, blocks: Sequence[tuple[int, int, int]]) -> int:
        return 0


@pytest.mark.parametrize(("eviction", "found"), [("lru", {}), (Remembers(), {"device": 16})], ids=["lru", "ghosts"])
def test_a_policy_with_a_ghost_list_knows_what_comes_back(eviction: str | Remembers, found: dict[str, int]) -> None:
    """A prompt that was given up and missed outlives a crowd of those that are asked for once."""
    world = TierWorld(slabs=12, placement="drop", eviction=eviction)
    prompt = text(17, 1)
    world.serve(prompt)
    for number in range(3):
        world.serve(text(17, 10 + number))
    again = world.serve(prompt)
    for number in range(5):
        world.serve(text(17, 20 + number))
    last = world.serve(prompt)
    world.assert_right()
    assert world.cached(again) == {}, "it had gone"
    assert world.cached(last) == found
    world.assert_all_can_be_had()
