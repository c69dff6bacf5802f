"""Pins: what is pinned goes last, up to a bound and until a moment, and never at the cost of anybody who runs."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.metrics_by_hand import MODEL, scraped, value
from tests.pure.random_tier_worlds import _ask_something, drawn, tally
from tests.pure.tier_worlds import TierWorld, text
from tests.pure.worlds import endings

from octavo.errors import RequestError
from octavo.memory.pins import MOST_PINS, Pin, Pins
from octavo.observe.metrics import Metrics
from octavo.scheduling.kept import PINNED_SHARE
from octavo.simulate.toy_laws import toy_layout
from octavo.simulate.toy_mover import ToyFaults


def pins_of(world: TierWorld) -> Pins:
    assert world.scheduler.kept.pins is not None
    return world.scheduler.kept.pins


def pin(world: TierWorld, prompt: list[int], ttl: float = 1e6, salt: str = "") -> Pin:
    return world.core.pin(np.array(prompt, dtype=np.int32), salt, world.time, ttl)


def kept(world: TierWorld, prompt: list[int]) -> list[set[str]]:
    return world.kept_in(prompt)[: len(prompt) // world.block_tokens]


def broken(world: TierWorld) -> int:
    shelves = [world.cache.sharing, world.tiering.host]
    return sum(one.shelf.broken_pins for one in shelves if one is not None and one.shelf is not None)


def drop_world(**more: Any) -> TierWorld:
    """Nothing goes down to the host: what goes is gone."""
    return TierWorld(**({"placement": "drop", "slabs": 16, "context": 60} | more))


A, B = text(17, 1), text(17, 2)


# -- who goes first ---------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", ["lru", "cheapest_to_rebuild"])
@pytest.mark.parametrize(
    ("laws", "heads", "slab_bytes"),
    [
        (("full",), [2], 0),
        (("full", "full"), [2, 3], 600),
        (("full", "full"), [2, 2], 0),
        (("full", "window_6"), [2, 3], 0),
    ],
)
def test_a_pinned_prefix_outlives_everything_that_is_not_pinned(
    eviction: str, laws: tuple[str, ...], heads: list[int], slab_bytes: int
) -> None:
    slabs = toy_layout(heads, 4, laws, most_slab_bytes=slab_bytes).slabs_for(64, None)
    world = drop_world(eviction=eviction, laws=laws, heads=heads, slab_bytes=slab_bytes, slabs=slabs)
    for prompt in (A, B):
        world.serve(prompt)
    assert pin(world, A).tokens == 16
    for round_ in range(4):  # others take less than all the room, again and again
        for seed in range(10):
            world.serve(text(9, 100 * round_ + seed + 10))
    assert world.cached(world.serve(A)) == {"device": 16}, "though nobody has used it for long"
    assert world.cached(world.serve(B)) == {}
    assert broken(world) == 0
    world.assert_right()
    world.assert_all_can_be_had()


def test_without_a_pin_it_would_have_gone() -> None:
    world = drop_world()
    world.serve(A)
    world.crowd_out()
    assert world.cached(world.serve(A)) == {}


def test_what_is_pinned_on_the_host_outlives_what_is_not() -> None:
    world = TierWorld(slabs=12, host_slabs=12, block_tokens=4, context=40)
    for prompt in (A, B):
        world.serve(prompt)
    pin(world, A[:9])
    world.crowd_out(40)
    assert [("host" in one or "device" in one) for one in kept(world, A)[:2]] == [True, True]
    assert kept(world, B) == [set()] * 4
    assert sum(world.cached(world.serve(A)).values()) >= 8
    world.assert_right()
    world.assert_all_can_be_had()


def test_what_is_pinned_while_it_runs_is_kept_when_it_ends() -> None:
    world = drop_world()
    number = world.ask(A, 6)
    world.step(2)
    made = pin(world, A)
    assert made.tokens == 16
    assert not endings(world.events).get(number), "it runs on"
    world.finish()
    for seed in range(30):
        world.serve(text(9, seed + 50))
    assert world.cached(world.serve(A)) == {"device": 16}
    world.assert_right()


def test_unpinned_or_out_of_time_it_goes_like_any_other() -> None:
    for ends in ("unpinned", "out of time"):
        world = drop_world()
        world.serve(A)
        made = pin(world, A, ttl=10.0)
        assert pins_of(world).tokens == 16
        if ends == "unpinned":
            assert world.core.unpin(made.name)
        else:
            world.time += 10.0
            assert pins_of(world).tokens_at(world.time) == 0, "before anybody has looked"
        world.crowd_out()
        assert world.cached(world.serve(A)) == {}, ends
        assert pins_of(world).live() == []
        assert pins_of(world).tokens == 0
        assert not world.core.unpin(made.name)
        assert broken(world) == 0


def test_a_pin_holds_until_its_moment_and_not_beyond() -> None:
    world = drop_world()
    world.serve(A)
    made = pin(world, A, ttl=100.0)
    world.time = made.until_s - 1
    world.step()
    assert [one.name for one in world.core.live_pins(world.time - 1)] == [made.name]
    world.time = made.until_s
    world.step()
    assert pins_of(world).live() == []


def test_of_two_pins_the_shared_start_stays_pinned_until_both_have_ended() -> None:
    world = drop_world(slabs=40)
    long = A + text(8, 9)
    world.serve(long)
    short_pin, long_pin = pin(world, A[:9]), pin(world, long)
    assert (short_pin.tokens, long_pin.tokens, pins_of(world).tokens) == (8, 24, 24), "what they share counts once"
    world.core.unpin(long_pin.name)
    assert pins_of(world).tokens == 8
    world.crowd_out(80)
    assert world.cached(world.serve(A)) == {"device": 8}
    world.core.unpin(short_pin.name)
    world.crowd_out(80)
    assert world.cached(world.serve(A)) == {}
    world.assert_right()


def test_a_reset_forgets_what_is_pinned_and_the_pins() -> None:
    world = TierWorld(slabs=12, placement="write_through", disk_slots=20)
    world.serve(A)
    made = pin(world, A[:9])
    world.core.reset_kept(world.time)
    world.step()
    assert pins_of(world).live() == []
    assert not world.core.unpin(made.name)
    assert world.cached(world.serve(A)) == {}
    assert broken(world) == 0, "forgotten, and not broken"
    assert pin(world, A[:9]).name != made.name
    world.assert_right()


# -- a pin keeps nobody out ---------------------------------------------------------------------------


@pytest.mark.parametrize("admission", ["max_utilization", "guaranteed_no_evict"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("placement", ["drop", "write_back"])
def test_who_needs_all_the_room_gets_it_pinned_or_not(admission: str, depth: int, placement: str) -> None:
    world = drop_world(slabs=12, admission=admission, depth=depth, placement=placement, host_slabs=4)
    world.serve(A)
    pin(world, A[:13])
    number = world.ask(text(20, 5), 28)  # 48 positions: all twelve blocks
    world.finish()
    assert len(world.tokens(number)) == 28
    assert broken(world) > 0
    metrics = Metrics(world.core, MODEL, clock=lambda: world.time)
    series = scraped(metrics)
    assert sum(value(series, "broken_pins_total", tier=tier) for tier in ("device", "host")) == broken(world)
    assert value(series, "pinned_tokens") == 12, "the pin lives on, and has nothing left to keep"
    world.assert_right()
    world.assert_all_can_be_had()


def test_pins_take_no_room_that_admission_counts_on() -> None:
    seated = []
    for pinned in (False, True):
        world = drop_world(slabs=16, rows=4)
        world.serve(A)
        if pinned:
            pin(world, A)
        for seed in range(4):
            world.ask(text(13, seed + 5), 3)
        world.step()
        seated.append(len(world.scheduler.running))
        world.finish()
        world.assert_right()
    assert seated == [3, 3]


# -- bounds ---------------------------------------------------------------------------------------------


def test_beyond_the_bound_a_pin_is_refused_and_nothing_has_changed() -> None:
    world = drop_world(slabs=16)  # 64 positions
    for prompt in (A, B):
        world.serve(prompt)
    assert pins_of(world).most_tokens == PINNED_SHARE * 64 == 16
    pin(world, A[:13])
    before = [one.name for one in pins_of(world).live()]
    with pytest.raises(RequestError, match="12 are, of 16 that may be") as refused:
        pin(world, B[:9])
    assert refused.value.field == "prompt"
    assert ([one.name for one in pins_of(world).live()], pins_of(world).tokens) == (before, 12)
    assert pin(world, B[:5]).tokens == 4, "what is left may be pinned"
    assert pin(world, A[:13]).tokens == 12, "and what is pinned already takes nothing more"


def test_pins_whose_time_is_over_take_no_room_from_a_new_one_though_nothing_has_run_since() -> None:
    world = drop_world(slabs=16)
    for prompt in (A, B):
        world.serve(prompt)
    pin(world, A, ttl=5.0)
    world.time += 5.0
    assert pin(world, B).tokens == 16


def test_there_are_at_most_so_many_pins_however_little_they_pin() -> None:
    world = drop_world()
    for _ in range(MOST_PINS):
        assert pin(world, A).tokens == 0
    with pytest.raises(RequestError, match=str(MOST_PINS)):
        pin(world, A)
    world.core.unpin("pin-1")
    pin(world, A)


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(ttl: float) -> None:
    world = drop_world()
    world.serve(A)
    with pytest.raises(RequestError) as refused:
        pin(world, A, ttl)
    assert refused.value.field == "ttl"


def test_only_what_is_kept_under_its_salt_is_pinned() -> None:
    world = drop_world()
    world.serve(A, salt="mine")
    assert [pin(world, A, salt=salt).tokens for salt in ("", "yours", "mine")] == [0, 0, 16]
    assert [one.salt for one in pins_of(world).live()] == ["", "yours", "mine"]
    assert pin(world, A[:11], salt="mine").tokens == 8, "whole blocks alone"
    assert pin(world, A + B, salt="mine").tokens == 16


def test_without_reuse_there_is_nothing_to_pin() -> None:
    world = drop_world(reuse=False, placement="write_back")
    world.serve(A)
    with pytest.raises(RequestError, match="reuse=prefix"):
        pin(world, A)
    assert not world.core.unpin("pin-1")
    assert world.core.live_pins(0.0) == []


# -- whole worlds ---------------------------------------------------------------------------------------


def random_pins(seed: int, *, requests: int = 10, aborts: float = 0.0, **fixed: Any) -> Counter[str]:
    """A world as `random_world` draws them, in which somebody pins and unpins; what happened, counted."""
    rng = Random(f"pins {seed}")
    world = TierWorld(**drawn(rng, {"reuse": True} | fixed))
    openings = [text(rng.randint(4, 17), rng.randrange(10**6)) for _ in range(3)]
    left, done = requests, Counter[str]()
    for _ in range(5_000):
        if left and len(world.scheduler.waiting) < 8 and rng.random() < 0.5:
            left -= 1
            _ask_something(world, rng, openings)
        if rng.random() < 0.3 and world.asked:
            _pin_something(world, rng, done)
        if aborts and world.asked and rng.random() < aborts:
            world.core.abort(rng.choice(list(world.asked)), world.time)
        if rng.random() < 0.005:
            world.core.reset_kept(world.time)
            assert not pins_of(world).live()
        world.step()
        assert_counted(world)
        if not left and not world.core.has_work:
            break
    world.finish()
    world.assert_right()
    done += tally(world)
    done["broken"] = broken(world)
    world.assert_all_can_be_had()
    for one in pins_of(world).live():
        assert world.core.unpin(one.name)
    assert pins_of(world).tokens == 0
    assert world.cache.sharing is not None
    assert not any(node.pins for node in world.cache.sharing.directory.nodes())
    return done


def _pin_something(world: TierWorld, rng: Random, done: Counter[str]) -> None:
    live = pins_of(world).live()
    if live and rng.random() < 0.2:
        assert world.core.unpin(rng.choice(live).name)
        done["unpinned"] += 1
        return
    asked = world.asked[rng.choice(list(world.asked))]
    tokens = asked.prompt_token_ids.tolist()
    try:
        made = pin(world, tokens[: rng.randint(1, len(tokens))], rng.choice((2.0, 9.0, 60.0)), asked.cache_salt)
    except RequestError:
        done["refused"] += 1
        return
    done["pinned tokens"] += made.tokens


def assert_counted(world: TierWorld) -> None:
    """The bound holds, and a node is as often pinned as pins go through it."""
    pins, sharing = pins_of(world), world.cache.sharing
    assert sharing is not None
    through = Counter(id(node) for _, path in pins._pins.values() for node in path)
    assert pins.tokens == len(through) * world.block_tokens <= pins.most_tokens
    for node in sharing.directory.nodes():
        assert node.pins == through[id(node)]
    for shelf in (sharing.shelf, world.tiering.host.shelf):
        assert shelf is not None
        for group, slot in shelf.withheld:
            assert sharing.directory.node_of(group, slot, shelf.tier).pins


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    depth=st.sampled_from((0, 1)),
    admission=st.sampled_from(("max_utilization", "guaranteed_no_evict")),
    aborts=st.sampled_from((0.0, 0.08)),
)
def test_with_pins_at_random_tokens_are_right_and_every_pool_comes_back(
    seed: int, depth: int, admission: str, aborts: float
) -> None:
    random_pins(seed, depth=depth, admission=admission, aborts=aborts)


def test_the_random_worlds_pin_break_and_refuse() -> None:
    total: Counter[str] = Counter()
    for seed in range(24):
        total += random_pins(
            seed,
            **({"faults": ToyFaults()} if seed % 3 else {}),
            **({"slabs": 12, "laws": ["full"], "heads": [2], "block_tokens": 4, "slab_bytes": 0} if seed % 2 else {}),
            requests=14,
        )
    wanted = ("pinned tokens", "unpinned", "refused", "broken", "Preempted", "promote", "demote", "host tokens")
    assert {name: total[name] for name in wanted if not total[name]} == {}, dict(total)
