"""`ServerSettings`: what the user asked of the server, beside what is asked of the engine. Never written to.

Names are vLLM's where it has a name for the thing. Checked when made; a wrong value raises `ConfigError`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from octavo.errors import ConfigError
from octavo.server.limits import QueueLimits

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    isolate_api_keys: bool = False
    """Whether requests share kept blocks only with those of the same key."""
    served_model_names: tuple[str, ...] = ()
    """Names of the model in requests; the first is that of answers. Without any, the model's own."""
    chat_template: str | None = None
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    max_waiting_requests: int = QueueLimits().max_waiting_requests
    max_waiting_tokens: int = QueueLimits().max_waiting_tokens
    max_body_bytes: int = 8 * 2**20
    receive_timeout_s: float = 60.0
    """How long the head of a request may take to arrive, and how long nothing of its body may."""
    send_timeout_s: float = 120.0
    """How long a client may read nothing of a stream before it counts as gone."""
    shutdown_timeout_s: float | None = None
    """How long a drain may take; without a bound, until the last answer is sent."""
    enable_log_requests: bool = True
    max_log_len: int = 0
    """Characters of a prompt in a request's log line."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_waiting_requests", 1, None),
            ("max_waiting_tokens", 1, None),
            ("max_body_bytes", 1, None),
            ("max_log_len", 0, None),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < low or (high is not None and value > high):
                upto = f"from {low} to {high}" if high is not None else f"of at least {low}"
                raise ConfigError(name, value, f"must be a whole number {upto}")
        for name in ("receive_timeout_s", "send_timeout_s", "shutdown_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds < float("inf")):
                raise ConfigError(name.removesuffix("_s"), seconds, "must be a number of seconds above 0")
        if self.isolate_api_keys and not self.api_keys:
            raise ConfigError("isolate_api_keys", True, "needs api_key: without keys there is nobody to tell apart")
        if not self.host.strip():
            raise ConfigError("host", self.host, "must be an address or a name, such as 127.0.0.1")
        for name in ("api_keys", "served_model_names"):
            if not all(item.strip() and item.isprintable() for item in getattr(self, name)):
                raise ConfigError(name[:-1], "", "must not be empty; leave it out, or give a printable text")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError("root_path", self.root_path, "must begin with /")

    @property
    def queue(self) -> QueueLimits:
        return QueueLimits(self.max_waiting_requests, self.max_waiting_tokens)

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK or self.host.startswith("127.")


def read_template(given: str | None) -> str | None:
    """A chat template: the file of that name, or the text itself where it is one. Raises `ConfigError`."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no text in UTF-8"
        raise ConfigError("chat_template", given, f"cannot be read: {reason.lower()}; name a Jinja file") from None
