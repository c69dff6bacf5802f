"""The ASGI app: routes, keys, and the errors that every route shares.

Owns which address answers what. The work is in the modules that it names; nothing here blocks.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import traceback
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo import __version__
from octavo.server import pages
from octavo.server.cache import pin, pins, reset, unpin
from octavo.server.chat import chat_completions
from octavo.server.completions import completions
from octavo.server.errors import ApiError, internal_error, json_response
from octavo.server.service import Service
from octavo.server.text_endpoints import detokenize, tokenize

Endpoint = Callable[[Service, Request], Awaitable[Response]]

OPEN_PATHS = ("/", "/health", "/ready", "/metrics", "/version", "/static/")
"""Answer without a key: they tell of the server, never of a request."""
MAX_URL_CHARS = 2048


def create_app(service: Service) -> Starlette:
    def route(path: str, endpoint: Endpoint, method: str = "GET") -> Route:
        return Route(path, functools.partial(_guarded(endpoint), service), methods=[method])

    routes = [
        route("/v1/models", models),
        route("/v1/models/{name:path}", model),
        route("/v1/completions", _counted(completions), "POST"),
        route("/v1/chat/completions", _counted(chat_completions), "POST"),
        route("/v1/cache/reset", reset, "POST"),
        route("/v1/cache/pin", pin, "POST"),
        route("/v1/cache/unpin", unpin, "POST"),
        route("/v1/cache/pins", pins),
        route("/tokenize", tokenize, "POST"),
        route("/detokenize", detokenize, "POST"),
        route("/health", health),
        route("/ready", ready),
        route("/metrics", metrics),
        route("/version", version),
        route("/stats", pages.stats),
        route("/", pages.index),
        route("/static/{name}", pages.static),
    ]
    middleware = [Middleware(RequireKey, keys=service.settings.api_keys)]
    if service.settings.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(service.settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
        middleware.insert(0, cors)

    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})


def _guarded(endpoint: Endpoint) -> Endpoint:
    """The same endpoint, whose errors become answers; one that is octavo's own fault is told to the log alone."""

    async def guarded(service: Service, request: Request) -> Response:
        try:
            return await endpoint(service, request)
        except ApiError as error:
            return error.response()
        except Exception:  # noqa: BLE001 - whatever it is, the client gets an answer and the log the cause
            service.log.trouble(traceback.format_exc(), path=request.url.path)
            return internal_error().response()

    return guarded


def _counted(endpoint: Endpoint) -> Endpoint:
    """The same endpoint, its refusals counted."""

    async def counted(service: Service, request: Request) -> Response:
        try:
            return await endpoint(service, request)
        except ApiError as error:
            service.turned_away(error)
            raise

    return counted


class RequireKey:
    """Only requests with one of the keys pass, where there are keys."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and not self._passes(scope):
            error = ApiError(401, "Authorization: needs a key of this server; send 'Authorization: Bearer KEY'",
                             code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})  # fmt: skip
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _passes(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS or path.startswith(OPEN_PATHS[-1]):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, each in constant time.
        found = [hmac.compare_digest(digest, known) for known in self._keys]
        return any(found) and kind.lower() == b"bearer"


async def models(service: Service, _request: Request) -> Response:
    return json_response({"object": "list", "data": [_model_card(service, name) for name in service.model_names]})


async def model(service: Service, request: Request) -> Response:
    return json_response(_model_card(service, service.model_named(request.path_params["name"])))


async def health(service: Service, _request: Request) -> Response:
    """200 as long as the engine lives, draining included; 503 once it is dead."""
    alive = service.lifecycle.engine_alive or service.lifecycle.state == "starting"
    return json_response({"status": "ok" if alive else "dead"}, status=200 if alive else 503)


async def ready(service: Service, _request: Request) -> Response:
    """200 while new requests are taken."""
    state = service.lifecycle.state
    return json_response({"status": state}, status=200 if state == "ready" else 503)


async def metrics(service: Service, _request: Request) -> Response:
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def version(_service: Service, _request: Request) -> Response:
    return json_response({"version": __version__})


def _model_card(service: Service, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "octavo",
        "root": service.llm.engine.model_name or name,
        "parent": None,
        "max_model_len": service.context,
        "permission": [],
    }


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: an address or a method that is not there."""
    if not isinstance(error, HTTPException) or error.status_code not in (404, 405):
        return internal_error().response()
    path, headers = request.url.path[:MAX_URL_CHARS], dict(error.headers or {})
    if error.status_code == 405:
        message = f"{request.method} {path}: is answered to {headers.get('Allow', 'another method')} alone"
        return ApiError(405, message, code="method_not_allowed", headers=headers).response()
    known = (
        "/v1/models, /v1/completions, /v1/chat/completions, /v1/cache/reset, /v1/cache/pin, /v1/cache/unpin, "
        "/v1/cache/pins, /tokenize, /detokenize, /health, /ready, /metrics, /version"
    )
    return ApiError(404, f"{path!r}: is no address of this server; there are {known}", code="unknown_url").response()
