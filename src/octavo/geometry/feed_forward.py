"""Which layers have experts: read from lists, intervals and counts of dense layers, by fields alone.

Says nothing about sizes. `SPARSE` layers route each token to a few experts, `DENSE` ones have one
feed-forward network; a model without experts has `DENSE` layers only.
"""

from __future__ import annotations

from typing import Any

from octavo.errors import ConfigError
from octavo.geometry.fields import Fields

DENSE, SPARSE, NONE = "dense", "sparse", "none"

_LETTERS = {"E": SPARSE, "-": DENSE, "M": NONE, "*": NONE}
_BLOCKS = {"moe": SPARSE, "mlp": DENSE}

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
"""Spellings of the number of experts."""

FIELDS = (
    "mlp_layer_types", "first_k_dense_replace", "moe_layer_freq", "num_dense_layers", "decoder_sparse_step",
    "mlp_only_layers", "interleave_moe_layer_step", "moe_layers", "expert_layer_period", "expert_layer_offset",
    "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "dense_mlp_idx", "enable_moe_block",
)  # fmt: skip
"""What the rules below read."""


def feed_forward_kinds(fields: Fields, count: int) -> list[str]:
    """`dense`, `sparse` or `none` for each of `count` layers."""
    own = _by_blocks(fields, count)
    if own is not None:
        return own
    listed = fields.sequence("mlp_layer_types")
    if listed is not None:
        if len(listed) != count:
            raise ConfigError("mlp_layer_types", list(listed), f"has {len(listed)} entries for {count} layers")
        return [DENSE if kind == "dense" else str(kind) for kind in listed]
    if not any(fields.get(name) for name in EXPERTS) or fields.get("enable_moe_block") is False:
        return [DENSE] * count
    return [SPARSE if _is_sparse(fields, i, count) else DENSE for i in range(count)]


def _by_blocks(fields: Fields, count: int) -> list[str] | None:
    """Models whose layers are either a mixer or a feed-forward network."""
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str) and not fields.says("layer_types"):
        return [_LETTERS.get(letter, NONE) for letter in pattern]
    listed = fields.get("layer_types")
    if isinstance(listed, (list, tuple)) and len(listed) == count and set(listed) & set(_BLOCKS):
        return [_BLOCKS.get(str(kind), NONE) for kind in listed]
    return None


def _is_sparse(fields: Fields, layer: int, count: int) -> bool:
    listed: Any = fields.get("moe_layers")
    if isinstance(listed, (list, tuple)):
        return layer in listed
    if fields.get("expert_layer_period") is not None:
        return layer % fields.required("expert_layer_period") == (fields.integer("expert_layer_offset", low=0) or 0)
    if fields.get("interleave_moe_layer_step") is not None:
        step = fields.required("interleave_moe_layer_step", low=0)
        return step > 0 and (layer + 1) % step == 0
    if fields.get("decoder_sparse_step") is not None:
        only = fields.sequence("mlp_only_layers") or ()
        return layer not in only and (layer + 1) % fields.required("decoder_sparse_step") == 0
    if fields.get("moe_layer_start_index") is not None:
        end = fields.get("moe_layer_end_index")
        last = count - 1 if end in (None, -1) else int(end)
        every = fields.integer("moe_layer_interval") or 1
        return fields.required("moe_layer_start_index", low=0) <= layer <= last and (layer + 1) % every == 0
    dense = next((fields.integer(name, low=0) for name in ("first_k_dense_replace", "num_dense_layers", "dense_mlp_idx")
                  if fields.get(name) is not None), 0)  # fmt: skip
    every = fields.get("moe_layer_freq")
    if isinstance(every, (list, tuple)):
        return bool(every[layer]) if layer < len(every) else True
    return layer >= (dense or 0) and layer % (every if isinstance(every, int) and every > 0 else 1) == 0
