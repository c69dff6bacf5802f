"""Geometry against what Transformers really does.

Three observations: the table of defaults is what the installed config classes say; the layers that
`geometry_from_config` gives a window are those of the class; and every decoder that Transformers has
writes exactly the bytes that the geometry predicts, in Transformers' convention: K columns of a
convolution, a float32 recurrence, keys and values per token. Only the exceptions are listed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from observed_state import as_file, built, observe, predicted
from transformers import CONFIG_MAPPING

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16
from octavo.geometry.fields import defaults_table
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.pattern import SPELLINGS
from octavo.geometry.state import Chunked, Growing, LayerState, Windowed

TOOL = Path(__file__).parents[2] / "tools" / "make_config_defaults.py"

LATENT_TINY = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32,
    "v_head_dim": 16, "qk_nope_head_dim": 16, "vocab_size": 64, "n_routed_experts": 4, "pad_token_id": 0,
}  # fmt: skip
SIX = {"num_hidden_layers": 6}
QUERY_NORM = {"num_hidden_layers": 2, "head_dim": 128}

SIZES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": SIX,
    "bamba": {**SIX, "attn_layer_indices": [2, 5]},
    "biogpt": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
               "vocab_size": 64},
    "deepseek_v2": {"num_hidden_layers": 2, "first_k_dense_replace": 2},
    "deepseek_v4": {"num_hidden_layers": 5},
    "falcon": {"num_hidden_layers": 2, "new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 64,
               "hidden_size": 4096},
    "gemma3n_text": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 10, "num_kv_shared_layers": 5,
                     "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
                     "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
                     "activation_sparsity_pattern": [0.0] * 10},
    "gemma4_text": {"num_hidden_layers": 12, "num_kv_shared_layers": 6},
    "glm4_moe": {"num_hidden_layers": 2, "head_dim": 128},
    "glm5_next_text": {**LATENT_TINY, "num_hidden_layers": 4, "intermediate_size": 96, "moe_intermediate_size": 32,
                       "num_experts_per_tok": 2, "index_head_dim": 8, "index_n_heads": 2, "linear_head_dim": 16,
                       "linear_num_heads": 4, "index_kpool": 2, "index_topk": 4},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2, "num_key_value_heads": 8},
    "hrm_text": {"num_hidden_layers": 2},
    "hunyuan_v1_dense": QUERY_NORM,
    "hunyuan_v1_moe": QUERY_NORM,
    "hy_v4": SIX,
    "hy_v4_vl_text": SIX,
    "inkling2_loop_text": {"num_hidden_layers": 18, "loop_layer_index_start": 6, "loop_layer_index_end": 12,
                           "num_attention_heads": 16, "num_key_value_heads": 4},
    "inkling2_text": SIX,
    "inkling_text": SIX,
    "jamba": {**SIX, "attn_layer_period": 3, "attn_layer_offset": 1},
    "jetmoe": {"hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 16,
               "intermediate_size": 64, "vocab_size": 64, "num_local_experts": 4},
    "kimi_linear": SIX,
    "lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [1, 3]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "longcat_flash": {**LATENT_TINY, "num_layers": 2, "ffn_hidden_size": 64, "qk_rope_head_dim": 8, "moe_topk": 2,
                      "head_dim": 8, "expert_ffn_hidden_size": 32},
    "minimax_m3_vl_text": {"num_hidden_layers": 4, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "ministral": QUERY_NORM,
    "nemotron": {"num_hidden_layers": 2, "num_key_value_heads": 8},
    "nemotron_h": {},
    "qwen4_exp_text": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                       "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_experts": 4,
                       "linear_key_head_dim": 8, "linear_value_head_dim": 12, "moe_intermediate_size": 32,
                       "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2, "vocab_size": 64,
                       "hc_lowrank": 8, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 24,
                       "indexer_budget": 64, "indexer_compress_ratio": 4},
    "zamba": {},
    "zamba2": {},
}  # fmt: skip
"""Where four layers of the class's own sizes do not show every kind of layer, or cannot be built."""

ON_CPU = {"biogpt", "gemma3n_text", "glm5_next_text", "jetmoe", "longcat_flash", "qwen4_exp_text"}
"""Classes that look at the values of tensors, which there are none of on the meta device."""

