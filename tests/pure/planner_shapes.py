"""Configs of well-known shapes for the planner's tests: the fields that fix the state, written out."""

from __future__ import annotations

from typing import Any

GIB = 2**30
MIB = 2**20

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
}
GEMMA_4_31B: dict[str, Any] = {
    "model_type": "",
    "hidden_size": 5376,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 4,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    "max_position_embeddings": 262144,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163840,
}
QWEN_35_27B: dict[str, Any] = {
    "model_type": "",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "mamba_ssm_dtype": "float32",
    "dtype": "bfloat16",
}
LLAMA_4: dict[str, Any] = {
    "model_type": "",
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_chunk_size": 8192,
    "layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * 12,
}
MAMBA_2_8B: dict[str, Any] = {
    "model_type": "mamba",
    "hidden_size": 2560,
    "intermediate_size": 5120,
    "num_hidden_layers": 64,
    "state_size": 16,
    "conv_kernel": 4,
    "vocab_size": 50280,
}
