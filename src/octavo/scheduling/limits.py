"""The engine's bounds, and the check of one request against them.

The same two figures, `context_tokens` and `pool_tokens`, are what the start table prints and what
admission counts with: there is no second number for capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import CapacityError, ConfigError, RequestError
from octavo.memory.cache import KVCache
from octavo.policy.allocation import Allocation, Extent
from octavo.scheduling.request import Request, prompt_array, validate_token_fields


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    """Prompt and output of one sequence, together."""
    vocab_size: int
    max_waiting: int | None = None
    """Requests that may wait; more are refused."""
    attention_mode: str = ""
    cache_dtype: str = ""
    """These two are what records say of every request."""
    context_tokens: int | None = None
    """What the model's context, or the one asked for, holds. Above `max_model_len`: that was cut to the pool."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"must be at least max_num_seqs={self.max_num_seqs}, so that every running sequence can decode",
            )
        if self.context_tokens is not None and self.context_tokens < self.max_model_len:
            raise ConfigError("max_model_len", self.max_model_len, f"the context holds {self.context_tokens}")


def checked_limit(request: Request, limits: Limits, cache: KVCache, allocation: Allocation) -> int:
    """Prompt and output tokens that this request may reach at most.

    Raises `RequestError` for what is wrong with it, `CapacityError` when it could never fit.
    """
    prompt_array(request.prompt_token_ids, vocab_size=limits.vocab_size)
    validate_token_fields(request.params, limits.vocab_size)
    prompt, asked = request.prompt_tokens, request.params.max_tokens
    if (prompt >= limits.max_model_len and asked != 0) or prompt > limits.max_model_len:
        raise _too_long("prompt", request, prompt + (asked != 0), limits, cache)
    pool = cache.max_tokens_per_sequence()
    if asked is None:
        limit = min(limits.max_model_len, pool + 1)
        if prompt >= limit:
            raise _never_fits("prompt", cache, prompt, f"a prompt of {prompt} tokens")
    else:
        limit = prompt + asked
        if limit > limits.max_model_len:
            raise _too_long("max_tokens", request, limit, limits, cache)
    if request.params.min_tokens > limit - prompt:
        raise RequestError("min_tokens", request.params.min_tokens, f"only {limit - prompt} tokens can be generated")
    if allocation.needs_true_length:
        if request.true_output_tokens is None:
            raise RequestError("true_output_tokens", None, f"{allocation.name} needs a trace that knows true lengths")
        limit = min(limit, prompt + max(1, request.true_output_tokens))
    if asked == 0:
        return prompt
    positions = allocation.reserve_tokens(extent_of(request, limit, limit - 1, limits.max_model_len))
    if _slabs_at_least(cache, positions) > cache.pool.slabs:
        field = "max_tokens" if prompt <= pool else "prompt"
        raise _never_fits(field, cache, positions, f"prompt {prompt} + {limit - prompt} output tokens")
    if allocation.contiguous:
        # A run is never extended: a sequence ends where its run does, if nothing ends it before.
        limit = min(limit, positions + 1)
    return limit


def extent_of(request: Request, limit: int, upto: int, context_limit: int) -> Extent:
    true_length = None
    if request.true_output_tokens is not None:
        true_length = min(limit, request.prompt_tokens + max(1, request.true_output_tokens)) - 1
    return Extent(upto=upto, declared=limit - 1, true_length=true_length, context_limit=context_limit)


def _too_long(field: str, request: Request, total: int, limits: Limits, cache: KVCache) -> RequestError:
    """For `total` tokens past `max_model_len`: a larger KV cache helps where that was cut to the pool."""
    prompt, most = request.prompt_tokens, limits.max_model_len
    context = most if limits.context_tokens is None else limits.context_tokens
    if total <= context:
        return _never_fits(field, cache, total, f"prompt {prompt} + {total - prompt} output tokens")
    cut = "" if most == context else f", of which this KV cache has room for {most}"
    if field == "prompt":
        return RequestError(field, f"{prompt} tokens", f"the context holds {context}{cut}; shorten the prompt")
    return RequestError(
        field,
        total - prompt,
        f"prompt {prompt} + max_tokens {total - prompt} = {total} passes the context of {context}{cut}; "
        f"ask for at most {most - prompt}",
    )


def _never_fits(field: str, cache: KVCache, positions: int, what: str) -> CapacityError:
    need, have = _slabs_at_least(cache, positions), cache.pool.slabs
    groups, pool = cache.layout.groups, cache.max_tokens_per_sequence()
    one = len(groups) == 1 and groups[0].block_tokens
    unit = f"blocks of {one} tokens" if one else f"slabs of {cache.layout.slab_bytes:,} B"
    return CapacityError(
        field,
        what,
        f"needs {need} {unit}, the whole pool has {have} ({pool} tokens): it can never fit; "
        "shorten the prompt, ask for fewer tokens, or start with a larger KV cache",
    )


def _slabs_at_least(cache: KVCache, positions: int) -> int:
    """Slabs with which one sequence can just reach `positions`: one position at a time."""
    counts = cache.blocks_charged(positions, 1)
    return sum(-(-n // g.blocks_per_slab) for n, g in zip(counts, cache.layout.groups, strict=True))
