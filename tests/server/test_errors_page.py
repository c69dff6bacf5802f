"""docs/errors.md lists every code and status that the server can answer with, and no other; so for flags."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

from octavo.cli.serve import serve
from octavo.server.errors import TYPES
from octavo.server.settings import ServerSettings
from octavo.server.wire import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from octavo.server.wire_refused import HARMLESS, UNSERVED, WITHOUT_EFFECT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
SOURCES = "".join(path.read_text() for path in sorted((ROOT / "src" / "octavo" / "server").glob("*.py")))


def test_the_page_lists_every_code_and_no_other() -> None:
    told = {code for row in re.findall(r"^\| \d+ \| (.*?) \|", PAGE, flags=re.MULTILINE) for code in
            re.findall(r"`(\w+)`", row)}  # fmt: skip
    used = set(
        re.findall(r'code="(\w+)"|code: str \| None = "(\w+)"|unavailable\(\s*"(\w+)"|CONTEXT = "(\w+)"', SOURCES)
    )
    codes = {code for found in used for code in found if code} | {"invalid_value"}
    codes -= {"client_left"}  # nobody is there to read it
    assert told == codes


def test_the_page_lists_every_status_and_no_other() -> None:
    assert {int(status) for status in re.findall(r"^\| (\d+) \|", PAGE, flags=re.MULTILINE)} == set(TYPES)


def test_fields_without_effect_are_those_that_the_page_names() -> None:
    section = PAGE.partition("Accepted without effect")[2].partition("No other field")[0]
    assert set(re.findall(r"`(\w+)`", section)) == set(WITHOUT_EFFECT)


def test_no_field_is_both_served_and_refused_everywhere() -> None:
    served = [set(body.model_fields) for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)]
    assert not set.intersection(*served[:2]) & set(UNSERVED)
    assert not set.union(*served) & set(WITHOUT_EFFECT)
    assert set(HARMLESS) <= set(UNSERVED)


def test_every_setting_of_the_server_has_a_flag_with_its_default() -> None:
    flags = inspect.signature(serve).parameters
    renamed = {
        "api_keys": "api_key",
        "served_model_names": "served_model_name",
        "receive_timeout_s": "receive_timeout",
        "send_timeout_s": "send_timeout",
        "shutdown_timeout_s": "shutdown_timeout",
    }
    for setting in fields(ServerSettings):
        flag = flags[renamed.get(setting.name, setting.name)]
        expected = None if setting.default == () or setting.name == "api_keys" else setting.default
        assert flag.default == expected, setting.name
