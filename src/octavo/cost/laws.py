"""Which positions a chunk reads and its queries meet, by kind of state: what attention's time depends on.

Owns the counting, of one chunk or of many at once. Bytes and arithmetic of a law are sums over the layers that follow
it. A law can be named by its kind and reach alone, as a calibration file does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from octavo.errors import ConfigError
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import Borrowed, Chunked, Constant, Growing, Part, Windowed, parts_of
from octavo.memory.values import Int64

Kind = Literal["full", "window", "chunk", "constant"]
KINDS: tuple[Kind, ...] = ("full", "window", "chunk", "constant")


@dataclass(frozen=True, slots=True)
class LawName:
    """What a law is called where only its counting matters."""

    kind: Kind
    reach: int

    @classmethod
    def parsed(cls, text: str) -> LawName | None:
        """From `kind:reach`; None where it is no such name."""
        kind, _, reach = text.partition(":")
        for known in KINDS:
            if kind == known and reach.isdecimal() and (known in ("full", "constant") or int(reach) > 0):
                return cls(known, int(reach))
        return None


@dataclass(frozen=True, slots=True)
class Law:
    """Layers whose queries meet the same positions."""

    kind: Kind
    reach: int = 0
    bytes_per_position: int = 0
    """Of all those layers; for constant state of one sequence."""
    flops_per_pair: int = 0
    written_bytes: int = 0
    """Of one position, in layers that keep their own."""

    def read(self, starts: Int64, counts: Int64) -> Int64:
        """Positions that each chunk reads."""
        ends = starts + counts
        if self.kind == "window":
            within: Int64 = np.minimum(ends, self.reach + counts - 1)
            return within
        if self.kind == "chunk":
            return ends - starts // self.reach * self.reach
        return np.ones_like(ends) if self.kind == "constant" else ends

    def pairs(self, starts: Int64, counts: Int64) -> Int64:
        """Queries of each chunk times the positions that each meets."""
        if self.kind == "constant":
            return np.zeros_like(starts)
        met: Int64 = self._met_before(starts + counts) - self._met_before(starts)
        return met

    def _met_before(self, positions: Int64) -> Int64:
        """Positions met by all queries below each of `positions`."""
        if self.kind == "full":
            return positions * (positions + 1) // 2
        if self.kind == "window":
            rising = np.minimum(positions, self.reach)
            met: Int64 = rising * (rising + 1) // 2 + (positions - rising) * self.reach
            return met
        whole, rest = positions // self.reach, positions % self.reach
        return whole * (self.reach * (self.reach + 1) // 2) + rest * (rest + 1) // 2


def laws_of(geometry: ModelGeometry) -> tuple[Law, ...]:
    """The layers' state by who reads what. Raises `ConfigError` for a kind whose time is not modelled."""
    found: dict[tuple[str, int], Law] = {}
    for index, state in enumerate(geometry.layers):
        borrowed = isinstance(state, Borrowed)
        lender = geometry.layers[state.layer] if isinstance(state, Borrowed) else state
        for part in parts_of(lender):
            if not part.bytes_kept(1) and not borrowed:
                continue
            law = _law_of(part, index, geometry.num_attention_heads, borrowed=borrowed)
            before = found.get((law.kind, law.reach), Law(law.kind, law.reach))
            found[law.kind, law.reach] = Law(
                law.kind,
                law.reach,
                before.bytes_per_position + law.bytes_per_position,
                before.flops_per_pair + law.flops_per_pair,
                before.written_bytes + law.written_bytes,
            )
    return tuple(found.values())


def _law_of(part: Part, layer: int, heads: int, *, borrowed: bool) -> Law:
    if isinstance(part, Constant):
        return Law("constant", 0, 2 * part.bytes_per_sequence)  # read and written
    if not isinstance(part, (Growing, Windowed, Chunked)) or (
        isinstance(part, Growing) and part.read_tokens is not None
    ):
        raise ConfigError(
            "model", type(part).__name__, f"the time of layer {layer}'s kind of state is not modelled yet"
        )
    widths = {component.name: component.shape[-1] for component in part.components}
    width = widths.get("k", 0) + widths.get("v", 0)
    if "latent" in widths:
        width = 2 * widths["latent"] + widths.get("rope_k", 0)
    per_position, written = part.bytes_per_token, 0 if borrowed else part.bytes_per_token
    if isinstance(part, Windowed):
        return Law("window", part.window_tokens + part.sink_tokens, per_position, 2 * heads * width, written)
    if isinstance(part, Chunked):
        return Law("chunk", part.chunk_tokens, per_position, 2 * heads * width, written)
    return Law("full", 0, per_position, 2 * heads * width, written)
