"""Reuse: may a finished block serve another request, and where is constant state copied for that?

Blocks of positions need no choice: a full one is findable. Constant state stands at one position only, so that a
copy of it, a snapshot, must be taken where a later request may want to go on from.

- `none`: nothing is kept; two equal prompts share no block.
- `prefix`: who needs what a running sequence is about to compute waits for it, where that is enough. Snapshots are
  taken at the last block boundary of the prompt (the chunk is cut there), and while a sequence generates every
  `snapshot_blocks` blocks, of which the latest `keeps` are kept: by default the last one, from which the next turn of
  a conversation starts.
"""

from __future__ import annotations

from typing import Protocol

from octavo.errors import ConfigError


class Reuse(Protocol):
    name: str
    shares: bool
    """Whether full blocks are findable at all."""
    keeps: int
    """Of a sequence that generates, how many of its latest snapshots are kept; those of prompts are all kept."""
    wait_tokens: int
    """The fewest positions worth waiting for: who needs next what a running sequence is about to compute waits for so
    many, and computes fewer again."""

    def cut(self, prompt_tokens: int, block_tokens: int) -> int:
        """The position, a multiple of `block_tokens`, where a chunk of the prompt ends; 0: nowhere in particular."""
        ...

    def snapshot(self, end: int, prompt_tokens: int, block_tokens: int) -> bool:
        """Whether to copy the constant state of a sequence that has computed `end` positions, whole blocks."""
        ...


class NoReuse:
    name = "none"
    shares = False
    keeps = 0
    wait_tokens = 1

    def cut(self, prompt_tokens: int, block_tokens: int) -> int:
        return 0

    def snapshot(self, end: int, prompt_tokens: int, block_tokens: int) -> bool:
        return False


class PrefixReuse:
    name = "prefix"
    shares = True

    def __init__(self, snapshot_blocks: int = 4, keeps: int = 1, wait_tokens: int = 1) -> None:
        for name, value in (("snapshot_blocks", snapshot_blocks), ("keeps", keeps), ("wait_tokens", wait_tokens)):
            if value < 1:
                raise ConfigError(name, value, "must be at least 1")
        self.snapshot_blocks, self.keeps, self.wait_tokens = snapshot_blocks, keeps, wait_tokens

    def cut(self, prompt_tokens: int, block_tokens: int) -> int:
        return (prompt_tokens - 1) // block_tokens * block_tokens

    def snapshot(self, end: int, prompt_tokens: int, block_tokens: int) -> bool:
        if end < prompt_tokens:
            return end == self.cut(prompt_tokens, block_tokens)
        return end // block_tokens % self.snapshot_blocks == 0


REUSES: dict[str, type[NoReuse | PrefixReuse]] = {"none": NoReuse, "prefix": PrefixReuse}


def reuse_named(name: str, wait_tokens: int = 1) -> Reuse:
    if name not in REUSES:
        raise ConfigError("reuse", name, f"use one of {', '.join(REUSES)}")
    return PrefixReuse(wait_tokens=wait_tokens) if name == "prefix" else REUSES[name]()
