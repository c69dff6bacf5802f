"""Calibration files with anything in any place: each is refused by field, or gives steps that take a finite time."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.cost.calibration import VERSION, calibration_of
from octavo.cost.step import StepShape
from octavo.errors import ConfigError
from octavo.planner.asked import Asked
from octavo.simulate.calibrated import beyond, calibrated_replica

CONFIG = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
GOOD: dict[str, Any] = {
    "octavo_calibration": VERSION,
    "model_name": "toy",
    "model": {"model_type": "llama", "layers": 2, "hidden_size": 16, "kv_dtype": "fp32"},
    "machine": {"cpu": "a cpu", "cores": 2, "threads": 1},
    "engine": {
        "octavo": "0.1.0", "weights_dtype": "fp32", "quantization": None, "kv_skip_layers": [], "block_size": 16,
        "block_order": "heads_tokens", "slab_bytes": 2048, "slabs": 200, "max_num_seqs": 20,
        "max_num_batched_tokens": 2048, "max_model_len": 256,
    },
    "step": {"step": 1e-3, "tokens": 1e-5, "long": 0.0, "read:full:0": 2e-7},
    "host": {"step": 1e-4, "sampled": 3e-6},
    "interval": [{"seconds": 1e-3, "low": 0.8, "high": 1.2}, {"seconds": 1e-2, "low": 0.9, "high": 1.1}],
    "run_interval": [0.9, 1.1],
    "transfers": {"demote": {"bytes_per_s": 7e9, "latency_s": 9e-6, "error": 0.01}},
    "errors": {"median": 0.05},
    "about": {"most_chunks": 10, "most_tokens": 100},
    "config": CONFIG,
}  # fmt: skip
ODD: tuple[Any, ...] = (
    0, -1, 1e308, 5e-324, math.nan, math.inf, 10**30, 10**400, True, None, "", "x" * 3000, [], [1], [None], {},
    {"a": 1},
)  # fmt: skip


def places(told: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    inside = told.items() if isinstance(told, dict) else enumerate(told) if isinstance(told, list) else ()
    for name, value in inside:
        yield from places(value, (*path, name))


def use(told: Any) -> None:
    calibration = calibration_of(told)
    replica = calibrated_replica(calibration, Asked(), foreign=True)
    assert all(isinstance(note, str) for note in beyond(calibration, replica))
    shape = StepShape.decode([50] * 8)
    seconds = [replica.cost.step_seconds(shape), *replica.cost.step_interval(shape)]
    assert all(0 <= one < math.inf for one in seconds), seconds


def test_a_file_as_it_is_written_is_used() -> None:
    use(json.loads(json.dumps(GOOD)))


@pytest.mark.parametrize("path", list(places(GOOD)), ids=str)
def test_whatever_stands_in_a_place_it_is_refused_by_field_or_used(path: tuple[Any, ...]) -> None:
    for odd in (*ODD, "left out"):
        told = copy.deepcopy(GOOD)
        holder = told
        for name in path[:-1]:
            holder = holder[name]
        if odd == "left out":
            del holder[path[-1]]
        else:
            holder[path[-1]] = odd
        try:
            use(told)
        except ConfigError as refusal:
            assert 0 < len(refusal.field) <= len(str(refusal)) < 1000  # noqa: PT017 - some values are fine
