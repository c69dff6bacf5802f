"""What surrounds the layers of a model, where all of them are fused: `Stack`, from token ids to logits.

Owns the recognition of the embedding, the tables that turn heads, the last norm and the output head, and the check
of the whole against what the model gave. Where it is recognised a step is one native call, and only the rows
that need logits attend in the last layer and go through its second half, the last norm and the head. Logits are
float32; where the largest of each row is all that is wanted, they are not stored.

Invariant: tables are the model's own rotary modules' answers, one row a position, made when first needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from octavo.kernels.layer import NormWeights
from octavo.kernels.settled import settled
from octavo.models.fused_parts import NotRecognised, read_norm
from octavo.models.fused_watch import RotaryCall, Watched
from octavo.models.plain import more_than_weights

_LAST_NORMS = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "final_norm", "layer_norm")
_OFFSETS = (0, 2)
"""Rows before that of position 0 in a table of positions."""
FIRST_POSITIONS = 2048
"""Rows of a table when it is first made."""


@dataclass(slots=True, eq=False)
class Table:
    """Cosines and sines [positions, entries] of one kind of layer."""

    call: RotaryCall
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None

    def upto(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """At least so many rows."""
        if self.cos is None or self.sin is None or len(self.cos) < positions:
            held = 0 if self.cos is None else len(self.cos)
            rows = torch.arange(max(positions, 2 * held, FIRST_POSITIONS))
            self.cos, self.sin = (made[0].contiguous() for made in self.call.again(rows[None]))
        return self.cos, self.sin

    def forget(self) -> None:
        """Rotary modules may be fixed for another context after they were tried."""
        self.cos = self.sin = None


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """See the module docstring."""

    model: PreTrainedModel
    tables: dict[int, Table]
    """By the number that layers have for them."""
    embedding_scale: float
    norm: NormWeights
    logit_scale: float
    logit_cap: float
    places: tuple[nn.Embedding, int] | None = None
    """What is added by position, and its row of position 0."""

    def tell(self, token_ids: torch.Tensor, keep: torch.Tensor) -> None:
        """Whoever listens for the model's forward hears that one begins."""
        _tell(self.model, {"input_ids": token_ids, "logits_to_keep": keep})

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.model.get_input_embeddings()(token_ids)
        if self.embedding_scale != 1.0:
            rows = rows * torch.tensor(self.embedding_scale, dtype=rows.dtype)
        if self.places is None:
            return rows
        module, first = self.places
        return rows + nn.functional.embedding(positions + first, module.weight)

    def head(self, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] in float32, in the memory of `out` where the head is packed."""
        module: Any = self.model.get_output_embeddings()
        packed = getattr(module, "packed", None)
        if packed is None:
            logits = settled(module(rows)).float()
        else:
            _tell(module, {})
            packed.into(rows, out)
            logits = out
        if self.logit_scale != 1.0:
            logits.mul_(self.logit_scale)
        return logits.div_(self.logit_cap).tanh_().mul_(self.logit_cap) if self.logit_cap else logits

    @property
    def finds_largest(self) -> bool:
        """Whether `largest` is that of the logits: nothing makes equals of them, and nobody listens for the head."""
        module: Any = self.model.get_output_embeddings()
        plain = self.logit_scale == 1.0 and not self.logit_cap and not module._forward_pre_hooks
        return plain and getattr(module, "packed", None) is not None

    def largest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row the largest logit and its token, the lowest of equals. Logits are never stored."""
        module: Any = self.model.get_output_embeddings()
        values, tokens = module.packed.argmax(rows, torch.float32)
        return values, tokens


def _tell(module: nn.Module, kwargs: dict[str, Any]) -> None:
    for number, hook in list(module._forward_pre_hooks.items()):
        if number in module._forward_pre_hooks_with_kwargs:
            hook(module, (), kwargs)
        else:
            hook(module, ())


def read_stack(model: PreTrainedModel, watched: Watched, numbers: dict[int, torch.Tensor]) -> Stack:
    """`numbers`: the cosines that layers were given in step 0, by the number of their tables."""
    base: Any = model.base_model
    holder = next((m for m in (base, getattr(base, "decoder", None)) if m is not None and _norm_of(m)), None)
    module = None if holder is None else _norm_of(holder)
    for one in (model, base, holder, module, *dict.fromkeys(call.module for call in watched.rotary)):
        if one is not None and (more := more_than_weights(one)) is not None:
            raise NotRecognised(f"{type(one).__name__} {more}")
    hidden = int(watched.layers[0].inputs[0].shape[-1])
    norm = None if module is None else read_norm(module, hidden)
    head = model.get_output_embeddings()
    if norm is None or not isinstance(head, nn.Module):
        raise NotRecognised("its last norm or its output head is of no known kind")
    tables = {}
    for number, cos in numbers.items():
        call = next((call for call in watched.rotary if call.made[0] is cos), None)
        if call is None:
            raise NotRecognised("no rotary module made its tables")
        tables[number] = Table(call)
    with torch.inference_mode():
        given = watched.layers[0].inputs[0][0]
        rows = model.get_input_embeddings()(watched.token_ids[0])[0]
        places = _places(model, watched.positions[0][0], given, rows)
        if places is not None:
            given = given - nn.functional.embedding(watched.positions[0][0] + places[1], places[0].weight)
        embedding_scale = 1.0 if torch.equal(rows, given) else _ratio(given, rows)
        if places is not None and abs(embedding_scale - 1.0) < 1e-2:  # sums with positions are rounded
            embedding_scale = 1.0
        raw = head(module(watched.layers[-1].outputs[0][0])).float()
    right = watched.logits[0].float()
    cap = float(getattr(model.config.get_text_config(), "final_logit_softcapping", None) or 0.0)
    scale = 1.0
    if not cap and not torch.allclose(raw, right, rtol=1e-5, atol=1e-6):
        scale = _ratio(right, raw)
    return Stack(model, tables, embedding_scale, norm, scale, cap, places)


def _places(
    model: PreTrainedModel, positions: torch.Tensor, given: torch.Tensor, rows: torch.Tensor
) -> tuple[nn.Embedding, int] | None:
    """The table whose rows are added to the embedding's, where nothing else is; and its row of position 0."""
    own = model.get_input_embeddings()
    for module in model.modules():
        if not isinstance(module, nn.Embedding) or module is own or module.embedding_dim != given.shape[-1]:
            continue
        for first in _OFFSETS:
            if int(positions.max()) + first >= module.num_embeddings:
                continue
            left = given - nn.functional.embedding(positions + first, module.weight)
            apart = left - rows * _ratio(left, rows)
            if float(apart.abs().max()) <= 2e-2 * float(given.abs().max()):
                return module, first
    return None


def _norm_of(module: Any) -> nn.Module | None:
    return next((found for name in _LAST_NORMS if isinstance(found := getattr(module, name, None), nn.Module)), None)


def _ratio(right: torch.Tensor, given: torch.Tensor) -> float:
    wide = given.double()
    return float((right.double() * wide).sum() / wide.square().sum().clamp_min(1e-30))


def difference(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """The largest difference of a logit, relative to the largest logit."""
    pairs = zip(found, right, strict=True)
    return max(float((a - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-6)) for a, b in pairs)
