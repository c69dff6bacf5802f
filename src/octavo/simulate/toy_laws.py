"""The laws of attention state, restated for the toy model: what an answer at a position depends on.

    full       all positions                        window_6   the last six, its own included
    constant   a running state, position by position    chunk_8   those of its own chunk of eight

Owns the laws and layouts that follow them. Deliberately does not use `GroupLayout`'s arithmetic: what a position
reads is said here a second time, in the plainest way, so that the two can disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16
from octavo.geometry.state import Component
from octavo.memory.groups import StateGroup
from octavo.memory.layout import GroupLayout, Layout, make_layout
from octavo.memory.values import Int32

UInt64 = npt.NDArray[np.uint64]

WORD = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Law:
    """What a query reads. At most one of the three is set; none: all positions before it."""

    window_tokens: int | None = None
    chunk_tokens: int | None = None
    constant: bool = False

    def first_read(self, position: int) -> int:
        """The lowest position that a query at `position` reads."""
        if self.window_tokens is not None:
            return max(0, position + 1 - self.window_tokens)
        if self.chunk_tokens is not None:
            return position // self.chunk_tokens * self.chunk_tokens
        return 0

    def context(self, values: UInt64) -> int:
        """What the last of these positions reads; `values` are the imprints of all of them."""
        if self.constant:
            return advanced(0, values)
        return int(values[self.first_read(len(values) - 1) :].sum())


FULL = Law()


def law_named(name: str) -> Law:
    """`full`, `constant`, `window_N` or `chunk_N`."""
    kind, _, size = name.partition("_")
    if name == "full":
        return FULL
    if name == "constant":
        return Law(constant=True)
    if kind == "window" and size.isdigit():
        return Law(window_tokens=int(size))
    if kind == "chunk" and size.isdigit():
        return Law(chunk_tokens=int(size))
    raise ConfigError("law", name, "use full, constant, window_N or chunk_N")


def law_of(group: GroupLayout) -> Law:
    return Law(group.window_tokens, group.chunk_tokens, constant=group.block_tokens == 0)


def laws_of(layout: Layout) -> tuple[Law, ...]:
    """The laws that its groups follow, each once, in order."""
    return tuple(dict.fromkeys(law_of(group) for group in layout.groups))


def combined(contexts: Sequence[int]) -> int:
    """One figure of what was read under each law, in order of the laws."""
    if len(contexts) == 1:
        return contexts[0] & WORD
    mixed = 0
    for context in contexts:
        mixed = scrambled(mixed ^ (context & WORD))
    return mixed


def toy_layout(
    heads: Sequence[int] = (2,), block_tokens: int = 4, laws: Sequence[str] = (), *, most_slab_bytes: int = 0
) -> Layout:
    """One group of one layer for each entry, with that many key heads: (4, 2) packs two of the second in a slab.

    `laws` names the law of each group; all are full where it is empty. `most_slab_bytes` is that of `make_layout`.
    """
    named = [law_named(name) for name in laws] or [FULL] * len(heads)
    groups = [
        StateGroup(
            f"g{i}",
            (i,),
            ((Component("k", (n, 2), BF16), Component("v", (n, 2), BF16)),),
            per_sequence=law.constant,
            window_tokens=law.window_tokens,
            chunk_tokens=law.chunk_tokens,
        )
        for i, (n, law) in enumerate(zip(heads, named, strict=True))
    ]
    return make_layout(groups, block_tokens, most_slab_bytes=most_slab_bytes)


def imprints(tokens: Int32, first: int) -> UInt64:
    """What positions first, first + 1, ... leave in the arena; never zero in practice."""
    values = tokens.astype(np.uint64) + (np.arange(first, first + len(tokens), dtype=np.uint64) << np.uint64(32))
    values = (values + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64 = values ^ (values >> np.uint64(29))
    return mixed


def advanced(state: int, values: Iterable[np.uint64]) -> int:
    """A running state after these positions: it depends on each and on their order."""
    for value in values:
        state = scrambled(state ^ int(value))
    return state


def scrambled(value: int) -> int:
    value = (value * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 31)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 29)
