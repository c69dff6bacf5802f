"""The ledger of a plan: one device's bytes as weights, runtime, KV cache and headroom, exact.

Owns how each engine divides a device (`utilization` means different things) and the estimate of what
running needs where it is not given. Estimates say what they are made of.
"""

from __future__ import annotations

from octavo.geometry.dtypes import BF16
from octavo.geometry.model import ModelGeometry
from octavo.planner.asked import Asked
from octavo.planner.engines import Engine
from octavo.planner.largest_step import largest_step
from octavo.planner.ledger import KERNELS, Line, StepLimits, predict_runtime
from octavo.planner.values import Budget

COMMUNICATION_BYTES = 2**30
"""What collective communication between devices is taken to keep; 0.25 to 3 GiB were seen in public logs."""


def make_budget(
    engine: Engine, asked: Asked, total_bytes: int, weights: Line, runtime: tuple[Line, ...], unit_bytes: int
) -> Budget:
    """Divide `total_bytes` as `engine` does. A KV cache of given size is taken as it is."""
    used = weights.predicted_bytes + sum(line.predicted_bytes for line in runtime)
    if asked.kv_cache_memory_bytes is not None:
        kv_bytes, basis = asked.kv_cache_memory_bytes, "as given"
    else:
        kv_bytes, basis = _left_for_kv(engine, asked, total_bytes, weights.predicted_bytes, used)
    kv_bytes = max(0, kv_bytes)
    whole = kv_bytes - kv_bytes % unit_bytes if asked.kv_cache_memory_bytes is None else kv_bytes
    rest = total_bytes - used - whole
    why = "what is left beside the rest"
    if asked.kv_cache_memory_bytes is None:
        why = f"kept free on purpose, and {kv_bytes - whole:,} B that make no whole block"
    return Budget(
        total_bytes=total_bytes,
        weights=weights,
        runtime=runtime,
        kv=Line("kv", whole, f"{basis}; excludes weights, runtime and headroom"),
        headroom=Line("headroom", max(0, rest), why),
        missing_bytes=min(0, rest),
    )


def _left_for_kv(engine: Engine, asked: Asked, total: int, weights: int, used: int) -> tuple[int, str]:
    share, headroom = asked.utilization, asked.headroom_bytes
    if engine.name == "sglang":
        # what running needs comes out of the part that is not static
        left = min(int(total * share) - weights, total - used) - headroom
        return left, f"{share:g} x total - weights (what running needs is outside mem_fraction_static)"
    if engine.name == "trtllm":
        return int((total - used) * share) - headroom, f"{share:g} x (total - weights - runtime)"
    if engine.name == "llamacpp":
        return total - used - headroom, "total - weights - runtime, if the context asks for so much"
    return int(total * share) - used - headroom, f"{share:g} x total - weights - runtime - headroom asked"


def runtime_lines(engine: Engine, asked: Asked, geometry: ModelGeometry, limits: StepLimits) -> tuple[Line, ...]:
    """What running takes on one device besides weights and KV: as given, or estimated from the largest step.

    `geometry` is the whole model's: tensor ranks do not share a step's activations out, each holds them.
    """
    if asked.runtime_bytes is not None:
        return (Line("runtime", asked.runtime_bytes, "as given, per device"),)
    predicted = predict_runtime(geometry, limits)
    if engine.name != "octavo":
        context = next(line for line in predicted if line.label == KERNELS)
        predicted = (largest_step(engine, geometry, limits), context)
    ranks = asked.tp * asked.pp
    whole = "; whole on every device" if ranks > 1 else ""
    lines = [
        Line(line.label, line.predicted_bytes, f"{_estimated(line.basis)}{whole}")
        for line in predicted
        if line.predicted_bytes
    ]
    if ranks > 1:
        lines.append(Line("communication", COMMUNICATION_BYTES, "estimated: buffers of collectives between devices"))
    return tuple(lines)


def _estimated(basis: str) -> str:
    return f"estimated: {basis.removeprefix('predicted: ')}"


def step_limits(*, seqs: int, step_tokens: int, length: int, block_tokens: int, blocks: int) -> StepLimits:
    return StepLimits(
        max_num_batched_tokens=step_tokens,
        max_num_seqs=seqs,
        max_model_len=length,
        block_tokens=max(1, block_tokens),
        kv_blocks=blocks,
        compute_dtype=BF16,
        device="cuda",
    )
