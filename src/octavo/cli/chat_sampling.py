"""How answers of a chat are drawn: what can be set, from which text, and how it is shown.

Owns the way from what a person types to a field of `SamplingParams`, which checks it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from octavo.cli.options import SAMPLING, bias, number
from octavo.errors import RequestError
from octavo.scheduling.request import SamplingParams

DEFAULT_MAX_TOKENS = 1024
REFUSED = {
    "n": "a chat has one answer to each message; octavo generate gives several",
    "logprobs": "is not shown in a chat; octavo generate --json shows it",
}
KINDS = {option.name: option.kind for option in SAMPLING if option.name not in REFUSED}
_FLAGS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_DEFAULT = "default"


def checked(asked: Mapping[str, Any]) -> SamplingParams:
    """Raises `RequestError` for what is out of range, and for what a chat cannot do."""
    params = SamplingParams(**asked)
    for name, remedy in REFUSED.items():
        if asked.get(name, 1 if name == "n" else None) != (1 if name == "n" else None):
            raise RequestError(name, asked[name], remedy)
    return params


def parse_setting(text: str) -> tuple[str, Any, bool]:
    """`NAME VALUE` or `NAME=VALUE`: the field, its value (None for its default), and whether there was one."""
    name, *rest = re.split("[ =]", text, maxsplit=1)
    name, value = name.removeprefix("--").replace("-", "_"), "".join(rest).strip()
    if name in REFUSED:
        raise RequestError(name, value, REFUSED[name])
    if name not in KINDS:
        near = get_close_matches(name, KINDS, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "/set alone lists them"
        raise RequestError("set", name, f"is no parameter of sampling; {hint}")
    return name, None if value == _DEFAULT else _value(KINDS[name], value), bool(value)


def shown(name: str, asked: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> str:
    """The value in force, and where it comes from."""
    value = getattr(checked(asked).with_defaults(checkpoint), name)
    if name == "max_tokens" and value is None:
        return f"max_tokens = {DEFAULT_MAX_TOKENS} (the default, or what the context holds)"
    source = "asked" if name in asked else "the checkpoint's" if name in checkpoint else "the default"
    return f"{name} = {'none' if value in (None, (), {}) else json.dumps(value, ensure_ascii=False)} ({source})"


def _value(kind: str, text: str) -> Any:
    """What is no such value stays the text it is, for the field's own check."""
    if kind in ("int", "float"):
        return number(kind)(text)
    if kind == "flag":
        return _FLAGS.get(text.lower(), text)
    if kind == "bias":
        return bias(text.replace(",", " ").split())
    if kind == "ints":
        return [number("int")(part) for part in text.replace(",", " ").split()]
    try:
        return json.loads(text) if text.startswith(('"', "[")) else text
    except (ValueError, RecursionError):
        return text
