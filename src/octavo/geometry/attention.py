"""Plain attention: keys and values per head (MHA, GQA, MQA), over all positions, a window or a chunk.

Owns how many heads of what width each layer keeps and which positions it reads. Rules go by
fields, never by model names. A layer that borrows another's state is recognised here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError
from octavo.geometry.dtypes import Dtype
from octavo.geometry.fields import Fields, checked_integer
from octavo.geometry.state import Borrowed, Chunked, Component, Growing, LayerState, Stateless, Windowed

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_SPELLINGS = {"attention": FULL, "global": FULL, "global_attention": FULL, "local": SLIDING, "local_attention": SLIDING}


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


def attention_layers(fields: Fields, dtype: Dtype) -> tuple[LayerState, ...]:
    """The state of every layer of a model whose layers are all plain attention."""
    if fields.raw.get("block_configs") is not None:
        return _by_block_configs(fields, dtype)
    types = layer_types(fields)
    return share_layers(fields, types, [attention_state(fields, kind, i, dtype) for i, kind in enumerate(types)])


def attention_state(fields: Fields, kind: str, layer: int, dtype: Dtype) -> LayerState:
    """The state of one layer of `kind` (`full_attention`, `sliding_attention`, `chunked_attention`)."""
    if kind not in (FULL, SLIDING, CHUNKED):
        raise ConfigError(
            fields.spelled("layer_types"), kind, f"layer {layer} is of a kind that no rule here understands"
        )
    fields = _overridden(fields, layer)
    components = heads_of(fields, kind, layer).components(dtype)
    if kind == SLIDING:
        return Windowed(components, window_of(fields))
    if kind == CHUNKED:
        return Chunked(components, fields.required("attention_chunk_size"))
    return Growing(components)


def _overridden(fields: Fields, layer: int) -> Fields:
    """The fields as one layer sees them: `per_layer_config` may say other things for it."""
    for key, overrides in fields.mapping("per_layer_config").items():
        if not key.isdigit() or not isinstance(overrides, Mapping):
            raise ConfigError("per_layer_config", {key: overrides}, "must map layer numbers to objects of fields")
        if int(key) == layer:
            return Fields({**fields.raw, **overrides}, fields.model_type)
    return fields


def window_of(fields: Fields) -> int:
    """Keys that a query may read, itself included."""
    window = fields.integer("sliding_window")
    beyond: int = fields.entry.get("window_beyond_size", 0)
    if beyond == 1 and fields.raw.get("sliding_window_size") is not None:
        return checked_integer("sliding_window_size", fields.raw["sliding_window_size"]) + 1
    if window is None:
        raise ConfigError(
            "sliding_window",
            None,
            "layers of kind sliding_attention need a window; set sliding_window, or make them full_attention",
        )
    return window


def layer_types(fields: Fields) -> list[str]:
    """What each layer reads, by the first rule that applies: a list in the file, chunks, a window, everything."""
    count = fields.required("num_hidden_layers")
    listed = fields.sequence("layer_types")
    if listed is not None and fields.understood("layer_types"):
        return _listed(fields, listed, count)
    hybrid = fields.sequence("hybrid_layer_pattern")
    if hybrid is not None:
        return _listed(fields, [SLIDING if flag else FULL for flag in hybrid], count, "hybrid_layer_pattern")
    if fields.integer("attention_chunk_size") is not None and fields.understood("no_rope_layers"):
        return _chunk_types(fields, count)
    cycle = fields.entry.get("layer_cycle", ())
    if set(cycle) - {FULL, SLIDING}:
        return [cycle[i % len(cycle)] for i in range(count)]
    if fields.entry.get("window_rule") == "unknown":
        raise ConfigError("layer_types", None, f"model_type={fields.model_type!r} needs a list of kinds, one per layer")
    if SLIDING in cycle and not fields.understood("sliding_window"):
        raise ConfigError("sliding_window", None, f"model_type={fields.model_type!r} has windows of unknown length")
    if not _windows_apply(fields):
        return [FULL] * count
    return _window_types(fields, count)


def _listed(fields: Fields, listed: Sequence[Any], count: int, name: str = "layer_types") -> list[str]:
    spelling = fields.spelled(name)
    if len(listed) != count:
        raise ConfigError(spelling, list(listed), f"has {len(listed)} entries for num_hidden_layers={count}")
    for kind in listed:
        if not isinstance(kind, str):
            raise ConfigError(spelling, kind, "every entry must be the name of a kind of layer")
    return [_SPELLINGS.get(kind, kind) for kind in listed]


def _windows_apply(fields: Fields) -> bool:
    if (
        not fields.understood("sliding_window")
        or fields.entry.get("layer_cycle") == [FULL]
        or fields.flag("use_sliding_window") is False
    ):
        return False
    return fields.get("sliding_window") is not None


def _window_types(fields: Fields, count: int) -> list[str]:
    """Which layers have the window: by the file's pattern, the model type's, or all of them."""
    window_of(fields)
    heeded = not fields.known or bool(fields.entry.get("heeds_window_pattern"))
    pattern = fields.get("sliding_window_pattern") if heeded else None
    if heeded and pattern is None and "sliding_window_pattern" in fields.raw.keys() & fields.defaults.keys():
        return [FULL] * count  # an explicit null where the class has a default
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise ConfigError(
                "sliding_window_pattern", pattern, "must be a number, or made of L (local) and G (global)"
            )
        kinds = [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in range(count)]
        return [*kinds[:-1], FULL]  # where the pattern is spelled out, the last layer is global whatever it says
    if pattern is not None:
        every = checked_integer("sliding_window_pattern", pattern)
        return _last_layer(fields, [FULL if (i + 1) % every == 0 else SLIDING for i in range(count)])
    rule = fields.entry.get("window_rule")
    if rule == "from_max_window_layers" or (not fields.known and fields.says("max_window_layers")):
        first = fields.required("max_window_layers", low=0)
        return [SLIDING if i >= first else FULL for i in range(count)]
    if rule == "alternate_below_max_window_layers":
        end = fields.required("max_window_layers", low=0)
        return [SLIDING if i % 2 == 0 and i < end else FULL for i in range(count)]
    if rule == "where_no_rope":
        return [SLIDING if not uses else FULL for uses in _rope_layers(fields, count)]
    cycle = fields.entry.get("layer_cycle")
    if cycle is not None:
        return _last_layer(fields, [cycle[i % len(cycle)] for i in range(count)])
    if fields.known:
        return [SLIDING] * count
    raise ConfigError(
        fields.spelled("sliding_window"),
        fields.get("sliding_window"),
        f"model_type={fields.model_type!r} is unknown and nothing says which layers have this window; "
        "add layer_types (or sliding_window_pattern), or set it to null",
    )


def _last_layer(fields: Fields, types: list[str]) -> list[str]:
    return [*types[:-1], FULL] if fields.entry.get("last_layer_full") else types


def _chunk_types(fields: Fields, count: int) -> list[str]:
    """Layers with rotary positions attend inside chunks, the others to everything."""
    return [CHUNKED if uses else FULL for uses in _rope_layers(fields, count)]


def _rope_layers(fields: Fields, count: int) -> list[bool]:
    listed = fields.sequence("no_rope_layers")
    if listed:  # an empty list is how some files say "by interval"
        if len(listed) != count:
            raise ConfigError(
                "no_rope_layers", list(listed), f"has {len(listed)} entries for num_hidden_layers={count}"
            )
        return [bool(entry) for entry in listed]
    interval = fields.required("no_rope_layer_interval")
    return [(i + 1) % interval != 0 for i in range(count)]


def heads_of(fields: Fields, kind: str, layer: int) -> Heads:
    """Key and value heads of one layer, with the overrides some models have for a kind of layer."""
    heads = fields.required("num_attention_heads")
    key_dim = head_dim(fields)
    kv_heads = _kv_heads(fields, heads, layer)
    value_dim = (fields.integer("v_head_dim") if fields.understood("v_head_dim") else None) or key_dim
    if kind == SLIDING:
        heads = fields.integer("swa_num_attention_heads") or heads
        kv_heads = fields.integer("swa_num_key_value_heads") or kv_heads
        value_dim = fields.integer("swa_v_head_dim") or fields.integer("swa_head_dim") or value_dim
        key_dim = fields.integer("swa_head_dim") or key_dim
    elif fields.integer("global_head_dim") is not None and not fields.mapping("per_layer_config"):
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
    given = fields.integer("head_dim")
    if given is not None:
        return given
    hidden, heads = fields.required("hidden_size"), fields.required("num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            fields.spelled("hidden_size"),
            hidden,
            f"is no multiple of num_attention_heads={heads} and there is no head_dim; add head_dim or correct them",
        )
    return hidden // heads


def _kv_heads(fields: Fields, heads: int, layer: int) -> int:
    nested = fields.mapping("attn_config")
    if nested:
        return _kv_heads_nested(nested, heads)
    per_layer = fields.raw.get("num_key_value_heads_per_layer")
    if isinstance(per_layer, (list, tuple)):
        if layer >= len(per_layer):
            raise ConfigError("num_key_value_heads_per_layer", list(per_layer), f"has no entry for layer {layer}")
        return checked_integer("num_key_value_heads_per_layer", per_layer[layer])
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


def share_layers(fields: Fields, types: Sequence[str], states: Sequence[LayerState]) -> tuple[LayerState, ...]:
    """The last `num_kv_shared_layers` layers read the last earlier layer of their own kind."""
    shared = fields.integer("num_kv_shared_layers", low=0) or 0
    first = len(states) - shared
    if shared and first < 1:
        raise ConfigError("num_kv_shared_layers", shared, f"must be below num_hidden_layers={len(states)}")
    result = list(states)
    for layer in range(first, len(states)):
        lender = next((i for i in range(first - 1, -1, -1) if types[i] == types[layer]), None)
        if lender is None:
            raise ConfigError(
                "num_kv_shared_layers", shared, f"layer {layer} ({types[layer]}) has no earlier layer to borrow from"
            )
        result[layer] = Borrowed(lender)
    return tuple(result)


def _by_block_configs(fields: Fields, dtype: Dtype) -> tuple[LayerState, ...]:
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
