"""How a Transformers model runs over octavo's pages: a cache object and an attention function.

Owns the two hooks and the check that a model uses both. Transformers owns everything else of the
forward pass. `PagedCache.update` stores a layer's new keys and values in pages and leaves a ticket
on them and in the layer's own keyword arguments; the attention function of the same call finds the
ticket there, and checks that it attends to exactly what was stored. A layer that borrows is handed
the keys of its lender, and finds the lender's ticket on them. So nothing is global: two engines,
even in two threads, cannot meet.

No mask function is registered under our name, which makes Transformers build no masks at all: who
sees whom follows from the step and from the layer's window or chunk, which may not reach further
back than what the layer's group keeps.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from octavo.errors import ModelError
from octavo.kernels.interface import AttentionBackend, AttentionRule, AttentionStep, Pages
from octavo.kernels.latent import LatentAttention, LatentPages
from octavo.memory.layout import GroupLayout
from octavo.models.latent import LatentTicket, hand_on_latents
from octavo.models.latent_index import PagedIndex, stands_in
from octavo.models.recurrent import SlotStates, run_by_slot
from octavo.models.tickets import Call, leave, refused, ticket_of

IMPLEMENTATION = "octavo"
_UNSERVED = ("position_bias", "head_mask")


@dataclass(frozen=True, slots=True, eq=False)
class PagedTicket:
    """Keys and values that lie in pages."""

    backend: AttentionBackend
    pages: Pages
    step: AttentionStep
    group: GroupLayout

    def attend(self, call: Call) -> torch.Tensor:
        call.require_stored(self)
        require_kept(call.module, call.rule, self.group)
        if call.chosen is not None:
            raise refused(call.module, "attends to what an index chose, which is not served for keys and values")
        query = call.query[0].transpose(0, 1)
        return self.backend.attend(query, (call.key, call.value), self.pages, self.step, call.rule)


def require_kept(module: nn.Module, rule: AttentionRule, group: GroupLayout) -> None:
    """Raise unless everything that the rule lets a query read is kept by the group."""
    if group.window_tokens is not None:
        reach = min((n for n in (rule.window, rule.chunk_tokens) if n is not None), default=None)
        if reach is None or reach > group.window_tokens:
            raise refused(
                module, f"attends over {_reach(rule)} where its geometry keeps a window of {group.window_tokens}"
            )
    if group.chunk_tokens is not None and (rule.chunk_tokens is None or group.chunk_tokens % rule.chunk_tokens):
        raise refused(module, f"attends over {_reach(rule)} where its geometry keeps chunks of {group.chunk_tokens}")


def _reach(rule: AttentionRule) -> str:
    if rule.chunk_tokens is not None:
        return f"chunks of {rule.chunk_tokens}"
    return "all positions" if rule.window is None else f"a window of {rule.window}"


class PagedCache:
    """What a model takes for its cache during one forward pass. It holds no state of its own."""

    is_compileable = False

    def __init__(
        self,
        backend: AttentionBackend,
        pages: Mapping[int, Pages | LatentPages],
        group_of: Mapping[int, int],
        steps: tuple[AttentionStep, ...],
        groups: tuple[GroupLayout, ...],
    ) -> None:
        self.backend = backend
        self.lengths: torch.Tensor | int = 0
        """What a model that counts its own positions is told: see `Bridge.logits`."""
        self.latent = LatentAttention()
        """What attends to latents; the bridge puts its own here, whose scratch memory is kept."""
        self.layers: Any = None
        """What runs the layers that have been fused, one step long: see `fused_run`."""
        self.slot_states: SlotStates | None = None
        """The constant states of the step's chunks, in a model that has them: see `recurrent`."""
        self._pages = pages
        self._group_of = group_of
        self._steps = steps
        self._groups = groups

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `key` and `value` [1, kv_heads, tokens, dim] and hand them back as they came."""
        pages = self._pages.get(layer_idx)
        if pages is None:
            raise ModelError("model", f"layer {layer_idx}", "it keeps attention state that its geometry does not tell")
        group = self._group_of[layer_idx]
        step = self._steps[group]
        if isinstance(pages, LatentPages):
            latent = LatentTicket.store(self.latent, pages, step, self._groups[group], (key, value))
            leave(latent, key, value, kwargs)
            return key, value
        self.backend.write(key[0].transpose(0, 1), value[0].transpose(0, 1), pages, step)
        leave(PagedTicket(self.backend, pages, step, self._groups[group]), key, value, kwargs)
        return key, value

    def paged_index(self, layer_idx: int) -> PagedIndex:
        """The index keys of a layer that chooses what it reads."""
        pages = self._pages.get(layer_idx)
        if not isinstance(pages, LatentPages) or pages.index_k is None:
            raise ModelError("model", f"layer {layer_idx}", "it has an index that its geometry does not tell")
        return PagedIndex(self.latent, pages, pages.index_k, self._steps[self._group_of[layer_idx]])

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor | int:
        """0, as positions are given explicitly; for a model that counts them itself, see `Bridge.logits`."""
        return self.lengths


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
    ticket = ticket_of(key, kwargs)
    if ticket is None:
        raise refused(module, "attends to keys that it did not store itself")
    if (attention_mask is not None and not stands_in(attention_mask)) or kwargs.get("is_causal") is False:
        raise refused(module, "attends under a mask of its own, which is not served")
    for name in _UNSERVED:
        if kwargs.get(name) is not None:
            raise refused(module, f"attends with {name}, which is not served")
    rule = AttentionRule(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs["sliding_window"] or None if "sliding_window" in kwargs else _window(module),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        chunk_tokens=_chunk(module),
    )
    return ticket.attend(Call(module, query, key, value, rule, kwargs.get("indices"))).unsqueeze(0), None


def _window(module: nn.Module) -> int | None:
    """The window of a layer whose model tells it to the mask alone."""
    if hasattr(module, "sliding_window"):
        own: int | None = module.sliding_window
        return own or None
    config = getattr(module, "config", None)
    window = getattr(config, "sliding_window", None)
    kind = _kind(module)
    if kind is not None:
        return window or None if kind == "sliding_attention" else None
    return (window or None) if getattr(config, "use_sliding_window", True) else None


def _chunk(module: nn.Module) -> int | None:
    """The chunk inside which a layer attends; Transformers tells it to the mask alone."""
    if _kind(module) != "chunked_attention":
        return None
    chunk: int | None = getattr(getattr(module, "config", None), "attention_chunk_size", None)
    if not chunk:
        raise refused(module, "attends inside chunks of a size that its config does not tell (attention_chunk_size)")
    return chunk


def _kind(module: nn.Module) -> str | None:
    """What the config's list of layers calls this one."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if kinds is None or not isinstance(index, int):
        return None
    return kinds[index] if index < len(kinds) else None


