"""GET /, its three files, and /stats: what runs here, the live counters and a chat box, for a person.

Owns the page. It needs nothing from elsewhere, and its policy forbids that; every value that comes from
a model or a request is escaped. What it shows is the start table and the snapshot of the metrics.
"""

from __future__ import annotations

from functools import cache
from html import escape
from importlib.resources import files
from string import Template

from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.server.errors import ApiError, json_response
from octavo.server.service import Service

FILES = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def index(service: Service, request: Request) -> Response:
    deployment = service.llm.deployment
    rows = deployment.rows() if deployment is not None else ()
    table = "\n".join(
        f"<tr><th scope=row>{escape(row.name)}</th><td>{escape(row.value)}</td><td>{escape(row.reason)}</td></tr>"
        for row in rows
    )
    page = Template(_file("page.html")).substitute(
        version=escape(__version__),
        model=escape(service.model_names[0]),
        root=escape(request.scope.get("root_path", "")),
        rows=table or "<tr><td>an engine without a start table</td></tr>",
        mode="chat" if service.tokens.has_chat_template else "completion",
        needs_key="yes" if service.settings.api_keys else "no",
    )
    return Response(page, headers=HEADERS, media_type="text/html; charset=utf-8")


async def static(_service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in FILES:
        raise ApiError(404, f"{name!r}: is no file of this server", code="unknown_url")
    return Response(_file(name), headers=HEADERS, media_type=FILES[name])


async def stats(service: Service, _request: Request) -> Response:
    """The live counters as JSON."""
    return json_response({"state": service.lifecycle.state, **service.metrics.snapshot()})


@cache
def _file(name: str) -> str:
    return files("octavo.server").joinpath("static", name).read_text(encoding="utf-8")
