"""What a field of the configuration is: its help, limits and choices, and the check that they make of a value.

Owns how values are written (`512MiB`) and refused. Which fields there are is `config`'s.
"""

from __future__ import annotations

import math
from dataclasses import Field, field, fields
from numbers import Integral, Real
from typing import Any

from octavo.errors import ConfigError

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def option_field(
    kind: str,
    default: Any,
    help_text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    planned: tuple[str, ...] = (),
) -> Any:
    """A field with what the checks, the command line and the docs need to know of it."""
    metadata = {"kind": kind, "help": help_text, "low": low, "high": high, "choices": choices, "planned": planned}
    return field(default=default, metadata=metadata)


def parse_bytes(name: str, value: Any) -> int:
    """A number of bytes, or a text such as `512MiB`, `2G` or `1.5GB` (GB is 10**9, GiB is 2**30)."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    remedy = "must be a number of bytes, or a text such as 512MiB or 2GB"
    if not isinstance(value, str):
        raise ConfigError(name, value, remedy)
    text = value.strip().lower().replace("_", "")
    digits = len(text) - len(text.lstrip("0123456789."))
    unit = text[digits:].strip().removesuffix("b")
    try:
        number = float(text[:digits])
    except ValueError:
        raise ConfigError(name, value, remedy) from None
    if unit not in _UNITS or not math.isfinite(number):
        raise ConfigError(name, value, remedy)
    return round(number * _UNITS[unit])


def check_fields(config: Any) -> None:
    """Every field of a concern against its metadata; normalised values are put in place once, here."""
    for f in fields(config):
        value = getattr(config, f.name)
        if value is None and f.default is None:
            continue
        checked = _CHECKS[f.metadata["kind"]](f, value)
        if checked is not value:
            object.__setattr__(config, f.name, checked)


def _check_text(f: Field[Any], value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f.name, value, "must be a non-empty text")
    return value


def _check_flag(f: Field[Any], value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f.name, value, "must be true or false")
    return value


def _check_int(f: Field[Any], value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f.name, value, f"must be a whole number{_range(f, ' of')}")
    _within(f, int(value))
    return int(value)


def _check_float(f: Field[Any], value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:  # noqa: PLR0124 - only NaN differs from itself
        raise ConfigError(f.name, value, f"must be a number{_range(f, ' of')}")
    _within(f, value)
    return float(value)


def _check_bytes(f: Field[Any], value: Any) -> int:
    number = parse_bytes(f.name, value)
    _within(f, number)
    return number


def _check_choice(f: Field[Any], value: Any) -> str:
    choices: tuple[str, ...] = f.metadata["choices"]
    if isinstance(value, str) and value in f.metadata["planned"]:
        raise ConfigError(f.name, value, f"not served yet; use one of {', '.join(choices)}")
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f.name, value, f"use one of {', '.join(choices)}")
    return value


def _within(f: Field[Any], value: Any) -> None:
    low, high = f.metadata["low"], f.metadata["high"]
    if (low is not None and value < low) or (high is not None and value > high):
        raise ConfigError(f.name, value, f"must be{_range(f)}")


def _range(f: Field[Any], of: str = "") -> str:
    low, high = f.metadata["low"], f.metadata["high"]
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return f"{of} at least {low}" if low is not None else ""


_CHECKS = {
    "text": _check_text,
    "flag": _check_flag,
    "int": _check_int,
    "float": _check_float,
    "bytes": _check_bytes,
    "choice": _check_choice,
}
