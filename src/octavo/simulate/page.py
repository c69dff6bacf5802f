"""A simulation as one HTML file with plots: no script, no font, no picture from elsewhere.

Owns the page's order and words. Figures come from `report`, curves from `measure`; everything from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from itertools import pairwise
from typing import Any

import numpy as np

from octavo.planner.wording import size
from octavo.simulate.measure import Measured
from octavo.simulate.plots import cumulative_shares, gantt, lines_over_time, stacked_over_time
from octavo.simulate.report import lines

_GANTT_ROWS = 80
_PHASES = ("waiting", "prompt", "generating")
_LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("end to end", "e2e"), ("queue", "queue"))


@cache
def _style() -> str:
    return resources.files("octavo.planner").joinpath("data", "page.css").read_text("utf-8")


def page(
    about: Sequence[str],
    told: Mapping[str, Any],
    measured: Measured,
    intervals: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """The whole file. `about` are the lines that say what was simulated; the first is the title."""
    title = about[0] if about else "a simulation"
    body = "".join(
        (_head(about), _cards(told), _occupancy(measured), _batch(measured), _latencies(measured), _bound(measured),
         _requests(measured), _text(told, intervals))
    )  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_style()}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def _head(about: Sequence[str]) -> str:
    rest = "".join(f'<p class="soft">{escape(line)}</p>' for line in about)
    return f"<h1>Simulated</h1>{rest}"


def _cards(told: Mapping[str, Any]) -> str:
    through, kv = told["throughput"], told["kv"]
    cards = [
        (f"{through['requests_per_s']:,.2f}", "requests a second"),
        (f"{through['output_tokens_per_s']:,.0f}", "output tokens a second"),
        *((f"{told[name]['p50']:.4g} s", f"{label}, median") for name, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"))
          if told[name]),
        (f"{told['goodput']['share']:.1%}", "of requests meet the objectives given"),
        (f"{kv['mean_used_share']:.1%}", f"of {size(kv['capacity_bytes'])} of KV cache in use while busy"),
        (f"{told['preemptions']['count']:,}", "preemptions"),
        (f"{told['reuse']['hit_rate']:.1%}", "of prompt tokens from kept blocks"),
    ]  # fmt: skip
    dollars = told["dollars_per_million_output_tokens"]
    if dollars is not None:
        cards.append((f"{dollars:,.3f}", "dollars per million output tokens"))
    drawn = "".join(f'<div class="card"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in cards)
    return f'<div class="cards">{drawn}</div>'


def _occupancy(measured: Measured) -> str:
    looks = measured.looks
    if not looks:
        return ""
    layers = [
        ("useful", [look.useful for look in looks]),
        *((f"waste: {cause}", [getattr(look, cause) for look in looks])
          for cause in ("reserved", "internal", "padding", "external")),
        ("kept for reuse", [look.kept for look in looks]),
    ]  # fmt: skip
    shown = [(name, values) for name, values in layers if any(values)] or layers[:1]
    capacity = float(measured.slabs * measured.slab_bytes)
    drawn = stacked_over_time(
        [look.at_s for look in looks], shown, capacity, size, "KV cache in use over time, by what it holds"
    )
    return _section(f"KV cache over time, of {size(capacity)}", drawn)


def _batch(measured: Measured) -> str:
    looks = measured.looks
    curves = [
        ("running", [(look.at_s, float(look.running)) for look in looks]),
        ("waiting", [(look.at_s, float(look.waiting)) for look in looks]),
    ]
    return _section("Sequences over time", lines_over_time(curves, "sequences running and waiting"))


def _latencies(measured: Measured) -> str:
    curves = []
    for label, name in _LATENCIES:
        values = measured.column(name)
        kept = np.sort(values[~np.isnan(values)])
        if len(kept):
            curves.append((label, kept.tolist()))
    if not curves:
        return ""
    return _section("Latencies: share of requests within", cumulative_shares(curves, "latencies, cumulative"))


def _bound(measured: Measured) -> str:
    """Shares of the time between two looks in which steps were bound by each resource."""
    looks = measured.looks
    if len(looks) < 2:
        return ""
    names = sorted({name for look in looks for name in look.bound_s})
    layers: dict[str, list[float]] = {name: [] for name in names}
    for before, after in pairwise(looks):
        grown = {name: after.bound_s.get(name, 0.0) - before.bound_s.get(name, 0.0) for name in names}
        total = sum(grown.values()) or 1.0
        for name in names:
            layers[name].append(grown[name] / total)
    drawn = stacked_over_time(
        [look.at_s for look in looks[1:]], list(layers.items()), 1.0, lambda share: f"{share:.0%}", "what bound steps"
    )
    return _section("What bound each step: share of their time", drawn)


def _requests(measured: Measured) -> str:
    """Some of the requests, evenly by arrival: when each waited, computed its prompt, generated."""
    arrival, queue, ttft, e2e = (measured.column(name) for name in ("arrival", "queue", "ttft", "e2e"))
    order = np.argsort(arrival, kind="stable")
    if not len(order):
        return ""
    chosen = order[np.unique(np.linspace(0, len(order) - 1, min(_GANTT_ROWS, len(order))).astype(int))]
    rows = []
    for index in chosen.tolist():
        begin, end = float(arrival[index]), float(arrival[index] + e2e[index])
        seated = begin + float(queue[index])
        first = end if np.isnan(ttft[index]) else begin + float(ttft[index])
        spans = ((begin, seated), (seated, first), (first, end))
        parts = [(phase, a, b) for phase, (a, b) in zip(_PHASES, spans, strict=True) if b > a]
        rows.append((f"request {index}", parts))
    title = f"{len(rows):,} of {len(order):,} requests, by arrival"
    return _section(title, gantt(rows, _PHASES, title))


def _text(told: Mapping[str, Any], intervals: Mapping[str, tuple[float, float]] | None) -> str:
    text = escape("\n".join(lines(told, intervals)))
    return f"<section><details open><summary>As text</summary><pre>{text}</pre></details></section>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"
