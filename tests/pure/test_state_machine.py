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
from octavo.memory.tables import BlockTables
from octavo.simulate.toy_model import toy_layout

TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=40)
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=60, stateful_step_count=30)


# -- bugs planted in release are found ----------------------------------------------------------

PLANTED = settings(
    max_examples=1000,
    stateful_step_count=30,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    print_blob=False,
)


def _leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of every sequence never returns."""
    unreference = KVCache.unreference
    monkeypatch.setattr(
        KVCache,
        "unreference",
        lambda self, group, slots, touched, **used: unreference(self, group, slots[1:], touched, **used),
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
        KVCache, "unreference", lambda self, group, slots, touched, **used: unreference(self, group, slots, -1, **used)
    )


def _slide_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block more is given up than nobody reads."""
    give_up = BlockTables.give_up
    monkeypatch.setattr(BlockTables, "give_up", lambda self, rows, firsts: give_up(self, rows, firsts + 1))


def _slide_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block that nobody reads any more is kept."""
    give_up = BlockTables.give_up
    monkeypatch.setattr(BlockTables, "give_up", lambda self, rows, firsts: give_up(self, rows, firsts - 1))


def _slide_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has left a table is never released."""

    def forget(self: KVCache, rows: Any) -> None:
        for group in self._sliding:
            table = self.tables[group]
            firsts = self.layout.groups[group].first_block(self.committed[rows])
            table.give_up(rows, np.maximum(firsts, table.firsts[rows]))

    monkeypatch.setattr(KVCache, "slide", forget)


def _slide_while_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows slide to where the plan in flight ends, although it still reads what is before."""
    slide = KVCache.slide

    def slide_ahead(self: KVCache, rows: Any) -> None:
        committed = self.committed.copy()
        self.committed[rows] = [min(self.room_tokens(row), 48) if self.touched[row] >= 0 else 0 for row in rows]
        slide(self, rows)
        self.committed[:] = committed

    monkeypatch.setattr(KVCache, "slide", slide_ahead)


def _slide_in_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots that one group gives up are released in the next."""
    slide, unreference = KVCache.slide, KVCache.unreference

    def slide_elsewhere(self: KVCache, rows: Any) -> None:
        groups = len(self.tables)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                KVCache, "unreference", lambda self, group, *more: unreference(self, (group + 1) % groups, *more)
            )
            slide(self, rows)

    monkeypatch.setattr(KVCache, "slide", slide_elsewhere)


BUGS = [
    _leak,
    _free_while_referenced,
    _free_twice,
    _free_in_flight,
    _slide_too_far,
    _slide_too_little,
    _slide_forgetting,
    _slide_while_in_flight,
    _slide_in_another_group,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__.strip("_"))
@pytest.mark.parametrize("machine", [CacheMachine, EngineMachine])
def test_a_bug_planted_in_release_or_slide_is_found(
    machine: type[RuleBasedStateMachine], plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    # A free slab that is counted twice may also overflow the free stack, or a slot lie beyond its group.
    with pytest.raises((InvariantViolation, AssertionError, ValueError, IndexError)):
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
