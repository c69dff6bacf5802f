"""`plan()`: from a model and what was asked to a `Plan`, without torch, in well under a second.

Owns the order of the decisions: geometry, the engine's charge, one device's share, the ledger, what
fits, what limits, what could be changed. Every figure comes from the modules it calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.model import ModelGeometry
from octavo.geometry.parallel import Parallelism, device_geometries
from octavo.memory.slabs import SLABS_AT_LEAST
from octavo.planner.accelerators import Accelerator, device_named, from_toml
from octavo.planner.asked import Asked
from octavo.planner.budget import make_budget, runtime_lines, step_limits
from octavo.planner.capacity import capacity_of
from octavo.planner.charging import AnyPaging, ChargeLimits, paging_for
from octavo.planner.engines import Engine, as_kept_by, engine_named, kv_dtype_named, own_kv_dtype
from octavo.planner.ledger import Line, StepLimits
from octavo.planner.levers import Scene, levers_of
from octavo.planner.roofline import Bounds, Machine, limits_of, roofline
from octavo.planner.source import Model, Source, own_dtype, says_recurrent_dtype, source_of
from octavo.planner.summary import notes_of, state_summary, warnings_of
from octavo.planner.values import Budget, Plan, Weights
from octavo.planner.weights import weights_of
from octavo.planner.workload import compare, lengths_of

DEFAULT_CONTEXT = 8192
"""The reference where neither the user nor the config says one."""
CONTEXTS = (1024, 8192, 32768)
CURVE_POINTS = 32


def plan(model: Model = None, **options: Any) -> Plan:
    """How much attention state `model` keeps, and what fits where.

    `model` is a `config.json`, a model's directory, or the parsed config; without one, `layers`, `kv_heads`
    and `head_dim` describe it. `options` are those of `octavo plan` with underscores, sizes as
    numbers of bytes or texts such as `80GiB`: see `octavo.planner.asked.Asked`. Raises `ConfigError`.
    """
    return plan_for(model, Asked.of(**options))


@dataclass(frozen=True, slots=True)
class Ground:
    """What all later decisions stand on."""

    source: Source
    asked: Asked
    engine: Engine
    geometry: ModelGeometry
    """The whole model, in the types that the engine keeps."""
    device: ModelGeometry
    """The fullest device's share of it."""
    accelerator: Accelerator | None
    memory_bytes: int | None
    weights: Weights
    seqs: int
    step_tokens: int
    context: int

    @property
    def most_kv_bytes(self) -> int:
        """What the KV cache of a device will not exceed, before anything is known of its runtime."""
        if self.asked.kv_cache_memory_bytes is not None:
            return self.asked.kv_cache_memory_bytes
        usable = int((self.memory_bytes or 0) * self.asked.utilization) - (self.weights.device_bytes or 0)
        return max(0, usable)

    @property
    def charge(self) -> ChargeLimits:
        return ChargeLimits(
            block_tokens=self.asked.block_size,
            step_tokens=self.step_tokens,
            max_num_seqs=self.seqs,
            speculative_tokens=self.asked.speculative_tokens,
            most_slab_bytes=self.most_kv_bytes // SLABS_AT_LEAST,
        )

    @property
    def step_limits(self) -> StepLimits:
        """Of the largest step, before anything is known of blocks."""
        return step_limits(seqs=self.seqs, step_tokens=self.step_tokens, length=self.context, block_tokens=1, blocks=0)


def ground_of(model: Model, asked: Asked) -> Ground:
    source = source_of(model, asked)
    engine = engine_named(asked.engine)
    accelerator = None
    if asked.device is not None:
        rows = from_toml(asked.device_file) if asked.device_file else ()
        accelerator = device_named(asked.device, rows)
        if asked.quantization is not None and accelerator.kind != "cpu":
            remedy = f"weights are rounded on CPUs alone, and {accelerator.name} is none; leave it out"
            raise ConfigError("quantization", asked.quantization, remedy)
    geometry = _geometry(
        source, asked, engine, computes_fp4=accelerator is not None and "fp4" in accelerator.flops_per_s
    )
    memory = asked.memory or (accelerator.memory_bytes if accelerator else None)
    context = asked.context or (max(asked.contexts) if asked.contexts else None)
    context = context or geometry.context_length or DEFAULT_CONTEXT
    seqs, step = _step(engine, asked, memory, accelerator, context)
    device = _fullest(geometry, asked, context)
    weights = weights_of(source, asked, engine, geometry)
    return Ground(source, asked, engine, geometry, device, accelerator, memory, weights, seqs, step, context)


