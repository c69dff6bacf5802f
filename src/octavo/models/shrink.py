"""A config made small, and weights that make its model worth comparing.

Owns which fields give a model its size and what small values keep its kind: the same layers in
the same order, windows, chunks and rope switches shorter than the sequences of a trial. Fields it
does not know stay as they are; a model that then cannot be built is refused by the caller.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from octavo.models.latent_shrink import shrink_latent
from octavo.models.recurrent_shrink import is_recurrent, shrink_recurrent, weight_gain

VOCABULARY = 128
TINY_CONTEXT = 64
ROPE_SWITCH = 16
"""Length at which a shrunk longrope changes over: far below the sequences of a trial."""
HEADS, HEAD_DIM, WINDOW, WIDTH = 4, 16, 6, 48
MOST_LAYERS = 8
SOFTCAP = 1.5
"""Low enough to bend the scores of a tiny model; at the usual 50 a missing cap would hardly show."""

_FIXED_SIZES = {
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "intermediate_size": WIDTH,
    "intermediate_size_mlp": WIDTH,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": HEAD_DIM // 2,
    "laurel_rank": HEAD_DIM // 2,
    "floor_scale": WINDOW,
    "moe_intermediate_size": WIDTH // 2,
    "shared_expert_intermediate_size": WIDTH // 2,
    "shared_intermediate_size": WIDTH // 2,
    "shared_expert_dim": WIDTH // 2,
    "ffn_dim": WIDTH,
    "ffn_hidden_size": WIDTH,
    "n_inner": WIDTH,
    "word_embed_proj_dim": HEADS * HEAD_DIM,
    "rotary_dim": HEAD_DIM // 2,
    "n_group": 1,
    "topk_group": 1,
}
"""Set where the config has the field with a value."""
_CEILINGS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "moe_num_experts": 4,
    "moe_k": 2,
}
"""Lowered to this, never raised."""
_SOFTCAPS = ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_softcapping", "attention_logit_cap")
MOST_SPARSE = 0.5
"""Of a tiny layer's activations; at 0.95 two or three are left, and their rounding decides the rest."""
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shrunk(config: Any) -> Any:
    """A small copy of a Transformers config, of the same class and kind."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    for key in getattr(small, "sub_configs", {}):
        inner = getattr(small, key, None)
        if inner is not None:
            setattr(small, key, shrunk(inner))
            if inner is not text and getattr(inner, "num_hidden_layers", None):
                getattr(small, key).num_hidden_layers = 1  # what sees or hears is not tried: the trial is text
    if small.get_text_config() is small:
        overrides = _take_overrides(small)
        if getattr(small, "num_attention_heads", None) or is_recurrent(small):
            before = copy.deepcopy(small)
            chosen = _shrink_depth(small)
            _shrink_width(small)
            shrink_latent(small, before)
            shrink_recurrent(small, before)
            _shrink_rope(small)
            _shrink_window_sizes(before, small)
            overrides = _shrunk_overrides(overrides, chosen, before, small)
        if overrides:
            small.per_layer_config = overrides
    return small


def _take_overrides(config: Any) -> dict[int, dict[str, Any]]:
    """What the config says of single layers, taken out of it: nothing can be read or set beside it."""
    if not getattr(config, "is_heterogeneous", False):
        return {}
    overrides = config.to_dict().get("per_layer_config") or {}
    config.per_layer_config = None
    return {int(layer): dict(fields) for layer, fields in overrides.items()}


def _shrunk_overrides(
    overrides: dict[int, dict[str, Any]], chosen: Sequence[int], before: Any, small: Any
) -> dict[int, dict[str, Any]]:
    """The overrides of the chosen layers, shrunk where the model's own sizes were."""
    kept = {}
    for new, old in enumerate(chosen):
        fields = dict(overrides.get(old, {}))
        for name, value in fields.items():
            was, tiny = getattr(before, name, None), getattr(small, name, None)
            if isinstance(value, int) and isinstance(was, int) and isinstance(tiny, int) and was != tiny:
                fields[name] = _as_before(value, was, tiny)
        if fields:
            kept[new] = fields
    return kept


