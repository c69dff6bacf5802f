"""What a cost model's numbers rest on, for a report: each with where it is from. Computes nothing."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from octavo.cost.fitted import FittedCost
from octavo.cost.roofline import Factor, RooflineCost
from octavo.cost.step import CostModel
from octavo.cost.tables import TablesCost

Ground = dict[str, Any]
"""`value`, a number or a text, and `source`."""


def grounds_of(cost: CostModel) -> dict[str, Ground]:
    """By name, in the order in which they are told."""
    if isinstance(cost, RooflineCost):
        factors = cost.factors
        told = {
            one.name: _ground(getattr(factors, one.name).value, getattr(factors, one.name).source)
            for one in fields(factors)
            if isinstance(getattr(factors, one.name), Factor)
        }
        return told | {"interval": _ground(list(factors.interval), factors.interval_source)}
    if isinstance(cost, TablesCost):
        told = {"kernels": _ground("timings of single kernels", cost.tables.source)}
        if cost.link is not None:
            told["link_bytes_per_s"] = _ground(cost.link.bytes_per_s, cost.link.source)
        told["host_s"] = _ground(cost.host_s.value, cost.host_s.source)
        return told | {"interval": _ground(list(cost.interval), cost.interval_source)}
    if isinstance(cost, FittedCost):
        about, errors = cost.calibration.about, cost.calibration.errors
        measured = f"{about.get('steps', '?')} steps by octavo calibrate, {about.get('processes', 1)} processes"
        told = {f"{name} of steps left out": _ground(value, measured) for name, value in errors.items()}
        return told | {"interval": _ground(list(cost.interval), measured)}
    return {}


def _ground(value: Any, source: str) -> Ground:
    return {"value": value, "source": source}
