"""Constant state: what a recurrence or a short convolution keeps of a sequence, whatever its length.

One rule per family, chosen by the fields that only that family has, never by a model's name. Two
conventions differ: a causal convolution of K columns *needs* the last K - 1 inputs, and
Transformers keeps K of them. The recurrence is kept in the type that the config names, else in
float32, in which all of them are computed; convolutions in the model's own type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.errors import ConfigError
from octavo.geometry.dtypes import FP32, Dtype, dtype_named
from octavo.geometry.fields import Fields, checked_integer
from octavo.geometry.state import Component, Constant

Convention = Literal["needed", "transformers"]
CONVENTIONS: tuple[Convention, ...] = ("needed", "transformers")

_STATE_DTYPES = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype", "inference_state_dtype")


@dataclass(frozen=True, slots=True)
class Kept:
    """In what types, and by whose convention, state is kept."""

    kv: Dtype
    model: Dtype
    convention: Convention = "needed"

    def columns(self, kernel: int) -> int:
        """Inputs of a causal convolution that are kept."""
        return kernel if self.convention == "transformers" else kernel - 1


def state_dtype(fields: Fields) -> Dtype:
    """The type of the recurrence itself: as the config names it, else float32."""
    for name in _STATE_DTYPES:
        value = fields.get(name)
        if value is not None:
            return dtype_named(str(value), field=name)
    return FP32


def recurrence(fields: Fields, kept: Kept) -> Constant:
    """What one recurrent layer of this config keeps. Raises `ConfigError` where no family fits."""
    for marks, rule in _FAMILIES:
        if marks(fields):
            return Constant(tuple(component for component in rule(fields, kept) if component.elements))
    raise ConfigError(
        "layer_types",
        "linear_attention",
        f"the config of model_type={fields.model_type!r} has recurrent layers and no sizes of their state "
        "that a rule here understands",
    )


def short_convolution(fields: Fields, kept: Kept) -> Constant:
    """A gated short convolution alone: the last inputs of every channel."""
    columns = kept.columns(fields.required("conv_L_cache"))
    return Constant((Component("conv", (fields.required("hidden_size"), columns), kept.model),))


def _nested_delta(fields: Fields, kept: Kept) -> tuple[Component, ...]:
    """Delta attention with a gate per channel (KDA): as many key as value heads, all of one width."""
    nested: Mapping[str, Any] = fields.mapping("linear_attn_config")

    def size(inner: str, flat: str, other: str | None = None) -> int:
        if nested.get(inner) is not None:
            return checked_integer(f"linear_attn_config.{inner}", nested[inner])
        if fields.integer(flat) is None and other is not None:
            return fields.required(other)
        return fields.required(flat)

    heads = size("num_heads", "linear_num_heads", "num_attention_heads")
    width = size("head_dim", "linear_head_dim", "head_dim")
    kernel = size("short_conv_kernel_size", "linear_conv_kernel_dim", "short_conv_kernel_size")
    return (
        Component("conv", (3 * heads * width, kept.columns(kernel)), kept.model),
        Component("recurrent", (heads, width, width), state_dtype(fields)),
    )


def _gated_delta(fields: Fields, kept: Kept) -> tuple[Component, ...]:
    """Gated delta net: a matrix per value head, and a convolution over queries, keys and values."""
    key_heads, value_heads = fields.required("linear_num_key_heads"), fields.required("linear_num_value_heads")
    key_dim, value_dim = fields.required("linear_key_head_dim"), fields.required("linear_value_head_dim")
    if value_heads % key_heads:
        raise ConfigError("linear_num_value_heads", value_heads, f"must be a multiple of the {key_heads} key heads")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    kernel = fields.required("linear_conv_kernel_dim")
    return (
        Component("conv", (channels, kept.columns(kernel)), kept.model),
        Component("recurrent", (value_heads, key_dim, value_dim), state_dtype(fields)),
    )


def _state_space(fields: Fields, kept: Kept) -> tuple[Component, ...]:
    """Mamba 1 (a state per channel) and 2 (heads, and groups that share what is written and read)."""
    states = fields.required("ssm_state_size")
    columns = kept.columns(fields.required("conv_kernel"))
    groups = fields.integer("n_groups")
    if groups is None:
        inner = _inner_width(fields)
        return (
            Component("conv", (inner, columns), kept.model),
            Component("recurrent", (inner, states), state_dtype(fields)),
        )
    heads, width = _state_space_heads(fields)
    return (
        Component("conv", (heads * width, columns), kept.model),
        Component("conv_groups", (groups, 2 * states, columns), kept.model),
        Component("recurrent", (heads, width, states), state_dtype(fields)),
    )


def _state_space_heads(fields: Fields) -> tuple[int, int]:
    """Heads of a Mamba-2 layer and their width. A pure model spells them without a prefix."""
    pure = fields.get("mamba_num_heads") is None
    name, width_name = ("num_heads", "head_dim") if pure else ("mamba_num_heads", "mamba_head_dim")
    heads = fields.required(name)
    if fields.get(width_name) in (None, "auto"):
        inner = _inner_width(fields)
        if inner % heads:
            raise ConfigError(fields.spelled(name), heads, f"must divide the inner width of {inner}")
        return heads, inner // heads
    width = fields.required(width_name)
    # where both are stated they must agree; one family goes by its heads alone, whatever `expand` says
    if fields.spelled(name) != "mamba_num_heads" and heads * width != _inner_width(fields):
        raise ConfigError(
            fields.spelled(name), heads, f"heads x {width} must be the inner width of {_inner_width(fields)}"
        )
    return heads, width


def _inner_width(fields: Fields) -> int:
    """Channels of a state-space layer: stated, or a multiple of the hidden size."""
    if fields.get("mamba_d_ssm") is not None:
        return fields.required("mamba_d_ssm")
    # where the model has no feed-forward of its own, this is what the file calls intermediate_size
    pure = not fields.says("num_attention_heads") and "intermediate_size" not in fields.defaults
    if pure and fields.says("intermediate_size"):
        return fields.required("intermediate_size")
    return fields.required("expand") * fields.required("hidden_size")


def _gated_linear(fields: Fields, kept: Kept) -> tuple[Component, ...]:
    """Linear attention with a decay (RG-LRU): one number per channel, and a convolution before it."""
    width = fields.integer("lru_width") or fields.required("hidden_size")
    channels = fields.required("hidden_size") if kept.convention == "transformers" else width
    columns = fields.required("conv1d_width") - 1  # Transformers keeps no more than is needed here
    return (Component("conv", (channels, columns), kept.model), Component("recurrent", (width,), FP32))


def _lightning(fields: Fields, _: Kept) -> tuple[Component, ...]:
    """Lightning attention: a matrix of keys times values per query head."""
    heads = fields.required("num_attention_heads")
    width = fields.integer("head_dim") or fields.required("hidden_size") // heads
    return (Component("recurrent", (heads, width, width), state_dtype(fields)),)


def _receptance(fields: Fields, kept: Kept) -> tuple[Component, ...]:
    """RWKV: the last input of both halves of a layer, and the recurrence.

    Version 4 keeps three vectors; from version 5 on there are heads and a matrix for each.
    """
    hidden = fields.required("hidden_size")
    width = fields.integer("attention_hidden_size") or hidden
    shifted = (Component("shift_attention", (hidden,), kept.model), Component("shift_ffn", (hidden,), kept.model))
    head = fields.integer("head_size")
    if head is None:
        if fields.known or fields.get("model_version") is None:
            return (*shifted, Component("recurrent", (width, 3), FP32))
        raise ConfigError("head_size", None, "from version 5 on RWKV has heads; add head_size to config.json")
    if width % head:
        raise ConfigError("head_size", head, f"must divide attention_hidden_size={width}")
    return (*shifted, Component("recurrent", (width // head, head, head), FP32))


def _matrix_memory(fields: Fields, kept: Kept) -> tuple[Component, ...]:
    """xLSTM: a matrix, its normaliser and a running maximum per head."""
    hidden, heads = fields.required("hidden_size"), fields.required("num_heads")
    key_dim, value_dim = (_rounded(fields, hidden, name) // heads for name in ("qk_dim_factor", "v_dim_factor"))
    # Transformers computes it in the type that the config names and keeps it in the model's
    dtype = kept.model if kept.convention == "transformers" else state_dtype(fields)
    return (
        Component("recurrent", (heads, key_dim, value_dim), dtype),
        Component("normaliser", (heads, key_dim), dtype),
        Component("maximum", (heads, 1), dtype),
    )


def _rounded(fields: Fields, hidden: int, name: str) -> int:
    """`hidden` times a factor of the config, up to a multiple of 64."""
    factor = fields.get(name)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 0:
        raise ConfigError(name, factor, "must be a number above 0")
    exact = hidden * factor
    return -(-int(exact if exact == int(exact) else exact + 1) // 64) * 64


def _convolved_heads(fields: Fields, kept: Kept) -> tuple[Component, ...]:
    """Attention whose queries and keys pass two convolutions, and half of whose values come one position late."""
    heads, kv_heads = fields.required("num_attention_heads"), fields.required("num_key_value_heads")
    width = fields.required("head_dim")
    columns = fields.required("cca_time0") + fields.required("cca_time1") - 2
    return (
        Component("conv", ((heads + kv_heads) * width, columns), kept.model),
        Component("recurrent", (kv_heads * width // 2,), kept.model),
    )


_Rule = Callable[[Fields, Kept], tuple[Component, ...]]

_FAMILIES: tuple[tuple[Callable[[Fields], bool], _Rule], ...] = (
    (lambda f: bool(f.mapping("linear_attn_config")) or f.get("linear_num_heads") is not None, _nested_delta),
    (lambda f: f.says("layer_group_size") or f.get("short_conv_kernel_size") is not None, _nested_delta),
    (lambda f: "linear_num_value_heads" in {**f.raw, **f.defaults}, _gated_delta),
    (lambda f: f.get("ssm_state_size") is not None, _state_space),
    (lambda f: f.get("conv1d_width") is not None, _gated_linear),
    (lambda f: f.get("cca_time0") is not None, _convolved_heads),
    (lambda f: f.get("qk_dim_factor") is not None, _matrix_memory),
    (lambda f: f.get("rescale_every") is not None, _receptance),
    (lambda f: f.get("attn_type_list") is not None or f.get("linear_attn_alpha_factor") is not None, _lightning),
)
