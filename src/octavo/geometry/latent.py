"""Latent attention (MLA): one compressed latent and one rotary key per token, whatever the heads.

Where a layer also chooses what to read by an index of its own, the index's keys are state too.
`index_component` is shared with attention per head, which may have such an index as well.
"""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.geometry.fields import Fields
from octavo.geometry.pattern import FULL, INDEXED, SLIDING, window_of
from octavo.geometry.recurrent import Kept
from octavo.geometry.state import Component, Growing, Windowed


def is_latent(fields: Fields) -> bool:
    return fields.integer("kv_lora_rank") is not None


def latent_state(fields: Fields, kind: str, layer: int, kept: Kept, own_index: bool) -> Growing | Windowed:
    """One layer keeps `kv_lora_rank + qk_rope_head_dim` values per token, and its index key if it has one."""
    latent = Component("latent", (fields.required("kv_lora_rank"),), kept.kv)
    rope_dim = fields.required("qk_rope_head_dim", low=0) if _rotates(fields, layer) else 0
    kept_values = (latent, Component("rope_k", (rope_dim,), kept.kv)) if rope_dim else (latent,)
    if kind == SLIDING:
        return Windowed(kept_values, window_of(fields))
    if kind not in (FULL, INDEXED):
        raise ConfigError(
            fields.spelled("layer_types"), kind, f"layer {layer}: latent attention beside this has no rule yet"
        )
    index = index_components(fields, kept) if own_index else ()
    return Growing((*kept_values, *index), read_tokens(fields) if has_index(fields) else None)


def _rotates(fields: Fields, layer: int) -> bool:
    """Whether a layer has a rotary key: all have one, except where the config lists those without."""
    listed = fields.sequence("no_rope_layers")
    if listed is None:
        if "no_rope_layers" in fields.defaults:
            raise ConfigError("no_rope_layers", None, f"model_type={fields.model_type!r} needs it: 1 or 0 a layer")
        return True
    if layer >= len(listed):
        raise ConfigError("no_rope_layers", list(listed), f"has no entry for layer {layer}")
    return bool(listed[layer])


def has_index(fields: Fields) -> bool:
    return _index_width(fields) is not None


def _index_width(fields: Fields) -> int | None:
    nested = fields.mapping("sparse_attention_config").get("sparse_index_dim")
    if nested is not None:
        return Fields({"sparse_index_dim": nested}, "").required("sparse_index_dim")
    return fields.integer("indexer_head_dim") or fields.integer("index_head_dim")


def index_components(fields: Fields, kept: Kept) -> tuple[Component, ...]:
    """What an index keeps per token: one key, and a gate where several keys are pooled into one."""
    width = _index_width(fields)
    if width is None:
        raise ConfigError("index_head_dim", None, "layers that attend by an index need the width of its keys")
    key = Component("index_k", (width,), kept.kv)
    if (fields.integer("index_kpool") or 1) == 1:
        return (key,)
    gate = Component("index_gate", (width,), kept.kv)
    if kept.convention == "transformers":
        return (key, gate, Component("index_valid", (1,), kept.model))
    return (key, gate)


def read_tokens(fields: Fields) -> int | None:
    """Positions that the index of a layer lets a query read, where the config says."""
    nested = fields.mapping("sparse_attention_config")
    blocks, size = nested.get("sparse_topk_blocks"), nested.get("sparse_block_size")
    if isinstance(blocks, int) and isinstance(size, int):
        return (blocks + int(nested.get("sparse_local_block") or 0)) * size
    blocks, size = fields.get("index_topk_blocks"), fields.get("index_block_size")
    if isinstance(blocks, int) and isinstance(size, int):
        return (blocks + int(fields.get("index_local_blocks") or 0)) * size
    return fields.integer("index_topk") or fields.integer("indexer_budget")


def own_index(fields: Fields, kinds: list[str], latent: bool) -> list[bool]:
    """Which layers have an index of their own; the others use the one of a layer before them, or none."""
    count = len(kinds)
    if not has_index(fields):
        return [False] * count
    # where no layer is told apart, an index belongs to all latent ones
    marked = INDEXED in kinds or not latent
    indexed = [kind == INDEXED or (kind == FULL and (not marked or _full_is_indexed(fields))) for kind in kinds]
    return [has and own for has, own in zip(indexed, _index_schedule(fields, count), strict=True)]


def _full_is_indexed(fields: Fields) -> bool:
    return fields.get("indexer_head_dim") is not None or (is_latent(fields) and fields.get("index_kpool") is not None)


def _index_schedule(fields: Fields, count: int) -> list[bool]:
    """By a list of `full` and `shared`, letters F and S, or every so many layers."""
    listed = fields.sequence("indexer_types")
    pattern = fields.get("index_topk_pattern")
    if listed is None and pattern is not None:
        listed = [{"F": "full", "S": "shared"}.get(entry, entry) for entry in pattern]
    if listed is None and fields.says("index_topk_freq"):
        every, offset = fields.required("index_topk_freq"), fields.integer("index_skip_topk_offset", low=0)
        start = 2 if offset is None else offset
        return [max(i - start + 1, 0) % every == 0 for i in range(count)]
    if listed is None and "index_cycle" in fields.entry:
        prefix, cycle = fields.entry["index_prefix"], fields.entry["index_cycle"]
        if not cycle:
            raise ConfigError("indexer_types", None, f"model_type={fields.model_type!r} needs this list, one per layer")
        listed = [*prefix, *(cycle[i % len(cycle)] for i in range(max(0, count - len(prefix))))][:count]
    if listed is None:
        return [True] * count
    if len(listed) != count:
        raise ConfigError("indexer_types", list(listed), f"has {len(listed)} entries for num_hidden_layers={count}")
    for kind in listed:
        if kind not in ("full", "shared"):
            raise ConfigError("indexer_types", kind, "every entry must be 'full' or 'shared'")
    return [kind == "full" for kind in listed]
