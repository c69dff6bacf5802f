"""What one layer must remember of the past: the closed union `LayerState`.

Owns the only formulas for bytes of attention state. Everything else adds up or lays out what
these values say. Each kind answers four questions:

- `bytes_kept(n)`: bytes one sequence of n positions keeps in this layer;
- `first_readable(n)`: the lowest position that a token at position n or later may still read;
- `reusable_prefix(n)`: how much of a cached prefix of n positions another sequence can start from;
- `bytes_read(n)`: bytes one decode step reads when n positions are in the context.

A layer that keeps two kinds at once (attention beside a recurrence) is a `Compound` of them.
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


INDEX = "index"
"""Components whose names start so are an index: what a query looks through to choose what it reads."""


def _bytes_selected(components: tuple[Component, ...], entries: int, most: int | None) -> int:
    """Bytes read of `entries` entries: the index whole, of the rest at most `most`."""
    index = components_bytes(tuple(c for c in components if c.name.startswith(INDEX)))
    rest = components_bytes(components) - index
    return entries * index + (entries if most is None else min(entries, most)) * rest


@dataclass(frozen=True, slots=True)
class Growing:
    """State grows with positions: MHA, GQA, MQA, and latent attention, sparse in what it reads or not."""

    components: tuple[Component, ...]
    read_tokens: int | None = None
    """The most positions that a query reads, where an index chooses them. All are kept."""

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
        return _bytes_selected(self.components, tokens, self.read_tokens)


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


@dataclass(frozen=True, slots=True)
class Compressed:
    """One entry stands for each full run of `run_tokens` positions; an unfinished run waits as it is.

    position   0 1 2 3 | 4 5 6 7 | 8 9
    kept       entry 0 | entry 1 | waiting 8, 9      and `carried`, once, from the last full run
    """

    components: tuple[Component, ...]
    """Of one entry."""
    run_tokens: int
    waiting: tuple[Component, ...] = ()
    """Of one position whose run is not full yet."""
    carried: tuple[Component, ...] = ()
    """What the last full run leaves for making the next entry: once per sequence."""
    read_entries: int | None = None
    """The most entries that a query reads, where an index chooses them. All are kept."""

    @property
    def bytes_per_entry(self) -> int:
        return components_bytes(self.components)

    def bytes_kept(self, tokens: int) -> int:
        entries, rest = divmod(tokens, self.run_tokens)
        once = components_bytes(self.carried) if entries else 0
        return entries * self.bytes_per_entry + rest * components_bytes(self.waiting) + once

    def first_readable(self, position: int) -> int:
        return 0

    def reusable_prefix(self, tokens: int) -> int:
        """Whole runs: what waits or is carried is not kept for other sequences."""
        return tokens - tokens % self.run_tokens if not self.carried else 0

    def bytes_read(self, tokens: int) -> int:
        return _bytes_selected(self.components, tokens // self.run_tokens, self.read_entries)


@dataclass(frozen=True, slots=True)
class Compound:
    """Several states in one layer, all needed: attention beside a recurrence, a window beside entries."""

    parts: tuple[Growing | Windowed | Chunked | Constant | Compressed, ...]

    @property
    def components(self) -> tuple[Component, ...]:
        return tuple(component for part in self.parts for component in part.components)

    def bytes_kept(self, tokens: int) -> int:
        return sum(part.bytes_kept(tokens) for part in self.parts)

    def first_readable(self, position: int) -> int:
        return min(part.first_readable(position) for part in self.parts)

    def reusable_prefix(self, tokens: int) -> int:
        return min(part.reusable_prefix(tokens) for part in self.parts)

    def bytes_read(self, tokens: int) -> int:
        return sum(part.bytes_read(tokens) for part in self.parts)


LayerState = Growing | Windowed | Chunked | Constant | Borrowed | Stateless | Compressed | Compound

Part = Growing | Windowed | Chunked | Constant | Borrowed | Stateless | Compressed
"""A state that is no compound."""


def parts_of(state: LayerState) -> tuple[Part, ...]:
    """The states that a layer keeps side by side: one, or those of a compound."""
    return state.parts if isinstance(state, Compound) else (state,)
