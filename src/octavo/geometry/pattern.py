"""Which kind of state each layer keeps: read from lists, strings, intervals and the model type's own rule.

Owns the names of the kinds and every way in which config files spell a pattern of layers. Says
nothing about bytes. The first rule that the file's own fields satisfy decides; the model type's
rule, from the table of defaults, comes last; a pattern that nothing gives is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.errors import ConfigError
from octavo.geometry.fields import Fields, checked_integer
from octavo.geometry.kinds import recurrent_field

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED = "indexed_attention"
"""Attention over all positions that an index narrows to a few."""
LINEAR, CONV = "linear_attention", "conv"
"""Constant state: a recurrence of any family, or a short convolution alone."""
HYBRID, HYBRID_SLIDING = "hybrid", "hybrid_sliding"
"""Constant state and attention in one layer."""
COMPRESSED_SPARSE, COMPRESSED_HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
NOTHING = "nothing"

KINDS = (FULL, SLIDING, CHUNKED, INDEXED, LINEAR, CONV, HYBRID, HYBRID_SLIDING,
         COMPRESSED_SPARSE, COMPRESSED_HEAVY, NOTHING)  # fmt: skip

SPELLINGS = {
    **dict.fromkeys(("attention", "global", "global_attention"), FULL),
    **dict.fromkeys(("local", "local_attention", "window_attention"), SLIDING),
    **dict.fromkeys(("mamba", "mamba2", "recurrent", "kda", "gated_delta_net"), LINEAR),
    **dict.fromkeys(("moe", "mlp", "dummy"), NOTHING),
    "minimax_m3_sparse": INDEXED,
}
"""Other names of the kinds."""
_LETTERS = {"M": LINEAR, "*": FULL, "-": NOTHING, "E": NOTHING}
_COMPRESSION = {0: SLIDING, 4: COMPRESSED_SPARSE, 128: COMPRESSED_HEAVY}


_MOST_LAYERS = 2**14
"""Each is looked at by itself: more of them would take memory before anybody saw that the number is wrong."""


def layer_count(fields: Fields) -> int:
    """Layers that keep state: as many as the file counts, or as its list of them has entries."""
    count = _layer_count(fields)
    if count > _MOST_LAYERS:
        raise ConfigError(fields.spelled("num_hidden_layers"), count, f"must be at most {_MOST_LAYERS:,} layers")
    return count


def _layer_count(fields: Fields) -> int:
    for name in ("layer_types", "hybrid_override_pattern"):
        listed = fields.raw.get(name) if name in fields.raw else fields.raw.get("layers_block_type")
        if fields.raw.get("num_hidden_layers") is None and isinstance(listed, (list, str)) and listed:
            return len(listed)
    count = fields.required("num_hidden_layers")
    if fields.entry.get("states_per_layer") == 2:  # two attentions in each layer that the file counts
        own = fields.raw.get("num_layers")
        return 2 * (count if own is None else checked_integer("num_layers", own))
    cycles = (fields.integer("H_cycles"), fields.integer("L_cycles"))
    if cycles[0] is not None and cycles[1] is not None and not fields.says("num_layers_per_stack"):
        return count * cycles[0] * (cycles[1] + 1)  # one state for each time that a stack runs
    return count


def layer_kinds(fields: Fields) -> list[str]:
    """The kind of every layer, by the first rule that applies."""
    kinds = _kinds(fields, layer_count(fields))
    for layer, kind in enumerate(kinds):
        if kind not in KINDS:
            name = fields.spelled("layer_types")
            raise ConfigError(name, kind, f"layer {layer} is of a kind that no rule here understands")
    return _looped(fields, kinds)


def _kinds(fields: Fields, count: int) -> list[str]:
    for rule in (_by_list, _by_letters, _by_flags, _by_two_lists, _by_numbers, _by_period, _by_positions,
                 _by_block_types, _by_interval, _by_ratios, _by_sparse_flags, _by_attention_types):  # fmt: skip
        kinds = rule(fields, count)
        if kinds is not None:
            return kinds
    if fields.integer("attention_chunk_size") is not None and fields.understood("no_rope_layers"):
        return [CHUNKED if uses else FULL for uses in _rope_layers(fields, count)]
    return _by_type(fields, count)


def _by_type(fields: Fields, count: int) -> list[str]:
    """The model type's own rule, or the windows that the file asks for."""
    if (
        fields.get("rescale_every")
        or fields.get("qk_dim_factor")
        or (fields.get("num_attention_heads") is None and recurrent_field(fields))
    ):
        return [LINEAR] * count  # nothing but a recurrence
    cycle = fields.entry.get("layer_cycle", ())
    if set(cycle) - {FULL, SLIDING}:
        return _last_layer(fields, _cycled(fields, count))
    if fields.entry.get("window_rule") == "unknown":
        raise ConfigError("layer_types", None, f"model_type={fields.model_type!r} needs a list of kinds, one per layer")
    if SLIDING in cycle and not fields.understood("sliding_window"):
        raise ConfigError("sliding_window", None, f"model_type={fields.model_type!r} has windows of unknown length")
    if not _windows_apply(fields):
        return [FULL] * count
    return _window_kinds(fields, count)


