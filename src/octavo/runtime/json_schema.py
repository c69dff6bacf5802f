"""Makes of a client's JSON schema one that a grammar keeps to the letter, or refuses it by keyword.

The compiler behind passes over keywords and combinations that it does not know; then an answer would break
the schema without anybody being told. Here every keyword is known, rewritten into what is kept exactly, or
refused. Where JSON Schema leaves more open than a grammar need generate, the narrower reading is taken: an
object has no properties beside the named ones unless `additionalProperties` says so, properties come in the
schema's order, a `pattern` spans the whole string.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from octavo.runtime.json_pattern import MAX_EXPANDED, any_character, json_pattern

MAX_DEPTH = 64
"""Brackets within brackets of the schema's own text."""
MAX_VALUES = 5000
"""Properties and enum values of the whole schema."""

_NOTES = frozenset({"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
                    "$schema", "$comment", "$id", "discriminator", "contentMediaType"})  # fmt: skip
_DEFINITIONS = ("$defs", "definitions")
_BY_TYPE: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties",
               "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "boolean": (),
    "null": (),
}  # fmt: skip
_WHOLE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""Each of these says all there is to say: nothing that constrains may stand beside it, `type` excepted."""
_DATE = (r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
         r"|02-(0[1-9]|1[0-9]|2[0-8]))")  # fmt: skip
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[\+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_HEX = "[0-9a-f]"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
_FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "ipv4": r"\.".join([_OCTET] * 4),
    "email": r"[a-zA-Z0-9_\-]{1,32}(\.[a-zA-Z0-9_\-]{1,32}){0,3}@[a-z0-9]{1,32}(\.[a-z0-9]{1,32}){1,4}",
    "hostname": r"[a-z0-9]{1,32}(\.[a-z0-9]{1,32}){0,4}",
}
_NATIVE_FORMATS = ("ipv6", "duration", "uri")
"""Formats that the compiler knows exactly."""
_ANY: dict[str, Any] = {}


class SchemaError(ValueError):
    """What is wrong, with the place in the schema in front."""


def exact_schema(text: str) -> str:
    """The schema to compile. Raises `SchemaError` naming the keyword, its place and what to do."""
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"is not JSON ({error})") from None
    if _depth(text) > MAX_DEPTH:
        raise SchemaError(f"is nested more than {MAX_DEPTH} deep; use $ref to definitions")
    if not isinstance(schema, (dict, bool)):
        raise SchemaError("must be a JSON object")
    return json.dumps(_Rewriter(schema).root())


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _depth(text: str) -> int:
    deepest = depth = 0
    quoted = escaped = False
    for char in text:
        if quoted:
            quoted = escaped or char != '"'
            escaped = not escaped and char == "\\"
        elif char == '"':
            quoted = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


class _Rewriter:
    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._values = 0
        self._expanded = 0

    def root(self) -> Any:
        made = self.schema(self._schema, "#")
        for name in _DEFINITIONS:
            found = self._schema.get(name) if isinstance(self._schema, dict) else None
            if found is None:
                continue
            if not isinstance(found, dict):
                raise SchemaError(f"#/{name}: must be an object of schemas")
            made[name] = {key: self.schema(one, f"#/{name}/{key}") for key, one in found.items()}
        return made

    def schema(self, given: Any, at: str) -> Any:
        if given is True:
            return dict(_ANY)
        if given is False:
            raise SchemaError(f"{at}: false allows nothing; leave it out")
        if not isinstance(given, dict):
            raise SchemaError(f"{at}: must be a schema, which is an object")
        asked = {key: value for key, value in given.items()
                 if key not in _NOTES and key not in _DEFINITIONS}  # fmt: skip
        if any(key in given for key in _DEFINITIONS) and at != "#":
            raise SchemaError(f"{at}: definitions are served at the top of a schema only; move them there")
        whole = [key for key in _WHOLE if key in asked]
        if whole:
            return self._whole(whole[0], asked, at)
        return self._typed(asked, at)

    def _whole(self, name: str, asked: dict[str, Any], at: str) -> Any:
        kinds = _kinds(asked, at)
        beside = [key for key in asked if key not in (name, "type")]
        if beside or (kinds is not None and name not in ("enum", "const")):
            raise SchemaError(f"{at}: {name} beside {(beside or ['type'])[0]} is not served; put everything inside "
                              f"{name}")  # fmt: skip
        value = asked[name]
        if name == "$ref":
            if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
                raise SchemaError(f"{at}: $ref {json.dumps(value)[:80]} is not served; refer to #/$defs/NAME")
            return {"$ref": value} if self._finds(value) else _unknown_reference(value, at)
        if name in ("enum", "const"):
            values = value if name == "enum" else [value]
            if not isinstance(values, list) or not values:
                raise SchemaError(f"{at}: enum must be a list of at least one value")
            self._count(len(values))
            kept = [one for one in values if kinds is None or any(_is(one, kind) for kind in kinds)]
            if not kept:
                raise SchemaError(f"{at}: no value of {name} is of type {' or '.join(kinds or ())}")
            return {"enum": kept}
        if not isinstance(value, list) or not value:
            raise SchemaError(f"{at}: {name} must be a list of at least one schema")
        if name == "allOf" and len(value) > 1:
            raise SchemaError(f"{at}: allOf of several schemas is not served; merge them into one")
        made = [self.schema(one, f"{at}/{name}/{index}") for index, one in enumerate(value)]
        if name == "oneOf" and not _disjoint([self._resolved(one) for one in value]):
            raise SchemaError(f"{at}: oneOf is served where its schemas differ in type or in a required constant; "
                              "use anyOf if more than one may match")  # fmt: skip
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _typed(self, asked: dict[str, Any], at: str) -> Any:
        kinds = _kinds(asked, at)
        words = [key for key in asked if key != "type"]
        if kinds is None:
            if not words:
                return dict(_ANY)
            kinds = [kind for kind, known in _BY_TYPE.items() if any(word in known for word in words)]
            kinds = [kind for kind in kinds if kind != "integer" or "number" not in kinds][:2]
            if len(kinds) > 1:
                raise SchemaError(f"{at}: {words[0]} and {words[-1]} belong to different types; name a type")
        known = {word for kind in kinds for word in _BY_TYPE[kind]}
        for word in words:
            if word not in known and not (word == "uniqueItems" and asked[word] is False):
                wanted = [kind for kind, mine in _BY_TYPE.items() if word in mine]
                raise SchemaError(f"{at}: {word} " + (f"belongs to type {wanted[0]}" if wanted else "is not served")
                                  + "; leave it out")  # fmt: skip
        made = [getattr(self, f"_{kind}")({k: v for k, v in asked.items() if k in _BY_TYPE[kind]}, at)
                for kind in kinds]  # fmt: skip
        return made[0] if len(made) == 1 else {"anyOf": made}

    def _boolean(self, asked: dict[str, Any], at: str) -> Any:
        return {"type": "boolean"}

    def _null(self, asked: dict[str, Any], at: str) -> Any:
        return {"type": "null"}

    def _string(self, asked: dict[str, Any], at: str) -> Any:
        low, high = _count_bounds(asked, "minLength", "maxLength", at)
        format_ = asked.get("format")
        pattern = asked.get("pattern")
        if format_ is not None and not isinstance(format_, str):
            raise SchemaError(f"{at}: format must be a string")
        known = _FORMATS.get(format_ or "")
        if format_ is not None and known is None and format_ not in _NATIVE_FORMATS:
            raise SchemaError(f"{at}: format {json.dumps(format_)[:80]} is not served; known are "
                              f"{', '.join((*_FORMATS, *_NATIVE_FORMATS))}")  # fmt: skip
        if sum((low > 0 or high is not None, pattern is not None, format_ is not None)) > 1:
            raise SchemaError(f"{at}: pattern, format and a length together are not served; keep one, a pattern can "
                              "say them all")  # fmt: skip
        if format_ is not None:
            return {"type": "string", "format": format_} if known is None else {"type": "string",
                                                                                "pattern": f"^{known}$"}  # fmt: skip
        if pattern is not None:
            return {"type": "string", "pattern": self._pattern(pattern, at)}
        if low > 0 or high is not None:
            bound = f"{{{low},{'' if high is None else high}}}"
            return {"type": "string", "pattern": f"^{any_character()}{bound}$"}
        return {"type": "string"}

    def _pattern(self, pattern: Any, at: str) -> str:
        if not isinstance(pattern, str):
            raise SchemaError(f"{at}: pattern must be a string")
        try:
            made, expanded = json_pattern(pattern)
        except ValueError as error:
            raise SchemaError(f"{at}: pattern {json.dumps(pattern)[:80]} {error}") from None
        self._expanded += expanded
        if self._expanded > MAX_EXPANDED:
            raise SchemaError(f"{at}: the patterns up to here come to more than {MAX_EXPANDED} characters once their "
                              "repetitions are written out")  # fmt: skip
        return made

    def _integer(self, asked: dict[str, Any], at: str) -> Any:
        low, high = _range(asked, at)
        least = None if low is None else math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
        most = None if high is None else math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
        if least is not None and most is not None and least > most:
            raise SchemaError(f"{at}: no integer lies between minimum and maximum")
        made: dict[str, Any] = {"type": "integer"}
        for name, bound in (("minimum", least), ("maximum", most)):
            if bound is not None:
                if abs(bound) >= 10**18:
                    raise SchemaError(f"{at}: {name} must be within 18 digits")
                made[name] = bound
        return made

    def _number(self, asked: dict[str, Any], at: str) -> Any:
        low, high = _range(asked, at)
        if low is not None and high is not None and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
            raise SchemaError(f"{at}: no number lies between minimum and maximum")
        return {"type": "number", **asked}

    def _object(self, asked: dict[str, Any], at: str) -> Any:
        named = asked.get("properties", {})
        required = asked.get("required", [])
        patterns = asked.get("patternProperties", {})
        if not isinstance(named, dict) or not isinstance(patterns, dict):
            raise SchemaError(f"{at}: properties and patternProperties must be objects of schemas")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(f"{at}: required must be a list of names")
        if patterns and (named or required or len(patterns) > 1 or asked.get("additionalProperties")):
            raise SchemaError(f"{at}: patternProperties is served with one pattern and no other properties")
        self._count(len(named) + len(required))
        more = asked.get("additionalProperties", not (named or required or patterns))
        made: dict[str, Any] = {"type": "object"}
        extra = False if more is False else self.schema(more, f"{at}/additionalProperties")
        made["additionalProperties"] = True if extra == {} else extra
        properties = {name: self.schema(one, f"{at}/properties/{name}") for name, one in named.items()}
        for name in required:
            if name not in properties:
                if extra is False:
                    raise SchemaError(f"{at}: required names {json.dumps(name)[:80]}, which properties do not have")
                properties[name] = extra
        if properties:
            made["properties"] = properties
            made["required"] = list(dict.fromkeys(required))
        for pattern, one in patterns.items():
            made["patternProperties"] = {self._pattern(pattern, at): self.schema(one, f"{at}/patternProperties")}
        low, high = _count_bounds(asked, "minProperties", "maxProperties", at)
        made.update({k: v for k, v in (("minProperties", low or None), ("maxProperties", high)) if v is not None})
        return made

    def _array(self, asked: dict[str, Any], at: str) -> Any:
        first = asked.get("prefixItems", [])
        if not isinstance(first, list):
            raise SchemaError(f"{at}: prefixItems must be a list of schemas")
        low, high = _count_bounds(asked, "minItems", "maxItems", at)
        self._count(len(first))
        made: dict[str, Any] = {"type": "array", "items": False}
        items = asked.get("items", not first)
        if items is not False:
            made["items"] = self.schema(items, f"{at}/items")
        if first:
            made["prefixItems"] = [self.schema(one, f"{at}/prefixItems/{index}") for index, one in enumerate(first)]
        made.update({k: v for k, v in (("minItems", low or None), ("maxItems", high)) if v is not None})
        return made

    def _count(self, more: int) -> None:
        self._values += more
        if self._values > MAX_VALUES:
            raise SchemaError(f"has more than {MAX_VALUES} properties and enum values")

    def _finds(self, reference: str) -> bool:
        try:
            self._target(reference)
        except (KeyError, IndexError, ValueError, TypeError):
            return False
        return reference == "#" or (reference.count("/") == 2 and reference.split("/")[1] in _DEFINITIONS)

    def _target(self, reference: str) -> Any:
        found = self._schema
        for part in reference.split("/")[1:]:
            found = found[part.replace("~1", "/").replace("~0", "~")]
        return found

    def _resolved(self, schema: Any) -> Any:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._target(schema["$ref"])
        return schema


def _unknown_reference(value: str, at: str) -> Any:
    raise SchemaError(f"{at}: $ref {json.dumps(value)[:80]} finds nothing; refer to # or #/$defs/NAME")


def _kinds(asked: dict[str, Any], at: str) -> list[str] | None:
    if "type" not in asked:
        return None
    kinds = asked["type"] if isinstance(asked["type"], list) else [asked["type"]]
    if not kinds or not all(isinstance(kind, str) and kind in _BY_TYPE for kind in kinds):
        raise SchemaError(f"{at}: type {json.dumps(asked['type'])[:80]} is none of {', '.join(_BY_TYPE)}")
    return list(dict.fromkeys(kinds))


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, (int, float)):
        return kind == "number" or (kind == "integer" and float(value).is_integer())
    names: dict[type, str] = {str: "string", dict: "object", list: "array", type(None): "null"}
    return names[type(value)] == kind


def _count_bounds(asked: dict[str, Any], low_name: str, high_name: str, at: str) -> tuple[int, int | None]:
    for name in (low_name, high_name):
        value = asked.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 10**6):
            raise SchemaError(f"{at}: {name} must be a whole number below a million")
    low, high = asked.get(low_name) or 0, asked.get(high_name)
    if high is not None and high < low:
        raise SchemaError(f"{at}: {high_name} is below {low_name}")
    return low, high


def _range(asked: dict[str, Any], at: str) -> tuple[tuple[float | int, bool] | None, tuple[float | int, bool] | None]:
    """The lower and the upper bound, each with whether it is left out itself."""
    found: list[tuple[float | int, bool] | None] = []
    for name, exclusive, tighter in (("minimum", "exclusiveMinimum", max), ("maximum", "exclusiveMaximum", min)):
        bounds = []
        for key in (name, exclusive):
            value = asked.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 10**30:
                raise SchemaError(f"{at}: {key} must be a number within 30 digits")
            bounds.append((value, key == exclusive))
        if len(bounds) == 2:
            raise SchemaError(f"{at}: {name} beside {exclusive} is not served; keep the tighter one")
        found.append(tighter(bounds) if bounds else None)
    return found[0], found[1]


def _disjoint(schemas: list[Any]) -> bool:
    """Whether no value can match two of them, as far as their types and required constants show."""
    return all(_apart(one, other) for index, one in enumerate(schemas) for other in schemas[:index])


def _apart(one: Any, other: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values, others = _constants(one), _constants(other)
    if values is not None and others is not None:
        return not values & others
    kinds, their_kinds = _type_names(one), _type_names(other)
    if kinds and their_kinds and not kinds & their_kinds:
        return True
    if kinds == their_kinds == {"object"}:
        for name in set(one.get("required", ())) & set(other.get("required", ())):
            mine = _constants(one.get("properties", {}).get(name))
            theirs = _constants(other.get("properties", {}).get(name))
            if mine is not None and theirs is not None and not mine & theirs:
                return True
    return False


def _constants(schema: Any) -> set[str] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    values = schema.get("enum")
    return {json.dumps(value, sort_keys=True) for value in values} if isinstance(values, list) else None


def _type_names(schema: dict[str, Any]) -> set[str]:
    kinds = schema.get("type")
    names = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else set()
    return names | {"integer"} if "number" in names else names
