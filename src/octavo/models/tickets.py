"""What a layer leaves when it stores keys and values, and how the attention function of the same call finds it.

Owns `Call` (one call of the attention function), the protocol of tickets, and the marks by which a ticket is found
and checked. What a ticket does when it is handed in belongs to the kind of state: `bridge` for keys and values,
`latent` for latents. Nothing here is global: a ticket hangs on the tensors and keyword arguments of one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from octavo.errors import ModelError
from octavo.kernels.interface import AttentionRule

TICKET = "octavo_ticket"
_KEY, _VALUE = "octavo_key_of", "octavo_value_of"


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of the attention function: what a module attends with, and by which rule."""

    module: nn.Module
    query: torch.Tensor
    """[1, heads, tokens, dim]"""
    key: torch.Tensor
    value: torch.Tensor
    rule: AttentionRule
    chosen: Any = None
    """What an index lets it read, where it has one."""

    @property
    def layer(self) -> int | None:
        """The number that the module gives itself."""
        index = getattr(self.module, "layer_idx", None)
        return index if isinstance(index, int) else None

    def require_stored(self, ticket: Ticket) -> None:
        """Raise unless the key and the value are those for which the ticket was left."""
        if getattr(self.key, _KEY, None) is not ticket or getattr(self.value, _VALUE, None) is not ticket:
            raise refused(self.module, "changes keys and values between storing and attending")


class Ticket(Protocol):
    """What `update` leaves for the attention function: how a layer attends to what it stored."""

    def attend(self, call: Call) -> torch.Tensor:
        """-> [tokens, heads, v_dim]"""
        ...


def leave(ticket: Ticket, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any] | None) -> None:
    """Put the ticket where the attention function of this call, or of a borrowing layer, will find it.

    The ticket holds neither tensor, so that nothing is tied to itself.
    """
    setattr(key, _KEY, ticket)
    setattr(value, _VALUE, ticket)
    if kwargs is not None:
        kwargs[TICKET] = ticket


def ticket_of(key: torch.Tensor, kwargs: Mapping[str, Any]) -> Ticket | None:
    """What this call's `update` left, or a lender's."""
    found: Ticket | None = kwargs.get(TICKET) or getattr(key, _KEY, None)
    return found


def refused(module: nn.Module, why: str) -> ModelError:
    return ModelError("model", type(module).__name__, why)
