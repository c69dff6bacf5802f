"""Copies ahead of need: what goes down before its room is asked for, how much of it at a time, and in which order."""

from __future__ import annotations

import pytest
from tests.pure.tier_worlds import A, TierWorld, moved, text

from octavo.policy.rates import Rates
from octavo.scheduling.events import Admitted, Transferred

LONG = 65
"""Sixteen whole blocks, and one position more."""


def through(host_slabs: int, **more: object) -> TierWorld:
    """Six prompts, four times what the device and the host hold together, went through a world with a disk."""
    given: dict[str, object] = {"slabs": 24, "host_slabs": host_slabs, "disk_slots": 400, "context": 80}
    world = TierWorld(**(given | more))  # type: ignore[arg-type]
    for seed in range(6):
        world.serve(text(LONG, seed))
    return world


@pytest.mark.parametrize("host_slabs", [17, 24, 40])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_disk_that_keeps_up_loses_nothing_of_what_goes_through_a_small_host(host_slabs: int, depth: int) -> None:
    world = through(host_slabs, depth=depth)
    for seed in range(6):
        kept = world.kept_in(text(LONG, seed))
        assert all(kept), f"{kept.count(set())} of {len(kept)} blocks of prompt {seed} are nowhere"
    again = world.serve(text(LONG, 0))
    assert sum(world.cached(again).values()) == LONG - 1
    assert world.cached(again)["disk"] >= 32
    world.assert_right()


def test_conversations_that_come_again_through_a_small_host_find_all_that_they_left() -> None:
    """What had come up from the disk lay on the host as the newest, saved, while older blocks went unsaved."""
    world = TierWorld(slabs=52, host_slabs=114, disk_slots=2000, context=120, budget=256, audit=False)
    texts = [text(48, 1600 + i) for i in range(16)]
    for told in texts:
        number = world.serve(told, 4)
        told += [*world.tokens(number), *text(4, 5)]
    again = [world.serve(told, 4) for told in texts]
    assert [sum(world.cached(number).values()) for number in again] == [48] * 16
    world.assert_right()


def test_several_blocks_go_to_the_disk_in_one_order_and_several_orders_at_once() -> None:
    world = through(24)
    stores = [event for event in world.of(Transferred) if event.route == "store"]
    assert max(event.blocks for event in stores) > 4
    assert moved(world, "store") >= 6 * 16 - 24 - 24


def test_where_the_host_is_large_nothing_is_written_to_the_disk() -> None:
    world = through(400)
    assert moved(world, "demote") >= 4 * 16
    assert moved(world, "store") == 0


def test_a_slow_disk_is_given_little_at_a_time_and_half_of_the_host_is_left_to_others() -> None:
    rates = Rates()
    rates.bytes_a_second["store"] = 1.0
    world = TierWorld(by_hand=True, slabs=24, host_slabs=24, disk_slots=400, context=80, rates=rates)
    world.hold("store")
    for seed in range(6):
        world.ask(text(LONG, seed))
        world.answer_all()
        assert sum(order.blocks for order in world.mover.under_way("store")) <= 12
    world.hold()
    world.mover.end("store")
    world.finish()
    world.assert_right()


def test_with_nothing_to_compute_room_is_made_for_a_start_as_large_as_the_last() -> None:
    world = TierWorld(slabs=40, host_slabs=400, context=80)
    for seed in range(5):
        world.serve(text(LONG, seed))
    number = world.ask(text(LONG, 7))
    world.step()
    assert world.of(Admitted, number), "the copies that it would wait for were made while nobody was there"
    world.finish()
    world.assert_right()


def test_the_end_of_a_prompt_is_saved_before_its_beginning() -> None:
    world = TierWorld(by_hand=True, slabs=8)
    world.serve(A)
    world.hold("demote")
    world.ask(text(20, 3), 8)
    world.step(2)
    saved = [slot for order in world.mover.under_way("demote") for slot in order.sources]
    blocks = [slots[0] for slots in world.slots_of(A, 0)]
    assert saved == blocks[::-1][: len(saved)]
    assert 0 < len(saved) < len(blocks)
    world.mover.end("demote")
    world.hold()
    world.finish()
    world.assert_right()


