"""Which kinds of state there are kernels for: `require_kernels` refuses the others by name.

Owns the list of what a layer may keep per position and in which types. What can be planned and not served is
refused here, before anything is laid out.
"""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import (
    Borrowed,
    Chunked,
    Constant,
    Growing,
    Stateless,
    Windowed,
    components_bytes,
    parts_of,
)

SERVED = (("k", "v"), ("latent", "rope_k"), ("latent", "rope_k", "index_k"))
"""What a layer may keep per position, by the names of its components."""


def require_kernels(geometry: ModelGeometry) -> None:
    """Refuse by name what a layer keeps and no kernel reads."""
    for index, state in enumerate(geometry.layers):
        for part in parts_of(state):
            if isinstance(part, (Borrowed, Stateless, Constant)) or not components_bytes(part.components):
                continue
            served = isinstance(part, (Growing, Windowed, Chunked))
            names = tuple(component.name for component in part.components)
            if served and names in SERVED:
                continue
            kind = f"{geometry.attention_mode} ({' + '.join(names)})" if served else f"{type(part).__name__} state"
            raise ConfigError(
                "model",
                geometry.model_type,
                f"layer {index} keeps {kind}, which can be planned but is not served yet",
            )
