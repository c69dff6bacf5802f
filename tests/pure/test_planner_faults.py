"""Faults that capacity planners and start-up messages of real engines have had, each with its whole kind.

Activations of several devices stand in `test_planner_runtime`, old configs beside newer weights in
`test_planner_checkpoint`, one charge for planner and admission in `test_planner_layout`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.pure.planner_shapes import GEMMA_4_31B, GIB, GPT_OSS, LLAMA_8B, QWEN_35_27B

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16
from octavo.geometry.from_config import geometry_from_config
from octavo.planner.asked import Asked
from octavo.planner.build import ground_of, plan
from octavo.planner.charging import paging_for
from octavo.planner.json_form import as_json
from octavo.planner.report import report
from octavo.planner.values import Capacity

SHAPES = {"uniform": LLAMA_8B, "windows": GPT_OSS, "two sizes": GEMMA_4_31B, "hybrid": QWEN_35_27B}
ENGINES = ("octavo", "vllm-0.11", "vllm", "sglang", "trtllm", "llamacpp")


def held(config: dict[str, Any], **options: Any) -> Capacity:
    made = plan(config, **options).capacity
    assert made is not None
    return made


# -- head_dim, spellings, nesting -----------------------------------------------------------------

QWEN3_06B = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8}  # fmt: skip


@pytest.mark.parametrize("given", [{"head_dim": 128}, {"head_dim": None}, {}])
def test_head_dim_is_read_or_the_class_default_and_not_hidden_over_heads(given: dict[str, Any]) -> None:
    made = plan({**QWEN3_06B, **given})
    expected = 64 if "head_dim" in given and given["head_dim"] is None else 128
    assert made.state.bytes_per_token_growing == 28 * 2 * 8 * expected * 2
    if expected == 128:
        assert made.state.bytes_per_token_growing == 114_688


ROPE: list[dict[str, Any]] = [
    {},
    {"rope_scaling": {}},
    {"rope_scaling": None},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "extra": 1}},
    {"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
    {"rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]}},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
]


@pytest.mark.parametrize("given", ROPE)
def test_no_spelling_of_rope_scaling_stops_or_changes_a_plan(given: dict[str, Any]) -> None:
    assert plan({**LLAMA_8B, **given}).sequence_bytes == plan(LLAMA_8B).sequence_bytes


@pytest.mark.parametrize("path", ["text_config", "llm_config", "thinker_config.text_config"])
def test_a_nested_language_model_is_found_and_its_place_is_said(path: str) -> None:
    config: dict[str, Any] = LLAMA_8B
    for name in reversed(path.split(".")):
        config = {"model_type": "some_wrapper", name: config}
    made = plan(config)
    assert made.state.bytes_per_token_growing == 131_072
    assert any(path in note for note in made.notes)


def test_a_window_is_the_current_key_and_those_before_it_and_not_one_more() -> None:
    windowed = next(s for s in geometry_from_config(GPT_OSS, BF16).layers if s.bytes_kept(10**6) < 10**6)
    assert windowed.bytes_kept(128) == windowed.bytes_kept(129) == 128 * 2048
    assert [windowed.first_readable(p) for p in (127, 128, 255)] == [0, 1, 128]


# -- one number for capacity ----------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_printed_figure_of_capacity_follows_from_the_others(shape: str, engine: str) -> None:
    """Bytes, blocks, blocks of a request at three lengths, sequences and the longest context: one arithmetic."""
    config, size = SHAPES[shape], 24 * GIB
    options = {"engine": engine, "kv_cache_memory_bytes": size, "contexts": "2048,8192,32768", "context": 8192}
    found = held(config, **options)
    ground = ground_of(config, Asked.of(**options))
    paging = paging_for(ground.engine, ground.device, ground.charge)
    assert found.usable_blocks <= found.blocks
    assert found.blocks * found.block_bytes <= size
    for context, sequences in found.sequences.items():
        assert paging.bytes_for(context, sequences) <= size
        assert int(found.concurrency[context] + 1e-9) >= sequences
        assert found.blocks_per_sequence[context] == paging.units_for(context)
    if engine != "llamacpp":
        longest = found.largest_context
        assert held(config, **options | {"context": longest}).sequences[longest] >= 1
        more = held(config, **options | {"context": longest + 1})
        assert more.sequences[longest + 1] == 0 or longest >= 2**40
        assert not more.fits


@pytest.mark.parametrize(("spare", "fits"), [(-1, False), (0, False), (1, True), (2, True)])
@pytest.mark.parametrize("engine", ["octavo", "vllm-0.11"])
def test_a_pool_that_takes_exactly_one_longest_request_is_no_fit(engine: str, spare: int, fits: bool) -> None:
    """It starts, prints 1.00x, and a request that needs a block before it gives one back is never served."""
    block, needed = 16 * 131_072, 8192 // 16
    reserved = 1 if engine == "vllm-0.11" else 0
    size = (needed + reserved + spare) * block
    made = plan(LLAMA_8B, engine=engine, context=8192, kv_cache_memory_bytes=size)
    assert made.capacity is not None
    assert made.capacity.fits is fits
    assert any("does not fit" in text for text in as_json(made)["warnings"]) is not fits or made.budget is None


def test_a_request_longer_than_the_pool_is_said_before_anything_is_rented() -> None:
    """76,640 tokens of KV and a context of 262,144: a request of 100,000 would wait for ever."""
    found = held(LLAMA_8B, context=131_072, kv_cache_memory_bytes=76_640 * 131_072)
    assert found.largest_context == 76_640
    assert not found.fits
    assert "76,640" in found.margin


def test_a_stage_of_a_pipeline_and_the_whole_hold_the_same_tokens() -> None:
    """The number printed is the one that admission has: tokens of the stage with the most layers."""
    one, two = (held(LLAMA_8B, context=8192, pp=stages, kv_cache_memory_bytes=8 * GIB // stages) for stages in (1, 2))
    assert one.tokens == two.tokens
    assert one.largest_context == two.largest_context


# -- what is not the cache ------------------------------------------------------------------------


def test_memory_outside_the_framework_and_a_collectives_buffers_come_out_of_the_cache() -> None:
    def kv(**options: Any) -> int:
        made = plan(LLAMA_8B, device="h100-sxm", weights_bytes="16GB", **options)
        assert made.budget is not None
        return made.budget.kv.predicted_bytes

    assert kv(headroom_bytes="14GB") == pytest.approx(kv() - 14e9, abs=2 * 16 * 131_072)
    assert any("communication" in line for line in (x.label for x in budget_lines(tp=8)))
    assert not any("communication" in line for line in (x.label for x in budget_lines()))


def budget_lines(**options: Any) -> tuple[Any, ...]:
    made = plan(LLAMA_8B, device="h100-sxm", **options)
    assert made.budget is not None
    return made.budget.runtime


def test_a_host_tier_of_a_hybrid_is_a_total_for_all_kinds_of_state() -> None:
    """Not so many bytes for keys and values and as many again for recurrent state."""
    made = plan(QWEN_35_27B, context=32_768, host_memory_bytes=10 * GIB, device="h100-sxm")
    lever = next(lever for lever in made.levers if lever.name == "host tier")
    assert lever.sequences == 10 * GIB // made.sequence_bytes_per_device[32_768]


@pytest.mark.parametrize("option", ["context", "max_num_seqs", "max_num_batched_tokens", "tp", "block_size"])
@pytest.mark.parametrize("value", [0, -1, "-5", "many", 1.5, True, 2**60])
def test_sizes_that_cannot_be_are_refused_and_never_give_a_negative_budget(option: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(LLAMA_8B, **{option: value})
    assert caught.value.field == option


def test_lengths_beyond_what_is_declared_are_refused() -> None:
    for lengths in ("100,0", "-5", "", "9000"):
        with pytest.raises(ConfigError):
            plan(LLAMA_8B, lengths=lengths, declared_max=8192)


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model-00001-of-00013.safetensors", "model.safetensors"])
def test_a_file_of_weights_is_no_config_and_the_remedy_is_said(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\0" * 64)
    with pytest.raises(ConfigError, match=r"config.json or its directory"):
        plan(tmp_path / name)


def test_what_does_not_fit_once_is_never_printed_as_one() -> None:
    """A hybrid's state and 16,384 blocks of keys and values take 113.2 of 113 slabs: 0.99, not 1.00."""
    made = plan(QWEN_35_27B, context=262_144, kv_cache_memory_bytes=113 * 153_944_064)
    assert made.capacity is not None
    assert made.capacity.sequences[262_144] == 0
    assert 0.995 < made.capacity.concurrency[262_144] < 1
    shown = [line for line in report(made) if "262,144 tokens " in line and "at once (" in line]
    assert [line.rsplit("(", 1)[1] for line in shown] == ["0.99)"]
    assert as_json(made)["capacity"]["concurrency"]["262144"] < 1