def _cycled(fields: Fields, count: int) -> list[str]:
    prefix: Sequence[str] = fields.entry.get("layer_prefix", ())
    cycle: Sequence[str] = fields.entry["layer_cycle"]
    return [*prefix, *(cycle[i % len(cycle)] for i in range(max(0, count - len(prefix))))][:count]


# -- rules by the file's own fields ---------------------------------------------------------------


def _by_list(fields: Fields, count: int) -> list[str] | None:
    listed = fields.sequence("layer_types")
    if listed is None or not fields.understood("layer_types"):
        return None
    return _checked(fields.spelled("layer_types"), listed, count)


def _by_letters(fields: Fields, count: int) -> list[str] | None:
    """`hybrid_override_pattern`: M a recurrence, * attention, - and E no mixer."""
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None:
        return None
    if not isinstance(pattern, str) or set(pattern) - set(_LETTERS):
        raise ConfigError("hybrid_override_pattern", pattern, f"must be made of the letters {' '.join(_LETTERS)}")
    return _checked("hybrid_override_pattern", [_LETTERS[letter] for letter in pattern], count)


def _by_flags(fields: Fields, count: int) -> list[str] | None:
    hybrid = fields.sequence("hybrid_layer_pattern")
    if hybrid is None:
        return None
    return _checked("hybrid_layer_pattern", [SLIDING if flag else FULL for flag in hybrid], count)


def _by_two_lists(fields: Fields, count: int) -> list[str] | None:
    """`linear_attn_config` names the layers of each kind, counted from one."""
    nested = fields.mapping("linear_attn_config")
    full, linear = nested.get("full_attn_layers"), nested.get("kda_layers")
    if full is None and linear is None:
        return None
    name = "linear_attn_config"
    full_set = _positions(name, full or (), count, first=1)
    linear_set = set(range(count)) - full_set if linear is None else _positions(name, linear, count, first=1)
    if full is None:
        full_set = set(range(count)) - linear_set
    if full_set & linear_set or len(full_set) + len(linear_set) != count:
        raise ConfigError(name, dict(nested), f"full_attn_layers and kda_layers must share out the {count} layers")
    return [FULL if i in full_set else LINEAR for i in range(count)]


def _by_numbers(fields: Fields, count: int) -> list[str] | None:
    """`attn_type_list`: 1 attention, 0 linear attention."""
    listed = fields.sequence("attn_type_list")
    if listed is None:
        return None
    if any(entry not in (0, 1) for entry in listed):
        raise ConfigError("attn_type_list", list(listed), "every entry must be 0 (linear) or 1 (attention)")
    return _checked("attn_type_list", [FULL if entry else LINEAR for entry in listed], count)


