"""What the user asks: names, types, ranges, and that nothing ever changes it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import CacheConfig, Config, options, parse_bytes
from octavo.config_used import USUAL
from octavo.errors import ConfigError


def test_nothing_asked_is_a_config() -> None:
    config = Config.from_kwargs()
    assert config == Config()
    assert config.cache.block_size == 16
    assert config.model.model is None


def test_flat_names_reach_their_concern() -> None:
    config = Config.from_kwargs(model="m", block_size=32, max_num_seqs=4, audit=True, kv_cache_memory_bytes="1GiB")
    assert config.model.model == "m"
    assert config.cache.block_size == 32
    assert config.cache.kv_cache_memory_bytes == 2**30
    assert config.scheduler.max_num_seqs == 4
    assert config.engine.audit is True
    assert Config.from_kwargs(**config.as_kwargs()) == config


def test_every_option_explains_itself_once() -> None:
    listed = list(options())
    assert len({option.name for option in listed}) == len(listed)
    assert all(option.help and option.flag.startswith("--") for option in listed)
    assert {"max_model_len", "max_num_batched_tokens", "kv_cache_dtype", "skip_tokenizer_init"} <= {
        o.name for o in listed
    }
    assert next(o for o in listed if o.name == "max_num_batched_tokens").flag == "--max-num-batched-tokens"


def test_an_unknown_name_is_refused_and_near_ones_are_offered() -> None:
    with pytest.raises(ConfigError, match="did you mean max_model_len") as caught:
        Config.from_kwargs(max_model_length=8)
    assert caught.value.field == "max_model_length"
    with pytest.raises(ConfigError, match="there are model, revision"):
        Config.from_kwargs(zzzzqqq=1)
    with pytest.raises(ConfigError, match="spelled reuse"):
        Config.from_kwargs(enable_prefix_caching=True)


@pytest.mark.parametrize(
    ("name", "harmless", "refused"),
    [
        ("tensor_parallel_size", (1,), (2, 0, None, True, "1", [1])),
        ("pipeline_parallel_size", (1,), (2, True)),
        ("trust_remote_code", (False,), (True, 0, None)),
        ("enforce_eager", (True, False), (1, None, "yes")),
        ("enable_prefix_caching", (False,), (True, 0)),
        ("swap_space", (0, 0.0), (4, False, float("nan"))),
        ("cpu_offload_gb", (0, 0.0), (10, False)),
        ("disable_log_stats", (True, False), (1, None)),
        ("speculative_config", (None,), ({"method": "ngram"}, np.zeros(2))),
    ],
)
def test_a_name_of_vllm_is_taken_with_the_value_that_asks_for_nothing_and_refused_with_any_other(
    name: str, harmless: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    for value in harmless:
        assert Config.from_kwargs(**{name: value, "block_size": 8}) == Config.from_kwargs(block_size=8)
    for value in refused:
        with pytest.raises(ConfigError, match=r"is not served|is not an option|is spelled") as caught:
            Config.from_kwargs(**{name: value})
        assert caught.value.field == name


@pytest.mark.parametrize(
    ("value", "remedy"), [(0, "must be at least 1"), ("8", "must be a whole number of at least 1")]
)
def test_the_least_value_is_said_in_a_plain_sentence(value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_kwargs(max_num_seqs=value)
    assert caught.value.remedy == remedy


BAD: list[tuple[str, Any]] = [
    ("block_size", 0),
    ("block_size", -16),
    ("block_size", "16"),
    ("block_size", True),
    ("block_size", 16.0),
    ("block_size", 4096),
    ("gpu_memory_utilization", 0),
    ("gpu_memory_utilization", 1.5),
    ("gpu_memory_utilization", -0.1),
    ("gpu_memory_utilization", float("nan")),
    ("gpu_memory_utilization", float("inf")),
    ("gpu_memory_utilization", 10**30),
    ("gpu_memory_utilization", 1 << 1100),
    ("gpu_memory_utilization", "0.9"),
    ("kv_cache_memory_bytes", 0),
    ("kv_cache_memory_bytes", "lots"),
    ("kv_cache_memory_bytes", "1 parsec"),
    ("kv_cache_memory_bytes", 1.5),
    ("kv_cache_memory_bytes", True),
    ("headroom_bytes", -1),
    ("headroom_bytes", "-1GiB"),
    ("max_kv_tokens", 0),
    ("num_gpu_blocks_override", 0),
    ("kv_cache_dtype", "fp8_e5m2"),
    ("kv_cache_dtype", "int4"),
    ("kv_cache_dtype_skip_layers", "0,1"),
    ("kv_cache_dtype_skip_layers", ""),
    ("kv_cache_dtype_skip_layers", 3),
    ("kv_cache_dtype", "bf17"),
    ("kv_cache_dtype", None),
    ("dtype", "int8"),
    ("model", ""),
    ("model", 7),
    ("model", "  "),
    ("max_model_len", 0),
    ("seed", -1),
    ("seed", 2**63),
    ("max_num_seqs", 0),
    ("max_num_batched_tokens", 0),
    ("enable_chunked_prefill", False),
    ("allocation", "paged "),
    ("allocation", ["paged"]),
    ("batching", "continuous"),
    ("admission", "future_bounded"),
    ("preemption", "offload"),
    ("reuse", "always"),
    ("disk_bytes_per_second", 1e6),  # without a disk
    ("disk_bytes_per_second", 0.5),
    ("transfer_bytes_per_second", 0.0),
    ("transfer_bytes_per_second", float("nan")),
    ("transfer_timeout", 0.0),
    ("pipeline_depth", 2),
    ("pipeline_depth", True),
    ("audit", 1),
    ("skip_tokenizer_init", "yes"),
    ("device", "gpu"),
    ("device", "cuda:x"),
    ("device", "cpu:0"),
    ("device", "cuda:"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_wrong_value_is_refused_naming_its_field(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_kwargs(**{name: value})
    assert caught.value.field == name
    assert caught.value.remedy


def test_layers_that_are_not_rounded_are_a_text_or_a_list() -> None:
    asked = Config.from_kwargs(kv_cache_dtype="int8", kv_cache_dtype_skip_layers=[0, "sliding_window"])
    assert asked.cache.kv_cache_dtype_skip_layers == "0,sliding_window"
    assert Config.from_kwargs(kv_cache_dtype_skip_layers=[]).cache.kv_cache_dtype_skip_layers is None


@pytest.mark.parametrize("name", ["fp8_e5m2", "int4"])
def test_what_is_not_served_yet_says_so(name: str) -> None:
    with pytest.raises(ConfigError, match="not served yet"):
        Config.from_kwargs(kv_cache_dtype=name)


def test_contiguous_is_short_for_its_first_kind() -> None:
    assert Config.from_kwargs(allocation="contiguous") == Config.from_kwargs(allocation="contiguous-max")


def test_device_takes_an_index() -> None:
    assert Config.from_kwargs(device="cuda:1").engine.device == "cuda:1"


def test_numbers_of_numpy_become_plain_ones() -> None:
    config = Config.from_kwargs(block_size=np.int64(8), gpu_memory_utilization=np.float32(0.5))
    assert type(config.cache.block_size) is int
    assert type(config.cache.gpu_memory_utilization) is float


def test_a_config_cannot_be_written_to() -> None:
    config = Config.from_kwargs()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cache.block_size = 8  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cache = CacheConfig()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512MiB", 512 * 2**20), ("2G", 2 * 10**9), ("1.5GB", 1_500_000_000), ("7", 7), ("1_000", 1000), ("4 KiB", 4096),
     (123, 123), ("1t", 10**12)],
)  # fmt: skip
def test_bytes_are_read_with_their_units(text: Any, expected: int) -> None:
    assert parse_bytes("x", text) == expected


@given(st.text(max_size=12))
def test_any_text_is_bytes_or_a_refusal(text: str) -> None:
    try:
        assert parse_bytes("x", text) >= 0
    except ConfigError as error:
        assert error.field == "x"  # noqa: PT017 - both outcomes are right


BESIDE_REUSE = {"reuse": "prefix", "host_bytes": 1 << 20}


@pytest.mark.parametrize(
    ("name", "value", "beside", "remedy"),
    [
        ("placement", "write_through", {"reuse": "prefix"}, "give host_bytes"),
        ("host_eviction", "cheapest_to_rebuild", {"reuse": "prefix"}, "give host_bytes"),
        ("transfer_bytes_per_second", 1e9, {"reuse": "prefix"}, "give host_bytes"),
        ("transfer_timeout", 1.0, {"reuse": "prefix"}, "give host_bytes"),
        ("disk_bytes_per_second", 1e9, BESIDE_REUSE, "give disk_path and disk_bytes"),
        ("disk_eviction", "cheapest_to_rebuild", BESIDE_REUSE, "give disk_path and disk_bytes"),
        ("eviction", "cheapest_to_rebuild", {}, "give reuse=prefix"),
        ("prefix_wait_tokens", 5, {}, "give reuse=prefix"),
        ("placement", "drop", {"host_bytes": 1 << 20, "preemption": "offload"}, "give reuse=prefix"),
    ],
)
def test_an_option_that_nothing_would_use_is_refused_with_what_it_needs(
    name: str, value: Any, beside: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*{remedy}"):
        Config.from_kwargs(**beside, **{name: value})


def test_what_counts_as_not_asked_is_what_the_options_are_if_not_given() -> None:
    usual = Config().as_kwargs()
    assert {name: usual[name] for name in USUAL} == USUAL
