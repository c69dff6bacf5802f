"""Defaults from `generation_config.json`: what is taken, what ends a text, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ModelError
from octavo.models.generation_defaults import FILE_NAME, GenerationDefaults, read_generation_defaults


def defaults(tmp_path: Path, told: Any, config: dict[str, Any] | None = None, eos: int | None = None) -> Any:
    (tmp_path / FILE_NAME).write_text(told if isinstance(told, str) else json.dumps(told))
    return read_generation_defaults(tmp_path, config or {}, eos)


def test_only_what_is_stated_is_taken(tmp_path: Path) -> None:
    told = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1,
            "max_new_tokens": 9, "num_beams": 4, "pad_token_id": 3}  # fmt: skip
    assert defaults(tmp_path, told).sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1,
                                                 "repetition_penalty": 1.1}  # fmt: skip
    assert defaults(tmp_path, {"temperature": None}).sampling == {}


def test_do_sample_false_keeps_the_repetition_penalty_alone(tmp_path: Path) -> None:
    told = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.2}
    assert defaults(tmp_path, told | {"do_sample": False}).sampling == {"repetition_penalty": 1.2}
    assert defaults(tmp_path, told | {"do_sample": True}).sampling == told
    assert defaults(tmp_path, told).sampling == told


@pytest.mark.parametrize(
    ("told", "config", "tokenizer", "ends"),
    [
        ({"eos_token_id": 2}, {}, None, (2,)),
        ({"eos_token_id": [9, 2, 9]}, {}, None, (2, 9)),
        ({"eos_token_id": 2}, {"eos_token_id": 5}, 7, (2, 7)),
        ({}, {"eos_token_id": 5}, 7, (5, 7)),
        ({}, {"eos_token_id": [5, 6]}, None, (5, 6)),
        ({}, {"text_config": {"eos_token_id": 4}}, None, (4,)),
        ({}, {"eos_token_id": 3, "text_config": {"eos_token_id": 4}}, None, (3,)),
        ({"eos_token_id": 0}, {"eos_token_id": 5}, None, (0,)),
        ({}, {}, None, ()),
    ],
)
def test_ids_that_end_a_text(tmp_path: Path, told: Any, config: Any, tokenizer: int | None, ends: Any) -> None:
    assert defaults(tmp_path, told, config, tokenizer).eos_token_ids == ends


def test_without_the_file_the_config_says_what_ends_a_text(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path, {"eos_token_id": 2}) == GenerationDefaults({}, (2,))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "not an object"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": True}, "temperature=True"),
        ('{"temperature": NaN}', "temperature=nan"),
        ('{"temperature": Infinity}', "temperature=inf"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_p": 0}, "top_p=0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"eos_token_id": [1, -1]}, "eos_token_id=[1, -1]"),
        ({"eos_token_id": True}, "eos_token_id=True"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, told: Any, said: str) -> None:
    with pytest.raises(ModelError) as caught:
        defaults(tmp_path, told)
    assert said in str(caught.value)
    assert FILE_NAME in str(caught.value)
