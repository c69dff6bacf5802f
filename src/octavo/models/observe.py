"""What a model's layers really store, seen by running it once.

`observed_layers` tells it, `require_geometry` compares it with what was planned. Owns the check on
geometry that does not trust a config: the keys and values that each layer hands to its cache.
Windows are not seen: they bound what is read, while the full length is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from octavo.errors import ModelError
from octavo.geometry.dtypes import FP32, Dtype
from octavo.geometry.state import Borrowed, Component, Growing, LayerState


class _Witness:
    """A cache that keeps nothing but shapes."""

    is_compileable = False

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}

    def update(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_idx: int,
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes[layer_idx] = ((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]))
        return key, value

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def observed_layers(model: PreTrainedModel, dtype: Dtype) -> tuple[LayerState, ...]:
    """One `Growing` state for each layer that stores keys and values, from one forward of two tokens.

    Windows are not seen here: they bound what is read, while the full length is kept. A layer
    number that stores nothing below one that does is reported as `Borrowed` from the layer before.
    """
    witness = _Witness()
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    # A model that is being served attends to pages; to be observed it attends as it came.
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            model(input_ids=ids, position_ids=positions, cache=witness, use_cache=True)
    finally:
        model.set_attn_implementation(attention)
    if not witness.shapes:
        raise ModelError("model", type(model).__name__, "no layer of it stores keys and values")
    layers: list[LayerState] = []
    for index in range(max(witness.shapes) + 1):
        shapes = witness.shapes.get(index)
        if shapes is None:
            layers.append(Borrowed(index - 1))
        else:
            layers.append(Growing((Component("k", shapes[0], dtype), Component("v", shapes[1], dtype))))
    return tuple(layers)


def require_geometry(model: PreTrainedModel, layers: Sequence[LayerState]) -> None:
    """Raise `ModelError` unless the model's layers store what `layers`, read from its config, say."""
    told = [_kept(state) for state in layers]
    seen = [_kept(state) for state in observed_layers(model, FP32)]
    for index in range(max(len(told), len(seen))):
        planned = told[index] if index < len(told) else {}
        stored = seen[index] if index < len(seen) else {}
        if planned != stored:
            remedy = (
                f"layer {index} stores {stored} a token where its config says {planned}; they do not belong together"
            )
            raise ModelError("config", type(model).__name__, remedy)


def _kept(state: LayerState) -> dict[str, tuple[int, ...]]:
    return {component.name: component.shape for component in getattr(state, "components", ())}
