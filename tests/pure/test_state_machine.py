"""Random operations on the KV cache and on the whole engine; bugs planted in release are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from tests.pure.machines import CacheMachine, EngineMachine

from octavo.errors import InvariantViolation
from octavo.memory.cache import KVCache
from octavo.memory.check import check
from octavo.memory.pool import BlockPool
from octavo.simulate.toy_model import toy_layout

TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=40)
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=30)


# -- bugs planted in release are found ----------------------------------------------------------

PLANTED = settings(
    max_examples=200, stateful_step_count=30, phases=[Phase.generate], derandomize=True, database=None, print_blob=False
)


def _leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of every sequence never returns."""
    unreference = KVCache.unreference
    monkeypatch.setattr(
        KVCache, "unreference", lambda self, group, slots, touched: unreference(self, group, slots[1:], touched)
    )


def _free_while_referenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releasing a row gives back the last block of its neighbour as well."""
    release = KVCache.release

    def release_too_much(self: KVCache, row: int) -> int:
        neighbour = self.tables[0].row((row + 1) % self.rows)
        if len(neighbour):
            self.pool.slots[0].refs[neighbour[-1:]] -= 1
            self.pool.give(0, neighbour[-1:].copy())
        return release(self, row)

    monkeypatch.setattr(KVCache, "release", release_too_much)


def _free_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab that goes back is put on the free stack twice."""
    give = BlockPool.give

    def give_twice(self: BlockPool, group: int, slots: Any) -> None:
        free = self.free.count
        give(self, group, slots)
        if self.free.count > free and self.free.count < self.slabs:
            self.free.give((slots[-1:] // self.blocks_per_slab[group]).astype(np.int32))

    monkeypatch.setattr(BlockPool, "give", give_twice)


def _free_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is reusable at once, although a plan in flight still touches it."""
    unreference = KVCache.unreference
    monkeypatch.setattr(
        KVCache, "unreference", lambda self, group, slots, touched: unreference(self, group, slots, -1)
    )


BUGS = [_leak, _free_while_referenced, _free_twice, _free_in_flight]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__.strip("_"))
@pytest.mark.parametrize("machine", [CacheMachine, EngineMachine])
def test_a_bug_planted_in_release_is_found(
    machine: type[RuleBasedStateMachine], plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((InvariantViolation, AssertionError)):
        run_state_machine_as_test(machine, settings=PLANTED)


@pytest.mark.parametrize(
    ("plant", "names"),
    [
        (_leak, {"references-equal-occurrences"}),
        (_free_while_referenced, {"free-is-unreferenced", "references-equal-occurrences", "slot-moves"}),
        (_free_twice, {"free-plus-allocated"}),
    ],
    ids=["leak", "free while referenced", "free twice"],
)
def test_the_check_alone_names_the_invariant_that_a_planted_bug_breaks(
    plant: Callable[[pytest.MonkeyPatch], None], names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    cache = KVCache(toy_layout(), 8, 2)
    cache.reserve(0, 9)
    cache.reserve(1, 5)
    with pytest.raises(InvariantViolation) as caught:
        _release_and_check(cache)
    assert caught.value.name in names


def _release_and_check(cache: KVCache) -> None:
    cache.release(0)
    check(cache)
