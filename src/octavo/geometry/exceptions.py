"""Layers that are left out when keys and values are kept in eight bits: `with_layers_unquantised`.

Owns what the names of such layers mean. The first and last layers of a model, or those that look back
over a window only, lose the most by rounding or save the least: they can stay as the model computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.errors import ConfigError
from octavo.geometry.dtypes import Dtype
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import (
    Borrowed,
    Chunked,
    Component,
    Compound,
    Constant,
    LayerState,
    Stateless,
    Windowed,
    parts_of,
)

SLIDING = "sliding_window"
FIELD = "kv_cache_dtype_skip_layers"


def with_layers_unquantised(geometry: ModelGeometry, names: Sequence[str], dtype: Dtype) -> ModelGeometry:
    """The same model with the named layers' quantised state in `dtype`, and a note that says which they are.

    A name is a layer's index, or `sliding_window` for every layer with a window or a chunk. Raises `ConfigError`
    for a name that stands for no layer with quantised state.
    """
    chosen: list[int] = []
    for name in names:
        chosen.extend(_named(geometry, name))
    if not chosen:
        return geometry
    skipped = sorted(set(chosen))
    layers = tuple(_unquantised(s, dtype) if i in skipped else s for i, s in enumerate(geometry.layers))
    kind = "layer" if len(skipped) == 1 else "layers"
    note = f"{kind} {', '.join(map(str, skipped))} in {dtype}"
    return replace(geometry, layers=layers, notes=(*geometry.notes, note))


def _named(geometry: ModelGeometry, name: str) -> list[int]:
    if name == SLIDING:
        sliding = [any(isinstance(p, (Windowed, Chunked)) for p in parts_of(state)) for state in geometry.layers]
        found = [layer for layer, slides in enumerate(sliding) if slides]
        if not found:
            raise ConfigError(FIELD, name, "no layer of this model has a window; name layers by their index")
        return found
    if not name.isdecimal() or int(name) >= geometry.num_layers:
        raise ConfigError(FIELD, name, f"name layers 0 to {geometry.num_layers - 1}, or {SLIDING}")
    layer = int(name)
    state = geometry.layers[layer]
    if isinstance(state, Borrowed):
        raise ConfigError(FIELD, name, f"reads the state of layer {state.layer}; name that one")
    if not any(component.dtype.quantised for component in getattr(state, "components", ())):
        raise ConfigError(FIELD, name, "keeps no keys and values that would be quantised; leave it out")
    return [layer]


def _unquantised(state: LayerState, dtype: Dtype) -> LayerState:
    if isinstance(state, (Borrowed, Constant, Stateless)):
        return state
    if isinstance(state, Compound):
        return Compound(tuple(replace(part, components=_wide(part.components, dtype)) for part in state.parts))
    return replace(state, components=_wide(state.components, dtype))


def _wide(components: tuple[Component, ...], dtype: Dtype) -> tuple[Component, ...]:
    """Of constant state too, which is never quantised and stays as it is."""
    return tuple(replace(c, dtype=dtype) if c.dtype.quantised else c for c in components)
