"""A loaded model checked, and its layers put in their native form: `checked_model`.

Owns the order of the checks, and what a verdict kept from an earlier start may stand for: the choice of linear
layers, the trial of a tiny model, the look at what the layers store, and the trial of every fused layer. Fused
layers of a known wiring are compared all together with Transformers' own at every start. Where nothing is kept,
everything is checked, and the verdict kept.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

import torch
import transformers

from octavo.config import Config
from octavo.deciding import served_geometry
from octavo.geometry.dtypes import dtype_named
from octavo.geometry.model import ModelGeometry
from octavo.kernels.choose import choose_attention
from octavo.kernels.choose_linear import choose_linear
from octavo.kernels.cpu import NativeAttention, instruction_sets
from octavo.kernels.interface import AttentionBackend
from octavo.kernels.layer import Rope
from octavo.kernels.linear import linear_instruction_sets
from octavo.models.fused import Fusion, KnownDiffers, fuse
from octavo.models.fused_layer import Wiring
from octavo.models.linear import Packing, round_packed, usual_shape
from octavo.models.load import LoadedModel, held_bytes
from octavo.models.observe import require_geometry
from octavo.models.verdicts import SWITCH, Verdict, Verdicts, code_digest, processor, today, wanted
from octavo.models.verify import require_served
from octavo.models.weights_digest import weights_digest


@dataclass(frozen=True, slots=True)
class Checked:
    """A model as it will serve."""

    loaded: LoadedModel
    geometry: ModelGeometry
    linear: str
    why_linear: str
    served: str
    """How it is known to be served exactly, in a few words."""
    fused: Fusion | None


def verdicts_for(config: Config, loaded: LoadedModel, device: torch.device, geometry: ModelGeometry) -> Verdicts | None:
    """Where the verdict on this model lies. None where none is kept: off the CPU, or as the user wants it."""
    if device.type != "cpu" or not wanted():
        return None
    told = json.dumps(loaded.config_json, sort_keys=True, default=str)
    return Verdicts(
        {
            "octavo": code_digest(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "processor": processor(),
            "instruction_sets": [*instruction_sets(), "linear", *linear_instruction_sets()],
            "threads": torch.get_num_threads(),
            "model": type(loaded.model).__name__,
            "weights": weights_digest(loaded.weight_files),
            "config": hashlib.sha256(f"{told} {geometry}".encode()).hexdigest(),
            "dtype": str(loaded.dtype),
            "max_model_len": loaded.max_model_len,
            "attention_backend": config.engine.attention_backend,
            "linear_backend": config.engine.linear_backend,
            "quantization": config.model.quantization,
            "fuse": config.engine.fuse,
        }
    )


def checked_model(
    config: Config, loaded: LoadedModel, device: torch.device, backend: AttentionBackend, *, keeps: bool = False
) -> Checked:
    """Check, fuse and pack. Raises `ModelError` for what is not served, `KnownDiffers` where a kept verdict is wrong.

    `keeps`: whether verdicts are kept and believed; one that was wrong is forgotten.
    """
    weights_dtype = dtype_named(str(loaded.dtype))
    geometry = served_geometry(config, loaded.config_json, weights_dtype)
    verdicts = verdicts_for(config, loaded, device, geometry) if keeps else None
    known = None if verdicts is None else verdicts.read()
    if known is None:
        asked, rounded = config.engine.linear_backend, config.model.quantization
        linear, why = choose_linear(asked, usual_shape(loaded.model), loaded.dtype, device, rounded)
        packing = Packing() if linear == "native" else None
        # Kernels of their own: scratch memory of the trial must not count as the engine's.
        served = require_served(loaded.model, choose_attention(config.engine.attention_backend, device)[0], packing)
        require_geometry(loaded.model, geometry.layers)
    else:
        (linear, why), served = known.linear, known.served
        packing = Packing(tried=known.tried, leave=known.leave) if linear == "native" else None
    fused = None
    if packing is not None and config.engine.fuse == "auto" and isinstance(backend, NativeAttention):
        try:
            fused = fuse(loaded.model, backend, loaded.max_model_len or 4096, _wirings(known))
        except KnownDiffers:
            if verdicts is not None:
                verdicts.forget()
            raise
    if known is not None:
        served += f"; found on {known.made} and kept, {SWITCH}=off finds it again"
    elif verdicts is not None:
        verdicts.keep(_verdict((linear, why), served, packing, fused))
    if packing is not None:
        linear, why = packing.serve(loaded.model, why)
    if config.model.quantization is not None:
        linear, why = round_packed(loaded.model, linear, why, config.model.quantization)
    if packing is not None:
        loaded = replace(loaded, weights_bytes=held_bytes(loaded.model))
    return Checked(loaded, geometry, linear, why, served, fused)


def _wirings(known: Verdict | None) -> list[Wiring] | None:
    if known is None or known.wirings is None:
        return None
    return [Wiring(name, Rope(rope), rotary, scale) for name, rope, rotary, scale in known.wirings]


def _verdict(linear: tuple[str, str], served: str, packing: Packing | None, fused: Fusion | None) -> Verdict:
    wirings = None
    if fused is not None and fused.stack is not None:
        by_layer = [fused.layers[number].wiring for number in range(fused.count)]
        wirings = tuple((one.name, int(one.rope), one.rotary, one.scale) for one in by_layer)
    tried, leave = (False, ()) if packing is None else (packing.tried, packing.leave)
    return Verdict(linear, served, tried, leave, wirings, today())
