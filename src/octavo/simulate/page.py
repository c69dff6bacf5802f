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

from octavo.planner.charts import COLOURS
from octavo.planner.wording import duration, size
from octavo.simulate.measure import Measured
from octavo.simulate.plots import cumulative_shares, gantt, lines_over_time, stacked_over_time
from octavo.simulate.report import lines

_GANTT_ROWS = 80
_GREY = COLOURS[6]
_PHASES = (("waiting", _GREY), ("prompt", COLOURS[1]), ("generating", COLOURS[0]))
_HELD = (
    ("useful", "useful", COLOURS[0]),
    ("reserved", "waste: reserved", COLOURS[1]),
    ("internal", "waste: ends of blocks", COLOURS[7]),
    ("padding", "waste: padding", COLOURS[4]),
    ("external", "waste: between runs", COLOURS[3]),
    ("kept", "kept for reuse", COLOURS[2]),
)
_BOUND = (
    ("compute", "compute: nobody waits", COLOURS[0]),
    ("kv_blocks", "KV blocks", COLOURS[1]),
    ("token_budget", "tokens a step", COLOURS[2]),
    ("sequence_limit", "sequences at once", COLOURS[3]),
    ("transfer", "copies between tiers", COLOURS[4]),
    ("none", "nothing, though work waits", _GREY),
)
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
    plots = (part(measured) for part in (_occupancy, _batch, _latencies, _bound, _requests))
    body = "".join((_head(about), _refused(told), _cards(told), *plots, _text(told, intervals), _grounds(told)))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_style()}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def _head(about: Sequence[str]) -> str:
    rest = "".join(f'<p class="soft">{escape(line)}</p>' for line in about)
    return f"<h1>Simulated</h1>{rest}"


def _refused(told: Mapping[str, Any]) -> str:
    refused = told["requests"]["refused"]
    if not refused:
        return ""
    words = ", ".join(f"{count:,} {_REFUSALS.get(reason, reason)}" for reason, count in refused.items())
    return f'<p class="warn">Requests refused: {escape(words)}</p>'


_REFUSALS = {
    "invalid": "invalid, or past the longest sequence",
    "never_fits": "larger than the whole KV cache",
    "queue_full": "while too many waited",
}


def _cards(told: Mapping[str, Any]) -> str:
    through, kv = told["throughput"], told["kv"]
    cards = [
        (f"{through['requests_per_s']:,.2f}", "requests a second"),
        (f"{through['output_tokens_per_s']:,.0f}", "output tokens a second"),
        *((duration(told[name][q]), f"{label}, {words}") for name, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"))
          for q, words in (("p50", "median"), ("p99", "99th percentile")) if told[name]),
        *([(f"{told['goodput']['share']:.1%}", "of requests meet the objectives given")]
          if any(most is not None for most in told["goodput"]["objectives"].values()) else []),
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
    layers = [(label, colour, [float(getattr(look, name)) for look in looks]) for name, label, colour in _HELD]
    shown = [layer for layer in layers if any(layer[2])] or layers[:1]
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
    present = {name for look in looks for name in look.bound_s}
    if len(looks) < 2 or not present:
        return ""
    shares: dict[str, list[float]] = {name: [] for name, _, _ in _BOUND if name in present}
    for before, after in pairwise(looks):
        grown = {name: after.bound_s.get(name, 0.0) - before.bound_s.get(name, 0.0) for name in shares}
        total = sum(grown.values()) or 1.0
        for name, series in shares.items():
            series.append(grown[name] / total)
    # A share is of the time from one look to the next: it is drawn from there on, and ends with the last look.
    layers = [(label, colour, [*shares[name], 0.0]) for name, label, colour in _BOUND if name in shares]
    drawn = stacked_over_time(
        [look.at_s for look in looks], layers, 1.0, lambda share: f"{share:.0%}", "what bound steps"
    )
    return _section("What bound each step: share of their time", drawn)


def _requests(measured: Measured) -> str:
    """All requests or some in a row: when each waited, computed its prompt, generated."""
    arrival, queue, ttft, e2e, apart = (
        measured.column(name) for name in ("arrival", "queue", "ttft", "e2e", "preempted")
    )
    order = np.argsort(arrival, kind="stable")
    if not len(order):
        return ""
    places = range(len(order))[_in_a_row(queue[order] if queue.any() else e2e[order])]
    rows = []
    for place in places:
        index = int(order[place])
        begin, end = float(arrival[index]), float(arrival[index] + e2e[index])
        seated = begin + float(queue[index])
        first = end if np.isnan(ttft[index]) else begin + float(ttft[index])
        spans = ((begin, seated), (seated, first), (first, end))
        parts = [(phase, a, b) for (phase, _), (a, b) in zip(_PHASES, spans, strict=True) if b > a]
        paused = f", set aside for {apart[index]:.4g} s" if apart[index] > 0 else ""
        rows.append((f"{place + 1:,}", f"request {place + 1:,} by arrival{paused}", parts))
    title = f"{len(order):,} requests, by arrival"
    if len(rows) < len(order):
        title = f"{len(rows):,} of {title}: those around the one that {'waited' if queue.any() else 'took'} longest"
    return _section(title, gantt(rows, _PHASES, title))


def _in_a_row(worst: np.ndarray) -> slice:
    """So many places around the largest of these."""
    first = min(max(0, int(worst.argmax()) - _GANTT_ROWS // 2), max(0, len(worst) - _GANTT_ROWS))
    return slice(first, first + _GANTT_ROWS)


def _text(told: Mapping[str, Any], intervals: Mapping[str, tuple[float, float]] | None) -> str:
    text = escape("\n".join(lines(told, intervals)))
    return f"<section><details open><summary>As text</summary><pre>{text}</pre></details></section>"


def _grounds(told: Mapping[str, Any]) -> str:
    """What step costs rest on."""
    if not told.get("cost"):
        return ""
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{escape(_number(one["value"]))}</td>'
        f'<td class="why">{escape(one["source"])}</td></tr>'
        for name, one in told["cost"].items()
    )
    head = '<tr><th>factor</th><th class="n">value</th><th>from</th></tr>'
    return _section("What step costs rest on", f"<table>{head}{rows}</table>")


def _number(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(_number(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"
