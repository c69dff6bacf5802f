"""Write `src/octavo/geometry/config_defaults.json` from Transformers' config classes.

A published `config.json` leaves out what its class would supply. Importing Transformers to plan
takes seconds, so the few fields that shape attention state are written down here, per model type,
together with what the class computes from them (which layers have the window). Run it after a
change of the Transformers pin: `python tools/make_config_defaults.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from octavo.geometry.fields import ALIASES
from octavo.geometry.kinds import MARKERS, UNRULED
from octavo.geometry.pattern import SPELLINGS

TARGET = Path(__file__).parents[1] / "src" / "octavo" / "geometry" / "config_defaults.json"

SHAPING = (
    *(spelling for name, others in ALIASES.items() for spelling in (name, *others)),
    *MARKERS,
    "use_sliding_window",
    "sliding_window_pattern",
    "max_window_layers",
    "attention_chunk_size",
    "no_rope_layers",
    "no_rope_layer_interval",
    "hybrid_layer_pattern",
    "new_decoder_architecture",
    "attn_config",
    "v_head_dim",
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
    "swa_head_dim",
    "swa_v_head_dim",
    "global_head_dim",
    "num_global_key_value_heads",
    "attention_k_eq_v",
    "num_kv_shared_layers",
    "qk_rope_head_dim",
    "indexer_types",
    "moe_intermediate_size",
    "use_bidirectional_attention",
    "is_decoder",
    "attn_layer_offset",
    "linear_value_head_dim",
    "linear_head_dim",
    "short_conv_kernel_size",
    "conv_kernel_size",
    "conv1d_width",
    "cca_time0",
    "cca_time1",
    "v_dim_factor",
    "mamba_d_ssm",
    "mamba_ssm_cache_dtype",
    "mamba_ssm_dtype",
    "inference_state_dtype",
    "attention_hidden_size",
    "window_size",
    "H_cycles",
    "L_cycles",
    "num_layers_per_stack",
    "loop_layer_index_start",
    "loop_layer_index_end",
    "loop_num_passes",
    "index_kpool",
    "index_topk_blocks",
    "index_block_size",
    "index_local_blocks",
    "indexer_budget",
)
TEXT_PARTS = ("text_config", "thinker_config", "llm_config", "language_config")
PROBE_LAYERS = 48


def main() -> None:
    table = build_table()
    TARGET.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{TARGET}: {len(table['types'])} types, {len(table['wrappers'])} wrappers")


def build_table() -> dict[str, Any]:
    """What the file holds, made anew from the installed Transformers."""
    logging.disable(logging.WARNING)
    types: dict[str, Any] = {}
    wrappers: dict[str, str] = {}
    not_decoders: dict[str, str] = {}
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    sequence_to_sequence = set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    generating = causal | sequence_to_sequence
    generating |= {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    text_types = set()
    for model_type in sorted(CONFIG_MAPPING.keys()):
        inner = text_part(CONFIG_MAPPING[model_type])
        if inner is not None and inner != model_type:
            wrappers[model_type] = inner
            if model_type in generating or inner in causal:
                text_types.add(inner)
    for model_type in sorted(CONFIG_MAPPING.keys()):
        cls = CONFIG_MAPPING[model_type]
        names = {f.name for f in fields(cls)}
        # a decoder behind an encoder of sound is a decoder of text
        paired = model_type in sequence_to_sequence and wrappers.get(model_type) not in causal
        if paired or default_of(cls, "is_encoder_decoder") is True:
            not_decoders[model_type] = "an encoder-decoder"
        elif model_type in wrappers and model_type not in text_types:
            continue
        elif model_type in causal or (model_type in text_types and "num_hidden_layers" in names):
            types[model_type] = entry_of(cls)
            if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
                not_decoders[model_type] = "an encoder unless its config says is_decoder: true"
        elif model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            not_decoders[model_type] = "no decoder of text"
    logging.disable(logging.NOTSET)
    return {
        "made_from": f"transformers {transformers.__version__}",
        "types": types,
        "architectures": {name: namesake(name, own) for name, own in sharing(types).items()},
        "wrappers": wrappers,
        "not_decoders": not_decoders,
    }


def sharing(types: Mapping[str, Any]) -> dict[str, list[str]]:
    """The model types of each class that generates text."""
    found: dict[str, list[str]] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if model_type in types and isinstance(name, str):
            found.setdefault(name, []).append(model_type)
    return found


def namesake(name: str, types: Sequence[str]) -> str:
    """Of several types that share a class, the one that it is named after; else the first."""
    plain = name.lower()
    return next((own for own in types if plain.startswith(own.replace("_", "").replace("-", ""))), types[0])


def text_part(cls: type) -> str | None:
    """The model type of the language model inside a config class, following nested parts down."""
    for name in TEXT_PARTS:
        part = getattr(cls, "sub_configs", {}).get(name)
        if part is None:
            continue
        if part.__name__ == "AutoConfig":
            try:
                return str(getattr(cls(), name).model_type)
            except Exception:  # noqa: BLE001 - a class that cannot be built without arguments has no default part
                return None
        return text_part(part) or str(part.model_type)
    return None


def default_of(cls: type, name: str) -> Any:
    """The class's own default of a field, before anything is computed from it."""
    for f in fields(cls):
        if f.name == name:
            return None if f.default is MISSING else f.default
    return getattr(cls, name, None)


