"""Linear layers by octavo's own C++ kernels, for few rows: `PackedLinear`.

Owns a matrix packed once in panels, and what stands between torch tensors and the extension: types and
shapes are checked here, addresses handed on. Several matrices over the same input (q/k/v, gate/up) may be
joined: their outputs lie side by side. The matrix it was made from is not needed afterwards.

Invariant: a row's result depends on that row alone, bit for bit, however many rows or threads there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.kernels.cpu import load_native
from octavo.kernels.settled import settled

_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.int4: 5}
_ROWS = (torch.float32, torch.bfloat16, torch.float16)
GROUP = 32
"""Inputs that share a scale, of weights in int8 and int4 and of rows that are rounded to be multiplied by them."""
_LEAST_SCALE = 2.0**-24
FOUR_BIT_SPANS = (1.0, 0.93, 0.86)
"""Shares of the way from a group's least number to its largest that sixteen steps are tried over."""


def linear_instruction_sets() -> tuple[str, ...]:
    """What runs on this processor, the fastest first; empty where nothing was built."""
    native = load_native()
    return () if native is None else tuple(native.linear_instruction_sets())


class PackedLinear:
    """y = x W^T + bias. `weights` are [outputs, inputs] and are joined in order; so are `biases`, None for none.

    `storage` is the element type of the packed form, that of the weights if not given: float32, bfloat16, float16, or
    int8 or int4 with a scale, and for int4 what 0 stands for, for each output and 32 inputs. Sums are float32 always;
    where the processor multiplies bytes (`rounds_inputs`), int8 and int4 round rows to eight bits in groups.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] = (),
        *,
        storage: torch.dtype | None = None,
        instruction_set: str | None = None,
        threads: int | None = None,
    ) -> None:
        native = load_native()
        if native is None:
            raise ConfigError("linear", "native", "the native kernels were not built; use torch")
        known = native.linear_instruction_sets()
        if instruction_set is not None and instruction_set not in known:
            raise ConfigError("instruction_set", instruction_set, f"this processor runs {', '.join(known)}")
        biases = tuple(biases) or (None,) * len(weights)
        _check_parts(weights, biases)
        storage = weights[0].dtype if storage is None else storage
        if storage not in _NUMBERS:
            raise ConfigError("storage", storage, f"weights are packed as one of {', '.join(map(str, _NUMBERS))}")
        self.parts = tuple(int(weight.shape[0]) for weight in weights)
        """Outputs of each matrix that was joined."""
        self.out_features = sum(self.parts)
        self.in_features = int(weights[0].shape[1])
        self.storage = storage
        self.threads = threads
        self.native: Any = native.Linear(
            instruction_set or known[0], _NUMBERS[storage], self.out_features, self.in_features
        )
        """The packed matrix as the extension knows it, for programs that call it themselves."""
        first = 0
        for weight, bias in zip(weights, biases, strict=True):
            self._put(first, weight.detach(), bias)
            first += int(weight.shape[0])

    def repack(self, storage: torch.dtype) -> None:
        """The same matrix kept in another type, from what it is now; programs that hold it go on with that."""
        if storage not in _NUMBERS:
            raise ConfigError("storage", storage, f"weights are packed as one of {', '.join(map(str, _NUMBERS))}")
        weight = self.rows(torch.arange(self.out_features), torch.float32)
        self.storage = storage
        self.native.reset(_NUMBERS[storage])
        self._put(0, weight, None)

    @property
    def instruction_set(self) -> str:
        name: str = self.native.instruction_set
        return name

    @property
    def rounded(self) -> bool:
        """Whether packing rounded the weights."""
        return self.storage in (torch.int8, torch.int4)

    @property
    def rounds_inputs(self) -> bool:
        rounds: bool = self.rounded and self.native.rounds_inputs
        return rounds

    @property
    def nbytes(self) -> int:
        """Bytes of the packed form."""
        size: int = self.native.bytes
        return size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs], in the type of `x`."""
        rows = self._rows(x)
        out = torch.empty((rows.shape[0], self.out_features), dtype=x.dtype)
        self._run(rows, out)
        return out.view(*x.shape[:-1], self.out_features)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The same into `out`, [rows, outputs] with the elements of a row side by side, of any type of rows."""
        rows = self._rows(x)
        if out.shape != (rows.shape[0], self.out_features) or out.dtype not in _ROWS or out.stride(1) != 1:
            wanted = (
                f"must be [{rows.shape[0]}, {self.out_features}] in float32, bfloat16 or float16, rows in one piece"
            )
            raise ConfigError("out", (tuple(out.shape), out.dtype), wanted)
        self._run(rows, out)

    def argmax(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest output of each row, rounded to `dtype` (the type of `x`) and shown as float32, and its index.

        The lowest index of equals; a NaN before all. The outputs themselves are never stored.
        """
        rows = self._rows(x)
        values = torch.empty(rows.shape[0], dtype=torch.float32)
        indices = torch.empty(rows.shape[0], dtype=torch.int64)
        self.native.argmax(
            rows.data_ptr(),
            _NUMBERS[rows.dtype],
            rows.stride(0),
            rows.shape[0],
            _NUMBERS[rows.dtype if dtype is None else dtype],
            values.data_ptr(),
            indices.data_ptr(),
            self.threads or torch.get_num_threads(),
        )
        return values.view(x.shape[:-1]), indices.view(x.shape[:-1])

    def rows(self, outputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weights of these outputs, [..., inputs] in `dtype`: what an embedding tied to this matrix looks up."""
        if outputs.device.type != "cpu" or dtype not in _ROWS:
            raise ConfigError("outputs", (str(outputs.device), dtype), "on the CPU, as float32, bfloat16 or float16")
        wanted = outputs.to(torch.int64).contiguous()
        found = torch.empty((*wanted.shape, self.in_features), dtype=dtype)
        threads = self.threads or torch.get_num_threads()
        self.native.read(wanted.data_ptr(), wanted.numel(), _NUMBERS[dtype], found.data_ptr(), threads)
        return found

    def _run(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        self.native.run(
            rows.data_ptr(),
            _NUMBERS[rows.dtype],
            rows.stride(0),
            rows.shape[0],
            out.data_ptr(),
            _NUMBERS[out.dtype],
            out.stride(0),
            self.threads or torch.get_num_threads(),
        )

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, inputs] with the elements of a row side by side."""
        if x.device.type != "cpu" or x.dtype not in _ROWS or x.shape[-1] != self.in_features:
            wanted = f"must be [..., {self.in_features}] in float32, bfloat16 or float16 on the CPU"
            raise ConfigError("x", (tuple(x.shape), x.dtype, str(x.device)), wanted)
        x = settled(x)
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        return rows if rows.stride(1) == 1 else rows.contiguous()

    def _put(self, first: int, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        scales = None
        if self.rounded:
            weight, scales = quantise_groups(weight, self.storage)
        bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self.native.put(
            first,
            weight.shape[0],
            _NUMBERS[weight.dtype],
            weight.data_ptr(),
            weight.stride(0),
            0 if scales is None else scales.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            self.threads or torch.get_num_threads(),
        )


def quantise_groups(weight: torch.Tensor, storage: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers for each row [outputs, inputs], and what each group of 32 inputs multiplies them by.

    int8: from -127 to 127, scales [outputs, groups]. int4: from 0 to 15, [outputs, groups, 2]: the scale, and what 0
    stands for. A group spans its least to its largest number, or less where that rounds it better; one that was
    rounded so before keeps every bit.
    """
    outputs, inputs = weight.shape
    wide = torch.nn.functional.pad(weight.to(torch.float32), (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    if storage is torch.int8:
        scale = _as_stored(wide.abs().amax(2, keepdim=True) / 127)
        whole, scales = torch.round(wide / scale).clamp_(-127, 127), scale[:, :, 0]
    else:
        whole, scales = _rounded_to_four_bits(wide)
    return whole.to(torch.int8).view(outputs, -1)[:, :inputs].contiguous(), scales.contiguous()


def _rounded_to_four_bits(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of several spans of each group, and the line that fits what they round to best, the one of the least error."""
    least, most = wide.amin(2, keepdim=True), wide.amax(2, keepdim=True)
    best, scales = torch.zeros_like(wide), torch.cat((least, least), 2)
    best_error = torch.full_like(least, float("inf"))
    for share in FOUR_BIT_SPANS:
        margin = (most - least) * (1 - share) / 2
        scale, shift = (most - least) * (share / 15), least + margin
        for _ in range(2):
            scale, shift = _as_stored(scale), shift.to(torch.float16).to(torch.float32)
            whole = torch.round((wide - shift) / scale).clamp_(0, 15)
            error = (whole * scale + shift - wide).square_().sum(2, keepdim=True)
            better = error < best_error
            best, best_error = torch.where(better, whole, best), torch.where(better, error, best_error)
            scales = torch.where(better, torch.cat((scale, shift), 2), scales)
            means = whole.mean(2, keepdim=True), wide.mean(2, keepdim=True)
            apart = whole - means[0]
            scale = (apart * (wide - means[1])).sum(2, keepdim=True) / apart.square().sum(2, keepdim=True).clamp_min(1)
            shift = means[1] - scale * means[0]
    return best, scales


def _as_stored(scale: torch.Tensor) -> torch.Tensor:
    """As float16 holds it, and not zero."""
    return scale.to(torch.float16).to(torch.float32).clamp_min(_LEAST_SCALE)


def _check_parts(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
    if not weights or len(biases) != len(weights):
        raise ConfigError(
            "weights", len(weights), f"at least one, and as many as biases, of which there are {len(biases)}"
        )
    first = weights[0]
    for weight, bias in zip(weights, biases, strict=True):
        same = weight.dim() == 2 and weight.shape[1] == first.shape[1] and weight.dtype is first.dtype
        if not same or weight.dtype not in _ROWS or weight.device.type != "cpu":
            wanted = f"must be [outputs, {first.shape[-1]}] in {first.dtype} on the CPU, as the first is"
            raise ConfigError("weights", (tuple(weight.shape), weight.dtype, str(weight.device)), wanted)
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ConfigError("biases", tuple(bias.shape), f"must be [{weight.shape[0]}], one for each output")
