"""What is decided from what is asked, and that every decision says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import Config
from octavo.deciding import CPU_MOST_BYTES, decide, kv_dtype_for, served_geometry
from octavo.deployment import Deployment, Facts, tokens_in
from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16, FP16, FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import Component, Compressed, Growing
from octavo.memory.groups import StateGroup
from octavo.memory.layout import make_layout

GIB = 2**30
TOKEN_BYTES = 32 * 2 * 8 * 128 * 2
BLOCK_BYTES = 16 * TOKEN_BYTES


def llama(**changes: Any) -> ModelGeometry:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
    }
    return geometry_from_config({**config, **changes}, BF16)


CPU = Facts(
    device="cpu",
    total_bytes=64 * GIB,
    available_bytes=60 * GIB,
    weights_bytes=16 * GIB,
    weights_dtype=BF16,
    process_bytes=GIB // 2,
    cores=8,
    granted_by="control group",
)
GPU = replace(CPU, device="cuda", total_bytes=80 * GIB, available_bytes=79 * GIB, granted_by="the GPU", process_bytes=0)


def decided(facts: Facts = CPU, geometry: ModelGeometry | None = None, **asked: Any) -> Deployment:
    return decide(Config.from_kwargs(**asked), llama() if geometry is None else geometry, facts)


def test_on_cpu_the_default_is_modest_and_says_so() -> None:
    d = decided()
    assert d.kv_bytes == CPU_MOST_BYTES // BLOCK_BYTES * BLOCK_BYTES
    assert "default on CPU" in d.reason("KV cache")
    small = decided(replace(CPU, available_bytes=18 * GIB))
    assert small.kv_bytes == int(0.4 * 2 * GIB) // BLOCK_BYTES * BLOCK_BYTES


def test_on_a_gpu_utilization_counts_weights_runtime_and_headroom() -> None:
    d = decided(GPU, headroom_bytes=GIB)
    budget = int(0.9 * GPU.total_bytes) - GPU.weights_bytes - GIB
    # the pool was sized with an upper bound of the runtime, so it is at most a little below what is left
    left = budget - d.ledger.runtime_bytes
    assert left - BLOCK_BYTES - GIB // 64 < d.kv_bytes <= left
    assert d.ledger.total_bytes <= int(0.9 * GPU.total_bytes)
    assert "gpu_memory_utilization=0.9" in d.limit


def test_the_smallest_limit_wins_and_is_named() -> None:
    asked = {"kv_cache_memory_bytes": GIB, "max_kv_tokens": 4096, "gpu_memory_utilization": 0.5}
    d = decided(**asked)
    assert d.kv_tokens == 4096
    assert d.limit == "max_kv_tokens=4,096"
    d = decided(**{**asked, "kv_cache_memory_bytes": GIB // 4})
    assert d.kv_bytes == GIB // 4
    assert d.limit.startswith("kv_cache_memory_bytes=")
    d = decided(**{**asked, "gpu_memory_utilization": 0.268})
    assert d.limit.startswith("gpu_memory_utilization=0.268 of 68,719,476,736 B granted by control group")
    assert d.kv_bytes < GIB // 2
    d = decided(num_gpu_blocks_override=7, max_kv_tokens=4096)
    assert (d.most_blocks, d.limit) == ((("full", 7),), "num_gpu_blocks_override=7")


def test_bytes_asked_for_may_exceed_the_modest_default() -> None:
    d = decided(kv_cache_memory_bytes="8GiB")
    assert d.kv_bytes == 8 * GIB
    assert d.slabs == 8 * GIB // BLOCK_BYTES


def test_bytes_asked_for_are_cut_to_what_is_free() -> None:
    d = decided(kv_cache_memory_bytes="1000GiB")
    assert d.kv_bytes < 44 * GIB
    assert d.limit.startswith("what is left")
    assert d.ledger.total_bytes <= CPU.available_bytes + CPU.process_bytes


def test_utilization_never_takes_what_others_hold() -> None:
    d = decided(replace(CPU, available_bytes=20 * GIB), gpu_memory_utilization=0.95)
    assert "less than gpu_memory_utilization=0.95 would take" in d.limit
    assert d.kv_bytes < 4 * GIB


def test_a_token_cap_rounds_down_to_whole_blocks() -> None:
    assert decided(max_kv_tokens=100).kv_tokens == 96
    assert decided(max_kv_tokens=96).kv_tokens == 96


def test_a_context_limit_larger_than_the_pool_is_reported_and_cut() -> None:
    d = decided(max_kv_tokens=4096)
    assert d.max_model_len == 4096
    assert "cut from 8,192" in d.reason("max_model_len")
    assert d.warnings == (
        "the context limit of 8,192 tokens is larger than the pool, which holds 4,096: longer requests are refused",
    )
    assert decided().warnings == ()


def test_max_model_len_is_as_asked_or_the_models() -> None:
    assert decided().max_model_len == 8192
    assert decided(max_model_len=1000).max_model_len == 1000
    with pytest.raises(ConfigError, match="made for 8192 positions"):
        decided(max_model_len=8193)


def test_without_a_context_length_the_pool_is_the_limit() -> None:
    geometry = replace(llama(), context_length=None)
    d = decided(geometry=geometry, max_kv_tokens=1600)
    assert d.max_model_len == 1600
    assert "names no context length" in d.reason("max_model_len")
    assert d.warnings == ()


def test_sequences_are_cut_to_the_tokens_of_a_step_and_to_the_blocks() -> None:
    d = decided(max_num_seqs=300, max_num_batched_tokens=100)
    assert (d.max_num_seqs, d.max_num_batched_tokens) == (100, 100)
    assert "a step has 100 tokens" in d.reason("max_num_seqs")
    d = decided(max_num_seqs=300, max_kv_tokens=160)
    assert d.max_num_seqs == 10
    assert "10 sequences of one block" in d.reason("max_num_seqs")
    d = decided(max_num_seqs=5000)
    assert d.max_num_batched_tokens == 5000
    assert "raised to max_num_seqs" in d.reason("max_num_batched_tokens")


def test_a_pool_below_one_block_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"at least 1 of 2,097,152 B \(16 tokens\), but max_kv_tokens=15"):
        decided(max_kv_tokens=15)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.1 of .* weights .* = 0 B"):
        decided(gpu_memory_utilization=0.1)
    with pytest.raises(ConfigError, match="headroom"):
        decided(headroom_bytes="64GiB")


def test_weights_that_do_not_fit_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"17,179,869,184 B of weights.*do not fit: 8,589,934,592 B are free"):
        decided(replace(CPU, available_bytes=8 * GIB))


def test_weights_already_loaded_are_not_taken_off_twice() -> None:
    before = decided(replace(CPU, available_bytes=20 * GIB), kv_cache_memory_bytes="100GiB")
    after = decided(replace(CPU, available_bytes=4 * GIB, weights_loaded=True), kv_cache_memory_bytes="100GiB")
    assert before.kv_bytes == after.kv_bytes


def test_components_that_can_be_planned_but_not_served_are_refused_by_name() -> None:
    indexed = (Component("k", (4, 64), BF16), Component("v", (4, 64), BF16), Component("index_k", (128,), BF16))
    with pytest.raises(ConfigError, match=r"layer 0 keeps .*k \+ v \+ index_k.*not served yet"):
        decided(geometry=replace(llama(), layers=(Growing(indexed),)))


def test_compressed_state_that_can_be_planned_but_not_served_is_refused_by_name() -> None:
    kv = (Component("compressed_kv", (64,), BF16),)
    geometry = replace(llama(), layers=(*llama().layers[1:], Compressed(kv, 4)))
    with pytest.raises(ConfigError, match=r"layer 31 keeps Compressed.*not served yet"):
        decided(geometry=geometry)


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        ({"model_type": "llama4_text", "num_hidden_layers": 4}, ["chunk_8192", "full"]),
        ({"model_type": "gemma4_text", "num_hidden_layers": 12, "num_kv_shared_layers": 6}, ["window_512", "full"]),
        ({"model_type": "gpt_oss", "num_hidden_layers": 2}, ["window_128", "full"]),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 2}, ["full"]),
    ],
)
def test_layers_are_laid_out_by_the_law_that_they_follow(config: dict[str, Any], groups: list[str]) -> None:
    decided_ = decided(geometry=geometry_from_config(config, BF16))
    assert [group.name for group in decided_.layout.groups] == groups


def test_a_cap_in_tokens_counts_windows_whole_and_the_ledger_says_what_they_give_up() -> None:
    geometry = geometry_from_config({"model_type": "gpt_oss", "num_hidden_layers": 2}, BF16)
    d = decided(geometry=geometry, max_kv_tokens=1600)
    assert d.kv_bytes == 1600 * 2 * 2 * 8 * 64 * 2
    assert "given up once nothing can read them" in d.ledger.kv.basis


def test_kv_dtype_is_the_models_unless_asked() -> None:
    assert kv_dtype_for(Config.from_kwargs(), FP32) is FP32
    assert kv_dtype_for(Config.from_kwargs(kv_cache_dtype="half"), FP32) is FP16


GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1,
         "head_dim": 256, "hidden_size": 640, "sliding_window": 512, "sliding_window_pattern": 6}  # fmt: skip


def test_eight_bit_layers_and_others_share_a_model_and_its_bytes() -> None:
    config = Config.from_kwargs(kv_cache_dtype="int8", kv_cache_dtype_skip_layers="0, 5", max_kv_tokens=1600)
    geometry = served_geometry(config, GEMMA, BF16)
    assert geometry.bytes_per_token == 4 * 2 * (256 + 4) + 2 * 2 * 256 * 2
    d = decide(config, geometry, CPU)
    window, full = d.layout.groups
    assert (window.block_bytes, full.block_bytes) == (16 * (4 * 520 + 1024), 16 * 1024)
    rows = {row.name: row for row in d.rows()}
    assert rows["kv_cache_dtype"].value == "int8"
    assert "a scale of 4 B for each token and head" in rows["kv_cache_dtype"].reason
    assert "layers 0, 5 in bf16" in rows["geometry"].reason


def test_all_layers_with_a_window_can_be_named_at_once() -> None:
    config = Config.from_kwargs(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["sliding_window"])
    layers = served_geometry(config, GEMMA, BF16).layers
    assert [layer.components[0].dtype.name for layer in layers] == ["bf16"] * 5 + ["fp8"]


@pytest.mark.parametrize(("name", "told"), [("6", "layers 0 to 5"), ("-1", "layers 0 to 5"), ("first", "layers 0 to")])
def test_layers_that_are_not_there_are_refused(name: str, told: str) -> None:
    config = Config.from_kwargs(kv_cache_dtype="int8", kv_cache_dtype_skip_layers=name)
    with pytest.raises(ConfigError, match=told) as caught:
        served_geometry(config, GEMMA, BF16)
    assert caught.value.field == "kv_cache_dtype_skip_layers"


def test_a_model_without_windows_has_none_to_leave_out() -> None:
    config = Config.from_kwargs(kv_cache_dtype="int8", kv_cache_dtype_skip_layers="sliding_window")
    with pytest.raises(ConfigError, match="no layer of this model has a window"):
        served_geometry(config, {"model_type": "llama"}, BF16)


def test_latents_are_served_in_eight_bits_too() -> None:
    latent = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    config = Config.from_kwargs(kv_cache_dtype="fp8")
    layout = decide(config, served_geometry(config, latent, BF16), CPU).layout
    assert layout.groups[0].block_bytes == 2 * 16 * (32 + 4 + 8 + 4)


def test_the_start_table_lets_one_figure_be_derived_from_another() -> None:
    d = decided(max_kv_tokens=4096, max_model_len=1000)
    rows = {row.name: row for row in d.rows()}
    assert rows["pool"].value == "536,870,912 B = 256 x 2,097,152 B"
    assert rows["blocks"].value == "256"
    assert rows["blocks of 16 tokens"].value == "1"
    assert rows["blocks of 250 tokens"].value == "16"
    assert rows["blocks of 1,000 tokens"].value == "63"
    assert rows["blocks of 1,000 tokens"].reason == "the pool holds 4 such sequences"
    assert rows["KV cache"].reason == "max_kv_tokens=4,096"
    assert rows["bytes per token"].value == "131,072"
    for name in ("device", "kv_cache_dtype", "max_num_seqs", "allocation", "admission", "ledger: total"):
        assert rows[name].value
        assert rows[name].reason


@pytest.mark.parametrize("skipped", [None, "0, 5"])
def test_the_start_table_counts_blocks_of_groups_by_their_size(skipped: str | None) -> None:
    rounded = {} if skipped is None else {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": skipped}
    config = Config.from_kwargs(**rounded, max_kv_tokens=16000)
    d = decide(config, served_geometry(config, GEMMA, BF16), CPU)
    per_slab = {group.name: group.blocks_per_slab for group in d.layout.groups}
    assert per_slab == {"window_512": 1, "full": 5 if skipped is None else 3}
    rows = {row.name: row for row in d.rows()}
    assert rows["blocks"].value == f"{d.slabs:,} window_512 or {d.slabs * per_slab['full']:,} full"
    assert rows[f"blocks of {d.max_model_len:,} tokens"].reason == "the pool holds one, in smaller steps"
    for tokens, blocks, sequences in d.requests_in_pool():
        each = d.layout.blocks_for(tokens, d.max_num_batched_tokens)
        assert sum(each) == blocks
        for more, fits in ((0, True), (1, False)):
            slabs = [-(-(sequences + more) * n // per) for n, per in zip(each, per_slab.values(), strict=True)]
            assert (sum(slabs) <= d.slabs) == fits


@given(
    available=st.integers(17, 60),
    block=st.sampled_from([1, 7, 16, 256]),
    seqs=st.integers(1, 2000),
    tokens=st.integers(1, 4096),
    share=st.one_of(st.none(), st.floats(0.3, 1.0)),
    cap=st.one_of(st.none(), st.integers(1, 100_000)),
    headroom=st.integers(0, GIB),
)
def test_whatever_is_asked_the_ledger_sums_and_fits(
    available: int, block: int, seqs: int, tokens: int, share: float | None, cap: int | None, headroom: int
) -> None:
    facts = replace(CPU, available_bytes=available * GIB)
    asked = {
        "block_size": block,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "gpu_memory_utilization": share,
        "max_kv_tokens": cap,
        "headroom_bytes": headroom,
    }
    try:
        d = decided(facts, **asked)
    except ConfigError as error:
        assert error.field == "kv_cache"  # noqa: PT017 - both outcomes are right
        return
    assert d.ledger.total_bytes == d.ledger.weights.predicted_bytes + d.ledger.runtime_bytes + d.kv_bytes + headroom
    assert d.kv_bytes == d.slabs * d.layout.slab_bytes
    assert d.ledger.total_bytes <= facts.available_bytes + facts.process_bytes
    assert 1 <= d.max_num_seqs <= min(seqs, d.max_num_batched_tokens, d.slabs)
    assert d.max_model_len <= d.kv_tokens
    assert cap is None or d.kv_tokens <= cap


def test_tokens_in_a_pool_of_several_groups_is_the_most_that_fits() -> None:
    def group(name: str, width: int) -> StateGroup:
        return StateGroup(name, (0,), ((Component("k", (width,), BF16),),))

    layout = make_layout((group("wide", 6), group("narrow", 2)), 4)
    for slabs in range(12):
        most = tokens_in(layout, slabs, Config())
        assert layout.slabs_for(most) <= slabs
        assert layout.slabs_for(most + 1) > slabs


def test_a_model_without_state_has_no_pool() -> None:
    geometry = replace(llama(), layers=())
    with pytest.raises(ConfigError, match="nothing to keep"):
        decided(geometry=geometry)
    assert isinstance(llama().layers[0], Growing)


def test_a_host_tier_that_does_not_fit_beside_the_weights_is_refused_by_its_own_name() -> None:
    with pytest.raises(ConfigError, match=r"^host_bytes=.*does not fit: on a CPU .* are free"):
        decided(host_bytes="900GiB", reuse="prefix")
    fits = decided(host_bytes="64MiB", reuse="prefix")
    assert fits.host_slabs == 64 * 2**20 // fits.layout.slab_bytes
    told = [line.predicted_bytes for line in fits.ledger.lines if line.label == "host tier"]
    assert told == [fits.host_slabs * fits.layout.slab_bytes]