def _geometry(source: Source, asked: Asked, engine: Engine, *, computes_fp4: bool) -> ModelGeometry:
    """The whole model's, in the element types that the engine keeps."""
    own, _ = own_dtype(source.config)
    automatic = asked.kv_dtype.lower() == "auto"
    if engine.name == "octavo":
        return geometry_from_config(source.config, own if automatic else kv_dtype_named(engine, asked.kv_dtype))
    plain = geometry_from_config(source.config, BF16, model_dtype=own)
    if automatic:
        dtype = own_kv_dtype(engine, plain, own, computes_fp4=computes_fp4)
    else:
        dtype = kv_dtype_named(engine, asked.kv_dtype)
        if dtype.quantised and engine.name != "llamacpp":
            geometry_from_config(source.config, dtype, model_dtype=own)  # refuses what a kind cannot be kept in
    # vLLM keeps a recurrence in the model's type unless the config itself names another
    recurrent = own if engine.name == "vllm" and not says_recurrent_dtype(source.config) else None
    return as_kept_by(engine, plain, dtype, recurrent)


def _step(
    engine: Engine, asked: Asked, memory: int | None, accelerator: Accelerator | None, context: int
) -> tuple[int, int]:
    """Sequences at once and tokens of a step at most: as asked, or the engine's own defaults."""
    large = _large_vllm(engine, memory, accelerator)
    seqs = asked.max_num_seqs or (1 if engine.name == "llamacpp" else 1024 if large else 256)
    tokens = asked.max_num_batched_tokens
    if tokens is not None:
        return (min(seqs, tokens) if engine.name == "vllm" and asked.max_num_seqs is None else seqs), tokens
    if engine.name == "vllm":
        return seqs, max(seqs, _vllm_step(engine, context, large=large))
    default = {"llamacpp": 512, "sglang": 8192, "trtllm": 8192}.get(engine.name, 2048)
    return seqs, default if engine.name == "llamacpp" else max(default, seqs)


def _large_vllm(engine: Engine, memory: int | None, accelerator: Accelerator | None) -> bool:
    """Whether vLLM's second engine takes larger defaults: on large devices of the generation that computes in fp8."""
    new = accelerator is None or "fp8" in accelerator.flops_per_s
    return engine.name == "vllm" and engine.since(0, 8) and new and memory is not None and memory >= 70 * 2**30


def _vllm_step(engine: Engine, context: int, *, large: bool) -> int:
    """Its first engine took whole prompts up to 32,768."""
    if not engine.since(0, 8):
        return context if context <= 32_768 else 2048
    return 8192 if large else 2048


def _fullest(geometry: ModelGeometry, asked: Asked, context: int) -> ModelGeometry:
    stages = device_geometries(geometry, Parallelism(tensor=asked.tp, pipeline=asked.pp, data=asked.dp))
    return max(stages, key=lambda stage: stage.bytes_kept(context))


