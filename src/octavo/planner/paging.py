"""How an engine cuts a sequence's state into blocks of one pool, and what of it fits into so many bytes.

    pool     | unit | unit | unit | ...        blocks = KV bytes // unit bytes, some never usable
    group    blocks of its own size, `per_unit` of them in a unit that belongs to it

Owns `PagedGroup` (one law of growth) and `Paging` (all groups over one pool). Which groups there are
is the engine's rule, in `charging`; bytes come from the geometry's components.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from octavo.geometry.charge import window_blocks

Law = Literal["growing", "window", "chunk", "constant", "entries"]
MOST_TOKENS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedGroup:
    """Layers that share a block table. `block_tokens` is 0 for constant state."""

    name: str
    law: Law
    layers: int
    block_bytes: int
    block_tokens: int
    per_unit: int = 1
    reach_tokens: int = 0
    """Of a window or chunk: positions that a query reads, its own included."""
    sink_tokens: int = 0
    exact: bool = True
    """A window is charged by the shared rule; if not, as vLLM does: one block more, however short the sequence."""
    extra_blocks: int = 0
    """Of constant state: copies beside the one in use."""
    run_tokens: int = 1
    """Of entries: positions that one stands for."""

    def blocks(self, tokens: int, step_tokens: int) -> int:
        """Blocks that one sequence of `tokens` positions holds at most, when a step computes `step_tokens`."""
        if self.law == "constant":
            return 1 + self.extra_blocks
        if self.law == "entries":
            return -(-(tokens // self.run_tokens) * self.run_tokens // self.block_tokens)
        whole = -(-tokens // self.block_tokens)
        if self.law == "growing":
            return whole
        if self.exact:
            blocks = window_blocks(tokens, self.reach_tokens, step_tokens, self.block_tokens)
            return min(whole, blocks - (-self.sink_tokens // self.block_tokens))
        if self.law == "chunk":
            return -(-min(tokens, self.reach_tokens + step_tokens) // self.block_tokens)
        return -(-min(tokens, self.reach_tokens + self.sink_tokens - 1 + step_tokens) // self.block_tokens) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """A pool of equal units, shared by all groups."""

    groups: tuple[PagedGroup, ...]
    unit_bytes: int
    step_tokens: int
    reserved_units: int = 0
    """Units that no sequence can have: a null block."""
    prints: Literal["blocks", "groups", "concurrency"] = "blocks"
    """How the engine turns blocks into the tokens that it prints."""
    notes: tuple[str, ...] = ()

    @property
    def block_tokens(self) -> int:
        """Positions of a block: the smallest of a group that grows, 0 where none does."""
        return min((g.block_tokens for g in self.groups if g.block_tokens), default=0)

    @property
    def page_bytes(self) -> int:
        """What a sequence that grows takes at a time: a block of the group that grows, if there is one."""
        return min((g.block_bytes for g in self.groups if g.law == "growing"), default=self.unit_bytes)

    def units(self, kv_bytes: int) -> int:
        return kv_bytes // self.unit_bytes

    def usable_units(self, kv_bytes: int) -> int:
        return max(0, self.units(kv_bytes) - self.reserved_units)

    def units_for(self, tokens: int, sequences: int = 1) -> int:
        """Units that `sequences` of `tokens` positions each hold, groups not sharing a unit."""
        return sum(-(-sequences * g.blocks(tokens, self.step_tokens) // g.per_unit) for g in self.groups)

    def bytes_for(self, tokens: int, sequences: int = 1) -> int:
        """Bytes of their blocks. What a unit has room for beside them is other sequences'."""
        return sequences * sum(g.blocks(tokens, self.step_tokens) * g.block_bytes for g in self.groups)

    def share(self, tokens: int) -> Fraction:
        """Units that one sequence among many takes, groups sharing out their units evenly."""
        return sum((Fraction(g.blocks(tokens, self.step_tokens), g.per_unit) for g in self.groups), Fraction())

    def concurrency(self, kv_bytes: int, tokens: int) -> float:
        """Sequences of `tokens` positions, with the fraction that is left over."""
        share = self.share(tokens)
        return float(self.usable_units(kv_bytes) / share) if share else 0.0

    def sequences(self, kv_bytes: int, tokens: int) -> int:
        """Whole sequences of `tokens` positions that the pool holds at once."""
        usable = self.usable_units(kv_bytes)
        return largest(lambda n: self.units_for(tokens, n) <= usable, usable * max(g.per_unit for g in self.groups))

    def largest_context(self, kv_bytes: int, sequences: int = 1) -> int:
        """The longest sequence that fits, `sequences` of them at once; 0 where not one position does."""
        usable = self.usable_units(kv_bytes)
        if self.units_for(MOST_TOKENS, sequences) <= usable:
            return MOST_TOKENS
        return largest(lambda tokens: self.units_for(tokens, sequences) <= usable, MOST_TOKENS)

    def tokens(self, kv_bytes: int, context: int) -> int:
        """The capacity in tokens as the engine would print it, for sequences of `context` positions at most."""
        units = self.units(kv_bytes)
        if self.prints == "concurrency":
            share = self.share(context)
            return int(units * context / share) if share else 0
        growing = [g for g in self.groups if g.block_tokens]
        if not growing:
            return units * context
        shared = len(self.groups) if self.prints == "groups" else 1
        return units // shared * min(g.block_tokens * g.per_unit for g in growing)


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which `holds`, which is true up to some number and false beyond."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
