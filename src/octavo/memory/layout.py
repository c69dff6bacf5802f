"""How blocks are cut from bytes: `Layout`, derived from a geometry and nothing else.

    slab 0                      slab 1
    +--------+--------+----+    +-------------------+--+
    | block  | block  |pad |    | block             |  |      a slab belongs to one group at a time
    | slot 0 | slot 1 |    |    | slot 1            |  |      slot = slab * blocks_per_slab + index
    +--------+--------+----+    +-------------------+--+
      group 0, 2 per slab         group 1, 1 per slab

Inside a block all layers of the group lie one after the other (block-major), each with its
components in order; `Field` says where. Groups of one block size need no padding: a slab is a block.
Which layers form a group is `groups`; how large a slab is, `slabs`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from octavo.errors import ConfigError
from octavo.geometry.charge import window_blocks, window_blocks_many
from octavo.geometry.dtypes import Dtype
from octavo.geometry.state import Component
from octavo.memory.groups import StateGroup
from octavo.memory.slabs import slab_bytes_for
from octavo.memory.values import Int64

BlockOrder = Literal["heads_tokens", "tokens_heads"]
"""Order inside a component of a block: [heads, tokens, dim] or [tokens, heads, dim]; the kernel's choice."""


@dataclass(frozen=True, slots=True)
class Field:
    """One component of one layer inside a block."""

    layer: int
    component: str
    offset_bytes: int
    shape: tuple[int, ...]
    """With the token axis in the layout's order, for example [kv_heads, block_tokens, head_dim]."""
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The blocks of one group. `block_tokens` is 0 for constant state: one block a sequence."""

    name: str
    layers: tuple[int, ...]
    block_tokens: int
    fields: tuple[Field, ...]
    block_bytes: int
    blocks_per_slab: int
    window_tokens: int | None = None
    """A query at position p reads p - window_tokens + 1 .. p; None: no window."""
    chunk_tokens: int | None = None
    """A query reads only positions of its own chunk; None: no chunks."""

    @property
    def slides(self) -> bool:
        """Whether blocks at the front come to a point where no later token can read them."""
        return self.window_tokens is not None or self.chunk_tokens is not None

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold positions 0 .. tokens - 1, none given up."""
        if self.block_tokens == 0:
            return 1
        return -(-tokens // self.block_tokens)

    def most_blocks(self, tokens: int, step_tokens: int) -> int:
        """The most blocks held at once on the way to `tokens` positions, `step_tokens` of them at most in a step."""
        reach = self.window_tokens or self.chunk_tokens
        if reach is None or not tokens:
            return self.blocks_for(tokens)
        return window_blocks(tokens, reach, step_tokens, self.block_tokens)

    def most_blocks_many(self, tokens: Int64, step_tokens: Int64) -> Int64:
        """`most_blocks` of each pair."""
        if self.block_tokens == 0:
            return np.ones_like(tokens)
        reach = self.window_tokens or self.chunk_tokens
        if reach is None:
            return -(-tokens // self.block_tokens)
        return window_blocks_many(tokens, reach, step_tokens, self.block_tokens)

    def first_readable(self, positions: Int64) -> Int64:
        """The lowest position that a query at each of `positions`, or later, may still read."""
        if self.window_tokens is not None:
            return np.maximum(0, positions - self.window_tokens + 1)
        if self.chunk_tokens is not None:
            return positions - positions % self.chunk_tokens
        return np.zeros_like(positions)

    def first_block(self, positions: Int64) -> Int64:
        """The lowest block that a query at each of `positions`, or later, may still read."""
        return self.first_readable(positions) // max(1, self.block_tokens)


@dataclass(frozen=True, slots=True)
class Layout:
    groups: tuple[GroupLayout, ...]
    slab_bytes: int
    block_order: BlockOrder

    def address(self, group: int, slot: int) -> int:
        """Byte offset of a slot in its tier's arena."""
        g = self.groups[group]
        return slot // g.blocks_per_slab * self.slab_bytes + slot % g.blocks_per_slab * g.block_bytes

    def blocks_for(self, tokens: int, step_tokens: int | None = None) -> list[int]:
        """Blocks of each group that one sequence of `tokens` positions holds at most.

        With `step_tokens`, the most positions that it computes in one step, windows and chunks give up what nobody
        can read any more; without, everything is held.
        """
        if step_tokens is None:
            return [g.blocks_for(tokens) for g in self.groups]
        return [g.most_blocks(tokens, step_tokens) for g in self.groups]

    def bytes_for(self, tokens: int, step_tokens: int | None = None) -> int:
        """Bytes of `blocks_for`."""
        counts = self.blocks_for(tokens, step_tokens)
        return sum(n * g.block_bytes for n, g in zip(counts, self.groups, strict=True))

    def slabs_for(self, tokens: int, step_tokens: int | None = None) -> int:
        """Slabs that one such sequence takes from an empty pool."""
        counts = self.blocks_for(tokens, step_tokens)
        return sum(-(-n // g.blocks_per_slab) for n, g in zip(counts, self.groups, strict=True))

    def most_tokens(self, slabs: int, step_tokens: int | None = None) -> int:
        """The most positions of one sequence that `slabs` slabs hold; `BOUNDLESS` when no length fills them."""
        return largest(0, BOUNDLESS, lambda tokens: self.slabs_for(tokens, step_tokens) <= slabs)

    def largest_step(self, tokens: int, most: int, slabs: int) -> int:
        """The most positions a step, 1 to `most`, with which one sequence reaches `tokens` within `slabs` slabs."""
        return largest(1, most, lambda step: self.slabs_for(tokens, step) <= slabs)

    @property
    def signature(self) -> str:
        """The same for two layouts if and only if a block of one can be read as a block of the other."""
        groups = [(g.name, g.layers, g.block_tokens, g.fields, g.block_bytes) for g in self.groups]
        return hashlib.sha256(repr((groups, self.block_order)).encode()).hexdigest()

    @property
    def padding_bytes_per_slab(self) -> tuple[int, ...]:
        return tuple(self.slab_bytes - g.blocks_per_slab * g.block_bytes for g in self.groups)

    @property
    def padding_share(self) -> tuple[float, ...]:
        """Of a slab, the part that each group cannot use."""
        return tuple(padding / self.slab_bytes for padding in self.padding_bytes_per_slab)


BOUNDLESS = 2**40
"""Positions of a sequence that no memory limits: windows and constant state alone."""


def make_layout(
    groups: Sequence[StateGroup],
    block_tokens: int,
    block_order: BlockOrder = "heads_tokens",
    *,
    most_slab_bytes: int = 0,
) -> Layout:
    """Cut blocks of `block_tokens` positions for each group, and slabs that hold whole blocks of each.

    A slab is the largest block where others waste little beside it, else a few of them, up to `most_slab_bytes`.
    Raises `ConfigError` when there is nothing to lay out or the block size is not positive.
    """
    if block_tokens < 1:
        raise ConfigError("block_size", block_tokens, "must be at least 1 token")
    if not groups:
        raise ConfigError("model", "no attention state", "there is nothing to keep in a KV cache")
    cut = [_cut(group, 0 if group.per_sequence else block_tokens, block_order) for group in groups]
    slab_bytes = slab_bytes_for([size for _, size in cut], most_slab_bytes)
    return Layout(
        groups=tuple(
            GroupLayout(
                name=group.name,
                layers=group.layers,
                block_tokens=0 if group.per_sequence else block_tokens,
                fields=fields,
                block_bytes=size,
                blocks_per_slab=slab_bytes // size,
                window_tokens=group.window_tokens,
                chunk_tokens=group.chunk_tokens,
            )
            for group, (fields, size) in zip(groups, cut, strict=True)
        ),
        slab_bytes=slab_bytes,
        block_order=block_order,
    )


def _cut(group: StateGroup, block_tokens: int, order: BlockOrder) -> tuple[tuple[Field, ...], int]:
    fields: list[Field] = []
    offset = 0
    for layer, components in zip(group.layers, group.components, strict=True):
        for component in components:
            fields.append(Field(layer, component.name, offset, _shape(component, block_tokens, order), component.dtype))
            offset += component.bytes * max(1, block_tokens)
    return tuple(fields), offset


def _shape(component: Component, block_tokens: int, order: BlockOrder) -> tuple[int, ...]:
    if block_tokens == 0:
        return component.shape
    if len(component.shape) < 2 or order == "tokens_heads":
        return (block_tokens, *component.shape)
    return (component.shape[0], block_tokens, *component.shape[1:])


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest of `low` to `high` that fits, where `low` does and whatever is beyond one that does not, neither."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
