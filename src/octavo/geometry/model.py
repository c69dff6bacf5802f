"""`ModelGeometry`: what every layer of one model keeps, and the sums that everything else reads.

A value, made by `geometry_from_config` and never changed. It adds up what `LayerState` says and
has no formula of its own. `convention` names whose count the figures are: what is *needed*, or what
Transformers keeps; `notes` says where another would differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from octavo.geometry.dtypes import Dtype
from octavo.geometry.state import (
    Borrowed,
    Chunked,
    Component,
    Compressed,
    Constant,
    Growing,
    LayerState,
    Part,
    Stateless,
    Windowed,
    parts_of,
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
    convention: str = "needed"
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """The states of all layers, those of compounds one by one."""
        return tuple(part for state in self.layers for part in parts_of(state))

    @property
    def counted_parts(self) -> dict[Part, int]:
        """The distinct states and how many layers keep each, in order; what borrows is one, whoever the lender is."""
        counted: dict[Part, int] = {}
        for part in self.parts:
            key = Borrowed(0) if isinstance(part, Borrowed) else part
            counted[key] = counted.get(key, 0) + 1
        return counted

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def bytes_per_token_growing(self) -> int:
        """Bytes that each further token adds for as long as the sequence grows.

        Of compressed layers the share of a full run, and the sum rounded up to a byte.
        """
        growing = sum(part.bytes_per_token for part in self.parts if isinstance(part, Growing))
        entries = [Fraction(p.bytes_per_entry, p.run_tokens) for p in self.parts if isinstance(p, Compressed)]
        return growing + ceil(sum(entries, Fraction()))

    @property
    def bytes_per_token_windowed(self) -> int:
        """Bytes that each token adds in window and chunk layers, until the window is full."""
        return sum(part.bytes_per_token for part in self.parts if isinstance(part, (Windowed, Chunked)))

    @property
    def bytes_per_token(self) -> int:
        """Growing and windowed together: what a token costs while window layers keep their full length."""
        return self.bytes_per_token_growing + self.bytes_per_token_windowed

    @property
    def fixed_bytes_per_sequence(self) -> int:
        """Bytes of one sequence that do not depend on its length."""
        return sum(part.bytes_per_sequence for part in self.parts if isinstance(part, Constant))

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
        return tuple(sorted({part.window_tokens for part in self.parts if isinstance(part, Windowed)}))

    @property
    def attention_mode(self) -> str:
        """What kinds of state the layers keep, for example `gqa`, `gqa+window`, `mla`, `mqa+recurrent`."""
        return "+".join(_unique(_kind(part, self.num_attention_heads) for part in self.parts)) or "stateless"

    @property
    def components(self) -> tuple[str, ...]:
        """The names of all components kept, in order of first appearance."""
        return _unique(component.name for state in self.layers for component in _components(state))


def _components(state: LayerState) -> tuple[Component, ...]:
    return () if isinstance(state, (Borrowed, Stateless)) else state.components


def _kind(state: Part, heads: int) -> str:
    if isinstance(state, Constant):
        return "recurrent"
    if isinstance(state, Borrowed):
        return "shared"
    if isinstance(state, Stateless):
        return "stateless"
    head_kind = _head_kind(state.components, heads)
    if isinstance(state, Compressed):
        return "compressed"
    if isinstance(state, Growing) and any(c.name.startswith("index") for c in state.components):
        return f"{head_kind}+sparse"
    if isinstance(state, Windowed):
        return f"{head_kind}+window"
    return f"{head_kind}+chunk" if isinstance(state, Chunked) else head_kind


def _head_kind(components: tuple[Component, ...], heads: int) -> str:
    if components[0].name == "latent":
        return "mla"
    if components[0].name not in ("k", "kv"):
        return ""
    kv_heads = components[0].shape[0]
    if kv_heads == heads:
        return "mha"
    return "mqa" if kv_heads == 1 else "gqa"


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    """Without repeats and in order; `a+b` counts as `a`, then `b`."""
    return tuple(dict.fromkeys(part for name in names for part in name.split("+")))
