"""What a client is told when something is wrong: OpenAI's error object, and the status that goes with it.

Owns `ApiError` and the way from octavo's own errors to it. Every message names field, value and remedy;
what is wrong inside octavo is told to the log alone. docs/errors.md lists every status and code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from octavo.errors import CapacityError, EngineDeadError, RequestError, shorten

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
CONTEXT = "context_length_exceeded"
SIZE_FIELDS = ("prompt", "max_tokens", "min_tokens")


class ApiError(Exception):
    """An answer that is an error. `param` is the field at fault, `code` a name that programs can rely on."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.counted = False
        """Whether the engine has counted the refusal already."""
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": TYPES[self.status], "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        return json_response(self.body(), status=self.status, headers=self.headers)


def wrong(param: str, value: Any, remedy: str, *, code: str | None = "invalid_value") -> ApiError:
    """A 400 that names field, value and remedy."""
    return ApiError(400, f"{param}={shorten(value)}: {remedy}", param=param, code=code)


def refused(error: RequestError, *, names: Mapping[str, str] | None = None, submitted: bool = False) -> ApiError:
    """The 400 for a request that octavo refused. `names` says what the client called octavo's fields.

    Where the request had been `submitted`, its fields were well-formed: what is wrong is their size.
    """
    param = (names or {}).get(error.field, error.field)
    message = f"{param}={shorten(error.value)}: {error.remedy}"
    sized = isinstance(error, CapacityError) or (submitted and error.field in SIZE_FIELDS)
    answer = ApiError(400, message, param=param, code=CONTEXT if sized else "invalid_value")
    answer.counted = submitted
    return answer


def unavailable(code: str, message: str, *, retry_after_s: int | None = None) -> ApiError:
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, code=code, headers=headers)


def engine_dead(_: EngineDeadError | None = None) -> ApiError:
    """The cause is in the server's log; a client learns that it is gone."""
    return unavailable("engine_dead", "the engine has failed and serves no more; the server must be started again")


def internal_error() -> ApiError:
    return ApiError(500, "something is wrong inside the server; its log says what", code="internal_error")


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(content), status, dict(headers or {}), "application/json")


def encode_json(content: Any) -> bytes:
    """Strict JSON: NaN and infinities, which no JSON has, are an error here rather than at the client."""
    return json.dumps(content, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
