"""Which architectures are known to be served exactly, and which are known not to be.

Owns two tables and the reading of a config against them; runs nothing. `VERIFIED` lists the model
types whose tokens the tests compare with Transformers' own, one by one. Every type but the refused is
also tried when it is loaded (`verify`), because a config may switch on what its tests did not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERIFIED: tuple[str, ...] = (
    "apertus",
    "arcee",
    "biogpt",
    "bitnet",
    "codegen",
    "cohere",
    "cohere2",
    "cwm",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "flex_olmo",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gemma4_unified_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "jais2",
    "llama",
    "llama4_text",
    "minimax_m2",
    "ministral",
    "mistral",
    "mixtral",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
)

VERIFIED_LATENT: tuple[str, ...] = (
    "axk1",
    "axk2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "hy_v4",
    "longcat_flash",
    "minicpm3",
    "mistral4",
    "sarvam_mla",
    "youtu",
)
"""The same for latent attention (MLA), of all positions or of those that an index chooses."""

VERIFIED_RECURRENT: tuple[str, ...] = (
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lara_mini",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_next",
    "zamba",
    "zamba2",
    "zaya",
)
"""The same for recurrent and convolution layers, beside attention or alone."""

_ALIBI = "its position bias (ALiBi) rides on the attention mask, and paged attention has no mask"
_OWN_STATE = "its recurrent layers keep their state in a cache of their own kind, whose states no slot can hold"
_INDEXED = "an index chooses what it attends to (sparse attention) in a way that is not served"
_ENCODER = "it is an encoder and does not generate"
_PAIR = "it is an encoder with a decoder, and only decoders are served"
_FIXED = "its attention cannot be replaced by a paged one"
_CHANGED = "it changes keys and values between storing and attending"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    **dict.fromkeys(("falcon", "gpt_neo", "gpt_neox_japanese", "xglm", "cpmant"), _FIXED),
    **dict.fromkeys(("diffllama", "jetmoe"), _CHANGED),
    "doge": "it attends under a mask that it computes from values",
    **dict.fromkeys(("minimax", "rwkv", "xlstm"), _OWN_STATE),
    "recurrent_gemma": "its recurrent layers keep their state in themselves, where no cache can hold it",
    **dict.fromkeys(
        (
            "dots3_note",
            "dots3_note_text",
            "glm5_next",
            "glm5_next_text",
            "mistral_large4",
            "mistral_large4_text",
        ),
        _INDEXED,
    ),
    **dict.fromkeys(("hy_v4_vl", "hy_v4_vl_text"), "only hy_v4, its sibling for text alone, is served"),
    **dict.fromkeys(("bert", "roberta", "electra", "camembert", "xlm-roberta", "megatron-bert", "big_bird"), _ENCODER),
    **dict.fromkeys(("t5", "mt5", "bart", "mbart", "pegasus", "marian", "blenderbot", "whisper", "prophetnet"), _PAIR),
}

_INDEX_WIDTHS = ("index_head_dim", "indexer_head_dim")
_SERVED_LAYERS = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "conv",
    "hybrid",
    "hybrid_sliding",
    "indexed_attention",
    "mlp",
    "moe",
)


def refusal(config: Any) -> str | None:
    """Why a model with this config (a Transformers config object) is not served, or None."""
    text = config.get_text_config()
    for model_type in (config.model_type, text.model_type):
        if model_type in REFUSED:
            return REFUSED[model_type]
    if getattr(config, "is_encoder_decoder", False):
        return _PAIR
    if getattr(text, "alibi", False):
        return _ALIBI
    if any(getattr(text, name, None) for name in _INDEX_WIDTHS) and not _chooses_tokens(text):
        return _INDEXED
    if getattr(text, "add_cross_attention", False):
        return "it attends to another sequence (add_cross_attention), which is not served"
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _SERVED_LAYERS:
            return f"it has layers of the kind {kind!r}, which is not served yet"
    return None


def _chooses_tokens(text: Any) -> bool:
    """Whether the index chooses single positions, for latent attention: the kind that is served."""
    return bool(getattr(text, "kv_lora_rank", None)) and (getattr(text, "index_kpool", None) or 1) == 1


def in_table(config: Any) -> bool:
    """Whether the tests vouch for this model type. A model with parts beside its text model is not in the table."""
    return config.get_text_config() is config and config.model_type in (
        *VERIFIED,
        *VERIFIED_LATENT,
        *VERIFIED_RECURRENT,
    )
