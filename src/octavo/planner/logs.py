"""What an engine printed at start, read from its log: vLLM (old and new wording), SGLang, TensorRT-LLM, llama.cpp.

Owns the wordings and nothing else; `against` explains the figures. A line that is not understood is left
alone, and the last of several statements counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from octavo.errors import ConfigError

GIB, MIB = 2**30, 2**20
_LARGEST = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Printed:
    """Figures by name, in bytes, tokens and blocks, of one device unless a name says otherwise."""

    engine: str
    version: str
    figures: Mapping[str, float] = field(default_factory=dict)
    rounding: Mapping[str, float] = field(default_factory=dict)
    """By name: half a unit of the last place that was printed, in the figure's own unit."""
    other: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    """By name: how often it was printed, by several ranks or again later."""

    def times(self, name: str) -> int:
        return self.ranks.get(name, 0)

    def get(self, name: str) -> float | None:
        return self.figures.get(name)


_NUM = r"([\d.,]*\d)"
_VLLM = (
    ("blocks", rf"# (?:GPU|cuda) blocks: {_NUM}", 1),
    ("cpu_blocks", rf"# CPU blocks: {_NUM}", 1),
    ("tokens", rf"GPU KV cache size: {_NUM} tokens", 1),
    ("kv_bytes", rf"Available KV cache memory: {_NUM} GiB", GIB),
    ("kv_bytes", rf"(?:memory|memory spent) reserved for KV Cache (?:is|=) {_NUM} ?GiB", GIB),
    ("kv_bytes", rf"the rest of the memory reserved for KV Cache is {_NUM} ?GiB", GIB),
    ("weights_bytes", rf"[Mm]odel (?:weights (?:take|took)|loading took) {_NUM} ?(?:GiB|GB)", GIB),
    ("total_bytes", rf"total_gpu_memory={_NUM} ?GiB", GIB),
    ("peak_bytes", rf"peak_torch_memory={_NUM} ?GiB", GIB),
    ("non_torch_bytes", rf"non_torch_memory={_NUM} ?GiB", GIB),
    ("kv_bytes", rf"kv_cache_size={_NUM} ?GiB", GIB),
    ("utilization", rf"gpu_memory_utilization={_NUM}", 1),
    ("non_torch_bytes", rf"non_torch_memory takes {_NUM} ?GiB", GIB),
    ("activation_bytes", rf"PyTorch activation peak memory takes {_NUM} ?GiB", GIB),
    ("total_bytes", rf"total_gpu_memory \({_NUM} ?GiB\)", GIB),
    ("utilization", rf"gpu_memory_utilization \({_NUM}\)", 1),
    ("budget_bytes", rf"= {_NUM} ?GiB", GIB),
    ("concurrency", rf"Maximum concurrency for [\d,]+ tokens per request: {_NUM}x", 1),
    ("context", rf"Maximum concurrency for {_NUM} tokens per request", 1),
    ("context", rf"max_(?:model|seq)_len[=:]\s*{_NUM}", 1),
    ("context", rf"model's max seq(?:uence)? len(?:gth)? \({_NUM}\)", 1),
    ("needed_bytes", rf"\({_NUM} GiB KV cache is needed", GIB),
    ("kv_bytes", rf"available KV cache memory \({_NUM} GiB\)", GIB),
    ("block_tokens", rf"[Ss]etting attention block size to {_NUM} tokens", 1),
    ("block_tokens", rf"block_size[=:]\s*{_NUM}", 1),
    ("padding_percent", rf"[Pp]adding mamba page size by {_NUM}%", 1),
    ("tp", rf"tensor_parallel_size[=:]\s*{_NUM}", 1),
    ("pp", rf"pipeline_parallel_size[=:]\s*{_NUM}", 1),
    ("max_num_batched_tokens", rf"max_num_batched_tokens[=:]\s*{_NUM}", 1),
    ("graph_bytes", rf"Graph capturing finished in [\d.]+ secs?, took {_NUM} GiB", GIB),
)
_SGLANG = (
    ("tokens", rf"KV Cache is allocated\.(?: dtype: [^,]+,)? #tokens: {_NUM}", 1),
    ("key_bytes", rf"K size: {_NUM} GB", GIB),
    ("value_bytes", rf"V size: {_NUM} GB", GIB),
    ("pool_bytes", rf"KV size: {_NUM} GB", GIB),
    ("tokens", rf"max_total_num_tokens={_NUM}", 1),
    ("context", rf"context_len(?:gth)?={_NUM}", 1),
    ("weights_bytes", rf"Load weight end\..*?mem usage={_NUM} GB", GIB),
    ("free_after_weights_bytes", rf"Load weight end\..*?avail mem={_NUM} GB", GIB),
    ("free_after_pool_bytes", rf"Memory pool end\. avail mem={_NUM} GB", GIB),
    ("utilization", rf"mem_fraction_static={_NUM}", 1),
    ("block_tokens", rf"page_size={_NUM}", 1),
    ("tp", rf"tp_size={_NUM}", 1),
    ("state_slots", rf"max_mamba_cache_size: {_NUM}", 1),
    ("conv_bytes", rf"conv_state size: {_NUM} ?GB", GIB),
    ("recurrent_bytes", rf"ssm_state size: {_NUM} ?GB", GIB),
)
_TRTLLM = (
    ("kv_bytes", rf"Allocated {_NUM} GiB for max tokens in paged KV cache", GIB),
    ("tokens", rf"max tokens in paged KV cache \({_NUM}\)", 1),
    ("blocks", rf"Number of blocks in KV cache primary pool: {_NUM}", 1),
    ("block_tokens", rf"(?:tokens per block|tokensPerBlock|tokens_per_block)[=:]?\s*{_NUM}", 1),
    ("context", rf"max_seq_len[=:]?\s*{_NUM}", 1),
    ("weights_bytes", rf"Engine size in bytes {_NUM}", 1),
    ("weights_mib", rf"Loaded engine size: {_NUM} MiB", MIB),
    ("total_bytes", rf"total memory {_NUM} ?GiB", GIB),
)
_LLAMA = (
    ("kv_bytes", rf"KV (?:self size|buffer size)\s*=\s*{_NUM} MiB", MIB),
    ("full_bytes", rf"size\s*=\s*{_NUM} MiB\s*\(\s*\d+ cells,\s*\d+ layers", MIB),
    ("key_bytes", rf"K \([^)]*\):\s*{_NUM} MiB", MIB),
    ("value_bytes", rf"V \([^)]*\):\s*{_NUM} MiB", MIB),
    ("state_bytes", rf"RS buffer size\s*=\s*{_NUM} MiB", MIB),
    ("context", rf"n_ctx\s*=\s*{_NUM}", 1),
    ("max_num_seqs", rf"n_seq_max\s*=\s*{_NUM}", 1),
    ("max_num_batched_tokens", rf"n_ubatch\s*=\s*{_NUM}", 1),
    ("weights_bytes", rf"model (?:buffer size|size)\s*=\s*{_NUM} MiB", MIB),
    ("weights_bytes", rf"model size\s*=\s*{_NUM} GiB", GIB),
)
_LEAST = ("kv_bytes", "blocks")
_ENGINES = {"vllm": _VLLM, "sglang": _SGLANG, "trtllm": _TRTLLM, "llamacpp": _LLAMA}
_SIGNS = (
    ("sglang", r"sglang|KV Cache is allocated|mem_fraction_static|max_total_num_tokens="),
    ("trtllm", r"TensorRT-LLM|\[TRT-LLM\]|paged KV cache"),
    ("llamacpp", r"llama_|llm_load|n_ctx\s*=|KV self size|ggml"),
    ("vllm", r"vllm|# (?:GPU|cuda) blocks|GPU KV cache size|KV Cache is|gpu_memory_utilization"),
)


