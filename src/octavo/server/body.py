"""From the bytes of a request to one JSON object, strictly.

Owns the size limit and everything that is wrong below the level of fields: not JSON, not UTF-8, keys
given twice, NaN, numbers no machine holds, text that is no Unicode. Knows no field by name.

Invariant: what comes back is a dict whose strings are all well-formed Unicode; a body over the limit
is never held in memory.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from octavo.errors import shorten
from octavo.server.errors import ApiError

T = TypeVar("T")

OFF_LOOP_BYTES = 64 * 1024
"""Bodies beyond this are parsed and checked in a thread: the event loop has streams to serve."""
MAX_DEPTH = 100
"""Levels of lists and objects inside each other."""
MAX_PARTS = 2**18
"""Lists and objects in all. While Python makes millions of them at once, no other thread runs."""
_STRINGS = re.compile(r'"(?:[^"\\]+|\\.?)*+"?', re.DOTALL)
"""One that has no end goes to the end of the text: whatever a body holds, each character is looked at once."""
DISCARDED_BODIES = 8
"""A body that is too large is read on, and thrown away, up to this many times the limit.

A client that is still sending would miss an answer that comes earlier.
"""


async def read_as(request: Request, limit_bytes: int, make: Callable[[dict[str, Any]], T]) -> tuple[T, int]:
    """What `make` makes of the JSON object in the body, and the body's bytes. Raises `ApiError`: 413, 415 or 400."""
    _check_type(request)
    raw = await _read(request, limit_bytes)
    if len(raw) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(lambda: make(parse_object(raw))), len(raw)
    return make(parse_object(raw)), len(raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises `ApiError` (400) unless `raw` is one JSON object in UTF-8."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise _malformed(f"is not UTF-8 (byte {error.start})", code="invalid_utf8") from None
    brackets = text.count("[") + text.count("{")
    if brackets > MAX_PARTS:
        _check_parts(text)
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise _malformed(f"is not JSON ({error.msg.lower()}, {place})", code="invalid_json") from None
    except RecursionError:
        raise _malformed("is nested too deeply", code="invalid_json") from None
    except ValueError:  # Python refuses to read an integer of thousands of digits
        raise _malformed("holds a number of too many digits", code="invalid_json") from None
    if not isinstance(found, dict):
        raise _malformed(f"is JSON, but no object: {shorten(found)}", code="invalid_json")
    if brackets > MAX_DEPTH:
        _check_depth(found)
    if "\\u" in text:
        _check_inside(found)
    return found


def _check_type(request: Request) -> None:
    kind, _, rest = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json":
        raise ApiError(
            415,
            f"Content-Type={shorten(kind)}: send the body as application/json "
            "(with curl: -H 'Content-Type: application/json')",
            code="unsupported_media_type",
        )
    charset = rest.partition("charset=")[2].strip(" \"'").lower()
    if charset not in ("", "utf-8", "utf8"):
        raise ApiError(415, f"charset={shorten(charset)}: JSON is sent as UTF-8", code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise ApiError(
            415, f"Content-Encoding={shorten(encoding)}: send the body uncompressed", code="unsupported_media_type"
        )


async def _read(request: Request, limit_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
    if size > limit_bytes * DISCARDED_BODIES:
        raise _too_large(f"{size:,}", limit_bytes)
    parts: list[bytes] = []
    got = 0
    try:
        async for part in request.stream():
            got += len(part)
            if got <= limit_bytes:
                parts.append(part)
            else:
                parts.clear()
            if got > limit_bytes * DISCARDED_BODIES:
                break
    except ClientDisconnect:
        error = ApiError(400, "the client left before its request was complete", code="client_left")
        error.counted = True  # nobody was refused
        raise error from None
    if got > limit_bytes:
        raise _too_large(f"{max(got, size):,}", limit_bytes)
    return b"".join(parts)


def _too_large(size: str, limit_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"body={size} bytes: at most {limit_bytes:,} are read; send less, or start with a larger --max-body-bytes",
        code="request_too_large",
    )


def _malformed(what: str, *, code: str) -> ApiError:
    return ApiError(400, f"body: {what}; send one JSON object in UTF-8", code=code)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        name = shorten(twice)[1:-1]  # printable, whatever the key is made of
        raise ApiError(400, f"{name}: is there twice; send it once", param=name, code="duplicate_key")
    return found


def _no_constant(name: str) -> Any:
    raise _malformed(f"holds {name}, which no JSON has", code="invalid_json")


def _check_parts(text: str) -> None:
    bare = _STRINGS.sub("", text)
    parts = bare.count("[") + bare.count("{")
    if parts > MAX_PARTS:
        raise _malformed(f"holds {parts:,} lists and objects, at most {MAX_PARTS:,} are read", code="invalid_json")


def _check_depth(found: dict[str, Any]) -> None:
    """Refuse what is nested deeper than anything here is. Level by level: a body may hold millions of lists."""
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        items = (one.values() if type(one) is dict else one for one in level)
        level = [item for held in items for item in held if type(item) is dict or type(item) is list]
        if not level:
            return
    raise _malformed(f"is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _check_inside(found: dict[str, Any]) -> None:
    """Refuse half a surrogate pair, which UTF-8 cannot spell."""
    with suppress(UnicodeEncodeError):
        json.dumps(found, ensure_ascii=False).encode()
        return
    left: list[tuple[str, Any]] = [("", found)]
    while left:
        path, value = left.pop()
        if isinstance(value, str):
            _check_text(path, value)
        elif isinstance(value, dict):
            for key in value:
                _check_text(path, key)
            left.extend((f"{path}.{key}" if path else key, item) for key, item in value.items())
        elif isinstance(value, list):
            left.extend((f"{path}[{i}]", item) for i, item in enumerate(value) if isinstance(item, (str, dict, list)))


def _check_text(path: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{path or 'body'}={shorten(text)}: holds half of a surrogate pair; send well-formed Unicode"
        raise ApiError(400, message, param=path or None, code="invalid_unicode") from None
