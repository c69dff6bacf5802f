"""`simulate()`: a replica, a workload and policies in, a report out.

Owns the order: the prediction, then the same workload with steps as fast and as slow as the cost model's interval
says. Reads no file and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.cost.step import CostModel, HasInterval, Scaled
from octavo.errors import RequestError
from octavo.policy.bundle import Policies
from octavo.simulate.deploy import Lower, Replica
from octavo.simulate.drive import Simulation, Source, Watcher
from octavo.simulate.grounds import grounds_of
from octavo.simulate.measure import Measured, Objectives
from octavo.simulate.report import figures, intervals_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to simulate besides the replica."""

    source: Callable[[], Source]
    """A fresh one for each run."""
    policies: Callable[[], Policies] = Policies
    objectives: Objectives | None = None
    eviction: str = "lru"
    lower: Lower | None = None
    """Tiers below the device."""
    depth: int = 0
    leap: bool = True
    intervals: bool = False
    watchers: Sequence[Watcher] = ()
    """Beside what measures; of the prediction itself alone."""


@dataclass(frozen=True, slots=True)
class Simulated:
    figures: dict[str, Any]
    measured: Measured
    intervals: dict[str, tuple[float, float]]
    """Of the main figures, where asked for."""
    first_refusal: str | None = None
    """Why the first request that was refused was."""


def simulate(replica: Replica, asked: Asked) -> Simulated:
    measured, refusal = run_once(replica, asked, replica.cost, asked.watchers)
    told = figures(measured, asked.objectives, replica.price_per_hour) | {"cost": grounds_of(replica.cost)}
    intervals: dict[str, tuple[float, float]] = {}
    if asked.intervals and isinstance(replica.cost, HasInterval):
        costs = [Scaled(replica.cost, factor) for factor in replica.cost.interval]
        intervals = intervals_of([told, *(figures(run_once(replica, asked, cost)[0]) for cost in costs)])
    return Simulated(told, measured, intervals, None if refusal is None else str(refusal))


def run_once(
    replica: Replica, asked: Asked, cost: CostModel, watchers: Sequence[Watcher] = ()
) -> tuple[Measured, RequestError | None]:
    """What came of it, and why the first request that was refused was."""
    core = replica.core(asked.policies(), cost=cost, eviction=asked.eviction, depth=asked.depth, lower=asked.lower)
    measured = Measured()
    simulation = Simulation(core, asked.source(), [measured, *watchers], leap=asked.leap)
    simulation.run()
    return measured, simulation.first_refusal
