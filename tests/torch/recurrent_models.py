"""Tiny configs of models with recurrent and convolution layers, alone or beside attention."""

from __future__ import annotations

from families import COMMON, MOE
from transformers import AutoConfig

DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
SCAN = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
ALONE = {"num_attention_heads": None, "num_key_value_heads": None}
"""No attention beside it; None drops the field."""
FIRST_SCAN = {**ALONE, "state_size": 8, "time_step_rank": 4, "intermediate_size": 64}
LATENT_HEADS = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "qk_nope_head_dim": 8, "linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 4,
    "num_experts_per_token": 2, "topk_group": 1, "num_expert_group": 1, "num_shared_experts": 1, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip

RECURRENT = {
    "mamba2": {
        **ALONE, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8, "expand": 2,
    },
    "bamba": {**SCAN, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": {**SCAN, "head_dim": 8, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **SCAN, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
        "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
    },
    "nemotron_h": {
        "num_hidden_layers": None, "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mamba_num_heads": 4,
        "mamba_head_dim": 16, "ssm_state_size": 8, "conv_kernel": 4, "n_groups": 2, "chunk_size": 8, "head_dim": 8,
    },
    "zamba2": {
        "mamba_ngroups": 2, "mamba_d_state": 8, "mamba_expand": 2, "n_mamba_heads": 4, "mamba_headdim": 16,
        "chunk_size": 8, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1,
        "num_query_groups": 2,
    },
    "mamba": FIRST_SCAN,
    "falcon_mamba": FIRST_SCAN,
    "jamba": {
        "num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_expand": 2,
    },
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
    },
    "qwen3_next": {**MOE, **DELTA, "head_dim": 16, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": {**DELTA, "head_dim": 16},
    "olmo_hybrid": DELTA,
    "kimi_linear": {**MOE, **LATENT_HEADS},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    "lfm2_moe": {
        **MOE, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3,
        "num_dense_layers": 1,
    },
    "lfm3": {
        "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
        "conv_L_cache": 7, "sliding_window": 6, "head_dim": 8,
    },
    "zaya": {
        **MOE, "num_experts_per_tok": 1, "head_dim": 8, "router_hidden_size": 16, "cca_time0": 2, "cca_time1": 2,
    },
    "lara_mini": {
        **MOE, **DELTA, "head_dim": 16, "shared_expert_intermediate_size": 24, "sliding_window": 6,
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
    },
}  # fmt: skip


def recurrent_config(name: str) -> object:
    fields = {key: value for key, value in {**COMMON, **RECURRENT[name]}.items() if value is not None}
    return AutoConfig.for_model(name, **fields)
