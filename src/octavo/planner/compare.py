"""Several devices side by side: one plan each, the figures that decide in a column each.

A name that fits several rows of the table stands for all of them. Prices may differ by device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from octavo.errors import ConfigError
from octavo.planner.accelerators import devices_named, from_toml
from octavo.planner.asked import Asked
from octavo.planner.tables import aligned
from octavo.planner.values import Plan
from octavo.planner.wording import digits, duration, size


def compared(asked: Asked, names: str) -> list[Asked]:
    """The same question for every device that `names` stands for, in their order and without repeats."""
    for name in ("device", "memory"):
        if name in asked.given:
            raise ConfigError(
                name, getattr(asked, name), "contradicts --compare, which names the devices; leave one out"
            )
    parts = [part.strip() for part in names.split(",") if part.strip()]
    if not parts:
        raise ConfigError("compare", names, "must be names of devices with commas between, for example h100-sxm,mi300x")
    own = from_toml(asked.device_file) if asked.device_file else ()
    found = dict.fromkeys(row.name for part in parts for row in devices_named(part, own))
    return [replace(asked, device=name) for name in found]


def comparison_table(plans: Sequence[Plan]) -> Iterator[str]:
    first = plans[0]
    yield f"{first.model} at {first.context:,} tokens, charged as by {first.engine}"
    columns = [_column(plan) for plan in plans]
    rows = [(label, *(column[label] for column in columns)) for label in columns[0]]
    yield from aligned(rows)
    yield "figures of one device, except tokens/s and dollars: one replica; lower bounds of time at dense peak rates"
    for plan in plans:
        name = plan.device.name if plan.device else ""
        for text in plan.warnings:
            yield f"warning: {'' if name in text else f'{name}: '}{text}"


def _column(plan: Plan) -> dict[str, str]:
    budget, capacity, roofline, limits = plan.budget, plan.capacity, plan.roofline, plan.limits
    told = {
        "": plan.device.name if plan.device else "",
        "memory": size(plan.memory_bytes or 0),
        "weights": size(budget.weights.predicted_bytes) if budget else "-",
        "runtime": size(budget.runtime_bytes) if budget else "-",
        "KV cache": size(budget.kv.predicted_bytes) if budget else "-",
        "tokens": f"{capacity.tokens:,}" if capacity else "-",
        f"sequences of {plan.context:,}": f"{capacity.sequences[plan.context]:,}" if capacity else "-",
        "largest context": f"{capacity.largest_context:,}" if capacity and capacity.largest_context < 2**40 else "any",
        "limit": limits.binding if limits else "-",
        "decode step": duration(roofline.decode_s) if roofline else "-",
        "tokens/s": f"{roofline.tokens_per_s:,.0f}" if roofline else "-",
        "prefill": duration(roofline.prefill_s) if roofline else "-",
    }
    if roofline and roofline.dollars_per_million_tokens is not None:
        told["dollars per million"] = digits(roofline.dollars_per_million_tokens)
    return told
