"""What geometry refuses: state without a rule, and configs that contradict themselves. Always by name."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16, FP8, INT4, INT8, Dtype
from octavo.geometry.from_config import geometry_from_config


def llama(**changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    return {**config, **changes}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba-2 in another library's form", llama(model_type="mamba2", ssm_cfg={"layer": "Mamba2"}), "another library"),
    ("zamba2 without its pattern", {"model_type": "zamba2"}, "list of kinds"),
    ("nemotron-h without its pattern", {"model_type": "nemotron_h"}, "num_hidden_layers"),
    ("olmo-hybrid without sizes of its state", {"model_type": "olmo_hybrid"}, "linear_num_key_heads"),
    ("an unknown type that is named after mamba", llama(model_type="supermamba"), "mamba"),
    ("an unknown type with mamba fields", llama(model_type="new", mamba_d_state=16), "mamba_d_state"),
    ("an unknown type with linear layers", llama(model_type="new", layer_types=["linear_attention"] * 32), "linear"),
    ("kimi-linear of an unknown type", llama(model_type="kimi_x", linear_attn_config={"head_dim": 128}), "linear"),
    ("sparse attention that names no layers", llama(sparse_attention_config={"use_sparse_attention": True}), "sparse"),
    ("cross-layer attention without a factor", llama(model_type="new", use_cla=True), "cla_share_factor"),
    ("cross attention", llama(model_type="mllama_text_model"), "something other"),
    ("t5", {"model_type": "t5", "d_model": 512, "num_layers": 6, "num_heads": 8}, "encoder-decoder"),
    ("layers that run in a loop", {"model_type": "dory"}, "several times"),
    ("windows over latents without a window", {"model_type": "dots3_note_text"}, "sliding_window"),
    ("a type whose keys rotate in some layers", {"model_type": "mistral_large4_text"}, "no_rope_layers"),
    ("windows of unknown length", {"model_type": "modernbert-decoder"}, "unknown length"),
    ("a kind of layer of its class alone", {"model_type": "unlimited_ocr_text"}, "reference_sliding_attention"),
    ("a wrapper without its language model", {"model_type": "gemma3"}, "text_config"),
    ("bart by flag", llama(is_encoder_decoder=True), "encoder"),
    ("bert", {"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "encoder"),
    ("a classifier", llama(architectures=["LlamaForSequenceClassification"]), "does not generate text"),
    ("an image model", {"model_type": "vit"}, "only decoders"),
    ("embedding gemma", {"model_type": "gemma3_text", "use_bidirectional_attention": True}, "encoder"),
]


@pytest.mark.parametrize(("config", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_no_rule_fits_is_refused_by_name_and_never_taken_for_plain_attention(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        geometry_from_config(config, BF16)
    assert words in str(caught.value)
    assert caught.value.field


INDEXED = {"num_hidden_layers": 2, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "hidden_size": 8, "num_attention_heads": 2}

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("kv heads do not divide heads", llama(num_key_value_heads=5), "num_key_value_heads"),
    ("more kv heads than heads", llama(num_key_value_heads=64), "num_key_value_heads"),
    ("hidden is no multiple of heads", llama(hidden_size=4097), "hidden_size"),
    ("a negative size", llama(head_dim=-128), "head_dim"),
    ("no layers", llama(num_hidden_layers=0), "num_hidden_layers"),
    ("layers as text", llama(num_hidden_layers="32"), "num_hidden_layers"),
    ("layers as true", llama(num_hidden_layers=True), "num_hidden_layers"),
    ("heads as a float", llama(num_attention_heads=32.0), "num_attention_heads"),
    ("an absurd size", llama(hidden_size=10**30), "hidden_size"),
    ("zero heads", llama(num_attention_heads=0), "num_attention_heads"),
    ("heads as a list", llama(num_attention_heads=[32]), "num_attention_heads"),
    (
        "layer_types of another length",
        {"model_type": "gpt_oss", "num_hidden_layers": 3, "layer_types": ["full_attention"]},
        "layer_types",
    ),
    ("layer_types that is no list", {"model_type": "gpt_oss", "layer_types": "full_attention"}, "layer_types"),
    ("layer_types of numbers", {"model_type": "gpt_oss", "num_hidden_layers": 1, "layer_types": [1]}, "layer_types"),
    (
        "a kind of layer nobody knows",
        {"model_type": "gpt_oss", "num_hidden_layers": 1, "layer_types": ["psychic_attention"]},
        "layer_types",
    ),
    (
        "a window layer without a window",
        {"model_type": "gpt_oss", "num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": None},
        "sliding_window",
    ),
    ("a window of zero", {"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
    ("use_sliding_window as text", {"model_type": "qwen2", "use_sliding_window": "false"}, "use_sliding_window"),
    ("two spellings that disagree", llama(n_layer=16), "n_layer"),
    ("an unknown type whose window nobody places", llama(model_type="new", sliding_window=128), "sliding_window"),
    ("a bad pattern", {"model_type": "exaone4", "sliding_window_pattern": "LLXG"}, "sliding_window_pattern"),
    (
        "shared layers without a lender",
        {"model_type": "gemma4_text", "num_hidden_layers": 2, "num_kv_shared_layers": 2},
        "num_kv_shared_layers",
    ),
    (
        "latent without its rope key",
        {"model_type": "new", "kv_lora_rank": 512, "num_hidden_layers": 2},
        "qk_rope_head_dim",
    ),
    ("heads that do not fill the inner width", {"model_type": "mamba2", "num_heads": 64}, "num_heads"),
    (
        "letters of a pattern nobody knows",
        llama(model_type="nemotron_h", hybrid_override_pattern="MX"),
        "hybrid_override_pattern",
    ),
    (
        "a pattern of another length",
        llama(model_type="nemotron_h", hybrid_override_pattern="M*"),
        "hybrid_override_pattern",
    ),
    (
        "a period below its offset",
        {"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 4},
        "attn_layer_offset",
    ),
    (
        "attention in a layer that is not there",
        {"model_type": "bamba", "attn_layer_indices": [32]},
        "attn_layer_indices",
    ),
    (
        "layers of both kinds at once",
        {
            "model_type": "kimi_linear",
            "num_hidden_layers": 2,
            "linear_attn_config": {
                "full_attn_layers": [1],
                "kda_layers": [1, 2],
                "num_heads": 2,
                "head_dim": 8,
                "short_conv_kernel_size": 4,
            },
        },
        "linear_attn_config",
    ),
    (
        "layers of no kind",
        {
            "model_type": "kimi_linear",
            "num_hidden_layers": 3,
            "linear_attn_config": {
                "full_attn_layers": [1],
                "kda_layers": [2],
                "num_heads": 2,
                "head_dim": 8,
                "short_conv_kernel_size": 4,
            },
        },
        "linear_attn_config",
    ),
    (
        "value heads that are no multiple of key heads",
        {"model_type": "qwen3_next", "linear_num_key_heads": 3},
        "linear_num_value_heads",
    ),
    (
        "a ratio of compression nobody knows",
        {"model_type": "deepseek_v4", "compress_ratios": [7] * 43},
        "compress_ratios",
    ),
    ("too few ratios", {"model_type": "deepseek_v4", "compress_ratios": [4]}, "compress_ratios"),
    (
        "a state type nobody knows",
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M", "mamba_ssm_cache_dtype": "float99"},
        "mamba_ssm_cache_dtype",
    ),
    (
        "a layer that reads a later one",
        {"model_type": "new", **INDEXED, "kv_source_layers": [1, 1]},
        "kv_source_layers",
    ),
    (
        "version 5 of RWKV without heads",
        {"model_type": "rwkv5", "hidden_size": 64, "num_hidden_layers": 1, "rescale_every": 6, "model_version": "5_2"},
        "head_size",
    ),
    ("architectures as text", llama(architectures="LlamaForCausalLM"), "architectures"),
    ("model_type as a number", llama(model_type=3), "model_type"),
    ("model_type of a page", llama(model_type="a" * 5000), "model_type"),
    ("an empty config", {}, "num_hidden_layers"),
]


@pytest.mark.parametrize(("config", "field"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_config_that_contradicts_itself_is_refused_naming_the_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        geometry_from_config(config, BF16)
    assert caught.value.field == field


KV_DTYPES: list[tuple[str, dict[str, Any], Dtype, str]] = [
    ("nothing to quantise", {"model_type": "mamba2"}, FP8, "never quantised"),
    ("integer latents", {"model_type": "deepseek_v3"}, INT8, "latent attention"),
    ("four-bit latents", {"model_type": "kimi_linear"}, INT4, "latent attention"),
    ("integers for keys and values in one", {"model_type": "deepseek_v4"}, INT8, "compressed attention"),
]


@pytest.mark.parametrize(("config", "dtype", "words"), [row[1:] for row in KV_DTYPES], ids=[r[0] for r in KV_DTYPES])
def test_an_element_type_that_a_kind_of_state_cannot_have_is_refused(
    config: dict[str, Any], dtype: Dtype, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        geometry_from_config(config, dtype)
    assert caught.value.field == "kv_dtype"


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_an_unknown_model_must_say_everything_itself(missing: str) -> None:
    config = llama(model_type="brand-new")
    del config[missing]
    with pytest.raises(ConfigError, match=missing):
        geometry_from_config(config, BF16)


def test_config_json_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="one JSON object"):
        geometry_from_config([], BF16)  # type: ignore[arg-type]
