"""From what was asked to a `Deployment`: every limit, the smallest of which wins, and the reason for each.

Pure arithmetic, as in `deployment`; nothing is allocated here. Raises `ConfigError` with the arithmetic where the model
does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.config import Config
from octavo.deployment import Deployment, Facts, tokens_in
from octavo.errors import ConfigError
from octavo.geometry.dtypes import Dtype, dtype_named
from octavo.geometry.exceptions import with_layers_unquantised
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.model import ModelGeometry
from octavo.memory.groups import served_groups
from octavo.memory.layout import BOUNDLESS, Layout, make_layout
from octavo.memory.served import require_kernels
from octavo.memory.slabs import SLABS_AT_LEAST
from octavo.planner.ledger import Line, StepLimits, make_ledger, predict_runtime

DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_BATCHED_TOKENS = 2048
DEFAULT_UTILIZATION = 0.9
CPU_SHARE, CPU_MOST_BYTES = 0.4, 4 * 2**30
"""On CPU, unless asked for more: this share of what is free now, and at most this many bytes."""


def decide(config: Config, geometry: ModelGeometry, facts: Facts) -> Deployment:
    """Everything that was not asked, and what became of what was.

    `geometry` is already in the element type that `kv_dtype_for` names. Raises `ConfigError` with
    the arithmetic where the model does not fit or keeps state that is not served.
    """
    require_kernels(geometry)
    layout = make_layout(
        served_groups(geometry.layers),
        config.cache.block_size,
        facts.block_order,
        most_slab_bytes=_least_limit(config, facts) // SLABS_AT_LEAST,
    )
    asked_len, len_reason = _asked_length(config, geometry)
    seqs, seqs_reason, tokens, tokens_reason = _asked_step(config)
    free = facts.free_bytes
    if free < 0:
        raise ConfigError(
            "model",
            f"{facts.weights_bytes:,} B of weights",
            f"do not fit: {facts.available_bytes:,} B are free of the {facts.total_bytes:,} B that "
            f"{facts.granted_by} grants; use a smaller model or dtype, or free memory",
        )
    most_slabs = free // layout.slab_bytes
    bound_len = min(asked_len or geometry.context_length or BOUNDLESS, max(1, tokens_in(layout, most_slabs, config)))
    bound = _limits(config, facts, (tokens, seqs, bound_len), _most_blocks(layout, most_slabs))
    host_slabs = _host_slabs(config, layout)
    below = _host_lines(facts, host_slabs * layout.slab_bytes, free)
    runtime_bytes = sum(n.predicted_bytes for n in (*predict_runtime(geometry, bound), *below))
    slabs, limit = _pool_slabs(config, layout, facts, runtime_bytes)
    held = tokens_in(layout, slabs, config)
    warnings: list[str] = []
    max_len, len_reason = _cut_length(asked_len, len_reason, held, warnings)
    seqs, seqs_reason = _cut_seqs(seqs, seqs_reason, _most_sequences(layout, slabs), tokens)
    final = _limits(config, facts, (tokens, seqs, max_len), _most_blocks(layout, slabs))
    ledger = make_ledger(
        geometry,
        weights_bytes=facts.weights_bytes,
        runtime=(*predict_runtime(geometry, final), *below),
        kv_bytes=slabs * layout.slab_bytes,
        headroom_bytes=config.cache.headroom_bytes,
    )
    reasons = {
        "max_model_len": len_reason,
        "max_num_seqs": seqs_reason,
        "max_num_batched_tokens": tokens_reason,
        **_plain_reasons(config, geometry, facts, limit),
    }
    return Deployment(
        config=config,
        geometry=geometry,
        facts=facts,
        layout=layout,
        slabs=slabs,
        max_model_len=max_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        ledger=ledger,
        host_slabs=host_slabs,
        limit=limit,
        reasons=tuple(reasons.items()),
        warnings=tuple(warnings),
    )


def _host_slabs(config: Config, layout: Layout) -> int:
    asked = config.cache.host_bytes
    if asked and asked < layout.slab_bytes:
        raise ConfigError("host_bytes", asked, f"is less than one block of {layout.slab_bytes:,} B; give more, or 0")
    return asked // layout.slab_bytes


def _host_lines(facts: Facts, size: int, free: int) -> tuple[Line, ...]:
    """On CPU the host tier takes of the same memory as the KV cache."""
    if not size or facts.device != "cpu":
        return ()
    if size >= free:
        remedy = (
            f"does not fit: on a CPU it is of the memory of which {free:,} B are free beside the weights; ask for less"
        )
        raise ConfigError("host_bytes", size, remedy)
    return (Line("host tier", size, "asked: blocks and suspended state below the KV cache (--host-bytes)"),)


def kv_dtype_for(config: Config, weights_dtype: Dtype) -> Dtype:
    """The element type in which keys and values are kept: what was asked, else what the model computes in."""
    asked = config.cache.kv_cache_dtype
    return weights_dtype if asked == "auto" else dtype_named(asked, field="kv_cache_dtype")


def served_geometry(config: Config, raw: Mapping[str, Any], weights_dtype: Dtype) -> ModelGeometry:
    """What each layer keeps when the model of `raw`, its config.json, is served as asked."""
    geometry = geometry_from_config(raw, kv_dtype_for(config, weights_dtype), model_dtype=weights_dtype)
    skipped = config.cache.kv_cache_dtype_skip_layers
    if skipped is None:
        return geometry
    return with_layers_unquantised(geometry, [name.strip() for name in skipped.split(",")], weights_dtype)


def _least_limit(config: Config, facts: Facts) -> int:
    """Bytes that the KV cache will not exceed, whatever the layout."""
    asked = config.cache.kv_cache_memory_bytes
    free = max(0, facts.free_bytes)
    return free if asked is None else min(free, asked)


def _most_blocks(layout: Layout, slabs: int) -> int:
    """Of the group that makes the most of a slab."""
    return slabs * max(g.blocks_per_slab for g in layout.groups)


def _most_sequences(layout: Layout, slabs: int) -> int:
    """Sequences that can hold one block of each group at once."""
    low, high = 0, _most_blocks(layout, slabs)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(-(-middle // g.blocks_per_slab) for g in layout.groups) <= slabs:
            low = middle
        else:
            high = middle - 1
    return low


def _asked_length(config: Config, geometry: ModelGeometry) -> tuple[int | None, str]:
    asked, context = config.model.max_model_len, geometry.context_length
    if asked is None:
        if context is None:
            return None, "the config names no context length: as much as the pool holds"
        return context, "the model's context length"
    if context is not None and asked > context:
        raise ConfigError("max_model_len", asked, f"the model was made for {context} positions; ask for at most that")
    return asked, "as asked"


def _cut_length(asked: int | None, reason: str, held: int, warnings: list[str]) -> tuple[int, str]:
    if asked is None or held >= asked:
        return (held if asked is None else asked), reason
    warnings.append(
        f"the context limit of {asked:,} tokens is larger than the pool, which holds {held:,}: "
        "longer requests are refused"
    )
    return held, f"cut from {asked:,} ({reason}): the pool holds no more"


def _asked_step(config: Config) -> tuple[int, str, int, str]:
    """(sequences, why, tokens, why) before the pool is known."""
    seqs, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    seqs_reason = "as asked" if seqs is not None else "default"
    tokens_reason = "as asked" if tokens is not None else "default"
    seqs = DEFAULT_MAX_NUM_SEQS if seqs is None else seqs
    if tokens is None:
        tokens = max(DEFAULT_BATCHED_TOKENS, seqs)
        if tokens > DEFAULT_BATCHED_TOKENS:
            tokens_reason = "raised to max_num_seqs: every running sequence needs a token a step"
    return seqs, seqs_reason, tokens, tokens_reason


def _cut_seqs(seqs: int, reason: str, most: int, tokens: int) -> tuple[int, str]:
    """No more rows than tokens in a step, nor than sequences that could hold a block each."""
    if seqs > tokens:
        seqs, reason = tokens, f"cut from {seqs:,} ({reason}): a step has {tokens:,} tokens, one per running sequence"
    if seqs > most:
        seqs, reason = most, f"cut from {seqs:,} ({reason}): the pool holds {most:,} sequences of one block"
    return seqs, reason


def _limits(config: Config, facts: Facts, sizes: tuple[int, int, int], kv_blocks: int) -> StepLimits:
    tokens, seqs, length = sizes
    return StepLimits(
        max_num_batched_tokens=tokens,
        max_num_seqs=min(seqs, tokens),
        max_model_len=length,
        block_tokens=config.cache.block_size,
        kv_blocks=kv_blocks,
        compute_dtype=facts.weights_dtype,
        device=facts.device.partition(":")[0],
        process_bytes=facts.process_bytes,
    )


def _pool_slabs(config: Config, layout: Layout, facts: Facts, runtime_bytes: int) -> tuple[int, str]:
    """Slabs of the pool and the limit that fixed them: the smallest of all that apply."""
    cache = config.cache
    limits = [_memory_limit(config, facts, runtime_bytes)]
    limits = [(max(0, size) // layout.slab_bytes, why) for size, why in limits]
    if cache.kv_cache_memory_bytes is not None:
        size = cache.kv_cache_memory_bytes
        limits.append((size // layout.slab_bytes, f"kv_cache_memory_bytes={size:,}"))
    if cache.num_gpu_blocks_override is not None:
        count = cache.num_gpu_blocks_override
        limits.append((count // layout.groups[0].blocks_per_slab, f"num_gpu_blocks_override={count:,}"))
    if cache.max_kv_tokens is not None:
        limits.append((_slabs_within(layout, cache.max_kv_tokens), f"max_kv_tokens={cache.max_kv_tokens:,}"))
    slabs, why = min(limits, key=lambda limit: limit[0])
    least = layout.slabs_for(1)
    if slabs < least:
        raise ConfigError(
            "kv_cache",
            f"{slabs} blocks",
            f"the pool must hold at least {least} of {layout.slab_bytes:,} B ({cache.block_size} tokens), but {why}",
        )
    return slabs, why


def _slabs_within(layout: Layout, tokens: int) -> int:
    """Slabs whose positions number at most `tokens`: a cap rounds down to whole blocks."""
    block_tokens = max(g.block_tokens for g in layout.groups)
    whole = tokens // block_tokens * block_tokens if block_tokens else tokens
    return layout.slabs_for(whole) if whole else 0


def _memory_limit(config: Config, facts: Facts, runtime_bytes: int) -> tuple[int, str]:
    """Bytes that memory leaves for KV, and the arithmetic in words."""
    cache, cpu = config.cache, facts.device == "cpu"
    # what the process held at start is in the ledger, but it is no longer in the free bytes
    needed = runtime_bytes - facts.process_bytes + cache.headroom_bytes
    free = facts.free_bytes - needed
    free_words = (
        f"{facts.free_bytes:,} B free with the weights loaded - {runtime_bytes - facts.process_bytes:,} runtime "
        f"- {cache.headroom_bytes:,} headroom = {max(0, free):,} B"
    )
    share = cache.gpu_memory_utilization
    if share is None and _capped(config):
        return free, f"what is left: {free_words}"
    if share is None and cpu:
        modest = min(int(CPU_SHARE * facts.free_bytes), CPU_MOST_BYTES)
        if modest < free:
            return modest, (
                f"the default on CPU: {CPU_SHARE:.0%} of {facts.free_bytes:,} B free, at most {CPU_MOST_BYTES:,} B; "
                "ask for more with gpu_memory_utilization or kv_cache_memory_bytes"
            )
        return free, f"what is left: {free_words}"
    share = DEFAULT_UTILIZATION if share is None else share
    granted = int(share * facts.total_bytes)
    left = granted - facts.weights_bytes - runtime_bytes - cache.headroom_bytes
    if free < left:
        return free, f"what is left: {free_words} (less than gpu_memory_utilization={share:g} would take)"
    return left, (
        f"gpu_memory_utilization={share:g} of {facts.total_bytes:,} B granted by {facts.granted_by} "
        f"- {facts.weights_bytes:,} weights - {runtime_bytes:,} runtime - {cache.headroom_bytes:,} headroom "
        f"= {max(0, left):,} B"
    )


def _capped(config: Config) -> bool:
    """Whether the user sized the pool in some other way than by a share of memory."""
    cache = config.cache
    return (cache.kv_cache_memory_bytes, cache.num_gpu_blocks_override, cache.max_kv_tokens) != (None, None, None)


def _plain_reasons(config: Config, geometry: ModelGeometry, facts: Facts, limit: str) -> dict[str, str]:
    auto = config.cache.kv_cache_dtype == "auto"
    return {
        "device": f"{facts.total_bytes:,} B granted by {facts.granted_by}, {facts.cores} cores",
        "geometry": "; ".join(geometry.notes) or "read from the model's config",
        "threads": facts.threads_reason,
        "attention_backend": facts.attention_reason,
        "linear_backend": facts.linear_reason,
        "bytes per token": "the sum over layers of keys and values",
        "kv_cache_dtype": "auto: what the model computes in" if auto else _kept_reason(geometry),
        "block_size": "positions per block",
        "KV cache": limit,
        "blocks": "KV cache / bytes of a block",
        "allocation": "where a sequence's state lives",
        "batching": "when a request enters and leaves",
        "admission": "who gets in",
        "preemption": "what becomes of a sequence that gives way",
        "reuse": "whether a finished block may serve another request",
        "host tier": "state moved from the device rather than lost",
        "placement": "which kept blocks are copied down, and when",
        "disk tier": "kept blocks that outlive the process",
    }


def _kept_reason(geometry: ModelGeometry) -> str:
    dtype = geometry.kv_dtype
    return f"as asked, with a scale of {dtype.scale_bytes} B for each token and head" if dtype.quantised else "as asked"
