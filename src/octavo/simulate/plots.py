"""Plots of a run as inline SVG: what is stacked over time, lines, cumulative shares, a Gantt of requests.

Owns shapes, axes and colours, none of the figures. Text only: no script, no font, no file beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import log10

from octavo.planner.charts import COLOURS

WIDTH, HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 14, 40
_MOST_POINTS = 360
_TICKS = 4

Words = Callable[[float], str]
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axes:
    """A rectangle of the page, and what its edges stand for."""

    most_x: float
    most_y: float
    x_words: Words
    y_words: Words
    height: int = HEIGHT
    log_from: float | None = None
    """Of x, where it is logarithmic."""

    def x(self, value: float) -> float:
        right = WIDTH - _RIGHT
        if self.log_from is None:
            return _LEFT + (right - _LEFT) * value / (self.most_x or 1)
        span = log10(self.most_x / self.log_from) or 1
        return _LEFT + (right - _LEFT) * max(0.0, log10(max(value, self.log_from) / self.log_from)) / span

    def y(self, value: float) -> float:
        bottom = self.height - _BOTTOM
        return bottom - (bottom - _TOP) * value / (self.most_y or 1)

    def drawn(self, x_title: str) -> str:
        right, bottom = WIDTH - _RIGHT, self.height - _BOTTOM
        parts = []
        for step in range(_TICKS + 1):
            share = step / _TICKS
            y, value = self.y(self.most_y * share), self.most_y * share
            parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="grid"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" class="end">{escape(self.y_words(value))}</text>')
            at = self.most_x * share
            if self.log_from is not None:
                at = self.log_from * (self.most_x / self.log_from) ** share
            anchor = "end" if step == _TICKS else "mid"
            parts.append(
                f'<text x="{self.x(at):.1f}" y="{bottom + 18}" class="{anchor}">{escape(self.x_words(at))}</text>'
            )
        parts.append(f'<text x="{right}" y="{self.height - 4}" class="end">{escape(x_title)}</text>')
        return "".join(parts)


def stacked_over_time(
    moments: Sequence[float], layers: Sequence[tuple[str, Sequence[float]]], most: float, words: Words, title: str
) -> str:
    """Areas on top of each other; `most` is the top of the axis."""
    at = _thinned(len(moments))
    axes = Axes(moments[-1] if len(moments) else 1.0, most, _seconds, words)
    below = [0.0] * len(at)
    body = [axes.drawn("seconds")]
    for index, (label, values) in enumerate(layers):
        above = [low + values[i] for low, i in zip(below, at, strict=True)]
        up = [(axes.x(moments[i]), axes.y(value)) for i, value in zip(at, above, strict=True)]
        down = [(axes.x(moments[i]), axes.y(value)) for i, value in zip(at, below, strict=True)]
        colour = COLOURS[index % len(COLOURS)]
        body.append(
            f'<polygon points="{_path([*up, *down[::-1]])}" fill="{colour}"><title>{escape(label)}</title></polygon>'
        )
        below = above
    return _svg(HEIGHT, title, "".join(body)) + _legend([label for label, _ in layers])


def lines_over_time(lines: Sequence[tuple[str, Points]], title: str) -> str:
    most_x = max((x for _, points in lines for x, _ in points), default=1.0)
    most_y = max((y for _, points in lines for _, y in points), default=1.0)
    axes = Axes(most_x, most_y or 1.0, _seconds, lambda value: f"{value:,.0f}")
    return _svg(HEIGHT, title, axes.drawn("seconds") + _polylines(axes, lines)) + _legend([name for name, _ in lines])


def cumulative_shares(lines: Sequence[tuple[str, Sequence[float]]], title: str) -> str:
    """For each line: the share of its values that are at most x, on a logarithmic axis. Values in seconds, sorted."""
    seen = [value for _, values in lines for value in values if value > 0]
    low, high = min(seen, default=1e-3), max(seen, default=1.0)
    axes = Axes(max(high, low * 10), 1.0, _short, lambda share: f"{share:.0%}", log_from=low)
    curves = []
    for name, values in lines:
        at = _thinned(len(values))
        curves.append((name, [(values[i], (i + 1) / len(values)) for i in at]))
    return _svg(HEIGHT, title, axes.drawn("seconds") + _polylines(axes, curves)) + _legend([name for name, _ in lines])


def gantt(rows: Sequence[tuple[str, Sequence[tuple[str, float, float]]]], phases: Sequence[str], title: str) -> str:
    """A line for each row, cut into (phase, begin, end)."""
    height = _TOP + _BOTTOM + 9 * len(rows)
    first = min((begin for _, parts in rows for _, begin, _ in parts), default=0.0)
    last = max((end for _, parts in rows for _, _, end in parts), default=1.0)
    axes = Axes(max(last - first, 1e-9), 1.0, lambda at: _seconds(at + first), lambda _: "", height)
    body = [axes.drawn("seconds")]
    for line, (name, parts) in enumerate(rows):
        y = _TOP + 9 * line
        for phase, begin, end in parts:
            x, width = axes.x(begin - first), max(0.5, axes.x(end - first) - axes.x(begin - first))
            colour = COLOURS[phases.index(phase) % len(COLOURS)]
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="7" fill="{colour}">'
                f"<title>{escape(name)}: {escape(phase)} {end - begin:.4g} s</title></rect>"
            )
    return _svg(height, title, "".join(body)) + _legend(phases)


def _polylines(axes: Axes, lines: Sequence[tuple[str, Points]]) -> str:
    drawn = []
    for index, (_, points) in enumerate(lines):
        kept = [points[i] for i in _thinned(len(points))]
        path = _path([(axes.x(x), axes.y(y)) for x, y in kept])
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="2"/>'
        )
    return "".join(drawn)


def _thinned(count: int) -> list[int]:
    """At most so many indices, evenly, the last one included."""
    if count <= _MOST_POINTS:
        return list(range(count))
    return sorted({round(i * (count - 1) / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)})


def _path(points: Points) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _legend(names: Sequence[str]) -> str:
    cells = "".join(
        f'<li><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{escape(name)}</li>' for i, name in enumerate(names)
    )
    return f'<ul class="legend">{cells}</ul>'


def _svg(height: int, title: str, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title, quote=True)}">'
        f"<title>{escape(title)}</title>{body}</svg>"
    )
