"""A step's time as a sum of terms: seconds per unit of something that is counted in its shape.

Owns what is counted and how a term is written down. A term counts a whole quantity, the part of it between two bounds
(so that what a further token costs may change with their number), or whether it exceeds a bound (a jump).

    tokens          positions computed                  read:full:0      positions read by single tokens
    sampled         rows of logits                      longest:full:0   the most that one single token reads
    chunks          sequences in the step               gathered:full:0  positions read by longer chunks
    long            chunks of more than one token       pairs:full:0     queries of longer chunks x what each meets

Invariant: of a run of decode steps, the sum of terms equals that of each of its steps, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.cost.laws import Law, LawName
from octavo.cost.step import Float64, StepShape
from octavo.errors import ConfigError

STEP = "step"
_PLAIN = (STEP, "tokens", "sampled", "chunks", "long")
_BY_LAW = ("read", "longest", "gathered", "pairs")


@dataclass(frozen=True, slots=True, order=True)
class Term:
    quantity: str
    low: int = 0
    high: int | None = None
    jump: bool = False
    """1 above `low`, else 0."""

    def of(self, quantities: Mapping[str, Any]) -> Any:
        """How many units: a number, or an array of a run."""
        value = quantities[self.quantity]
        if self.jump:
            return 1 if value > self.low else 0
        if self.low:
            value = np.maximum(value - self.low, 0)
        if self.high is not None:
            value = np.minimum(value, self.high - self.low)
        return value

    @property
    def name(self) -> str:
        if self.jump:
            return f"{self.quantity} > {self.low}"
        if self.high is None:
            return f"{self.quantity} from {self.low}" if self.low else self.quantity
        return f"{self.quantity} from {self.low} to {self.high}"

    @classmethod
    def named(cls, name: Any) -> Term:
        """Raises `ConfigError` where `name` is none of a term's names."""
        words = name.split() if isinstance(name, str) else []
        match words:
            case [quantity, ">", low] if low.isdecimal():
                found = cls(quantity, int(low), jump=True)
            case [quantity, "from", low, "to", high] if low.isdecimal() and high.isdecimal():
                found = cls(quantity, int(low), int(high))
            case [quantity, "from", low] if low.isdecimal():
                found = cls(quantity, int(low))
            case [quantity]:
                found = cls(quantity)
            case _:
                raise ConfigError("term", name, "is no term of a step's time; calibrate again")
        kind, _, law = found.quantity.partition(":")
        if found.quantity not in _PLAIN and (kind not in _BY_LAW or LawName.parsed(law) is None):
            raise ConfigError("term", name, "counts nothing that a step has; calibrate again")
        return found


def split(term: Term, at: int) -> tuple[Term, Term]:
    """The same quantity below and above a bound."""
    return Term(term.quantity, term.low, at), Term(term.quantity, at, term.high)


def laws_in(terms: Sequence[Term]) -> tuple[Law, ...]:
    """The laws that these terms count by."""
    names = sorted({term.quantity.partition(":")[2] for term in terms if ":" in term.quantity})
    found = [LawName.parsed(name) for name in names]
    return tuple(Law(law.kind, law.reach) for law in found if law is not None)


def by_law(kind: str, law: Law) -> str:
    return f"{kind}:{law.kind}:{law.reach}"


def quantities_of(shape: StepShape, laws: Sequence[Law]) -> dict[str, Any]:
    """Everything that a term of a step may count."""
    found: dict[str, Any] = {
        STEP: 1, "tokens": shape.tokens, "sampled": shape.sampled, "chunks": shape.chunks, "long": 0
    }  # fmt: skip
    if shape.tokens == shape.chunks:
        for law in laws:
            if law.kind == "full":
                found[by_law("read", law)] = shape.context_tokens
                found[by_law("longest", law)] = int(shape.starts.max(initial=-1)) + 1
            else:
                read = law.read(shape.starts, shape.counts)
                found[by_law("read", law)], found[by_law("longest", law)] = int(read.sum()), int(read.max(initial=0))
            found[by_law("gathered", law)] = found[by_law("pairs", law)] = 0
        return found
    long = shape.counts > 1
    found["long"] = int(np.count_nonzero(long))
    for law in laws:
        read, pairs = law.read(shape.starts, shape.counts), law.pairs(shape.starts, shape.counts)
        found[by_law("read", law)] = int(read[~long].sum())
        found[by_law("longest", law)] = int(read[~long].max(initial=0))
        found[by_law("gathered", law)] = int(read[long].sum())
        found[by_law("pairs", law)] = int(pairs[long].sum())
    return found


def quantities_of_run(shape: StepShape, steps: int, laws: Sequence[Law]) -> dict[str, Any]:
    """The same of a decode step and those that follow it: arrays where they change from step to step."""
    found = quantities_of(shape, laws)
    later = np.arange(steps, dtype=np.int64)
    one = np.ones((1, 1), dtype=np.int64)
    for law in laws:
        if law.kind == "full":
            found[by_law("read", law)] = found[by_law("read", law)] + later * shape.chunks
            found[by_law("longest", law)] = found[by_law("longest", law)] + later
        else:
            read = law.read(shape.starts[None, :] + later[:, None], one)
            found[by_law("read", law)], found[by_law("longest", law)] = read.sum(axis=1), read.max(axis=1, initial=0)
    return found


@dataclass(frozen=True, slots=True)
class Sum:
    """Terms with the seconds of a unit of each."""

    terms: tuple[Term, ...]
    seconds: tuple[float, ...]

    def of(self, quantities: Mapping[str, Any]) -> Any:
        total: Any = 0.0
        for term, each in zip(self.terms, self.seconds, strict=True):
            total = total + each * term.of(quantities)
        return total

    def matrix(self, rows: Sequence[Mapping[str, Any]]) -> Float64:
        """How many units of each term every row has."""
        return np.array([[float(term.of(row)) for term in self.terms] for row in rows]).reshape(-1, len(self.terms))