def _as_before(value: int, was: int, tiny: int) -> int:
    """A size that differs from the model's own, beside the tiny one: as large, twice, or half of it."""
    return tiny if value == was else 2 * tiny if value > was else max(1, tiny // 2)


def _shrink_depth(config: Any) -> list[int]:
    """Keep the fewest first layers that have every kind of layer, and as few of those at the end that borrow.

    Lists told per layer are cut to the layers that are left, whose old numbers are returned.
    """
    depth = config.num_hidden_layers
    kinds = list(getattr(config, "layer_types", None) or [])[:depth]
    borrowing = int(getattr(config, "num_kv_shared_layers", 0) or 0)
    own = depth - borrowing
    dense_first = int(getattr(config, "first_k_dense_replace", 0) or 0)
    first = min(own, max(2, _every_kind(kinds[:own]), dense_first + 1 if dense_first < MOST_LAYERS else 2))
    chosen = [*range(first), *range(own, own + min(borrowing, max(2, _every_kind(kinds[own:]))))]
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == depth:
            setattr(config, name, type(value)(value[layer] for layer in chosen))
    config.num_hidden_layers = len(chosen)
    if borrowing:
        config.num_kv_shared_layers = len(chosen) - first
    return chosen


def _every_kind(kinds: Sequence[str]) -> int:
    """How many of the first entries have every kind that there is."""
    return 1 + max((kinds.index(kind) for kind in dict.fromkeys(kinds)), default=-1)


def _shrink_width(config: Any) -> None:
    heads, kv_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    config.hidden_size = HEADS * HEAD_DIM
    if heads is not None:
        config.num_attention_heads = HEADS
    if kv_heads is not None:
        config.num_key_value_heads = HEADS if kv_heads == heads else 1 if kv_heads == 1 else 2
    for name in ("head_dim", "v_head_dim"):
        if getattr(config, name, None):
            setattr(config, name, HEAD_DIM)
    config.vocab_size = VOCABULARY
    for name, size in _FIXED_SIZES.items():
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)):
            setattr(config, name, type(value)(size for _ in value))
        elif value:
            setattr(config, name, size)
    for name in _SOFTCAPS:
        if getattr(config, name, None):
            setattr(config, name, SOFTCAP)
    for name, ceiling in _CEILINGS.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and value > ceiling:
            setattr(config, name, ceiling)
    if getattr(config, "activation_sparsity_pattern", None):
        config.activation_sparsity_pattern = [min(MOST_SPARSE, part) for part in config.activation_sparsity_pattern]
    for number, name in enumerate(_TOKENS):
        if getattr(config, name, None) is not None:
            setattr(config, name, number)
    if getattr(config, "max_position_embeddings", None):
        config.max_position_embeddings = 2 * TINY_CONTEXT


def _shrink_window_sizes(before: Any, small: Any) -> None:
    """Sizes that some configs tell apart for layers with a window (`swa_...`)."""
    for name, value in list(vars(small).items()):
        own = name.removeprefix("swa_")
        if name != own and isinstance(value, int) and isinstance(getattr(before, own, None), int):
            setattr(small, name, _as_before(value, getattr(before, own), getattr(small, own)))


def _shrink_rope(config: Any) -> None:
    """Rope lengths below the sequences of a trial, and factor lists of the shrunk dimension."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    nested = [inner for inner in parameters.values() if isinstance(inner, dict)]
    for one in nested or [parameters]:
        if "original_max_position_embeddings" in one:
            one["original_max_position_embeddings"] = ROPE_SWITCH
        rotary = getattr(config, "qk_rope_head_dim", None) or int(HEAD_DIM * one.get("partial_rotary_factor", 1.0))
        half = rotary // 2
        for name in ("short_factor", "long_factor"):
            if one.get(name):
                one[name] = [one[name][i * len(one[name]) // half] for i in range(half)]
        sections = one.get("mrope_section")
        if sections:
            scaled = [part * half // sum(sections) for part in sections]
            one["mrope_section"] = [half - sum(scaled[1:]), *scaled[1:]]
    if getattr(config, "original_max_position_embeddings", None):
        config.original_max_position_embeddings = ROPE_SWITCH


def enliven(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that attention, and any mistake in it, shows in the logits.

    The usual initialisation is so small that a random model all but ignores its context.
    """
    generator = torch.Generator().manual_seed(seed)
    text = model.config.get_text_config()
    vocabulary, gain = text.vocab_size, weight_gain(text)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            if parameter.dim() >= 2:
                embedding = parameter.shape[0] == vocabulary and "head" not in name
                parameter.copy_(noise * (0.3 if embedding else gain / parameter.shape[-1] ** 0.5))
            elif "norm" in name or "ln" in name:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(0.3 * noise)
