"""How blocks are cut from bytes: `Layout`, derived from a geometry and nothing else.

    slab 0                      slab 1
    +--------+--------+----+    +-------------------+--+
    | block  | block  |pad |    | block             |  |      a slab belongs to one group at a time
    | slot 0 | slot 1 |    |    | slot 1            |  |      slot = slab * blocks_per_slab + index
    +--------+--------+----+    +-------------------+--+
      group 0, 2 per slab         group 1, 1 per slab

Inside a block all layers of the group lie one after the other (block-major), each with its
components in order; `Field` says where. Groups of one block size need no padding: a slab is a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.errors import ConfigError
from octavo.geometry.dtypes import Dtype
from octavo.geometry.state import Component, Constant, Growing, LayerState, Windowed

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

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold positions 0 .. tokens - 1."""
        if self.block_tokens == 0:
            return 1
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Layout:
    groups: tuple[GroupLayout, ...]
    slab_bytes: int
    block_order: BlockOrder

    def address(self, group: int, slot: int) -> int:
        """Byte offset of a slot in its tier's arena."""
        g = self.groups[group]
        return slot // g.blocks_per_slab * self.slab_bytes + slot % g.blocks_per_slab * g.block_bytes

    def bytes_for(self, tokens: int) -> int:
        """Bytes of the blocks that one sequence of `tokens` computed positions holds, in whole blocks."""
        return sum(g.blocks_for(tokens) * g.block_bytes for g in self.groups)

    def slabs_for(self, tokens: int) -> int:
        """Slabs that one such sequence takes from an empty pool."""
        return sum(-(-g.blocks_for(tokens) // g.blocks_per_slab) for g in self.groups)

    @property
    def padding_bytes_per_slab(self) -> tuple[int, ...]:
        return tuple(self.slab_bytes - g.blocks_per_slab * g.block_bytes for g in self.groups)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers whose state follows the same law: they share block tables."""

    name: str
    layers: tuple[int, ...]
    components: tuple[tuple[Component, ...], ...]
    """One tuple per layer."""
    per_sequence: bool = False


def served_groups(layers: Sequence[LayerState]) -> tuple[StateGroup, ...]:
    """The groups in which octavo serves these layers today.

    Window layers join the growing ones: they attend within their window but keep their full
    length. Borrowed and stateless layers own nothing. Raises `ConfigError` for the other kinds.
    """
    kept: list[int] = []
    for index, state in enumerate(layers):
        if isinstance(state, (Growing, Windowed)):
            kept.append(index)
        elif state.bytes_kept(1):
            raise ConfigError(
                "model", type(state).__name__, f"layer {index} keeps a kind of state that is not served yet"
            )
    if not kept:
        return ()
    components = tuple(_components(layers[index]) for index in kept)
    return (StateGroup("full", tuple(kept), components),)


def _components(state: LayerState) -> tuple[Component, ...]:
    return state.components if isinstance(state, (Growing, Windowed, Constant)) else ()


def make_layout(groups: Sequence[StateGroup], block_tokens: int, block_order: BlockOrder = "heads_tokens") -> Layout:
    """Cut blocks of `block_tokens` positions for each group.

    The slab is the largest block; smaller ones are packed into it whole.
    Raises `ConfigError` when there is nothing to lay out or the block size is not positive.
    """
    if block_tokens < 1:
        raise ConfigError("block_size", block_tokens, "must be at least 1 token")
    if not groups:
        raise ConfigError("model", "no attention state", "there is nothing to keep in a KV cache")
    cut = [_cut(group, 0 if group.per_sequence else block_tokens, block_order) for group in groups]
    slab_bytes = max(size for _, size in cut)
    return Layout(
        groups=tuple(
            GroupLayout(
                name=group.name,
                layers=group.layers,
                block_tokens=0 if group.per_sequence else block_tokens,
                fields=fields,
                block_bytes=size,
                blocks_per_slab=slab_bytes // size,
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
