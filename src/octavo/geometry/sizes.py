"""Sizes of a config by name, for formulas of weights: what the file says, what it implies, the class's default.

Evaluates the dimensions of `weight_shapes.json`, which are sums of products of fields such as
`2*n_groups*ssm_state_size+mamba_num_heads`; nothing else is ever evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo.geometry.attention import head_dim
from octavo.geometry.fields import ALIASES, Fields, checked_integer

_NESTED = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


class Sizes:
    """The fields of one config, with the class's defaults beneath them."""

    def __init__(self, fields: Fields, entry: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.defaults: Mapping[str, Any] = {**fields.defaults, **entry.get("fields", {})}
        renamed = {}
        for old, new in entry.get("synonyms", {}).items():
            if old in fields.raw and new not in fields.raw:
                renamed[new] = fields.raw[old]
            elif new in fields.raw and old not in fields.raw:
                renamed[old] = fields.raw[new]
        self.fields = Fields({**fields.raw, **renamed}, fields.model_type)
        self.config = config
        self.assumed: dict[str, None] = {}
        """Fields that the file does not give and the class's default stands in for, in order of use."""

    def with_defaults(self) -> Fields:
        """The same config as if the file said what its class supplies."""
        return Fields(
            {**{k: v for k, v in self.defaults.items() if v is not None}, **self.fields.raw}, self.fields.model_type
        )

    def switch(self, name: str) -> Any:
        """A flag of the config, or None for a size that is null."""
        if name == "tie_word_embeddings":
            for part in (self.fields.raw, self.config):
                if isinstance(part.get(name), bool):
                    return part[name]
        if name in self.fields.raw:
            return self.fields.raw[name]
        return self.defaults.get(name)

    def dimension(self, text: str) -> int:
        """The value of a sum of products; a product may be halved."""
        return sum(self._product(term) for term in text.split("+"))

    def _product(self, term: str) -> int:
        term, _, divisor = term.partition("/")
        result = 1
        for factor in term.split("*"):
            result *= int(factor) if factor.isdigit() else self.size(factor)
        return result // int(divisor) if divisor else result

    def size(self, name: str) -> int:
        implied = self._implied(name)
        if implied is not None:
            return implied
        value = self.fields.get(name)
        if value is None and not any(s in self.fields.raw for s in (name, *ALIASES.get(name, ()))):
            value = next(
                (self.defaults[s] for s in (name, *ALIASES.get(name, ())) if self.defaults.get(s) is not None), None
            )
        if not self.fields.says(name):
            self.assumed[name] = None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(
                name, value, "is needed to count the weights; add it to config.json, or give --weights-bytes"
            )
        return value

    def _implied(self, name: str) -> int | None:
        """Sizes that a file may leave to be derived from others."""
        fields = self.fields
        value: int | None = None
        if name == "num_hidden_layers":
            value = fields.required(name)
        elif name == "head_dim":
            value = head_dim(fields)
        elif name in _NESTED:
            nested = fields.mapping("linear_attn_config").get(_NESTED[name])
            value = None if nested is None else checked_integer(f"linear_attn_config.{_NESTED[name]}", nested)
        elif name == "num_key_value_heads" and fields.get(name) is None:
            value = self.size("num_attention_heads")
        elif name == "intermediate_size":
            value = self._feed_forward()
        elif name == "mamba_head_dim" and not isinstance(fields.get(name), int):
            inner = fields.integer("mamba_d_ssm") or self.size("expand") * self.size("hidden_size")
            value = inner // self.size("mamba_num_heads")
        elif name in ("time_step_rank", "mamba_dt_rank") and fields.get(name) in (None, "auto"):
            value = -(-self.size("hidden_size") // 16)
        elif name == "mamba_d_ssm" and fields.get(name) is None:
            value = self.size("expand") * self.size("hidden_size")
        return value

    def _feed_forward(self) -> int | None:
        """The width of the feed-forward network: four times the hidden size where the file leaves it open."""
        fields = self.fields
        value = fields.get("intermediate_size")
        null = any(s in fields.raw for s in ("intermediate_size", *ALIASES["intermediate_size"]))
        if value is None and (null or self.defaults.get("intermediate_size") is None):
            return 4 * self.size("hidden_size")
        adjusted = fields.raw.get("block_auto_adjust_ff_dim", self.defaults.get("block_auto_adjust_ff_dim"))
        if isinstance(value, int) and adjusted is not None:
            return self._adjusted(value, bool(adjusted))
        return None

    def _adjusted(self, width: int, by_two_thirds: bool) -> int:
        """A width that the class adjusts: two thirds, times a factor, up to a multiple."""
        raw = self.fields.raw
        if by_two_thirds:
            factor = raw.get("block_ffn_dim_multiplier", 1.0)
            width = int(factor * int(2 * width / 3)) if isinstance(factor, (int, float)) else int(2 * width / 3)
        multiple = raw.get("block_multiple_of", 256)
        return -(-width // multiple) * multiple if isinstance(multiple, int) and multiple > 0 else width
