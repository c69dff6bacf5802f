"""The socket that a server will listen on, bound before its model loads: `bind`.

A port in use is told at once, and nothing large is imported to find out. Nobody listens on it yet: who does,
`running` says once the server can answer.
"""

from __future__ import annotations

import errno
import socket

from octavo.errors import ConfigError
from octavo.server.settings import ServerSettings


def bind(settings: ServerSettings) -> socket.socket:
    """A socket on the address asked for, not listening yet. Raises `ConfigError`."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError("host", settings.host, f"cannot be found ({error.strerror or error})") from None
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                "host", settings.host, "is no address of this machine; use one that is, or 0.0.0.0 for all of them"
            ) from None
        raise ConfigError(
            "port", settings.port, f"cannot be used on {settings.host} ({(error.strerror or str(error)).lower()}); "
            "choose another with --port, or 0 for a free one",
        ) from None  # fmt: skip
    return bound


def address_of(bound: socket.socket) -> str:
    """The URL that reaches this socket from here."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
