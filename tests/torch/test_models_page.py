"""docs/models.md names every family of the tests once, under what is recognised of it."""

from __future__ import annotations

from pathlib import Path

from families import ARCHITECTURES, FAMILIES
from test_fused import WIRED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
STRUCTURES = {
    "norms before attention and before the feed-forward half": "pre",
    "the same with experts": "pre",
    "norms before and after each half": "sandwich",
    "norms after each half alone": "post",
    "both halves side by side": "parallel",
}


def rows() -> list[list[str]]:
    """Cells of the page's tables."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_what_is_recognised_stands_beside_its_structure() -> None:
    told = {family: STRUCTURES[name] for name, families in rows() if name in STRUCTURES for family in families.split()}
    assert told == WIRED


def test_experts_stand_in_a_row_of_their_own() -> None:
    row = next(families.split() for name, families in rows() if name == "the same with experts")
    with_experts = {name for name, fields in ARCHITECTURES.items() if "num_experts" in fields}
    assert set(row) == {name for name in with_experts if WIRED.get(name) == "pre"}


def test_every_other_family_stands_where_transformers_forward_is_kept() -> None:
    left = [word for name, _ in rows() if name not in STRUCTURES for word in name.split() if word in FAMILIES]
    assert sorted(left) == sorted(set(FAMILIES) - set(WIRED))
