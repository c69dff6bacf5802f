"""Geometry against what Transformers really does.

Three observations: the table of defaults is what the installed config classes say; the layers that
`geometry_from_config` gives a window are those of the class; and models built without memory (on
the meta device) write keys and values of exactly the shapes that the geometry predicts.
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
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16
from octavo.geometry.fields import defaults_table
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.state import Chunked, Growing, LayerState, Windowed

TOOL = Path(__file__).parents[2] / "tools" / "make_config_defaults.py"

OBSERVED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gemma4_text", "phi", "phi3", "olmo2",
    "olmo3", "starcoder2", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_neox", "gpt_oss", "granite", "cohere", "cohere2",
    "smollm3", "stablelm", "glm4", "gpt2", "gpt_bigcode", "opt", "bloom", "mpt", "falcon", "exaone4", "helium",
    "persimmon", "deepseek_v3", "phimoe", "minimax_m2",
)  # fmt: skip


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
        window = getattr(config, "sliding_window", None)
        if kinds is None:
            kinds = ["sliding_attention" if window else "full_attention"] * layers
        ours = [_kind(state) for state in geometry.layers]
        theirs = ["full_attention" if k == "indexed_attention" or (not window and k[0] == "s") else k for k in kinds]
        assert [o for o in ours if o] == [t for o, t in zip(ours, theirs, strict=True) if o], model_type
        compared += 1
    assert compared > 120


def _kind(state: LayerState) -> str:
    kinds = {Growing: "full_attention", Windowed: "sliding_attention", Chunked: "chunked_attention"}
    return kinds.get(type(state), "")


@pytest.mark.parametrize("model_type", OBSERVED)
def test_a_model_writes_keys_and_values_of_the_predicted_shapes(model_type: str) -> None:
    raw: dict[str, Any] = {"model_type": model_type}
    geometry = geometry_from_config(raw, BF16)
    config = CONFIG_MAPPING[model_type]()
    cache = DynamicCache(config=config)
    with torch.device("meta"), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
        model(input_ids=torch.ones(1, 5, dtype=torch.long), cache=cache, use_cache=True)
    assert len(cache.layers) == geometry.num_layers
    for layer, state in zip(cache.layers, geometry.layers, strict=True):
        assert isinstance(state, (Growing, Windowed))
        key, value = state.components[:2]
        # a latent is one head wide as that; attention per head is [heads, width]
        expected = [(1, *c.shape)[-2:] for c in (key, value)]
        seen = [(t.shape[1], t.shape[3]) for t in (layer.keys, layer.values)]
        assert seen == expected
        if isinstance(state, Windowed):
            assert layer.sliding_window == state.window_tokens
        assert layer.keys[0, :, 0].nbytes + layer.values[0, :, 0].nbytes == key.bytes + value.bytes
