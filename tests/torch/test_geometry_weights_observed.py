"""The formulas of weights against the models that Transformers builds, to the parameter."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from observed_state import as_file, built
from transformers import AutoModel, AutoModelForCausalLM

from octavo.geometry.weights import shapes_table, weights_from_config

OWN_SIZES = {
    # classes that cannot be built at their defaults, or show more when told something
    "deepseek_v3": {"num_hidden_layers": 5},
    "dots1": {"num_hidden_layers": 4, "n_routed_experts": 8, "head_dim": 128, "n_shared_experts": 2},
    "glm4v_moe_text": {"num_hidden_layers": 4, "head_dim": 128},
    "hunyuan_v1_dense": {"num_hidden_layers": 4, "head_dim": 128},
    "hunyuan_v1_moe": {"num_hidden_layers": 4, "head_dim": 128},
    "hunyuan_vl_text": {"num_hidden_layers": 4, "head_dim": 128},
    "ministral": {"num_hidden_layers": 4, "head_dim": 128},
    "nemotron": {"num_hidden_layers": 4, "num_key_value_heads": 8},
    "gemma4_text": {"num_hidden_layers": 12, "num_kv_shared_layers": 6},
    "gemma3n_text": {"num_hidden_layers": 20},
    "glm4_moe": {"num_hidden_layers": 4, "head_dim": 128},
    "glm_moe_dsa": {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"]},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"],
                         "num_key_value_heads": 8},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "llama4_text": {"num_hidden_layers": 4, "interleave_moe_layer_step": 2},
    "minimax_m3_vl_text": {"num_hidden_layers": 4, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "qwen3_moe": {"num_hidden_layers": 4, "mlp_only_layers": [1]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("model_type", list(shapes_table()["types"]))
def test_a_class_has_exactly_the_parameters_of_its_formula(model_type: str) -> None:
    try:
        config = built(model_type, OWN_SIZES.get(model_type, {"num_hidden_layers": 4}))
    except Exception:  # noqa: BLE001 - its own lists are not for four layers
        config = built(model_type, {})
    extra = 0
    with torch.device("meta"):
        try:
            model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
        except ValueError:  # a text part, whose wrapper has the head
            model = AutoModel.from_config(config)
            extra = 0 if getattr(config, "tie_word_embeddings", False) else config.vocab_size * config.hidden_size
    found = weights_from_config(as_file(config))
    assert found.exact
    assert found.total_parameters == extra + sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("cohere", {"use_qk_norm": True}),
        ("stablelm", {"use_qkv_bias": True, "use_parallel_residual": True}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 64,
                    "hidden_size": 4096}),
        ("deepseek_v3", {"q_lora_rank": None}),
        ("falcon_h1", {"mamba_rms_norm": True, "mamba_conv_bias": False}),
    ],
)  # fmt: skip
def test_switches_add_and_take_away_what_they_do_in_the_class(model_type: str, options: dict[str, object]) -> None:
    config = built(model_type, {"num_hidden_layers": 4, **options})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = weights_from_config(as_file(config))
    assert found.total_parameters == sum(parameter.numel() for parameter in model.parameters())
