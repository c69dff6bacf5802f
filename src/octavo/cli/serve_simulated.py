"""`octavo serve --executor sim`: which replica is faked, and how.

Owns the words: engine options that mean something without a model are taken, others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import Config
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

_PLANNED = {
    "max_model_len": "context",
    "block_size": "block_size",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "kv_cache_dtype": "kv_dtype",
    "gpu_memory_utilization": "utilization",
}
"""Options of the engine that the planner takes too, by their names there."""
_TAKEN = {"model", "tokenizer", "allocation", "batching", "admission", "reuse", "eviction", "pipeline_depth", *_PLANNED}


def start_simulated(given: Mapping[str, Any], fake: Mapping[str, Any]) -> Engine:
    """Raises `ConfigError`."""
    config = Config.from_kwargs(**given)
    usual = Config().as_kwargs()
    asked = {name: value for name, value in config.as_kwargs().items() if name in given and value != usual[name]}
    for name, value in asked.items():
        if name not in _TAKEN:
            raise ConfigError(name, value, "means nothing to --executor sim; leave it out")
    if config.model.model is None and not fake["cost"].startswith("fitted:"):
        raise ConfigError("model", None, "--executor sim needs a config.json, or a directory that has one")
    from octavo.cli.calibrate_read import costed_replica
    from octavo.engine.simulated import simulated_engine
    from octavo.planner.asked import Asked
    from octavo.policy.bundle import Policies
    from octavo.simulate.lengths import lengths_named

    planned = {_PLANNED[name]: str(value) for name, value in asked.items() if name in _PLANNED}
    replica, said = costed_replica(
        fake["cost"], config.model.model, Asked.of(device=fake["device"], tp=fake["tp"], **planned)
    )
    where = config.model.tokenizer or config.model.model
    engine = simulated_engine(
        replica,
        Policies.named(
            allocation=config.cache.allocation,
            batching=config.scheduler.batching,
            admission=config.scheduler.admission,
            reuse=config.cache.reuse,
        ),
        tokenizer_dir=_directory(where),
        lengths=None if fake["answer"] is None else lengths_named("sim_answer", fake["answer"]),
        eviction=config.cache.eviction,
        depth=config.engine.pipeline_depth,
    )
    engine.notes = (*said, *engine.notes)
    return engine


def _directory(named: str | None) -> Path | None:
    if named is None:
        return None
    path = Path(named)
    return path if path.is_dir() else path.parent