def entry_of(cls: type) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    own = {name: default_of(cls, name) for name in SHAPING if name in names}
    own = {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}
    kept = {name: v for name, v in own.items() if v is None or isinstance(v, (bool, int, float, str, list))}
    for name in UNRULED:
        if name in kept and kept[name] is None:  # the class may fill it in: then it has that mechanism
            kept[name] = filled_in(cls, name)
    nested = getattr(cls, "sub_configs", {}).get("attn_config")
    if nested is not None:
        kept["attn_config"] = {
            name: default_of(nested, name) for name in ("attn_type", "kv_n_heads") if hasattr(nested, name)
        }
    if "global_head_dim" not in names:
        kept.update(overrides_by_kind(cls))
    entry: dict[str, Any] = {"fields": kept}
    if shifted := window_beyond_size(cls):
        entry["window_beyond_size"] = shifted
    if counts_twice(cls, names):
        entry["states_per_layer"] = 2
    if rule := period_rule(cls, names):
        entry["period_rule"] = rule
    return {**entry, **index_schedule(cls, names), **window_rule(cls, names)}


def filled_in(cls: type, name: str) -> Any:
    try:
        value = getattr(cls(), name, None)
    except Exception:  # noqa: BLE001 - a class that needs arguments fills in nothing
        return None
    return value if isinstance(value, (bool, int, str, list)) else None


def counts_twice(cls: type, names: set[str]) -> bool:
    """Whether the class keeps two states for each of its `num_layers`."""
    if "num_layers" not in names or "num_hidden_layers" in names:
        return False
    try:
        return bool(cls(num_layers=7).num_hidden_layers == 14)
    except Exception:  # noqa: BLE001 - its other lists do not fit seven layers
        return False


def period_rule(cls: type, names: set[str]) -> dict[str, Any]:
    """What precedes the periodic layers of the class, and of what kind they are, where not attention alone."""
    if not {"attn_layer_period", "attn_layer_offset"} <= names:
        return {}
    period, offset = 5, 1
    types = probe(cls, num_hidden_layers=23, attn_layer_period=period, attn_layer_offset=offset)
    if types is None:
        return {}
    for start in range(period + 1):
        kinds = {t for i, t in enumerate(types[start:]) if i % period == offset}
        others = {t for i, t in enumerate(types[start:]) if i % period != offset}
        if others == {"linear_attention"} and len(kinds) == 1:
            rule = {"prefix": types[:start], "kind": kinds.pop()}
            return {} if rule == {"prefix": [], "kind": "full_attention"} else rule
    return {}


def overrides_by_kind(cls: type) -> dict[str, Any]:
    """Head width of full layers and kv heads of window layers, where the class gives those kinds their own."""
    try:
        config = cls(num_hidden_layers=12)
        views, types = config.per_layer_config, [SPELLINGS.get(t, t) for t in config.layer_types]
        full, sliding = (views[types.index(kind)] for kind in ("full_attention", "sliding_attention"))
        widths, heads = (full.head_dim, sliding.head_dim), (full.num_key_value_heads, sliding.num_key_value_heads)
    except Exception:  # noqa: BLE001 - most classes have no such thing
        return {}
    learned: dict[str, Any] = {"global_head_dim": widths[0]} if widths[0] != widths[1] else {}
    return {**learned, "swa_num_key_value_heads": heads[1]} if heads[0] != heads[1] else learned


