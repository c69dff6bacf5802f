"""Tokenizers: defaults of plain prompts, chats without a second BOS, and templates that refuse a request."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import tiny_tokenizer

from octavo.errors import ModelError, RequestError
from octavo.models.tokenizer import encode_messages, encode_prompt, load_tokenizer

HELLO = [{"role": "user", "content": "hello world"}]


def test_a_prompt_gets_the_tokenizers_own_special_tokens() -> None:
    assert encode_prompt(tiny_tokenizer(), "hello again") == [1, 5, 7]


def test_a_chat_begins_once_and_ends_where_the_assistant_answers() -> None:
    assert encode_messages(tiny_tokenizer(), HELLO) == [1, 3, 5, 6, 4]


def test_a_role_that_the_template_refuses_is_an_error_about_messages() -> None:
    with pytest.raises(RequestError) as caught:
        encode_messages(tiny_tokenizer(), [{"role": "system", "content": "hello"}])
    assert caught.value.field == "messages"
    assert "role system is not served" in str(caught.value)


def test_a_model_without_a_template_refuses_chats() -> None:
    with pytest.raises(RequestError, match="no chat template") as caught:
        encode_messages(tiny_tokenizer(None), HELLO)
    assert caught.value.field == "messages"


def test_a_template_can_be_named_and_a_broken_one_is_refused() -> None:
    assert encode_messages(tiny_tokenizer(None), HELLO, template="{{ messages[0].content }}") == [5, 6]
    with pytest.raises(RequestError, match="template refused"):
        encode_messages(tiny_tokenizer(None), HELLO, template="{% if %}")


def test_a_chat_of_no_messages_is_refused() -> None:
    with pytest.raises(RequestError, match="at least one message"):
        encode_messages(tiny_tokenizer(), [])


def test_a_directory_without_tokenizer_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer file") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.field == "tokenizer"
    tiny_tokenizer().save_pretrained(tmp_path)
    assert encode_prompt(load_tokenizer(tmp_path), "hello") == [1, 5]
    for content, said in (("{", "cannot be read"), ("version https://git-lfs.github.com/spec/v1", "git-lfs pointer")):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError, match=said):
            load_tokenizer(tmp_path)
