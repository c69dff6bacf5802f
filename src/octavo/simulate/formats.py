"""Reads traces: our own JSON lines, Azure, Mooncake and Bailian, BurstGPT, and tables of lengths alone.

Owns the columns of each and what is wrong with a line: it is named by number, and refused or skipped as asked.
Arrivals count from the first one. Columns are found by name, so that a version with more of them reads as well.

Our own format, one object a line: `arrival` (seconds), `input_tokens` or `hash_ids` with `hash_block`,
`output_tokens`, and if wanted `max_tokens`, `session`, `think` (seconds), `priority`, `salt`.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from octavo.errors import ConfigError
from octavo.simulate.trace import HASH_IDS, TraceRequest

OnBad = Literal["refuse", "skip"]
_MOST_TOKENS = 2**31 - 1
_HASH_BLOCKS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_SHOWN = 5

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trace:
    """What a file holds: requests in order of arrival, and what was left out of it."""

    source: str
    format: str
    requests: tuple[TraceRequest, ...]
    skipped: tuple[str, ...] = ()
    """The first lines that were skipped, each with its number and what is wrong."""
    skipped_lines: int = 0
    has_arrivals: bool = True


class _Bad(Exception):
    """What is wrong with a line."""


def read_trace(path: str | Path, *, on_bad: OnBad = "refuse", sort: bool = False, limit: int | None = None) -> Trace:
    """The requests of a trace. Raises `ConfigError` naming the line, unless `on_bad` says to skip it.

    `sort` puts arrivals that are out of order in order; without it they count as bad lines.
    """
    if on_bad not in ("refuse", "skip"):
        raise ConfigError("on_bad", on_bad, "use refuse or skip")
    rows = _rows(_text(path), str(path))
    requests: list[TraceRequest] = []
    wrong: list[str] = []
    many = 0
    name, read, has_arrivals = "", _OWN.read, True
    for number, row in rows:
        if limit is not None and len(requests) >= limit and not sort:
            break
        try:
            if isinstance(row, _Bad):
                raise row
            if not name:
                kind = _kind(row, str(path))
                name, read, has_arrivals = kind.name, kind.read, kind.has_arrivals
            entry = read(row)
            if not sort:
                _in_order(entry, requests)
            requests.append(entry)
        except _Bad as bad:
            if on_bad == "refuse":
                raise ConfigError("trace", str(path), f"line {number}: {bad}") from None
            many += 1
            if len(wrong) < _SHOWN:
                wrong.append(f"line {number}: {bad}")
    if not requests:
        raise ConfigError("trace", str(path), "has no request in it" + (f" ({wrong[0]})" if wrong else ""))
    requests.sort(key=lambda entry: entry.arrival_ns)
    first = requests[0].arrival_ns
    requests = [replace(entry, arrival_ns=entry.arrival_ns - first) for entry in requests[:limit]]
    return Trace(Path(path).name, name, tuple(_hash_blocks(requests)), tuple(wrong), many, has_arrivals)


def _in_order(entry: TraceRequest, before: list[TraceRequest]) -> None:
    if before and entry.arrival_ns < before[-1].arrival_ns:
        raise _Bad("arrives before the request above it; sort them (sort=True, --sort)")


def _text(path: str | Path) -> str:
    try:
        data = Path(path).read_bytes()
        return (gzip.decompress(data) if str(path).endswith(".gz") else data).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError("trace", str(path), f"cannot be read ({error.strerror or error})") from None
    except (UnicodeDecodeError, EOFError) as error:
        raise ConfigError("trace", str(path), f"is no text ({error})") from None


def _rows(text: str, path: str) -> Iterator[tuple[int, Row | _Bad]]:
    """(line number, columns by lower-case name)."""
    lines = text.splitlines()
    if text.lstrip().startswith("{"):
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, _object(line)
        return
    reader = csv.reader(lines)
    header = [name.strip().lower() for name in next(reader, [])]
    if len(header) < 2:
        raise ConfigError("trace", path, "is neither JSON lines nor a CSV with a header")
    for values in reader:
        if values:
            short = len(values) < len(header)
            yield (
                reader.line_num,
                _Bad(f"has {len(values)} of {len(header)} columns")
                if short
                else dict(zip(header, values, strict=False)),
            )


def _object(line: str) -> Row | _Bad:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return _Bad("is not JSON")
    return {str(name).lower(): value for name, value in told.items()} if isinstance(told, dict) else _Bad("no object")


# -- kinds ------------------------------------------------------------------------------------------


def _own(row: Row) -> TraceRequest:
    unknown = sorted(set(row) - _OWN_FIELDS)
    if unknown:
        raise _Bad(f"has a field {unknown[0]!r} that no trace has; there are {', '.join(sorted(_OWN_FIELDS))}")
    hashes = _hashes(row)
    block = _whole(row, "hash_block", 1, 512) if hashes else 0
    return TraceRequest(
        arrival_ns=_time(row, "arrival"),
        input_tokens=_whole(row, "input_tokens", 1, len(hashes) * block or None),
        output_tokens=_whole(row, "output_tokens", 1),
        max_tokens=None if row.get("max_tokens") is None else _whole(row, "max_tokens", 1),
        hash_ids=hashes,
        hash_block=block,
        session=None if row.get("session") is None else str(row["session"]),
        think_ns=_time(row, "think", 0.0),
        priority=_whole(row, "priority", -(2**31), 0),
        salt=str(row.get("salt") or ""),
    )


def _azure(row: Row) -> TraceRequest:
    return TraceRequest(
        arrival_ns=_date_ns(row, "timestamp"),
        input_tokens=_whole(row, "contexttokens", 1),
        output_tokens=_whole(row, "generatedtokens", 1),
    )


def _mooncake(row: Row) -> TraceRequest:
    return TraceRequest(
        arrival_ns=_time(row, "timestamp", scale=10**6),
        input_tokens=_whole(row, "input_length", 1),
        output_tokens=_whole(row, "output_length", 1),
        hash_ids=_hashes(row),
        session=str(row["chat_id"]) if row.get("chat_id") is not None and row.get("parent_chat_id") == -1 else None,
    )


def _burst(row: Row) -> TraceRequest:
    return TraceRequest(
        arrival_ns=_time(row, "timestamp"),
        input_tokens=_whole(row, "request tokens", 1),
        output_tokens=_whole(row, "response tokens", 1),
    )


def _lengths(row: Row) -> TraceRequest:
    return TraceRequest(
        arrival_ns=0,
        input_tokens=_whole(row, "num_prefill_tokens", 1),
        output_tokens=_whole(row, "num_decode_tokens", 1),
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    columns: tuple[str, ...]
    read: Callable[[Row], TraceRequest]
    has_arrivals: bool = True


_OWN = _Kind("octavo", ("arrival", "output_tokens"), _own)
_OWN_FIELDS = {
    "arrival", "input_tokens", "hash_ids", "hash_block", "output_tokens", "max_tokens", "session", "think", "priority",
    "salt",
}  # fmt: skip
KINDS = (
    _OWN,
    _Kind("azure", ("timestamp", "contexttokens", "generatedtokens"), _azure),
    _Kind("mooncake", ("timestamp", "input_length", "output_length"), _mooncake),
    _Kind("burstgpt", ("timestamp", "request tokens", "response tokens"), _burst),
    _Kind("lengths", ("num_prefill_tokens", "num_decode_tokens"), _lengths, has_arrivals=False),
)


def _kind(row: Row, path: str) -> _Kind:
    for kind in KINDS:
        if all(column in row for column in kind.columns):
            return kind
    known = "; ".join(f"{kind.name}: {', '.join(kind.columns)}" for kind in KINDS)
    raise ConfigError("trace", path, f"has columns {', '.join(sorted(row))[:200]}, of no known kind ({known})")


def _hash_blocks(requests: list[TraceRequest]) -> Iterator[TraceRequest]:
    """Hash ids stand for blocks of a size that a trace does not say: the one that all its prompts agree with."""
    open_ = [entry for entry in requests if entry.hash_ids and not entry.hash_block]
    if not open_:
        yield from requests
        return
    fitting = [
        size for size in _HASH_BLOCKS if all(-(-e.input_tokens // size) in (len(e.hash_ids), len(e.hash_ids) + 1)
                                             for e in open_)
    ]  # fmt: skip
    if not fitting:
        raise ConfigError("trace", "hash_ids", f"fit no block size of {_HASH_BLOCKS} at which they cover the prompts")
    for entry in requests:
        yield replace(entry, hash_block=fitting[0]) if entry.hash_ids and not entry.hash_block else entry


# -- fields -----------------------------------------------------------------------------------------


def _whole(row: Row, name: str, low: int, default: int | None = None) -> int:
    value = row.get(name)
    if value is None and default is not None:
        return default
    number = _number(value)
    if number is None or number != int(number):
        raise _Bad(f"{name}={value!r:.60} is no whole number")
    if not low <= number <= _MOST_TOKENS:
        raise _Bad(f"{name}={value!r:.60} is not from {low} to {_MOST_TOKENS}")
    return int(number)


def _number(value: Any) -> float | None:
    """Finite, or None."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return None
    good = isinstance(number, (int, float)) and not isinstance(number, bool) and isfinite(number)
    return number if good else None


def _time(row: Row, name: str, default: float | None = None, scale: int = 10**9) -> int:
    value = row.get(name, default)
    number = _number(value)
    if number is None or number < 0:
        raise _Bad(f"{name}={value!r:.60} is no time from 0 on")
    return round(number * scale)


def _date_ns(row: Row, name: str) -> int:
    """A date with up to seven digits of a second, as Azure writes it."""
    text = str(row.get(name)).strip()
    whole, _, rest = text.partition(".")
    fraction = rest.rstrip("Z").partition("+")[0]
    try:
        moment = datetime.fromisoformat(whole + "+00:00")
        part = int(fraction.ljust(9, "0")[:9]) if fraction else 0
    except ValueError:
        raise _Bad(f"{name}={text!r:.60} is no date") from None
    return round(moment.timestamp()) * 10**9 + part


def _hashes(row: Row) -> tuple[int, ...]:
    value = row.get("hash_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < HASH_IDS for one in value):
        raise _Bad("hash_ids is no list of whole numbers from 0 to 2**29 - 3")
    return tuple(value)
