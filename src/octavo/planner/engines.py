"""Which engine charges, and what is known of how its version charges: names, versions, element types.

Owns the reading of `vllm-0.11`, `sglang`, `llamacpp-2025-10`, and the facts that depend on engine and
version alone. A version may be a release or a month. No fact here names a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16, FP8, FP16, FP32, Dtype, dtype_named
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import (
    INDEX,
    Borrowed,
    Component,
    Compound,
    Compressed,
    Constant,
    LayerState,
    Stateless,
    parts_of,
)

ENGINES = ("octavo", "vllm", "sglang", "trtllm", "llamacpp")
_SPELLED = {
    "tensorrt-llm": "trtllm", "trt-llm": "trtllm", "tensorrtllm": "trtllm", "llama.cpp": "llamacpp",
    "llama-cpp": "llamacpp", "ik-llama.cpp": "llamacpp", "ollama": "llamacpp", "llama-cpp-python": "llamacpp",
}  # fmt: skip
_LATEST = (999,)
_VLLM_MONTHS = (
    (2023_06, (0, 1)), (2024_01, (0, 2, 7)), (2024_07, (0, 5, 3)), (2024_09, (0, 6)), (2025_01, (0, 7)),
    (2025_03, (0, 8)), (2025_05, (0, 9)), (2025_06, (0, 9, 1)), (2025_07, (0, 10)), (2025_10, (0, 11)),
    (2025_12, (0, 12)), (2026_01, (0, 14)), (2026_02, (0, 16)), (2026_03, (0, 17)), (2026_04, (0, 19)),
    (2026_05, (0, 20)), (2026_06, (0, 21)),
)  # fmt: skip
"""From which month on which release was current; a month beyond the last is the latest."""

LLAMA_DTYPES: Mapping[str, Dtype] = {
    "f32": FP32,
    "f16": FP16,
    "bf16": BF16,
    "q8_0": Dtype("q8_0", 8, scale_bytes=2, scale_group=32),
    "q8_kv": Dtype("q8_kv", 8, scale_bytes=8),
    "q5_1": Dtype("q5_1", 5, scale_bytes=4, scale_group=32),
    "q5_0": Dtype("q5_0", 5, scale_bytes=2, scale_group=32),
    "q4_1": Dtype("q4_1", 4, scale_bytes=4, scale_group=32),
    "q4_0": Dtype("q4_0", 4, scale_bytes=2, scale_group=32),
    "iq4_nl": Dtype("iq4_nl", 4, scale_bytes=2, scale_group=32),
}
"""llama.cpp's types of K and V, with the scales that its blocks of 32 values carry."""

_BLOCK_SCALED = 128
"""Values that share a scale where latents are kept in fp8 beside an index."""


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    version: tuple[int, ...] = _LATEST

    def since(self, *version: int) -> bool:
        return self.version >= version

    @property
    def label(self) -> str:
        return self.name if self.version == _LATEST else f"{self.name} {'.'.join(map(str, self.version))}"


def engine_named(text: str) -> Engine:
    """`vllm`, `vllm-0.11`, `vllm 0.2x`, `sglang-2025-10`; without a version the newest known rules."""
    plain = text.strip().lower().replace("_", "-")
    for spelled, ours in _SPELLED.items():
        if plain.startswith(spelled):
            plain = ours + plain[len(spelled) :]
            break
    match = re.match(r"([a-z]+)(?:[\s/~-]+v?(.*\d.*)|v?(\d.*))?$", plain)
    name = match.group(1) if match else plain
    if name not in ENGINES:
        raise ConfigError("engine", text, f"use one of {', '.join(ENGINES)}, with a version if it matters: vllm-0.11")
    return Engine(name, version_of(name, match.group(2) or match.group(3) or "") if match else _LATEST)


def version_of(name: str, text: str) -> tuple[int, ...]:
    """A release (0.11.2, 0.10.x, ~0.6.4) or a month (2025-10) as numbers; nothing known: the newest."""
    month = re.search(r"\b(20\d\d)-(\d\d)\b", text)
    if re.search(r"\bdev\d{4,}", text):
        return _LATEST  # a nightly build, whatever number stands before
    release = re.search(r"(?<![\d-])(\d{1,2})\.(\d+)(x?)(?:\.(\d+))?", text)
    if release:
        major, minor = int(release.group(1)), int(release.group(2))
        if release.group(3):
            return (major, minor * 10 + 9)
        return (major, minor, int(release.group(4))) if release.group(4) else (major, minor)
    if month and name == "vllm":
        found = int(month.group(1)) * 100 + int(month.group(2))
        known = [version for since, version in _VLLM_MONTHS if since <= found]
        return known[-1] if known else _VLLM_MONTHS[0][1]
    if month:
        return (int(month.group(1)), int(month.group(2)))
    return _LATEST


def padded_experts(engine: Engine) -> tuple[str, int, int] | None:
    """A packing whose experts grow when they are loaded, and the multiples of hidden size and width they grow to.

    vLLM's default kernels of MXFP4 take outputs in 256s and inputs in 128s, and every matrix with the hidden size
    has it as an output or as an input.
    """
    return ("mxfp4", 256, 128) if engine.name == "vllm" else None


