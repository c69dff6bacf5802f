"""A replica of the engine that a calibration file measured: its model, its machine, its pool, its limits.

Owns the comparison of what is asked for with what was measured. The planner has no part in it: memory and blocks are
those that the engine had. Invariant: a replica's steps cost what was measured of the same model, cache and machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.cost.calibration import ROUTES, Calibration, model_fields, require_same
from octavo.cost.fitted import FittedCost
from octavo.errors import ConfigError
from octavo.geometry.dtypes import dtype_named
from octavo.geometry.exceptions import with_layers_unquantised
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.model import ModelGeometry
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.planner.asked import Asked
from octavo.planner.source import source_of
from octavo.simulate.deploy import Replica
from octavo.simulate.links import Links

_WHOLE = ("block_size", "slab_bytes", "slabs", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
_NOT_ITS_OWN = ("device", "memory", "weights_bytes", "layers", "kv_heads", "head_dim", "heads")


def calibrated_replica(
    calibration: Calibration,
    asked: Asked,
    model: str | Path | Mapping[str, Any] | None = None,
    here: Mapping[str, Any] | None = None,
    *,
    foreign: bool = False,
) -> Replica:
    """Raises `ConfigError` where `model`, or the machine `here`, is not what was measured, unless it is `foreign`."""
    for name in _NOT_ITS_OWN:
        if getattr(asked, name) is not None:
            raise ConfigError(name, getattr(asked, name), "a calibration file has a machine of its own; leave it out")
    if asked.tp != 1 or asked.pp != 1:
        raise ConfigError("tp", asked.tp, "a calibration file is of one device; leave it out")
    engine = _engine(calibration)
    config = calibration.config if model is None else source_of(model, asked).config
    geometry = _geometry(config, calibration, asked)
    if model is not None and not foreign:
        require_same("model", calibration.model, model_fields(geometry))
    if here is not None and not foreign:
        require_same("machine", calibration.machine, here)
    _require_own_options(calibration, asked)
    layout = make_layout(
        served_groups(geometry.layers), engine["block_size"], calibration.engine.get("block_order", "heads_tokens"),
        most_slab_bytes=engine["slab_bytes"],
    )  # fmt: skip
    kv_bytes = asked.kv_cache_memory_bytes or engine["slabs"] * engine["slab_bytes"]
    slabs = kv_bytes // layout.slab_bytes
    if slabs < 1:
        raise ConfigError("kv_cache_memory_bytes", kv_bytes, f"holds no block of {layout.slab_bytes:,} B; give more")
    seqs = asked.max_num_seqs or engine["max_num_seqs"]
    length = min(asked.context or engine["max_model_len"], layout.most_tokens(slabs) + 1)
    return Replica(
        model=calibration.model_name,
        device=str(calibration.machine.get("cpu", "this machine")),
        tp=1,
        layout=layout,
        slabs=slabs,
        max_num_seqs=min(seqs, slabs),
        max_num_batched_tokens=asked.max_num_batched_tokens or engine["max_num_batched_tokens"],
        max_model_len=length,
        attention_mode=geometry.attention_mode,
        cache_dtype=str(geometry.kv_dtype),
        cost=FittedCost(calibration),
        price_per_hour=asked.price,
        links=Links({route: law for route in ROUTES if (law := calibration.transfers.get(route)) is not None}),
    )


def beyond(calibration: Calibration, replica: Replica) -> list[str]:
    """What is said of a replica whose steps may differ from all that was measured."""
    notes = []
    version = calibration.engine.get("octavo")
    if version != __version__:
        notes.append(f"measured with octavo {version}, this is {__version__}: kernels may have changed")
    for name, most, may in (
        ("sequences", calibration.about.get("most_chunks"), replica.max_num_seqs),
        ("tokens", calibration.about.get("most_tokens"), replica.max_num_batched_tokens),
    ):
        if isinstance(most, int) and may > most:
            notes.append(f"steps of more than {most:,} {name} were not measured, and may come: {may:,} are allowed")
    return notes


def _engine(calibration: Calibration) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in _WHOLE:
        value = calibration.engine.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**53:
            raise ConfigError(f"engine.{name}", value, "must be a whole number from 1 to 2**53; calibrate again")
        found[name] = value
    return found


def _geometry(config: Mapping[str, Any], calibration: Calibration, asked: Asked) -> ModelGeometry:
    weights = dtype_named(str(calibration.engine.get("weights_dtype")), field="engine.weights_dtype")
    kept = calibration.model.get("kv_dtype") if asked.kv_dtype == "auto" else asked.kv_dtype
    geometry = geometry_from_config(config, dtype_named(str(kept), field="kv_dtype"), model_dtype=weights)
    skipped = calibration.engine.get("kv_skip_layers") or []
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        raise ConfigError("engine.kv_skip_layers", skipped, "must be a list of names of layers; calibrate again")
    return geometry if not skipped else with_layers_unquantised(geometry, skipped, weights)


def _require_own_options(calibration: Calibration, asked: Asked) -> None:
    """Options of the engine that change what a step costs must be those that were measured."""
    given: dict[str, Any] = {"block_size": asked.block_size, "quantization": asked.quantization}
    require_same("engine", calibration.engine, {name: value for name, value in given.items() if value is not None})
    if asked.kv_dtype != "auto":
        require_same("model", calibration.model, {"kv_dtype": str(dtype_named(asked.kv_dtype, field="kv_dtype"))})
