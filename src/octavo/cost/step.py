"""What a step's time depends on (`StepShape`), and the interface of cost models.

`LinearCost` is the plainest model: so much a step, a token, and a position read. Roofline and
fitted models share the interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.scheduling.plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepShape:
    chunks: int
    tokens: int
    """Positions computed."""
    sampled: int
    context_tokens: int
    """Positions read by attention, summed over chunks: each chunk reads its whole context once."""

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        return cls(
            chunks=plan.chunks,
            tokens=plan.tokens,
            sampled=int(np.count_nonzero(plan.samples)),
            context_tokens=int((plan.starts + plan.counts).sum()),
        )


class CostModel(Protocol):
    def step_seconds(self, shape: StepShape) -> float: ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    step_s: float = 1e-3
    token_s: float = 1e-4
    context_token_s: float = 1e-7

    def step_seconds(self, shape: StepShape) -> float:
        return self.step_s + self.token_s * shape.tokens + self.context_token_s * shape.context_tokens
