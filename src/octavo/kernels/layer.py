"""A decoder layer as a short program of native calls: `NormWeights`, `Program`, `Place`, `Rope`, `Act`.

Owns what stands between torch tensors and the extension's layer programs: types are checked here, addresses
handed on, and whatever a program points to is kept alive by it. How a model's layer becomes a program is
`models.fused`'s question; the arithmetic is native/'s.

Invariant: a row's result depends on that row alone, bit for bit, but for the attention between its halves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.kernels.cpu import load_native
from octavo.kernels.linear import PackedLinear

NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Types of rows, as the extension numbers them."""


class Place(IntEnum):
    """Where rows lie between operations."""

    X = 0
    NORMED = 1
    QKV = 2
    ATTENDED = 3
    DELTA = 4
    SECOND = 5
    WIDE = 6
    NARROW = 7
    HANDED = 8


class Rope(IntEnum):
    """Which elements of a head are turned together, and by which entries of the tables."""

    NONE = 0
    HALVES = 1
    PAIRS = 2
    PAIRS_PACKED = 3
    HALVES_PACKED = 4


class Act(IntEnum):
    """Activations of an MLP."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
    RELU = 3
    RELU_SQUARED = 4


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """x / rms(x) * weight, or with `centred` (x - mean) / deviation * weight + bias.

    `weight` is [width], or [heads, width] where each head has its own. `rounds`: what is normalised is rounded to
    the type of the rows before the weight is multiplied in.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    centred: bool
    rounds: bool
    native: Any = field(init=False)

    def __post_init__(self) -> None:
        for part in (self.weight, self.bias):
            if part is not None and (part.dtype is not torch.float32 or not part.is_contiguous()):
                raise ConfigError("norm", part.dtype, "its weights are float32 in one piece")
        width = int(self.weight.shape[-1])
        head = width if self.weight.dim() == 2 else 0
        bias = 0 if self.bias is None else self.bias.data_ptr()
        make = load_native().Norm  # type: ignore[union-attr]  # whoever fuses has asked for the extension
        object.__setattr__(
            self, "native", make(self.weight.data_ptr(), bias, width, head, self.eps, self.centred, self.rounds)
        )

    @property
    def width(self) -> int:
        """Elements that are normalised together."""
        return int(self.weight.shape[-1])


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """What is done to queries and keys between the projection and the pages."""

    q_heads: int
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    rope: Rope
    rotary: int
    rounds: bool
    """Whether products with cosines and sines are rounded before they are added."""


class Program:
    """One layer's operations, in the order in which they are added: those `before` attention, it, those after."""

    def __init__(self, instruction_set: str, dtype: torch.dtype, widths: dict[Place, int]) -> None:
        if dtype not in NUMBERS:
            raise ConfigError("dtype", dtype, "layer programs run on float32, bfloat16 and float16")
        self.native: Any = load_native().LayerProgram(  # type: ignore[union-attr]
            instruction_set, NUMBERS[dtype], [widths.get(place, 0) for place in Place]
        )
        self._after = False
        self._kept: list[Any] = []

    def linear(self, weights: PackedLinear, source: Place, target: Place) -> None:
        self.native.linear(self._after, weights.native, source, target)
        self._kept.append(weights)

    def norm(self, norm: NormWeights, target: Place) -> None:
        """The rows as they are, normalised."""
        self.native.sum(self._after, -1, -1, None, 1.0, norm.native, target)
        self._kept.append(norm)

    def add(
        self,
        source: Place,
        second: Place | None = None,
        *,
        before: NormWeights | None = None,
        by: float = 1.0,
        after: NormWeights | None = None,
        target: Place = Place.NORMED,
    ) -> None:
        """Add to the rows: `source`, normalised by `before`, times `by`. Normalise the sum by `after` into `target`."""
        self.native.sum(
            self._after,
            source,
            -1 if second is None else second,
            None if before is None else before.native,
            by,
            None if after is None else after.native,
            target,
        )
        self._kept += [before, after]

    def gate(self, act: Act, source: Place, target: Place, *, gated: bool) -> None:
        self.native.gate(self._after, act, gated, source, target)

    def attend(
        self, pages: Any, heads: Heads, scale: float, softcap: float, sinks: torch.Tensor | None, of_step: list[int]
    ) -> None:
        """Attention; what is added from here on comes after it. A stack checks the whole when it takes it."""
        norms = [None if norm is None else norm.native for norm in (heads.q_norm, heads.k_norm)]
        self.native.attend(
            pages,
            heads.q_heads,
            *norms,
            heads.rope,
            heads.rotary,
            heads.rounds,
            scale,
            softcap,
            0 if sinks is None else sinks.data_ptr(),
            of_step,
        )
        self._kept += [heads, sinks]
        self._after = True
