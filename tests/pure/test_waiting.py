"""From how many tokens on waiting for a prefix that is being computed is cheaper, by what a step costs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from octavo.cost.step import StepShape
from octavo.cost.waiting import tokens_worth_waiting_for
from octavo.errors import ConfigError
from octavo.policy.reuse import PrefixReuse


@dataclass(frozen=True)
class Linear:
    """So much for a step, and so much for a token."""

    step: float
    token: float
    flat: bool = False
    """The longer of both instead of their sum."""

    def step_seconds(self, shape: StepShape) -> float:
        return max(self.step, self.token * shape.tokens) if self.flat else self.step + self.token * shape.tokens


@pytest.mark.parametrize(("step", "token", "flat", "fewest"), [
    (1.0, 1.0, False, 2), (6.0, 0.01, False, 301), (13.0, 1.5, False, 5), (3.0, 0.01, True, 226),
    (1.0, 0.0, False, 65536),
])  # fmt: skip
def test_the_fewest_tokens_are_those_whose_step_is_saved(step: float, token: float, flat: bool, fewest: int) -> None:
    assert tokens_worth_waiting_for(Linear(step, token, flat)) == fewest


def test_no_less_than_one_token_is_waited_for() -> None:
    with pytest.raises(ConfigError, match="wait_tokens"):
        PrefixReuse(wait_tokens=0)
