"""Latent attention (MLA): one compressed latent and one rotary key per token, whatever the heads.

Where a layer also chooses what to read by an index of its own, the index's keys are state too.
"""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.geometry.attention import FULL, layer_types
from octavo.geometry.dtypes import Dtype
from octavo.geometry.fields import Fields
from octavo.geometry.state import Component, Growing, LayerState

_KINDS = (FULL, "indexed_attention")
UNDERSTOOD = ("kv_lora_rank", "index_head_dim", "index_topk")


def is_latent(fields: Fields) -> bool:
    return fields.integer("kv_lora_rank") is not None


def latent_layers(fields: Fields, dtype: Dtype) -> tuple[LayerState, ...]:
    """Every layer keeps `kv_lora_rank + qk_rope_head_dim` values per token, and its index key if it has one."""
    for layer, kind in enumerate(layer_types(fields)):
        if kind not in _KINDS:
            raise ConfigError(
                fields.spelled("layer_types"), kind, f"layer {layer}: latent attention beside this has no rule yet"
            )
    latent = Component("latent", (fields.required("kv_lora_rank"),), dtype)
    rope_k = Component("rope_k", (fields.required("qk_rope_head_dim"),), dtype)
    plain = Growing((latent, rope_k))
    index_dim = fields.integer("index_head_dim")
    count = fields.required("num_hidden_layers")
    if index_dim is None:
        return (plain,) * count
    indexed = Growing((latent, rope_k, Component("index_k", (index_dim,), dtype)))
    return tuple(indexed if own else plain for own in _own_index(fields, count))


def _own_index(fields: Fields, count: int) -> list[bool]:
    """Which layers have an index of their own; the others use the one of a layer before them."""
    kinds = fields.sequence("indexer_types")
    if kinds is None:
        return [True] * count
    if len(kinds) != count:
        raise ConfigError("indexer_types", list(kinds), f"has {len(kinds)} entries for num_hidden_layers={count}")
    for kind in kinds:
        if kind not in ("full", "shared"):
            raise ConfigError("indexer_types", kind, "every entry must be 'full' or 'shared'")
    return [kind == "full" for kind in kinds]
