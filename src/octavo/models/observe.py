"""What a model's layers really store and read, seen by running it once.

`observed_layers` tells it, `require_geometry` compares it with what was planned. Owns the check on
geometry that does not trust a config: the keys and values that each layer hands to its cache, the
window or chunk with which it attends, and whose keys a layer attends to that stores none.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from octavo.errors import ModelError
from octavo.geometry.dtypes import FP32, Dtype
from octavo.geometry.state import (
    Borrowed,
    Chunked,
    Component,
    Compound,
    Constant,
    Growing,
    LayerState,
    Stateless,
    Windowed,
    parts_of,
)
from octavo.kernels.interface import AttentionRule
from octavo.models.bridge import IMPLEMENTATION, cache_name
from octavo.models.latent import latent_layers
from octavo.models.latent_index import run_indexes
from octavo.models.recurrent import StateWitness, comparable
from octavo.models.tickets import Call, leave

Shapes = dict[str, tuple[int, ...]]


class _Witness(StateWitness):
    """A cache that keeps nothing but shapes."""

    is_compileable = False

    def __init__(self, latent: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.latent = latent
        """Layers that store a latent and a rotary key instead of keys and values."""
        self.stored: dict[int, Shapes] = {}
        """Layer -> its components per position."""
        self.rules: dict[int, AttentionRule] = {}
        """Layer that stored -> the rule by which it attends to its own."""
        self.borrowed: dict[int, int] = {}
        """Layer that stored nothing -> the layer whose keys it attends to."""

    def update(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_idx: int,
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self.latent:
            self.stored[layer_idx] = {"latent": (key.shape[3],), "rope_k": (value.shape[3],)}
        else:
            self.stored[layer_idx] = {"k": (key.shape[1], key.shape[3]), "v": (value.shape[1], value.shape[3])}
        leave(_Look(self, layer_idx), key, value, kwargs)
        return key, value

    def update_indexer(self, new: torch.Tensor, layer_idx: int) -> torch.Tensor:
        self.stored[layer_idx]["index_k"] = (new.shape[2],)
        return new

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """The ticket of a layer that is watched: notes who attends, and by which rule; the outcome is zeros."""

    witness: _Witness
    layer: int

    def attend(self, call: Call) -> torch.Tensor:
        reader = self.layer if call.layer is None or call.layer in self.witness.stored else call.layer
        if reader == self.layer:
            self.witness.rules[self.layer] = call.rule
        else:
            self.witness.borrowed[reader] = self.layer
        tokens, heads = call.query.shape[2], call.query.shape[1]
        return call.query.new_zeros((tokens, heads, call.value.shape[-1]))


def observed_layers(model: PreTrainedModel, dtype: Dtype) -> tuple[LayerState, ...]:
    """What each layer keeps, its components in `dtype`, from one forward of two tokens."""
    run_indexes(model)
    witness = _Witness(latent_layers(model))
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    arguments: dict[str, Any] = {cache_name(model): witness}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = positions[0]
    attention = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        with torch.inference_mode():
            model(input_ids=ids, position_ids=positions, use_cache=True, **arguments)
    finally:
        model.set_attn_implementation(attention)
    seen = {*witness.stored, *witness.constant, *witness.borrowed}
    if not seen:
        raise ModelError("model", type(model).__name__, "no layer of it stores keys and values")
    return tuple(_state(witness, layer, dtype) for layer in range(max(seen) + 1))


def _state(witness: _Witness, layer: int, dtype: Dtype) -> LayerState:
    parts: list[Growing | Windowed | Chunked | Constant] = []
    if layer in witness.stored:
        parts.append(_attended(_components(witness.stored[layer], dtype), witness.rules.get(layer)))
    if layer in witness.constant:
        parts.append(Constant(_components(witness.constant[layer], dtype)))
    if len(parts) > 1:
        return Compound(tuple(parts))
    if parts:
        return parts[0]
    return Borrowed(witness.borrowed[layer]) if layer in witness.borrowed else Stateless()


def _attended(components: tuple[Component, ...], rule: AttentionRule | None) -> Growing | Windowed | Chunked:
    if rule is not None and rule.chunk_tokens is not None:
        return Chunked(components, rule.chunk_tokens)
    if rule is not None and rule.window is not None:
        return Windowed(components, rule.window)
    return Growing(components)


def _components(shapes: Shapes, dtype: Dtype) -> tuple[Component, ...]:
    return tuple(Component(name, shape, dtype) for name, shape in shapes.items())


def require_geometry(model: PreTrainedModel, layers: Sequence[LayerState]) -> None:
    """Raise `ModelError` unless the model's layers keep what `layers`, read from its config, say.

    A layer may read less than is kept for it, never more.
    """
    seen = observed_layers(model, FP32)
    for index in range(max(len(layers), len(seen))):
        planned = layers[index] if index < len(layers) else Stateless()
        found = seen[index] if index < len(seen) else Stateless()
        if _shapes(planned) != _shapes(found):
            how = f"stores {_shapes(found)} a token where its config says {_shapes(planned)}"
        elif _lender(planned) != _lender(found):
            how = f"reads {_whose(found)} where its config says {_whose(planned)}"
        elif not all(_covers(planned, part) for part in parts_of(found)):
            how = f"attends over {_span(found)} where its config says {_span(planned)}"
        else:
            continue
        raise ModelError("config", type(model).__name__, f"layer {index} {how}; they do not belong together")


def _shapes(state: LayerState) -> Shapes:
    shapes: Shapes = {}
    for part in parts_of(state):
        components = getattr(part, "components", ())
        shapes.update(
            comparable(components) if isinstance(part, Constant) else {one.name: one.shape for one in components}
        )
    return shapes


def _lender(state: LayerState) -> int | None:
    return state.layer if isinstance(state, Borrowed) else None


def _whose(state: LayerState) -> str:
    return "its own state" if (lender := _lender(state)) is None else f"the state of layer {lender}"


def _covers(planned: LayerState, found: LayerState) -> bool:
    """Whether what `found` reads stays within what `planned` keeps."""
    for part in parts_of(planned):
        if isinstance(part, Windowed) and isinstance(found, (Growing, Windowed, Chunked)):
            return not isinstance(found, Growing) and _reach(found) <= part.window_tokens
        if isinstance(part, Chunked) and isinstance(found, (Growing, Windowed, Chunked)):
            return isinstance(found, Chunked) and part.chunk_tokens % found.chunk_tokens == 0
    return True


def _reach(state: Windowed | Chunked) -> int:
    return state.window_tokens if isinstance(state, Windowed) else state.chunk_tokens


def _span(state: LayerState) -> str:
    for part in parts_of(state):
        if isinstance(part, Windowed):
            return f"a window of {part.window_tokens}"
        if isinstance(part, Chunked):
            return f"chunks of {part.chunk_tokens}"
    return "all positions"
