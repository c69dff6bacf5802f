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

_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.int4: 5}
_ROWS = (torch.float32, torch.bfloat16, torch.float16)
GROUP = 32
"""Inputs that share a scale, of weights in int8 and int4 and of rows that are rounded to be multiplied by them."""
_LEAST_SCALE = 2.0**-24


def linear_instruction_sets() -> tuple[str, ...]:
    """What runs on this processor, the fastest first; empty where nothing was built."""
    native = load_native()
    return () if native is None else tuple(native.linear_instruction_sets())


class PackedLinear:
    """y = x W^T + bias. `weights` are [outputs, inputs] and are joined in order; so are `biases`, None for none.

    `storage` is the element type of the packed form, that of the weights if not given: float32, bfloat16, float16, or
    int8 or int4 with a scale for each output and 32 inputs. Sums are float32 always; where the processor multiplies
    bytes (`rounds_inputs`), int8 and int4 round rows to eight bits in groups.
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

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest output of each row, rounded to the type of `x` and shown as float32, and its index.

        The lowest index of equals; a NaN before all. The outputs themselves are never stored.
        """
        rows = self._rows(x)
        values = torch.empty(rows.shape[0], dtype=torch.float32)
        indices = torch.empty(rows.shape[0], dtype=torch.int64)
        number = _NUMBERS[rows.dtype]
        self.native.argmax(
            rows.data_ptr(),
            number,
            rows.stride(0),
            rows.shape[0],
            number,
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
    """Whole numbers for each row [outputs, inputs], and scales [outputs, groups of 32 inputs] to multiply them by.

    int8: from -127 to 127. int4: from -8 to 7; the number largest in size becomes -8, a little more than that, or 7,
    whichever rounds its group best.
    """
    outputs, inputs = weight.shape
    wide = torch.nn.functional.pad(weight.to(torch.float32), (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    if storage is torch.int8:
        best, scales, _ = _rounded_to(wide, wide.abs().amax(2, keepdim=True) / 127, (-127, 127))
    else:
        largest = wide.gather(2, wide.abs().argmax(2, keepdim=True))
        best, scales, best_error = _rounded_to(wide, largest / -8.0, (-8, 7))
        for reach in (-8.7, 7.0):
            whole, scale, error = _rounded_to(wide, largest / reach, (-8, 7))
            better = error < best_error
            best = torch.where(better, whole, best)
            scales = torch.where(better, scale, scales)
            best_error = torch.where(better, error, best_error)
    return best.to(torch.int8).view(outputs, -1)[:, :inputs].contiguous(), scales[:, :, 0].contiguous()


def _rounded_to(
    wide: torch.Tensor, scale: torch.Tensor, within: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(whole numbers, scale as float16 holds it, squared error) of groups [outputs, groups, inputs]."""
    scale = scale.to(torch.float16).to(torch.float32)
    scale = torch.where(scale.abs() < _LEAST_SCALE, torch.full_like(scale, _LEAST_SCALE), scale)
    whole = torch.round(wide / scale).clamp_(*within)
    return whole, scale, (whole * scale - wide).square_().sum(2, keepdim=True)


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