AttentionInterface.register(IMPLEMENTATION, attention)


def cache_name(model: PreTrainedModel) -> str:
    """The name by which the model's forward takes a cache."""
    accepted = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in accepted:
            return name
    raise ModelError("model", type(model).__name__, "its forward takes no cache")


class Bridge:
    """A model bound to our hooks, and how to call it. The model's own config is changed to name them."""

    def __init__(self, model: PreTrainedModel) -> None:
        name = type(model).__name__
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        mixers = run_by_slot(model)
        for needed in ("input_ids",) if mixers else ("input_ids", "position_ids"):
            if needed not in accepted:
                raise ModelError("model", name, f"its forward takes no {needed}, so ragged batches cannot be served")
        self._cache_name = cache_name(model)
        self._keeps_rows = "logits_to_keep" in accepted
        self._counts_itself = any(getattr(module, "attn_temperature_tuning", False) for module in model.modules())
        model.set_attn_implementation(IMPLEMENTATION)
        if model.config._attn_implementation != IMPLEMENTATION:
            raise ModelError("model", name, "it does not let its attention be replaced by a paged one")
        hand_on_latents(model)
        self._latent = LatentAttention()
        self.model = model

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, cache: PagedCache
    ) -> torch.Tensor:
        """One packed row [1, tokens] -> logits [len(keep), vocabulary] of the tokens in `keep`.

        Llama 4 counts the positions of a row up from the length of its cache, to tune its temperature. In a row of
        many sequences each token has its own length: what must be added to its place to make its position.
        """
        cache.latent = self._latent
        if self._counts_itself:
            cache.lengths = positions[0] - torch.arange(positions.shape[1], device=positions.device)
        arguments: dict[str, Any] = {"input_ids": token_ids, self._cache_name: cache}
        if self._takes_positions:
            arguments["position_ids"] = positions
        if self._keeps_rows:
            arguments["logits_to_keep"] = keep
        logits: torch.Tensor = self.model(**arguments, use_cache=True, return_dict=True).logits[0]
        return logits if self._keeps_rows else logits[keep]
