"""`ModelGeometry`: what every layer of one model keeps, and the sums that everything else reads.

A value, made by `geometry_from_config` and never changed. It adds up what `LayerState` says and
has no formula of its own. Figures are bytes *needed* (the convention); `notes` names where
another convention would differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.geometry.dtypes import Dtype
from octavo.geometry.state import (
    Borrowed,
    Chunked,
    Component,
    Constant,
    Growing,
    LayerState,
    Stateless,
    Windowed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    model_type: str
    architecture: str
    """The first of the config's `architectures`, or an empty string where it names none."""
    layers: tuple[LayerState, ...]
    kv_dtype: Dtype
    hidden_size: int
    num_attention_heads: int
    """0 for a model without attention."""
    vocab_size: int | None = None
    intermediate_size: int | None = None
    """Width of one token's feed-forward activations; of all its experts where there are several."""
    context_length: int | None = None
    """Positions the model was made for, where the config says so."""
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def bytes_per_token_growing(self) -> int:
        """Bytes that each further token adds for as long as the sequence grows."""
        return sum(state.bytes_per_token for state in self.layers if isinstance(state, Growing))

    @property
    def bytes_per_token_windowed(self) -> int:
        """Bytes that each token adds in window and chunk layers, until the window is full."""
        return sum(state.bytes_per_token for state in self.layers if isinstance(state, (Windowed, Chunked)))

    @property
    def bytes_per_token(self) -> int:
        """Growing and windowed together: what a token costs while window layers keep their full length."""
        return self.bytes_per_token_growing + self.bytes_per_token_windowed

    @property
    def fixed_bytes_per_sequence(self) -> int:
        """Bytes of one sequence that do not depend on its length."""
        return sum(state.bytes_per_sequence for state in self.layers if isinstance(state, Constant))

    def bytes_kept(self, tokens: int) -> int:
        """Bytes that one sequence of `tokens` positions needs."""
        return sum(state.bytes_kept(tokens) for state in self.layers)

    def bytes_read(self, tokens: int) -> int:
        """Bytes of state that one decode step reads with `tokens` positions in the context.

        A borrowing layer reads its lender's state again.
        """
        total = 0
        for state in self.layers:
            lender = self.layers[state.layer] if isinstance(state, Borrowed) else state
            total += lender.bytes_read(tokens)
        return total

    @property
    def window_tokens(self) -> tuple[int, ...]:
        """The distinct windows of window layers, smallest first."""
        return tuple(sorted({state.window_tokens for state in self.layers if isinstance(state, Windowed)}))

    @property
    def attention_mode(self) -> str:
        """What kinds of state the layers keep, for example `gqa`, `gqa+window`, `mla`, `mqa+recurrent`."""
        return "+".join(_unique(_kind(state, self.num_attention_heads) for state in self.layers)) or "stateless"

    @property
    def components(self) -> tuple[str, ...]:
        """The names of all components kept, in order of first appearance."""
        return _unique(component.name for state in self.layers for component in _components(state))


def _components(state: LayerState) -> tuple[Component, ...]:
    return () if isinstance(state, (Borrowed, Stateless)) else state.components


def _kind(state: LayerState, heads: int) -> str:
    if isinstance(state, Constant):
        return "recurrent"
    if isinstance(state, Borrowed):
        return "shared"
    if isinstance(state, Stateless):
        return "stateless"
    head_kind = _head_kind(state.components, heads)
    if isinstance(state, Windowed):
        return f"{head_kind}+window"
    return f"{head_kind}+chunk" if isinstance(state, Chunked) else head_kind


def _head_kind(components: tuple[Component, ...], heads: int) -> str:
    if components[0].name == "latent":
        return "mla"
    kv_heads = components[0].shape[0]
    if kv_heads == heads:
        return "mha"
    return "mqa" if kv_heads == 1 else "gqa"


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    """Without repeats and in order; `a+b` counts as `a`, then `b`."""
    return tuple(dict.fromkeys(part for name in names for part in name.split("+")))
