"""octavo's own charge is one thing: the planner's pages and the runtime's layout give the same bytes.

Over every published config: the same groups, blocks, slabs and bytes of a sequence, whatever the length and
the step; and what a slab loses to blocks of unequal size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16, FP8
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import Component, Growing, Windowed
from octavo.memory.groups import served_groups
from octavo.memory.layout import Layout, make_layout
from octavo.planner.asked import Asked
from octavo.planner.build import ground_of, plan
from octavo.planner.charging import ChargeLimits, paging_for
from octavo.planner.engines import engine_named
from octavo.planner.paging import Paging

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text("utf-8"))
NOT_SERVED = {"deepseek-ai/DeepSeek-V4-Flash": "Compressed"}
"""Kinds of state that are planned and not served yet: served_groups refuses them by name."""
LENGTHS = (1, 15, 16, 17, 127, 128, 129, 1000, 4096, 5000, 8193, 40_000, 131_072)
STEPS = (1, 16, 512, 2048)
MOST_SLAB = 2**28


def both(geometry: ModelGeometry, block_tokens: int, step: int, most: int = MOST_SLAB) -> tuple[Layout, Paging]:
    limits = ChargeLimits(block_tokens=block_tokens, step_tokens=step, max_num_seqs=256, most_slab_bytes=most)
    paging = paging_for(engine_named("octavo"), geometry, limits)
    assert isinstance(paging, Paging)
    return make_layout(served_groups(geometry.layers), block_tokens, most_slab_bytes=most), paging


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in NOT_SERVED])
def test_the_layout_and_the_planner_charge_the_same_bytes(name: str) -> None:
    geometry = geometry_from_config(PUBLISHED[name], BF16)
    for block_tokens in (16, 64):
        for step in STEPS:
            layout, paging = both(geometry, block_tokens, step)
            assert layout.slab_bytes == paging.unit_bytes
            by_bytes = sorted((g.block_bytes, g.blocks_per_slab, g.block_tokens) for g in layout.groups)
            assert by_bytes == sorted((g.block_bytes, g.per_unit, g.block_tokens) for g in paging.groups)
            for tokens in LENGTHS:
                assert layout.bytes_for(tokens, step) == paging.bytes_for(tokens), (block_tokens, step, tokens)
                assert layout.slabs_for(tokens, step) == paging.units_for(tokens)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in NOT_SERVED])
def test_a_pool_holds_the_longest_sequence_that_the_plan_says(name: str) -> None:
    config = PUBLISHED[name]
    made = plan(config, kv_dtype="bf16", kv_cache_memory_bytes="8GiB", max_num_batched_tokens=512)
    assert made.capacity is not None
    layout, _ = both(geometry_from_config(config, BF16), 16, 512, 2**33 // 64)
    assert made.capacity.block_bytes == layout.slab_bytes
    for context, charged in made.sequence_bytes_per_device.items():
        assert charged == layout.bytes_for(context, 512)
    assert made.capacity.largest_context == layout.most_tokens(2**33 // layout.slab_bytes, 512)


def test_what_is_not_served_is_refused_by_its_kind_and_planned_all_the_same() -> None:
    for name, kind in NOT_SERVED.items():
        geometry = geometry_from_config(PUBLISHED[name], BF16)
        with pytest.raises(ConfigError, match=kind):
            served_groups(geometry.layers)
        assert plan(PUBLISHED[name]).sequence_bytes


def test_a_quantised_type_is_charged_alike_where_it_is_kept() -> None:
    for name in ("meta-llama/Meta-Llama-3.1-8B", "google/gemma-3-12b-it"):
        layout, paging = both(geometry_from_config(PUBLISHED[name], FP8), 16, 512)
        assert layout.bytes_for(5000, 512) == paging.bytes_for(5000)


def test_a_window_with_sinks_is_kept_whole_by_both_and_that_is_said() -> None:
    k = Component("k", (2, 64), BF16)
    layers = (Windowed((k,), 128, sink_tokens=4), Growing((k,)))
    geometry = ModelGeometry(model_type="", architecture="", layers=layers, kv_dtype=BF16, hidden_size=256,
                             num_attention_heads=4)  # fmt: skip
    layout, paging = both(geometry, 16, 64)
    assert layout.bytes_for(1000, 64) == paging.bytes_for(1000) == 63 * 16 * 2 * 256
    assert any("sinks" in note for note in paging.notes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_padding_of_slabs_stays_under_three_percent(name: str) -> None:
    """At default settings, by group; entries of compressed attention by the planner's own slabs."""
    made = ground_of(PUBLISHED[name], Asked.of(kv_cache_memory_bytes="16GiB"))
    paging = paging_for(made.engine, made.device, made.charge)
    assert isinstance(paging, Paging)
    for group in paging.groups:
        assert 1 - group.per_unit * group.block_bytes / paging.unit_bytes < 0.03, group.name