def kv_dtype_named(engine: Engine, asked: str) -> Dtype:
    """The element type of keys and values as the engine understands its name."""
    name = asked.lower()
    if name in LLAMA_DTYPES and (engine.name == "llamacpp" or name in ("f16", "f32")):
        return LLAMA_DTYPES[name]
    if name in LLAMA_DTYPES and name != "bf16":
        raise ConfigError("kv_dtype", asked, "is a type of llama.cpp; add --engine llamacpp, or use fp8, int8 or bf16")
    return dtype_named(name, field="kv_dtype")


def own_kv_dtype(engine: Engine, geometry: ModelGeometry, own: Dtype, *, computes_fp4: bool) -> Dtype:
    """What `auto` means: the model's own type, except where an engine prefers another.

    SGLang keeps latents with an index in fp8 on devices of the generation that computes in fp4.
    """
    indexed = any(c.name.startswith(INDEX) for part in geometry.parts for c in _components(part))
    if engine.name == "sglang" and computes_fp4 and indexed and "latent" in geometry.components:
        return FP8
    return FP16 if engine.name == "llamacpp" else own


def as_kept_by(engine: Engine, geometry: ModelGeometry, dtype: Dtype, recurrent: Dtype | None = None) -> ModelGeometry:
    """The geometry with the element types in which `engine` keeps each component.

    `geometry` is in an unquantised type. octavo keeps a scale per token and head; vLLM, SGLang and
    TensorRT-LLM one scale per tensor; latents in fp8 beside an index carry a scale for 128 values and
    keep the rotary key in bf16; an index is in fp8 whatever the latents are in; llama.cpp keeps recurrent
    state and convolutions in float32, and beside keys and values gives an index values as well.
    `recurrent` is the type of recurrences where the engine has one of its own.
    """
    if engine.name == "octavo":
        return geometry
    indexed = any(c.name.startswith(INDEX) for part in geometry.parts for c in _components(part))
    kept = _Kept(engine, dtype, FP32 if engine.name == "llamacpp" else recurrent, indexed)
    layers = tuple(_layer_kept(state, kept) for state in geometry.layers)
    return replace(geometry, layers=layers, kv_dtype=dtype, convention=engine.label)


def _components(part: LayerState) -> tuple[Component, ...]:
    return () if isinstance(part, (Borrowed, Stateless)) else part.components


@dataclass(frozen=True, slots=True)
class _Kept:
    """In what one engine keeps the components of one model."""

    engine: Engine
    dtype: Dtype
    recurrent: Dtype | None
    indexed: bool


def _layer_kept(state: LayerState, kept: _Kept) -> LayerState:
    if isinstance(state, (Borrowed, Stateless, Compressed)):
        return state
    if isinstance(state, Compound):
        parts = tuple(_layer_kept(part, kept) for part in parts_of(state))
        return Compound(tuple(p for p in parts if not isinstance(p, (Borrowed, Stateless, Compound))))
    if isinstance(state, Constant):
        return Constant(tuple(_constant_kept(c, kept) for c in state.components))
    components = state.components
    if kept.engine.name == "llamacpp":
        components = _index_values(_one_row(components))
    return replace(state, components=tuple(_component_kept(c, kept) for c in components))


def _constant_kept(component: Component, kept: _Kept) -> Component:
    if kept.engine.name == "llamacpp":
        return replace(component, dtype=FP32)
    own = kept.recurrent is not None and component.name == "recurrent"
    return replace(component, dtype=kept.recurrent) if own and kept.recurrent else component


def _one_row(components: tuple[Component, ...]) -> tuple[Component, ...]:
    """llama.cpp keeps a latent and its rotary key as one row, which matters where a row has a scale."""
    widths = {c.name: c.shape[-1] for c in components}
    if "latent" not in widths or "rope_k" not in widths:
        return components
    row = replace(components[0], shape=(widths["latent"] + widths["rope_k"],))
    return (row, *(c for c in components if c.name not in ("latent", "rope_k")))


def _index_values(components: tuple[Component, ...]) -> tuple[Component, ...]:
    """llama.cpp gives an index a cache like any other: beside keys and values of heads it has values of one head too.

    Nothing reads them. A latent has no values, and its index none either.
    """
    values = next((c for c in components if c.name == "v"), None)
    if values is None or not any(c.name.startswith(INDEX) for c in components):
        return components
    return (*components, Component(f"{INDEX}_v", (values.shape[-1],), values.dtype))


def _component_kept(component: Component, kept: _Kept) -> Component:
    return replace(component, dtype=_dtype_kept(component, kept))


def _dtype_kept(component: Component, kept: _Kept) -> Dtype:
    dtype, name = kept.dtype, kept.engine.name
    if component.name.startswith(INDEX) and name in ("vllm", "sglang"):
        return FP8.with_scales(4, _BLOCK_SCALED)
    if dtype.name == FP8.name and kept.indexed and component.name == "latent":
        return FP8.with_scales(4, _BLOCK_SCALED)
    if dtype.name == FP8.name and kept.indexed and component.name == "rope_k":
        return BF16
    return dtype.with_scales(0) if dtype.quantised and name != "llamacpp" else dtype
