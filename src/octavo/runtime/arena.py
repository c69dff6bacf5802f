"""The bytes of one tier: a single allocation, seen through typed views per layer and component.

Owns the memory and its addressing (`Layout.address` in tensor form). Does not know who holds
which slot: that is `memory`. A "unit" is where a block may start, counted in steps that divide
both the block and the slab, so that one strided view reaches every slot even where slabs carry
padding; in the common case of one block a slab, the unit of a slot is the slot itself.

Invariant: the arena starts as zeros, and whatever is cleared is zeros again, in every layer.
"""

from __future__ import annotations

import mmap
from math import gcd, prod

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import ConfigError
from octavo.geometry.dtypes import Dtype
from octavo.geometry.state import Component
from octavo.kernels.interface import Pages
from octavo.kernels.latent import Kept, LatentPages
from octavo.memory.layout import Field, Layout
from octavo.models.recurrent import LayerSlots, convolution_shape, numbered_states

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
QUANTISED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Kept with float32 scales, one for each row of the last axis: behind the values of the same block."""


class Arena:
    """`n_slabs` slabs of `layout` on `device`."""

    def __init__(self, layout: Layout, n_slabs: int, device: torch.device | str = "cpu") -> None:
        if n_slabs < 1:
            raise ConfigError("n_slabs", n_slabs, "the KV cache needs at least one slab; give it more memory")
        self.layout = layout
        self.n_slabs = n_slabs
        self.device = torch.device(device)
        self.huge_pages = False
        self._unit_bytes = tuple(
            layout.slab_bytes if group.blocks_per_slab == 1 else gcd(layout.slab_bytes, group.block_bytes)
            for group in layout.groups
        )
        self.bytes = self._allocate(n_slabs * layout.slab_bytes)
        self._fields = {
            (field.layer, field.component): (index, field)
            for index, group in enumerate(layout.groups)
            for field in group.fields
        }

    def _allocate(self, size: int) -> torch.Tensor:
        if self.device.type != "cpu":
            return torch.zeros(size, dtype=torch.uint8, device=self.device)
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError("kv_cache_bytes", size, f"the machine does not grant that much memory: {error}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
                self.huge_pages = True
            except OSError:
                self.huge_pages = False  # the kernel was built without them: small pages serve as well, slower
        return torch.frombuffer(memory, dtype=torch.uint8)

    def view(self, layer: int, component: str) -> torch.Tensor:
        """[units, *field shape]: `view[u]` is the component's part of the block that starts at unit u."""
        index, field = self._fields[layer, component]
        return self._strided(index, field, field.offset_bytes, field.shape, _torch_dtype(field.dtype))

    def scales(self, layer: int, component: str) -> torch.Tensor | None:
        """[units, *field shape without its last axis]: a scale for each row of `view`; None where it has none."""
        index, field = self._fields[layer, component]
        if field.dtype.name not in QUANTISED:
            return None
        return self._strided(index, field, field.offset_bytes + prod(field.shape), field.shape[:-1], torch.float32)

    def _strided(
        self, index: int, field: Field, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        size = dtype.itemsize
        unit = self._unit_bytes[index]
        if unit % size or offset % size:
            raise ConfigError(
                "block_size",
                self.layout.groups[index].block_tokens,
                f"{field.component} of layer {field.layer} in {field.dtype} lies at byte {offset} of blocks that start "
                f"every {unit} bytes, which cannot be divided into elements of {size}; use a multiple of 4",
            )
        units = (self.bytes.numel() - self.layout.groups[index].block_bytes) // unit + 1  # the same for all of a group
        typed = self.bytes[: self.bytes.numel() // size * size].view(dtype)
        return typed.as_strided((units, *shape), (unit // size, *_contiguous_strides(shape)), offset // size)

    def pages(self, layer: int) -> Pages | LatentPages:
        """Keys and values of one layer of plain attention, or the latents and rotary keys of one of MLA."""
        if self.has_latent(layer):
            latent, rope_k = self._kept(layer, "latent"), self._kept(layer, "rope_k")
            size = self._token_bytes(layer, latent.rows, latent.scales, rope_k.rows, rope_k.scales)
            index = self._kept(layer, "index_k") if (layer, "index_k") in self._fields else None
            return LatentPages(latent, rope_k, size, index)
        if not self.has(layer):
            raise ConfigError("model", f"layer {layer}", "keeps no keys and values in this layout")
        k, v = self.view(layer, "k"), self.view(layer, "v")
        scales = (self.scales(layer, "k"), self.scales(layer, "v"))
        return Pages(k, v, self._token_bytes(layer, k, v, *scales), *scales)

    def slots(self, layer: int) -> LayerSlots:
        """The constant states of one layer, in the order of the states that its module numbers."""
        index, group = next((i, g) for i, g in enumerate(self.layout.groups) if g.block_tokens == 0)
        fields = {f.component: f for f in group.fields if f.layer == layer}
        convolutions, recurrences = numbered_states([Component(f.component, f.shape, f.dtype) for f in fields.values()])
        views = []
        for parts in (*convolutions, *recurrences):
            first = fields[parts[0].name]
            shape = convolution_shape(parts) if parts[0].name.startswith("conv") else first.shape
            views.append(self._strided(index, first, first.offset_bytes, shape, _torch_dtype(first.dtype)))
        return LayerSlots(tuple(views[: len(convolutions)]), tuple(views[len(convolutions) :]))

    def _kept(self, layer: int, component: str) -> Kept:
        return Kept(self.view(layer, component), self.scales(layer, component))

    def _token_bytes(self, layer: int, *parts: torch.Tensor | None) -> int:
        block_tokens = self.layout.groups[self.group_of(layer)].block_tokens
        block_bytes: int = sum(part[0].numel() * part.element_size() for part in parts if part is not None)
        return block_bytes // block_tokens

    def has(self, layer: int) -> bool:
        return (layer, "k") in self._fields and (layer, "v") in self._fields

    def has_latent(self, layer: int) -> bool:
        return (layer, "latent") in self._fields and (layer, "rope_k") in self._fields

    def group_of(self, layer: int) -> int:
        """The group in which a layer's attention keeps its state."""
        return self._fields[layer, "latent" if self.has_latent(layer) else "k"][0]

    def units(self, group: int, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Where the blocks of these slots start."""
        per_slab = self.layout.groups[group].blocks_per_slab
        if per_slab == 1:
            return slots
        wide = slots.astype(np.int64)
        addresses = wide // per_slab * self.layout.slab_bytes + wide % per_slab * self.layout.groups[group].block_bytes
        return (addresses // self._unit_bytes[group]).astype(np.int32)

    def copy(self, group: int, sources: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> None:
        """Copy whole blocks of a group, slot `sources[i]` to `targets[i]`; all are read before any is written."""
        unit, size = self._unit_bytes[group], self.layout.groups[group].block_bytes
        blocks = self.bytes.as_strided(((self.bytes.numel() - size) // unit + 1, size), (unit, 1))
        read, written = (
            torch.from_numpy(self.units(group, slots).astype(np.int64)).to(self.device) for slots in (sources, targets)
        )
        blocks[written] = blocks[read]

    def clear(self, group: int, unit: int, first_offset: int = 0) -> None:
        """Zero a block's positions from `first_offset` on, in all layers of the group."""
        layout = self.layout.groups[group]
        if first_offset == 0:
            start = unit * self._unit_bytes[group]
            self.bytes[start : start + layout.block_bytes].zero_()
            return
        for field in layout.fields:
            token_axis = 1 if self.layout.block_order == "heads_tokens" and len(field.shape) > 2 else 0
            for part in (self.view(field.layer, field.component), self.scales(field.layer, field.component)):
                if part is not None:
                    part[unit].narrow(token_axis, first_offset, layout.block_tokens - first_offset).zero_()


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _torch_dtype(dtype: Dtype) -> torch.dtype:
    found = TORCH_DTYPES.get(dtype.name) or QUANTISED.get(dtype.name)
    if found is None:
        known = ", ".join((*TORCH_DTYPES, *QUANTISED))
        raise ConfigError("kv_cache_dtype", dtype.name, f"not served yet; use one of {known}")
    return found