def _by_period(fields: Fields, count: int) -> list[str] | None:
    period = fields.integer("attn_layer_period")
    if period is None:
        return None
    offset = fields.required("attn_layer_offset", low=0)
    if offset >= period:
        raise ConfigError("attn_layer_offset", offset, f"must be below attn_layer_period={period}")
    own = fields.entry.get("period_rule", {})
    prefix, kind = own.get("prefix", []), own.get("kind", FULL)
    rest = [kind if i % period == offset else LINEAR for i in range(max(0, count - len(prefix)))]
    return [*prefix, *rest][:count]


def _by_positions(fields: Fields, count: int) -> list[str] | None:
    """A list of the layers of one kind; the others are of the other."""
    for name, there, elsewhere in (
        ("attn_layer_indices", FULL, LINEAR),
        ("full_attn_idxs", FULL, CONV),
        ("hybrid_layer_ids", HYBRID, LINEAR),
        ("local_layer_ids", HYBRID_SLIDING, HYBRID),
    ):
        listed = fields.sequence(name)
        if listed is not None and (fields.known or name != "local_layer_ids"):
            chosen = _positions(name, listed, count)
            return [there if i in chosen else elsewhere for i in range(count)]
    return None


def _by_block_types(fields: Fields, count: int) -> list[str] | None:
    """`block_types`: a cycle of blocks, in which attention has a window."""
    blocks = fields.sequence("block_types")
    if not blocks:
        return None
    spelled = {"recurrent": LINEAR, "attention": SLIDING}
    for block in blocks:
        if block not in spelled:
            raise ConfigError("block_types", list(blocks), "every entry must be 'recurrent' or 'attention'")
    return [spelled[blocks[i % len(blocks)]] for i in range(count)]


def _by_interval(fields: Fields, count: int) -> list[str] | None:
    """Attention in the last layer of every group of so many, a recurrence in the others."""
    for name in ("full_attention_interval", "layer_group_size"):
        if fields.says(name):
            every = fields.required(name)
            return [FULL if (i + 1) % every == 0 else LINEAR for i in range(count)]
    return None


def _by_ratios(fields: Fields, count: int) -> list[str] | None:
    """`compress_ratios`: positions per entry, 0 for a window alone; entries past the layers are for prediction."""
    ratios = fields.sequence("compress_ratios")
    if ratios is None:
        return None
    if len(ratios) < count:
        raise ConfigError("compress_ratios", list(ratios), f"has {len(ratios)} entries for num_hidden_layers={count}")
    for ratio in ratios[:count]:
        if ratio not in _COMPRESSION:
            raise ConfigError("compress_ratios", ratio, f"there is a rule for {', '.join(map(str, _COMPRESSION))} only")
    return [_COMPRESSION[ratio] for ratio in ratios[:count]]


def _by_sparse_flags(fields: Fields, count: int) -> list[str] | None:
    nested = fields.mapping("sparse_attention_config")
    flags = nested.get("sparse_attention_freq")
    if not nested.get("use_sparse_attention", bool(flags)):
        return None
    name = "sparse_attention_config.sparse_attention_freq"
    if not isinstance(flags, (list, tuple)):
        raise ConfigError(name, flags, "must say for each layer whether its attention is sparse (0 or 1)")
    return _checked(name, [INDEXED if flag else FULL for flag in flags], count)


def _by_attention_types(fields: Fields, count: int) -> list[str] | None:
    """`attention_types`: [[["global", "local"], 12]] is 12 times those two."""
    groups = fields.sequence("attention_types")
    if groups is None:
        return None
    kinds: list[str] = []
    for group in groups:
        if not (isinstance(group, (list, tuple)) and len(group) == 2 and isinstance(group[0], (list, tuple))):
            raise ConfigError("attention_types", list(groups), 'must look like [[["global", "local"], 12]]')
        kinds.extend(list(group[0]) * checked_integer("attention_types", group[1]))
    return _checked("attention_types", kinds, count)


def _checked(name: str, listed: Sequence[Any], count: int) -> list[str]:
    if len(listed) != count:
        raise ConfigError(name, list(listed), f"has {len(listed)} entries for num_hidden_layers={count}")
    for kind in listed:
        if not isinstance(kind, str):
            raise ConfigError(name, kind, "every entry must be the name of a kind of layer")
    return [SPELLINGS.get(kind, kind) for kind in listed]


