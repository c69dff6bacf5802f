"""Start-up logs: every engine's wordings are read, and each printed figure is explained or left over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.pure.planner_shapes import GPT_OSS, LLAMA_8B, QWEN_35_27B

from octavo.errors import ConfigError
from octavo.planner.against import explain, explanation_lines
from octavo.planner.asked import Asked
from octavo.planner.logs import GIB, MIB, parse_log

VLLM_OLD = """
INFO 11-20 10:00:00 model_runner.py:1077] Loading model weights took 14.9888 GB
INFO worker.py:232] Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=15.30GiB \
peak_torch_memory=17.98GiB memory_usage_post_profile=15.34GiB non_torch_memory=0.35GiB kv_cache_size=2.89GiB \
gpu_memory_utilization=0.90
INFO gpu_executor.py:113] # GPU blocks: 1478, # CPU blocks: 2048
INFO gpu_executor.py:117] Maximum concurrency for 29000 tokens per request: 0.82x
"""
VLLM_MIDDLE = """
INFO worker.py:267] the current vLLM instance can use total_gpu_memory (79.22GiB) x \
gpu_memory_utilization (0.90) = 71.29GiB
INFO worker.py:267] model weights take 14.96GiB; non_torch_memory takes 1.79GiB; PyTorch activation peak memory takes \
1.26GiB; the rest of the memory reserved for KV Cache is 53.29GiB.
"""
VLLM_NEW = """
INFO [gpu_worker.py:298] Available KV cache memory: 4.99 GiB
INFO [kv_cache_utils.py:1087] GPU KV cache size: 302,921 tokens
INFO [kv_cache_utils.py:1091] Maximum concurrency for 131,072 tokens per request: 2.31x
"""
SGLANG = """
[TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=62.10 GB, mem usage=15.00 GB.
[TP0] KV Cache is allocated. #tokens: 81920, K size: 5.00 GB, V size: 5.00 GB
[TP0] max_total_num_tokens=81920, chunked_prefill_size=8192, context_len=131072
"""
TRTLLM = """
[TensorRT-LLM][INFO] Number of tokens per block: 64.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 26.91 GiB for max tokens in paged KV cache (220480).
"""
LLAMA_OLD = """
llama_new_context_with_model: n_ctx      = 4096
llama_new_context_with_model: KV self size  =  512.00 MiB, K (f16):  256.00 MiB, V (f16):  256.00 MiB
"""
LLAMA_NEW = """
llama_context: n_seq_max     = 1
llama_context: n_ctx         = 4096
llama_context: n_ubatch      = 512
llama_kv_cache_unified: size =  272.00 MiB (  4096 cells,  32 layers,  1/1 seqs), K (q8_0):  136.00 MiB, \
V (q8_0):  136.00 MiB
"""


def explained(tmp_path: Path, log: str, config: dict[str, Any], **options: Any) -> dict[str, Any]:
    file = tmp_path / "start.log"
    file.write_text(log)
    return explain(config, Asked.of(**options), str(file))


def step(found: dict[str, Any], what: str) -> dict[str, Any]:
    return next(s for s in found["steps"] if s["what"] == what)


@pytest.mark.parametrize(
    ("log", "engine", "figures"),
    [
        (VLLM_OLD, "vllm", {"blocks": 1478, "cpu_blocks": 2048, "concurrency": 0.82, "context": 29000,
                            "kv_bytes": 2.89 * GIB, "weights_bytes": 14.9888 * GIB, "peak_bytes": 17.98 * GIB}),
        (VLLM_MIDDLE, "vllm", {"total_bytes": 79.22 * GIB, "utilization": 0.9, "budget_bytes": 71.29 * GIB,
                               "kv_bytes": 53.29 * GIB, "activation_bytes": 1.26 * GIB}),
        (VLLM_NEW, "vllm", {"kv_bytes": 4.99 * GIB, "tokens": 302_921, "concurrency": 2.31, "context": 131_072}),
        (SGLANG, "sglang", {"tokens": 81_920, "key_bytes": 5 * GIB, "weights_bytes": 15 * GIB, "context": 131_072}),
        (TRTLLM, "trtllm", {"kv_bytes": 26.91 * GIB, "tokens": 220_480, "block_tokens": 64}),
        (LLAMA_OLD, "llamacpp", {"kv_bytes": 512 * MIB, "context": 4096}),
        (LLAMA_NEW, "llamacpp", {"kv_bytes": 272 * MIB, "context": 4096, "max_num_seqs": 1}),
    ],
    ids=["vllm-blocks", "vllm-budget", "vllm-tokens", "sglang", "trtllm", "llama-old", "llama-new"],
)  # fmt: skip
def test_each_wording_is_read(log: str, engine: str, figures: dict[str, float]) -> None:
    printed = parse_log(log)
    assert printed.engine == engine
    assert {name: printed.figures.get(name) for name in figures} == pytest.approx(figures)


def test_the_rank_with_the_least_decides() -> None:
    log = "vllm\n" + "".join(f"Available KV cache memory: {size} GiB\n" for size in (5.10, 4.99, 5.20))
    assert parse_log(log).figures["kv_bytes"] == 4.99 * GIB


def test_an_old_log_is_explained_from_the_device_to_the_blocks(tmp_path: Path) -> None:
    found = explained(tmp_path, VLLM_OLD, LLAMA_8B)
    assert found["engine"] == "vllm 0.6"
    # 0.9 x 23.58 - 17.98 - 0.35
    assert step(found, "KV cache")["predicted"] / GIB == pytest.approx(0.9 * 23.58 - 17.98 - 0.35)
    for what in ("KV cache", "blocks", "concurrency"):
        assert step(found, what)["unexplained"] == 0


def test_a_new_log_of_a_hybrid_is_explained_with_its_groups(tmp_path: Path) -> None:
    found = explained(tmp_path, VLLM_NEW, QWEN_35_27B, tp=2, kv_dtype="fp8", engine="vllm-2026-08")
    assert step(found, "tokens")["predicted"] == 302_921
    assert step(found, "tokens")["unexplained"] == 0
    assert any("4 groups of 16 layers" in rule for rule in found["rules"])
    assert "not tokens that any request may have" in step(found, "tokens")["says"]


def test_windows_at_full_length_are_a_part_of_their_own(tmp_path: Path) -> None:
    log = "vllm: Available KV cache memory: 20.00 GiB\nGPU KV cache size: 291,264 tokens\nmax_model_len=131072"
    found = explained(tmp_path, log, GPT_OSS, engine="vllm-0.8.5")
    # 18 layers hold 2 KiB a token for all but 128 of 131,072
    assert step(found, "windows at full length")["predicted"] == 18 * 2048 * (131_072 - 128)


def test_what_is_wrong_is_left_over(tmp_path: Path) -> None:
    log = VLLM_NEW.replace("302,921", "250,000")
    found = explained(tmp_path, log, QWEN_35_27B, tp=2, kv_dtype="fp8", engine="vllm")
    assert step(found, "tokens")["unexplained"] == pytest.approx((250_000 - 302_921) / 250_000)
    assert any("-21.17%" in line for line in explanation_lines(found))


def test_sglang_prints_gb_and_means_gib(tmp_path: Path) -> None:
    found = explained(tmp_path, SGLANG, LLAMA_8B)
    assert step(found, "KV cache")["predicted"] == (81_920 + 1) * 131_072
    assert step(found, "KV cache")["unexplained"] == 0


@pytest.mark.parametrize("log", [LLAMA_OLD, LLAMA_NEW], ids=["old", "new"])
def test_llama_cpp_is_explained_by_its_cells(tmp_path: Path, log: str) -> None:
    assert step(explained(tmp_path, log, LLAMA_8B), "KV cache")["unexplained"] == 0


def test_tensorrt_llm_is_explained_by_its_blocks(tmp_path: Path) -> None:
    found = explained(tmp_path, TRTLLM, LLAMA_8B)
    assert step(found, "tokens")["unexplained"] == 0
    assert "a block is 64 tokens" in step(found, "tokens")["says"]


@pytest.mark.parametrize(
    ("text", "says"),
    [("hello\n", "has no line of a known engine"), ("vllm starts\n", "states no memory"), (None, "cannot be read")],
)
def test_a_log_without_figures_is_refused(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "start.log"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        explain(LLAMA_8B, Asked.of(), str(file))
