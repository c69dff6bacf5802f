"""Tiers below the device, rule by rule: who waits for which copy, and what is left when one fails.

The answers come from a toy model that reads its blocks, so that a copy that was skipped, or made too late, changes
tokens. Suspended sequences are in test_tiers_suspended.py, worlds drawn from seeds in test_tiers_random.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.pure.tier_worlds import TierWorld, text

from octavo.memory.slots import SlotState
from octavo.memory.values import Shortfall
from octavo.policy.rates import Rates
from octavo.scheduling.events import (
    Admitted,
    Arrived,
    CacheReset,
    Finished,
    Preempted,
    Restarted,
    StepTokens,
    Transferred,
)

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


# -- downwards ------------------------------------------------------------------------------------


def test_a_block_is_not_free_before_its_copy_has_ended() -> None:
    world = TierWorld(by_hand=True)
    world.serve(A)
    sources = np.flatnonzero(world.cache.pool.slots[0].state == SlotState.READY)
    world.hold("demote")
    other = world.ask(text(31, 3))
    world.step(5)
    columns = world.cache.pool.slots[0]
    assert sum(order.blocks for order in world.mover.under_way("demote")) == len(sources) == 4
    assert columns.state[sources].tolist() == [SlotState.READY] * 4
    assert columns.refs[sources].tolist() == [1] * 4
    assert world.cache.pool.free.count == 4
    assert not world.of(Admitted, other), "it needs all eight"
    world.mover.end("demote")
    world.step()
    assert world.of(Admitted, other)
    world.finish()
    world.assert_right()
    assert world.kept_in(A) == [{"host"}] * 4


def test_room_that_an_unsaved_block_takes_is_a_shortfall_that_drains() -> None:
    world = TierWorld(by_hand=True)
    world.hold("demote")
    world.serve(A[:9])
    assert world.cache.pool.unsaved == [2]
    short = world.cache.take([7])
    assert isinstance(short, Shortfall)
    assert (short.needed, short.free, short.evictable, short.draining) == (7, 6, 0, 2)
    assert short.waits_for_draining
    assert world.cache.pool.free.count == 6, "nothing was given up for it"


def test_who_needs_the_room_of_an_unsaved_block_waits_and_nobody_gives_way() -> None:
    world = TierWorld(by_hand=True, slabs=8)
    world.serve(A[:9])  # two blocks stay
    world.hold("demote")
    pair = [world.ask(text(8, seed), 8) for seed in (3, 4)]
    world.step(20)
    told = [len(world.tokens(number)) for number in pair]
    assert told < [8, 8], "the seventh and eighth block are lacking"
    world.mover.end("demote")
    world.hold()
    world.finish()
    world.assert_right()
    assert not world.of(Preempted)


def test_with_write_through_room_is_free_at_once_and_with_write_back_it_takes_a_copy() -> None:
    waited = {}
    for placement in ("write_through", "write_back"):
        world = TierWorld(placement=placement)
        world.serve(A)
        assert world.kept_in(A)[0] == ({"device", "host"} if placement == "write_through" else {"device"})
        asked, since = world.ask(text(31, 3)), world.time
        waited[placement] = world.until(Admitted).now - since
        world.finish()
        world.assert_right()
        assert world.of(Finished, asked)
    assert waited["write_through"] == 0 < waited["write_back"]


def test_a_full_host_drops_its_coldest_block_and_never_waits_for_the_disk() -> None:
    world = TierWorld(by_hand=True, host_slabs=4, disk_slots=64, placement="write_through", slabs=8)
    world.hold("store")
    for seed in range(3, 9):
        world.ask(text(17, seed))
        world.answer_all()
    stores = world.mover.under_way("store")
    assert sum(order.blocks for order in stores) == 4, "all four host blocks are held by copies that do not end"
    assert len(world.of(Finished)) == 6
    assert world.tiering.disk is not None
    assert world.tiering.disk.blocks == [0]
    world.hold()
    world.mover.end("store")
    world.finish()
    world.assert_right()


def test_the_host_gives_up_first_what_was_used_longest_ago() -> None:
    world = TierWorld(host_slabs=8, placement="write_through")
    world.serve(A)
    world.serve(B)
    world.crowd_out(8)
    assert not any("host" in tiers for tiers in world.kept_in(A))
    assert world.tiering.evicted_blocks[0] >= 4


def test_drop_copies_nothing_down() -> None:
    world = TierWorld(placement="drop", disk_slots=64)
    world.serve(A)
    world.crowd_out()
    assert world.cached(world.serve(A)) == {}
    assert not world.of(Transferred)
    world.assert_right()


# -- upwards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_sequence_waits_for_its_own_blocks_while_others_decode(tier: str) -> None:
    world = kept_below(tier)
    route = "promote" if tier == "host" else "load"
    world.hold(route)
    other = world.ask(text(3, 50), 12)
    world.step(2)
    waiting = world.ask(A, 3)
    world.step(6)
    assert [order.blocks for order in world.mover.under_way(route)] == [4]
    assert world.of(Admitted, waiting)
    assert not world.tokens(waiting)
    assert len(world.tokens(other)) >= 7, "a token in each step"
    world.mover.end(route)
    world.hold()
    arrived = world.until(Arrived)
    assert (arrived.sequence_id, arrived.waited_s) == (waiting, arrived.now - world.of(Admitted, waiting)[0].now)
    world.finish()
    world.assert_right()
    assert world.cached(waiting) == {tier: 16}


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("depth", [0, 1])
def test_duplicates_of_a_prefix_that_is_being_loaded_wait_for_it(tier: str, depth: int) -> None:
    world = kept_below(tier, depth=depth, slabs=16, host_slabs=20)
    world.hold("promote")
    twins = [world.ask(A, 2), world.ask([*A[:12], *text(4, 9)], 2)]
    alien = world.ask(text(5, 77), 2)
    world.step(12)
    assert world.of(Admitted, twins[0])
    assert not world.of(Admitted, twins[1])
    assert world.of(Finished, alien), "who needs none of it goes on"
    world.mover.end("promote")
    world.finish()
    world.assert_right()
    assert [world.cached(number) for number in twins] == [{tier: 16}, {"device": 12}]
    assert moved(world, "promote") == 4, "it came up once"


@pytest.mark.parametrize("shared", range(17))
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_hit_below_may_end_anywhere_in_a_block(shared: int, tier: str, depth: int) -> None:
    world = kept_below(tier, depth=depth)
    number = world.serve(A[:shared] + text(6, 9), 5)
    world.assert_right()
    assert world.cached(number) == ({tier: shared} if shared else {})


@pytest.mark.parametrize("laws", [("window_6",), ("chunk_8",), ("constant",), ("full", "window_6", "constant")])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_each_law_needs_comes_up_and_no_more(laws: tuple[str, ...], tier: str) -> None:
    prompt = text(23, 1)
    below = {"disk_slots": 400, "host_slabs": 10} if tier == "disk" else {"host_slabs": 400}
    world = TierWorld(heads=[2] * len(laws), laws=laws, slabs=16, placement="write_through", budget=8, **below)
    world.serve(prompt)
    for seed in range(16):
        world.serve(text(21, 100 + seed))
    before = moved(world, "promote")
    number = world.serve(prompt, 5)
    world.assert_right()
    assert world.cached(number).get(tier, 0) > 0
    assert sum(world.cached(number).values()) == 20
    # A start at 20 reads from position 15 on in a window of 6, and from 16 on in a chunk of 8.
    blocks = {("window_6",): 2, ("chunk_8",): 1, ("constant",): 1, ("full", "window_6", "constant"): 5 + 2 + 1}
    assert moved(world, "promote") - before == blocks[laws]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_another_salt_finds_nothing_in_any_tier_and_the_same_salt_all_of_it(tier: str) -> None:
    world = kept_below(tier)
    assert world.cached(world.serve(A, salt="another")) == {}
    assert world.cached(world.serve(A)) == {tier: 16}
    world.assert_right()


def test_break_even_loads_only_what_is_dearer_to_compute() -> None:
    for bytes_a_second, found in ((1e12, {"host": 16}), (1.0, {})):
        rates = Rates(bytes_a_second={"demote": 1e12, "promote": 1e12, "store": 1e12, "load": 1e12})
        world = TierWorld(placement="break_even", rates=rates)
        world.serve(A)
        world.crowd_out()
        assert world.kept_in(A) == [{"host"}] * 4
        rates.bytes_a_second["promote"] = bytes_a_second
        assert world.cached(world.serve(A)) == found
        world.assert_right()


def test_break_even_saves_nothing_that_it_would_not_load() -> None:
    rates = Rates(bytes_a_second={"demote": 1e12, "promote": 1.0, "store": 1.0, "load": 1.0})
    world = TierWorld(placement="break_even", rates=rates, disk_slots=64)
    world.serve(A)
    world.crowd_out()
    assert not world.of(Transferred)


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
    world.hold("promote")
    number = world.ask(A)
    world.step()
    world.ask(text(25, 7))  # takes all of the budget, so that nothing is computed again
    world.step()
    world.mover.end("promote", failing=[3])
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


def test_tokens_come_in_every_step_while_copies_do_not_end() -> None:
    """Whatever is under way, who has room goes on: no step waits for the mover."""
    world = kept_below("disk")
    world.hold("demote", "promote", "store", "load")
    world.ask(A, 3)
    goes_on = world.ask(text(3, 60), 9)
    events = world.step(9)
    steps = [event for event in events if isinstance(event, StepTokens) and goes_on in event.sequence_ids]
    assert len(steps) == 9
