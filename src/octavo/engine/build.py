"""From what was asked to a running engine: load, read the geometry, decide, allocate.

The only place that knows all the parts. Whoever imports it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from octavo import __version__
from octavo.config import Config
from octavo.deciding import decide
from octavo.deployment import Deployment
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.errors import ConfigError
from octavo.geometry.dtypes import dtype_named
from octavo.geometry.model import ModelGeometry
from octavo.kernels.choose import choose_attention
from octavo.kernels.interface import AttentionBackend
from octavo.kernels.latent import LatentAttention
from octavo.memory.cache import KVCache
from octavo.memory.keys import KeySpace
from octavo.memory.tiering import Below, tiered_cache
from octavo.models.checked import checked_model
from octavo.models.fused import KnownDiffers
from octavo.models.load import LoadedModel, Progress, load_checkpoint
from octavo.models.rope import fix_rope
from octavo.models.weights_digest import weights_digest
from octavo.policy.bundle import Policies
from octavo.policy.eviction import eviction_named
from octavo.policy.placement import placement_named
from octavo.runtime.cpu_threads import pin_threads, settle_threads
from octavo.runtime.device import Device, device_facts, resolve_device
from octavo.runtime.executor import TorchExecutor
from octavo.runtime.grammar import Grammars
from octavo.runtime.mover import Budget
from octavo.runtime.pool_pages import AHEAD_BYTES, START_S, ahead_bytes
from octavo.runtime.sampler import Sampler
from octavo.runtime.tiers import DiskAsked, OpenTiers, open_tiers
from octavo.scheduling.audit import Audit
from octavo.scheduling.core import EngineCore
from octavo.scheduling.limits import Limits
from octavo.scheduling.plan import Executor
from octavo.scheduling.scheduler import Scheduler

NO_CONTEXT = 2**40
"""Tokens that a model may hold whose config names no context: the pool alone is its limit."""


def build_engine(
    config: Config,
    progress: Progress | None = None,
    embedded_whole: Callable[[], bool] | None = None,
    *,
    keeps_verdicts: bool = False,
) -> Engine:
    """Load the model and build the engine around it. Raises `ConfigError` or `ModelError`.

    `embedded_whole`: see `load_checkpoint`. `keeps_verdicts`: see `checked_model`.
    """
    device = resolve_device(config.engine.device)
    try:
        return engine_for(config, _loaded(config, device, progress, embedded_whole), device, keeps=keeps_verdicts)
    except KnownDiffers:  # the verdict is forgotten, and the weights may be packed by now: all again
        return engine_for(config, _loaded(config, device, progress, None), device)


def _loaded(
    config: Config, device: Device, progress: Progress | None, embedded_whole: Callable[[], bool] | None
) -> LoadedModel:
    asked = config.model
    return load_checkpoint(
        asked.model,
        revision=asked.revision,
        dtype=asked.dtype,
        device=device,
        max_model_len=asked.max_model_len,
        tokenizer=asked.tokenizer,
        skip_tokenizer_init=asked.skip_tokenizer_init,
        progress=progress,
        embedded_whole=embedded_whole,
    )


def engine_for(config: Config, loaded: LoadedModel, device: Device, *, keeps: bool = False) -> Engine:
    """An engine around a model that is loaded already. `keeps`: see `checked_model`."""
    threads, why_threads = settle_threads(config.engine.threads, config.engine.pin, device)
    backend, why_backend = choose_attention(config.engine.attention_backend, device)
    checked = checked_model(config, loaded, device, backend, keeps=keeps)
    loaded, geometry, fused = checked.loaded, checked.geometry, checked.fused
    facts = device_facts(
        device,
        weights_bytes=loaded.weights_bytes,
        weights_dtype=dtype_named(str(loaded.dtype)),
        block_order=backend.block_order,
    )
    name, why = _kernels(config, geometry, backend.name, why_backend)
    facts = replace(facts, attention_backend=name, attention_reason=why)
    facts = replace(facts, linear_backend=checked.linear, linear_reason=checked.why_linear)
    facts = replace(facts, threads=threads, threads_reason=why_threads)
    deployment = decide(config, geometry, facts)
    notes = fix_rope(loaded.model, deployment.max_model_len)
    grammars = None if loaded.tokenizer is None else Grammars(loaded.tokenizer, _vocab_size(loaded))
    core = build_core(config, deployment, loaded, backend, grammars)
    intake = Intake(
        loaded.tokenizer,
        defaults=loaded.generation.sampling,
        eos_token_ids=loaded.generation.eos_token_ids,
        vocab_size=core.scheduler.limits.vocab_size,
        seed=config.model.seed,
        grammars=grammars,
        sanitize_control_tokens=config.model.sanitize_control_tokens,
    )
    engine = Engine(core, intake, deployment)
    engine.notes = (*loaded.notes, checked.served, *notes, *(() if fused is None else (str(fused),)))
    engine.notes = (*engine.notes, *_pages_ahead(config, deployment, core.executor))
    if config.engine.pin:
        engine.notes = (*engine.notes, f"{threads} threads are {pin_threads()}")
    engine.model_name = loaded.name
    return engine


WAIT_TOKENS = {"cuda": 200}
"""Of `Reuse.wait_tokens`, by device: where a step takes as long as its weights or its products, three quarters of the
tokens at which both are equal (`cost.waiting`); in bf16 115 on an A100, 155 on an H200, 221 on an H100, 314 on an L40S.
On processors a block's products take longer than its step's weights.
"""


def build_core(
    config: Config,
    deployment: Deployment,
    loaded: LoadedModel,
    backend: AttentionBackend,
    grammars: Grammars | None = None,
) -> EngineCore:
    """The scheduler and the executor over one pool of `deployment.slabs`."""
    policies = Policies.named(
        allocation=config.cache.allocation,
        batching=config.scheduler.batching,
        admission=config.scheduler.admission,
        reuse=config.cache.reuse,
        preemption=config.scheduler.preemption,
        wait_tokens=config.cache.prefix_wait_tokens or WAIT_TOKENS.get(loaded.model.device.type, 1),
    )
    vocab_size = _vocab_size(loaded)
    rows = deployment.max_num_seqs
    limits = Limits(
        max_num_seqs=rows,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        max_model_len=deployment.max_model_len,
        vocab_size=vocab_size,
        attention_mode=f"{deployment.geometry.attention_mode}/{deployment.facts.attention_backend or backend.name}",
        cache_dtype=str(deployment.kv_dtype),
        context_tokens=config.model.max_model_len or deployment.geometry.context_length or NO_CONTEXT,
    )
    executor = TorchExecutor(
        loaded.model,
        deployment.layout,
        deployment.slabs,
        rows=rows,
        sampler=Sampler(rows, vocab_size, loaded.model.device, grammars),
        backend=backend,
    )
    keys = _key_space(config, deployment, loaded) if policies.reuse.shares else None
    eviction = eviction_named(config.cache.eviction)
    tiering = mover = None
    if deployment.host_slabs:
        tiers = _open_tiers(config, deployment, executor, keys)
        mover = tiers.mover
        below = Below(
            deployment.host_slabs,
            placement_named(config.cache.placement),
            eviction_named(config.cache.host_eviction),
            disk_slots=tiers.disk_slots,
            stored=tiers.stored,
            timeout_s=config.cache.transfer_timeout,
            disk_eviction=eviction_named(config.cache.disk_eviction),
        )
        cache, tiering = tiered_cache(deployment.layout, deployment.slabs, rows, below, keys=keys, eviction=eviction)
    else:
        contiguous = policies.allocation.contiguous
        cache = KVCache(deployment.layout, deployment.slabs, rows, contiguous=contiguous, keys=keys, eviction=eviction)
    return EngineCore(
        Scheduler(cache, limits, policies, tiering),
        executor,
        depth=config.engine.pipeline_depth,
        audit=Audit() if config.engine.audit else None,
        mover=mover,
    )


def _pages_ahead(config: Config, deployment: Deployment, executor: Executor) -> tuple[str, ...]:
    """Have memory for the pool from the system before it is written; said where it is more than a little."""
    if not isinstance(executor, TorchExecutor):
        return ()
    named = (config.cache.num_gpu_blocks_override, config.cache.max_kv_tokens) != (None, None)
    size = ahead_bytes(deployment.slabs * deployment.layout.slab_bytes, named)
    executor.ask_ahead(size, START_S if named else 0.0)
    more = f"{size:,} B of KV cache are taken from the system at the start or while idle, before they are used"
    return (more,) if size > AHEAD_BYTES else ()


def _open_tiers(config: Config, deployment: Deployment, executor: TorchExecutor, keys: KeySpace | None) -> OpenTiers:
    asked, disk = config.cache, None
    if asked.disk_path is not None:
        disk = DiskAsked(Path(asked.disk_path), asked.disk_bytes or 0, asked.disk_shared)
    return open_tiers(
        executor.arena,
        deployment.host_slabs,
        fingerprint="" if keys is None else keys.fingerprint,
        disk=disk,
        budget=Budget(asked.transfer_bytes_per_second, asked.disk_bytes_per_second),
    )


def _kernels(config: Config, geometry: ModelGeometry, name: str, why: str) -> tuple[str, str]:
    """Which attention kernels serve a model, and why: latents have their own."""
    if "latent" not in geometry.components:
        return name, why
    if config.engine.attention_backend == "cpu":
        raise ConfigError("attention_backend", "cpu", "latents (MLA) are read by plain torch; use auto or reference")
    return LatentAttention.name, "latents (MLA) have kernels of their own, in plain torch"


def _key_space(config: Config, deployment: Deployment, loaded: LoadedModel) -> KeySpace:
    """What blocks of this engine have in common: weights, how they compute, and how state is laid out.

    Blocks on a disk may be found by a process that loaded other weights, or computes in another way: there weights are
    named to the last bit, and so is the version.
    """
    weights = version = ""
    if config.cache.disk_path is not None:
        weights, version = weights_digest(loaded.weight_files), __version__
    parts = (
        version,
        loaded.fingerprint,
        weights,
        str(loaded.dtype),
        deployment.facts.linear_backend,
        deployment.layout.signature,
    )
    return KeySpace(" ".join(parts), deployment.block_size)


def _vocab_size(loaded: LoadedModel) -> int:
    """The width of the logits, which may exceed the tokenizer's vocabulary."""
    head = loaded.model.get_output_embeddings()
    width = getattr(head, "out_features", None)  # a packed head would unpack all its rows to tell
    return int(head.weight.shape[0] if width is None else width)
