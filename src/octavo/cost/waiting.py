"""From how many shared positions on it is cheaper to wait for them than to compute them as well.

Two requests with the same start of S tokens, and nothing else to do. Both computed in one step end after T(2 S), where
T is what a step of so many tokens takes. Where the second waits, the first ends after T(S) and the second one step of
a single token later. Waiting is cheaper in the mean where

    2 T(2 S) > 2 T(S) + T(1)

and the more so the more requests wait. Where a step takes c + a S, that is S > (c + a) / 2 a.
"""

from __future__ import annotations

from octavo.cost.step import CostModel, StepShape

_MOST = 1 << 16
"""Positions; whoever shares more waits in any case."""


def tokens_worth_waiting_for(cost: CostModel) -> int:
    """The fewest, by a model of what steps cost."""

    def takes(tokens: int) -> float:
        return cost.step_seconds(StepShape.from_chunks([0], [tokens], 1))

    single = takes(1)

    def cheaper(tokens: int) -> bool:
        both = cost.step_seconds(StepShape.from_chunks([0, 0], [tokens, tokens], 2))
        return 2 * both > 2 * takes(tokens) + single

    most = 1
    while most < _MOST and not cheaper(most):
        most *= 2
    least = most // 2  # not enough, or nothing
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if cheaper(middle) else (middle, most)
    return most
