"""Batching: when a sequence enters and leaves the active set, and how a step's token budget is split.

`iteration` decides anew at every step. `request` is the baseline: a batch forms when nothing
runs, and its seats and blocks are given up together when its last member ends.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from octavo.errors import ConfigError
from octavo.memory.values import Int64


class Batching(Protocol):
    name: str
    whole_batches: bool
    """True: enter only when the step began with nothing running; leave together."""

    def split(self, wanted: Int64, budget: int) -> Int64:
        """Tokens for each running sequence, in running order: 0 <= answer <= wanted, sum <= budget.

        When anything is wanted and the budget is positive, at least one token must be given.
        """
        ...


def decodes_first(wanted: Int64, budget: int) -> Int64:
    """Everyone who wants one token gets it; what is left goes to longer chunks in running order."""
    longer = wanted > 1
    given = np.where(longer, 0, wanted)
    left = budget - int(np.count_nonzero(given))
    if left < 0:
        given[np.cumsum(given) > budget] = 0
        return given
    for index in longer.nonzero()[0].tolist():
        if left <= 0:
            break
        given[index] = some = min(int(wanted[index]), left)
        left -= some
    return given


class IterationBatching:
    name = "iteration"
    whole_batches = False

    def split(self, wanted: Int64, budget: int) -> Int64:
        return decodes_first(wanted, budget)


class RequestBatching:
    name = "request"
    whole_batches = True

    def split(self, wanted: Int64, budget: int) -> Int64:
        return decodes_first(wanted, budget)


BATCHINGS: dict[str, type[Batching]] = {"iteration": IterationBatching, "request": RequestBatching}


def batching_named(name: str) -> Batching:
    if name not in BATCHINGS:
        raise ConfigError("batching", name, f"use one of {', '.join(BATCHINGS)}")
    return BATCHINGS[name]()
