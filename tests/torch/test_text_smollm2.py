"""Streams of text through the tokenizer of the default model, SmolLM2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from octavo.engine.text import BROKEN, TextStream
from octavo.errors import ModelError
from octavo.models.embedded import embedded_checkpoint
from octavo.models.tokenizer import encode_messages, encode_prompt, load_tokenizer
from octavo.scheduling.request import Request, SamplingParams

TEXTS = [
    "삼겹살 👋🏽 ďábelské 你好",
    "שלום hello עולם world",
    "👩‍👩‍👧‍👦 family, 🇨🇿 flag",
    "  indented\n\tcode = [1, 2]\n\n\n# 注释\n",
    "don't , stop .",
    "𐎀𐎁 𐍈 ℵ 🀄",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    try:
        return load_tokenizer(embedded_checkpoint())
    except ModelError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


def stream(tokenizer: Any, prompt: Sequence[int], **params: Any) -> TextStream:
    request = Request(
        request_id="r",
        prompt_token_ids=np.array(prompt, np.int32),
        params=SamplingParams(**params),
        eos_token_ids=(tokenizer.eos_token_id,),
    )
    return TextStream(tokenizer, request)


def chat(tokenizer: Any) -> list[int]:
    return encode_messages(tokenizer, [{"role": "user", "content": "say it"}])


@pytest.mark.parametrize("text", TEXTS)
def test_text_arrives_whole_in_a_chat_and_in_a_completion(tokenizer: Any, text: str) -> None:
    ids = [*encode_prompt(tokenizer, text), tokenizer.eos_token_id]
    for prompt in (chat(tokenizer), encode_prompt(tokenizer, "你好, world")):
        made = stream(tokenizer, prompt)
        pieces = [made.push([token]).text for token in ids]
        assert all(BROKEN not in piece for piece in pieces)
        assert "".join(pieces) == text
        assert made.finish() == ""


def test_a_text_is_in_more_than_one_piece(tokenizer: Any) -> None:
    made = stream(tokenizer, chat(tokenizer))
    pieces = [made.push([token]).text for token in encode_prompt(tokenizer, TEXTS[0])]
    assert sum(map(bool, pieces)) > 8
    assert "" in pieces  # some of its characters are split over tokens


@pytest.mark.parametrize(("stop", "wanted"), [("ta ga", "alpha be"), ("👋🏽", "alpha beta gamma "), ("a", "")])
def test_stop_strings_cut_exactly(tokenizer: Any, stop: str, wanted: str) -> None:
    made = stream(tokenizer, chat(tokenizer), stop=["never in here", stop])
    delta = made.push(encode_prompt(tokenizer, "alpha beta gamma 👋🏽 delta"))
    assert (delta.text + made.finish(), delta.stopped) == (wanted, stop)


def test_a_visible_stop_token_does_not_leak(tokenizer: Any) -> None:
    ids = encode_prompt(tokenizer, "alpha beta gamma")
    made = stream(tokenizer, chat(tokenizer), stop_token_ids=[ids[-1]])
    assert made.push(ids).text == tokenizer.decode(ids[:-1])
