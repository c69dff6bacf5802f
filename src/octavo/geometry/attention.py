"""Plain attention: keys and values per head (MHA, GQA, MQA), over all positions, a window or a chunk.

Owns how many heads of what width each layer keeps. Rules go by fields, never by model names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError
from octavo.geometry.dtypes import Dtype
from octavo.geometry.fields import Fields, checked_integer
from octavo.geometry.latent import index_components, read_tokens
from octavo.geometry.pattern import CHUNKED, SLIDING, window_of
from octavo.geometry.recurrent import Kept
from octavo.geometry.state import Chunked, Component, Growing, LayerState, Stateless, Windowed


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads that one layer keeps, and how wide."""

    kv_heads: int
    key_dim: int
    value_dim: int

    def components(self, dtype: Dtype) -> tuple[Component, ...]:
        return (
            Component("k", (self.kv_heads, self.key_dim), dtype),
            Component("v", (self.kv_heads, self.value_dim), dtype),
        )


def attention_state(fields: Fields, kind: str, layer: int, kept: Kept, own_index: bool) -> Growing | Windowed | Chunked:
    """The state of one layer of `kind`: full, sliding or chunked attention, or all positions by an index."""
    heads = heads_of(fields, kind, layer)
    if kept.convention == "transformers" and fields.flag("new_decoder_architecture"):
        heads = Heads(fields.required("num_attention_heads"), heads.key_dim, heads.value_dim)
    components = heads.components(kept.kv)
    if kind == SLIDING:
        return Windowed(components, window_of(fields))
    if kind == CHUNKED:
        return Chunked(components, fields.required("attention_chunk_size"))
    if own_index:
        return Growing((*components, *index_components(fields, kept)), read_tokens(fields))
    return Growing(components)


def heads_of(fields: Fields, kind: str, layer: int) -> Heads:
    """Key and value heads of one layer, with the overrides some models have for a kind of layer."""
    heads = listed_for(fields, "num_attention_heads", layer) or fields.required("num_attention_heads")
    key_dim = head_dim(fields)
    kv_heads = _kv_heads(fields, heads, layer)
    value_dim = (fields.integer("v_head_dim") if fields.understood("v_head_dim") else None) or key_dim
    if kind == SLIDING:
        heads = fields.integer("swa_num_attention_heads") or heads
        kv_heads = fields.integer("swa_num_key_value_heads") or kv_heads
        value_dim = fields.integer("swa_v_head_dim") or fields.integer("swa_head_dim") or value_dim
        key_dim = fields.integer("swa_head_dim") or key_dim
    elif fields.integer("global_head_dim") is not None and fields.raw.get("per_layer_config") is None:
        key_dim = value_dim = fields.required("global_head_dim")
        if fields.flag("attention_k_eq_v"):
            kv_heads = fields.integer("num_global_key_value_heads") or kv_heads
    if heads % kv_heads:
        raise ConfigError(
            fields.spelled("num_key_value_heads"),
            kv_heads,
            f"must divide num_attention_heads={heads}, since each key head serves equally many query heads",
        )
    return Heads(kv_heads, key_dim, value_dim)


def head_dim(fields: Fields) -> int:
    """Read where the config says it; derived only where it is absent or null."""
    own = fields.raw.get("attention_head_dim")
    if own is not None and fields.raw.get("head_dim") in (None, own):
        return checked_integer("attention_head_dim", own)  # kv_channels beside it is another width
    given = fields.integer("head_dim")
    if given is not None:
        return given
    if "attention_hidden_size" in fields.raw.keys() | fields.defaults.keys():
        hidden, heads = fields.required("attention_hidden_size"), fields.required("num_attention_heads")
        if hidden % heads:
            raise ConfigError("attention_hidden_size", hidden, f"is no multiple of num_attention_heads={heads}")
        return hidden // heads
    hidden, heads = fields.required("hidden_size"), fields.required("num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            fields.spelled("hidden_size"),
            hidden,
            f"is no multiple of num_attention_heads={heads} and there is no head_dim; add head_dim or correct them",
        )
    return hidden // heads


def listed_for(fields: Fields, name: str, layer: int) -> int | None:
    """The entry of one layer where a field lists a number for each, else None."""
    value = fields.get(name)
    if not isinstance(value, (list, tuple)):
        return None
    if layer >= len(value):
        raise ConfigError(fields.spelled(name), list(value), f"has no entry for layer {layer}")
    return checked_integer(fields.spelled(name), value[layer])


def _kv_heads(fields: Fields, heads: int, layer: int) -> int:
    nested = fields.mapping("attn_config")
    if nested:
        return _kv_heads_nested(nested, heads)
    per_layer = fields.raw.get("num_key_value_heads_per_layer")
    if isinstance(per_layer, (list, tuple)):
        if layer >= len(per_layer):
            raise ConfigError("num_key_value_heads_per_layer", list(per_layer), f"has no entry for layer {layer}")
        return checked_integer("num_key_value_heads_per_layer", per_layer[layer])
    listed = listed_for(fields, "num_key_value_heads", layer)
    if listed is not None:
        return listed
    multi_query = fields.flag("multi_query")
    if fields.flag("new_decoder_architecture"):
        multi_query = None  # this form of the model ignores the flag and states its heads
    groups_given = fields.raw.get("multi_query_group_num") is not None
    if (multi_query and not groups_given) or (multi_query is False and groups_given):
        return 1 if multi_query else heads
    return fields.integer("num_key_value_heads") or heads


def _kv_heads_nested(nested: Mapping[str, Any], heads: int) -> int:
    """`attn_config` of the MPT family: one head for multiquery, else `kv_n_heads`, else all."""
    if nested.get("attn_type") == "multiquery_attention":
        return 1
    given = nested.get("kv_n_heads")
    return heads if given is None else checked_integer("attn_config.kv_n_heads", given)


def block_config_layers(fields: Fields, dtype: Dtype) -> tuple[LayerState, ...]:
    """One description per layer: query heads per key head, or no attention at all, perhaps a window and sinks."""
    blocks = fields.sequence("block_configs") or ()
    count = fields.required("num_hidden_layers")
    if len(blocks) != count:
        raise ConfigError("block_configs", list(blocks), f"has {len(blocks)} entries for num_hidden_layers={count}")
    heads, width = fields.required("num_attention_heads"), head_dim(fields)
    states: list[LayerState] = []
    for layer, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise ConfigError("block_configs", block, f"layer {layer} has no object named attention")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            states.append(Stateless())
            continue
        name = "block_configs.attention.n_heads_in_group"
        group = checked_integer(name, attention.get("n_heads_in_group"))
        if heads % group:
            raise ConfigError(name, group, f"must divide num_attention_heads={heads}")
        components = Heads(heads // group, width, width).components(dtype)
        window, sinks = attention.get("window_length"), attention.get("num_sink_tokens")
        if window is None:
            states.append(Growing(components))
            continue
        sink_tokens = 0 if sinks is None else checked_integer("num_sink_tokens", sinks, low=0)
        states.append(Windowed(components, checked_integer("window_length", window), sink_tokens))
    return tuple(states)
