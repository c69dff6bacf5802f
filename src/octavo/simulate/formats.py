"""Reads traces: our own JSON lines, Azure, Mooncake and Bailian, BurstGPT, and tables of lengths alone.

Owns the columns of each and what is wrong with a line: it is named by number, and refused or skipped as asked.
Arrivals count from the first one. Columns are found by name, so that a version with more of them reads as well.

Our own format, one object a line: `arrival` (seconds), `input_tokens` or `hash_ids` with `hash_block`,
`output_tokens`, and if wanted `max_tokens`, `session`, `think` (seconds), `priority`, `salt`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from octavo.errors import ConfigError
from octavo.simulate.trace import HASH_IDS, MOST_NS, MOST_TOKENS, TraceRequest
from octavo.text_files import read_text

OnBad = Literal["refuse", "skip"]
_HASH_BLOCKS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_SHOWN = 5
_LOOKED_AT = 2**16
_CONVERSATIONS = (
    "is of conversations, as ShareGPT's: texts, without lengths or arrivals; --lengths sharegpt draws lengths like "
    "theirs, or write a line for each request"
)
_DATE = re.compile(r"([0-9T: -]+?)(?:\.([0-9]+))?(Z|[+-][0-9]{2}:[0-9]{2})?")

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
    if limit is not None and limit < 1:
        raise ConfigError("requests", limit, "must be at least 1")
    wrong = _Wrong(str(path), on_bad)
    requests: list[TraceRequest] = []
    lines: list[int] = []
    kind: _Kind | None = None
    for number, row in _rows(read_text(path, "trace"), str(path)):
        if limit is not None and len(requests) >= limit and not sort:
            break
        try:
            if isinstance(row, _Bad):
                raise row
            kind = kind or _kind(row, str(path))
            entry = kind.read(row)
            if not sort:
                _in_order(entry, requests)
            requests.append(entry)
            lines.append(number)
        except _Bad as bad:
            wrong.note(number, bad)
    requests = list(_hash_blocks(requests, lines, wrong))
    if kind is None or not requests:
        raise ConfigError("trace", str(path), "has no request in it" + "".join(f" ({one})" for one in wrong.first[:1]))
    requests.sort(key=lambda entry: entry.arrival_ns)
    first = requests[0].arrival_ns
    told = tuple(replace(entry, arrival_ns=entry.arrival_ns - first) for entry in requests[:limit])
    return Trace(Path(path).name, kind.name, told, tuple(wrong.first), wrong.lines, kind.has_arrivals)


class _Wrong:
    """Lines that are wrong: the first is refused, or all are counted and the first few kept."""

    def __init__(self, path: str, on_bad: OnBad) -> None:
        self._path = path
        self._on_bad = on_bad
        self.first: list[str] = []
        self.lines = 0

    def note(self, number: int, bad: _Bad) -> None:
        """Raises `ConfigError` unless wrong lines are skipped."""
        if self._on_bad == "refuse":
            raise ConfigError("trace", self._path, f"line {number}: {bad}") from None
        self.lines += 1
        if len(self.first) < _SHOWN:
            self.first.append(f"line {number}: {bad}")


def _in_order(entry: TraceRequest, before: list[TraceRequest]) -> None:
    if before and entry.arrival_ns < before[-1].arrival_ns:
        raise _Bad("arrives before the request above it; sort them (sort=True, --sort)")


def _rows(text: str, path: str) -> Iterator[tuple[int, Row | _Bad]]:
    """(line number, columns by lower-case name)."""
    # Not `splitlines`: some of what it takes for an end of line may stand in a JSON text.
    lines = text.replace("\r\n", "\n").split("\n")
    begin = text.lstrip()[:1]
    if begin in ("", "["):
        what = "is empty" if not begin else "is one JSON list; write one object a line"
        if begin and '"conversations"' in text[:_LOOKED_AT]:
            what = _CONVERSATIONS
        raise ConfigError("trace", path, what)
    if begin == "{":
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, _object(line)
        return
    yield from _columns(lines, path)


def _columns(lines: list[str], path: str) -> Iterator[tuple[int, Row | _Bad]]:
    reader = csv.reader(lines)
    header: list[str] = []
    while True:
        try:
            values = next(reader, None)
        except csv.Error as error:
            yield reader.line_num, _Bad(f"is no line of a CSV ({error})")
            continue
        if not header:
            header = [name.strip().lower() for name in values or []]
            if len(header) < 2:
                raise ConfigError("trace", path, "is neither JSON lines nor a CSV with a header")
        elif values is None:
            return
        elif values:
            short = len(values) < len(header)
            told = f"has {len(values)} of {len(header)} columns"
            yield reader.line_num, _Bad(told) if short else dict(zip(header, values, strict=False))


def _object(line: str) -> Row | _Bad:
    try:
        told = json.loads(line, object_pairs_hook=_once)
    except _Bad as bad:
        return bad
    except (ValueError, RecursionError):
        return _Bad("is not JSON")
    return told if isinstance(told, dict) else _Bad("is no JSON object")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Columns by lower-case name. Raises `_Bad` for a name that is there twice."""
    found = {name.lower(): value for name, value in pairs}
    if len(found) < len(pairs):
        names = [name.lower() for name, _ in pairs]
        raise _Bad(f"has {next(name for name in names if names.count(name) > 1)!r:.60} more than once")
    return found


