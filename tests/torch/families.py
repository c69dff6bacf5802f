"""The table of families: tiny configs of many architectures, the kinds of state they keep, how near they must come.

Kinds are those of `served_groups`, and `borrowed`. The tolerance is the lead of Transformers' likeliest token over
its runner-up below which the two may be swapped, in logits: rounding, never a mistake of this engine's.
"""

from __future__ import annotations

from dataclasses import dataclass

NEAR_TIE = 1e-4

COMMON = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MHA = {"num_key_value_heads": None}
"""These classes know no key-value heads; None drops the field."""
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

CHUNKS = {
    "head_dim": 8,
    "attention_chunk_size": 7,
    "num_local_experts": 4,
    "intermediate_size_mlp": 48,
    "moe_layers": [0],
}
BORROWING = {
    "head_dim": 16,
    "sliding_window": 6,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
}

ARCHITECTURES = {
    "llama": {"head_dim": 16},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "qwen3": {"head_dim": 12},
    "qwen3-window": {
        "model_type": "qwen3",
        "head_dim": 12,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 6,
        "num_hidden_layers": 3,
        "layer_types": ALTERNATING,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 10,
    },
    "gemma3_text": {"head_dim": 16, "sliding_window": 6, "num_hidden_layers": 3, "layer_types": ALTERNATING},
    "phi3": {"sliding_window": 9},
    "phi": {"num_key_value_heads": 4},
    "olmo": {"num_key_value_heads": 4},
    "olmo2": {},
    "olmo3": {"sliding_window": 6, "num_hidden_layers": 3, "layer_types": ALTERNATING},
    "olmoe": {**MOE},
    "starcoder2": {"sliding_window": 7},
    "mixtral": {**MOE, "sliding_window": 6},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 24},
    "qwen2_moe-window": {
        **MOE,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 24,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3_moe": {**MOE, "head_dim": 12},
    "gpt_neox": {**MHA, "rotary_pct": 0.5},
    "gpt_oss": {**MOE, "head_dim": 16, "sliding_window": 6, "num_hidden_layers": 3, "layer_types": ALTERNATING},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
    "granitemoe": {**MOE},
    "cohere": {},
    "cohere2": {"sliding_window": 6, "num_hidden_layers": 3, "layer_types": ALTERNATING},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "opt": {**MHA, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": MHA,
    "gptj": {**MHA, "rotary_dim": 4},
    "codegen": {**MHA, "rotary_dim": 4},
    "gpt_bigcode": {**MHA, "multi_query": True},
    "exaone4": {
        "sliding_window": 6,
        "num_hidden_layers": 4,
        "sliding_window_pattern": "LLLG",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "persimmon": {"num_key_value_heads": 4},
    "helium": {"head_dim": 8},
    "apertus": {},
    "nemotron": {},
    "ministral": {"head_dim": 8, "sliding_window": 6, "num_hidden_layers": 3, "layer_types": ALTERNATING},
    "arcee": {},
    "seed_oss": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "bitnet": {},
    "hunyuan_v1_dense": {"head_dim": 8},
    "dots1": {
        **MOE,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_hidden_layers": 3,
    },
    "glm4_moe": {**MOE, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_hidden_layers": 3},
    "minimax_m2": {**MOE, "head_dim": 8},
    "flex_olmo": {**MOE},
    "nanochat": {},
    "vaultgemma": {
        "head_dim": 16,
        "sliding_window": 6,
        "num_hidden_layers": 3,
        "layer_types": ALTERNATING,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 10,
    },
    "cwm": {"head_dim": 8, "sliding_window": 6, "num_hidden_layers": 3, "layer_types": ALTERNATING},
    "biogpt": MHA,
    "jais2": {"head_dim": 8},
    "granitemoeshared": {**MOE},
    "ernie4_5_moe": {**MOE},
    "hunyuan_v1_moe": {**MOE, "head_dim": 8},
    "llama4_text": {**CHUNKS, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1], "floor_scale": 8},
    "llama4_text-plain": {
        **CHUNKS,
        "model_type": "llama4_text",
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "moe_layers": [],
    },
    "llama4_text-chunks": {**CHUNKS, "model_type": "llama4_text", "no_rope_layers": [1, 1]},
    "gemma3n_text": {**BORROWING, "laurel_rank": 8, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.5, 0.0]},
    "gemma4_text": {**BORROWING, "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "gemma4_text-moe": {
        **BORROWING,
        **MOE,
        "model_type": "gemma4_text",
        "global_head_dim": 16,
        "use_double_wide_mlp": True,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
    "gemma4_unified_text": {**BORROWING, "global_head_dim": 24},
}


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table."""

    kinds: frozenset[str]
    tolerance: float = NEAR_TIE

    @property
    def releases(self) -> bool:
        """Whether blocks leave a sequence's tables while it runs."""
        return bool(self.kinds & {"window", "chunk"})


BOTH = frozenset({"full", "window"})
_KINDS = {
    **dict.fromkeys(("mistral", "phi3", "starcoder2", "mixtral"), frozenset({"window"})),
    **dict.fromkeys(
        (
            "qwen2-window",
            "qwen3-window",
            "gemma2",
            "gemma3_text",
            "olmo3",
            "qwen2_moe-window",
            "gpt_oss",
            "cohere2",
            "exaone4",
            "ministral",
            "vaultgemma",
            "cwm",
        ),
        BOTH,
    ),
    **dict.fromkeys(("llama4_text", "llama4_text-plain"), frozenset({"full", "chunk"})),
    "llama4_text-chunks": frozenset({"chunk"}),
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_text-moe", "gemma4_unified_text"), BOTH | {"borrowed"}),
}
FAMILIES = {name: Family(_KINDS.get(name, frozenset({"full"}))) for name in ARCHITECTURES}
