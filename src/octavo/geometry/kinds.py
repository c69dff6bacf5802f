"""What a config describes that its layers' kinds do not show, so that nothing is taken for plain attention.

`RECURRENT` names the fields that give away constant state: where a model type is unknown and no
pattern of layers uses it, the config is refused by that field. `UNRULED` names the fields for
whose mechanism there is no rule at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import ConfigError
from octavo.geometry.fields import Fields
from octavo.geometry.state import Constant, LayerState, parts_of

_SSM = "a state-space model (Mamba)"
_LINEAR = "linear attention"
_CROSS = "attention to something other than the sequence itself"

RECURRENT: Mapping[str, str] = {
    "mamba_d_state": _SSM,
    "mamba_d_conv": _SSM,
    "mamba_num_heads": _SSM,
    "mamba_n_heads": _SSM,
    "ssm_state_size": _SSM,
    "state_size": _SSM,
    "conv_kernel": _SSM,
    "d_state": _SSM,
    "d_conv": _SSM,
    "time_step_rank": _SSM,
    "attn_layer_period": _SSM,
    "attn_layer_indices": _SSM,
    "hybrid_override_pattern": _SSM,
    "hybrid_layer_ids": _SSM,
    "linear_num_key_heads": _LINEAR,
    "linear_num_value_heads": _LINEAR,
    "linear_key_head_dim": _LINEAR,
    "linear_num_heads": _LINEAR,
    "linear_conv_kernel_dim": _LINEAR,
    "linear_attn_config": _LINEAR,
    "linear_attn_alpha_factor": _LINEAR,
    "attn_type_list": _LINEAR,
    "conv_L_cache": "short convolutions",
    "lru_width": "a linear recurrence (RG-LRU)",
    "block_types": "a linear recurrence (RG-LRU)",
    "rescale_every": "a recurrence (RWKV)",
    "qk_dim_factor": "a recurrence (xLSTM)",
}

UNRULED: Mapping[str, str] = {
    "ssm_cfg": "a state-space model whose sizes are the defaults of another library",
    "cross_attention_layers": _CROSS,
    "add_cross_attention": _CROSS,
    "attn_layers": "hashed attention",
    "mem_len": "recurrent memory",
    "n_recurrent_loops": "layers that run several times in a loop",
    "ple_layer_ids": "convolutions over hashed n-grams beside its layers",
}

MARKERS: tuple[str, ...] = (
    *RECURRENT,
    *UNRULED,
    "kv_lora_rank", "index_head_dim", "indexer_head_dim", "index_topk", "compress_ratios", "compress_rates",
    "sparse_attention_config", "use_cla", "cla_share_factor", "kv_source_layers", "attention_types",
)  # fmt: skip
"""Fields whose presence in a config class is part of the table of defaults."""

_NAMES = ("mamba", "rwkv", "xlstm", "retnet", "hyena", "recurrent")
"""Parts of a class or model type name that give away a recurrence whose fields may be missing."""


def recurrent_field(fields: Fields) -> str | None:
    """The first field with a value that gives away constant state."""
    return next((name for name in RECURRENT if fields.get(name)), None)


def refuse_unruled(fields: Fields) -> None:
    """Raise `ConfigError` for the first mechanism for which there is no rule."""
    for name, kind in UNRULED.items():
        value: Any = fields.get(name)
        if value:
            raise ConfigError(
                name,
                value,
                f"describes {kind}, for which there is no rule (model_type={fields.model_type!r}); "
                "this model can be neither planned nor served yet",
            )
    if fields.entry.get("counts_layers_apart"):
        raise ConfigError(
            "model_type", fields.model_type, "keeps state for other layers than num_hidden_layers counts; no rule yet"
        )


def refuse_unseen_recurrence(fields: Fields, layers: Sequence[LayerState], architecture: str) -> None:
    """Raise where the config speaks of a recurrence that no layer was found to have."""
    if any(isinstance(part, Constant) for state in layers for part in parts_of(state)):
        return
    field = recurrent_field(fields)
    if field is not None and not fields.known:
        raise ConfigError(
            fields.spelled(field),
            fields.get(field),
            f"describes {RECURRENT[field]}, and nothing says which layers have it "
            f"(model_type={fields.model_type!r}); add layer_types to config.json",
        )
    named = f"{fields.model_type} {architecture}".lower()
    for part in _NAMES:
        if part in named:
            raise ConfigError(
                "model_type", fields.model_type, f"{part} models keep recurrent state; the config has no sizes of it"
            )
