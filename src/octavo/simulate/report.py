"""A simulation's report as plain values and as text. All figures come from `measure`; nothing is computed twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.simulate.measure import Look, Measured, Objectives, quantiles

SHOWN_LOOKS = 64
_CAUSES = ("reserved", "internal", "padding", "external")


def figures(
    measured: Measured, objectives: Objectives | None = None, price_per_hour: float | None = None
) -> dict[str, Any]:
    """Everything, JSON-ready. Times in seconds."""
    span = measured.end_s - float(measured.column("arrival").min(initial=np.inf))
    span = span if 0 < span < float("inf") else 0.0
    outputs, inputs = measured.column("output_tokens"), measured.column("input_tokens")
    computed = measured.prefill_tokens + measured.decode_tokens
    goal = objectives or Objectives()
    gaps, weights = measured.gaps()
    good = measured.good(goal)
    tokens_per_s = _share(float(outputs.sum()), span)
    return {
        "requests": {
            "submitted": measured.submitted,
            "ended": dict(measured.ended),
            "refused": dict(measured.refused),
        },
        "span_s": span,
        "ttft_s": quantiles(measured.column("ttft")),
        "tpot_s": quantiles(measured.column("tpot")),
        "itl_s": quantiles(gaps, weights),
        "e2e_s": quantiles(measured.column("e2e")),
        "queue_s": quantiles(measured.column("queue")),
        "throughput": {
            "requests_per_s": _share(len(outputs), span),
            "output_tokens_per_s": tokens_per_s,
            "input_tokens_per_s": _share(float(inputs.sum()), span),
        },
        "goodput": {
            "objectives": {"ttft_s": goal.ttft_s, "tpot_s": goal.tpot_s, "e2e_s": goal.e2e_s},
            "requests": good,
            "share": _share(good, len(outputs)),
            "requests_per_s": _share(good, span),
        },
        "steps": {
            "count": measured.steps,
            "busy_share": _share(measured.busy_s, span),
            "mean_batch": _share(measured.running_steps, measured.steps),
            "prefill_tokens": measured.prefill_tokens,
            "decode_tokens": measured.decode_tokens,
            "bound_by": dict(measured.bound_by),
            "bound_s": dict(measured.bound_s),
        },
        "preemptions": {
            "count": measured.preemptions,
            "recomputed_tokens": measured.lost_tokens,
            "offloaded": measured.offloads,
            "recompute_tax": _share(measured.lost_tokens, computed),
            "paused_s": quantiles(measured.column("preempted")),
        },
        "reuse": {
            "cached_tokens": int(measured.column("cached_tokens").sum()),
            "hit_rate": _share(float(measured.column("cached_tokens").sum()), float(inputs.sum())),
            "hit_rate_by_tier": {
                tier: _share(tokens, float(inputs.sum())) for tier, tokens in sorted(measured.cached_by_tier.items())
            },
        },
        "transfers": _transfers(measured),
        "kv": _kv(measured),
        "dollars_per_million_output_tokens": _dollars(price_per_hour, tokens_per_s),
        "dollars_per_million_tokens": _dollars(price_per_hour, tokens_per_s + _share(float(inputs.sum()), span)),
    }


def _dollars(price_per_hour: float | None, tokens_per_s: float) -> float | None:
    return None if price_per_hour is None or not tokens_per_s else price_per_hour / 3600 / tokens_per_s * 1e6


def _transfers(measured: Measured) -> dict[str, Any]:
    return {
        "waited_s": measured.waited_for_copies_s,
        "restarts": measured.restarts,
        "by_route": {
            route: {
                "blocks": one.blocks,
                "bytes": one.bytes,
                "seconds": one.seconds,
                "failed_blocks": one.failed_blocks,
            }
            for route, one in sorted(measured.moved.items())
        },
    }


def _kv(measured: Measured) -> dict[str, Any]:
    capacity = measured.slabs * measured.slab_bytes
    looks = measured.looks[:: max(1, len(measured.looks) // SHOWN_LOOKS)]
    return {
        "capacity_bytes": capacity,
        "mean_used_share": _share(measured.used_slab_s * measured.slab_bytes, measured.busy_s * capacity),
        "peak_used_share": _share(measured.peak_slabs * measured.slab_bytes, capacity),
        "mean_waste_share": {
            cause: _share(float(np.mean([getattr(look, cause) for look in measured.looks] or [0])), capacity)
            for cause in _CAUSES
        },
        "over_time": [_look(look) for look in looks],
    }


def _look(look: Look) -> dict[str, float]:
    return {
        "at_s": look.at_s,
        "used_bytes": look.used,
        "useful_bytes": look.useful,
        **{f"{cause}_bytes": getattr(look, cause) for cause in _CAUSES},
        "kept_bytes": look.kept,
        "running": look.running,
        "waiting": look.waiting,
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def lines(told: Mapping[str, Any], intervals: Mapping[str, tuple[float, float]] | None = None) -> list[str]:
    """The report as text. `intervals` are the same simulation's figures with faster and slower steps."""
    requests = told["requests"]
    ended = ", ".join(f"{n:,} {reason}" for reason, n in requests["ended"].items()) or "none"
    refused = ", ".join(f"{n:,} {reason}" for reason, n in requests["refused"].items()) or "none"
    text = [
        f"requests     {requests['submitted']:,} submitted; ended: {ended}; refused: {refused}",
        f"span         {told['span_s']:,.3f} s of virtual time",
        "",
        f"{'seconds':12} {'mean':>10} {'p50':>10} {'p90':>10} {'p99':>10} {'max':>10}",
    ]
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s"):
        row = told[name]
        cells = "".join(f" {_time(row[q]):>10}" for q in ("mean", "p50", "p90", "p99", "max")) if row else " none"
        text.append(f"{name[:-2]:12}{cells}")
    text.append("")
    text += [f"{label:12} {', '.join(parts)}" for label, parts in _rows(told)]
    if told["dollars_per_million_output_tokens"] is not None:
        out, all_ = told["dollars_per_million_output_tokens"], told["dollars_per_million_tokens"]
        text.append(f"cost         {out:,.3f} dollars per million output tokens, {all_:,.3f} per million of both")
    if intervals:
        text.append("")
        text.append("with steps as fast and as slow as the cost model's interval says:")
        text += [f"{name:24} {_plain(low)} to {_plain(high)}" for name, (low, high) in intervals.items()]
    return text


