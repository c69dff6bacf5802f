"""What a step's time depends on (`StepShape`), and the interface of cost models.

A model gives the seconds of the device for one fused step: prompt chunks and single tokens together, never
phases added up. Two things are optional: the host's seconds for a step, during which the device may still be
busy with the one before, and a run of decode steps at once. `LinearCost` is the plainest model.

Invariant: `run_seconds(cost, shape, n)[j] == cost.step_seconds(shape after j steps)`, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from octavo.memory.values import Int64
from octavo.scheduling.plan import StepPlan

Float64 = npt.NDArray[np.float64]

_ONES = np.ones(1024, dtype=np.int64)
_ONES.setflags(write=False)


@dataclass(frozen=True, slots=True, eq=False)
class StepShape:
    chunks: int
    tokens: int
    """Positions computed."""
    sampled: int
    context_tokens: int
    """Positions read by attention, summed over chunks: each chunk reads its whole context once."""
    starts: Int64
    """First position of each chunk."""
    counts: Int64

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        starts, counts, tokens = plan.starts.astype(np.int64), plan.counts.astype(np.int64), plan.tokens
        sampled = int(np.count_nonzero(plan.samples))
        return cls(len(starts), tokens, sampled, int(np.add.reduce(starts)) + tokens, starts, counts)

    @classmethod
    def from_chunks(cls, starts: npt.ArrayLike, counts: npt.ArrayLike, sampled: int) -> StepShape:
        first, many = np.asarray(starts, dtype=np.int64), np.asarray(counts, dtype=np.int64)
        tokens = int(many.sum())
        return cls(len(first), tokens, sampled, int(first.sum()) + tokens, first, many)

    @classmethod
    def decode(cls, positions: npt.ArrayLike) -> StepShape:
        """One token of every sequence: those at `positions`."""
        first = np.asarray(positions, dtype=np.int64)
        many = len(first)
        counts = _ONES[:many] if many <= len(_ONES) else np.ones(many, dtype=np.int64)
        return cls(many, many, many, int(np.add.reduce(first)) + many, first, counts)

    def later(self, steps: int) -> StepShape:
        """The decode step that follows `steps` decode steps after this one, of the same sequences."""
        return StepShape.decode(self.starts + steps)


class CostModel(Protocol):
    def step_seconds(self, shape: StepShape) -> float:
        """Seconds in which the device does one step."""
        ...


@runtime_checkable
class HasHostTime(Protocol):
    def host_seconds(self, shape: StepShape) -> float:
        """Seconds in which the host makes a step ready and takes in what came of it."""
        ...


@runtime_checkable
class HasRuns(Protocol):
    def run_seconds(self, shape: StepShape, steps: int) -> Float64:
        """`step_seconds` of a decode step and of those that follow it, `steps` in all."""
        ...


@runtime_checkable
class HasInterval(Protocol):
    @property
    def interval(self) -> tuple[float, float]:
        """A step takes between so many times and so many times its prediction, four times in five."""
        ...


@runtime_checkable
class HasStepInterval(Protocol):
    def step_interval(self, shape: StepShape) -> tuple[float, float]:
        """Seconds, of host and device together, between which four in five steps of this shape end."""
        ...


def run_seconds(cost: CostModel, shape: StepShape, steps: int) -> Float64:
    if isinstance(cost, HasRuns):
        return cost.run_seconds(shape, steps)
    return np.array([cost.step_seconds(shape.later(step)) for step in range(steps)])


@dataclass(frozen=True, slots=True)
class Scaled:
    """Another model, so many times slower. What an interval's ends are simulated with."""

    inner: CostModel
    factor: float

    def step_seconds(self, shape: StepShape) -> float:
        return self.inner.step_seconds(shape) * self.factor

    def host_seconds(self, shape: StepShape) -> float:
        return self.inner.host_seconds(shape) * self.factor if isinstance(self.inner, HasHostTime) else 0.0

    def run_seconds(self, shape: StepShape, steps: int) -> Float64:
        slower: Float64 = run_seconds(self.inner, shape, steps) * np.float64(self.factor)
        return slower


@dataclass(frozen=True, slots=True)
class LinearCost:
    step_s: float = 1e-3
    token_s: float = 1e-4
    context_token_s: float = 1e-7

    def step_seconds(self, shape: StepShape) -> float:
        return self.step_s + self.token_s * shape.tokens + self.context_token_s * shape.context_tokens

    def run_seconds(self, shape: StepShape, steps: int) -> Float64:
        contexts = shape.context_tokens + shape.chunks * np.arange(steps, dtype=np.int64)
        seconds: Float64 = self.step_s + self.token_s * shape.tokens + np.float64(self.context_token_s) * contexts
        return seconds
