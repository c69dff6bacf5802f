"""What a quantised checkpoint does to weights: which are packed, in how many bits, with which scales.

Read from `quantization_config` by its method and numbers, never by a model's name. Each method packs
the matrices of linear layers; embeddings, the head, norms, routers and biases stay as they are, and
so does what the config lists as not converted. The arithmetic per weight is in `Packing`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from octavo.errors import ConfigError
from octavo.geometry.fields import checked_integer


@dataclass(frozen=True, slots=True)
class Packing:
    """Bits of one weight, and the bits of what a group of `group` weights shares (scales, zero points)."""

    name: str
    bits: int
    group: int = 0
    """0: one group is a whole matrix, and its scale is not counted."""
    group_bits: int = 0

    def bytes_for(self, weights: int) -> int:
        shared = -(-weights // self.group) * self.group_bits if self.group else 0
        return -(-(weights * self.bits + shared) // 8)


MXFP4 = Packing("mxfp4", 4, 32, 8)
NVFP4 = Packing("nvfp4", 4, 16, 8)
FP8_TENSOR = Packing("fp8", 8)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the linear matrices of a checkpoint are packed: all in one way, or some by name in their own."""

    method: str
    packing: Packing | None
    """None: nothing is packed but what `by_name` lists."""
    spared: tuple[str, ...] = ()
    """Names, prefixes or patterns of what is not converted."""
    by_name: tuple[tuple[str, Packing], ...] = ()
    experts_only: bool = False
    experts: Packing | None = None
    """How routed experts are packed, where they differ from the rest."""

    def packing_of(self, name: str) -> Packing | None:
        """How a matrix is packed, by its name with the layer's number in it; None if it is not."""
        for listed, packing in self.by_name:
            if _names(listed, name):
                return packing
        if self.packing is None or (self.experts_only and ".experts." not in name):
            return None
        if any(_names(listed, name) for listed in self.spared):
            return None
        return self.experts if self.experts is not None and ".experts." in name else self.packing


def quantisation_of(config: Mapping[str, Any]) -> Quantisation | None:
    """The checkpoint's quantisation, or None for a plain one. Raises `ConfigError` for a method not known."""
    found = config.get("quantization_config")
    for nested in ("text_config", "llm_config", "language_config"):
        inner = config.get(nested)
        if found is None and isinstance(inner, Mapping):
            found = inner.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ConfigError("quantization_config", found, "must be an object")
    method = str(found.get("quant_method", "")).lower()
    spared = _spared(found)
    if method == "fp8":
        narrow = str(found.get("expert_dtype") or config.get("expert_dtype") or "").startswith("fp4")
        return Quantisation("fp8", _blocked(found), spared, experts=MXFP4 if narrow else None)
    if method == "mxfp4":
        return Quantisation("mxfp4", MXFP4, spared, experts_only=True)
    if method in ("awq", "gptq"):
        return Quantisation(method, _grouped(found), spared)
    if method == "modelopt":
        return _modelopt(found, spared)
    if method == "compressed-tensors":
        return _compressed_tensors(found, spared)
    if method == "bitsandbytes":
        four = bool(found.get("load_in_4bit"))
        # 4 bits in blocks of 64 with a float32 maximum; 8 bits by rows
        return Quantisation(method, Packing("nf4", 4, 64, 32) if four else Packing("int8", 8), spared)
    raise ConfigError(
        "quantization_config.quant_method",
        method,
        "unknown; known are fp8, mxfp4, awq, gptq, modelopt, compressed-tensors, bitsandbytes; give --weights-bytes",
    )


def _spared(found: Mapping[str, Any]) -> tuple[str, ...]:
    listed: list[Any] = []
    for name in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "llm_int8_skip_modules"):
        value = found.get(name)
        if isinstance(value, (list, tuple)):
            listed.extend(value)
    return tuple(str(entry) for entry in listed)


