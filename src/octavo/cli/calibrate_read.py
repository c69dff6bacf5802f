"""`--cost` of `octavo simulate`: which cost model a replica has, and which files it is read from.

Owns the words of the option. No torch is imported: this machine is compared by the kernel's files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.cli.calibrate_machine import machine_fields
from octavo.cost.calibration import read_calibration
from octavo.errors import ConfigError
from octavo.planner.asked import Asked
from octavo.simulate.calibrated import beyond, calibrated_replica
from octavo.simulate.deploy import Replica, replica_of

COSTS = "roofline, fitted:FILE or tables:DIR"


def costed_replica(cost: str, model: Any, asked: Asked, *, foreign: bool = False) -> tuple[Replica, list[str]]:
    """The replica, and what is to be said of its costs. Raises `ConfigError`."""
    kind, _, where = cost.partition(":")
    if foreign and kind != "fitted":
        raise ConfigError("foreign_calibration", True, "belongs to --cost fitted:FILE")
    if kind == "roofline" and not where:
        return replica_of(model, asked), []
    if not where:
        raise ConfigError("cost", cost, f"use {COSTS}")
    if kind == "fitted":
        calibration = read_calibration(Path(where))
        replica = calibrated_replica(calibration, asked, model, machine_fields(), foreign=foreign)
        said = "as they are, of whatever model and machine" if foreign else "measured on this machine"
        return replica, [f"step costs {said}: {where}", *beyond(calibration, replica)]
    raise ConfigError("cost", cost, f"use {COSTS}")
