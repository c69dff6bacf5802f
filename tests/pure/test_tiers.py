"""Tiers below the device, rule by rule: what goes down, what comes up, and who waits for which copy.

The answers come from a toy model that reads its blocks, so that a copy that was skipped, or made too late, changes
tokens. Copies that fail are in test_tiers_lost.py, suspended sequences in test_tiers_suspended.py, worlds drawn from
seeds in test_tiers_random.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from tests.pure.tier_worlds import A, B, TierWorld, kept_below, moved, text

from octavo.memory.slots import SlotState
from octavo.memory.values import Shortfall
from octavo.policy.rates import Rates
from octavo.scheduling.events import (
    Admitted,
    Arrived,
    Finished,
    Preempted,
    StepTokens,
    Transferred,
)

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
    world.mover.end("demote")
    world.hold()
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
    assert sum(order.blocks for order in stores) == 2, "copies that do not end hold half of the host, and no more"
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


def test_tokens_come_in_every_step_while_copies_do_not_end() -> None:
    """Whatever is under way, who has room goes on: no step waits for the mover."""
    world = kept_below("disk")
    world.hold("demote", "promote", "store", "load")
    world.ask(A, 3)
    goes_on = world.ask(text(3, 60), 9)
    events = world.step(9)
    steps = [event for event in events if isinstance(event, StepTokens) and goes_on in event.sequence_ids]
    assert len(steps) == 9