def read_log(path: str) -> Printed:
    """The figures of a log file. Raises `ConfigError` where no known engine's figures stand in it."""
    try:
        file = Path(path).expanduser()
        if file.stat().st_size > _LARGEST:
            raise ConfigError(
                "against", path, f"is {file.stat().st_size:,} bytes; give the part that was printed at start"
            )
        text = file.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError("against", path, f"cannot be read ({error.strerror or error}); name a log file") from None
    return parse_log(text, path)


def parse_log(text: str, path: str = "log") -> Printed:
    found = [(len(re.findall(sign, text)), engine) for engine, sign in _SIGNS]
    engine = max(found, key=lambda pair: pair[0])[1] if any(count for count, _ in found) else None
    if engine is None:
        raise ConfigError(
            "against",
            path,
            "has no line of a known engine; give what vLLM, SGLang, TensorRT-LLM or llama.cpp printed at start",
        )
    figures: dict[str, float] = {}
    rounding: dict[str, float] = {}
    ranks: dict[str, int] = {}
    for name, pattern, unit in _ENGINES[engine]:
        hits = re.findall(pattern, text)
        if not hits or name in figures:
            continue
        plain = [hit.replace(",", "") for hit in hits if hit.count(".") < 2]
        if not plain:
            continue
        # every rank prints its own: the one with the least decides what all of them hold
        chosen = min(plain, key=float) if name in _LEAST else plain[-1]
        figures[name] = float(chosen) * unit
        ranks[name] = len(plain)
        places = len(chosen.partition(".")[2])
        rounding[name] = 0.5 * 10.0**-places * unit if places or unit > 1 else 0.0
    if engine == "llamacpp":
        figures |= _buffers(text)
    if not figures:
        raise ConfigError(
            "against", path, f"looks like {engine}'s and states no memory; give the part that was printed at start"
        )
    return Printed(engine, _version(engine, text), figures, rounding, _texts(text), ranks)


def _buffers(text: str) -> dict[str, float]:
    """llama.cpp states one KV buffer a device and, with windows, two caches of different cells: both count."""
    caches = re.findall(r"size\s*=\s*([\d.]+) MiB\s*\(\s*(\d+) cells,\s*(\d+) layers", text)
    if not caches:
        return {}
    return {
        "kv_bytes": sum(float(size) for size, _, _ in caches) * MIB,
        "cells": float(max(int(cells) for _, cells, _ in caches)),
    }


def _version(engine: str, text: str) -> str:
    patterns = {
        "vllm": r"(?:vLLM API server version|LLM engine \(v|vLLM version|vllm[ -]v?)\s*(\d+\.\d+[\w.]*)",
        "sglang": r"sglang[ =v-]*(\d+\.\d+[\w.]*)",
        "trtllm": r"TensorRT-LLM version:?\s*(\d+\.\d+[\w.]*)",
        "llamacpp": r"build:\s*(\d+)",
    }
    match = re.search(patterns[engine], text)
    if match is not None:
        return match.group(1)
    return "0.6" if engine == "vllm" and re.search(r"# GPU blocks", text) else ""


def _texts(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, pattern in (
        ("kv_dtype", r"kv_cache_dtype[=:]\s*['\"]?([a-z0-9_]+)"),
        ("key_type", r"K \((\w+)\)"),
        ("model", r"(?:model|model_path)[=:]\s*['\"]([^'\"]+)['\"]"),
    ):
        match = re.search(pattern, text)
        if match is not None:
            found[name] = match.group(1)
    return found
