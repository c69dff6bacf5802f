"""Element types of attention state and weights, and what they cost in bytes.

A quantised type counts its scales: one scale of `scale_bytes` for each row of the last axis, which for
keys and values is per token and head. `with_scales` says otherwise, for engines that keep other scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Dtype:
    name: str
    bits: int
    scale_bytes: int = 0
    scale_group: int = 0
    """Elements of a row that share a scale; 0: the whole row."""

    @property
    def quantised(self) -> bool:
        return self.bits <= 8

    def bytes_for(self, shape: tuple[int, ...]) -> int:
        """Bytes of an array of `shape`: every row of its last axis in whole bytes, and its scales."""
        elements = prod(shape)
        if not elements:
            return 0
        width = shape[-1] if shape else 1
        scales = -(-width // self.scale_group) if self.scale_group else 1
        return elements // width * (-(-width * self.bits // 8) + scales * self.scale_bytes)

    def with_scales(self, scale_bytes: int, scale_group: int = 0) -> Dtype:
        """The same elements with other scales: `with_scales(0)` for one scale of a whole tensor."""
        return replace(self, scale_bytes=scale_bytes, scale_group=scale_group)

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
    "fp8_e5m2": FP8,
    "float8_e4m3fn": FP8,
    "float8_e5m2": FP8,
    "int8": INT8,
    "int4": INT4,
}


def dtype_named(name: str, *, field: str = "dtype") -> Dtype:
    """The dtype a user or a config names. Raises `ConfigError` listing the known names."""
    found = _ALIASES.get(str(name).removeprefix("torch.").lower())
    if found is None:
        raise ConfigError(field, name, f"unknown dtype; use one of {', '.join(sorted(_ALIASES))}")
    return found