# -- kinds ------------------------------------------------------------------------------------------


def _own(row: Row) -> TraceRequest:
    unknown = sorted(set(row) - _OWN_FIELDS)
    if unknown:
        raise _Bad(f"has a field {unknown[0]!r} that no trace has; there are {', '.join(sorted(_OWN_FIELDS))}")
    hashes = _hashes(row)
    block = _whole(row, "hash_block", 1, 512) if hashes else 0
    if len(hashes) * block > MOST_TOKENS:
        raise _Bad(f"{len(hashes)} hash_ids of {block} tokens are more than {MOST_TOKENS} tokens")
    return TraceRequest(
        arrival_ns=_time(row, "arrival"),
        input_tokens=_whole(row, "input_tokens", 1, len(hashes) * block or None),
        output_tokens=_whole(row, "output_tokens", 1),
        max_tokens=None if row.get("max_tokens") is None else _whole(row, "max_tokens", 1),
        hash_ids=hashes,
        hash_block=block,
        session=None if row.get("session") is None else str(row["session"]),
        think_ns=_time(row, "think", 0.0),
        priority=_whole(row, "priority", -(2**31), 0, 2**31 - 1),
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
    if "conversations" in row:
        raise ConfigError("trace", path, _CONVERSATIONS)
    known = "; ".join(f"{kind.name}: {', '.join(kind.columns)}" for kind in KINDS)
    raise ConfigError("trace", path, f"has columns {', '.join(sorted(row))[:200]}, of no known kind ({known})")


def _hash_blocks(requests: list[TraceRequest], lines: list[int], wrong: _Wrong) -> Iterator[TraceRequest]:
    """Hash ids stand for blocks of a size that a trace does not say: the one that most of its prompts agree with.

    The others are wrong lines.
    """
    open_ = [entry for entry in requests if entry.hash_ids and not entry.hash_block]
    size = max(_HASH_BLOCKS, key=lambda size: sum(_covers(entry, size) for entry in open_)) if open_ else 0
    for number, entry in zip(lines, requests, strict=True):
        if not entry.hash_ids or entry.hash_block:
            yield entry
        elif _covers(entry, size):
            yield replace(entry, hash_block=size)
        else:
            held = f"{len(entry.hash_ids)} hash_ids do not cover its {entry.input_tokens} input tokens"
            wrong.note(number, _Bad(f"{held} by blocks of {size}, as most others do"))


def _covers(entry: TraceRequest, size: int) -> bool:
    return -(-entry.input_tokens // size) in (len(entry.hash_ids), len(entry.hash_ids) + 1)


# -- fields -----------------------------------------------------------------------------------------


def _whole(row: Row, name: str, low: int, default: int | None = None, high: int = MOST_TOKENS) -> int:
    value = row.get(name)
    if value is None and default is not None:
        return default
    number = _number(value)
    if number is None or number != int(number):
        raise _Bad(f"{name}={value!r:.60} is no whole number")
    if not low <= number <= high:
        raise _Bad(f"{name}={value!r:.60} is not from {low} to {high}")
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
    if number is None or not 0 <= number <= MOST_NS / scale:
        raise _Bad(f"{name}={value!r:.60} is no time from 0 to {MOST_NS / scale:.2g}")
    return round(number * scale)


def _date_ns(row: Row, name: str) -> int:
    """A date with any digits of a second, and an offset or none, as Azure writes it. Without one it is that of UTC."""
    text = str(row.get(name)).strip()
    found = _DATE.fullmatch(text)
    whole, fraction, offset = ("", "", "") if found is None else found.groups()
    try:
        moment = datetime.fromisoformat(whole + ("+00:00" if offset in (None, "Z") else offset))
    except ValueError:
        raise _Bad(f"{name}={text!r:.60} is no date") from None
    return round(moment.timestamp()) * 10**9 + int((fraction or "0").ljust(9, "0")[:9])


def _hashes(row: Row) -> tuple[int, ...]:
    value = row.get("hash_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < HASH_IDS for one in value):
        raise _Bad("hash_ids is no list of whole numbers from 0 to 2**29 - 3")
    return tuple(value)
