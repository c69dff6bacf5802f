"""The documents are true: names, links, commands and examples in them exist and run.

Owns what can be checked without a model: the list of public names, links, the index of decisions, make
targets, the changelog, and the doctests in every Markdown file. What a command prints with a real model
is tested where the command is.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "octavo"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def documented_names() -> Iterator[str]:
    """First column of the table under "Public names" in docs/README.md."""
    text = (ROOT / "docs" / "README.md").read_text()
    section = text.partition("## Public names")[2].partition("\n## ")[0]
    for cell in re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE):
        yield from re.findall(r"`(\w+)`", cell)


def test_the_public_names_are_exactly_the_documented_ones() -> None:
    names = list(documented_names())
    assert sorted(names) == sorted(octavo.__all__)
    assert dir(octavo) == sorted(octavo.__all__)


@pytest.mark.parametrize("name", sorted(octavo._LAZY))
def test_a_lazy_name_is_defined_where_it_is_looked_for(name: str) -> None:
    """Read, not imported: half of these need torch, which is hidden here."""
    path = PACKAGE.parent / (octavo._LAZY[name].replace(".", "/") + ".py")
    if not path.exists():
        path = path.with_suffix("") / "__init__.py"
    assert path.exists()
    kinds = (ast.ClassDef, ast.FunctionDef)
    assert name in {node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds)}


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engin'; its public names are LLM, AsyncLLM"):
        _ = octavo.Engin


def test_the_changelog_tells_of_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings
    assert headings[0] == octavo.__version__


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for document in DOCUMENTS:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" not in target and not target.startswith(("#", "mailto:")):
                path = document.parent / target.partition("#")[0]
                if not path.exists():
                    broken.append(f"{named(document)} -> {target}")
    assert broken == []


def test_every_decision_stands_in_the_index_and_has_a_number_of_its_own() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")
    assert [page for page in pages if not re.fullmatch(r"\d{3}-[a-z0-9-]+\.md", page)] == []
    assert len({page[:3] for page in pages}) == len(pages)
    index = (folder / "README.md").read_text()
    assert [page for page in pages if f"]({page})" not in index] == []


def test_every_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    mentioned = {
        (named(document), target)
        for document in DOCUMENTS
        for target in re.findall(r"(?:^|`)make ([a-z]+)", document.read_text(), flags=re.MULTILINE)
    }
    assert mentioned
    assert {(document, target) for document, target in mentioned if target not in targets} == set()


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if ">>> " in path.read_text()], ids=named)
def test_the_examples_in_a_document_print_what_it_says(document: Path) -> None:
    result = doctest.testfile(str(document), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