def test_room_for_a_long_start_takes_one_round_of_copies_whatever_the_eviction() -> None:
    """Blocks that wait for the copy of the one after them, one by one, took as many rounds as there were prompts."""
    for eviction in ("lru", "cheapest_to_rebuild"):
        world = TierWorld(slabs=40, host_slabs=400, context=160, eviction=eviction, by_hand=True)
        for seed in range(2):
            world.serve(text(LONG, seed))
        number = world.ask(text(150, 7))
        world.step()
        rounds = 0
        while not world.of(Admitted, number):
            rounds += 1
            world.step()
        assert rounds <= 4, eviction
        world.finish()
        world.assert_right()


def crowded() -> tuple[TierWorld, int]:
    """The first prompt is on the disk, and half of the host is held by copies to it that do not end."""
    world = through(20, by_hand=True)
    for seed in range(6, 10):
        world.serve(text(LONG, seed))
    world.hold("store")
    for seed in range(10, 14):
        world.ask(text(LONG, seed))
        world.answer_all()
    assert sum(order.blocks for order in world.mover.under_way("store")) == 10
    return world, world.ask(text(LONG, 0))


def test_a_start_waits_for_room_on_the_host_that_copies_hold_rather_than_compute() -> None:
    world, again = crowded()
    world.step(10)
    assert world.mover.under_way("store")
    assert not world.of(Admitted, again)
    world.mover.end("store")
    world.hold()
    world.finish()
    assert sum(world.cached(again).values()) == LONG - 1
    world.assert_right()


def test_a_start_does_not_wait_for_room_that_copies_hold_which_are_late() -> None:
    world, again = crowded()
    world.step(3)
    assert not world.of(Admitted, again)
    world.mover.pass_deadline("store")
    world.step(2)
    assert world.of(Admitted, again)
    world.answer_all()
    assert world.cached(again).get("disk", 0) == 0
    world.mover.end("store")
    world.hold()
    world.finish()
    world.assert_right()


# -- who goes first ----------------------------------------------------------------------------------


def test_a_use_on_the_device_counts_on_the_host_as_well() -> None:
    """What is used again and again on the device was the first to go from the host, where it had been read once."""
    world = TierWorld(slabs=16, host_slabs=12, placement="write_through")
    for prompt in (A, text(17, 2), text(17, 3)):
        world.serve(prompt)
    assert ["host" in tiers for tiers in world.kept_in(A)] == [True] * 4
    world.serve(A)
    world.serve(text(17, 4))
    assert ["host" in tiers for tiers in world.kept_in(A)] == [True] * 4
    assert not any("host" in tiers for tiers in world.kept_in(text(17, 2)))
    world.assert_right()


def test_a_use_above_counts_on_the_disk_as_well() -> None:
    world = TierWorld(slabs=16, host_slabs=40, placement="write_through", disk_slots=12)
    for prompt in (A, text(17, 2), text(17, 3)):
        world.serve(prompt)
    assert ["disk" in tiers for tiers in world.kept_in(A)] == [True] * 4
    world.serve(A)
    world.serve(text(17, 4))
    assert ["disk" in tiers for tiers in world.kept_in(A)] == [True] * 4
    assert not any("disk" in tiers for tiers in world.kept_in(text(17, 2)))
    world.assert_right()


def test_of_what_was_read_from_the_disk_the_beginning_goes_last() -> None:
    """Blocks are of no use without those before them."""
    first = TierWorld(slabs=16, placement="write_through", disk_slots=12)
    for seed in (1, 2, 3):
        first.serve(text(17, seed))
    second = TierWorld(slabs=16, placement="write_through", disk_slots=12, left=first.mover.disk)
    assert second.cached(second.serve(A)) == {"disk": 16}
    second.serve(text(41, 9))  # eight older ones go, and two of these
    assert ["disk" in tiers for tiers in second.kept_in(A)] == [True, True, False, False]
    second.assert_right()


@pytest.mark.parametrize("depth", [0, 1])
def test_of_what_the_disk_has_as_much_is_brought_up_as_the_host_can_stage(depth: int) -> None:
    first = TierWorld(slabs=24, host_slabs=40, disk_slots=60, context=80, placement="write_through")
    first.serve(text(LONG, 1))
    left = first.mover.disk
    second = TierWorld(slabs=24, host_slabs=6, disk_slots=60, context=80, left=left, depth=depth)
    number = second.serve(text(LONG, 1), 2)
    assert second.cached(number) == {"disk": 24}
    second.assert_right()
    second.assert_all_can_be_had()
