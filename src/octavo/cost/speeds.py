"""Which of a machine's two memory speeds a step was measured at, and the steps of the usual one.

A virtual machine whose processors are moved by its host may read memory at two speeds, in turn, for seconds or minutes:
processors behind one link share its bandwidth, processors behind two do not. A law over both would be of neither. Owns
how two speeds are told from one that varies; reading memory is `octavo.runtime.memory_rate`.

Invariant: steps are left out only where two speeds lie far apart, with next to nothing between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.cost.step import Float64

APART = 1.15
"""Two speeds are at least so many times apart."""
_LEAST = 0.02
"""The share of what was read that makes a speed."""
_BETWEEN = 0.1
"""The share that may lie in the middle third between two speeds."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes a second, by plain reading with all threads."""

    usual: float
    """In the middle, of the reads at the speed that was found more often."""
    other: float | None = None
    """Of a machine that has two."""

    def told(self, left_out: int) -> dict[str, float]:
        """For a calibration's file, with the number of steps that were measured at the other speed."""
        found = {"memory_bytes_per_s": self.usual}
        return found if self.other is None else found | {
            "memory_bytes_per_s_other": self.other, "steps_left_out": left_out
        }  # fmt: skip

    @classmethod
    def of(cls, told: Mapping[str, float]) -> Speed | None:
        """What `told` said. None: nobody looked."""
        usual = told.get("memory_bytes_per_s")
        return None if usual is None else cls(usual, told.get("memory_bytes_per_s_other"))

    def at(self, rate: float) -> bool:
        """Whether such a rate is nearer the usual speed than the other one, or than one as far away as another is."""
        if self.other is not None:
            return (rate**2 > self.usual * self.other) == (self.usual > self.other)
        return self.usual / APART < rate < self.usual * APART


def speed_of(rates: Sequence[float]) -> Speed | None:
    """None: nothing was read. Rates fall into the two classes that leave the least squares of logarithms within them,
    and are two speeds where the middles of both lie apart and hardly any rate lies between them.
    """
    if not len(rates):
        return None
    logs = np.sort(np.log(np.array(rates, dtype=np.float64)))
    if len(logs) > 1:
        cut = _cut(logs)
        slow, fast = float(np.median(logs[:cut])), float(np.median(logs[cut:]))
        third = (fast - slow) / 3
        between = float(((logs > slow + third) & (logs < fast - third)).mean())
        least = min(cut, len(logs) - cut) / len(logs)
        if fast - slow >= np.log(APART) and between <= _BETWEEN and least >= _LEAST:
            usual, other = (slow, fast) if 2 * cut > len(logs) else (fast, slow)
            return Speed(float(np.exp(usual)), float(np.exp(other)))
    return Speed(float(np.exp(np.median(logs))))


def _cut(logs: Float64) -> int:
    """How many of the sorted values are of the lower class."""
    below = np.arange(1, len(logs))
    sums = np.cumsum(logs)[:-1]
    # The squares between two classes are the larger, the smaller those within are.
    between = sums**2 / below + (logs.sum() - sums) ** 2 / (len(logs) - below)
    return int(between.argmax()) + 1
