"""The config against the checkpoint's tensors: do the projections have the rows that it says?

A `config.json` can be older than the weights beside it. The weights win: they are what runs. The
disagreement is returned as a value, or refused by name before anything is sized by a wrong figure.
Tensors of other parts than the language model, packed ones and names not known are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from octavo.errors import ModelError
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import Borrowed, Component, LayerState, Stateless

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|blk)\.(\d+)\.")
_PROJECTION = re.compile(r"(?:^|\.)(k_proj|v_proj|kv_a_proj_with_mqa|attn_k|attn_v|attn_kv_a_mqa)\.weight$")
_ELSEWHERE = re.compile(r"vision|visual|audio|image|encoder|mtp|nextn", re.IGNORECASE)
"""Parts of a checkpoint whose layers are not those of the language model."""
_KEPT = {
    "k_proj": ("k",),
    "v_proj": ("v",),
    "kv_a_proj_with_mqa": ("latent", "rope_k"),
    "attn_k": ("k",),
    "attn_v": ("v",),
    "attn_kv_a_mqa": ("latent", "rope_k"),
}
"""What of a layer's state each matrix computes, together."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    tensor: str
    layer: int
    shape: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...]
    """Shapes of the components that the matrix computes, as the config has them."""

    @property
    def per_head(self) -> bool:
        return len(self.kept) == 1 and len(self.kept[0]) == 2

    @property
    def field(self) -> str:
        return "num_key_value_heads" if self.per_head else "kv_lora_rank"

    @property
    def stated(self) -> int:
        """What the config says of `field`."""
        return self.kept[0][0]

    @property
    def remedy(self) -> str:
        names = "num_key_value_heads or head_dim" if self.per_head else "kv_lora_rank or qk_rope_head_dim"
        return f"correct {names} in config.json, or fetch the config of the same revision"

    def __str__(self) -> str:
        rows = self.shape[0]
        if not self.per_head:
            widths = " + ".join(str(prod(shape)) for shape in self.kept)
            expected = sum(prod(shape) for shape in self.kept)
            return (
                f"{self.tensor} has shape {list(self.shape)} where the config gives {widths} = {expected} rows; "
                "the weights win"
            )
        heads, width = self.kept[0]
        held = f"{rows // width} kv heads" if rows % width == 0 else f"{rows} rows"
        return (
            f"{self.tensor} has shape {list(self.shape)}, {rows} rows, where the config gives {heads} kv heads "
            f"x {width} = {heads * width}; the weights win: they hold {held}"
        )


def disagreements(geometry: ModelGeometry, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Disagreement, ...]:
    """Projections of keys, values and latents whose rows are not what their layer keeps, in the order of `shapes`.

    Looks at unquantised matrices [rows, hidden] alone.
    """
    found: list[Disagreement] = []
    for name, shape in shapes.items():
        projection, place = _PROJECTION.search(name), _LAYER.search(name)
        if projection is None or place is None or _ELSEWHERE.search(name):
            continue
        layer = int(place[1])
        if len(shape) != 2 or shape[1] != geometry.hidden_size or layer >= geometry.num_layers:
            continue
        kept = [c.shape for c in _components(geometry.layers[layer]) if c.name in _KEPT[projection[1]]]
        if kept and sum(prod(each) for each in kept) != shape[0]:
            found.append(Disagreement(name, layer, shape, tuple(kept)))
    return tuple(found)


def _components(state: LayerState) -> tuple[Component, ...]:
    """Of all kinds of state that a layer keeps side by side."""
    return () if isinstance(state, (Borrowed, Stateless)) else state.components


def require_agreement(geometry: ModelGeometry, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ModelError` for the first disagreement, naming the tensor, its shape and the field to correct."""
    found = disagreements(geometry, shapes)
    if found:
        first = found[0]
        raise ModelError(
            first.field,
            first.stated,
            f"{first}; {first.remedy} ({len(found)} {'tensors disagree' if len(found) > 1 else 'tensor disagrees'})",
        )


def require_layers(geometry: ModelGeometry, names: Iterable[str]) -> None:
    """Raise `ModelError` where a whole checkpoint has no tensor of the last layers that the config gives."""
    last = max((int(found[1]) for name in names if (found := _LAYER.search(name))), default=-1)
    if 0 <= last < geometry.num_layers - 1:
        raise ModelError(
            "num_hidden_layers",
            geometry.num_layers,
            f"the checkpoint's tensors end with layer {last}; correct num_hidden_layers in config.json to {last + 1}, "
            "or fetch the weights of the same revision",
        )
