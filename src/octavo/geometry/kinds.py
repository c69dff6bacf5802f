"""Recognising what kind of state a config describes, so that none is taken for plain attention.

`MARKERS` maps a field to the mechanism that its presence gives away. A rule elsewhere consumes
the markers that it understands; any other one that has a value means that the config describes
state for which there is no rule, and it is refused by that field's name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo.geometry.fields import Fields

_SSM = "a state-space model (Mamba)"
_LINEAR = "linear attention"
_SPARSE = "sparse attention with an index of its own"
_CROSS = "attention to something other than the sequence itself"

MARKERS: Mapping[str, str] = {
    "kv_lora_rank": "latent attention (MLA)",
    "index_head_dim": _SPARSE,
    "index_topk": _SPARSE,
    "compress_ratios": "compressed attention",
    "sparse_attention_config": _SPARSE,
    "mamba_d_state": _SSM,
    "mamba_d_conv": _SSM,
    "mamba_num_heads": _SSM,
    "mamba_n_heads": _SSM,
    "ssm_state_size": _SSM,
    "state_size": _SSM,
    "conv_kernel": _SSM,
    "d_state": _SSM,
    "d_conv": _SSM,
    "ssm_cfg": _SSM,
    "time_step_rank": _SSM,
    "attn_layer_period": _SSM,
    "attn_layer_indices": _SSM,
    "hybrid_override_pattern": _SSM,
    "hybrid_layer_ids": _SSM,
    "linear_num_key_heads": _LINEAR,
    "linear_num_value_heads": _LINEAR,
    "linear_key_head_dim": _LINEAR,
    "linear_conv_kernel_dim": _LINEAR,
    "linear_attn_config": _LINEAR,
    "full_attn_alpha_factor": _LINEAR,
    "conv_L_cache": "short convolutions",
    "lru_width": "a linear recurrence (RG-LRU)",
    "block_types": "a linear recurrence (RG-LRU)",
    "attention_hidden_size": "a recurrence (RWKV)",
    "rescale_every": "a recurrence (RWKV)",
    "qk_dim_factor": "a recurrence (xLSTM)",
    "use_cla": "attention state shared across layers (CLA)",
    "cross_attention_layers": _CROSS,
    "add_cross_attention": _CROSS,
    "attn_layers": "hashed attention",
    "mem_len": "recurrent memory",
    "attention_types": "local attention in fixed layers (attention_types)",
}

_NAMES = ("mamba", "rwkv", "xlstm", "retnet", "hyena", "recurrent")
"""Parts of a class or model type name that give away a recurrence whose fields may be missing."""

LAYER_KINDS: Mapping[str, str] = {
    "linear_attention": _LINEAR,
    "mamba": _SSM,
    "hybrid": f"{_SSM} beside attention",
    "conv": "short convolutions",
    "recurrent": "a recurrence",
}
"""What entries of `layer_types` mean that are no attention over kept keys and values."""


def markers_of(fields: Fields) -> dict[str, str]:
    """Field -> mechanism for every marker that has a value, in the table's order."""
    found = {name: kind for name, kind in MARKERS.items() if _counts(fields, name)}
    for kind in fields.get("layer_types") or ():
        if isinstance(kind, str) and kind in LAYER_KINDS:
            found.setdefault("layer_types", LAYER_KINDS[kind])
    return found


def _counts(fields: Fields, name: str) -> bool:
    value: Any = fields.get(name)
    if isinstance(value, Mapping) and "use_sparse_attention" in value:
        return bool(value["use_sparse_attention"])
    return bool(value)


def refuse_unruled(fields: Fields, architecture: str, understood: Collection[str] = ()) -> None:
    """Raise `ConfigError` for the first marker that is not among those `understood`."""
    for name, kind in markers_of(fields).items():
        if name not in understood:
            raise ConfigError(
                fields.spelled(name),
                fields.get(name),
                f"describes {kind}, for which there is no rule (model_type={fields.model_type!r}); "
                "this model can be neither planned nor served yet",
            )
    if fields.entry.get("counts_layers_apart"):
        raise ConfigError(
            "model_type", fields.model_type, "keeps state for other layers than num_hidden_layers counts; no rule yet"
        )
    named = f"{fields.model_type} {architecture}".lower()
    for part in _NAMES:
        if part in named:
            raise ConfigError(
                "model_type", fields.model_type, f"{part} models keep recurrent state, for which there is no rule yet"
            )
