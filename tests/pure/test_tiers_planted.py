"""Bugs planted in the tiers are found: by random worlds, or by the rule that says what they break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.pure import test_tiers, test_tiers_lost, test_tiers_restart
from tests.pure.random_tier_worlds import random_world
from tests.pure.test_tiers_random import tight

from octavo.errors import InvariantViolation
from octavo.memory.cache import KVCache
from octavo.memory.errands import Errands
from octavo.memory.loading import Loading
from octavo.memory.parking import Parking
from octavo.memory.prefix import PrefixDirectory
from octavo.memory.saving import Saving
from octavo.memory.sharing import Sharing
from octavo.memory.shelf import Shelf
from octavo.memory.tiering import Tiering
from octavo.memory.tiers import DiskTier, HostTier
from octavo.memory.transfers import Ended, TimedOut
from octavo.scheduling import growth
from octavo.simulate.toy_mover import ToyFaults, ToyMover

Plant = Callable[[pytest.MonkeyPatch], None]


def worlds(**fixed: Any) -> None:
    for seed in range(30):
        random_world(seed, **tight(("full",), 3) | {"reuse": True, "placement": "write_back"} | fixed)


# -- downwards ------------------------------------------------------------------------------------


def _copies_from_a_slot_that_nobody_holds(patch: pytest.MonkeyPatch) -> None:
    begin = Saving._begin

    def unheld(self: Saving, group: int, slot: int, target: int) -> None:
        begin(self, group, slot, target)
        self._cache.unreference(group, np.array([slot], dtype=np.int32), -1)

    patch.setattr(Saving, "_begin", unheld)


def _publishes_before_the_end(patch: pytest.MonkeyPatch) -> None:
    begin = Saving._begin

    def early(self: Saving, group: int, slot: int, target: int) -> None:
        begin(self, group, slot, target)
        copy = self._queued[-1]
        self._host.publish(copy.node, group, copy.target)

    patch.setattr(Saving, "_begin", early)


def _gives_up_what_should_be_saved(patch: pytest.MonkeyPatch) -> None:
    """Room is made at once, and nothing is copied."""

    def lost(self: Saving, counts: object, short: object) -> bool:
        for group, slot in list(self._shelf.unsaved):
            self._shelf.settle(self._directory.node_of(group, slot), group)
        return True

    patch.setattr(Saving, "_make_way", lost)
    patch.setattr(Saving, "ahead", lambda self: None)


def _stores_in_a_slot_that_is_being_copied(patch: pytest.MonkeyPatch) -> None:
    may_go = DiskTier._may_go

    def regardless(self: DiskTier, group: int, slot: int) -> bool:
        busy, self._busy = self._busy, {}
        found = may_go(self, group, slot)
        self._busy = busy
        return found

    def counted(self: DiskTier, group: int, slot: int) -> None:
        self._busy[group, slot] = self._busy.get((group, slot), 0) + 1

    patch.setattr(DiskTier, "_may_go", regardless)
    patch.setattr(DiskTier, "hold", counted)


def _leaves_on_disk_what_was_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tiering, "take_erased", lambda self: [])


def _finds_blocks_on_disk_by_a_hash_that_collides(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixDirectory, "_identity", lambda self, parent, key, said: key)


# -- upwards --------------------------------------------------------------------------------------


def _loads_into_a_slot_that_nobody_holds(patch: pytest.MonkeyPatch) -> None:
    begin = Loading.begin

    def unheld(self: Loading, row: int, wanted: Any) -> None:
        begin(self, row, wanted)
        for one in wanted:
            self._cache.pool.slots[one.group].refs[one.target] -= 1

    patch.setattr(Loading, "begin", unheld)


def _loads_without_holding_the_source(patch: pytest.MonkeyPatch) -> None:
    hold = Loading.hold

    def unheld(self: Loading, wanted: Any) -> bool:
        got = hold(self, wanted)
        for one in wanted if got else ():
            if one.disk < 0 and one.node is not None:
                self._host.unreference(one.group, np.array([one.host], dtype=np.int32))
        return got

    patch.setattr(Loading, "hold", unheld)


def _loads_to_the_wrong_target(patch: pytest.MonkeyPatch) -> None:
    ask = Errands.ask

    def crossed(self: Errands, route: Any, group: int, copies: Any, *rest: Any, **more: Any) -> int:
        if route == "promote" and len(copies) > 1:
            (a, x), (b, y) = copies[:2]
            copies = [(a, y), (b, x), *copies[2:]]
        return ask(self, route, group, copies, *rest, **more)

    patch.setattr(Errands, "ask", crossed)


def _says_done_and_copies_nothing(patch: pytest.MonkeyPatch) -> None:
    read = ToyMover._read
    patch.setattr(
        ToyMover, "_read", lambda self, order, i: ("", None) if order.route == "promote" else read(self, order, i)
    )


def _computes_before_everything_has_arrived(patch: pytest.MonkeyPatch) -> None:
    begin = Loading.begin

    def at_once(self: Loading, row: int, wanted: Any) -> None:
        begin(self, row, wanted)
        self._arrivals.rows.append(row)

    patch.setattr(Loading, "begin", at_once)


def _forgets_what_is_coming(patch: pytest.MonkeyPatch) -> None:
    awaited = Sharing.awaited

    def blind(self: Sharing, match: Any, chain: Any, tokens: int) -> bool:
        before = [node.coming for node in match.path]
        for node in match.path:
            node.coming = 0
        answer = awaited(self, match, chain, tokens)
        for node, coming in zip(match.path, before, strict=True):
            node.coming = coming
        return answer

    patch.setattr(Sharing, "awaited", blind)


def _keeps_what_could_not_be_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskTier, "withdraw", lambda self, identity, group: None)


def _keeps_the_block_before_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A block that was lost is still counted as one that follows."""

    def lose(self: Shelf, group: int, slot: int) -> None:
        if self.pool.slots[group].refs[slot]:
            self.directory.displace(group, slot, self.tier)
        else:
            self.remove(group, slot)

    patch.setattr(Shelf, "lose", lose)


