"""Write `src/octavo/geometry/config_defaults.json` from Transformers' config classes.

A published `config.json` leaves out what its class would supply. Importing Transformers to plan
takes seconds, so the few fields that shape attention state are written down here, per model type,
together with what the class computes from them (which layers have the window). Run it after a
change of the Transformers pin: `python tools/make_config_defaults.py`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from octavo.geometry.fields import ALIASES
from octavo.geometry.kinds import MARKERS

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
    text_types = set()
    for model_type in sorted(CONFIG_MAPPING.keys()):
        inner = text_part(CONFIG_MAPPING[model_type])
        if inner is not None and inner != model_type:
            wrappers[model_type] = inner
            text_types.add(inner)
    for model_type in sorted(CONFIG_MAPPING.keys()):
        cls = CONFIG_MAPPING[model_type]
        names = {f.name for f in fields(cls)}
        if model_type in sequence_to_sequence or default_of(cls, "is_encoder_decoder") is True:
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
        "architectures": {
            name: model_type
            for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
            if model_type in types and isinstance(name, str)
        },
        "wrappers": wrappers,
        "not_decoders": not_decoders,
    }


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
    kept = {name: value for name, value in own.items() if value is None or isinstance(value, (bool, int, str, list))}
    for name in MARKERS:
        if name in kept and kept[name] is None:  # the class may fill it in: then it has that mechanism
            kept[name] = filled_in(cls, name)
    nested = getattr(cls, "sub_configs", {}).get("attn_config")
    if nested is not None:
        kept["attn_config"] = {
            name: default_of(nested, name) for name in ("attn_type", "kv_n_heads") if hasattr(nested, name)
        }
    if "global_head_dim" not in names:
        kept.update(override_of_full_layers(cls))
    entry: dict[str, Any] = {"fields": kept}
    if shifted := window_beyond_size(cls):
        entry["window_beyond_size"] = shifted
    if counts_layers_apart(cls):
        entry["counts_layers_apart"] = True
    return {**entry, **window_rule(cls, names)}


def counts_layers_apart(cls: type) -> bool:
    """Whether the class keeps state for another number of layers than its file names."""
    try:
        return bool(cls(num_hidden_layers=7).num_hidden_layers != 7)
    except Exception:  # noqa: BLE001 - spelled otherwise, or its other lists do not fit seven layers
        return False


def filled_in(cls: type, name: str) -> Any:
    try:
        value = getattr(cls(), name, None)
    except Exception:  # noqa: BLE001 - a class that needs arguments fills in nothing
        return None
    return value if isinstance(value, (bool, int, str, list)) else None


def override_of_full_layers(cls: type) -> dict[str, Any]:
    """The head width that the class gives to its full-attention layers alone, if it does."""
    try:
        config = cls(num_hidden_layers=12)
        views, types = config.per_layer_config, config.layer_types
        widths = {kind: views[types.index(kind)].head_dim for kind in ("full_attention", "sliding_attention")}
    except Exception:  # noqa: BLE001 - most classes have no such thing
        return {}
    full, sliding = widths["full_attention"], widths["sliding_attention"]
    return {"global_head_dim": full} if full != sliding else {}


def window_beyond_size(cls: type) -> int:
    """How far the window exceeds a `sliding_window_size` in the file: 1 where the class counts the query apart."""
    try:
        windows = [int(cls(sliding_window_size=size, num_hidden_layers=12).sliding_window) for size in (100, 200)]
    except Exception:  # noqa: BLE001 - no windows, or not by this name
        return 0
    return windows[0] - 100 if windows[1] - windows[0] == 100 else 0


def window_rule(cls: type, names: set[str]) -> dict[str, Any]:
    """Which layers the class gives a window when the file lists none, learned by asking the class."""
    if not names & {"layer_types", "layers_block_type"}:
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
    cycle = shortest_cycle(types[:-1])
    if cycle is None or shorter is None:
        return {"window_rule": "unknown"}
    followed = [cycle[i % len(cycle)] for i in range(PROBE_LAYERS)]
    if types == followed and shorter == followed[:-1]:
        return {"layer_cycle": cycle, **heeds}
    if types == [*followed[:-1], "full_attention"] and shorter == [*followed[:-2], "full_attention"]:
        return {"layer_cycle": cycle, "last_layer_full": True, **heeds}
    return {"window_rule": "unknown"}


def probe(cls: type, **options: Any) -> list[str] | None:
    try:
        types = getattr(cls(**options), "layer_types", None)
    except Exception:  # noqa: BLE001 - a class that does not take these options has no such rule
        return None
    return list(types) if isinstance(types, (list, tuple)) and all(isinstance(t, str) for t in types) else None


def shortest_cycle(types: list[str]) -> list[str] | None:
    for length in range(1, len(types) // 2 + 1):
        if all(types[i] == types[i % length] for i in range(len(types))):
            return types[:length]
    return None


if __name__ == "__main__":
    main()
