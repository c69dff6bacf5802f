"""The arena: every slot of every layer is a place of its own, where the layout says it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16, FP32, INT4
from octavo.geometry.state import Component, Growing
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
