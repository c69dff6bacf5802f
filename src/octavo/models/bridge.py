"""How a Transformers model runs over octavo's pages: a cache object and an attention function.

Owns the two hooks and the check that a model uses both. Transformers owns everything else of the
forward pass. `PagedCache.update` stores a layer's new keys and values in pages and leaves a
ticket in the layer's own keyword arguments; the attention function of the same call finds the
ticket there, and checks that it attends to exactly what was stored. So nothing is global: two
engines, even in two threads, cannot meet.

No mask function is registered under our name, which makes Transformers build no masks at all:
who sees whom follows from the step and from the layer's window.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from octavo.errors import ModelError
from octavo.kernels.interface import AttentionBackend, AttentionRule, AttentionStep, Pages

IMPLEMENTATION = "octavo"
TICKET = "octavo_ticket"
_UNSERVED = ("position_bias", "head_mask")


class PagedCache:
    """What a model takes for its cache during one forward pass. It holds no state of its own."""

    is_compileable = False

    def __init__(
        self,
        backend: AttentionBackend,
        pages: Mapping[int, Pages],
        group_of: Mapping[int, int],
        steps: tuple[AttentionStep, ...],
    ) -> None:
        self.backend = backend
        self._pages = pages
        self._group_of = group_of
        self._steps = steps

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `key` and `value` [1, kv_heads, tokens, dim] and hand them back as they came."""
        pages = self._pages.get(layer_idx)
        if pages is None:
            raise ModelError("model", f"layer {layer_idx}", "it keeps attention state that its geometry does not tell")
        step = self._steps[self._group_of[layer_idx]]
        self.backend.write(key[0].transpose(0, 1), value[0].transpose(0, 1), pages, step)
        ticket = (self.backend, pages, step)
        if kwargs is None:  # a few models keep their arguments to themselves; the key goes where the ticket must
            setattr(key, TICKET, (ticket, None, value))
        else:
            kwargs[TICKET] = (ticket, key, value)
        return key, value

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given explicitly, so a model has no use for a length."""
        return 0


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function under our name: [1, heads, tokens, dim] -> [1, tokens, heads, v_dim]."""
    left = kwargs.get(TICKET) or getattr(key, TICKET, None)
    if left is None:
        raise ModelError("model", type(module).__name__, "attends to keys that it did not store itself")
    ticket, stored_key, stored_value = left
    if stored_value is not value or (stored_key is not None and stored_key is not key):
        raise ModelError("model", type(module).__name__, "changes keys and values between storing and attending")
    if attention_mask is not None or kwargs.get("is_causal") is False:
        raise ModelError("model", type(module).__name__, "attends under a mask of its own, which is not served")
    for name in _UNSERVED:
        if kwargs.get(name) is not None:
            raise ModelError("model", type(module).__name__, f"attends with {name}, which is not served")
    backend, pages, step = ticket
    rule = AttentionRule(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs["sliding_window"] or None if "sliding_window" in kwargs else _window(module),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    out = backend.attend(query[0].transpose(0, 1), (key, value), pages, step, rule)
    return out.unsqueeze(0), None


def _window(module: nn.Module) -> int | None:
    """The window of a layer whose model tells it to the mask alone."""
    if hasattr(module, "sliding_window"):
        own: int | None = module.sliding_window
        return own or None
    config = getattr(module, "config", None)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if kinds is not None and index is not None:
        return window or None if kinds[index] == "sliding_attention" else None
    return (window or None) if getattr(config, "use_sliding_window", True) else None


AttentionInterface.register(IMPLEMENTATION, attention)


class Bridge:
    """A model bound to our hooks, and how to call it. The model's own config is changed to name them."""

    def __init__(self, model: PreTrainedModel) -> None:
        name = type(model).__name__
        accepted = inspect.signature(model.forward).parameters
        for needed in ("input_ids", "position_ids"):
            if needed not in accepted:
                raise ModelError("model", name, f"its forward takes no {needed}, so ragged batches cannot be served")
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        if self._cache_name not in accepted:
            raise ModelError("model", name, "its forward takes no cache")
        self._keeps_rows = "logits_to_keep" in accepted
        model.set_attn_implementation(IMPLEMENTATION)
        if model.config._attn_implementation != IMPLEMENTATION:
            raise ModelError("model", name, "it does not let its attention be replaced by a paged one")
        self.model = model

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, cache: PagedCache
    ) -> torch.Tensor:
        """One packed row [1, tokens] -> logits [len(keep), vocabulary] of the tokens in `keep`."""
        arguments: dict[str, Any] = {"input_ids": token_ids, "position_ids": positions, self._cache_name: cache}
        if self._keeps_rows:
            arguments["logits_to_keep"] = keep
        logits: torch.Tensor = self.model(**arguments, use_cache=True, return_dict=True).logits[0]
        return logits if self._keeps_rows else logits[keep]
