"""Plots of a run as inline SVG: what is stacked over time, lines, cumulative shares, a Gantt of requests.

Owns shapes and colours, none of the figures; axes are `axes`'. What is drawn over time was seen at moments and holds
until the next one, so that everything goes in steps. Text only: no script, no font, no file beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from octavo.planner.charts import COLOURS
from octavo.simulate.axes import (
    BOTTOM,
    HEIGHT,
    LEFT,
    TOP,
    WIDTH,
    Axes,
    Words,
    decades,
    named_seconds,
    plain_seconds,
    round_bytes,
    round_steps,
)

_MOST_POINTS = 480
_MOST_NAMED_ROWS = 24
_DECADES_BELOW = 1e-5
"""Times the largest: less than that is at the left edge of a logarithmic axis."""

Points = Sequence[tuple[float, float]]
Layer = tuple[str, str, Sequence[float]]
"""Label, colour, value at each moment."""


def stacked_over_time(moments: Sequence[float], layers: Sequence[Layer], most: float, words: Words, title: str) -> str:
    """Areas on top of each other; each value holds until the next moment. `most` is the top of the axis."""
    at = _thinned(len(moments))
    shares = most == 1.0
    ticks = round_steps(1.0, 0.25) if shares else round_bytes(most)
    axes = _over_time(moments[-1] if len(moments) else 1.0, most, ticks, words)
    below = [0.0] * len(at)
    body = []
    for label, colour, values in layers:
        above = [low + values[i] for low, i in zip(below, at, strict=True)]
        up = _steps([(axes.x(moments[i]), axes.y(value)) for i, value in zip(at, above, strict=True)])
        down = _steps([(axes.x(moments[i]), axes.y(value)) for i, value in zip(at, below, strict=True)])
        body.append(
            f'<polygon points="{_path([*up, *down[::-1]])}" fill="{colour}"><title>{escape(label)}</title></polygon>'
        )
        below = above
    drawn = axes.drawn("seconds") + "".join(body)
    return _svg(HEIGHT, title, drawn) + _legend([(label, colour) for label, colour, _ in layers])


def lines_over_time(lines: Sequence[tuple[str, Points]], title: str) -> str:
    """Counts that hold until the next moment."""
    most_x = max((x for _, points in lines for x, _ in points), default=1.0)
    most_y = max((y for _, points in lines for _, y in points), default=1.0) or 1.0
    axes = _over_time(most_x, most_y, round_steps(most_y, 1.0), lambda value: f"{value:,.0f}")
    stepped = [(name, _steps([points[i] for i in _thinned(len(points))])) for name, points in lines]
    return _svg(HEIGHT, title, axes.drawn("seconds") + _polylines(axes, stepped)) + _numbered([n for n, _ in lines])


def cumulative_shares(lines: Sequence[tuple[str, Sequence[float]]], title: str) -> str:
    """For each line: the share of its values that are at most x, on a logarithmic axis. Values in seconds, sorted."""
    seen = [value for _, values in lines for value in values if value > 0]
    high = max(seen, default=1.0)
    ticks = decades(max(min(seen, default=1e-3), high * _DECADES_BELOW), high)
    axes = Axes(
        ticks[-1], 1.0, tuple(ticks), (0.0, 0.25, 0.5, 0.75, 1.0), named_seconds, lambda share: f"{share:.0%}",
        log_from=ticks[0],
    )  # fmt: skip
    curves = []
    for name, values in lines:
        points = [(values[0], 0.0)]
        for i in _thinned(len(values)):
            points += [(values[i], points[-1][1]), (values[i], (i + 1) / len(values))]
        curves.append((name, [*points, (ticks[-1], 1.0)]))
    return _svg(HEIGHT, title, axes.drawn("") + _polylines(axes, curves)) + _numbered([name for name, _ in lines])


Part = tuple[str, float, float]
Row = tuple[str, str, Sequence[Part]]
"""Its short name, what a pointer on it says, and its parts: phase, begin, end."""


def gantt(rows: Sequence[Row], colours: Sequence[tuple[str, str]], title: str) -> str:
    """A line for each row, cut into phases, each with its colour."""
    of_phase = dict(colours)
    each = 18 if len(rows) <= _MOST_NAMED_ROWS else 9
    height = TOP + BOTTOM + each * len(rows)
    first = min((begin for _, _, parts in rows for _, begin, _ in parts), default=0.0)
    last = max((end for _, _, parts in rows for _, _, end in parts), default=1.0)
    span = max(last - first, 1e-9)
    ticks = round_steps(first + span, first=first)
    axes = Axes(span, 1.0, tuple(at - first for at in ticks), (), lambda at: plain_seconds(at + first), str, height)
    body = [axes.drawn("seconds")]
    every = 1 if each == 18 else 5
    for line, (name, words, parts) in enumerate(rows):
        y = TOP + each * line
        if line % every == 0:
            body.append(f'<text x="{LEFT - 8}" y="{y + each / 2 + 4:.1f}" class="end">{escape(name)}</text>')
        for phase, begin, end in parts:
            x, width = axes.x(begin - first), max(0.8, axes.x(end - first) - axes.x(begin - first))
            body.append(
                f'<rect x="{x:.1f}" y="{y + 1}" width="{width:.1f}" height="{each - 2}" fill="{of_phase[phase]}">'
                f"<title>{escape(words)}: {escape(phase)} {end - begin:.4g} s</title></rect>"
            )
    return _svg(height, title, "".join(body)) + _legend(colours)


def _over_time(most_x: float, most_y: float, y_ticks: Sequence[float], y_words: Words) -> Axes:
    return Axes(most_x or 1.0, most_y, tuple(round_steps(most_x)), tuple(y_ticks), plain_seconds, y_words)


def _steps(points: Points) -> list[tuple[float, float]]:
    """Each value holds until the next moment."""
    found = list(points[:1])
    for (_, before), (x, y) in pairwise(points):
        found += [(x, before), (x, y)]
    return found


def _polylines(axes: Axes, lines: Sequence[tuple[str, Points]]) -> str:
    drawn = []
    for index, (label, points) in enumerate(lines):
        path = _path([(axes.x(x), axes.y(y)) for x, y in points])
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="2">'
            f"<title>{escape(label)}</title></polyline>"
        )
    return "".join(drawn)


def _thinned(count: int) -> list[int]:
    """At most so many indices, evenly, the last one included."""
    if count <= _MOST_POINTS:
        return list(range(count))
    return sorted({round(i * (count - 1) / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)})


def _path(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _numbered(names: Sequence[str]) -> str:
    return _legend([(name, COLOURS[index % len(COLOURS)]) for index, name in enumerate(names)])


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f'<li><i style="background:{colour}"></i>{escape(name)}</li>' for name, colour in entries)
    return f'<ul class="legend">{cells}</ul>'


def _svg(height: int, title: str, body: str) -> str:
    return (
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{body}</svg></div>'
    )
