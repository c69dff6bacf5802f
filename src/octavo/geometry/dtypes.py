"""Element types of attention state and weights, and what they cost in bytes.

A quantised type counts its scales: one scale of `scale_bytes` per run of the last axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Dtype:
    name: str
    bits: int
    scale_bytes: int = 0

    def bytes_for(self, shape: tuple[int, ...]) -> int:
        """Bytes of an array of `shape`, with one scale per row of its last axis."""
        elements = prod(shape)
        rows = elements // shape[-1] if shape and shape[-1] else 0
        return -(-elements * self.bits // 8) + rows * self.scale_bytes

    def __str__(self) -> str:
        return self.name


BF16 = Dtype("bf16", 16)
FP16 = Dtype("fp16", 16)
FP32 = Dtype("fp32", 32)
FP8 = Dtype("fp8", 8, scale_bytes=4)
INT8 = Dtype("int8", 8, scale_bytes=4)
INT4 = Dtype("int4", 4, scale_bytes=4)

_ALIASES = {
    "bf16": BF16,
    "bfloat16": BF16,
    "fp16": FP16,
    "float16": FP16,
    "half": FP16,
    "fp32": FP32,
    "float32": FP32,
    "float": FP32,
    "fp8": FP8,
    "fp8_e4m3": FP8,
    "float8_e4m3fn": FP8,
    "int8": INT8,
    "int4": INT4,
}


def dtype_named(name: str, *, field: str = "dtype") -> Dtype:
    """The dtype a user or a config names. Raises `ConfigError` listing the known names."""
    found = _ALIASES.get(str(name).removeprefix("torch.").lower())
    if found is None:
        raise ConfigError(field, name, f"unknown dtype; use one of {', '.join(sorted(_ALIASES))}")
    return found
