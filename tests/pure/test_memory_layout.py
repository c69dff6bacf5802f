"""How blocks are cut from bytes: sizes, addresses, padding, and the arithmetic of capacity."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16
from octavo.geometry.state import (
    Borrowed,
    Chunked,
    Component,
    Compound,
    Compressed,
    Constant,
    Growing,
    Stateless,
    Windowed,
)
from octavo.memory.groups import StateGroup, served_groups
from octavo.memory.layout import Layout, make_layout
from octavo.simulate.toy_model import toy_layout


def textbook(kv_heads: int) -> Layout:
    """32 layers, head dim 128, bf16: the example of every introduction to KV caches."""
    kv = (Component("k", (kv_heads, 128), BF16), Component("v", (kv_heads, 128), BF16))
    return make_layout(served_groups([Growing(kv)] * 32), 16)


@pytest.mark.parametrize(("kv_heads", "token_bytes", "gib"), [(8, 131_072, 1), (32, 524_288, 4)])
def test_the_textbook_model_keeps_131072_bytes_a_token_and_1_gib_for_8192(
    kv_heads: int, token_bytes: int, gib: int
) -> None:
    layout = textbook(kv_heads)
    assert layout.groups[0].block_bytes == 16 * token_bytes
    assert layout.bytes_for(8192) == gib * 2**30
    assert layout.slabs_for(8192) == 512
    assert layout.padding_bytes_per_slab == (0,)


def test_a_block_is_bytes_a_token_times_its_tokens() -> None:
    layout = toy_layout((3,), 5)
    assert layout.groups[0].block_bytes == 5 * (2 * 3 * 2 * 2)  # tokens x (k and v, 3 heads, dim 2, 2 bytes)


@pytest.mark.parametrize("heads", [(2,), (4, 2), (6, 2), (2, 2), (5, 2), (7, 3, 2)])
def test_addresses_of_a_group_are_disjoint_and_inside_the_arena(heads: tuple[int, ...]) -> None:
    layout, slabs = toy_layout(heads), 7
    for group, cut in enumerate(layout.groups):
        taken: set[int] = set()
        for slot in range(slabs * cut.blocks_per_slab):
            first = layout.address(group, slot)
            block = range(first, first + cut.block_bytes)
            slab = slot // cut.blocks_per_slab
            assert slab * layout.slab_bytes <= first
            assert block[-1] < (slab + 1) * layout.slab_bytes, "a block crosses into the next slab"
            assert taken.isdisjoint(block)
            taken.update(block)


def test_the_slab_is_the_largest_block_and_smaller_ones_are_packed_whole() -> None:
    layout = toy_layout((5, 2))
    wide, narrow = layout.groups
    assert layout.slab_bytes == wide.block_bytes == 5 * 2 * 2 * 2 * 4
    assert (wide.blocks_per_slab, narrow.blocks_per_slab) == (1, 2)
    assert layout.padding_bytes_per_slab == (0, layout.slab_bytes - 2 * narrow.block_bytes)


def test_groups_of_equal_blocks_need_no_padding() -> None:
    layout = toy_layout((2, 2))
    assert layout.padding_bytes_per_slab == (0, 0)
    assert [group.blocks_per_slab for group in layout.groups] == [1, 1]


def test_fields_fill_a_block_without_gap_or_overlap() -> None:
    group = textbook(8).groups[0]
    end = 0
    for part in group.fields:
        assert part.offset_bytes == end
        elements = 1
        for size in part.shape:
            elements *= size
        end += elements * 2
    assert end == group.block_bytes
    assert [part.component for part in group.fields[:2]] == ["k", "v"]
    assert [part.layer for part in group.fields] == [layer for layer in range(32) for _ in "kv"]


@pytest.mark.parametrize(("order", "shape"), [("heads_tokens", (8, 16, 128)), ("tokens_heads", (16, 8, 128))])
def test_the_order_inside_a_block_changes_shapes_and_nothing_else(order: str, shape: tuple[int, ...]) -> None:
    kv = (Component("k", (8, 128), BF16),)
    layout = make_layout([StateGroup("full", (0,), (kv,))], 16, order)  # type: ignore[arg-type]
    assert layout.groups[0].fields[0].shape == shape
    assert layout.groups[0].block_bytes == 16 * 8 * 128 * 2


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_tokens_rounds_up(tokens: int, blocks: int) -> None:
    assert toy_layout().groups[0].blocks_for(tokens) == blocks


def test_a_group_of_constant_state_takes_one_block_a_sequence() -> None:
    kv = (Component("k", (4, 8), BF16),)
    layout = make_layout(
        [StateGroup("full", (0,), (kv,)), StateGroup("state", (1,), (kv,), per_sequence=True)], block_tokens=4
    )
    assert [layout.groups[1].blocks_for(n) for n in (1, 100)] == [1, 1]
    assert layout.bytes_for(9) == 3 * layout.groups[0].block_bytes + layout.groups[1].block_bytes


def test_slabs_count_each_group_in_whole_slabs() -> None:
    layout = toy_layout((4, 2))
    assert [layout.slabs_for(n) for n in (1, 4, 5, 8, 9, 12)] == [2, 2, 3, 3, 5, 5]


def test_layers_of_one_law_form_a_group_in_order_of_each_laws_first_layer() -> None:
    kv = (Component("k", (2, 8), BF16), Component("v", (2, 8), BF16))
    groups = served_groups(
        [Windowed(kv, 8), Growing(kv), Stateless(), Chunked(kv, 16), Borrowed(0), Constant(kv), Windowed(kv, 8)]
    )
    assert [(group.name, group.layers) for group in groups] == [
        ("window_8", (0, 6)),
        ("full", (1,)),
        ("chunk_16", (3,)),
        ("constant", (5,)),
    ]
    laws = [(group.window_tokens, group.chunk_tokens, group.per_sequence) for group in groups]
    assert laws == [(8, None, False), (None, None, False), (None, 16, False), (None, None, True)]


def test_windows_of_two_lengths_share_no_tables() -> None:
    kv = (Component("k", (2, 8), BF16),)
    groups = served_groups([Windowed(kv, 8), Windowed(kv, 9), Windowed(kv, 8)])
    assert [(group.window_tokens, group.layers) for group in groups] == [(8, (0, 2)), (9, (1,))]


def test_a_window_with_sinks_keeps_its_full_length_and_shares_tables_with_layers_that_grow() -> None:
    kv = (Component("k", (2, 8), BF16),)
    groups = served_groups([Growing(kv), Windowed(kv, 8, sink_tokens=2)])
    assert [(group.name, group.layers) for group in groups] == [("full", (0, 1))]


def test_a_layer_that_keeps_two_kinds_stands_in_two_groups() -> None:
    kv, state = (Component("k", (2, 8), BF16),), (Component("recurrent", (4, 4), BF16),)
    groups = served_groups([Compound((Growing(kv), Constant(state))), Growing(kv)])
    assert [(group.name, group.layers, group.components) for group in groups] == [
        ("full", (0, 1), (kv, kv)),
        ("constant", (0,), (state,)),
    ]


def test_a_kind_of_state_that_is_not_served_is_refused_by_name() -> None:
    kv = (Component("k", (2, 8), BF16),)
    with pytest.raises(ConfigError, match=r"Compressed.*layer 1"):
        served_groups([Growing(kv), Compressed(kv, 4, waiting=kv)])


def test_a_block_of_no_tokens_and_a_model_without_state_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_size=0"):
        toy_layout((2,), 0)
    with pytest.raises(ConfigError, match="nothing to keep"):
        make_layout([], 16)
