"""Bytes of a model's weights once octavo has rounded them: what `--quantization` makes of a plain checkpoint.

Owns which matrices are rounded, by the names and shapes of the class's formula, and what one takes in its packed form:
whole panels of outputs, groups of inputs, a scale in float16 for each output and group, and for four bits what 0 stands
for besides. Experts that lie in one tensor, routers, convolutions and what a forward pass reads by itself stay as they
are. The packing itself is `kernels.linear`'s; a test holds both to the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo.geometry.dtypes import Dtype
from octavo.geometry.quantisation import quantisation_of
from octavo.geometry.weights import Parameters, Row, Weights, parameters_of

BITS = {"int8": 8, "int4": 4}
GROUP = 32
"""Inputs that share a scale."""
PANEL = 32
"""Outputs that lie together, with vectors of 512 bits; narrower vectors take fewer and pad less."""
_SHARED_BITS = {"int8": 16, "int4": 32}
_HEADS = ("lm_head", "embed_out", "output_projection")
_READ_DIRECTLY = ("kv_b_proj", "gate.wg", "dt_proj")
"""Matrices that a forward pass reads by itself."""
_HEAD_READ_DIRECTLY = ("mamba", "mamba2", "falcon_mamba")
_EMBEDDING_SCALES = (
    "biogpt", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "minicpm3",
    "vaultgemma", "xglm",
)  # fmt: skip
"""Types whose embedding multiplies what it looks up: a head that is tied to it is not packed."""
_INPUTS_FIRST = ("gpt2",)


def packed_bytes(kind: str, outputs: int, inputs: int) -> int:
    """Of one matrix as it is kept in `kind`."""
    panels, groups = -(-outputs // PANEL), -(-inputs // GROUP)
    return panels * groups * PANEL * (GROUP * BITS[kind] + _SHARED_BITS[kind]) // 8


def rounded_weights(config: Mapping[str, Any], kind: str, *, dtype: Dtype | None = None) -> Weights:
    """Weights by formula, rounded to `kind`, the output head to int8 either way; `dtype` is that of all the rest.

    Raises `ConfigError` where the checkpoint is quantised already, or the config lacks what the formula needs.
    """
    found = quantisation_of(config)
    if found is not None:
        raise ConfigError("quantization", kind, f"the checkpoint is quantised itself, by {found.method}; leave it out")
    parameters = parameters_of(config, dtype)
    by_type: dict[str, int] = {}
    replicated = 0
    for row in parameters.rows:
        as_kind = _kind_of(row, kind, parameters)
        if as_kind is None:
            name, size = parameters.plain.name, parameters.plain.bytes_for((row.elements,))
        else:
            shape = row.shape[::-1] if parameters.model_type in _INPUTS_FIRST and row.layers is not None else row.shape
            name, size = as_kind, packed_bytes(as_kind, *shape)
        by_type[name] = by_type.get(name, 0) + row.times * size
        if len(row.shape) < 2:
            replicated += row.times * size
    return parameters.weighing(by_type, replicated, f", {_words(by_type, kind)}")


def _kind_of(row: Row, kind: str, parameters: Parameters) -> str | None:
    """What a parameter is rounded to; None if it is not."""
    if row.layers is None:
        return "int8" if _is_head(row, parameters) else None
    linear = len(row.shape) == 2 and (row.packable or row.name.endswith("shared_expert_gate.weight"))
    return kind if linear and not any(name in row.name for name in _READ_DIRECTLY) else None


def _is_head(row: Row, parameters: Parameters) -> bool:
    """Whether it is the output head, or the table that is tied to it and looked up in its packed form."""
    if parameters.model_type in _HEAD_READ_DIRECTLY or len(row.shape) != 2:
        return False
    if any(name in row.name for name in _HEADS):
        return True
    untied = any(name in other.name for other in parameters.rows for name in _HEADS)
    table = next((other for other in parameters.rows if other.layers is None and len(other.shape) == 2), None)
    return row is table and not untied and parameters.model_type not in _EMBEDDING_SCALES


def _words(by_type: Mapping[str, int], kind: str) -> str:
    head = ", the output head to int8" if kind != "int8" and "int8" in by_type else ""
    return f"linear layers rounded to {kind}{head}"