NOT_OBSERVED = {
    "blip_text_model": "no model class of its own",
    "blt": "the geometry refuses it: bytes are grouped into patches",
    "cohere_compass_text": "the class cannot be built at its own defaults",
    "cpmant": "its cache holds the prompt of a template besides",
    "dbrx": "the class cannot be built at its own defaults",
    "deepseek_ocr2_text": "no model class of its own",
    "diffusion_gemma_text": "no model class of its own",
    "dory": "the geometry refuses it: layers run in a loop",
    "dots1": "the class cannot be built at its own defaults",
    "dots3_note_text": "tested apart: its index keys are kept in float32",
    "emu3_text_model": "no model class of its own",
    "ernie4_5_vl_moe_text": "no model class of its own",
    "gemma4_assistant": "the class cannot be built at its own defaults",
    "glm4v_moe_text": "the class cannot be built at its own defaults",
    "glm4v_text": "the class cannot be built at its own defaults",
    "gpt_neo": "tested apart: its windows are kept at full length",
    "granite4_vision_text": "no model class of its own",
    "hunyuan_vl_text": "the class cannot be run at its own defaults",
    "mimo_v2_flash": "tested apart: the class doubles the heads of windows unless told",
    "minimax": "tested apart: it has a cache of its own",
    "mllama_text_model": "the geometry refuses it: it attends to an image",
    "musicgen": "the class cannot be built at its own defaults",
    "musicgen_melody": "the class cannot be built at its own defaults",
    "openai-gpt": "the class keeps nothing and reads its whole past anew",
    "paddleocr_vl_text": "no model class of its own",
    "qwen2_5_omni_text": "no model class of its own",
    "qwen3_omni_moe_text": "no model class of its own",
    "recurrent_gemma": "tested apart: its recurrent layers keep their state themselves",
    "rwkv": "tested apart: it has a state of its own",
    "step3p5": "no model class of its own",
    "trocr": "the decoder half of a pair",
    "unlimited_ocr_text": "the geometry refuses it: its windows spare the prompt",
    "voxtral_realtime_text": "no model class of its own",
    "xlnet": "the geometry refuses it: recurrent memory",
    "xlstm": "tested apart: it has a state of its own",
}

COMPUTED = {
    "glm5_next_text", "jetmoe", "lfm2_moe", "mistral_large4_text", "modernbert-decoder", "muse_glimmer_text",
    "muse_spark_text", "nemotron_h", "olmo_hybrid", "zamba", "zamba2",
}  # fmt: skip
"""Classes that compute what their file leaves out: without it the geometry refuses, or needs the whole file."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_config_defaults", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decoders() -> list[str]:
    table = defaults_table()
    return [model_type for model_type in table["types"] if model_type not in table["not_decoders"]]


def sizes_of(model_type: str) -> dict[str, Any]:
    return SIZES.get(model_type, {"num_hidden_layers": 4})


def test_the_table_of_defaults_is_what_the_config_classes_say() -> None:
    table = defaults_table()
    if table["made_from"] != f"transformers {transformers.__version__}":
        pytest.skip(f"the table was {table['made_from']}")
    assert json.loads(json.dumps(tool().build_table())) == table


@pytest.mark.parametrize("layers", [7, 13, 24])
def test_the_layers_with_windows_are_those_of_the_class(layers: int) -> None:
    compared = 0
    for model_type in defaults_table()["types"]:
        try:
            geometry = geometry_from_config({"model_type": model_type, "num_hidden_layers": layers}, BF16)
            config = CONFIG_MAPPING[model_type](num_hidden_layers=layers)
        except (ConfigError, ValueError, TypeError):
            continue  # refused here, or not to be built with so few layers there
        except Exception as error:
            if "Validation" not in type(error).__name__:
                raise
            continue
        kinds = getattr(config, "layer_types", None)
        if len(geometry.layers) != layers or len(kinds or geometry.layers) != len(geometry.layers):
            continue  # layers that run or keep state several times
        window = getattr(config, "sliding_window", None)
        if kinds is None:
            kinds = ["sliding_attention" if window else "full_attention"] * layers
        ours = [_kind(state) for state in geometry.layers]
        theirs = ["full_attention" if k == "indexed_attention" or (not window and k[0] == "s") else k for k in kinds]
        theirs = [SPELLINGS.get(kind, kind) for kind in theirs]
        assert [o for o in ours if o] == [t for o, t in zip(ours, theirs, strict=True) if o], model_type
        compared += 1
    assert compared > 120


def _kind(state: LayerState) -> str:
    kinds = {Growing: "full_attention", Windowed: "sliding_attention", Chunked: "chunked_attention"}
    return kinds.get(type(state), "")


def test_every_decoder_is_observed_or_listed_with_a_reason() -> None:
    assert set(NOT_OBSERVED) <= set(decoders())
    assert not set(NOT_OBSERVED) & set(SIZES)
    assert len(decoders()) - len(NOT_OBSERVED) > 140


@pytest.mark.parametrize("model_type", [name for name in decoders() if name not in NOT_OBSERVED])
def test_a_model_writes_exactly_the_bytes_that_are_predicted(model_type: str) -> None:
    torch.set_num_threads(1)
    sizes = sizes_of(model_type)
    try:
        config = built(model_type, sizes)
    except Exception:  # noqa: BLE001 - its own lists are not for four layers
        sizes = {}
        config = built(model_type, sizes)
    written = observe(config, "cpu" if model_type in ON_CPU else "meta")
    files = [as_file(config)]
    if model_type not in COMPUTED:
        files.append({"model_type": model_type, "dtype": "bfloat16", **sizes})
    for raw in files:
        geometry = geometry_from_config(raw, BF16, convention="transformers")
        assert [predicted(state) for state in geometry.layers] == written
