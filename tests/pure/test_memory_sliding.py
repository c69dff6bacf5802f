"""Blocks given up while a sequence runs: the layout's arithmetic and the geometry's, and what admission makes of it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.worlds import ToyWorld, endings

from octavo.errors import CapacityError
from octavo.geometry.charge import bytes_charged
from octavo.geometry.dtypes import BF16
from octavo.geometry.state import Chunked, Component, Constant, Growing, Windowed
from octavo.memory.cache import KVCache
from octavo.memory.groups import served_groups
from octavo.memory.layout import BOUNDLESS, make_layout
from octavo.memory.slabs import ENOUGH, slab_bytes_for, worst_padding
from octavo.memory.values import Reservation, Shortfall
from octavo.memory.waste import useful_bytes, waste
from octavo.policy.bundle import Policies
from octavo.scheduling.events import Preempted
from octavo.simulate.toy_laws import law_of, toy_layout

KV = (Component("k", (2, 8), BF16), Component("v", (2, 8), BF16))
STATES = [Growing(KV), *(Windowed(KV, n) for n in (1, 2, 5, 8, 9)), *(Chunked(KV, n) for n in (1, 3, 8)), Constant(KV)]


# -- arithmetic -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "block_tokens"), list(product(STATES[:-1], (1, 4, 16))))
def test_a_group_reads_from_where_its_layers_do_at_every_position(state: object, block_tokens: int) -> None:
    group = make_layout(served_groups([state]), block_tokens).groups[0]  # type: ignore[list-item]
    positions = np.arange(60)
    firsts = [state.first_readable(p) for p in positions.tolist()]  # type: ignore[attr-defined]
    assert group.first_readable(positions).tolist() == firsts
    assert group.first_block(positions).tolist() == [first // block_tokens for first in firsts]
    assert [law_of(group).first_read(p) for p in positions.tolist()] == firsts


@pytest.mark.parametrize(("state", "block_tokens"), list(product(STATES, (1, 4, 16))))
def test_the_most_blocks_of_a_group_are_what_the_geometry_charges(state: object, block_tokens: int) -> None:
    layout = make_layout(served_groups([state]), block_tokens)  # type: ignore[list-item]
    group = layout.groups[0]
    for step in (1, 2, 7, 16, 40):
        lengths = np.arange(1, 60)
        most = [group.most_blocks(n, step) for n in lengths.tolist()]
        assert group.most_blocks_many(lengths, np.full_like(lengths, step)).tolist() == most
        for tokens, blocks in zip(lengths.tolist(), most, strict=True):
            charged = bytes_charged(state, tokens, step_tokens=step, block_tokens=block_tokens)  # type: ignore[arg-type]
            assert blocks * group.block_bytes == charged


@pytest.mark.parametrize("law", ["window_1", "window_4", "window_5", "chunk_3", "chunk_8"])
@pytest.mark.parametrize("step", [1, 3, 8])
def test_a_row_never_holds_more_than_its_charge_and_sometimes_all_of_it(law: str, step: int) -> None:
    cache = KVCache(toy_layout((2,), 4, (law,)), 64, 1)
    row, most = np.zeros(1, dtype=np.int32), cache.layout.groups[0].most_blocks(100, step)
    held = []
    for end in range(step, 100, step):
        cache.slide(row)
        assert isinstance(cache.reserve(0, end), Reservation)
        held.append(int(cache.tables[0].held[0]))
        cache.commit(row, np.array([end]))
    assert max(held) <= most
    if law.startswith("window"):
        assert max(held) >= most - (step == 8)


def test_the_largest_step_is_the_largest_that_fits() -> None:
    layout = toy_layout((2, 2), 4, ("full", "window_6"))
    for slabs in range(6, 24):
        cache = KVCache(layout, slabs, 1)
        for tokens in range(1, cache.max_tokens_per_sequence() + 1):
            step = cache.largest_step(tokens, 32)
            assert layout.slabs_for(tokens, step) <= slabs
            assert step == 32 or layout.slabs_for(tokens, step + 1) > slabs


def test_no_length_fills_a_pool_of_windows_and_constant_state() -> None:
    cache = KVCache(toy_layout((2, 2), 4, ("window_6", "constant")), 4, 1)
    assert cache.max_tokens_per_sequence() == BOUNDLESS
    assert cache.room_tokens(0) == 0
    cache.reserve(0, 5)
    assert cache.room_tokens(0) == 8


def test_a_sequence_of_constant_state_alone_has_room_for_any_number_of_positions() -> None:
    cache = KVCache(toy_layout((2,), 4, ("constant",)), 1, 2)
    assert isinstance(cache.reserve(0, 1), Reservation)
    assert cache.room_tokens(0) == BOUNDLESS
    assert cache.missing_blocks(0, 10_000) == [0]
    assert isinstance(cache.reserve(1, 1), Shortfall)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=5), st.integers(0, 40_000))
@settings(max_examples=200, deadline=None)
def test_a_slab_holds_the_largest_block_and_is_the_first_that_pads_little(sizes: list[int], most: int) -> None:
    slab = slab_bytes_for(sizes, most)
    assert max(sizes) <= slab <= max(*sizes, most)
    assert worst_padding(sizes, slab) <= worst_padding(sizes, max(sizes))
    if worst_padding(sizes, max(sizes)) < ENOUGH:
        assert slab == max(sizes)


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from(("full", "window_5", "chunk_6", "constant"))),
        min_size=1,
        max_size=3,
    ),
    slab_bytes=st.sampled_from((0, 400, 1500)),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_useful_bytes_and_waste_add_up_to_what_is_owned_where_blocks_are_given_up(
    groups: list[tuple[int, str]], slab_bytes: int, steps: list[tuple[int, int]]
) -> None:
    layout = toy_layout([n for n, _ in groups], 4, [law for _, law in groups], most_slab_bytes=slab_bytes)
    cache = KVCache(layout, 40, 3)
    for row, count in steps:
        rows = np.array([row], dtype=np.int32)
        cache.slide(rows)
        end = int(cache.committed[row]) + count
        if isinstance(cache.reserve(row, end + 3), Reservation):
            cache.commit(rows, np.array([end]))
        owned = int((cache.pool.owner >= 0).sum()) * layout.slab_bytes
        assert useful_bytes(cache) + waste(cache).total_bytes == pytest.approx(owned, abs=3 * len(groups))


def test_a_contiguous_pool_of_several_groups_keeps_each_table_in_one_run_and_never_slides() -> None:
    layout = toy_layout((4, 1), 4, ("full", "window_4"))
    cache = KVCache(layout, 12, 2, contiguous=True)
    assert isinstance(cache.reserve(0, 20), Reservation)
    cache.commit(np.zeros(1, dtype=np.int32), np.array([20]))
    cache.slide(np.zeros(1, dtype=np.int32))
    assert [table.held.tolist() for table in cache.tables] == [[5, 0], [5, 0]]
    assert all((np.diff(table.row(0)) == 1).all() for table in cache.tables)
    assert isinstance(cache.reserve(1, 20), Shortfall)


# -- admission and progress -------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("laws", [("full", "window_6"), ("window_4", "chunk_8"), ("constant", "window_5")])
def test_a_request_that_fits_with_small_steps_alone_is_served_in_a_pool_of_just_the_least_size(
    laws: tuple[str, ...], depth: int
) -> None:
    layout = toy_layout((3, 2), laws=laws)
    least = layout.slabs_for(29, 1)
    assert layout.slabs_for(29, 24) > least
    world = ToyWorld(heads=(3, 2), laws=laws, slabs=least, seqs=2, budget=24, depth=depth)
    world.ask(20, 10)
    world.ask(18, 12)
    world.finish()
    world.assert_all_answered()
    assert len(endings(world.events)) == 2


def test_a_request_that_can_never_fit_is_refused_at_once_with_the_arithmetic() -> None:
    world = ToyWorld(heads=(3, 2), laws=("constant", "full"), slabs=5, seqs=2)
    with pytest.raises(CapacityError, match="needs 9 slabs of 64 B, the whole pool has 5"):
        world.ask(20, 10)
    window = ToyWorld(laws=("window_16",), slabs=4, seqs=1)
    with pytest.raises(CapacityError, match="needs 5 blocks of 4 tokens, the whole pool has 4"):
        window.ask(40, 10)
    assert window.ask(10, 6) == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_the_guarantee_holds_where_blocks_given_up_share_slabs(depth: int) -> None:
    """A window's slabs grow while its old blocks are still in flight, unless what is held is all that is charged."""
    world = ToyWorld(
        heads=(3, 1),
        laws=("full", "window_4"),
        slabs=14,
        seqs=4,
        budget=11,
        depth=depth,
        policies=Policies.named(admission="guaranteed_no_evict"),
    )
    for i in range(24):
        world.ask(3 + 5 * i % 13, 2 + 7 * i % 15)
        world.step(i % 3)
    world.finish()
    world.assert_all_answered()
    assert world.count(Preempted) == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_packing_goes_on_although_freed_blocks_free_no_slab(depth: int) -> None:
    world = ToyWorld(heads=(5, 3), laws=("full", "window_5"), slab_bytes=600, slabs=4, seqs=4, budget=12, depth=depth)
    assert world.cache.pool.blocks_per_slab == (3, 5)
    for i in range(16):
        world.ask(2 + 3 * i % 7, 4 + 5 * i % 11)
    world.finish()
    world.assert_all_answered()
    assert world.count(Preempted) > 0
