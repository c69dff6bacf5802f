"""Sizes of recurrent and convolution layers in the tiny model that `verify` tries: `shrink_recurrent`.

Knows the names that config classes have for the sizes of constant state. Keeps what decides which code runs:
whether values have more heads than keys, whether groups share what is written and read, the length of a
convolution. The chunk of a scan becomes shorter than the sequences of a trial, so that they cross it.
"""

from __future__ import annotations

from typing import Any

STATES, CHUNK, RANK, HEAD_WIDTH = 8, 8, 8, 16

_CEILINGS = {
    "state_size": STATES,
    "mamba_d_state": STATES,
    "ssm_state_size": STATES,
    "chunk_size": CHUNK,
    "mamba_chunk_size": CHUNK,
    "time_step_rank": RANK,
    "mamba_dt_rank": RANK,
    "n_groups": 2,
    "mamba_n_groups": 2,
    "mamba_ngroups": 2,
    "adapter_rank": RANK,
    "router_hidden_size": HEAD_WIDTH,
    "moe_shared_expert_intermediate_size": 2 * HEAD_WIDTH,
}
"""Lowered to this, never raised."""
_HEADS = (("num_heads", "head_dim"), ("mamba_num_heads", "mamba_head_dim"), ("mamba_n_heads", "mamba_d_head"),
          ("n_mamba_heads", "mamba_headdim"))  # fmt: skip
"""Heads of a state-space layer and their width, as families spell them."""


def is_recurrent(config: Any) -> bool:
    """Whether the config has layers with constant state."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return bool(kinds & {"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"})


def weight_gain(config: Any) -> float:
    """How much a tiny model's layers enlarge what passes through them.

    Where layers share an attention block, each has three mixers in a row and rounding grows with every one: less.
    """
    return 0.8 if getattr(config, "attention_hidden_size", None) else 1.6


def shrink_recurrent(config: Any, before: Any) -> None:
    """Make the constant state of a shrunk config small; `before` has the sizes as they were."""
    if not is_recurrent(config):
        return
    for name, ceiling in _CEILINGS.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and value > ceiling:
            setattr(config, name, ceiling)
    _shrink_state_space(config)
    _shrink_linear(config, before)
    if getattr(config, "attention_hidden_size", None):
        _shrink_shared(config)
    for name in ("hybrid_layer_ids", "attn_layer_indices"):
        if getattr(config, name, None):
            setattr(config, name, [i for i, kind in enumerate(config.layer_types) if kind != "linear_attention"])


def _shrink_shared(config: Any) -> None:
    """One attention block for several layers, over the hidden states beside the embeddings: two layers share it."""
    config.layers_block_type = ["linear_attention", "hybrid", "hybrid"]
    config.num_hidden_layers = len(config.layers_block_type)
    config.attention_hidden_size = 2 * config.hidden_size
    config.attention_head_dim = 2 * config.hidden_size // config.num_attention_heads
    if getattr(config, "num_query_groups", None):
        config.num_query_groups = config.num_key_value_heads


def _shrink_state_space(config: Any) -> None:
    expand = getattr(config, "mamba_expand", None) or getattr(config, "expand", None)
    if expand is None:
        return
    inner = int(expand * config.hidden_size)
    if getattr(config, "mamba_d_ssm", None):
        config.mamba_d_ssm = inner
    if getattr(config, "num_attention_heads", None) is None and getattr(config, "n_groups", None) is None:
        config.intermediate_size = inner  # Mamba 1: what such configs call their inner width
    for heads, width in _HEADS:
        if getattr(config, heads, None) and getattr(config, width, None):
            setattr(config, width, HEAD_WIDTH)
            setattr(config, heads, inner // HEAD_WIDTH)


def _shrink_linear(config: Any, before: Any) -> None:
    if getattr(config, "linear_num_key_heads", None):
        several = before.linear_num_value_heads > before.linear_num_key_heads
        config.linear_num_key_heads = 2
        config.linear_num_value_heads = 4 if several else 2
        same = before.linear_key_head_dim == before.linear_value_head_dim
        config.linear_key_head_dim = HEAD_WIDTH
        config.linear_value_head_dim = HEAD_WIDTH if same else 2 * HEAD_WIDTH
    if getattr(config, "linear_num_heads", None):
        config.linear_num_heads = 2
        config.linear_head_dim = HEAD_WIDTH
