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
from octavo.cost.learn import learn
from octavo.engine.engine import Engine
from octavo.errors import ConfigError
from octavo.runtime.calibrate import Measuring, Tell, measure_steps
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
    """Measure `engine`, which serves the model of `config_json`. Raises `ConfigError`."""
    deployment = engine.deployment
    if deployment is None:
        raise ConfigError("engine", engine.model_name, "has no deployment to describe; build it by build_engine")
    laws = laws_of(deployment.geometry)
    samples = measure_steps(engine, measuring, lambda share, text: tell(_TRANSFERS_SHARE * share, text))
    tell(_TRANSFERS_SHARE, "transfers between tiers")
    device = engine.core.executor.arena.device if hasattr(engine.core.executor, "arena") else torch.device("cpu")
    transfers = measure_transfers(deployment.layout, str(device), disk_path)
    tell(_TRANSFERS_SHARE, "fit")
    learned = learn(samples, laws)
    tell(1.0, "done")
    shapes = [sample.shape for sample in samples]
    return Calibration(
        model_name=engine.model_name,
        model=model_fields(deployment.geometry),
        config=dict(config_json),
        machine=dict(machine) | {"device": device_name(device), "threads": torch.get_num_threads()},
        engine=engine_fields(engine, measuring),
        step=learned.step.sum,
        host=learned.host.sum,
        knots=learned.knots,
        run_interval=learned.run_interval,
        transfers=transfers,
        errors=learned.errors,
        about={
            "steps": len(samples),
            "scenes": len({sample.scene for sample in samples}),
            "most_chunks": max(shape.chunks for shape in shapes),
            "most_tokens": max(shape.tokens for shape in shapes),
            "most_context_tokens": max(shape.context_tokens for shape in shapes),
            "seconds": measuring.seconds,
            "seed": measuring.seed,
        },
    )


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
