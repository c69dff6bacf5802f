"""What there is to complete: the four forms of a prompt, and the messages of a chat.

Owns the checks and the plain form that templates get. Encodes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.errors import shorten
from octavo.server.errors import ApiError, wrong

MAX_PROMPTS = 1024
MAX_ROLE_CHARS = 64
_MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")
_FORMS = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"


def read_prompts(given: Any) -> list[str | list[int]]:
    """One entry for each prompt. Raises `ApiError` naming the prompt that is wrong."""
    if isinstance(given, str):
        return [_text("prompt", given)]
    if not isinstance(given, list):
        raise wrong("prompt", given, _FORMS, code="invalid_type")
    if not given:
        raise wrong("prompt", given, "is empty; give at least one token or character")
    if all(type(item) is int for item in given):
        return [given]
    if len(given) > MAX_PROMPTS:
        raise wrong("prompt", f"{len(given)} prompts", f"send at most {MAX_PROMPTS} in one request")
    if isinstance(given[0], str):
        return [_text(f"prompt[{i}]", item) for i, item in enumerate(given)]
    if isinstance(given[0], list):
        return [_token_ids(f"prompt[{i}]", item) for i, item in enumerate(given)]
    raise wrong("prompt", given, _FORMS, code="invalid_type")


def _text(path: str, item: Any) -> str:
    if not isinstance(item, str):
        raise wrong(path, item, "must be a string, as the first prompt is", code="invalid_type")
    if not item:
        raise wrong(path, item, "is empty; give at least one character")
    return item


def _token_ids(path: str, item: Any) -> list[int]:
    if not isinstance(item, list) or not all(type(token) is int for token in item):
        raise wrong(path, item, "must be a list of token ids, as the first prompt is", code="invalid_type")
    if not item:
        raise wrong(path, item, "is empty; give at least one token id")
    return item


def read_messages(given: Any) -> list[dict[str, Any]]:
    """Messages as chat templates take them: content is always text. Raises `ApiError` naming what is wrong."""
    if not isinstance(given, list):
        raise wrong("messages", given, 'must be a list of {"role": ..., "content": ...}', code="invalid_type")
    if not given:
        raise wrong("messages", given, "is empty; a chat needs at least one message")
    return [_message(f"messages[{i}]", item) for i, item in enumerate(given)]


def _message(path: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise wrong(path, given, 'must be an object with "role" and "content"', code="invalid_type")
    for name, value in given.items():
        if name not in _MESSAGE_FIELDS and value is not None:
            shown = shorten(name)[1:-1]
            raise ApiError(400, f"{path}.{shown}: is not served; known are {', '.join(_MESSAGE_FIELDS)}",
                           param=f"{path}.{shown}", code="unknown_field")  # fmt: skip
    role = given.get("role")
    if not isinstance(role, str) or not role.strip():
        raise wrong(f"{path}.role", role, "must be a role, such as system, user or assistant", code="invalid_type")
    if len(role) > MAX_ROLE_CHARS or not role.isprintable():
        raise wrong(f"{path}.role", role, f"must be one printable word of at most {MAX_ROLE_CHARS} characters")
    calls = given.get("tool_calls")
    message: dict[str, Any] = {"role": role}
    message["content"] = _content(f"{path}.content", given.get("content"), may_lack=role == "assistant")
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            if not isinstance(given[name], str):
                raise wrong(f"{path}.{name}", given[name], "must be a string", code="invalid_type")
            message[name] = given[name]
    if calls:
        message["tool_calls"] = _tool_calls(f"{path}.tool_calls", calls)
    return message


def _content(path: str, given: Any, *, may_lack: bool) -> str:
    """Text. Templates call its methods, so that parts are joined and an absent content is empty."""
    if isinstance(given, str):
        return given
    if given is None and may_lack:
        return ""
    if not isinstance(given, list):
        raise wrong(path, given, "must be a string or a list of text parts", code="invalid_type")
    return "\n".join(_part(f"{path}[{i}]", part) for i, part in enumerate(given))


def _part(path: str, given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind != "text":
        raise wrong(f"{path}.type", kind, "only text parts are served", code="unsupported_field")
    if not isinstance(given.get("text"), str):
        raise wrong(f"{path}.text", given.get("text"), "must be a string", code="invalid_type")
    extra = [name for name in given if name not in ("type", "text")]
    if extra:
        raise ApiError(400, f"{path}.{shorten(extra[0])[1:-1]}: is no field of a text part", param=path,
                       code="unknown_field")  # fmt: skip
    return str(given["text"])


def _tool_calls(path: str, given: Any) -> list[Mapping[str, Any]]:
    """Earlier calls of tools, as templates take them: arguments are an object, not its text."""
    if not isinstance(given, list):
        raise wrong(path, given, "must be a list", code="invalid_type")
    calls: list[Mapping[str, Any]] = []
    for i, call in enumerate(given):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(f"{path}[{i}].function", function, 'must be an object with "name" and "arguments"')
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise wrong(f"{path}[{i}].function.arguments", arguments, "must be JSON") from None
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls
