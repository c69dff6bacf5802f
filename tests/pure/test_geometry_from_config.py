"""Geometry from config.json: every figure is written out by hand from the file's own numbers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from octavo.geometry.dtypes import BF16, FP8, FP32
from octavo.geometry.fields import defaults_table
from octavo.geometry.from_config import geometry_from_config, language_model_config
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import Borrowed, Chunked, Growing, Stateless, Windowed

GIB = 2**30


def geometry(**config: Any) -> ModelGeometry:
    return geometry_from_config(config, BF16)


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


def test_the_textbook_example_is_128_kib_a_token_and_one_gib_for_8192_tokens() -> None:
    g = geometry(**llama())
    assert g.bytes_per_token_growing == 131072 == 32 * 2 * 8 * 128 * 2
    assert g.bytes_kept(8192) == GIB
    assert g.bytes_read(8192) == GIB
    assert g.fixed_bytes_per_sequence == g.bytes_per_token_windowed == 0
    assert g.attention_mode == "gqa"


def test_as_many_kv_heads_as_heads_cost_four_times_as_much() -> None:
    g = geometry(**llama(num_key_value_heads=32))
    assert g.bytes_kept(8192) == 4 * GIB
    assert g.attention_mode == "mha"


def test_a_quantised_dtype_counts_its_scales() -> None:
    g = geometry_from_config(llama(), FP8)
    # one byte an element and a scale of 4 bytes for each head's key and each head's value
    assert g.bytes_per_token == 32 * 2 * 8 * (128 + 4)


@pytest.mark.parametrize("head_dim", [None, "absent"])
def test_a_head_dim_that_is_null_or_absent_is_derived(head_dim: str | None) -> None:
    config = llama(head_dim=None)
    if head_dim == "absent":
        del config["head_dim"]
    g = geometry(**config)
    assert isinstance(g.layers[0], Growing)
    assert g.layers[0].components[0].shape == (8, 128)


def test_a_null_kv_head_count_means_as_many_as_heads_not_the_default() -> None:
    g = geometry(
        model_type="qwen2", hidden_size=1024, num_attention_heads=8, num_hidden_layers=1, num_key_value_heads=None
    )
    assert g.attention_mode == "mha"
    assert g.bytes_per_token == 2 * 8 * 128 * 2


def test_a_window_reads_itself_and_the_positions_before_it() -> None:
    g = geometry(model_type="gpt_oss", num_hidden_layers=2)
    window = g.layers[0]
    assert isinstance(window, Windowed)
    assert window.window_tokens == 128
    assert window.first_readable(127) == 0
    assert window.first_readable(128) == 1
    assert g.window_tokens == (128,)
    # 100 tokens are below the window in both layers; 1000 are 128 in one and 1000 in the other
    per_layer = 2 * 8 * 64 * 2
    assert g.bytes_kept(100) == 2 * 100 * per_layer
    assert g.bytes_kept(1000) == (128 + 1000) * per_layer


def test_windows_may_alternate_below_max_window_layers() -> None:
    g = geometry(
        model_type="qwen2_moe", num_hidden_layers=6, use_sliding_window=True, sliding_window=64, max_window_layers=3
    )
    assert [type(state) for state in g.layers] == [Windowed, Growing, Windowed, Growing, Growing, Growing]


def test_a_window_may_go_with_the_layers_that_have_no_rotary_positions() -> None:
    g = geometry(model_type="smollm3", num_hidden_layers=5, use_sliding_window=True, sliding_window=64)
    assert [type(state) for state in g.layers] == [Growing, Growing, Growing, Windowed, Growing]


def test_the_last_layer_may_be_full_whatever_the_cycle_says() -> None:
    g = geometry(model_type="gemma4_text", num_hidden_layers=4)
    assert [type(state) for state in g.layers] == [Windowed, Windowed, Windowed, Growing]
    g = geometry(model_type="exaone4", num_hidden_layers=3, sliding_window_pattern="LG")
    assert [type(state) for state in g.layers] == [Windowed, Growing, Growing]


def test_a_pattern_counts_only_where_the_class_heeds_it() -> None:
    g = geometry(model_type="gemma3_text", num_hidden_layers=4, sliding_window_pattern=2)
    assert [type(state) for state in g.layers] == [Windowed, Growing, Windowed, Growing]
    g = geometry(model_type="gemma2", num_hidden_layers=4, sliding_window_pattern=4)
    assert [type(state) for state in g.layers] == [Windowed, Growing, Windowed, Growing]
    g = geometry(model_type="exaone4", num_hidden_layers=2, sliding_window_pattern=None)
    assert [type(state) for state in g.layers] == [Growing, Growing]


def test_where_a_class_counts_the_query_apart_the_window_is_one_longer() -> None:
    g = geometry(model_type="mimo_v2_flash", num_hidden_layers=1, hybrid_layer_pattern=[1], sliding_window_size=128)
    assert g.window_tokens == (129,)


def test_layers_with_rotary_positions_attend_in_chunks_the_others_to_everything() -> None:
    g = geometry(model_type="llama4_text", num_hidden_layers=8, no_rope_layers=[])
    kinds = [type(state) for state in g.layers]
    assert kinds == [Chunked, Chunked, Chunked, Growing] * 2
    assert g.bytes_per_token_growing == 2 * 2 * 8 * 128 * 2
    assert g.bytes_kept(10_000) == 2 * 10_000 * 4096 + 6 * 8192 * 4096
    listed = geometry(model_type="llama4_text", num_hidden_layers=2, no_rope_layers=[0, 1])
    assert [type(state) for state in listed.layers] == [Growing, Chunked]


def test_shared_layers_borrow_from_the_last_layer_of_their_own_kind() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    g = geometry(
        model_type="gemma4_text",
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        sliding_window=512,
        num_kv_shared_layers=3,
        layer_types=kinds,
    )
    assert g.layers[3:] == (Borrowed(1), Borrowed(1), Borrowed(2))
    assert g.bytes_per_token_growing == 2 * 512 * 2
    assert g.bytes_per_token_windowed == 2 * 2 * 256 * 2
    assert g.attention_mode == "mqa+window+shared"
    # one step reads the lender again for each borrower
    assert g.bytes_read(10) == 10 * (2 * 2048 + 2 * 1024) + 10 * 1024 * 2


def test_full_layers_may_have_heads_of_another_width_and_number() -> None:
    g = geometry(
        model_type="gemma4_text",
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
    )
    assert g.bytes_per_token_windowed == 5 * 2 * 8 * 256 * 2
    assert g.bytes_per_token_growing == 2 * 2 * 512 * 2, "the class's global head width is 512"


def test_per_layer_overrides_in_the_file_count() -> None:
    g = geometry(
        model_type="gemma4_text",
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        per_layer_config={"05": {"head_dim": 128, "num_key_value_heads": 2}},
    )
    assert g.bytes_per_token_growing == 2 * 2 * 128 * 2


def test_block_configs_describe_each_layer_and_layers_without_attention_keep_nothing() -> None:
    attention = {"no_op": False, "n_heads_in_group": 8, "window_length": None}
    blocks = [
        {"attention": attention},
        {"attention": {"no_op": True, "n_heads_in_group": None}},
        {"attention": {**attention, "n_heads_in_group": 16, "window_length": 512, "num_sink_tokens": 4}},
    ]
    g = geometry(
        model_type="nemotron-nas",
        hidden_size=8192,
        num_attention_heads=64,
        num_hidden_layers=3,
        num_key_value_heads=None,
        block_configs=blocks,
    )
    assert [type(state) for state in g.layers] == [Growing, Stateless, Windowed]
    assert g.bytes_per_token_growing == 2 * 8 * 128 * 2
    assert g.bytes_kept(1000) == 1000 * 2 * 8 * 128 * 2 + (512 + 4) * 2 * 4 * 128 * 2


# -- nested configs -----------------------------------------------------------------------------

INNER = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"model_type": "mistral3", "text_config": {**INNER, "model_type": "ministral3"}}, "text_config"),
        ({"model_type": "internvl_chat", "llm_config": {**INNER, "model_type": "qwen2"}}, "llm_config"),
        (
            {
                "model_type": "qwen2_5_omni",
                "thinker_config": {"model_type": "qwen2_5_omni_thinker", "text_config": INNER},
                "talker_config": {"num_hidden_layers": 99},
            },
            "thinker_config.text_config",
        ),
        ({"model_type": "qwen2_5_vl", "text_config": INNER, "vision_config": {"depth": 32}}, "text_config"),
    ],
)
def test_the_language_model_is_found_inside_and_the_notes_say_where(config: dict[str, Any], path: str) -> None:
    g = geometry_from_config({**config, "architectures": ["WrapperForConditionalGeneration"]}, BF16)
    assert g.bytes_per_token == 4 * 2 * 2 * 64 * 2
    assert any(f"geometry read from {path} " in note for note in g.notes)
    assert language_model_config(config)["hidden_size"] == 1024


def test_a_nested_config_without_a_model_type_takes_the_wrappers_own() -> None:
    g = geometry(model_type="gemma3", text_config={"num_hidden_layers": 6, "sliding_window": 1024})
    assert g.model_type == "gemma3_text"
    assert g.attention_mode == "gqa+window"


def test_a_wrapper_in_the_older_flat_form_is_read_at_the_top() -> None:
    g = geometry(model_type="qwen2_vl", **INNER)
    assert g.bytes_per_token == 4 * 2 * 2 * 64 * 2


# -- what must not matter -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {}},
        {"rope_scaling": "linear"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "dynamic", "type": "dynamic", "factor": 2.0, "unknown": [1]}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}},
    ],
)
def test_no_spelling_of_rope_scaling_changes_the_geometry(rope: dict[str, Any]) -> None:
    assert geometry(**llama(**rope)).bytes_per_token == 131072


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("LlamaForCausalLM", "llama"), ("GPT2LMHeadModel", "gpt2"), ("Glm4MoeForCausalLM", "glm4_moe")],
)
def test_of_several_types_of_one_class_the_one_is_taken_that_it_is_named_after(
    architecture: str, model_type: str
) -> None:
    assert defaults_table()["architectures"][architecture] == model_type


def test_a_config_without_model_type_takes_it_from_its_architecture() -> None:
    g = geometry(architectures=["GPTNeoXForCausalLM"], hidden_size=768, num_attention_heads=12, num_hidden_layers=12)
    assert g.model_type == "gpt_neox"
    assert g.context_length == 2048
    assert any("names no model_type" in note for note in g.notes)


def test_mixture_of_experts_widths_count_all_experts_of_a_token() -> None:
    g = geometry(model_type="mixtral", intermediate_size=14336, num_experts_per_tok=2, hidden_size=4096)
    assert g.intermediate_size == 2 * 14336


def test_geometry_is_a_value() -> None:
    assert geometry(**llama()) == geometry(**llama())
    assert geometry_from_config(llama(), FP32).bytes_per_token == 2 * geometry(**llama()).bytes_per_token


def test_the_defaults_are_read_lazily_and_quickly() -> None:
    code = (
        "import time, json, sys\n"
        "import octavo.geometry.fields as f\n"
        "assert f.defaults_table.cache_info().currsize == 0\n"
        "t = time.process_time(); f.defaults_table(); print(time.process_time() - t)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(times) < 0.03


def test_planning_one_model_takes_milliseconds() -> None:
    geometry(**llama())
    taken = []
    for _ in range(3):
        start = time.process_time()
        geometry(**json.loads(json.dumps(llama())))
        taken.append(time.process_time() - start)
    assert min(taken) < 0.05
