"""What one layer must remember of the past: the closed union `LayerState`.

Owns the only formulas for bytes of attention state. Everything else adds up or lays out what
these values say. Each kind answers four questions:

- `bytes_kept(n)`: bytes one sequence of n positions keeps in this layer;
- `first_readable(n)`: the lowest position that a token at position n or later may still read;
- `reusable_prefix(n)`: how much of a cached prefix of n positions another sequence can start from;
- `bytes_read(n)`: bytes one decode step reads when n positions are in the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from octavo.geometry.dtypes import Dtype


@dataclass(frozen=True, slots=True)
class Component:
    """One named array of a layer's state, per position (or per sequence for `Constant`)."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes for one position, scales included."""
        return self.dtype.bytes_for(self.shape)


def components_bytes(components: tuple[Component, ...]) -> int:
    return sum(component.bytes for component in components)


@dataclass(frozen=True, slots=True)
class Growing:
    """State grows with positions: MHA, GQA, MQA, and latent attention."""

    components: tuple[Component, ...]

    @property
    def bytes_per_token(self) -> int:
        return components_bytes(self.components)

    def bytes_kept(self, tokens: int) -> int:
        return tokens * self.bytes_per_token

    def first_readable(self, position: int) -> int:
        return 0

    def reusable_prefix(self, tokens: int) -> int:
        return tokens

    def bytes_read(self, tokens: int) -> int:
        return tokens * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class Windowed:
    """A query reads itself and the `window_tokens - 1` positions before it, plus `sink_tokens` at the start."""

    components: tuple[Component, ...]
    window_tokens: int
    sink_tokens: int = 0

    @property
    def bytes_per_token(self) -> int:
        return components_bytes(self.components)

    def bytes_kept(self, tokens: int) -> int:
        return min(tokens, self.window_tokens + self.sink_tokens) * self.bytes_per_token

    def first_readable(self, position: int) -> int:
        return 0 if self.sink_tokens else max(0, position - self.window_tokens + 1)

    def reusable_prefix(self, tokens: int) -> int:
        return tokens

    def bytes_read(self, tokens: int) -> int:
        return self.bytes_kept(tokens)


@dataclass(frozen=True, slots=True)
class Chunked:
    """A query reads only positions of its own chunk of `chunk_tokens`."""

    components: tuple[Component, ...]
    chunk_tokens: int

    @property
    def bytes_per_token(self) -> int:
        return components_bytes(self.components)

    def bytes_kept(self, tokens: int) -> int:
        return min(tokens, self.chunk_tokens) * self.bytes_per_token

    def first_readable(self, position: int) -> int:
        return position - position % self.chunk_tokens

    def reusable_prefix(self, tokens: int) -> int:
        return tokens

    def bytes_read(self, tokens: int) -> int:
        return ((tokens - 1) % self.chunk_tokens + 1) * self.bytes_per_token if tokens else 0


@dataclass(frozen=True, slots=True)
class Constant:
    """State per sequence, whatever its length: state-space, linear attention, short convolution."""

    components: tuple[Component, ...]

    @property
    def bytes_per_sequence(self) -> int:
        return components_bytes(self.components)

    def bytes_kept(self, tokens: int) -> int:
        return self.bytes_per_sequence

    def first_readable(self, position: int) -> int:
        return position

    def reusable_prefix(self, tokens: int) -> int:
        """Only at a boundary where a snapshot was taken; without one, nothing."""
        return 0

    def bytes_read(self, tokens: int) -> int:
        return self.bytes_per_sequence


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Reads the state of an earlier layer and keeps none of its own."""

    layer: int

    def bytes_kept(self, tokens: int) -> int:
        return 0

    def first_readable(self, position: int) -> int:
        return position

    def reusable_prefix(self, tokens: int) -> int:
        return tokens

    def bytes_read(self, tokens: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Stateless:
    """Keeps nothing: a layer without a mixer."""

    def bytes_kept(self, tokens: int) -> int:
        return 0

    def first_readable(self, position: int) -> int:
        return position

    def reusable_prefix(self, tokens: int) -> int:
        return tokens

    def bytes_read(self, tokens: int) -> int:
        return 0


LayerState = Growing | Windowed | Chunked | Constant | Borrowed | Stateless
