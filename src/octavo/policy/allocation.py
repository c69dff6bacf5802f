"""Allocation: how much room a sequence gets when it enters, and whether it must lie in one piece.

`paged` takes blocks as positions are computed. The `contiguous` kinds are the baseline that
paging replaced: one run, reserved up front and never extended, sized by

- `contiguous-max`: what the request declares, prompt + max_tokens;
- `contiguous-pow2`: the next power of two of its length (the true one where a trace knows it,
  else the declared one), at most the context limit;
- `contiguous-oracle`: its true length, which only a trace knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Extent:
    """Lengths of one sequence, in positions to be computed."""

    upto: int
    """What this step needs."""
    declared: int
    """The most it can ever need: prompt + max_tokens - 1."""
    true_length: int | None
    """What it will need, where a trace says so."""
    context_limit: int


class Allocation(Protocol):
    name: str
    contiguous: bool
    needs_true_length: bool

    def reserve_tokens(self, extent: Extent) -> int:
        """Positions to have room for now; at least `extent.upto`."""
        ...


class Paged:
    name = "paged"
    contiguous = False
    needs_true_length = False

    def reserve_tokens(self, extent: Extent) -> int:
        return extent.upto


class ContiguousMax:
    name = "contiguous-max"
    contiguous = True
    needs_true_length = False

    def reserve_tokens(self, extent: Extent) -> int:
        return extent.declared


class ContiguousPow2:
    name = "contiguous-pow2"
    contiguous = True
    needs_true_length = False

    def reserve_tokens(self, extent: Extent) -> int:
        length = extent.declared if extent.true_length is None else extent.true_length
        return max(length, min(1 << (length - 1).bit_length(), extent.context_limit))


class ContiguousOracle:
    name = "contiguous-oracle"
    contiguous = True
    needs_true_length = True

    def reserve_tokens(self, extent: Extent) -> int:
        return extent.declared if extent.true_length is None else extent.true_length


ALLOCATIONS: dict[str, type[Allocation]] = {
    "paged": Paged,
    "contiguous": ContiguousMax,
    "contiguous-max": ContiguousMax,
    "contiguous-pow2": ContiguousPow2,
    "contiguous-oracle": ContiguousOracle,
}


def allocation_named(name: str) -> Allocation:
    if name not in ALLOCATIONS:
        raise ConfigError("allocation", name, f"use one of {', '.join(ALLOCATIONS)}")
    return ALLOCATIONS[name]()