def _rows(told: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    through, steps, kv, reuse, lost = (told[k] for k in ("throughput", "steps", "kv", "reuse", "preemptions"))
    rates = [f"{through['requests_per_s']:,.2f} requests/s", f"{through['output_tokens_per_s']:,.0f} tokens/s out"]
    used = [f"{kv['capacity_bytes']:,} B", f"used {kv['mean_used_share']:.1%} on average while busy"]
    again = f"{lost['recomputed_tokens']:,} positions computed again ({lost['recompute_tax']:.2%} of all)"
    batch = f"{steps['mean_batch']:.1f} sequences a step"
    tiers = [f"{tier} {share:.1%}" for tier, share in reuse["hit_rate_by_tier"].items()]
    moved = told["transfers"]["by_route"]
    copies = [f"{route} {one['bytes']:,} B in {one['blocks']:,} blocks" for route, one in moved.items()]
    rows = [
        ("throughput", [*rates, f"{through['input_tokens_per_s']:,.0f} tokens/s in"]),
        ("goodput", [_goodput(told["goodput"])]),
        ("steps", [f"{steps['count']:,}", f"the device busy {steps['busy_share']:.1%}", batch]),
        ("bound by", [_counts(steps["bound_by"], steps["count"])]),
        ("preemptions", [f"{lost['count']:,} ({lost['offloaded']:,} moved to the host)", again]),
        (
            "reuse",
            [f"{reuse['cached_tokens']:,} prompt tokens from kept blocks", f"{reuse['hit_rate']:.1%} of all", *tiers],
        ),
        ("KV cache", [*used, f"{kv['peak_used_share']:.1%} at most"]),
        ("KV waste", [f"{cause} {share:.2%}" for cause, share in kv["mean_waste_share"].items()]),
    ]
    if copies:
        waited = f"{told['transfers']['waited_s']:,.3f} s waited for them"
        rows.append(("copies", [*copies, waited]))
    return rows


INTERVAL_FIGURES = (
    ("ttft_s p50", ("ttft_s", "p50")),
    ("ttft_s p99", ("ttft_s", "p99")),
    ("tpot_s mean", ("tpot_s", "mean")),
    ("e2e_s p50", ("e2e_s", "p50")),
    ("requests_per_s", ("throughput", "requests_per_s")),
    ("output_tokens_per_s", ("throughput", "output_tokens_per_s")),
)


def intervals_of(ends: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """The span of each figure over reports of one workload at the ends of an interval."""
    found = {}
    for name, (part, key) in INTERVAL_FIGURES:
        values = [end[part][key] for end in ends if end[part] is not None]
        if values:
            found[name] = (min(values), max(values))
    return found


def _goodput(told: Mapping[str, Any]) -> str:
    asked = [f"{name[:-2]} at most {_time(most)} s" for name, most in told["objectives"].items() if most is not None]
    if not asked:
        return "no objective was given"
    return f"{told['share']:.1%} of requests, {told['requests_per_s']:,.2f} requests/s ({', '.join(asked)})"


def _counts(counts: Mapping[str, int], total: int) -> str:
    return (
        ", ".join(f"{name} {n / total:.0%}" for name, n in sorted(counts.items(), key=lambda kv: -kv[1])) or "nothing"
    )


def _time(value: float) -> str:
    return f"{value:.4f}" if value < 100 else f"{value:,.1f}"


def _plain(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
