"""docs/python.md names every public method of `LLM` and every field of what it returns, and no other."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from octavo.engine.llm import LLM
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.scheduling.events import FinishReason
from octavo.scheduling.request import StructuredOutputs

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()


def told(name: str) -> list[str]:
    """The first column of the table of a class."""
    table = PAGE.partition(f"| of `{name}` |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
    return [found for cell in cells for found in re.findall(r"`(\w+)`", cell)]


def test_every_public_method_of_an_llm_is_on_the_page() -> None:
    assert sorted(told("LLM")) == sorted(name for name in vars(LLM) if not name.startswith("_"))


@pytest.mark.parametrize("output", [RequestOutput, CompletionOutput])
def test_every_field_of_an_output_is_on_the_page(output: type) -> None:
    properties = [name for name, value in vars(output).items() if isinstance(value, property)]
    names = [field.name for field in fields(output)]  # type: ignore[arg-type]  # both are dataclasses
    assert sorted(told(output.__name__)) == sorted([*names, *properties])


def test_ends_and_languages_on_the_page_are_those_that_there_are() -> None:
    assert get_origin(FinishReason) is Literal
    row = next(line for line in PAGE.splitlines() if line.startswith("| `finish_reason`"))
    assert re.findall(r"`(\w+)`", row)[1:] == list(get_args(FinishReason))
    kinds = PAGE.partition("with kind")[2].partition(".")[0]
    assert set(re.findall(r"`(\w+)`", kinds)) == set(get_args(get_type_hints(StructuredOutputs)["kind"]))


def test_the_examples_are_python() -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        ast.parse(example)
