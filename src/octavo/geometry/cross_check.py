"""The config against the checkpoint's tensors: do the key projections have the rows that it says?

A `config.json` can be older than the weights beside it. The weights win: they are what runs. The
disagreement is returned as a value, or refused by name before anything is sized by a wrong figure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.errors import ModelError
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import Chunked, Growing, Windowed

_PROJECTION = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.(?:[\w.]+\.)?(k_proj|v_proj)\.weight$")
_COMPONENT = {"k_proj": "k", "v_proj": "v"}


@dataclass(frozen=True, slots=True)
class Disagreement:
    tensor: str
    layer: int
    kv_heads: int
    width: int
    """Kv heads and width of one head, as the config has them."""
    rows: int
    """Rows of the tensor."""

    def __str__(self) -> str:
        heads = f"{self.rows // self.width} kv heads" if self.rows % self.width == 0 else f"{self.rows} rows"
        return (
            f"{self.tensor} has {self.rows} rows where the config gives {self.kv_heads} kv heads x {self.width} "
            f"= {self.kv_heads * self.width}; the weights win: they hold {heads}"
        )


def disagreements(geometry: ModelGeometry, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Disagreement, ...]:
    """Key and value projections whose rows are not kv heads x head width, in the order of `shapes`.

    Looks at unquantised matrices [rows, hidden] alone; packed ones and other names are passed over.
    """
    found: list[Disagreement] = []
    for name, shape in shapes.items():
        match = _PROJECTION.search(name)
        if match is None or len(shape) != 2 or shape[1] != geometry.hidden_size:
            continue
        layer = int(match[1])
        if layer >= geometry.num_layers:
            continue
        state = geometry.layers[layer]
        if not isinstance(state, (Growing, Windowed, Chunked)):
            continue
        found.extend(
            Disagreement(name, layer, component.shape[0], component.shape[1], shape[0])
            for component in state.components
            if component.name == _COMPONENT[match[2]] and component.elements != shape[0]
        )
    return tuple(found)


def require_agreement(geometry: ModelGeometry, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ModelError` for the first disagreement, naming the field to correct."""
    found = disagreements(geometry, shapes)
    if found:
        raise ModelError(
            "num_key_value_heads",
            found[0].kv_heads,
            f"{found[0]}; correct num_key_value_heads or head_dim in config.json, "
            f"or fetch the config of the same revision ({len(found)} tensors disagree)",
        )
