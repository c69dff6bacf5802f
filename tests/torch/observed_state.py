"""What Transformers really writes into its cache, layer by layer, for a model built without memory.

`observe` runs a few tokens through a model on the meta device (or a tiny one on the CPU where a class
looks at values) and weighs every tensor that the cache then holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, DynamicCache, PreTrainedConfig

from octavo.geometry.state import Chunked, Compressed, Constant, Growing, LayerState, Windowed, parts_of

TOKENS = 7


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes of one layer after `TOKENS` positions, by how they grow."""

    per_token: int
    constant: int
    compressed: int
    window: int | None


def observe(config: PreTrainedConfig, device: str = "meta") -> list[Written]:
    """What each layer of a bf16 model of this config writes. Its tensors carry no values on `meta`."""
    with torch.device(device), torch.inference_mode():
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        except ValueError:  # a text part that only its wrapper generates with
            model = AutoModel.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        cache = DynamicCache(config=config)
        _run(model.eval(), cache)
    return [_weigh(layer) for layer in cache.layers]


def _run(model: torch.nn.Module, cache: DynamicCache) -> None:
    ids = torch.ones(1, TOKENS, dtype=torch.long)
    for name in ("cache", "past_key_values", "cache_params"):
        try:
            model(input_ids=ids, use_cache=True, **{name: cache})
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            continue
        return
    raise TypeError(f"{type(model).__name__} takes a cache by no name that is known here")


def _weigh(layer: Any) -> Written:
    held = vars(layer)
    growing = {id(held[name]): held[name] for name in ("keys", "values", "indexer_keys", "idx_keys")
               if isinstance(held.get(name), torch.Tensor)}  # fmt: skip
    entries = ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate")
    total = sum(tensor.nbytes for tensor in growing.values())
    assert total % TOKENS == 0
    return Written(
        per_token=total // TOKENS,
        constant=sum(tensor.nbytes for name in ("conv_states", "recurrent_states") for tensor in _inside(held, name)),
        compressed=sum(tensor.nbytes for name in entries for tensor in _inside(held, name)),
        window=held.get("sliding_window"),
    )


def _inside(held: Mapping[str, Any], name: str) -> Iterator[torch.Tensor]:
    for tensor in (held.get(name) or {}).values():
        if isinstance(tensor, torch.Tensor):
            yield tensor


def predicted(state: LayerState) -> Written:
    """The same figures as the geometry has them."""
    parts = parts_of(state)
    windows = [part.window_tokens for part in parts if isinstance(part, Windowed)]
    windows += [part.chunk_tokens for part in parts if isinstance(part, Chunked)]
    return Written(
        per_token=sum(part.bytes_per_token for part in parts if isinstance(part, (Growing, Windowed, Chunked))),
        constant=sum(part.bytes_per_sequence for part in parts if isinstance(part, Constant)),
        compressed=sum(part.bytes_kept(TOKENS) for part in parts if isinstance(part, Compressed)),
        window=windows[0] if windows else None,
    )


def built(model_type: str, overrides: Mapping[str, Any]) -> PreTrainedConfig:
    return CONFIG_MAPPING[model_type](**overrides)


def as_file(config: PreTrainedConfig) -> dict[str, Any]:
    """The config as its `config.json` would say it."""
    raw: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return {**raw, "model_type": config.model_type, "dtype": "bfloat16"}
