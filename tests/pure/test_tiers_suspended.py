"""Sequences that give way by moving: what goes down, what comes back, and what is left when a part is lost."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pure.tier_worlds import TierWorld, text

from octavo.memory.values import DEVICE, HOST
from octavo.policy.rates import Rates
from octavo.scheduling.events import Admitted, Finished, Preempted, Restarted, Transferred


def crowded(**more: Any) -> TierWorld:
    """Two sequences that fit at first, and not to their ends: the second has to give way."""
    given: dict[str, Any] = {"slabs": 9, "preemption": "offload", "placement": "drop", "by_hand": True, "budget": 12}
    world = TierWorld(**(given | more))
    for length in (11, 10):
        world.ask(text(length, length), 14)
    return world


def computed_in(world: TierWorld) -> int:
    planned = [event for event in world.events if type(event).__name__ == "StepPlanned"]
    return sum(event.decode_tokens + event.prefill_tokens for event in planned)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("laws", [("full",), ("full", "window_6"), ("full", "constant")], ids="+".join)
def test_suspended_state_comes_back_exactly_and_nothing_is_computed_again(
    laws: tuple[str, ...], reuse: bool, depth: int
) -> None:
    slabs = {("full",): 8, ("full", "window_6"): 16, ("full", "constant"): 12}[laws]
    world = crowded(heads=[2] * len(laws), laws=laws, reuse=reuse, depth=depth, slabs=slabs)
    away = world.until(Preempted)
    assert away.action == "offload"
    [value] = world.cache.suspensions.values()
    assert value.tokens == away.computed_tokens
    if "window_6" in laws:
        assert value.firsts[laws.index("window_6")] > 0, "it had given up blocks at the front"
    if laws == ("full",):
        assert value.tokens % 4, "its last block is partial"
    world.finish()
    world.assert_right()
    again = next(event for event in world.of(Admitted, away.sequence_id) if event.resumed)
    assert (again.restored_tokens, again.cached_tokens, again.recomputed_tokens) == (away.computed_tokens, 0, 0)
    record = world.of(Finished, away.sequence_id)[0].record
    assert (record.preemptions, record.recomputed_tokens) == (len(world.of(Preempted, away.sequence_id)), 0)
    # The last token of each is never computed; of a sequence in flight when it ended, depth 1 computes one in vain.
    assert computed_in(world) <= (11 + 14 - 1) + (10 + 14 - 1) + depth * 2
    world.assert_all_can_be_had()


def test_it_goes_down_whole_and_its_device_blocks_are_free_once_the_copies_have_ended() -> None:
    world = crowded()
    world.hold("demote")
    world.until(Preempted)
    [value] = world.cache.suspensions.values()
    sources = [slot for tier, slot in value.slots[0]]
    assert {tier for tier, _ in value.slots[0]} == {DEVICE}
    assert world.cache.pool.slots[0].refs[sources].tolist() == [2] * len(sources), "the suspension's and the copy's"
    world.step(5)
    assert world.cache.pool.slots[0].refs[sources].tolist() == [2] * len(sources)
    assert len(world.of(Preempted)) == 1, "whoever needs the room waits for it"
    world.mover.end("demote")
    world.step()
    [value] = world.cache.suspensions.values()
    assert {tier for tier, _ in value.slots[0]} == {HOST}
    world.hold()
    world.finish()
    world.assert_right()


@pytest.mark.parametrize("laws", [("full",), ("constant", "full")], ids="+".join)
def test_with_a_plan_in_flight_it_is_left_out_of_a_step_before_it_goes(laws: tuple[str, ...]) -> None:
    """What goes down is what was learned of: a plan in flight would still write to it."""
    world = crowded(heads=[2] * len(laws), laws=laws, depth=1, slabs={1: 9, 2: 12}[len(laws)])
    park, seen = world.tiering.parking.park, []

    def watched(row: int) -> Any:
        seen.append(int(world.cache.touched[row]) <= world.cache.settled)
        return park(row)

    world.tiering.parking.park = watched  # type: ignore[method-assign]
    world.finish()
    world.assert_right()
    assert seen
    assert all(seen)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("reuse", [True, False])
def test_a_suspension_that_lost_a_part_starts_over_from_the_longest_prefix_that_is_kept(lost: int, reuse: bool) -> None:
    world = crowded(reuse=reuse, placement="write_back")
    world.hold("demote")
    away = world.until(Preempted)
    world.mover.end("demote", failing=[lost])
    world.hold()
    world.step()
    world.mover.failing = frozenset()
    world.finish()
    world.assert_right()
    again = next(event for event in world.of(Admitted, away.sequence_id) if event.resumed)
    assert again.restored_tokens == 0
    assert again.cached_tokens + again.recomputed_tokens == away.computed_tokens
    assert (again.cached_tokens > 0) <= reuse
    world.assert_all_can_be_had()


def test_a_suspension_whose_copy_back_fails_starts_over() -> None:
    world = crowded()
    away = world.until(Preempted)
    world.hold("promote")
    for _ in range(100):
        world.step()
        if world.mover.under_way("promote"):
            break
    world.mover.end("promote", failing=[0])
    world.hold()
    assert world.until(Restarted).sequence_id == away.sequence_id
    world.mover.failing = frozenset()
    world.finish()
    world.assert_right()
    assert world.of(Finished, away.sequence_id)[0].record.recomputed_tokens > 0
    world.assert_all_can_be_had()


def test_a_deadline_on_the_way_down_starts_it_over_and_its_slots_are_the_copys_until_the_end() -> None:
    world = crowded(slabs=10)
    world.hold("demote")
    away = world.until(Preempted)
    [order] = world.mover.under_way("demote")
    world.mover.pass_deadline("demote")
    world.step(3)
    assert not world.cache.suspensions, "nobody waits for it"
    assert (world.cache.pool.slots[0].refs[list(order.sources)] >= 1).all()
    assert (world.tiering.host.pool.slots[0].refs[list(order.targets)] == 1).all()
    world.mover.end("demote")
    world.hold()
    world.finish()
    world.assert_right()
    assert world.of(Finished, away.sequence_id)[0].reason == "length"
    world.assert_all_can_be_had()


@pytest.mark.parametrize("when", ["going down", "suspended", "coming up"])
def test_an_abort_frees_a_suspension_in_every_tier_once_its_copies_have_ended(when: str) -> None:
    world = crowded()
    world.hold(*{"going down": ("demote",), "suspended": (), "coming up": ("promote",)}[when])
    away = world.until(Preempted)
    if when == "suspended":
        for _ in range(20):
            if not world.tiering.parking.is_moving(away.sequence_id):
                break
            world.step()
    if when == "coming up":
        for _ in range(100):
            world.step()
            if world.mover.under_way("promote"):
                break
    assert world.core.abort(away.sequence_id, world.time)
    world.step()
    held = {order.route for order in world.mover.under_way()}
    assert held <= {"demote", "promote"}
    for order in world.mover.under_way():
        host = order.targets if order.route == "demote" else order.sources
        assert (world.tiering.host.pool.slots[0].refs[list(host)] == 1).all()
    world.mover.end("demote", "promote")
    world.hold()
    world.finish()
    world.assert_right()
    world.assert_all_can_be_had()
    assert not world.cache.suspensions


def test_without_room_on_the_host_it_is_computed_again() -> None:
    world = crowded(host_slabs=1)
    assert world.until(Preempted).action == "recompute"
    world.finish()
    world.assert_right()
    assert not world.of(Transferred)


@pytest.mark.parametrize(("bytes_a_second", "action"), [(1e12, "offload"), (1.0, "recompute")])
def test_auto_moves_what_is_dearer_to_compute(bytes_a_second: float, action: str) -> None:
    rates = Rates(bytes_a_second={"demote": 1e12, "promote": bytes_a_second, "store": 1.0, "load": 1.0})
    world = crowded(preemption="auto", rates=rates)
    assert world.until(Preempted).action == action
    world.finish()
    world.assert_right()


def test_drop_with_offload_serves_nobody_else_from_the_host() -> None:
    """Moving who gives way and keeping what others may want are two switches."""
    found = {}
    for placement in ("drop", "write_back"):
        world = crowded(placement=placement)
        away = world.until(Preempted)
        world.finish()
        world.crowd_out()
        asked = world.asked[away.sequence_id].prompt_token_ids.tolist()
        found[placement] = world.cached(world.serve(asked))
        world.assert_right()
        assert world.of(Preempted)[0].action == "offload"
    assert found == {"drop": {}, "write_back": {"host": 9}}


def test_recompute_with_write_back_moves_no_running_state() -> None:
    world = crowded(preemption="recompute", placement="write_back")
    away = world.until(Preempted)
    assert away.action == "recompute"
    assert not world.cache.suspensions
    world.finish()
    world.assert_right()
    assert all(event.restored_tokens == 0 for event in world.of(Admitted))


def test_a_suspension_keeps_what_it_shares_where_it_is() -> None:
    """A block that another sequence references takes no room of its own, and is not copied."""
    world = TierWorld(slabs=8, preemption="offload", placement="drop", by_hand=True)
    common = text(8, 5)
    first = world.ask(common + text(3, 1), 14)
    world.step(2)
    world.ask(common + text(3, 2), 14)
    away = world.until(Preempted)
    [order] = world.mover.under_way("demote")
    [value] = world.cache.suspensions.values()
    assert len(value.slots[0]) - order.blocks == 2
    assert away.sequence_id != first
    world.finish()
    world.assert_right()
    again = next(event for event in world.of(Admitted, away.sequence_id) if event.resumed)
    assert again.restored_tokens == away.computed_tokens
    world.assert_all_can_be_had()


def test_nobody_waits_for_blocks_that_a_suspended_sequence_has_yet_to_compute() -> None:
    """It computes nothing while it is away: whoever comes before it would wait for one that comes after."""
    world = TierWorld(slabs=8, budget=3, rows=3, preemption="offload", by_hand=True)
    world.ask(text(3, 1), 28)
    prompt = text(24, 2)
    slow = world.ask(prompt, 2)
    away = world.until(Preempted)
    assert (away.sequence_id, away.action) == (slow, "offload")
    world.step(2)
    assert away.computed_tokens < 20
    urgent = world.ask(prompt[:20] + text(1, 3), 1, priority=-1)
    world.finish()
    world.assert_right()
    entered = [(event.sequence_id, event.resumed) for event in world.of(Admitted)]
    assert entered.index((urgent, False)) < entered.index((slow, True))
    world.assert_all_can_be_had()
