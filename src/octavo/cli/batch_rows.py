"""The input of a batch, row by row: what may be asked, what is refused, and each row's identity.

Owns the envelope `{"custom_id", "method", "url", "body"}`; what the body may hold is the server's to say.
A file of any length is read once to count it and once to answer it, never held.

Invariant: every line that is not blank becomes exactly one `Row` or `BadRow`, and its `id` is a
function of the run, of its place and of its text: the same row of the same input has the same `id`
in every run, no other has it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO

from octavo.errors import shorten
from octavo.server.body import parse_object
from octavo.server.errors import ApiError

URLS = ("/v1/chat/completions", "/v1/completions")
FIELDS = ("custom_id", "method", "url", "body")
MAX_LINE_BYTES = 8 * 2**20
DUPLICATE = "duplicate_custom_id"
ID_PREFIX = "batch_req_"
_BOM = b"\xef\xbb\xbf"
_SKIPPED_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Row:
    """One request that is to be sent."""

    number: int
    """Of its line, from 1."""
    id: str
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BadRow:
    """One line that is no request, and why."""

    number: int
    id: str
    custom_id: str | None
    code: str
    message: str

    def as_output(self) -> dict[str, Any]:
        error = {"code": self.code, "message": self.message, "line": self.number}
        return {"id": self.id, "custom_id": self.custom_id, "response": None, "error": error}


@dataclass(frozen=True, slots=True)
class Line:
    number: int
    text: bytes
    """Without its end; cut where it is longer than `MAX_LINE_BYTES`."""
    whole: bool


def run_digest(*decides_answers: Any) -> str:
    """Eight hex digits of everything beside the row itself that an answer depends on."""
    return blake2b(repr(decides_answers).encode(), digest_size=4).hexdigest()


def row_id(line: Line, run: str) -> str:
    digest = blake2b(f"{line.number}\n".encode(), digest_size=12)
    digest.update(line.text)
    return f"{ID_PREFIX}{digest.hexdigest()}{run}"


def read_lines(file: BinaryIO) -> Iterator[Line]:
    """Every line that is not blank."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        whole = raw.endswith(b"\n") or len(raw) <= MAX_LINE_BYTES
        rest = raw
        while not rest.endswith(b"\n") and (rest := file.readline(_SKIPPED_BYTES)):
            pass
        text = (raw.removeprefix(_BOM) if number == 1 else raw).strip()
        if text:
            yield Line(number, text[:MAX_LINE_BYTES], whole)


class RowReader:
    """Reads lines as rows. Knows the custom ids that came before, by 16 bytes each."""

    def __init__(self, run: str, seed: int) -> None:
        self._run = run
        self._seed = seed
        self._seen: set[bytes] = set()

    def read(self, line: Line) -> Row | BadRow:
        row_name = row_id(line, self._run)
        custom_id = None
        try:
            if not line.whole:
                raise _bad("line_too_long", f"is longer than {MAX_LINE_BYTES:,} bytes; split it into several rows")
            given = _object(line)
            custom_id = given["custom_id"] if isinstance(given.get("custom_id"), str) else None
            first = custom_id is None or self._is_first(custom_id)
            _check(given)
            if not first:
                raise _wrong("custom_id", given, "is that of a row before; give every row its own", code=DUPLICATE)
            return Row(line.number, row_name, given["custom_id"], given["url"], self._body(given))
        except ApiError as error:
            message = f"line {line.number}: {error.message}"
            return BadRow(line.number, row_name, custom_id, error.code or "invalid_row", message)

    def _is_first(self, custom_id: str) -> bool:
        digest = blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True

    def _body(self, given: dict[str, Any]) -> bytes:
        """As the server gets it. A row without a seed gets one of its own, whatever was answered before it."""
        body: dict[str, Any] = given["body"]
        if body.get("seed") is None:
            digest = blake2b(f"{self._seed}\n{given['custom_id']}".encode(), digest_size=8).digest()
            body = body | {"seed": int.from_bytes(digest, "big") >> 1}
        return json.dumps(body, ensure_ascii=False).encode()


def _object(line: Line) -> dict[str, Any]:
    try:
        found: dict[str, Any] = parse_object(line.text)
    except ApiError as error:
        raise _bad(error.code or "invalid_json", error.message.removeprefix("body: ").replace("line 1, ", "")) from None
    return found


def _check(given: dict[str, Any]) -> None:
    for name in given:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"a row has {', '.join(FIELDS)}"
            raise _bad("unknown_field", f"{shorten(name)[1:-1]}: is no field of a row; {hint}")
    for name in FIELDS:
        if name not in given:
            raise _bad("missing_field", f"{name}: is missing; a row has {', '.join(FIELDS)}")
    if not isinstance(given["custom_id"], str) or not given["custom_id"]:
        raise _wrong("custom_id", given, "must be a text that no other row has")
    if given["method"] != "POST":
        raise _wrong("method", given, "must be POST")
    if given["url"] not in URLS:
        raise _wrong("url", given, f"is not served in a batch; use {' or '.join(URLS)}", code="invalid_url")
    if not isinstance(given["body"], dict):
        raise _wrong("body", given, "must be an object, as it is sent to the server")
    if given["body"].get("stream") is True:
        raise _bad("unsupported_field", "body.stream=True: a batch answers in one piece; leave it out")


def _wrong(name: str, given: dict[str, Any], remedy: str, *, code: str = "invalid_value") -> ApiError:
    return _bad(code, f"{name}={shorten(given[name])}: {remedy}")


def _bad(code: str, message: str) -> ApiError:
    return ApiError(400, message, code=code)
