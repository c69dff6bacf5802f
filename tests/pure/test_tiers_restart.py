"""A second engine over the disk that a first one left, and hashes that collide, over all tiers."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pure.tier_worlds import TierWorld, text
from tests.pure.worlds import endings

from octavo.memory.keys import sha256

# -- a second engine over what the first one left -----------------------------------------------------

A, B = text(17, 1), text(22, 2)
GROUPS = [("full",), ("full", "window_6"), ("full", "constant")]


def over(left: TierWorld | None, laws: tuple[str, ...] = ("full",), **more: Any) -> TierWorld:
    return TierWorld(
        heads=[2] * len(laws),
        laws=laws,
        slabs=20,
        placement="write_through",
        disk_slots=60,
        left=() if left is None else left.mover.disk,
        **more,
    )


@pytest.mark.parametrize("laws", GROUPS, ids="+".join)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_second_engine_goes_on_from_what_the_first_one_stored(laws: tuple[str, ...], depth: int) -> None:
    first = over(None, laws)
    for prompt in (A, B):
        first.serve(prompt, 4)
    second = over(first, laws, depth=depth)
    numbers = [second.serve(prompt, 4) for prompt in (A, B)]
    second.assert_right()
    assert [second.cached(number) for number in numbers] == [{"disk": 16}, {"disk": 20}]
    second.assert_all_can_be_had()


def test_what_was_stored_serves_its_own_salt_alone_after_a_restart() -> None:
    first = over(None)
    first.serve(A, salt="one")
    second = over(first)
    found = [second.cached(second.serve(A, salt=salt)) for salt in ("another", "", "one")]
    assert found == [{}, {}, {"disk": 16}]
    second.assert_right()


def test_another_model_finds_nothing_of_what_the_first_one_stored() -> None:
    first = over(None)
    first.serve(A)
    second = over(first, model_name="another model")
    assert second.cached(second.serve(A)) == {}
    keys = [{key for key, _ in world.mover.disk[0].values()} for world in (first, second)]
    assert keys[0] < keys[1], "each keeps its own under keys of its own"
    assert second.tiering.disk is not None
    assert second.tiering.disk.blocks == [len(keys[1])]
    second.assert_right()


def test_what_was_reset_is_not_there_after_a_restart() -> None:
    first = over(None)
    first.serve(A)
    first.core.reset_kept(first.time)
    first.step()
    first.serve(B[:5])
    assert len(first.mover.disk[0]) == 1, "what was stored since"
    second = over(first)
    assert [second.cached(second.serve(prompt)) for prompt in (A, B)] == [{}, {"disk": 4}]


def test_the_oldest_use_goes_first_when_a_disk_that_was_left_is_full() -> None:
    first = over(None)
    for prompt in (A, B):
        first.serve(prompt)
    second = TierWorld(slabs=20, placement="write_through", disk_slots=9, left=first.mover.disk)
    second.serve(text(17, 3))
    second.assert_right()
    third = TierWorld(slabs=20, placement="write_through", disk_slots=9, left=second.mover.disk)
    assert [third.cached(third.serve(prompt)) for prompt in (B, A)] == [{"disk": 20}, {}]


# -- hashes that collide ------------------------------------------------------------------------------


def of_one_byte(data: bytes) -> bytes:
    return sha256(data)[:1]


@pytest.mark.parametrize("digest", [of_one_byte, lambda data: b"the same for everything"], ids=["one byte", "none"])
@pytest.mark.parametrize("laws", GROUPS, ids="+".join)
def test_a_hash_of_one_byte_never_serves_wrong_state_from_any_tier(laws: tuple[str, ...], digest: Any) -> None:
    left: TierWorld | None = None
    for run in range(2):  # the second goes on from the first one's disk, with other texts besides
        world = over(left, laws, digest=digest, host_slabs=12)
        for number in range(24):
            world.serve(text(9 + number % 9, number % 7 + 4 * run), 3, salt=("a", "b")[number % 3 == 0])
        world.assert_right()
        assert len(endings(world.events)) == 24
        world.assert_all_can_be_had()
        left = world