def _positions(name: str, listed: Any, count: int, first: int = 0) -> set[int]:
    if not isinstance(listed, (list, tuple)):
        raise ConfigError(name, listed, "must be a list of layer numbers")
    chosen = {checked_integer(name, entry, low=first) - first for entry in listed}
    if chosen and max(chosen) >= count:
        raise ConfigError(name, max(chosen) + first, f"names a layer that num_hidden_layers={count} does not have")
    return chosen


def _looped(fields: Fields, kinds: list[str]) -> list[str]:
    """Layers run several times keep a state for each time."""
    nested = fields.mapping("loop_config")
    passes = nested.get("num_passes", fields.get("loop_num_passes"))
    if passes is None:
        return kinds
    start = checked_integer("loop_layer_index_start", nested.get("core_start", fields.get("loop_layer_index_start")))
    end = checked_integer("loop_layer_index_end", nested.get("core_end", fields.get("loop_layer_index_end")))
    again = checked_integer("loop_num_passes", passes)
    if not start <= end <= len(kinds):
        raise ConfigError("loop_layer_index_end", end, f"must lie from loop_layer_index_start={start} to {len(kinds)}")
    return [*kinds[:start], *kinds[start:end] * again, *kinds[end:]]


# -- windows --------------------------------------------------------------------------------------


def window_of(fields: Fields) -> int:
    """Keys that a query may read, itself included."""
    beyond: int = fields.entry.get("window_beyond_size", 0)
    if beyond == 1 and fields.raw.get("sliding_window_size") is not None:
        return checked_integer("sliding_window_size", fields.raw["sliding_window_size"]) + 1
    name = "sliding_window" if fields.get("attention_types") is None else "window_size"
    window = fields.integer(name)
    if window is None:
        raise ConfigError(
            name,
            None,
            f"layers of kind sliding_attention need a window; set {name}, or make them full_attention",
        )
    return window


def _windows_apply(fields: Fields) -> bool:
    if (
        not fields.understood("sliding_window")
        or fields.entry.get("layer_cycle") == [FULL]
        or fields.flag("use_sliding_window") is False
    ):
        return False
    return fields.get("sliding_window") is not None


def _window_kinds(fields: Fields, count: int) -> list[str]:
    """Which layers have the window: by the file's pattern, the model type's, or all of them."""
    window_of(fields)
    patterned = _window_pattern(fields, count)
    if patterned is not None:
        return patterned
    rule = fields.entry.get("window_rule")
    if rule == "from_max_window_layers" or (not fields.known and fields.says("max_window_layers")):
        first = fields.required("max_window_layers", low=0)
        return [SLIDING if i >= first else FULL for i in range(count)]
    if rule == "alternate_below_max_window_layers":
        end = fields.required("max_window_layers", low=0)
        return [SLIDING if i % 2 == 0 and i < end else FULL for i in range(count)]
    if rule == "where_no_rope":
        return [SLIDING if not uses else FULL for uses in _rope_layers(fields, count)]
    if fields.entry.get("layer_cycle") is not None:
        return _last_layer(fields, _cycled(fields, count))
    if fields.known:
        return [SLIDING] * count
    raise ConfigError(
        fields.spelled("sliding_window"),
        fields.get("sliding_window"),
        f"model_type={fields.model_type!r} is unknown and nothing says which layers have this window; "
        "add layer_types (or sliding_window_pattern), or set it to null",
    )


def _window_pattern(fields: Fields, count: int) -> list[str] | None:
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
    if pattern is None:
        return None
    every = checked_integer("sliding_window_pattern", pattern)
    return _last_layer(fields, [FULL if (i + 1) % every == 0 else SLIDING for i in range(count)])


def _last_layer(fields: Fields, kinds: list[str]) -> list[str]:
    return [*kinds[:-1], FULL] if fields.entry.get("last_layer_full") else kinds


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
