"""What was said so far, as a value that can be taken back, saved and loaded. Knows no engine and no terminal.

Invariant: `turns` holds no system message; that one stands in `system`, and is the first of `messages`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import RequestError

Message = dict[str, Any]


@dataclass(slots=True)
class History:
    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.turns]

    def add(self, role: str, content: str) -> None:
        self.turns.append({"role": role, "content": content})

    def undo(self) -> str | None:
        """Take back the last message of the user and all after it; returns it."""
        asked = next((i for i in reversed(range(len(self.turns))) if self.turns[i]["role"] == "user"), None)
        if asked is None:
            return None
        text = str(self.turns[asked]["content"])
        del self.turns[asked:]
        return text


def save(path: Path, history: History, model: str) -> None:
    """Whole or not at all. Raises `RequestError`."""
    text = json.dumps({"model": model, "messages": history.messages}, ensure_ascii=False, indent=1)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(f"{text}\n", encoding="utf-8")
        part.replace(path)
    except (OSError, ValueError) as error:
        part.unlink(missing_ok=True)
        raise RequestError("save", str(path), f"cannot be written ({_reason(error)}); name another file") from None


def load(path: Path) -> History:
    """What `save` wrote, or a list of messages as OpenAI's API takes it. Raises `RequestError`."""
    from octavo.server.body import parse_object
    from octavo.server.errors import ApiError
    from octavo.server.prompts import read_messages

    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        raise RequestError("load", str(path), f"cannot be read ({_reason(error)}); name a saved chat") from None
    if raw.lstrip().startswith(b"["):
        raw = b'{"messages":' + raw + b"}"
    try:
        messages = read_messages(parse_object(raw).get("messages"))
    except ApiError as error:
        raise RequestError("load", str(path), f"is no saved chat: {error.message.removeprefix('body: ')}") from None
    system = str(messages.pop(0)["content"]) if messages[0]["role"] == "system" else None
    return History(system, messages)


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