def _blocked(found: Mapping[str, Any]) -> Packing:
    """FP8 with one float32 scale for each block of weights, or for the whole matrix."""
    block = found.get("weight_block_size")
    if block is None:
        return FP8_TENSOR
    if not isinstance(block, (list, tuple)) or len(block) != 2:
        raise ConfigError("quantization_config.weight_block_size", block, "must be two numbers, for example [128, 128]")
    name = "quantization_config.weight_block_size"
    return Packing("fp8", 8, checked_integer(name, block[0]) * checked_integer(name, block[1]), 32)


def _grouped(found: Mapping[str, Any]) -> Packing:
    """Integers with a 16-bit scale and a packed zero point for each group of weights."""
    bits = checked_integer("quantization_config.bits", found.get("bits", found.get("w_bit")))
    group = found.get("group_size", found.get("q_group_size"))
    if group in (None, -1):
        return Packing(f"int{bits}", bits)
    return Packing(f"int{bits}", bits, checked_integer("quantization_config.group_size", group), 16 + bits)


def _algorithm(name: str, value: Any) -> Packing | None:
    """A packing by the name that NVIDIA's tools give it."""
    text = str(value).upper()
    if text.startswith("NVFP4"):
        return NVFP4
    if text.startswith(("FP8", "W8A8_FP8")):
        return FP8_TENSOR
    if text.startswith(("INT8", "W8A8")):
        return Packing("int8", 8)
    if text.startswith(("INT4", "W4A16", "W4A8")):
        return Packing("int4", 4, 128, 16)
    raise ConfigError(name, value, "unknown quantisation; give --weights-bytes")


def _modelopt(found: Mapping[str, Any], spared: tuple[str, ...]) -> Quantisation:
    algorithm = found.get("quant_algo")
    listed = found.get("quantized_layers")
    if isinstance(listed, Mapping):
        own = tuple(
            (
                str(name),
                _algorithm("quantized_layers", entry.get("quant_algo") if isinstance(entry, Mapping) else entry),
            )
            for name, entry in listed.items()
        )
        return Quantisation("modelopt", None, spared, tuple((n, p) for n, p in own if p is not None))
    return Quantisation("modelopt", _algorithm("quantization_config.quant_algo", algorithm), spared)


def _compressed_tensors(found: Mapping[str, Any], spared: tuple[str, ...]) -> Quantisation:
    groups = found.get("config_groups")
    weights = next(
        (group["weights"] for group in (groups or {}).values() if isinstance(group, Mapping) and group.get("weights")),
        None,
    )
    if not isinstance(weights, Mapping):
        raise ConfigError("quantization_config.config_groups", groups, "names no weights; give --weights-bytes")
    bits = checked_integer("quantization_config.config_groups.weights.num_bits", weights.get("num_bits"))
    kind = "fp" if weights.get("type") == "float" else "int"
    group = weights.get("group_size")
    if isinstance(group, int) and group > 0:
        scale = 8 if kind == "fp" and bits == 4 else 16
        return Quantisation("compressed-tensors", Packing(f"{kind}{bits}", bits, group, scale), spared)
    return Quantisation("compressed-tensors", Packing(f"{kind}{bits}", bits), spared)


def _names(listed: str, name: str) -> bool:
    """Whether an entry of such a list means a parameter: `re:` patterns, wildcards, a part, or a prefix."""
    if listed.startswith("re:"):
        try:
            return re.search(listed[3:], name) is not None
        except re.error as error:
            raise ConfigError("quantization_config.ignore", listed, f"is no regular expression: {error}") from None
    if "*" in listed:
        return fnmatchcase(name, listed) or fnmatchcase(name, f"*{_tail(listed)}*")
    tail = _tail(listed)
    return f".{tail}." in f".{name}." if tail else False


def _tail(listed: str) -> str:
    """The entry from the layers on, since checkpoints and classes begin their names differently."""
    match = re.search(r"(?:^|\.)((?:layers|blocks|h)\..*)$", listed)
    return match[1] if match else listed.removeprefix("model.").removeprefix("language_model.")
