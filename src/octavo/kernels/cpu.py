"""Paged attention by octavo's own C++ kernels: `NativeAttention`.

Owns what stands between torch tensors and the extension `_native`: types and shapes are checked here,
addresses and strides handed on, one plan made per step and kind of layer. The arithmetic, the choice of
instruction set and the threads (torch's own OpenMP pool, never a second one) are native/'s.

Invariant: a sequence's result depends on its own chunk alone, bit for bit, whoever shares its batch and
however many threads there are. Positions that a query does not see are never read.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from octavo.errors import ConfigError
from octavo.kernels.interface import AttentionRule, AttentionStep, Pages
from octavo.kernels.settled import settled
from octavo.memory.layout import BlockOrder

_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_QUANTISED = {torch.int8: 3, torch.float8_e4m3fn: 4}
MOST_DIM = 1024


def load_native() -> Any | None:
    """The extension module, or None where it was not built. torch comes first: its threads are the ones used."""
    try:
        return importlib.import_module("octavo.kernels._native")
    except ImportError:
        return None


def instruction_sets() -> tuple[str, ...]:
    """What runs on this processor, the fastest first; empty where nothing was built."""
    native = load_native()
    return () if native is None else tuple(native.instruction_sets())


class NativeAttention:
    """See the module docstring. One instance belongs to one executor: it reuses scratch memory."""

    name = "cpu"
    block_order: BlockOrder = "heads_tokens"
    reads_whole_blocks = False

    def __init__(self, instruction_set: str | None = None, threads: int | None = None) -> None:
        native = load_native()
        if native is None:
            raise ConfigError("attention_backend", "cpu", "the native kernels were not built; use auto or reference")
        known = native.instruction_sets()
        if instruction_set is not None and instruction_set not in known:
            raise ConfigError("instruction_set", instruction_set, f"this processor runs {', '.join(known)}")
        self._native = native
        self._kernels = native.Kernels(instruction_set or known[0])
        self._threads = threads
        self._pages: dict[int, tuple[Pages, Any]] = {}

    @property
    def instruction_set(self) -> str:
        name: str = self._kernels.name
        return name

    @property
    def scratch_bytes(self) -> int:
        """Memory that the kernels keep between calls: this backend's, and that of the process's threads."""
        own: int = self._kernels.bytes
        shared: int = self._native.thread_bytes()
        return own + shared

    @property
    def threads(self) -> int:
        return self._threads or torch.get_num_threads()

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: Pages, step: AttentionStep) -> None:
        k, v = _rows(k), _rows(v)
        if k.dtype is not v.dtype:
            raise ConfigError("value", v.dtype, f"must have the type of the key, {k.dtype}")
        if not k.shape[0] == v.shape[0] == step.write_blocks.shape[0] == step.write_offsets.shape[0]:
            raise ConfigError("key", tuple(k.shape), f"the step writes {step.write_blocks.shape[0]} tokens")
        if k.shape[1:] != self._inner(pages.k) or v.shape[1:] != self._inner(pages.v):
            raise ConfigError("key", tuple(k.shape), f"the pages hold {tuple(self._inner(pages.k))} a token")
        self._kernels.write(
            self.bound(pages),
            _number("key", k.dtype),
            k.data_ptr(),
            k.stride(0),
            k.stride(1),
            v.data_ptr(),
            v.stride(0),
            v.stride(1),
            step.write_blocks.data_ptr(),
            step.write_offsets.data_ptr(),
            k.shape[0],
            self.threads,
        )

    def attend(
        self,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        pages: Pages,
        step: AttentionStep,
        rule: AttentionRule,
    ) -> torch.Tensor:
        q = _rows(q)
        tokens, heads, dim = q.shape
        kv_heads, k_dim = self._inner(pages.k)
        if dim != k_dim or heads % kv_heads or tokens != step.offsets[-1]:
            wanted = f"the step has {step.offsets[-1]} tokens, the pages {kv_heads} heads of {k_dim}"
            raise ConfigError("query", tuple(q.shape), wanted)
        number = _number("query", q.dtype)
        sinks = None if rule.sinks is None else rule.sinks.detach().to(torch.float32).contiguous()
        if sinks is not None and sinks.numel() != heads:
            raise ConfigError("sinks", tuple(sinks.shape), f"there are {heads} query heads")
        out = torch.empty((tokens, heads, pages.v.shape[-1]), dtype=q.dtype)
        self._kernels.attend(
            self.plan(step, rule, heads // kv_heads, kv_heads),
            self.bound(pages),
            number,
            q.data_ptr(),
            q.stride(0),
            q.stride(1),
            out.data_ptr(),
            rule.scale,
            rule.softcap or 0.0,
            0 if sinks is None else sinks.data_ptr(),
            self.threads,
        )
        return out

    def _inner(self, view: torch.Tensor) -> torch.Size:
        """(kv_heads, dim) of a view [units, kv_heads, block_tokens, dim]."""
        return torch.Size((view.shape[1], view.shape[3]))

    def plan(self, step: AttentionStep, rule: AttentionRule, group: int, kv_heads: int) -> Any:
        """The step's work for one kind of layer, cut once a step."""
        key = ("cpu", rule.window, rule.chunk_tokens, group, kv_heads)
        plan = step.memo.get(key)
        if plan is None:
            plan = self._native.Plan(
                np.ascontiguousarray(step.rows),
                np.ascontiguousarray(step.offsets),
                np.ascontiguousarray(step.starts),
                np.ascontiguousarray(step.contexts),
                np.ascontiguousarray(step.tables),
                step.block_tokens,
                rule.window or 0,
                rule.chunk_tokens or 0,
                group,
                kv_heads,
            )
            step.memo[key] = plan
        return plan

    def bound(self, pages: Pages) -> Any:
        """The pages as the extension knows them, made once: their addresses never change."""
        found = self._pages.get(id(pages))
        if found is None or found[0] is not pages:
            found = (pages, self._bind(pages))
            self._pages[id(pages)] = found
        return found[1]

    def _bind(self, pages: Pages) -> Any:
        k, v, scales = pages.k, pages.v, (pages.k_scales, pages.v_scales)
        number = _QUANTISED.get(k.dtype) if pages.quantised else _number("pages", k.dtype)
        same = k.dtype is v.dtype and k.shape[:3] == v.shape[:3] and k.stride(0) == v.stride(0)
        plain = k.dim() == 4 and k.device.type == "cpu" and k.stride(3) == v.stride(3) == 1
        if number is None or not (same and plain and max(k.shape[3], v.shape[3]) <= MOST_DIM):
            wanted = f"[units, kv_heads, block_tokens, dim] on the CPU for keys and values alike, dims up to {MOST_DIM}"
            raise ConfigError("pages", (tuple(k.shape), tuple(v.shape)), wanted)
        strides = [part.stride(axis) * part.element_size() for part in (k, v) for axis in (1, 2)]
        units, unit_bytes = min(k.shape[0], v.shape[0]), k.stride(0) * k.element_size()
        addresses = [k.data_ptr(), v.data_ptr(), 0, 0]
        if scales[0] is None or scales[1] is None:
            strides += [0, 0]
        else:
            if scales[0].stride() != scales[1].stride() or scales[0].stride(0) * 4 != unit_bytes:
                raise ConfigError("pages", scales[0].stride(), "scales must lie in the blocks of their values")
            units = min(units, scales[0].shape[0], scales[1].shape[0])
            strides += [scales[0].stride(axis) * 4 for axis in (1, 2)]
            addresses[2:] = [scales[0].data_ptr(), scales[1].data_ptr()]
        sizes = [k.shape[1], k.shape[2], k.shape[3], v.shape[3]]
        return self._native.Pages(number, addresses, units, unit_bytes, strides, sizes)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] with the elements of a row side by side."""
    if tensor.device.type != "cpu":
        raise ConfigError("attention_backend", "cpu", f"its kernels do not read tensors on {tensor.device}")
    tensor = settled(tensor)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _number(what: str, dtype: torch.dtype) -> int:
    number = _NUMBERS.get(dtype)
    if number is None:
        raise ConfigError(what, dtype, "the native kernels read float32, bfloat16 and float16")
    return number
