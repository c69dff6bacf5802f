"""Rows of a batch: what is refused, with which words, and how a row is known again."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from tests.pure.batches import CHAT, RUN, read_rows, row, text_of

from octavo.cli import batch_rows
from octavo.cli.batch_rows import BadRow, Line, Row, RowReader, read_lines, row_id, run_digest

GOOD = row("a")


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


def only(found: list[Row | BadRow]) -> BadRow:
    assert len(found) == 1
    assert isinstance(found[0], BadRow)
    return found[0]


def test_a_good_row_is_sent_as_it_is_but_for_a_seed_of_its_own() -> None:
    chat = {"custom_id": "b", "method": "POST", "url": CHAT, "body": {"messages": [{"role": "user", "content": "é😀"}]}}
    first, second = read_rows([GOOD, chat])
    assert isinstance(first, Row)
    assert isinstance(second, Row)
    assert (first.number, first.custom_id, first.url) == (1, "a", "/v1/completions")
    sent = json.loads(second.body)
    assert sent.pop("seed") in range(2**63)
    assert sent == chat["body"]


def test_a_seed_depends_on_the_custom_id_and_the_seed_of_the_run_alone() -> None:
    def seeds(lines: list[Any], seed: int = 0) -> dict[str, int]:
        rows = [found for found in read_rows(lines, seed=seed) if isinstance(found, Row)]
        return {found.custom_id: json.loads(found.body)["seed"] for found in rows}

    rows = [row("a"), row("b"), row("c", seed=5)]
    found = seeds(rows)
    assert found["c"] == 5
    assert len(set(found.values())) == 3
    assert seeds(rows[::-1]) == found
    assert seeds(rows, seed=1)["a"] != found["a"]


@pytest.mark.parametrize(
    ("line", "custom_id", "code", "told"),
    [
        (b"{nope", None, "invalid_json", "line 1: is not JSON (expecting property name"),
        (b"[]", None, "invalid_json", "is JSON, but no object"),
        (b"null", None, "invalid_json", "is JSON, but no object"),
        (b'{"custom_id": "\xff"}', None, "invalid_utf8", "is not UTF-8 (byte 15)"),
        (b'{"custom_id": "a", "custom_id": "b"}', None, "duplicate_key", "custom_id: is there twice"),
        (b'{"custom_id": "a", "body": NaN}', None, "invalid_json", "holds NaN"),
        (b'{"custom_id": "\\ud800"}', None, "invalid_unicode", "surrogate"),
        (b"[" * 100_000, None, "invalid_json", "nested too deeply"),
        (without("custom_id"), None, "missing_field", "custom_id: is missing"),
        (without("method"), "a", "missing_field", "method: is missing"),
        (without("url"), "a", "missing_field", "url: is missing"),
        (without("body"), "a", "missing_field", "body: is missing"),
        (GOOD | {"custom_id": 7}, None, "invalid_value", "custom_id=7: must be a text"),
        (GOOD | {"custom_id": ""}, "", "invalid_value", "custom_id='': must be a text"),
        (GOOD | {"custom_id": None}, None, "invalid_value", "custom_id=None: must be a text"),
        (GOOD | {"method": "GET"}, "a", "invalid_value", "method='GET': must be POST"),
        (GOOD | {"url": "/v1/embeddings"}, "a", "invalid_url", "use /v1/chat/completions or /v1/completions"),
        (GOOD | {"url": ["x"]}, "a", "invalid_url", "url=['x']"),
        (GOOD | {"body": "hello"}, "a", "invalid_value", "body='hello': must be an object"),
        (GOOD | {"bdy": {}}, "a", "unknown_field", "bdy: is no field of a row; did you mean body?"),
        (row("a", stream=True), "a", "unsupported_field", "body.stream=True: a batch answers in one piece"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_request_becomes_an_error_that_says_why(
    line: Any, custom_id: str | None, code: str, told: str
) -> None:
    found = only(read_rows([line]))
    assert (found.custom_id, found.code) == (custom_id, code)
    assert found.message.startswith("line 1: ")
    assert told in found.message
    assert len(found.message) < 400
    shown = found.as_output()
    assert shown["response"] is None
    assert shown["error"] == {"code": code, "message": found.message, "line": 1}


def test_of_two_rows_with_one_custom_id_the_first_is_answered_even_if_it_is_wrong() -> None:
    rows = read_rows([row("a"), row("b"), row("a", (4,)), GOOD | {"custom_id": "c", "url": "/"}, row("c")])
    assert [isinstance(found, BadRow) and found.code for found in rows] == [
        False, False, "duplicate_custom_id", "invalid_url", "duplicate_custom_id",
    ]  # fmt: skip
    assert rows[2].custom_id == "a"


def test_blank_lines_are_no_rows_and_lines_keep_their_numbers() -> None:
    text = b"\xef\xbb\xbf" + text_of([GOOD]) + b"\r\n  \n" + json.dumps(row("b")).encode()
    lines = list(read_lines(io.BytesIO(text)))
    assert [line.number for line in lines] == [1, 4]
    assert all(isinstance(RowReader(RUN, 0).read(line), Row) for line in lines)


def test_a_line_of_any_length_is_one_row_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_rows, "MAX_LINE_BYTES", 200)
    monkeypatch.setattr(batch_rows, "_SKIPPED_BYTES", 64)
    exact = json.dumps(GOOD).encode()
    exact += b" " * (200 - len(exact))
    rows = read_rows([b"x" * 201, exact, b"x" * 199, b"y" * 1000, row("b")])
    assert [row.number for row in rows] == [1, 2, 3, 4, 5]
    assert [isinstance(row, BadRow) and row.code for row in rows] == [
        "line_too_long", False, "invalid_json", "line_too_long", False,
    ]  # fmt: skip


def test_the_identity_of_a_row_is_its_place_and_text_in_this_run() -> None:
    lines = [Line(1, b"a", True), Line(2, b"a", True), Line(1, b"b", True), Line(11, b"", True), Line(1, b"1", True)]
    ids = [row_id(line, RUN) for line in lines] + [row_id(lines[0], run_digest("another run"))]
    assert len(set(ids)) == len(ids)
    assert row_id(Line(1, b"a", True), RUN) == ids[0]
    assert all(found.startswith("batch_req_") for found in ids)


def test_memory_does_not_grow_with_the_rows_but_for_the_names_seen() -> None:
    def lines(count: int) -> Iterator[Line]:
        for number in range(1, count + 1):
            yield Line(number, json.dumps(row(f"row-{number}", "x" * 2000)).encode(), True)

    reader = RowReader(RUN, 0)
    tracemalloc.start()
    try:
        for line in lines(5_000):
            assert isinstance(reader.read(line), Row)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 5_000 * 200
