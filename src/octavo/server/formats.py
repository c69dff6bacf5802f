"""The language an answer must belong to: OpenAI's `response_format`, and vLLM's `structured_outputs`.

Owns their fields. Whether a schema can be kept to is decided where it is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.errors import shorten
from octavo.scheduling.request import StructuredOutputs
from octavo.server.errors import ApiError, wrong
from octavo.server.wire import Sampled

_SCHEMA_FIELDS: Mapping[str, type] = {"name": str, "schema": dict, "description": str, "strict": bool}
_KINDS: Mapping[str, str] = {"json": "json_schema", "regex": "regex", "grammar": "ebnf", "json_object": "json_object"}
STRUCTURED_FIELDS = ("json", "regex", "choice", "grammar", "json_object")


def format_of(body: Sampled) -> StructuredOutputs | None:
    """Raises `ApiError` naming what is wrong."""
    if body.response_format is None:
        return None if body.structured_outputs is None else _structured(body.structured_outputs)
    if body.structured_outputs is not None:
        raise wrong("structured_outputs", body.structured_outputs, "send either this or response_format")
    return _response_format(body.response_format)


def _response_format(given: Mapping[str, Any]) -> StructuredOutputs | None:
    kind = given.get("type")
    _only("response_format", given, ("type", "json_schema"))
    if kind != "json_schema" and given.get("json_schema") is not None:
        raise wrong("response_format.json_schema", given["json_schema"], 'needs type "json_schema"')
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs("json_object")
    if kind == "json_schema":
        return StructuredOutputs("json_schema", json.dumps(_schema(given.get("json_schema"))))
    raise wrong("response_format.type", kind, "use text, json_object or json_schema")


def _schema(given: Any) -> Mapping[str, Any]:
    """The schema itself. `strict` needs no case of its own: a schema is always kept to the letter."""
    at = "response_format.json_schema"
    if not isinstance(given, dict):
        raise wrong(at, given, 'must be an object with "name" and "schema"', code="invalid_type")
    _only(at, given, tuple(_SCHEMA_FIELDS))
    for name, value in given.items():
        if value is not None and not isinstance(value, _SCHEMA_FIELDS[name]):
            kind = _SCHEMA_FIELDS[name].__name__
            raise wrong(f"{at}.{name}", value, f"must be of type {kind}", code="invalid_type")
    if given.get("schema") is None:
        raise ApiError(400, f"{at}.schema: is missing; send it", param=f"{at}.schema", code="missing_field")
    schema: Mapping[str, Any] = given["schema"]
    return schema


def _structured(given: Mapping[str, Any]) -> StructuredOutputs:
    _only("structured_outputs", given, STRUCTURED_FIELDS)
    asked = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(asked) != 1:
        raise wrong("structured_outputs", given, f"must have exactly one of {', '.join(STRUCTURED_FIELDS)}")
    ((name, value),) = asked.items()
    if name == "json_object":
        if value is not True:
            raise wrong("structured_outputs.json_object", value, "must be true or false", code="invalid_type")
        return StructuredOutputs("json_object")
    if name == "json" and isinstance(value, dict):
        return StructuredOutputs("json_schema", json.dumps(value))
    if name == "choice":
        return StructuredOutputs("ebnf", _one_of(value))
    if not isinstance(value, str):
        raise wrong(f"structured_outputs.{name}", value, "must be a string", code="invalid_type")
    return StructuredOutputs(_KINDS[name], value)  # type: ignore[arg-type]  # one of its kinds


def _one_of(choices: Any) -> str:
    """The grammar of exactly these texts: JSON's escapes are the grammar's too."""
    at = "structured_outputs.choice"
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in choices):
        raise wrong(at, choices, "must be a list of strings", code="invalid_type")
    if not choices or "" in choices:
        raise wrong(at, choices, "name at least one text, none of them empty")
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)


def _only(path: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, value in given.items():
        if name not in known and value is not None:
            field = f"{path}.{shorten(name)[1:-1]}"
            raise ApiError(400, f"{field}: is no field of it; known are {', '.join(known)}",
                           param=field, code="unknown_field")  # fmt: skip
