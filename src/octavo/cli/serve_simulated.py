"""`octavo serve --executor sim`: which replica is faked, and how.

Owns the words: engine options that mean something without a model are taken, others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import Config
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.simulate.deploy import Lower

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
_TIERS = ("host_bytes", "placement", "disk_path", "disk_bytes", "transfer_bytes_per_second", "disk_bytes_per_second",
          "transfer_timeout", "host_eviction", "disk_eviction")  # fmt: skip
_TAKEN = {"model", "tokenizer", "allocation", "batching", "admission", "preemption", "reuse", "prefix_wait_tokens",
          "eviction", "pipeline_depth", *_PLANNED, *_TIERS}  # fmt: skip


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
    from octavo.cost.waiting import tokens_worth_waiting_for
    from octavo.engine.simulated import simulated_engine
    from octavo.planner.asked import Asked
    from octavo.policy.bundle import Policies
    from octavo.simulate.lengths import lengths_named

    planned = {_PLANNED[name]: str(value) for name, value in asked.items() if name in _PLANNED}
    replica, said = costed_replica(
        fake["cost"], config.model.model, Asked.of(device=fake["device"], tp=fake["tp"], **planned)
    )
    links = replace(
        replica.links,
        bytes_per_second=config.cache.transfer_bytes_per_second,
        disk_bytes_per_second=config.cache.disk_bytes_per_second,
    )
    replica = replace(replica, links=links)
    where = config.model.tokenizer or config.model.model
    engine = simulated_engine(
        replica,
        Policies.named(
            allocation=config.cache.allocation,
            batching=config.scheduler.batching,
            admission=config.scheduler.admission,
            preemption=config.scheduler.preemption,
            reuse=config.cache.reuse,
            wait_tokens=config.cache.prefix_wait_tokens or tokens_worth_waiting_for(replica.cost),
        ),
        tokenizer_dir=_directory(where),
        lengths=None if fake["answer"] is None else lengths_named("sim_answer", fake["answer"]),
        eviction=config.cache.eviction,
        depth=config.engine.pipeline_depth,
        lower=_lower(config),
    )
    engine.notes = (*said, *engine.notes)
    if config.cache.disk_path is not None:
        engine.notes += (f"nothing is written to {config.cache.disk_path}: copies to a disk take the time of one",)
    return engine


def _lower(config: Config) -> Lower | None:
    cache = config.cache
    if not cache.host_bytes:
        return None
    from octavo.simulate.deploy import Lower

    return Lower(
        host_bytes=cache.host_bytes,
        disk_bytes=cache.disk_bytes or 0,
        placement=cache.placement,
        host_eviction=cache.host_eviction,
        disk_eviction=cache.disk_eviction,
        timeout_s=cache.transfer_timeout,
    )


def _directory(named: str | None) -> Path | None:
    if named is None:
        return None
    path = Path(named)
    return path if path.is_dir() else path.parent
