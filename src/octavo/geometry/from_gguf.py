"""From a GGUF file's metadata to the config that the same model has: only where every key is understood.

Owns the names of architectures and keys. A key under `attention.` or of a kind of layer that no rule here
reads could change what is kept: such a file is refused by that key's name, with the config as the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.geometry.feed_forward import EXPERTS
from octavo.geometry.fields import defaults_table

MODEL_TYPES: Mapping[str, str] = {
    "cohere2": "cohere2", "command-r": "cohere", "deepseek2": "deepseek_v3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "glm4": "glm4", "gpt-oss": "gpt_oss", "gpt2": "gpt2", "gptneox": "gpt_neox",
    "granite": "granite", "llama": "llama", "mistral3": "ministral3", "olmo2": "olmo2", "olmoe": "olmoe",
    "phi2": "phi", "phi3": "phi3", "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe", "seed_oss": "seed_oss", "smollm3": "smollm3", "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}  # fmt: skip
"""`general.architecture` -> the model type whose pattern of layers it has."""

_FIELDS: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.kv_lora_rank": "kv_lora_rank",
}
_NOT_STATE = (
    "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.scale", "attention.causal",
    "attention.clamp_kqv", "attention.max_alibi_bias", "attention.q_lora_rank", "attention.value_length",
    "attention.key_length_mla", "attention.value_length_mla", "attention.output_scale", "attention.temperature_scale",
    "attention.temperature_length",
)  # fmt: skip
_OTHER_LAYERS = ("ssm.", "wkv.", "shortconv.", "convnext.", "posnet.", "kda.", "token_shift_count", "layer_indices")
_REMEDY = "give the config.json of the original checkpoint instead"


def config_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A config with what the file says of its layers. Raises `ModelError` naming what no rule understands."""
    architecture = metadata.get("general.architecture")
    model_type = MODEL_TYPES.get(str(architecture))
    if model_type is None:
        raise ModelError(
            "general.architecture", architecture, f"layers of this kind of GGUF are not known here; {_REMEDY}"
        )
    config: dict[str, Any] = {"model_type": model_type}
    for key, value in metadata.items():
        name = key.removeprefix(f"{architecture}.")
        if name == key:
            continue
        if name in _FIELDS:
            config[_FIELDS[name]] = value
        elif name.startswith(_OTHER_LAYERS) or (name.startswith("attention.") and name not in _NOT_STATE):
            raise ModelError(key, value, f"shapes what layers keep in a way that is not known here; {_REMEDY}")
    for field, key in (("num_hidden_layers", "block_count"), ("hidden_size", "embedding_length"),
                       ("num_attention_heads", "attention.head_count")):  # fmt: skip
        if field not in config:
            raise ModelError(f"{architecture}.{key}", None, f"the file does not say it; {_REMEDY}")
    _finish(config, metadata, str(architecture))
    return config


def _finish(config: dict[str, Any], metadata: Mapping[str, Any], architecture: str) -> None:
    """What stands elsewhere or is written otherwise than in a config."""
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = config.get(name)
        if isinstance(value, list) and len(set(value)) == 1:
            config[name] = value[0]
    if isinstance(config.get("intermediate_size"), list):
        config["intermediate_size"] = max(config["intermediate_size"])
    if "kv_lora_rank" in config:
        # the row that is kept is a latent and the part of a key that is rotated
        config["qk_rope_head_dim"] = metadata.get(f"{architecture}.rope.dimension_count")
        config.pop("head_dim", None)
        config["num_key_value_heads"] = config["num_attention_heads"]
    elif metadata.get(f"{architecture}.attention.value_length", config.get("head_dim")) != config.get("head_dim"):
        config["v_head_dim"] = metadata[f"{architecture}.attention.value_length"]
    if "kv_lora_rank" not in config and "head_dim" not in config:
        config["head_dim"] = None  # as long as the hidden size over the heads, whatever a class supplies
    experts = metadata.get(f"{architecture}.expert_count")
    if experts:
        known = defaults_table()["types"].get(config["model_type"], {}).get("fields", {})
        config[next((name for name in EXPERTS if name in known), EXPERTS[0])] = experts
    tokens = metadata.get("tokenizer.ggml.tokens")
    if "vocab_size" not in config and isinstance(tokens, list):
        config["vocab_size"] = len(tokens)
