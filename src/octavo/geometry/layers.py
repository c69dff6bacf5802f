"""From the kinds of layers to their states: puts together what the rules say of each half of a layer.

Owns the choice between attention per head, latent and compressed attention, what a hybrid layer
consists of, and which layers borrow from which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.errors import ConfigError
from octavo.geometry.attention import attention_state, block_config_layers, heads_of
from octavo.geometry.compressed import compressed_state, is_compressing
from octavo.geometry.dtypes import FP32
from octavo.geometry.fields import Fields
from octavo.geometry.kinds import refuse_unruled, refuse_unseen_recurrence
from octavo.geometry.latent import is_latent, latent_state, own_index
from octavo.geometry.pattern import (
    CONV,
    FULL,
    HYBRID,
    HYBRID_SLIDING,
    LINEAR,
    NOTHING,
    SLIDING,
    layer_kinds,
)
from octavo.geometry.recurrent import Kept, recurrence, short_convolution
from octavo.geometry.state import Borrowed, Component, Compound, Constant, LayerState, Stateless

_HYBRIDS = {HYBRID: FULL, HYBRID_SLIDING: SLIDING}


def states_of_layers(fields: Fields, kept: Kept, architecture: str) -> tuple[LayerState, ...]:
    """What every layer keeps. Raises `ConfigError` naming the field where no rule fits."""
    refuse_unruled(fields)
    if fields.raw.get("block_configs") is not None:
        return block_config_layers(fields, kept.kv)
    kinds = layer_kinds(fields)
    indexed = own_index(fields, kinds, is_latent(fields))
    states = [_state(_overridden(fields, i), kind, i, kept, indexed[i]) for i, kind in enumerate(kinds)]
    layers = _shared(fields, kinds, states)
    refuse_unseen_recurrence(fields, layers, architecture)
    return layers


def _state(fields: Fields, kind: str, layer: int, kept: Kept, own: bool) -> LayerState:
    if kind == NOTHING:
        return Stateless()
    if kind == LINEAR:
        return recurrence(fields, kept)
    if kind == CONV:
        return short_convolution(fields, kept)
    if kind in _HYBRIDS:
        attention = attention_state(fields, _HYBRIDS[kind], layer, kept, own)
        return Compound((attention, _beside_attention(fields, _HYBRIDS[kind], layer, kept)))
    if is_compressing(fields):
        return compressed_state(fields, kind, kept)
    if is_latent(fields):
        return latent_state(fields, kind, layer, kept, own)
    return attention_state(fields, kind, layer, kept, own)


def _beside_attention(fields: Fields, kind: str, layer: int, kept: Kept) -> Constant:
    """The constant half of a hybrid layer: a recurrence, or convolutions of keys, values and both outputs."""
    if fields.integer("conv_kernel_size") is None:
        return recurrence(fields, kept)
    heads, hidden = heads_of(fields, kind, layer), fields.required("hidden_size")
    columns = kept.columns(fields.required("conv_kernel_size"))
    widths = {
        "conv_k": heads.kv_heads * heads.key_dim,
        "conv_v": heads.kv_heads * heads.value_dim,
        "conv_attention": hidden,
        "conv_ffn": hidden,
    }
    # these convolutions are computed and kept in float32 whatever the model's type
    return Constant(tuple(Component(name, (width, columns), FP32) for name, width in widths.items()))


def _overridden(fields: Fields, layer: int) -> Fields:
    """The fields as one layer sees them: `per_layer_config` may say other things for it."""
    for key, overrides in fields.mapping("per_layer_config").items():
        if not str(key).isdigit() or not isinstance(overrides, Mapping):
            raise ConfigError("per_layer_config", {key: overrides}, "must map layer numbers to objects of fields")
        if int(key) == layer:
            return Fields({**fields.raw, **overrides}, fields.model_type)
    return fields


# -- layers that read another's state -------------------------------------------------------------


def _shared(fields: Fields, kinds: Sequence[str], states: Sequence[LayerState]) -> tuple[LayerState, ...]:
    """Borrowing layers by whichever way the config spells it."""
    if fields.sequence("kv_source_layers") is not None:
        return _by_sources(fields, states)
    if fields.flag("use_cla"):
        return _by_factor(fields, states)
    return _last_layers(fields, kinds, states)


def _by_sources(fields: Fields, states: Sequence[LayerState]) -> tuple[LayerState, ...]:
    """`kv_source_layers`: for each layer the one whose state it reads, itself or an earlier one."""
    sources = fields.sequence("kv_source_layers") or ()
    if len(sources) != len(states):
        raise ConfigError("kv_source_layers", list(sources), f"has {len(sources)} entries for {len(states)} layers")
    for layer, source in enumerate(sources):
        if not isinstance(source, int) or not 0 <= source <= layer or sources[source] != source:
            raise ConfigError("kv_source_layers", source, f"layer {layer} must read itself or an earlier owning layer")
    return tuple(state if sources[i] == i else Borrowed(sources[i]) for i, state in enumerate(states))


def _by_factor(fields: Fields, states: Sequence[LayerState]) -> tuple[LayerState, ...]:
    """`cla_share_factor`: the first layer of each group of so many keeps state, the others read it."""
    factor = fields.required("cla_share_factor")
    return tuple(state if i % factor == 0 else Borrowed(i - i % factor) for i, state in enumerate(states))


def _last_layers(fields: Fields, kinds: Sequence[str], states: Sequence[LayerState]) -> tuple[LayerState, ...]:
    """The last `num_kv_shared_layers` layers read the last earlier layer of their own kind."""
    shared = fields.integer("num_kv_shared_layers", low=0) or 0
    first = len(states) - shared
    if shared and first < 1:
        raise ConfigError("num_kv_shared_layers", shared, f"must be below num_hidden_layers={len(states)}")
    result = list(states)
    for layer in range(first, len(states)):
        lender = next((i for i in range(first - 1, -1, -1) if kinds[i] == kinds[layer]), None)
        if lender is None:
            raise ConfigError(
                "num_kv_shared_layers", shared, f"layer {layer} ({kinds[layer]}) has no earlier layer to borrow from"
            )
        result[layer] = Borrowed(lender)
    return tuple(result)
