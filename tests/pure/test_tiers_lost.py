"""Copies between tiers that fail, come late or are not wanted any more, and what a reset forgets."""

from __future__ import annotations

import pytest
from tests.pure.tier_worlds import A, B, TierWorld, kept_below, text

from octavo.scheduling.events import Admitted, CacheReset, Finished, Restarted, Transferred

# -- copies that fail, or do not end ----------------------------------------------------------------


@pytest.mark.parametrize("failing", range(4))
def test_a_copy_that_fails_is_a_recompute_of_what_did_not_come(failing: int) -> None:
    world = kept_below("host")
    world.hold("promote")
    number = world.ask(A, 3)
    world.step(2)
    world.mover.end("promote", failing=[failing])
    world.hold()
    assert world.until(Restarted).reason == "error: injected"
    assert "host" not in world.kept_in(A)[failing], "its place is withdrawn"
    world.mover.failing = frozenset()
    world.finish()
    world.assert_right()
    again = world.of(Admitted, number)[1]
    assert again.cached_tokens == 4 * failing, "it starts from what came before"
    world.assert_all_can_be_had()


def test_a_record_that_cannot_be_read_is_a_miss_and_is_found_no_more() -> None:
    world = kept_below("disk")
    disk, slot = world.tiering.disk, world.slots_of(A, 2)[2][0]
    assert disk is not None
    world.mover.disk[0][slot] = (b"of another text", world.mover.disk[0][slot][1])
    number = world.ask(A, 3)
    assert world.until(Restarted).reason == "wrong_key"
    assert slot not in disk.found_slots(0)
    assert world.slots_of(A, 2)[2] == [-1]
    world.finish()
    world.assert_right()
    reasons = [reason for event in world.of(Transferred) for reason in event.reasons]
    assert "wrong_key" in reasons
    assert world.of(Admitted, number)[1].cached_tokens <= 8, "what comes after it is of no use"
    world.assert_all_can_be_had()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_after_a_deadline_nobody_waits_and_the_lane_rests_until_it_answers(tier: str) -> None:
    world = kept_below(tier, slabs=12)
    route = "promote" if tier == "host" else "load"
    world.hold(route)
    number = world.ask(A, 3)
    world.step(2)
    late = world.mover.under_way(route)[0]
    held = world.cache.pool.slots[0].refs.copy()
    world.mover.pass_deadline(route)
    assert world.until(Restarted).reason == "timed_out"
    world.answer_all()
    assert world.of(Finished, number), "it was computed"
    assert world.tiering.pending, "the copy has not ended"
    assert world.tiering.reach == (1 if tier == "host" else 2)
    if tier == "host":
        assert (world.cache.pool.slots[0].refs[list(late.targets)] == 1).all(), "nor are its slots free"
        assert held[list(late.targets)].tolist() == [2] * 4
    before = len(world.mover.under_way())
    world.ask(text(9, 40))
    world.answer_all()
    lane = {"promote", "demote"} if tier == "host" else {"load", "store"}
    assert [order.route for order in world.mover.under_way() if order.route in lane] == [route]
    assert before == 1
    world.mover.end(route)
    world.hold()
    world.finish()
    assert world.tiering.reach == (2 if tier == "host" else 3)
    world.assert_right()
    world.assert_all_can_be_had()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_abort_while_loading_keeps_the_slots_until_the_copy_has_ended(tier: str) -> None:
    world = kept_below(tier)
    route = "promote" if tier == "host" else "load"
    world.hold(route)
    number = world.ask(A, 3)
    world.step(2)
    order = world.mover.under_way(route)[0]
    targets = list(order.targets)
    pool = world.cache.pool if tier == "host" else world.tiering.host.pool
    free = pool.free.count
    assert world.core.abort(number, world.time)
    world.step(3)
    assert world.of(Finished, number)[0].reason == "abort"
    assert pool.slots[0].refs[targets].tolist() == [1] * 4
    assert pool.free.count <= free + (1 if tier == "host" else 0), "its fifth block, which nothing is copied to"
    world.mover.end(route)
    world.finish()
    world.assert_right()
    world.assert_all_can_be_had()


def test_a_record_that_is_being_read_is_not_written_over() -> None:
    first = TierWorld(placement="write_through", disk_slots=4)
    first.serve(A)
    world = TierWorld(slabs=16, placement="write_through", disk_slots=4, left=first.mover.disk, by_hand=True)
    world.hold("load")
    number = world.ask(A)
    world.step(2)
    assert sorted(world.mover.under_way("load")[0].sources) == [0, 1, 2, 3]
    other = world.ask(text(9, 3))
    world.step(8)
    assert world.of(Finished, other), "it is not kept waiting"
    assert not world.mover.under_way("store")
    world.mover.end("load")
    world.hold()
    world.finish()
    world.assert_right()
    assert world.cached(number) == {"disk": 16}
    world.assert_all_can_be_had()


