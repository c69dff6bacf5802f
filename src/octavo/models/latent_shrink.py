"""Latent attention (MLA) made small for a trial: `shrink_latent` sets the sizes that its heads are cut from.

Owns the sizes alone and how the derived ones follow them. Keys and values differ in width, and the latent is wider
than a key, as in the models that are shrunk; both ways of attending are then taken in one trial.
"""

from __future__ import annotations

from typing import Any

RANK, QUERY_RANK, NOPE_DIM, ROPE_DIM, V_DIM = 40, 24, 16, 8, 12
_SIZES = {
    "kv_lora_rank": RANK,
    "q_lora_rank": QUERY_RANK,
    "qk_nope_head_dim": NOPE_DIM,
    "qk_rope_head_dim": ROPE_DIM,
    "v_head_dim": V_DIM,
    "qk_head_dim": NOPE_DIM + ROPE_DIM,
    "index_topk": 6,
    "index_head_dim": 12,
    "index_n_heads": 16,
    "expert_ffn_hidden_size": 24,
    "moe_topk": 2,
    "zero_expert_num": 2,
}


def shrink_latent(config: Any, before: Any) -> None:
    """Shrink `config` in place where it has latent attention; `before` is what it was."""
    if not getattr(before, "kv_lora_rank", None):
        return
    rope_dim = before.qk_rope_head_dim
    whole = before.qk_nope_head_dim + rope_dim
    for name, size in _SIZES.items():
        if getattr(before, name, None):
            setattr(config, name, size)
    own = getattr(before, "head_dim", None)  # by some the whole of a key, by most the part that rotates
    if own is not None:
        config.head_dim = NOPE_DIM + ROPE_DIM if own == whole else ROPE_DIM
    rope = getattr(config, "rope_parameters", None)
    if own == whole and isinstance(rope, dict) and "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = ROPE_DIM / config.head_dim
