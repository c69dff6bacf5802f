"""What one device keeps when several share a model: tensor, pipeline and data parallelism.

Tensor ranks split heads and channels: keys and values by kv heads, of which each rank keeps at least
one, so that fewer heads than ranks are replicated; recurrences by their heads or channels, with the
convolution before them; groups that state-space heads share like kv heads. What has no heads is
replicated on every rank: latents and their rotary keys, index keys, compressed entries, and inputs of
the residual's width that wait for the next position. A pipeline stage is charged its own layers,
and a data-parallel replica everything. Sizes that do not divide are refused, never rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import ConfigError
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import (
    Borrowed,
    Component,
    Compound,
    LayerState,
    Stateless,
)

_SPLIT = ("recurrent", "conv", "normaliser", "maximum")
"""Divided along the first axis, which must divide."""
_SHARED_HEADS = ("k", "v", "kv", "conv_groups")
"""Divided along the first axis down to one, which is then replicated."""
_KV_CHANNELS = ("conv_k", "conv_v")
"""Channels of kv heads: divided as those heads are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How many devices hold a model, and along what."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        given: dict[str, Any] = {"tp": self.tensor, "pp": self.pipeline, "dp": self.data}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(name, value, "must be a whole number of at least 1")

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.data


def device_geometries(
    geometry: ModelGeometry, parallelism: Parallelism, layers_per_stage: Sequence[int] | None = None
) -> tuple[ModelGeometry, ...]:
    """What one device of each pipeline stage keeps. All tensor ranks and all replicas keep the same.

    Layers are shared out evenly, the first stages taking one more where they do not divide, unless
    `layers_per_stage` says otherwise. Raises `ConfigError` where sizes do not divide.
    """
    ranked = _tensor_rank(geometry, parallelism.tensor)
    return tuple(_stage(ranked, first, last) for first, last in stages(geometry, parallelism, layers_per_stage))


def stages(
    geometry: ModelGeometry, parallelism: Parallelism, layers_per_stage: Sequence[int] | None = None
) -> tuple[tuple[int, int], ...]:
    """The layers of each pipeline stage, as (first, one past the last)."""
    count, parts = geometry.num_layers, parallelism.pipeline
    if parts > count:
        raise ConfigError("pp", parts, f"must be at most the {count} layers: a stage needs one")
    if layers_per_stage is None:
        layers_per_stage = [count // parts + (stage < count % parts) for stage in range(parts)]
    if len(layers_per_stage) != parts or sum(layers_per_stage) != count or min(layers_per_stage) < 1:
        raise ConfigError(
            "layers_per_stage", list(layers_per_stage), f"must share out {count} layers over pp={parts} stages"
        )
    ends = [sum(layers_per_stage[: stage + 1]) for stage in range(parts)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _stage(geometry: ModelGeometry, first: int, last: int) -> ModelGeometry:
    layers: list[LayerState] = []
    for index in range(first, last):
        state = geometry.layers[index]
        if isinstance(state, Borrowed):
            if state.layer < first:
                raise ConfigError(
                    "pp",
                    f"stage of layers {first} to {last - 1}",
                    f"layer {index} reads the state of layer {state.layer}, which lies on another stage; "
                    "use fewer stages, or layers_per_stage that keep both together",
                )
            state = Borrowed(state.layer - first)
        layers.append(state)
    return replace(geometry, layers=tuple(layers))


def _tensor_rank(geometry: ModelGeometry, ranks: int) -> ModelGeometry:
    if ranks == 1:
        return geometry
    heads = geometry.num_attention_heads
    if heads % ranks:
        raise ConfigError("tp", ranks, f"must divide the {heads} attention heads")
    split = {state: _split_state(state, ranks) for state in dict.fromkeys(geometry.layers)}
    layers = tuple(split[state] for state in geometry.layers)
    notes = list(geometry.notes)
    replicated = sorted(
        {c.shape[0] for part in geometry.parts if not isinstance(part, (Borrowed, Stateless))
         for c in part.components if c.name == "k" and c.shape[0] < ranks}
    )  # fmt: skip
    notes.extend(f"{kv_heads} kv heads are replicated over {ranks} tensor ranks" for kv_heads in replicated)
    names = geometry.components
    if any(name in names for name in ("latent", "kv", "compressed_kv")):
        notes.append(f"state without heads (latents) is replicated on all {ranks} tensor ranks")
    return replace(geometry, layers=layers, num_attention_heads=heads // ranks, notes=tuple(notes))


def _split_state(state: LayerState, ranks: int) -> LayerState:
    if isinstance(state, (Borrowed, Stateless)):
        return state
    if isinstance(state, Compound):
        heads = next((c.shape[0] for c in state.components if c.name == "k"), 0)
        parts = tuple(
            replace(part, components=tuple(_split(c, ranks, heads) for c in part.components)) for part in state.parts
        )
        return Compound(parts)
    return replace(state, components=tuple(_split(component, ranks) for component in state.components))


def _split(component: Component, ranks: int, kv_heads: int = 0) -> Component:
    name, first = component.name, component.shape[0]
    if name in _SPLIT:
        if first % ranks:
            raise ConfigError("tp", ranks, f"must divide the {first} heads or channels of {name} state")
        return replace(component, shape=(first // ranks, *component.shape[1:]))
    if name in _SHARED_HEADS:
        return replace(component, shape=(_heads_of_rank(first, ranks, name), *component.shape[1:]))
    if name in _KV_CHANNELS and kv_heads:
        width = first // kv_heads
        return replace(component, shape=(_heads_of_rank(kv_heads, ranks, name) * width, *component.shape[1:]))
    return component


def _heads_of_rank(heads: int, ranks: int, name: str) -> int:
    if heads % ranks == 0:
        return heads // ranks
    if ranks % heads == 0:
        return 1
    raise ConfigError("tp", ranks, f"must divide the {heads} heads of {name}, or be a multiple of them")
