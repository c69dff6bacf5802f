"""The state of a model as a table of layer groups, and what a reader of the plan is warned of.

Adds up what the geometry says and has no formula for bytes. A warning names what to do about it.
"""

from __future__ import annotations

from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import (
    Borrowed,
    Chunked,
    Component,
    Compressed,
    Constant,
    Growing,
    Part,
    Stateless,
    Windowed,
)
from octavo.planner.accelerators import Accelerator
from octavo.planner.asked import Asked
from octavo.planner.engines import Engine
from octavo.planner.values import Budget, Capacity, StateGroup, StateSummary, Weights


def state_summary(geometry: ModelGeometry, device: ModelGeometry, context: int) -> StateSummary:
    total = geometry.bytes_kept(context) or 1
    return StateSummary(
        bytes_per_token_growing=geometry.bytes_per_token_growing,
        bytes_per_token_windowed=geometry.bytes_per_token_windowed,
        fixed_bytes_per_sequence=geometry.fixed_bytes_per_sequence,
        attention_mode=geometry.attention_mode,
        kv_dtype=str(geometry.kv_dtype),
        convention=geometry.convention,
        groups=tuple(_group(part, layers, context, total) for part, layers in geometry.counted_parts.items()),
        device_bytes_per_token_growing=device.bytes_per_token_growing,
        device_bytes_per_token_windowed=device.bytes_per_token_windowed,
        device_fixed_bytes_per_sequence=device.fixed_bytes_per_sequence,
    )


def _group(part: Part, layers: int, context: int, total: int) -> StateGroup:
    kept = layers * part.bytes_kept(context)
    per_token = per_sequence = 0
    if isinstance(part, (Growing, Windowed, Chunked)):
        per_token = layers * part.bytes_per_token
    elif isinstance(part, Compressed):
        per_token = -(-layers * part.bytes_per_entry // part.run_tokens)
    elif isinstance(part, Constant):
        per_sequence = layers * part.bytes_per_sequence
    window = part.window_tokens if isinstance(part, Windowed) else None
    return StateGroup(
        kind=_kind(part),
        layers=layers,
        says=_says(part),
        bytes_per_token=per_token,
        bytes_per_sequence=per_sequence,
        window_tokens=part.chunk_tokens if isinstance(part, Chunked) else window,
        bytes_at_context=kept,
        share_at_context=kept / total,
    )


def _kind(part: Part) -> str:
    names = {Growing: "growing", Windowed: "window", Chunked: "chunk", Constant: "constant", Compressed: "entries",
             Borrowed: "borrowed", Stateless: "stateless"}  # fmt: skip
    return names[type(part)]


def _says(part: Part) -> str:
    if isinstance(part, Borrowed):
        return "read another layer's state, keep none"
    if isinstance(part, Stateless):
        return "keep nothing"
    text = ", ".join(_component(c) for c in part.components)
    return f"{text} for {part.run_tokens} positions" if isinstance(part, Compressed) else text


def _component(component: Component) -> str:
    return f"{component.name} {'x'.join(map(str, component.shape))} {component.dtype}"


def notes_of(geometry: ModelGeometry, engine: Engine, *, by_hand: bool) -> tuple[str, ...]:
    kept = (
        f"element types as {engine.label} keeps them" if engine.name != "octavo" else "what is needed, scales counted"
    )
    return (f"convention of the state: {kept}", *(() if by_hand else geometry.notes))


def warnings_of(
    asked: Asked,
    geometry: ModelGeometry,
    context: int,
    accelerator: Accelerator | None,
    found: tuple[Budget | None, Capacity | None, Weights],
) -> tuple[str, ...]:
    budget, capacity, weights = found
    said: list[str] = []
    if accelerator is not None and not accelerator.verified:
        said.append(f"{accelerator.name}: unverified, its figures have no second source ({accelerator.source})")
    if budget is not None and weights.device_bytes is None:
        said.append("weights are not counted: their size is not known; give --weights-bytes (per device)")
    if budget is not None and budget.missing_bytes:
        said.append(f"does not fit: {-budget.missing_bytes:,} B more than a device has are asked for")
    if budget is not None and not budget.kv.predicted_bytes:
        said.append("nothing is left for a KV cache; use more devices, a smaller type of weights, or more utilization")
    elif capacity is not None and not capacity.fits:
        said.append(f"does not fit: {capacity.margin}")
    if geometry.context_length and context > geometry.context_length:
        said.append(f"the context of {context:,} is longer than the {geometry.context_length:,} the model was made for")
    if budget is not None and asked.runtime_bytes is None:
        said.append("runtime is an estimate; give --runtime-bytes where it was measured")
    return tuple(said)