# -- ends -----------------------------------------------------------------------------------------


def _frees_at_the_deadline(patch: pytest.MonkeyPatch) -> None:
    settle = Errands.settle

    def hasty(self: Errands, notices: Any) -> None:
        for notice in notices:
            if isinstance(notice, TimedOut) and notice.number in self._open:
                order = self._open[notice.number].order
                reasons = ("timed_out",) * order.blocks
                settle(self, [notice, Ended(order.number, order, "timed_out", 0, 0.0, reasons)])
            elif notice.number in self._open:
                settle(self, [notice])

    patch.setattr(Errands, "settle", hasty)


def _uses_a_lane_that_does_not_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Errands, "answers", lambda self, lane: True)


def _frees_at_the_abort(patch: pytest.MonkeyPatch) -> None:
    leave = Loading._leave

    def at_once(self: Loading, load: Any) -> None:
        leave(self, load)
        for one in load.wanted:
            if one.target >= 0:
                self._off_device(one)

    patch.setattr(Loading, "_leave", at_once)


def _forgets_the_host_at_a_reset(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tiering, "forget_all", lambda self: None)


# -- suspensions ----------------------------------------------------------------------------------


def _parks_with_a_plan_in_flight(patch: pytest.MonkeyPatch) -> None:
    preempt = growth.preempt

    def at_once(scheduler: Any, row: int, draft: Any) -> bool:
        scheduler.cache.touched[row] = min(scheduler.cache.touched[row], scheduler.cache.settled)
        return preempt(scheduler, row, draft)

    patch.setattr(growth, "preempt", at_once)


def _leaves_the_partial_block_behind(patch: pytest.MonkeyPatch) -> None:
    parked = Parking._parked

    def short(self: Parking, moves: Any, ended: Ended) -> None:
        moves[-1].target, kept = moves[0].target, moves[-1].target
        parked(self, moves, ended)
        del kept

    patch.setattr(Parking, "_parked", short)


