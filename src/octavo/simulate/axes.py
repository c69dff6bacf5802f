"""Axes of plots: where ticks are, what they are called, and where a value lies on the page.

Owns round numbers (1, 2, 5 times a power of ten; of bytes, powers of two) and the rectangle of a plot. Draws no data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 84, 16, 14, 40
_FEW, _TICKS = 3, 6
_EPSILON = 1e-9
_DECADES_AT_MOST = 7

Words = Callable[[float], str]


def round_steps(most: float, least: float = 0.0, first: float = 0.0) -> list[float]:
    """Ticks from `first` to at most `most`, some five, `least` apart at least."""
    span = most - first
    if not span > 0:
        return [first]
    power = 10.0 ** floor(log10(span / _TICKS))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * _TICKS >= span * (1 - _EPSILON))
    return _multiples(max(step, least), most, first)


def round_bytes(most: float) -> list[float]:
    """The same a power of two apart."""
    step = 1.0
    while step * _TICKS < most:
        step *= 2
    return _multiples(step, most) if most > 0 else [0.0]


def _multiples(step: float, most: float, first: float = 0.0) -> list[float]:
    return [step * number for number in range(ceil(first / step - _EPSILON), floor(most / step + _EPSILON) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis over positive numbers: powers of ten, and 2 and 5 times them where those are few."""
    last = ceil(log10(high) - _EPSILON)
    first = max(min(floor(log10(low) + _EPSILON), last - 1), last - _DECADES_AT_MOST)
    within = (1, 2, 5) if last - first <= _FEW else (1,)
    found = [factor * 10.0**power for power in range(first, last) for factor in within]
    return [*found, 10.0**last]


def plain_seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def named_seconds(value: float) -> str:
    """`20 us`, `5 ms`, `1 s`: of round numbers."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= unit * (1 - _EPSILON):
            return f"{round(value / unit):,} {name}"
    return f"{value * 1e9:.3g} ns"


@dataclass(frozen=True, slots=True)
class Axes:
    """A rectangle of the page, and what its edges stand for. Both axes begin at 0, or x at `log_from`."""

    most_x: float
    most_y: float
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    x_words: Words
    y_words: Words
    height: int = HEIGHT
    log_from: float | None = None
    """Of x, where it is logarithmic."""

    def x(self, value: float) -> float:
        right = WIDTH - RIGHT
        if self.log_from is None:
            return LEFT + (right - LEFT) * value / (self.most_x or 1)
        span = log10(self.most_x / self.log_from) or 1
        return LEFT + (right - LEFT) * max(0.0, log10(max(value, self.log_from) / self.log_from)) / span

    def y(self, value: float) -> float:
        bottom = self.height - BOTTOM
        return bottom - (bottom - TOP) * value / (self.most_y or 1)

    def drawn(self, x_title: str) -> str:
        right, bottom = WIDTH - RIGHT, self.height - BOTTOM
        parts = []
        for value in self.y_ticks:
            y = self.y(value)
            parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="grid"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" class="end">{escape(self.y_words(value))}</text>')
        for value in self.x_ticks:
            x = self.x(value)
            parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom + 4}" class="grid"/>')
            anchor = "end" if x > right - 20 else "mid"
            parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" class="{anchor}">{escape(self.x_words(value))}</text>')
        parts.append(f'<line x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}" class="axis"/>')
        if x_title:
            parts.append(f'<text x="{right}" y="{self.height - 4}" class="end">{escape(x_title)}</text>')
        return "".join(parts)
