"""Charts as inline SVG: bars of parts, a curve, columns. Text only, no script, no file beside.

Owns shapes, colours and axes. What is drawn is given as labelled numbers; words come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import log10

COLOURS = ("#3b6ea8", "#e0883c", "#5a9a68", "#b65a74", "#8470b0", "#9c8a4f", "#6c7a89", "#c9a227")
WIDTH, HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 14, 46

Words = Callable[[float], str]


def parts_bar(parts: Sequence[tuple[str, float]], words: Words, title: str) -> str:
    """One bar cut into parts, with a legend that has every part, however small."""
    total = sum(value for _, value in parts) or 1
    x, pieces, legend = 0.0, [], []
    for index, (label, value) in enumerate(parts):
        width = WIDTH * value / total
        colour = COLOURS[index % len(COLOURS)]
        pieces.append(
            f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="34" fill="{colour}">'
            f"<title>{escape(label)}: {escape(words(value))}</title></rect>"
        )
        if width > 74:
            pieces.append(f'<text x="{x + width / 2:.1f}" y="22" class="in">{value / total:.0%}</text>')
        x += width
        figure = f"<b>{escape(words(value))}</b> {value / total:.1%}"
        legend.append(f'<li><i style="background:{colour}"></i>{escape(label)} {figure}</li>')
    svg = _svg(WIDTH, 34, title, "".join(pieces))
    return f'{svg}<ul class="legend">{"".join(legend)}</ul>'


def curve(lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], words: Words, title: str, x_title: str) -> str:
    """Lines over a common axis that begins at 0, each named in a legend."""
    most_x = max((x for _, points in lines for x, _ in points), default=1) or 1
    most_y = max((y for _, points in lines for _, y in points), default=1) or 1
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (right - _LEFT) * x / most_x, bottom - (bottom - _TOP) * y / most_y

    body, legend = [], []
    for share in (0, 0.25, 0.5, 0.75, 1):
        _, y = place(0, most_y * share)
        x, _ = place(most_x * share, 0)
        body.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="grid"/>')
        body.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" class="end">{escape(words(most_y * share))}</text>')
        anchor = "end" if share == 1 else "mid"
        body.append(f'<text x="{x:.1f}" y="{bottom + 18}" class="{anchor}">{most_x * share:,.0f}</text>')
    body.append(f'<text x="{right}" y="{HEIGHT - 8}" class="end">{escape(x_title)}</text>')
    for index, (label, points) in enumerate(lines):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(x, y) for x, y in points))
        dashes = ' stroke-dasharray="6 4"' if index else ""
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"{dashes}/>')
        legend.append(f'<li><i style="background:{colour}"></i>{escape(label)}</li>')
    return f'{_svg(WIDTH, HEIGHT, title, "".join(body))}<ul class="legend">{"".join(legend)}</ul>'


def columns(values: Sequence[tuple[str, float]], title: str) -> str:
    """A column for each value, on a logarithmic scale: counts over several powers of ten stay visible."""
    most = max((value for _, value in values), default=1)
    room, bottom = HEIGHT - _TOP - _BOTTOM, HEIGHT - _BOTTOM
    step = (WIDTH - 32) / max(1, len(values))
    body = []
    for index, (label, value) in enumerate(values):
        height = room * log10(1 + value) / log10(1 + most) if most else 0
        x, width = 16 + step * index + step * 0.2, step * 0.6
        body.append(
            f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{COLOURS[0]}"/>'
            f'<text x="{x + width / 2:.1f}" y="{bottom - height - 4:.1f}" class="mid">{value:,.0f}</text>'
            f'<text x="{x + width / 2:.1f}" y="{bottom + 18}" class="mid">{escape(label)}</text>'
        )
    body.append(f'<line x1="16" y1="{bottom}" x2="{WIDTH - 16}" y2="{bottom}" class="axis"/>')
    return _svg(WIDTH, HEIGHT, title, "".join(body))


def stacked_rows(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], words: Words, title: str) -> str:
    """Several bars over one scale, their parts in the same colours."""
    most = max((sum(value for _, value in parts) for _, parts in rows), default=1) or 1
    names = list(dict.fromkeys(label for _, parts in rows for label, _ in parts))
    body = []
    for row, (name, parts) in enumerate(rows):
        y, x = 4 + row * 44, 100.0
        body.append(f'<text x="92" y="{y + 22}" class="end">{escape(name)}</text>')
        for label, value in parts:
            width = (WIDTH - 104) * value / most
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="34" fill="{_named(names, label)}">'
                f"<title>{escape(label)}: {escape(words(value))}</title></rect>"
            )
            x += width
    legend = "".join(f'<li><i style="background:{_named(names, name)}"></i>{escape(name)}</li>' for name in names)
    return f'{_svg(WIDTH, 4 + 44 * len(rows), title, "".join(body))}<ul class="legend">{legend}</ul>'


def _named(names: Sequence[str], label: str) -> str:
    return COLOURS[names.index(label) % len(COLOURS)]


def _svg(width: int, height: int, title: str, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}">'
        f"<title>{escape(title)}</title>{body}</svg>"
    )
