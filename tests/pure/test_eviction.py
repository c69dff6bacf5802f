"""Eviction policies alone: the order in which offered blocks go, whatever was hit in between."""

from __future__ import annotations

import sys
from random import Random

import pytest

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
