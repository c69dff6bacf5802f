"""Which layers share block tables: `served_groups` sorts a model's layer states into groups.

A group is what follows one law: state of all positions (`full`), of a window, of a chunk, or one state per
sequence (`constant`). A layer that keeps two kinds stands in two groups. Borrowed and stateless layers own
nothing and stand in none. Knows no bytes: those are `layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.geometry.state import (
    Borrowed,
    Chunked,
    Component,
    Constant,
    Growing,
    LayerState,
    Part,
    Stateless,
    Windowed,
    components_bytes,
    parts_of,
)


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers whose state follows the same law: they share block tables."""

    name: str
    layers: tuple[int, ...]
    components: tuple[tuple[Component, ...], ...]
    """One tuple per layer."""
    per_sequence: bool = False
    window_tokens: int | None = None
    chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Law:
    """What tells one group from another."""

    name: str
    per_sequence: bool = False
    window_tokens: int | None = None
    chunk_tokens: int | None = None


FULL = _Law("full")
CONSTANT = _Law("constant", per_sequence=True)


def served_groups(layers: Sequence[LayerState]) -> tuple[StateGroup, ...]:
    """The groups of these layers, in order of each law's first layer.

    Raises `ConfigError` for a kind of state that is not served. A window with sinks (first positions that stay
    readable) is kept at its full length.
    """
    members: dict[_Law, list[tuple[int, tuple[Component, ...]]]] = {}
    for index, state in enumerate(layers):
        for part in parts_of(state):
            law = _law(part, index)
            if law is not None and isinstance(part, (Growing, Windowed, Chunked, Constant)):
                members.setdefault(law, []).append((index, part.components))
    return tuple(
        StateGroup(
            law.name,
            tuple(layer for layer, _ in kept),
            tuple(components for _, components in kept),
            law.per_sequence,
            law.window_tokens,
            law.chunk_tokens,
        )
        for law, kept in members.items()
    )


def _law(part: Part, layer: int) -> _Law | None:
    if isinstance(part, (Borrowed, Stateless)) or not components_bytes(part.components):
        return None
    if isinstance(part, Growing) or (isinstance(part, Windowed) and part.sink_tokens):
        return FULL
    if isinstance(part, Windowed):
        return _Law(f"window_{part.window_tokens}", window_tokens=part.window_tokens)
    if isinstance(part, Chunked):
        return _Law(f"chunk_{part.chunk_tokens}", chunk_tokens=part.chunk_tokens)
    if isinstance(part, Constant):
        return CONSTANT
    raise ConfigError("model", type(part).__name__, f"layer {layer} keeps a kind of state that is not served yet")