def test_a_block_that_was_lost_leaves_the_one_before_it_free_to_go() -> None:
    world = kept_below("host", budget=4, slabs=16)
    world.serve(A[:13])  # so that of the four the last alone is copied, and fails
    world.hold("promote")
    number = world.ask(A)
    world.step()
    world.ask(text(25, 7))  # takes all of the budget, so that nothing is computed again
    world.step()
    world.mover.end("promote", failing=[0])
    assert world.until(Restarted).sequence_id == number
    world.core.abort(number, world.time)
    world.finish()
    assert world.kept_in(A)[2:] == [{"device", "host"}, set()]
    world.assert_right()
    world.assert_all_can_be_had()


def test_a_source_that_no_plan_is_going_to_copy_from_is_pinned_no_more() -> None:
    """One group has all on the device, so that its last block is copied there; the other waits for its copies."""
    world = TierWorld(heads=[2, 2], laws=["full", "window_6"], slabs=24, placement="write_through", by_hand=True)
    world.serve(A)
    shelf = world.cache.sharing.shelf  # type: ignore[union-attr]
    while (block := shelf.eviction.choose(1)) is not None:
        shelf.evict(block)
    world.hold("promote")
    number = world.ask(A[:15] + text(4, 9))
    world.step(2)
    assert world.cache.pins, "its last block is wanted in part"
    world.core.abort(number, world.time)
    assert not world.cache.pins
    world.mover.end("promote")
    world.finish()
    world.assert_right()
    world.assert_all_can_be_had()


# -- reset ------------------------------------------------------------------------------------------


def test_a_reset_forgets_all_tiers_and_says_what_is_to_be_erased() -> None:
    world = kept_below("disk")
    world.serve(B)
    assert world.mover.disk[0]
    world.core.reset_kept(world.time)
    world.step()
    assert not world.mover.disk[0]
    for prompt in (A, B):
        assert world.kept_in(prompt) == [set()] * 4
        assert world.cached(world.serve(prompt)) == {}
    world.events += world.scheduler.drain_events()
    assert len(world.of(CacheReset)) == 1
    world.assert_right()
    world.assert_all_can_be_had()


def test_a_store_under_way_at_a_reset_is_erased_when_it_has_ended() -> None:
    world = TierWorld(by_hand=True, placement="write_through", disk_slots=64)
    world.hold("store")
    world.ask(A)
    world.step(12)
    assert world.mover.under_way("store")
    world.core.reset_kept(world.time)
    world.mover.end("store")
    world.step(2)
    assert not world.mover.disk[0]
    world.hold()
    world.finish()
    assert world.cached(world.serve(A)) == {}
    world.assert_right()


def test_a_load_under_way_at_a_reset_serves_its_own_sequence_alone() -> None:
    world = kept_below("host")
    world.hold("promote")
    number = world.ask(A, 3)
    world.step(2)
    world.core.reset_kept(world.time)
    world.mover.end("promote")
    world.finish()
    assert world.cached(number) == {"host": 16}
    assert world.cached(world.serve(A)) == {}
    world.assert_right()
    world.assert_all_can_be_had()


@pytest.mark.parametrize("failing", [False, True])
def test_a_large_load_is_read_in_parts_that_go_on_to_the_device_one_by_one(
    monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    world = kept_below("disk", slabs=16)
    monkeypatch.setattr("octavo.memory.loading.STAGED_BYTES", 2 * world.cache.layout.groups[0].block_bytes)
    world.hold("load", "promote")
    number = world.ask(A, 3)
    world.step(2)
    first, second = world.mover.under_way("load")
    assert [first.blocks, second.blocks] == [2, 2]
    world.mover._open[first.number].due = 0
    world.step(2)
    assert [order.route for order in world.mover.under_way()] == ["load", "promote"]
    assert list(world.mover.under_way("promote")[0].sources) == list(first.targets)
    world.mover.end("load", failing=[1] if failing else [])
    world.step()
    world.mover.failing = frozenset()
    world.mover.end("promote")
    world.hold()
    world.finish()
    world.assert_right()
    assert bool(world.of(Restarted, number)) == failing
    world.assert_all_can_be_had()
