"""Rotary embeddings that depend on length, fixed once so that batch-mates cannot change each other.

Two kinds take their frequencies from the largest position of the packed row, which in a ragged
batch is somebody else's:

- `longrope` has a short and a long set, and Transformers takes the long one as soon as a sequence
  is longer than `original_max_position_embeddings` (M). Fixed here from the context length: up to
  M, the short set, which is exactly what Transformers does; above M, the long set for every
  sequence. Then tokens equal Transformers' where prompt and output together exceed M from the
  first token on (a prompt of at least M + 1), and sequences shorter than M differ from it: they
  are computed as the beginning of a long one.
- `dynamic` stretches its frequencies anew with every token past M, and keeps the keys rotated
  with the former ones, so that its result depends on how the sequence was cut into steps. Up to
  M nothing changes and it is served exactly; a longer context is refused.

Every rotary module is then asked whether a far position changes a near one. If so: refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from octavo.errors import ModelError

FIXED = "fixed"
"""The rope type that a module gets here: one that Transformers never updates."""


def fix_rope(model: nn.Module, max_model_len: int) -> tuple[str, ...]:
    """Fix every rotary module for sequences of up to `max_model_len`; returns what was decided.

    Changes the modules in place. Raises `ModelError` for what cannot be served exactly.
    """
    notes: list[str] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None:
            continue
        if isinstance(kinds, dict):
            module.rope_type = {layer: _fix(module, layer, kind, max_model_len, notes) for layer, kind in kinds.items()}
        else:
            module.rope_type = _fix(module, None, kinds, max_model_len, notes)
        _require_independence(module, max_model_len)
    return tuple(dict.fromkeys(notes))


def _fix(module: Any, layer: str | None, kind: str, max_model_len: int, notes: list[str]) -> str:
    if kind == "longrope":
        _fix_longrope(module, layer, max_model_len, notes)
        return FIXED
    if "dynamic" in kind:
        native = int(module.original_max_seq_len)
        if max_model_len > native:
            remedy = f"{kind!r} rope is served exactly up to {native} tokens; choose at most that"
            raise ModelError("max_model_len", max_model_len, remedy)
        notes.append(f"rope {kind}: its frequencies stay as they are up to {native} tokens, as in Transformers")
        return FIXED
    return kind


def _fix_longrope(module: Any, layer: str | None, max_model_len: int, notes: list[str]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = "" if layer is None else f"{layer}_"
    parameters = module.config.rope_parameters if layer is None else module.config.rope_parameters[layer]
    original = int(parameters["original_max_position_embeddings"])
    frequencies = getattr(module, f"{prefix}inv_freq")
    if max_model_len <= original:
        frequencies.copy_(getattr(module, f"{prefix}original_inv_freq"))
        notes.append(f"rope longrope: the short factors, as in Transformers up to {original} tokens")
        return
    arguments = {} if layer is None else {"layer_type": layer}
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, frequencies.device, seq_len=original + 1, **arguments)
    frequencies.copy_(long)
    notes.append(
        f"rope longrope: the long factors for every sequence, as max_model_len={max_model_len} exceeds {original}; "
        f"a sequence of up to {original} tokens differs from Transformers, which uses the short factors for it "
        f"(choose max_model_len={original} to serve short ones exactly)"
    )


def _require_independence(module: Any, max_model_len: int) -> None:
    """Near positions must come out the same whatever the farthest position in the row is."""
    frequencies = next((tensor for _, tensor in module.named_buffers() if tensor.is_floating_point()), None)
    if frequencies is None or max_model_len <= 4:
        return
    x = torch.zeros((1, 1, 1), dtype=torch.float32, device=frequencies.device)
    near = torch.arange(4, device=frequencies.device)[None]
    far = torch.cat((near, torch.full_like(near[:, :1], max_model_len - 1)), dim=1)
    layers = list(module.rope_type) if isinstance(module.rope_type, dict) else [None]
    for layer in layers:
        arguments = {} if layer is None else {"layer_type": layer}
        with torch.no_grad():
            try:
                alone, beside = module(x, near, **arguments), module(x, far, **arguments)
            except (TypeError, RuntimeError, IndexError):
                return  # not called like a rotary module of text: the check of the whole model decides
        if isinstance(alone, torch.Tensor):  # cosine and sine as one complex number
            alone, beside = (alone,), (beside,)
        if not all(torch.equal(a[:, :4], b[:, :4]) for a, b in zip(alone, beside, strict=True)):
            name = type(module).__name__
            raise ModelError("rope_type", name, "its rotation of one token depends on the length of others")