def _resumes_a_suspension_that_lost_a_part(patch: pytest.MonkeyPatch) -> None:
    parked = Parking._parked
    patch.setattr(
        Parking,
        "_parked",
        lambda self, moves, ended: parked(self, moves, replace(ended, reasons=("",) * len(ended.reasons))),
    )


def _pins_for_ever_what_no_plan_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "unpin", lambda self, plan, copies: None)


def _gives_the_host_slot_back_when_it_is_copied_from(patch: pytest.MonkeyPatch) -> None:
    reference = HostTier.reference
    patch.setattr(HostTier, "reference", lambda self, group, slots: reference(self, group, slots[slots % 2 == 1]))


LATE = {"faults": ToyFaults(times_out=0.4, most_polls=2, most_late_polls=30)}
OFFLOAD = {"preemption": "offload", "placement": "drop", "host_slabs": 40, "faults": ToyFaults(most_polls=3)}

BUGS: list[tuple[Plant, Callable[[], None]]] = [
    (_copies_from_a_slot_that_nobody_holds, worlds),
    (_publishes_before_the_end, worlds),
    (_gives_up_what_should_be_saved, test_tiers.test_a_block_is_not_free_before_its_copy_has_ended),
    (_stores_in_a_slot_that_is_being_copied, test_tiers_lost.test_a_record_that_is_being_read_is_not_written_over),
    (_leaves_on_disk_what_was_reset, test_tiers_restart.test_what_was_reset_is_not_there_after_a_restart),
    (
        _finds_blocks_on_disk_by_a_hash_that_collides,
        lambda: test_tiers_restart.test_a_hash_of_one_byte_never_serves_wrong_state_from_any_tier(
            ("full",), test_tiers_restart.of_one_byte
        ),
    ),
    (_loads_into_a_slot_that_nobody_holds, worlds),
    (_loads_without_holding_the_source, worlds),
    (_loads_to_the_wrong_target, worlds),
    (_says_done_and_copies_nothing, worlds),
    (_computes_before_everything_has_arrived, worlds),
    (
        _forgets_what_is_coming,
        lambda: test_tiers.test_duplicates_of_a_prefix_that_is_being_loaded_wait_for_it("host", 0),
    ),
    (_keeps_what_could_not_be_read, test_tiers_lost.test_a_record_that_cannot_be_read_is_a_miss_and_is_found_no_more),
    (
        _keeps_the_block_before_for_ever,
        test_tiers_lost.test_a_block_that_was_lost_leaves_the_one_before_it_free_to_go,
    ),
    (_frees_at_the_deadline, lambda: worlds(**LATE)),
    (
        _uses_a_lane_that_does_not_answer,
        lambda: test_tiers_lost.test_after_a_deadline_nobody_waits_and_the_lane_rests_until_it_answers("host"),
    ),
    (
        _frees_at_the_abort,
        lambda: test_tiers_lost.test_an_abort_while_loading_keeps_the_slots_until_the_copy_has_ended("host"),
    ),
    (_forgets_the_host_at_a_reset, test_tiers_lost.test_a_reset_forgets_all_tiers_and_says_what_is_to_be_erased),
    (_parks_with_a_plan_in_flight, lambda: worlds(**OFFLOAD | tight(("full", "constant"), 2), depth=1)),
    (_leaves_the_partial_block_behind, lambda: worlds(**OFFLOAD)),
    (_resumes_a_suspension_that_lost_a_part, lambda: worlds(**OFFLOAD | {"faults": ToyFaults(fails=0.3)})),
    (
        _pins_for_ever_what_no_plan_copies,
        test_tiers_lost.test_a_source_that_no_plan_is_going_to_copy_from_is_pinned_no_more,
    ),
    (_gives_the_host_slot_back_when_it_is_copied_from, worlds),
]


@pytest.mark.parametrize(
    ("plant", "finds"), BUGS, ids=[f"{n} {plant.__name__.strip('_')}" for n, (plant, _) in enumerate(BUGS)]
)
def test_a_bug_planted_in_the_tiers_is_found(
    plant: Plant, finds: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((InvariantViolation, AssertionError, IndexError, KeyError)):
        finds()
