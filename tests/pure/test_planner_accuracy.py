"""The planner beside what real engines printed: every record whose inputs suffice, and the page made from them.

The records are figures from public start-up logs: numbers and the options they came with, no text of the
logs themselves.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest
from tools.make_planner_accuracy import PAGE, RECORDS, Comparison, compare_all, compare_record, page
from tools.planner_records import number, read_records, rounding

SOURCES = Path(__file__).parents[2] / "src" / "octavo" / "planner"
ALL = read_records(RECORDS)
FOUND, SKIPPED = compare_all(ALL)
UNEXPLAINED: set[tuple[str, str]] = set()
"""Of (record, figure): what the page must print as unexplained."""


def test_most_records_say_enough() -> None:
    assert len({c.record for c in FOUND}) >= 35
    assert len(FOUND) >= 55


@pytest.mark.parametrize("found", FOUND, ids=lambda c: f"{c.record}-{c.what.replace(' ', '-')}")
def test_the_planner_agrees_within_rounding_or_one_percent(found: Comparison) -> None:
    if (found.record, found.what) in UNEXPLAINED:
        assert found.error > 0.01  # should it be explained one day, the list above is wrong
    else:
        assert found.error < 0.01


def test_what_stays_unexplained_is_under_one_percent_in_the_median_and_is_printed() -> None:
    assert median(c.error for c in FOUND) < 0.01
    written = page(ALL).partition("## Not explained")[2]
    for record, what in UNEXPLAINED:
        assert f"- {record}: {what}" in written


def test_every_record_is_compared_or_its_gap_is_named() -> None:
    assert {c.record for c in FOUND} | {s.record for s in SKIPPED} == {record.id for record in ALL}


def test_the_page_in_the_documents_is_the_one_that_the_command_writes() -> None:
    assert PAGE.read_text("utf-8") == page(ALL)


def test_no_rule_knows_a_record_or_a_model() -> None:
    names = re.compile(
        r"cap-\d+|\b(llama-?[234]|qwen|gemma|deepseek|gpt-?oss|kimi|glm|mistral|nemotron)\b", re.IGNORECASE
    )
    hits = [
        f"{path.name}: {match.group(0)}"
        for path in sorted(SOURCES.glob("*.py"))
        for match in names.finditer(path.read_text())
    ]
    assert hits == []


def test_a_wrong_prediction_would_be_seen() -> None:
    record = next(r for r in ALL if r.id == "cap-020")
    wrong = type(record)(record.id, record.engine, record.version, {**record.arch, "layers": 47}, record.inputs,
                         record.observed, record.confidence)  # fmt: skip
    found, _ = compare_record(wrong)
    assert max(c.error for c in found) > 0.02


@pytest.mark.parametrize(
    ("value", "reads", "half"),
    [
        (2.89, 2.89, 0.005),
        ("~55k", 55e3, 1e3),
        ("21.4M", 21.4e6, 5e4),
        (1478, 1478, 0),
        ("8 (16 before)", 8, 0),
        ("~512", 512, 1),
    ],
)
def test_loosely_written_numbers_are_read_with_their_rounding(value: object, reads: float, half: float) -> None:
    assert number(value) == reads
    assert rounding(value) == pytest.approx(half)
