"""Reading a raw `config.json`: spellings, defaults, types.

Owns the table of spellings (`ALIASES`) and `Fields`, which answers by canonical name: what the
config says, else what Transformers' config class would say, else None. Every answer has its type
checked; a wrong or contradictory one raises `ConfigError` naming the field as the file spells it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from octavo.errors import ConfigError, shorten

ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads", "num_query_heads"),
    "num_key_value_heads": (
        "num_kv_heads",
        "n_kv_heads",
        "n_head_kv",
        "multi_query_group_num",
        "num_query_groups",
        "num_attention_groups",
    ),
    "head_dim": ("attention_head_dim", "kv_channels"),
    "hidden_size": ("n_embd", "d_model", "n_embed", "model_dim"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "ffn_dim"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": (
        "n_positions",
        "max_seq_len",
        "max_sequence_length",
        "seq_length",
        "n_ctx",
        "model_max_length",
        "context_length",
        "max_context_length",
    ),
    "sliding_window": ("sliding_window_size", "attention_window_size"),
    "multi_query": ("multi_query_attention",),
    "layer_types": ("layers_block_type",),
    "ssm_state_size": ("mamba_d_state", "state_size"),
    "conv_kernel": ("mamba_d_conv",),
    "mamba_num_heads": ("mamba_n_heads", "n_mamba_heads"),
    "mamba_head_dim": ("mamba_d_head", "mamba_headdim"),
    "n_groups": ("mamba_n_groups", "mamba_ngroups"),
    "expand": ("mamba_expand",),
    "num_experts_per_tok": ("num_experts_per_token", "experts_per_token", "moe_topk"),
}
"""Canonical name -> other spellings in use, in order of preference."""

_MAX = 2**40


@cache
def defaults_table() -> dict[str, Any]:
    """The package's generated table: see `tools/make_config_defaults.py`."""
    text = resources.files("octavo.geometry").joinpath("config_defaults.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


class Fields:
    """One config, asked by canonical names. `known` tells whether Transformers has this model type."""

    def __init__(self, raw: Mapping[str, Any], model_type: str) -> None:
        self.raw = raw
        self.model_type = model_type
        entry = defaults_table()["types"].get(model_type)
        self.known = entry is not None
        self.entry: Mapping[str, Any] = entry or {}
        self.defaults: Mapping[str, Any] = self.entry.get("fields", {})

    def spelled(self, name: str) -> str:
        """The spelling of `name` that gives its value, or `name` itself where nothing does."""
        for source in (self.raw, self.defaults):
            for spelling in (name, *ALIASES.get(name, ())):
                if source.get(spelling) is not None:
                    return spelling
        return name

    def get(self, name: str) -> Any:
        """The value of a field, or None. A null in the file means none: it does not ask for the default."""
        spellings = (name, *ALIASES.get(name, ()))
        written = [self.raw[spelling] for spelling in spellings if spelling in self.raw]
        if written:
            return next((value for value in written if value is not None), None)
        return next((self.defaults[s] for s in spellings if self.defaults.get(s) is not None), None)

    def says(self, name: str) -> bool:
        """Whether the file itself gives the field a value."""
        return any(self.raw.get(spelling) is not None for spelling in (name, *ALIASES.get(name, ())))

    def understood(self, name: str) -> bool:
        """Whether the model type has this field at all. Of an unknown type every field is taken to count."""
        return not self.known or any(spelling in self.defaults for spelling in (name, *ALIASES.get(name, ())))

    def integer(self, name: str, *, low: int = 1) -> int | None:
        """A whole number of at least `low`, or None where neither the file nor the table gives one."""
        value = self.get(name)
        if value is None:
            return None
        self._agree(name)
        return checked_integer(self.spelled(name), value, low=low)

    def required(self, name: str, *, low: int = 1) -> int:
        value = self.integer(name, low=low)
        if value is None:
            spellings = ", ".join((name, *ALIASES.get(name, ())))
            raise ConfigError(
                name,
                None,
                f"the config of model_type={self.model_type!r} has no such field and there is no default for it; "
                f"add it to config.json (spellings understood: {spellings})",
            )
        return value

    def flag(self, name: str) -> bool | None:
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise ConfigError(self.spelled(name), value, "must be true or false")

    def sequence(self, name: str) -> Sequence[Any] | None:
        value = self.get(name)
        if value is None or isinstance(value, (list, tuple)):
            return value
        raise ConfigError(self.spelled(name), value, "must be a list with one entry per layer")

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A nested object, with the table's defaults beneath what the file says."""
        value = self.raw.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(name, value, "must be an object")
        beneath = self.defaults.get(name)
        return {**(beneath if isinstance(beneath, Mapping) else {}), **(value or {})}

    def _agree(self, name: str) -> None:
        """Two spellings of one field in the file must not disagree (the context length may)."""
        if name == "max_position_embeddings":
            return
        given = [(s, self.raw[s]) for s in (name, *ALIASES.get(name, ())) if self.raw.get(s) is not None]
        for spelling, value in given[1:]:
            if value != given[0][1]:
                raise ConfigError(
                    spelling,
                    value,
                    f"contradicts {given[0][0]}={shorten(given[0][1])}, which means the same; keep the right one",
                )


def checked_integer(name: str, value: Any, *, low: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(name, value, f"must be a whole number of at least {low}, without quotes")
    if not low <= value <= _MAX:
        raise ConfigError(name, value, f"must be from {low} to {_MAX}")
    return value