def plan_for(model: Model, asked: Asked) -> Plan:
    """The same as `plan`, from options that are checked already."""
    ground = ground_of(model, asked)
    paging = paging_for(ground.engine, ground.device, ground.charge)
    weights = ground.weights
    budget = _budget(ground, paging, weights)
    kv_bytes = budget.kv.predicted_bytes if budget else asked.kv_cache_memory_bytes
    contexts = _contexts(ground)
    capacity = None if kv_bytes is None else capacity_of(paging, kv_bytes, ground.context, contexts)
    machine = machine_of(ground, weights)
    devices = asked.tp * asked.pp * asked.dp
    limits = table = None
    if capacity is not None:
        bounds = Bounds(
            context=ground.context,
            kv_sequences=capacity.sequences[ground.context],
            kv_tokens=round(capacity.concurrency[ground.context] * ground.context),
            max_num_seqs=ground.seqs,
            step_tokens=ground.step_tokens,
            slo_s=asked.slo_tpot_ms / 1e3 if asked.slo_tpot_ms else None,
            machine=machine,
            weights=weights,
        )
        limits = limits_of(bounds)
    if machine is not None:
        batch = asked.batch_size or (max(1, min(limit.sequences for limit in limits.all)) if limits else 1)
        table = roofline(machine, ground.context, batch, asked.tp * asked.pp, asked.price)
    lengths = lengths_of(asked, ground.geometry.context_length)
    scene = Scene(
        ground.engine, ground.geometry, ground.device, paging, ground.charge, kv_bytes, ground.context, lengths
    )
    return Plan(
        model=ground.source.name,
        model_type=ground.geometry.model_type,
        engine=ground.engine.label,
        device=ground.accelerator,
        memory_bytes=ground.memory_bytes,
        devices=devices,
        tp=asked.tp,
        pp=asked.pp,
        dp=asked.dp,
        context=ground.context,
        context_length=ground.geometry.context_length,
        max_num_seqs=ground.seqs,
        max_num_batched_tokens=ground.step_tokens,
        weights=weights,
        state=state_summary(ground.geometry, ground.device, ground.context),
        sequence_bytes={context: ground.geometry.bytes_kept(context) for context in contexts},
        sequence_bytes_per_device={context: paging.bytes_for(context) for context in contexts},
        curve=_curve(ground, paging, contexts[-1]),
        budget=budget,
        capacity=capacity,
        limits=limits,
        roofline=table,
        workload=None if lengths is None else compare(lengths, ground.device, paging, kv_bytes),
        levers=levers_of(scene, asked, ground.accelerator),
        rules=paging.notes,
        warnings=warnings_of(
            ground.asked, ground.geometry, ground.context, ground.accelerator, (budget, capacity, weights)
        ),
        notes=notes_of(ground.geometry, ground.engine, by_hand=asked.manual),
    )


def _contexts(ground: Ground) -> tuple[int, ...]:
    """As asked, or a few lengths up to the model's own; the reference context always."""
    if ground.asked.contexts:
        return tuple(sorted({*ground.asked.contexts, ground.context}))
    own = ground.geometry.context_length
    most = max(ground.context, own or 0)
    return tuple(sorted({*(n for n in CONTEXTS if n <= most), ground.context, *((own,) if own else ())}))


def _curve(ground: Ground, paging: AnyPaging, longest: int) -> tuple[tuple[int, int, int], ...]:
    lengths = sorted({max(1, longest * step // CURVE_POINTS) for step in range(CURVE_POINTS + 1)})
    return tuple((n, ground.device.bytes_kept(n), paging.bytes_for(n)) for n in lengths)


def _budget(ground: Ground, paging: AnyPaging, weights: Weights) -> Budget | None:
    if ground.memory_bytes is None:
        return None
    line = Line("weights", weights.device_bytes or 0, weights.basis)
    unit = paging.unit_bytes
    limits = step_limits(
        seqs=ground.seqs,
        step_tokens=ground.step_tokens,
        length=ground.context,
        block_tokens=paging.block_tokens,
        blocks=max(0, ground.memory_bytes - line.predicted_bytes) // max(1, paging.page_bytes),
    )
    runtime = runtime_lines(ground.engine, ground.asked, ground.geometry, limits)
    return make_budget(ground.engine, ground.asked, ground.memory_bytes, line, runtime, unit)


def machine_of(ground: Ground, weights: Weights) -> Machine | None:
    """None without a device, or where nothing is known of the weights."""
    if ground.accelerator is None or not weights.device_bytes:
        return None
    shares = ground.asked.tp * ground.asked.pp
    total = weights.total_parameters / shares if weights.total_parameters else weights.device_bytes / 2
    active = weights.active_parameters / shares if weights.active_parameters else total
    bits = min(16, max(4, round(8 * weights.device_bytes / total))) if total else 16
    return Machine(
        accelerator=ground.accelerator,
        geometry=replace(ground.device, num_attention_heads=ground.device.num_attention_heads),
        weights_bytes=weights.device_bytes,
        parameters=total,
        active_parameters=active,
        weight_bits=bits,
    )
