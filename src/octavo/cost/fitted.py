"""Seconds of a step as they were measured on this machine: the law in a calibration file.

Owns reading that law as a cost model: one fused step is one sum of terms, host time is a sum of its own, and every
prediction has an interval from what the fit got wrong on steps that it had not seen. Measures nothing.

Invariant: more tokens or a longer context never make a prediction shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from octavo.cost.calibration import Calibration, read_calibration
from octavo.cost.interval import factors_at
from octavo.cost.laws import Law
from octavo.cost.step import Float64, StepShape
from octavo.cost.terms import laws_in, quantities_of, quantities_of_run
from octavo.cost.transfer import TransferLaw
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FittedCost:
    calibration: Calibration
    laws: tuple[Law, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "laws", laws_in((*self.calibration.step.terms, *self.calibration.host.terms)))

    @classmethod
    def read(cls, path: Path) -> FittedCost:
        """Raises `ConfigError` where the file is no calibration."""
        return cls(read_calibration(path))

    @property
    def interval(self) -> tuple[float, float]:
        return self.calibration.run_interval

    def step_seconds(self, shape: StepShape) -> float:
        return float(self.calibration.step.of(quantities_of(shape, self.laws)))

    def run_seconds(self, shape: StepShape, steps: int) -> Float64:
        total = self.calibration.step.of(quantities_of_run(shape, steps, self.laws))
        seconds: Float64 = np.zeros(steps) + total
        return seconds

    def host_seconds(self, shape: StepShape) -> float:
        return float(self.calibration.host.of(quantities_of(shape, self.laws)))

    def step_interval(self, shape: StepShape) -> tuple[float, float]:
        """Seconds, of host and device together, between which four in five steps of this shape end."""
        seconds = self.step_seconds(shape) + self.host_seconds(shape)
        low, high = factors_at(self.calibration.knots, np.array([seconds]))
        return seconds * float(low[0]), seconds * float(high[0])

    def transfer(self, route: str) -> TransferLaw:
        """The law of `demote`, `promote`, `store` or `load`."""
        law = self.calibration.transfers.get(route)
        if law is None:
            known = ", ".join(self.calibration.transfers) or "none"
            raise ConfigError("transfers", route, f"was not measured (there is {known}); calibrate with --disk-path")
        return law
