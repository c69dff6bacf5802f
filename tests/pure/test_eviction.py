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
