"""Numbers as a person reads them: bytes with binary units, seconds, counts. Nothing here computes a plan."""

from __future__ import annotations

_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def size(number: float) -> str:
    """`128 KiB`, `1.318 GiB`: four digits at most, none after the point that says nothing."""
    if number < 0:
        return f"-{size(-number)}"
    for unit, name in _BYTES:
        if number >= unit:
            return f"{digits(number / unit)} {name}"
    return f"{number:,.0f} B"


def digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    for unit, name in _TIMES:
        if seconds >= unit:
            return f"{digits(seconds / unit)} {name}"
    return f"{digits(seconds * 1e6)} us"


def parameters(number: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:,.0f}"


def layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"
