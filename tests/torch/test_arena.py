"""The arena: every slot of every layer is a place of its own, where the layout says it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16, FP32, INT4
from octavo.geometry.state import Component, Constant, Growing
from octavo.memory.groups import StateGroup, served_groups
from octavo.memory.layout import make_layout
from octavo.runtime.arena import Arena


def kv(heads, dim, dtype=FP32):
    return (Component("k", (heads, dim), dtype), Component("v", (heads, dim), dtype))


def two_groups(order="tokens_heads"):
    """One block of `wide` a slab, three of `narrow` and some padding."""
    wide = StateGroup("wide", (0, 2), (kv(2, 10), kv(2, 10)))
    narrow = StateGroup("narrow", (1,), (kv(1, 12),))
    return make_layout((wide, narrow), 3, order)


@pytest.mark.parametrize("order", ["tokens_heads", "heads_tokens"])
def test_every_layer_component_and_slot_has_its_own_bytes(order):
    layout = two_groups(order)
    assert layout.groups[1].blocks_per_slab == 3
    assert layout.padding_bytes_per_slab[1] > 0
    slabs = 6
    arena = Arena(layout, slabs)
    written = {}
    for g, group in enumerate(layout.groups):
        slots = [s * group.blocks_per_slab + i for s in range(g, slabs, 2) for i in range(group.blocks_per_slab)]
        units = arena.units(g, np.asarray(slots, np.int32))
        for field in group.fields:
            view = arena.view(field.layer, field.component)
            for slot, unit in zip(slots, units, strict=True):
                value = float(len(written) + 1)
                view[unit] = value
                written[field, slot, int(unit)] = value
                where = layout.address(g, slot) + field.offset_bytes
                assert view[unit].data_ptr() - arena.bytes.data_ptr() == where
    for (field, _, unit), value in written.items():
        assert (arena.view(field.layer, field.component)[unit] == value).all()


@pytest.mark.parametrize("order", ["tokens_heads", "heads_tokens"])
@pytest.mark.parametrize("first", [0, 2])
def test_clearing_a_block_touches_nothing_else(order, first):
    layout = two_groups(order)
    arena = Arena(layout, 4)
    arena.bytes.fill_(1)
    before = arena.bytes.clone()
    unit = int(arena.units(1, np.asarray([4], np.int32))[0])
    arena.clear(1, unit, first)
    start, size = layout.address(1, 4), layout.groups[1].block_bytes
    inside = arena.bytes[start : start + size]
    assert int((inside == 0).sum()) == size * (3 - first) // 3
    axis = 1 if order == "heads_tokens" else 0
    kept = arena.view(1, "k")[unit].narrow(axis, 0, first)
    assert (kept != 0).all()
    inside.copy_(before[start : start + size])
    assert torch.equal(arena.bytes, before)


def state_space(inner=8, groups=2, states=4):
    """As geometry divides Mamba 2: a convolution in two components, and a recurrence in another type."""
    return Constant(
        (
            Component("conv", (inner, 3), BF16),
            Component("conv_groups", (groups, 2 * states, 3), BF16),
            Component("recurrent", (2, inner // 2, states), FP32),
        )
    )


def test_states_lie_where_the_layout_says_and_a_divided_convolution_is_one():
    layout = make_layout(served_groups([state_space(), Growing(kv(2, 40)), state_space()]), 4, "tokens_heads")
    group = layout.groups[0]
    assert (group.name, group.block_tokens) == ("constant", 0)
    assert group.block_bytes == 2 * state_space().bytes_per_sequence
    arena = Arena(layout, 6)
    for slot in (0, 3):
        unit = int(arena.units(0, np.asarray([slot], np.int32))[0])
        for layer in (0, 2):
            (conv,), (recurrent,) = arena.slots(layer).convolutions, arena.slots(layer).recurrences
            assert (conv.shape[1:], conv.dtype) == ((8 + 2 * 2 * 4, 3), torch.bfloat16)
            assert (recurrent.shape[1:], recurrent.dtype) == ((2, 4, 4), torch.float32)
            conv[unit], recurrent[unit] = 1.0, 2.0
            start = layout.address(0, slot) + group.fields[0 if layer == 0 else 3].offset_bytes
            assert conv[unit].data_ptr() - arena.bytes.data_ptr() == start
            assert recurrent[unit].data_ptr() == conv[unit].data_ptr() + conv[unit].nbytes
        start = layout.address(0, slot)
        assert arena.bytes[start : start + group.block_bytes].view(torch.int16).ne(0).sum() > group.block_bytes // 3
    assert int(arena.bytes.ne(0).sum()) <= 2 * group.block_bytes


@pytest.mark.parametrize("slabs", [1, 2, 7])
def test_all_parts_of_a_group_have_the_same_places_and_the_last_block_is_one(slabs):
    """Also where a block may start at many more places than there are blocks: kernels read keys and values alike."""
    layout = make_layout(served_groups([Growing(kv(2, 20, BF16)), state_space(56)]), 4, "tokens_heads")
    assert any(group.blocks_per_slab > 1 for group in layout.groups)
    arena = Arena(layout, slabs)
    pages, slots = arena.pages(0), arena.slots(1)
    for group, views in ((0, (pages.k, pages.v)), (1, (*slots.convolutions, *slots.recurrences))):
        last = slabs * layout.groups[group].blocks_per_slab - 1
        unit = int(arena.units(group, np.asarray([last], np.int32))[0])
        assert len({view.shape[0] for view in views}) == 1
        assert unit < views[0].shape[0]


def test_copies_read_every_block_before_they_write_any():
    layout = make_layout(served_groups([state_space()]), 4, "tokens_heads")
    arena = Arena(layout, 5)
    recurrent = arena.slots(0).recurrences[0]
    for slot in range(5):
        recurrent[slot] = float(slot)
    arena.copy(0, np.asarray([0, 1, 2], np.int32), np.asarray([1, 2, 0], np.int32))
    assert recurrent[:, 0, 0, 0].tolist() == [2, 0, 1, 3, 4]


def test_one_block_a_slab_needs_no_translation():
    layout = make_layout(served_groups([Growing(kv(2, 4, BF16))] * 3), 16, "tokens_heads")
    slots = np.asarray([5, 0, 3], np.int32)
    arena = Arena(layout, 6)
    assert arena.units(0, slots) is slots
    pages = arena.pages(1)
    assert pages.k.shape == (6, 16, 2, 4)
    assert pages.k.dtype == torch.bfloat16
    assert pages.token_bytes == 2 * 2 * 4 * 2


def test_the_arena_starts_as_zeros():
    arena = Arena(two_groups(), 4)
    assert not arena.bytes.any()


def test_an_empty_arena_is_refused():
    with pytest.raises(ConfigError, match="n_slabs"):
        Arena(two_groups(), 0)


def test_more_memory_than_there_is_is_refused_by_its_size():
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        Arena(two_groups(), 2**58)


def test_a_type_without_kernels_is_refused_by_name():
    layout = make_layout(served_groups([Growing(kv(2, 4, INT4))]), 16, "tokens_heads")
    with pytest.raises(ConfigError, match="int4"):
        Arena(layout, 2).pages(0)


def test_a_layer_that_keeps_nothing_has_no_pages():
    with pytest.raises(ConfigError, match="layer 7"):
        Arena(two_groups(), 2).pages(7)
