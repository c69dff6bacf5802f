"""`--cost` of `octavo simulate`: which cost model a replica has, and which files it is read from.

Owns the words of the option. No torch is imported: this machine is compared by the kernel's files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.cli.calibrate_machine import machine_fields
from octavo.cost.calibration import read_calibration
from octavo.cost.roofline import RooflineCost
from octavo.cost.tables import Link, Tables, TablesCost
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
    if kind == "fitted" and where:
        calibration = read_calibration(Path(where))
        replica = calibrated_replica(calibration, asked, model, machine_fields(), foreign=foreign)
        said = "as they are, of whatever model and machine" if foreign else "measured on this machine"
        return replica, [f"step costs {said}: {where}", *beyond(calibration, replica)]
    if kind == "tables" and where:
        return _tabled(replica_of(model, asked), Path(where), asked.tp)
    raise ConfigError("cost", cost, f"use {COSTS}")


def _tabled(replica: Replica, folder: Path, ranks: int) -> tuple[Replica, list[str]]:
    """The same replica with steps from kernel timings; the link between ranks is the device's own."""
    roofline = replica.cost
    if not isinstance(roofline, RooflineCost):
        raise ConfigError("cost", type(roofline).__name__, f"use {COSTS}")
    own = folder / f"tp{ranks}"
    tables = Tables.read(own if own.is_dir() else folder)
    speed, factors = roofline.machine.accelerator.device_link_bytes_per_s, roofline.factors
    link = Link(speed * factors.link.value, factors.exchange_s.value, factors.link.source) if speed else None
    geometry = roofline.machine.geometry
    cost = TablesCost(
        tables=tables, layers=geometry.num_layers, hidden_size=geometry.hidden_size, ranks=ranks, link=link,
        host_s=factors.host_s,
    )  # fmt: skip
    said = (
        f"step costs from kernel timings: {tables.source}; they do not say of which device, so see that it is this one"
    )
    return replace(replica, cost=cost), [said]
