"""Pins: prefixes that go last, up to a bound and until a moment.

A pin is a preference, not a reservation: its blocks are given up when nothing else can be, so that no pin ever keeps
a running sequence from growing, or a waiting one from entering. Owns names, expiry and the bound; what is offered to
the eviction policy is the shelves'.

Invariant: there are at most so many pins, of at most so many positions; a node's `pins` is the number of live pins
whose prefix goes through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import RequestError
from octavo.memory.nodes import Node
from octavo.memory.prefix import PrefixDirectory
from octavo.memory.shelf import Shelf

MOST_PINS = 1024
"""At a time: one that names nothing new takes no room of others, and yet it is kept in mind."""


@dataclass(frozen=True, slots=True)
class Pin:
    name: str
    tokens: int
    """Positions of whole blocks that were kept when it was made: those are pinned."""
    until_s: float
    salt: str = ""
    """Under which its text is kept."""


class Pins:
    def __init__(self, directory: PrefixDirectory, shelves: Sequence[Shelf], most_tokens: int) -> None:
        """`most_tokens`: positions of all pins together at most, those of a shared start counted once."""
        self.most_tokens = most_tokens
        self._directory = directory
        self._shelves = tuple(shelves)
        self._pins: dict[str, tuple[Pin, tuple[Node, ...]]] = {}
        self._pinned_nodes = 0
        self._made = 0
        self._next_end = float("inf")

    @property
    def tokens(self) -> int:
        """Positions that are pinned now."""
        return self._pinned_nodes * self._directory.space.block_tokens

    @property
    def next_end(self) -> float:
        """When the first of them ends; infinite where there is none."""
        return self._next_end

    def tokens_at(self, now: float) -> int:
        """Positions that are pinned at this moment, whether or not pins whose time is over have been told so."""
        if now < self._next_end:
            return self.tokens
        nodes = {node.number for pin, path in self._pins.values() if now < pin.until_s for node in path}
        return len(nodes) * self._directory.space.block_tokens

    def live(self) -> list[Pin]:
        """In the order in which they were made."""
        return [pin for pin, _ in self._pins.values()]

    def pin(self, path: Sequence[Node], until_s: float, salt: str = "") -> Pin:
        """Pin whole blocks from the start of a text on. Raises `RequestError` where that is beyond a bound."""
        size = self._directory.space.block_tokens
        if len(self._pins) >= MOST_PINS:
            remedy = f"cannot be pinned: there are {MOST_PINS} pins already; unpin others, or wait"
            raise RequestError("prompt", f"{len(path) * size} kept tokens", remedy)
        more = sum(node.pins == 0 for node in path) * size
        if self.tokens + more > self.most_tokens:
            raise RequestError(
                "prompt",
                f"{len(path) * size} kept tokens",
                f"cannot be pinned: {self.tokens} are, of {self.most_tokens} that may be; unpin others, or wait",
            )
        self._made += 1
        pin = Pin(f"pin-{self._made}", len(path) * size, until_s, salt)
        self._pins[pin.name] = (pin, tuple(path))
        self._next_end = min(self._next_end, until_s)
        for node in path:
            node.pins += 1
            if node.pins == 1:
                self._pinned_nodes += 1
                self._offer_again(node)
        return pin

    def unpin(self, name: str) -> bool:
        """False when there is no such pin, or no longer."""
        found = self._pins.pop(name, None)
        if found is None:
            return False
        for node in found[1]:
            node.pins -= 1
            if node.pins == 0:
                self._pinned_nodes -= 1
                self._offer_again(node)
        self._next_end = min((pin.until_s for pin, _ in self._pins.values()), default=float("inf"))
        return True

    def expire(self, now: float) -> None:
        """Pins whose time is over end."""
        if now >= self._next_end:
            for pin in self.live():
                if now >= pin.until_s:
                    self.unpin(pin.name)

    def clear(self) -> None:
        for pin in self.live():
            self.unpin(pin.name)

    def _offer_again(self, node: Node) -> None:
        if self._directory.lives(node):
            for shelf in self._shelves:
                shelf.offer_again(node)
