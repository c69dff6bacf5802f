"""The parts of a chat without a model: what is typed, what is remembered, what can be set."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.chat_history import History, load, save
from octavo.cli.chat_input import PipedLines, Typed, read_message
from octavo.cli.chat_sampling import KINDS, checked, parse_setting, shown
from octavo.cli.chat_session import _Pieces
from octavo.errors import RequestError


class Given:
    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)
        self.prompts: list[str] = []

    def line(self, prompt: str) -> str | None:
        self.prompts.append(prompt)
        return next(self._lines, None)


def messages(*lines: str) -> list[Typed]:
    given, found = Given(*lines), []
    while (typed := read_message(given)) is not None:
        found.append(typed)
    return found


# -- what is typed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["hello", "", "  ", "world"], ["hello", "world"]),
        (["one \\", "two\\", "three", "four"], ["one \ntwo\nthree", "four"]),
        (["one \\"], ["one "]),
        (['"""one line"""'], ["one line"]),
        (['"""', "one", "", "  two", '"""', "three"], ["one\n\n  two", "three"]),
        (['"""one', 'two"""'], ["one\ntwo"]),
        (['"""', "", '"""', "x"], ["x"]),
        (['say """ here'], ['say """ here']),
        ([], []),
    ],
)
def test_a_message_is_a_line_or_several(lines: list[str], expected: list[str]) -> None:
    assert [typed.text for typed in messages(*lines)] == expected


def test_between_quotes_nothing_is_a_command() -> None:
    assert messages("/quit", '"""/quit"""', "/a\\", "b") == [
        Typed("/quit", True), Typed("/quit", False), Typed("/a\nb", True),
    ]  # fmt: skip


def test_the_prompt_says_when_a_message_goes_on() -> None:
    given = Given('"""', "x", '"""', "y\\", "z")
    read_message(given)
    read_message(given)
    assert given.prompts == ["> ", "| ", "| ", "> ", "| "]


def test_a_block_that_is_never_ended_is_told_and_not_sent() -> None:
    with pytest.raises(RequestError, match="was never ended; nothing was sent"):
        messages('"""', "hello")


def test_a_pipe_is_read_as_utf8_and_a_broken_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfh\xc3\xa9\r\n\xff\nlast")))
    lines = PipedLines()
    assert lines.line("") == "hé"
    with pytest.raises(RequestError, match=r"line 2 is not UTF-8 \(byte 0\)"):
        lines.line("")
    assert lines.line("") == "last"
    assert lines.line("") is None


# -- what is remembered -----------------------------------------------------------------------------


def test_undo_takes_back_the_last_message_of_the_user_and_all_after_it() -> None:
    history = History("be brief")
    for role, text in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("assistant", "e")]:
        history.add(role, text)
    assert history.undo() == "c"
    assert [message["content"] for message in history.messages] == ["be brief", "a", "b"]
    assert history.undo() == "a"
    assert history.undo() is None
    assert history.messages == [{"role": "system", "content": "be brief"}]


@pytest.mark.parametrize("system", [None, "be brief"])
def test_what_was_saved_is_loaded_again(tmp_path: Path, system: str | None) -> None:
    history = History(system)
    history.add("user", 'é "quoted"\n\ttwo lines')
    history.add("assistant", "😀")
    save(tmp_path / "chat.json", history, "tiny")
    assert load(tmp_path / "chat.json") == history
    assert json.loads((tmp_path / "chat.json").read_text())["model"] == "tiny"
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def test_a_list_of_messages_can_be_loaded_too(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(
        '[{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]'
    )
    assert load(path) == History("s", [{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "is not JSON"), (b"hello", "is not JSON"), (b"{}", "messages=None"), (b'{"messages": []}', "is empty"),
        (b'{"messages": [{"role": "user"}]}', "content"), (b'{"messages": [{"content": "x"}]}', "role"),
        (b'[{"role": "user", "content": "x"', "is not JSON"), (b"\xff", "is not UTF-8"), (b"7", "no object"),
    ],
)  # fmt: skip
def test_what_is_no_saved_chat_is_refused_with_the_reason(tmp_path: Path, text: bytes, told: str) -> None:
    path = tmp_path / "chat.json"
    path.write_bytes(text)
    with pytest.raises(RequestError, match="is no saved chat") as caught:
        load(path)
    assert told in str(caught.value)


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        load(tmp_path / "none.json")
    with pytest.raises(RequestError, match="cannot be written"):
        save(tmp_path / "none" / "chat.json", History(), "")
    with pytest.raises(RequestError, match="cannot be written"):
        save(tmp_path, History(), "")
    assert list(tmp_path.iterdir()) == []


# -- what is shown ----------------------------------------------------------------------------------


def test_an_answer_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for is_terminal in (True, False):
        pieces = _Pieces(is_terminal)
        pieces.write("a\x1b[2J\tb\r\x07\x9b\x7f\n")
        pieces.write("é😀")
        pieces.end()
        pieces.end()
    assert capsys.readouterr().out == (
        "a\u241b[2J\tb\u240d\u2407\ufffd\u2421\né😀\n" + "a\x1b[2J\tb\r\x07\x9b\x7f\né😀\n"
    )


# -- what can be set --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("temperature 0.5", "temperature", 0.5),
        ("temperature=0", "temperature", 0.0),
        ("--top-p 0.9", "top_p", 0.9),
        ("top_k 5", "top_k", 5),
        ("seed 7", "seed", 7),
        ("ignore_eos on", "ignore_eos", True),
        ("skip_special_tokens false", "skip_special_tokens", False),
        ("stop END OF TEXT", "stop", "END OF TEXT"),
        ('stop ["a", "b"]', "stop", ["a", "b"]),
        ('stop "\\n"', "stop", "\n"),
        ("stop_token_ids 3, 4", "stop_token_ids", [3, 4]),
        ("logit_bias 3=1.5 4=-2", "logit_bias", {3: 1.5, 4: -2.0}),
        ("max_tokens 12", "max_tokens", 12),
    ],
)
def test_every_kind_of_value_can_be_typed(text: str, name: str, value: Any) -> None:
    assert parse_setting(text) == (name, value, True)
    checked({name: value})


def test_default_takes_a_value_back_and_a_name_alone_only_asks() -> None:
    assert parse_setting("temperature default") == ("temperature", None, True)
    assert parse_setting("temperature")[2] is False


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("temprature 1", "did you mean temperature"),
        ("zzz 1", "/set alone lists them"),
        ("n 2", "octavo generate"),
        ("logprobs 2", "octavo generate --json"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        parse_setting(text)


@pytest.mark.parametrize("asked", [{"n": 2}, {"logprobs": 0}, {"temperature": -1}, {"top_k": "many"}, {"seed": 1.5}])
def test_options_that_make_no_sense_in_a_chat_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(asked))):
        checked(asked)


def test_the_value_in_force_is_shown_with_where_it_comes_from() -> None:
    assert shown("temperature", {"temperature": 0.5}, {"temperature": 0.6}) == "temperature = 0.5 (asked)"
    assert shown("temperature", {}, {"temperature": 0.6}) == "temperature = 0.6 (the checkpoint's)"
    assert shown("temperature", {}, {}) == "temperature = 1.0 (the default)"
    assert shown("max_tokens", {}, {}) == "max_tokens = 1024 (the default, or what the context holds)"
    assert all(shown(name, {}, {}) for name in KINDS)
