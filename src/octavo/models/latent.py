"""How a layer of latent attention (MLA) runs over pages of latents: `hand_on_latents` and `LatentTicket`.

Such a layer of Transformers gives its cache one latent and one rotary key per token, takes all of them back and
expands them into keys and values of its heads (`expand_kv`). Here it is handed back the new ones alone, does not
expand them, and the attention function reads the rest from pages, with the weight that would have expanded them.
Owns those hooks and the conditions under which they are exact; the arithmetic is `kernels.latent`.

Invariant: a layer skips its own expansion for what lies in pages, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from octavo.errors import ModelError
from octavo.kernels.interface import AttentionStep
from octavo.kernels.latent import Chosen, LatentAttention, LatentPages, LatentRule
from octavo.memory.layout import GroupLayout
from octavo.models.latent_index import run_indexes
from octavo.models.tickets import Call

_PAGED = "octavo_paged_latent"
"""Marks a latent that was stored in pages."""
_EXPAND = "expand_kv"

Pair = tuple[torch.Tensor, torch.Tensor]


def latent_modules(model: nn.Module) -> list[nn.Module]:
    """The attention modules that keep latents, by what they can do rather than by name."""
    return [module for module in model.modules() if hasattr(module, _EXPAND)]


def latent_layers(model: nn.Module) -> frozenset[int]:
    """The numbers of the layers that keep latents."""
    return frozenset(module.layer_idx for module in latent_modules(model) if isinstance(module.layer_idx, int))


def hand_on_latents(model: nn.Module) -> None:
    """Let every such layer hand on what lies in pages instead of expanding it. Raises `ModelError` where it cannot."""
    for module in latent_modules(model):
        _require_movable(module)
    run_indexes(model)
    for module in latent_modules(model):
        if not isinstance(getattr(module, _EXPAND), partial):
            setattr(module, _EXPAND, partial(_hand_on, getattr(module, _EXPAND)))


def _hand_on(expand: Callable[[torch.Tensor, torch.Tensor], Pair], latent: torch.Tensor, rope_k: torch.Tensor) -> Pair:
    return (latent, rope_k) if getattr(latent, _PAGED, False) else expand(latent, rope_k)


def _require_movable(module: nn.Module) -> None:
    """The weight is used outside its layer, which is the same only for a plain linear map."""
    name = type(module).__name__
    expanding: Any = getattr(module, "kv_b_proj", None)
    if type(expanding) is not nn.Linear or not expanding.weight.is_floating_point():
        how = f"its kv_b_proj is a {type(expanding).__name__}: attention in latent space needs it as a plain linear map"
        raise ModelError("model", name, f"{how}; use a checkpoint in which this weight is not quantised")
    if expanding.bias is not None:
        raise ModelError("model", name, "its kv_b_proj has a bias, which attention in latent space does not serve")


@dataclass(frozen=True, slots=True, eq=False)
class LatentTicket:
    """Latents that lie in pages, and how to attend to them."""

    kernel: LatentAttention
    pages: LatentPages
    step: AttentionStep

    @staticmethod
    def store(
        kernel: LatentAttention,
        pages: LatentPages,
        step: AttentionStep,
        group: GroupLayout,
        new: Pair,
    ) -> LatentTicket:
        """Write latents and rotary keys [1, 1, tokens, dim], and mark them as stored."""
        if group.slides:
            raise ModelError("model", f"group {group.name}", "keeps latents of a window, which is not served")
        latent, rope_k = new
        kernel.write(latent[0, 0], rope_k[0, 0], pages, step)
        setattr(latent, _PAGED, True)
        return LatentTicket(kernel, pages, step)

    def attend(self, call: Call) -> torch.Tensor:
        """-> [tokens, heads, v_dim]"""
        call.require_stored(self)
        module: Any = call.module
        rule = call.rule
        chosen = call.chosen
        if hasattr(module, "indexer") is not isinstance(chosen, Chosen):
            raise ModelError("model", type(module).__name__, "does not attend to what its index chose")
        for name in ("window", "chunk_tokens", "softcap"):
            if getattr(rule, name) is not None:
                raise ModelError("model", type(module).__name__, f"attends to latents with a {name}: not served")
        query = call.query[0].transpose(0, 1)
        weight = module.kv_b_proj.weight.view(query.shape[1], -1, call.key.shape[-1])
        new = (call.key[0, 0], call.value[0, 0])
        latent_rule = LatentRule(rule.scale, weight, module.v_head_dim, rule.sinks, chosen)
        return self.kernel.attend(query, new, self.pages, self.step, latent_rule)
