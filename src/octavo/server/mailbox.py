"""What a reader has not read yet, merged so that it stays small however slow the reader is.

Owns `Mailbox` and `merge`. Lives in the event loop; knows neither the engine nor HTTP.

Invariant: whatever is taken when, the deltas of one choice, joined, are what the engine sent, and
the last of them alone has a `finish_reason`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from octavo.engine.outputs import Delta

MERGE_ABOVE = 256
"""Deltas that may lie unread before they are merged to one for each choice."""


@dataclass(slots=True, eq=False)
class Mailbox:
    choices: int
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to take. Several mailboxes may share one."""
    _deltas: list[Delta] = field(default_factory=list)
    _ended: int = 0

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if len(self._deltas) > MERGE_ABOVE + self.choices:
            self._deltas = merge(self._deltas)
        self.news.set()

    def take(self) -> list[Delta]:
        """All there is, at most one delta for each choice; empty when nothing has come."""
        deltas, self._deltas = merge(self._deltas), []
        self._ended += sum(delta.finish_reason is not None for delta in deltas)
        return deltas

    @property
    def ended(self) -> bool:
        """Every choice has ended and been taken."""
        return self._ended >= self.choices


def merge(deltas: Sequence[Delta]) -> list[Delta]:
    """One delta for each choice, in the order in which choices first appear."""
    if len(deltas) == 1:
        return list(deltas)
    by_choice: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.index, []).append(delta)
    return [parts[0] if len(parts) == 1 else _joined(parts) for parts in by_choice.values()]


def _joined(parts: list[Delta]) -> Delta:
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(item for part in parts for item in part.logprobs),
    )
