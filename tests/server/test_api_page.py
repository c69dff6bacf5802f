"""docs/api.md names every address and every field of completions and chats, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from tests.server.serving import Running

from octavo.server.formats import STRUCTURED_FIELDS
from octavo.server.wire import ChatBody, CompletionBody

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def section(title: str) -> list[list[str]]:
    """Cells of the rows of the table under a heading."""
    part = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]
    assert rows
    return rows


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_field_of_a_request_is_on_the_page_beside_whom_it_belongs_to() -> None:
    told: dict[str, set[str]] = {"chats": set(), "completions": set()}
    for first, _, of, _ in section("Completions and chats"):
        for kind in told if of == "both" else (of,):
            told[kind].update(names(first))
    assert told["chats"] == set(ChatBody.model_fields)
    assert told["completions"] == set(CompletionBody.model_fields)


def test_every_kind_of_structured_output_is_on_the_page() -> None:
    assert {name for row in section("Structured outputs") for name in names(row[0])} == set(STRUCTURED_FIELDS)


def test_every_address_on_the_page_answers_and_one_that_does_not_is_told_of_them(server: Running) -> None:
    told = server.get("/nowhere").json()["error"]["message"]
    for address, method, _ in section("Addresses"):
        (path,) = names(address)
        found = server.get(path)
        assert found.status_code == (200 if method == "GET" else 405), path
        assert path in ("/", "/stats") or path in told