def index_schedule(cls: type, names: set[str]) -> dict[str, Any]:
    """Which layers have an index of their own, where the class says so for itself."""
    if "indexer_types" not in names:
        return {}
    types = probe(cls, "indexer_types", num_hidden_layers=PROBE_LAYERS)
    if types is None or set(types) == {"full"}:
        return {}
    for prefix in range(4):
        cycle = shortest_cycle(types[prefix:])
        if cycle is not None and len(cycle) < PROBE_LAYERS // 4:
            return {"index_prefix": types[:prefix], "index_cycle": cycle}
    return {"index_prefix": [], "index_cycle": []}


def window_beyond_size(cls: type) -> int:
    """How far the window exceeds a `sliding_window_size` in the file: 1 where the class counts the query apart."""
    try:
        windows = [int(cls(sliding_window_size=size, num_hidden_layers=12).sliding_window) for size in (100, 200)]
    except Exception:  # noqa: BLE001 - no windows, or not by this name
        return 0
    return windows[0] - 100 if windows[1] - windows[0] == 100 else 0


def window_rule(cls: type, names: set[str]) -> dict[str, Any]:
    """Which layers the class gives a window when the file lists none, learned by asking the class."""
    if not any(name in names or hasattr(cls, name) for name in ("layer_types", "layers_block_type")):
        return {}
    types = probe(cls, num_hidden_layers=PROBE_LAYERS)
    if types is None:
        return {"window_rule": "unknown"}
    if "use_sliding_window" in names:
        options = {"use_sliding_window": True, "sliding_window": 16, "num_hidden_layers": 8}
        if "max_window_layers" in names:
            windowed = probe(cls, max_window_layers=4, **options)
            full, sliding = "full_attention", "sliding_attention"
            if windowed == [full] * 4 + [sliding] * 4:
                return {"window_rule": "from_max_window_layers"}
            if windowed == [sliding, full, sliding, full] + [full] * 4:
                return {"window_rule": "alternate_below_max_window_layers"}
        if "no_rope_layer_interval" in names:
            return {"window_rule": "where_no_rope"}
    by_pattern = probe(cls, num_hidden_layers=PROBE_LAYERS, sliding_window_pattern=5)
    heeds = {"heeds_window_pattern": True} if by_pattern not in (None, types) else {}
    shorter = probe(cls, num_hidden_layers=PROBE_LAYERS - 1)
    if shorter is None:
        return {"window_rule": "unknown"}
    for prefix in range(4):
        cycle = shortest_cycle(types[prefix:-1])
        if cycle is None:
            continue
        start = {"layer_prefix": types[:prefix]} if prefix else {}
        followed = [*types[:prefix], *(cycle[i % len(cycle)] for i in range(PROBE_LAYERS - prefix))]
        if types == followed and shorter == followed[:-1]:
            return {**start, "layer_cycle": cycle, **heeds}
        if types == [*followed[:-1], "full_attention"] and shorter == [*followed[:-2], "full_attention"]:
            return {**start, "layer_cycle": cycle, "last_layer_full": True, **heeds}
    return {"window_rule": "unknown"}


def probe(cls: type, attribute: str = "layer_types", /, **options: Any) -> list[str] | None:
    try:
        types = getattr(cls(**options), attribute, None)
    except Exception:  # noqa: BLE001 - a class that does not take these options has no such rule
        return None
    if not isinstance(types, (list, tuple)) or not all(isinstance(t, str) for t in types):
        return None
    return [SPELLINGS.get(t, t) for t in types]


def shortest_cycle(types: list[str]) -> list[str] | None:
    for length in range(1, len(types) // 2 + 1):
        if all(types[i] == types[i % length] for i in range(len(types))):
            return types[:length]
    return None


if __name__ == "__main__":
    main()
