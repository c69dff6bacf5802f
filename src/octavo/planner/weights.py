"""One device's bytes of weights: as given, from the checkpoint's own headers, or by formula.

Owns the choice between the three, the reading of safetensors headers beside a config, and what is said
of it; counting is the geometry's. Headers are counted, never loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, ModelError
from octavo.geometry.cross_check import require_agreement, require_layers
from octavo.geometry.dtypes import dtype_named
from octavo.geometry.model import ModelGeometry
from octavo.geometry.weights import Weights as Counted
from octavo.geometry.weights import (
    bytes_from_index,
    padding_of_experts,
    weights_from_config,
    weights_from_tensors,
)
from octavo.geometry.weights_rounded import rounded_weights
from octavo.planner.asked import Asked
from octavo.planner.engines import Engine, padded_experts
from octavo.planner.source import Source, Tensor
from octavo.planner.values import Weights

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 256 * 2**20


def weights_of(source: Source, asked: Asked, engine: Engine, geometry: ModelGeometry) -> Weights:
    """One device's weights. Raises `ModelError` where a checkpoint's tensors contradict the config's `geometry`."""
    counted, missing = _counted(source, asked, geometry)
    if asked.weights_bytes is not None:
        total = None if counted is None else counted.total_bytes
        return _made(counted, asked.weights_bytes, total, "as given, per device")
    if counted is None:
        return _made(None, None, None, missing)
    if asked.quantization is not None and counted is not None:
        counted = _rounded(source, asked)
    padding, why = _padding(source, engine)
    if padding:
        counted = replace(counted, total_bytes=counted.total_bytes + padding)
    device = counted.rank_bytes(asked.tp, asked.pp)
    shared = f"; {asked.tp * asked.pp} devices share it" if asked.tp * asked.pp > 1 else ""
    estimate = "" if counted.exact else "estimated: "
    basis = f"{estimate}{counted.basis}{why}{shared}"
    return _made(counted, device, counted.total_bytes, basis)


def _rounded(source: Source, asked: Asked) -> Counted:
    """As octavo rounds them when they are loaded."""
    dtype = None if asked.dtype is None else dtype_named(asked.dtype, field="dtype")
    return rounded_weights(source.config, asked.quantization or "", dtype=dtype)


def _padding(source: Source, engine: Engine) -> tuple[int, str]:
    """What an engine's kernels make experts grow by when they are loaded, and the words for it."""
    rule = padded_experts(engine)
    if rule is None:
        return 0, ""
    try:
        size = padding_of_experts(source.config, *rule)
    except ConfigError:
        return 0, ""  # no formula for these layers: what there is of them is said in the basis
    name, hidden, width = rule
    return size, f", {name} experts padded by {size:,} B to multiples of {hidden} and {width}" if size else ""


def _made(counted: Counted | None, device: int | None, total: int | None, basis: str) -> Weights:
    return Weights(
        device_bytes=device,
        total_bytes=total,
        total_parameters=counted.total_parameters if counted else None,
        active_parameters=counted.active_parameters if counted else None,
        basis=basis,
    )


def _counted(source: Source, asked: Asked, geometry: ModelGeometry) -> tuple[Counted | None, str]:
    """What is known of the whole model's weights, or why nothing is."""
    if asked.manual:
        return None, "not known of a model given by hand; give --weights-bytes"
    if source.tensors:
        require_agreement(geometry, _shapes(source.tensors))
        require_layers(geometry, _shapes(source.tensors))
        if asked.dtype is None:
            return weights_from_tensors(source.tensors, source.config), ""
    elif source.directory is not None:
        found = _from_files(source.directory, source, geometry)
        if found is not None and asked.dtype is None:
            return found, ""
    try:
        dtype = None if asked.dtype is None else dtype_named(asked.dtype, field="dtype")
        return weights_from_config(source.config, dtype=dtype), ""
    except ConfigError as error:
        if error.field == "dtype" and asked.dtype is not None:
            raise
        return None, f"not known: the config lacks {error.field}; give --weights-bytes"


def _from_files(directory: Path, source: Source, geometry: ModelGeometry) -> Counted | None:
    """By the headers of the files there; by the index where it is there without all of its files."""
    files = sorted(directory.glob("*.safetensors"))
    index = directory / INDEX
    if index.is_file():
        stated = _json(index.read_bytes(), index)
        placed = stated.get("weight_map")
        if not isinstance(placed, dict):
            raise ModelError("weight_map", None, f"{index} has none; fetch it again")
        require_layers(geometry, placed)
        wanted = {str(name) for name in placed.values()}
        missing = len(wanted - {file.name for file in files})
        files = [file for file in files if file.name in wanted]
        if missing:
            require_agreement(geometry, _shapes(_tensors(files)))
            return _with_bytes(source, bytes_from_index(stated), f"{missing} of {len(wanted)} files are not here")
    if not files:
        return None
    tensors = _tensors(files)
    require_agreement(geometry, _shapes(tensors))
    if index.is_file() or len(files) == 1:
        require_layers(geometry, _shapes(tensors))
    return weights_from_tensors(tensors, source.config)


def _shapes(tensors: Sequence[Tensor]) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in tensors}


def _tensors(files: Sequence[Path]) -> list[Tensor]:
    return [tensor for file in files for tensor in _header(file)]


def _with_bytes(source: Source, total: int, missing: str) -> Counted:
    """The bytes that an index states, with the parameters by formula."""
    by_formula = weights_from_config(source.config)
    return Counted(
        total_parameters=by_formula.total_parameters,
        active_parameters=by_formula.active_parameters,
        total_bytes=total,
        basis=f"the total that {INDEX} states; {missing}",
        replicated_bytes=min(total, by_formula.replicated_bytes),
    )


def _header(file: Path) -> Iterator[Tensor]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_HEADER_LIMIT, file.stat().st_size - 8):
                raise ConfigError("model", str(file), "is no safetensors file: its header does not fit; fetch it again")
            told = _json(opened.read(length), file)
    except OSError as error:
        raise ConfigError("model", str(file), f"cannot be read ({error.strerror or error})") from None
    for name, entry in told.items():
        if name == "__metadata__":
            continue
        try:
            first, last = entry["data_offsets"]
            yield Tensor(name, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), int(last) - int(first))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                "model", str(file), f"its header says nothing of tensor {name!r}; fetch it again"
            ) from None


def _json(raw: bytes, file: Path) -> dict[str, Any]:
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError("model", str(file), f"is damaged ({error}); fetch it again") from None
    if not isinstance(told, dict):
        raise ConfigError("model", str(file), "holds no JSON object; fetch it again")
    return told
