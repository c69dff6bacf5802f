"""Every error octavo raises on purpose.

    OctavoError
    |-- RequestError        one request is wrong: field, value, remedy; the engine is unharmed
    |   `-- CapacityError   the request can never fit; carries the arithmetic
    |-- ConfigError         what the user asked of the engine cannot be done
    |   `-- ModelError      the checkpoint: missing, damaged, or not served exactly
    |-- PolicyError         a policy answered outside what it was asked
    |-- EngineDeadError     the engine failed earlier; carries the first cause
    `-- InvariantViolation  octavo itself is wrong: a crash with a dump, never caught

Refusal for want of blocks is not here: it is a value (`memory.Shortfall`), not an exception.
"""

from __future__ import annotations

from typing import Any


class OctavoError(Exception):
    """Base of all errors raised on purpose."""


class _FieldError(OctavoError):
    """An error about one named field, with what was given and what to do instead."""

    def __init__(self, field: str, value: Any, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        super().__init__(f"{field}={shorten(value)}: {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.remedy)


class RequestError(_FieldError):
    """One request is wrong. Nothing was allocated for it."""


class CapacityError(RequestError):
    """The request can never fit, however long it waits. `remedy` carries the arithmetic."""


class ConfigError(_FieldError):
    """The engine cannot be built as asked."""


class ModelError(ConfigError):
    """The checkpoint is missing, damaged, or needs something not served exactly."""


class PolicyError(OctavoError):
    """A policy gave an answer that the mechanism cannot accept."""


class EngineDeadError(OctavoError):
    """The engine has failed and serves no more requests."""


class InvariantViolation(OctavoError):
    """octavo broke one of its own invariants: `name` says which, `detail` what was seen."""

    def __init__(self, name: str, detail: str) -> None:
        self.name = name
        self.detail = detail
        super().__init__(f"invariant {name!r} does not hold: {detail}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.detail)


def shorten(value: Any, limit: int = 80) -> str:
    """`repr(value)`, cut to about `limit` characters so that a bad input cannot flood a log."""
    if isinstance(value, (str, bytes, list, tuple)) and len(value) > limit:
        kind = type(value).__name__
        start = repr(value[: limit // 2])[: 4 * limit]  # what is in a list may be long as well
        return f"{start}... ({kind} of length {len(value)})"
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return f"a value of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= limit else f"{text[:limit]}..."
