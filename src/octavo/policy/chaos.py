"""A seeded random policy for every seam: it may make octavo slow, never wrong."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from octavo.memory.values import Int64
from octavo.policy.admission import AdmissionView
from octavo.policy.eviction import Evictable
from octavo.policy.placement import Bargain
from octavo.policy.preemption import Action, Candidate
from octavo.policy.rates import Rates


class Chaos:
    """Random answers within what the protocols allow. One object serves all seams it is given to."""

    name = "chaos"
    whole_batches = False
    guarantees = False
    saves = True
    at_once = False
    constant = False
    moves = True

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._offered: dict[tuple[int, int], Evictable] = {}

    def admits(self, view: AdmissionView) -> bool:
        # With nothing running, a refusal would stop the world; that much is asked of any policy.
        return view.running == 0 or self._random.random() < 0.5

    def victim(self, candidates: Sequence[Candidate]) -> int:
        return self._random.randrange(len(candidates))

    def split(self, wanted: Int64, budget: int) -> Int64:
        given = np.zeros_like(wanted)
        order = np.flatnonzero(wanted)
        left = budget
        for index in self._random.sample(order.tolist(), len(order)):
            if left <= 0:
                break
            given[index] = self._random.randint(0, min(int(wanted[index]), left))
            left -= int(given[index])
        if len(order) and not given.any():
            given[order[0]] = 1
        return given

    # -- placement and preemption ---------------------------------------------------------------

    def worth_saving(self, bargain: Bargain, rates: Rates) -> bool:
        return self._random.random() < 0.7

    def worth_loading(self, bargain: Bargain, rates: Rates) -> bool:
        return self._random.random() < 0.7

    def action(self, computed_tokens: int, moved_bytes: int, rates: Rates) -> Action:
        return "offload" if self._random.random() < 0.5 else "recompute"

    # -- eviction -------------------------------------------------------------------------------

    def offer(self, block: Evictable) -> None:
        self._offered[block.group, block.slot] = block

    def withdraw(self, group: int, slot: int) -> None:
        self._offered.pop((group, slot), None)

    def choose(self, group: int) -> Evictable | None:
        offered = [block for block in self._offered.values() if block.group == group]
        return self._random.choice(offered) if offered else None

    def gone(self, block: Evictable) -> None:
        self.withdraw(block.group, block.slot)

    def go_next(self, group: int, blocks: Sequence[tuple[int, int, int]]) -> int:
        return 0
