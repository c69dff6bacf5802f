"""A plan as JSON: field names that are documented in docs/planner.md and stay as they are.

Owns the names alone. `capacity` and `ledger` are of one device; `state` and `sequence_bytes` of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import floor
from typing import Any

from octavo.planner.accelerators import Accelerator
from octavo.planner.values import Budget, Capacity, Plan, Workload

SCHEMA = 1


def as_json(plan: Plan) -> dict[str, Any]:
    """Plain values only: numbers, texts, lists and objects. What is not known is null."""
    return {
        "schema": SCHEMA,
        "model": {
            "name": plan.model,
            "model_type": plan.model_type,
            "context_length": plan.context_length,
            "total_parameters": plan.weights.total_parameters,
            "active_parameters": plan.weights.active_parameters,
            "weights_bytes": plan.weights.total_bytes,
        },
        "engine": plan.engine,
        "device": _device(plan.device, plan.memory_bytes),
        "parallel": {"devices": plan.devices, "tp": plan.tp, "pp": plan.pp, "dp": plan.dp},
        "asked": {
            "context": plan.context,
            "max_num_seqs": plan.max_num_seqs,
            "max_num_batched_tokens": plan.max_num_batched_tokens,
        },
        "state": _state(plan),
        "sequence_bytes": _by_context(plan.sequence_bytes),
        "sequence_bytes_per_device": _by_context(plan.sequence_bytes_per_device),
        "ledger": None if plan.budget is None else plan.budget.by_label,
        "ledger_lines": None if plan.budget is None else _lines(plan.budget),
        "capacity": None if plan.capacity is None else _capacity(plan.capacity, plan.dp),
        "limits": None if plan.limits is None else {**asdict(plan.limits), "all": [asdict(x) for x in plan.limits.all]},
        "roofline": None if plan.roofline is None else asdict(plan.roofline),
        "workload": None if plan.workload is None else _workload(plan.workload),
        "levers": [asdict(lever) for lever in plan.levers],
        "rules": list(plan.rules),
        "warnings": list(plan.warnings),
        "notes": list(plan.notes),
    }


def _by_context(figures: Mapping[int, Any]) -> dict[str, Any]:
    return {str(context): value for context, value in figures.items()}


def _device(device: Accelerator | None, memory_bytes: int | None) -> dict[str, Any] | None:
    if memory_bytes is None:
        return None
    if device is None:
        return {"name": None, "memory_bytes": memory_bytes}
    return {
        "name": device.name,
        "memory_bytes": memory_bytes,
        "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s,
        "dense_flops_per_s": dict(device.flops_per_s),
        "host_bytes_per_s": device.host_bytes_per_s,
        "source": device.source,
        "second_source": device.second_source,
        "verified": device.verified,
    }


def _state(plan: Plan) -> dict[str, Any]:
    state = plan.state
    return {
        "bytes_per_token_growing": state.bytes_per_token_growing,
        "bytes_per_token_windowed": state.bytes_per_token_windowed,
        "fixed_bytes_per_sequence": state.fixed_bytes_per_sequence,
        "attention_mode": state.attention_mode,
        "kv_dtype": state.kv_dtype,
        "convention": state.convention,
        "per_device": {
            "bytes_per_token_growing": state.device_bytes_per_token_growing,
            "bytes_per_token_windowed": state.device_bytes_per_token_windowed,
            "fixed_bytes_per_sequence": state.device_fixed_bytes_per_sequence,
        },
        "groups": [asdict(group) for group in state.groups],
    }


def _lines(budget: Budget) -> list[dict[str, Any]]:
    lines = [("weights", budget.weights), *(("runtime", line) for line in budget.runtime),
             ("kv", budget.kv), ("headroom", budget.headroom)]  # fmt: skip
    return [{"part": part, "label": x.label, "bytes": x.predicted_bytes, "basis": x.basis} for part, x in lines]


def _capacity(capacity: Capacity, replicas: int) -> dict[str, Any]:
    return {
        "kv_bytes": capacity.kv_bytes,
        "block_bytes": capacity.block_bytes,
        "page_bytes": capacity.page_bytes,
        "block_tokens": capacity.block_tokens,
        "blocks": capacity.blocks,
        "usable_blocks": capacity.usable_blocks,
        "tokens": capacity.tokens,
        "tokens_context": capacity.tokens_context,
        "sequences": _by_context(capacity.sequences),
        "concurrency": {str(n): floor(1e4 * value) / 1e4 for n, value in capacity.concurrency.items()},
        "blocks_per_sequence": _by_context(capacity.blocks_per_sequence),
        "largest_context": capacity.largest_context,
        "needed_context": capacity.needed_context,
        "fits": capacity.fits,
        "margin": capacity.margin,
        "sequences_all_replicas": {str(n): value * replicas for n, value in capacity.sequences.items()},
    }


def _workload(workload: Workload) -> dict[str, Any]:
    told = asdict(workload)
    for way in ("paged", "contiguous"):
        holding = getattr(workload, way)
        told[way]["useful_share"] = round(holding.useful_share, 4)
        told[way]["waste"]["total_bytes"] = holding.waste.total_bytes
    return told
