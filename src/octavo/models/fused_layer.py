"""One decoder layer as native programs: `FusedLayer`, and the wirings in which its parts may stand.

Owns the packed weights of a layer and the order of its operations. `candidates` lists the ways in which parts
called in that order can be wired, and how heads may be turned: which of them the layer really is, `fused` finds
out by trying. Knows no executor: `program` makes the native program over any layer's pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from octavo.errors import ModelError
from octavo.kernels.interface import AttentionRule
from octavo.kernels.layer import Heads, NormWeights, Place, Program, Rope
from octavo.kernels.linear import PackedLinear
from octavo.models.fused_parts import LayerParts, Matrix

_ORDERS = {
    "NANM": ("pre", "parallel"),
    "NAM": ("parallel",),
    "NANNMN": ("sandwich",),
    "ANMN": ("post",),
}
"""Wirings by the order in which parts are called; the first is the likelier one."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """How the parts of a layer stand to each other.

    pre: x += A(n0 x), x += M(n1 x); parallel: x += A(n0 x) + M(n' x), n' the last norm; sandwich: x += n1 A(n0 x),
    x += n3 M(n2 x); post: x += n0 A(x), x += n1 M(x).
    """

    name: str
    rope: Rope
    rotary: int
    """Leading elements of a head that are turned."""
    scale: float = 1.0
    """What queries are multiplied by before they attend."""


def candidates(parts: LayerParts, dim: int, entries: int) -> Iterator[Wiring]:
    """Ways in which these parts can be wired, the likeliest first.

    `dim` of a head; `entries` of a row of the tables that the layer is given, 0 for none.
    """
    ropes = [
        (Rope.HALVES, entries),
        (Rope.PAIRS, entries),
        (Rope.PAIRS_PACKED, entries),
        (Rope.HALVES_PACKED, 2 * entries),
        (Rope.PAIRS_PACKED, 2 * entries),
    ]
    possible = [(rope, rotary) for rope, rotary in ropes if 0 < rotary <= dim and rotary % 2 == 0]
    told = getattr(parts.attention.module, "scaling", None)
    scales = (1.0, told) if isinstance(told, float) and told != 1.0 else (1.0,)
    for scale in scales:
        for rope, rotary in (*possible, (Rope.NONE, 0)):
            for name in _ORDERS.get(parts.order, ()):
                yield Wiring(name, rope, rotary, scale)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The matrices of a layer; no MLP where its module runs as it is."""

    qkv: PackedLinear
    output: PackedLinear
    inner: PackedLinear | None
    down: PackedLinear | None


def pack(parts: LayerParts) -> Packed:
    mlp = parts.mlp
    return Packed(
        _packed(parts.attention.qkv),
        _packed(parts.attention.output),
        None if mlp is None else _packed(mlp.inner),
        None if mlp is None else _packed(mlp.down),
    )


def _packed(matrix: Matrix) -> PackedLinear:
    return PackedLinear(matrix.weights, matrix.biases)


class Absorbed(nn.Module):
    """Stands where a linear layer was whose weights are in a program now."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise ModelError("model", "linear layer", "its weights are in a native program; load the model again to run it")


def take_over(layer: nn.Module, parts: LayerParts, packed: Packed) -> None:
    """Let go of the weights that have been packed, and leave the packed ones where bytes are counted."""
    mlp = () if parts.mlp is None else (parts.mlp.inner, parts.mlp.down)
    matrices = (parts.attention.qkv, parts.attention.output, *mlp)
    gone = {id(module) for matrix in matrices for module in matrix.modules}
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in gone:
                setattr(parent, name, Absorbed())
    for matrix in matrices:
        matrix.modules = ()
    layer.__dict__["packed"] = [p for p in (packed.qkv, packed.output, packed.inner, packed.down) if p is not None]


@dataclass(frozen=True, slots=True, eq=False)
class FusedLayer:
    """A layer of a known wiring. `kv_layer` is the number under which it keeps its state."""

    kv_layer: int
    dtype: torch.dtype
    """Of its rows."""
    parts: LayerParts
    packed: Packed
    wiring: Wiring
    rule: AttentionRule
    q_heads: int
    table: int
    """Which of the model's pairs of tables turns it."""

    @property
    def module(self) -> nn.Module | None:
        """The MLP that runs as it is, between the program and the last sum."""
        return self.parts.mlp_module if self.parts.mlp is None else None

    @property
    def last_norm(self) -> NormWeights | None:
        """What normalises the MLP's result before it is added."""
        return self.parts.norms[-1] if self.wiring.name in ("sandwich", "post") else None

    @property
    def hands_on(self) -> bool:
        """Whether the module is given rows that the program has made; if not, it is given the rows themselves."""
        return self.module is not None and self.wiring.name != "post"

    def widths(self, hidden: int) -> dict[Place, int]:
        mlp = self.parts.mlp
        widths = dict.fromkeys((Place.X, Place.NORMED, Place.DELTA, Place.SECOND, Place.HANDED), hidden)
        widths[Place.QKV] = self.packed.qkv.out_features
        widths[Place.ATTENDED] = self.packed.output.in_features
        if mlp is not None and self.packed.inner is not None and self.packed.down is not None:
            widths[Place.WIDE] = self.packed.inner.out_features
            widths[Place.NARROW] = self.packed.down.in_features
        return widths

    def program(self, instruction_set: str, pages: Any, of_step: list[int]) -> Program:
        """`pages` as the extension knows them; `of_step`: which plan, which writes, which tables of a step are its."""
        made = Program(instruction_set, self.dtype, self.widths(self.packed.output.out_features))
        norms = self.parts.norms
        source = Place.X
        if self.wiring.name != "post":
            made.norm(norms[0], Place.NORMED)
            source = Place.NORMED
        made.linear(self.packed.qkv, source, Place.QKV)
        attention = self.parts.attention
        heads = Heads(
            self.q_heads,
            attention.q_norm,
            attention.k_norm,
            self.wiring.rope,
            self.wiring.rotary,
            rounds=self.wiring.rope is Rope.HALVES,
        )
        sinks = None if self.rule.sinks is None else self.rule.sinks.detach().to(torch.float32).contiguous()
        made.attend(pages, heads, self.rule.scale * self.wiring.scale, self.rule.softcap or 0.0, sinks, of_step)
        if self.wiring.name == "parallel":
            self._side_by_side(made)
        else:
            self._one_after_the_other(made)
        return made

    def _one_after_the_other(self, made: Program) -> None:
        norms, by = self.parts.norms, self.parts.multiplier
        made.linear(self.packed.output, Place.ATTENDED, Place.DELTA)
        target = Place.NORMED if self.module is None else Place.HANDED
        if self.wiring.name == "pre":
            made.add(Place.DELTA, by=by, after=norms[1], target=target)
        elif self.wiring.name == "sandwich":
            made.add(Place.DELTA, before=norms[1], by=by, after=norms[2], target=target)
        else:
            made.add(Place.DELTA, before=norms[0], by=by)
        self._mlp(made, Place.X if self.wiring.name == "post" else Place.NORMED)
        if self.module is None:
            made.add(Place.DELTA, before=self.last_norm, by=by)

    def _side_by_side(self, made: Program) -> None:
        made.norm(self.parts.norms[-1], Place.NORMED if self.module is None else Place.HANDED)
        self._mlp(made, Place.NORMED, Place.SECOND)
        made.linear(self.packed.output, Place.ATTENDED, Place.DELTA)
        made.add(Place.DELTA, None if self.module is not None else Place.SECOND, by=self.parts.multiplier)

    def _mlp(self, made: Program, source: Place, target: Place = Place.DELTA) -> None:
        mlp = self.parts.mlp
        if mlp is None or self.packed.inner is None or self.packed.down is None:
            return
        made.linear(self.packed.inner, source, Place.WIDE)
        made.gate(mlp.act, Place.WIDE, Place.NARROW, gated=mlp.gated)
        made.linear(self.packed.down, Place.NARROW, target)
