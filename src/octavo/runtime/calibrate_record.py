"""From an engine to a calibration: measure steps and transfers, fit, and say what it all holds for.

Owns the description of the engine that goes into the file. The measuring, the fit and the file's form are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from octavo import __version__
from octavo.cost.calibration import Calibration, model_fields
from octavo.cost.laws import laws_of
from octavo.engine.engine import Engine
from octavo.errors import ConfigError
from octavo.runtime.calibrate import Measuring, Tell, measure_steps
from octavo.runtime.calibrate_rounds import calibration_from
from octavo.runtime.calibrate_transfers import measure_transfers

_TRANSFERS_SHARE = 0.95
"""Of the progress, when all steps are measured."""


def calibrate(
    engine: Engine,
    config_json: Mapping[str, Any],
    machine: Mapping[str, Any],
    measuring: Measuring,
    *,
    disk_path: Path | None = None,
    tell: Tell = lambda share, text: None,
) -> Calibration:
    """Measure `engine`, which serves the model of `config_json`, in this process alone. Raises `ConfigError`."""
    description = described(engine, config_json, measuring)
    samples, _ = measure_steps(engine, measuring, lambda share, text: tell(_TRANSFERS_SHARE * share, text))
    tell(_TRANSFERS_SHARE, "transfers between tiers")
    transfers = measure_transfers(engine.deployment.layout, str(_device(engine)), disk_path)
    tell(_TRANSFERS_SHARE, "fit")
    about = {"seconds": measuring.seconds, "seed": measuring.seed, "processes": 1}
    made = calibration_from(samples, description, machine, transfers, about)
    tell(1.0, "done")
    return made


def described(engine: Engine, config_json: Mapping[str, Any], measuring: Measuring) -> dict[str, Any]:
    """What a calibration is of, as JSON: the model, the engine's options, and by which laws steps are counted."""
    deployment = engine.deployment
    if deployment is None:
        raise ConfigError("engine", engine.model_name, "has no deployment to describe; build it by build_engine")
    return {
        "model_name": engine.model_name,
        "model": model_fields(deployment.geometry),
        "config": dict(config_json),
        "machine": {"device": device_name(_device(engine)), "threads": torch.get_num_threads()},
        "engine": engine_fields(engine, measuring),
        "laws": [[law.kind, law.reach] for law in laws_of(deployment.geometry)],
    }


def _device(engine: Engine) -> torch.device:
    executor = engine.core.executor
    return executor.arena.device if hasattr(executor, "arena") else torch.device("cpu")


def engine_fields(engine: Engine, measuring: Measuring) -> dict[str, Any]:
    """What else steps depend on, and what a simulation needs to stand in for this engine."""
    deployment = engine.deployment
    scheduler = engine.core.scheduler
    skipped = deployment.config.cache.kv_cache_dtype_skip_layers or ""
    return {
        "octavo": __version__,
        "weights_dtype": str(deployment.facts.weights_dtype),
        "quantization": deployment.config.model.quantization,
        "kv_skip_layers": [name.strip() for name in skipped.split(",") if name.strip()],
        "block_size": deployment.block_size,
        "block_order": deployment.layout.block_order,
        "attention": deployment.facts.attention_backend,
        "linear": deployment.facts.linear_backend,
        "fuse": deployment.config.engine.fuse,
        "attention_mode": scheduler.limits.attention_mode,
        "tokenizer": engine.intake.tokenizer is not None,
        "temperature": measuring.temperature,
        "slab_bytes": deployment.layout.slab_bytes,
        "slabs": scheduler.cache.pool.slabs,
        "max_num_seqs": scheduler.limits.max_num_seqs,
        "max_num_batched_tokens": scheduler.limits.max_num_batched_tokens,
        "max_model_len": scheduler.limits.max_model_len,
    }


def device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)
