"""The calibration file: what `octavo calibrate` measured, of which model, on which machine, with which options.

Owns the file's form and the refusals: a file of another version, model, machine or engine option is refused by the
field that differs, unless asked to be taken all the same. Reads and writes plain JSON; every number in it is checked.

    model, config    fields of the geometry, and the raw config.json it is read from
    machine, engine  what the times hold for
    step, host       seconds of each term, and the fit's own errors
    interval         by predicted seconds: four in five steps took between so many times and so many times that
    transfers        bytes per second and latency, each way
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.cost.terms import Sum, Term
from octavo.cost.transfer import TransferLaw
from octavo.errors import ConfigError
from octavo.geometry.model import ModelGeometry
from octavo.memory.transfers import Route

VERSION = 1
_KEY = "octavo_calibration"
_LARGEST = 64 * 2**20
_MOST = 1e4
"""Seconds, or ratios: nothing that was measured has more."""
ROUTES: tuple[Route, ...] = ("demote", "promote", "store", "load")


@dataclass(frozen=True, slots=True)
class Knot:
    """Steps of about this many seconds take between `low` and `high` times their prediction, four times in five."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    model_name: str
    model: Mapping[str, Any]
    config: Mapping[str, Any]
    machine: Mapping[str, Any]
    engine: Mapping[str, Any]
    step: Sum
    host: Sum
    knots: tuple[Knot, ...]
    """In order of seconds."""
    run_interval: tuple[float, float]
    """The same of many steps of one kind together: what their noise leaves, once it has averaged out."""
    transfers: Mapping[str, TransferLaw] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    """How it was measured: for a reader, not for the model."""


def model_fields(geometry: ModelGeometry) -> dict[str, Any]:
    """What makes one model's steps cost what they cost, and can be read from its config."""
    return {
        "model_type": geometry.model_type,
        "layers": geometry.num_layers,
        "hidden_size": geometry.hidden_size,
        "attention_heads": geometry.num_attention_heads,
        "intermediate_size": geometry.intermediate_size,
        "vocab_size": geometry.vocab_size,
        "kv_dtype": str(geometry.kv_dtype),
        "kv_bytes_per_token": geometry.bytes_per_token,
        "kv_bytes_per_sequence": geometry.fixed_bytes_per_sequence,
    }


def require_same(kind: str, known: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for the first field in which what is there differs from what was measured."""
    for name, value in known.items():
        if name in found and found[name] != value:
            raise ConfigError(
                f"{kind}.{name}", found[name], f"the calibration file was made with {value!r}: run octavo calibrate "
                f"for this {kind}, or take the file all the same with --foreign-calibration"
            )  # fmt: skip


def written(calibration: Calibration) -> str:
    """The file's text."""
    told: dict[str, Any] = {
        _KEY: VERSION,
        "model_name": calibration.model_name,
        "model": dict(calibration.model),
        "machine": dict(calibration.machine),
        "engine": dict(calibration.engine),
        "step": _terms_told(calibration.step),
        "host": _terms_told(calibration.host),
        "interval": [{"seconds": k.seconds, "low": k.low, "high": k.high} for k in calibration.knots],
        "run_interval": list(calibration.run_interval),
        "errors": dict(calibration.errors),
        "transfers": {name: law.told() for name, law in calibration.transfers.items()},
        "about": dict(calibration.about),
        "config": dict(calibration.config),
    }
    return json.dumps(told, indent=1) + "\n"


def read_calibration(path: Path) -> Calibration:
    """Raises `ConfigError` where it is no calibration file, or one of another version."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigError("calibration", str(path), f"is larger than {_LARGEST >> 20} MiB, which no such file is")
        told = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("calibration", str(path), f"cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError("calibration", str(path), f"is not JSON ({error}); give a file of octavo calibrate") from None
    return calibration_of(told, str(path))


def calibration_of(told: Any, name: str = "calibration") -> Calibration:
    """The same from the parsed file."""
    if not isinstance(told, dict) or _KEY not in told:
        raise ConfigError("calibration", name, f"has no {_KEY!r}: it is not a file of octavo calibrate")
    if told[_KEY] != VERSION:
        raise ConfigError(_KEY, told[_KEY], f"this octavo reads version {VERSION}; calibrate again")
    knots = tuple(_knot(one) for one in _list(told, "interval"))
    if not knots or list(knots) != sorted(knots, key=lambda k: k.seconds):
        raise ConfigError("interval", told["interval"], "must be a list in order of seconds; calibrate again")
    run = [_number(one, "run_interval") for one in _list(told, "run_interval")]
    if len(run) != 2 or not 0 < run[0] <= run[1]:
        raise ConfigError("run_interval", run, "must be two numbers in order; calibrate again")
    transfers = {str(route): TransferLaw.of(law, str(route)) for route, law in _object(told, "transfers").items()}
    unknown = [route for route in transfers if route not in ROUTES]
    if unknown:
        raise ConfigError("transfers", unknown[0], f"is no way between tiers; there are {', '.join(ROUTES)}")
    return Calibration(
        model_name=str(told.get("model_name", "")),
        model=_object(told, "model"),
        config=_object(told, "config"),
        machine=_object(told, "machine"),
        engine=_object(told, "engine"),
        step=_terms(told, "step"),
        host=_terms(told, "host"),
        knots=knots,
        run_interval=(run[0], run[1]),
        transfers=transfers,
        errors={str(k): _number(v, f"errors.{k}") for k, v in _object(told, "errors").items()},
        about=_object(told, "about"),
    )


def _terms_told(total: Sum) -> dict[str, float]:
    return {term.name: seconds for term, seconds in zip(total.terms, total.seconds, strict=True)}


def _terms(told: Mapping[str, Any], name: str) -> Sum:
    entries = _object(told, name)
    if not entries:
        raise ConfigError(name, entries, "has no terms; calibrate again")
    terms = tuple(Term.named(entry) for entry in entries)
    seconds = tuple(_number(value, f"{name}.{entry}") for entry, value in entries.items())
    if sum(seconds) <= 0:
        raise ConfigError(name, entries, "takes no time at all; calibrate again")
    return Sum(terms, seconds)


def _knot(one: Any) -> Knot:
    if not isinstance(one, dict):
        raise ConfigError("interval", one, "must hold objects with seconds, low and high; calibrate again")
    seconds, low, high = (_number(one.get(name), f"interval.{name}") for name in ("seconds", "low", "high"))
    if not 0 < low <= high:
        raise ConfigError("interval", one, "must be above 0 and in order; calibrate again")
    return Knot(seconds, low, high)


def _object(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = told.get(name)
    if not isinstance(value, dict):
        raise ConfigError(name, value, "must be a JSON object; give a file of octavo calibrate")
    return value


def _list(told: Mapping[str, Any], name: str) -> list[Any]:
    value = told.get(name)
    if not isinstance(value, list):
        raise ConfigError(name, value, "must be a JSON list; give a file of octavo calibrate")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST:
        raise ConfigError(name, value, f"must be a number from 0 to {_MOST:g}; calibrate again")
    return float(value)
