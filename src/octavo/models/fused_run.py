"""Fused layers over one executor's pages: `LayerPrograms`, and one step through them, `FusedRun`.

Owns the native programs of an executor, the rows that they share, and what they are told of each step: a plan
for each kind of attention, places to write to for each group, tables to turn by. Called by the forwards that
`fused` puts in the layers' place. Not for two threads at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from octavo.errors import ModelError
from octavo.kernels.cpu import NativeAttention, load_native
from octavo.kernels.interface import AttentionRule, AttentionStep, Pages
from octavo.kernels.layer import NUMBERS, NormWeights, Program
from octavo.kernels.settled import settled
from octavo.models.fused_layer import FusedLayer
from octavo.models.fused_stack import Stack

_NONE = torch.zeros(1, dtype=torch.int64)
"""Stands for the addresses of no rows."""


class LayerPrograms:
    """See the module docstring."""

    def __init__(
        self,
        layers: Mapping[int, FusedLayer],
        backend: NativeAttention,
        pages: Mapping[int, Pages],
        group_of: Mapping[int, int],
        whole: Stack | None = None,
    ) -> None:
        native: Any = load_native()
        self.layers = dict(layers)
        self.whole = whole
        """What surrounds the layers, if that runs here too."""
        self._logits = torch.empty(0)
        self.native = native
        self.kernels = native.Layers(backend.instruction_set)
        self.stack = native.LayerStack(backend.instruction_set)
        self.place = {number: place for place, number in enumerate(self.layers)}
        self._backend = backend
        self._kinds: dict[tuple[int, int | None, int | None, int, int], tuple[int, AttentionRule]] = {}
        self._groups: list[int] = []
        self._programs: list[Program] = []
        self._segments = _segments(list(self.layers.values()))
        first = next(iter(self.layers.values()))
        self.hidden, self.dtype = first.packed.output.out_features, first.dtype
        self.threads = backend.threads
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for layer in self.layers.values():
            own = pages[layer.kv_layer]
            group = group_of[layer.kv_layer]
            if group not in self._groups:
                self._groups.append(group)
            kv_heads = int(own.k.shape[1])
            rule = layer.rule
            key = (group, rule.window, rule.chunk_tokens, layer.q_heads // kv_heads, kv_heads)
            plan, _ = self._kinds.setdefault(key, (len(self._kinds), rule))
            of_step = [plan, self._groups.index(group), layer.table]
            program = layer.program(backend.instruction_set, backend.bound(own), of_step)
            self.stack.add(program.native)
            self._programs.append(program)
            self._last_kind = key, rule

    def begin(self, steps: tuple[AttentionStep, ...], rows: int) -> FusedRun:
        """What the layers are told of one step of `rows` packed tokens."""
        told = self.native.LayerStep(rows, self._backend.threads)
        for (group, _, _, share, kv_heads), (_, rule) in self._kinds.items():
            told.plan(self._backend.plan(steps[group], rule, share, kv_heads))
        for group in self._groups:
            told.write(steps[group].write_blocks.data_ptr(), steps[group].write_offsets.data_ptr())
        return FusedRun(self, told, *self._held(rows), steps)

    def tell_kept(self, told: Any, steps: tuple[AttentionStep, ...], keep: torch.Tensor, rows: int) -> int:
        """That the last layer stores keys and values of all rows and goes on with few. Returns how many attend."""
        if 4 * len(keep) > 3 * rows:
            return rows
        (group, _, _, share, kv_heads), rule = self._last_kind
        attend: int = told.last(self._backend.plan(steps[group], rule, share, kv_heads), *_address(keep))
        return attend

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, steps: tuple[AttentionStep, ...]
    ) -> torch.Tensor:
        """One packed row [1, tokens] -> logits [len(keep), vocabulary], which hold until the next call."""
        whole, rows = self._normed(token_ids, positions, keep, steps)
        vocabulary = whole.model.get_output_embeddings().out_features
        if len(self._logits) < max(1, len(rows)):  # the first step may keep no row at all
            self._logits = torch.empty((max(1, len(rows)), vocabulary))
        return whole.head(rows, self._logits[: len(rows)])

    def largest(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, steps: tuple[AttentionStep, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row of those logits the largest, and its token: see `Stack.finds_largest`."""
        whole, rows = self._normed(token_ids, positions, keep, steps)
        return whole.largest(rows)

    def _normed(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, steps: tuple[AttentionStep, ...]
    ) -> tuple[Stack, torch.Tensor]:
        """What the head is given: rows [len(keep), hidden]."""
        whole = self.whole
        if whole is None:
            raise ModelError("model", "layers", "what surrounds them is not fused; run the model's own forward")
        whole.tell(token_ids, keep)
        run = self.begin(steps, token_ids.shape[1])
        run.turn_all(whole, positions)
        rows = run.through(whole.embed(token_ids, positions), keep)
        normed = torch.empty_like(rows)
        number = NUMBERS[rows.dtype]
        self.kernels.residual(
            number, self.hidden, rows.data_ptr(), 0, 0, None, 1.0, 0, whole.norm.native, normed.data_ptr(), len(rows),
            self.threads,
        )  # fmt: skip
        return whole, normed

    def segments(self) -> list[tuple[int, int]]:
        """Runs of layers that need nothing of Python between them, first and behind the last."""
        return self._segments

    def _held(self, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows [1, rows, hidden] that every layer works on, and those that are handed to modules."""
        held = self._rows.get(rows)
        if held is None:
            if len(self._rows) >= 8:
                self._rows.clear()
            hands_on = any(layer.hands_on for layer in self.layers.values())
            x = torch.empty((1, rows, self.hidden), dtype=self.dtype)
            held = (x, torch.empty_like(x) if hands_on else None)
            self._rows[rows] = held
        return held


def _address(keep: torch.Tensor) -> tuple[int, int]:
    return keep.data_ptr() if len(keep) else _NONE.data_ptr(), len(keep)


def _segments(layers: list[FusedLayer]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number, layer in enumerate(layers):
        if found and layer.module is None and layers[number - 1].module is None:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


class FusedRun:
    """One step: see `LayerPrograms.begin`. The rows that it gives back are the next layer's to change."""

    def __init__(
        self,
        programs: LayerPrograms,
        told: Any,
        rows: torch.Tensor,
        handed: torch.Tensor | None,
        steps: tuple[AttentionStep, ...],
    ) -> None:
        self._programs = programs
        self._told = told
        self._rows = rows
        self._handed = handed
        self._steps = steps  # their arrays are what `told` points to
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(
        self,
        number: int,
        hidden: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor] | None,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer over rows [1, tokens, hidden] -> likewise, or those in `keep` alone."""
        programs = self._programs
        layer = programs.layers[number]
        if layer.wiring.rotary and layer.table not in self._tables:
            self._turn_by(layer.table, tables)
        hidden = settled(hidden).contiguous()
        handed = self._handed
        place = programs.place[number]
        kept = (0, 0) if keep is None else _address(keep)
        at = self._rows.data_ptr(), 0 if handed is None else handed.data_ptr()
        programs.stack.run(place, place + 1, self._told, hidden.data_ptr(), *at, *kept)
        out = self._rows if keep is None else self._rows[:, : len(keep)]
        if layer.module is not None and out.shape[1]:
            given = handed[:, : out.shape[1]] if layer.hands_on and handed is not None else out
            made = layer.module(given)
            made = made[0] if isinstance(made, tuple) else made
            self._add(out, settled(made).contiguous(), layer.last_norm, layer.parts.multiplier)
        return out

    def turn_all(self, whole: Stack, positions: torch.Tensor) -> None:
        """Every layer's tables, by position."""
        upto = int(positions.max()) + 1 if positions.numel() else 1
        for number, table in whole.tables.items():
            cos, sin = table.upto(upto)
            self._tables[number] = (cos, sin)
            at = (cos.data_ptr(), sin.data_ptr(), cos.stride(0), positions.data_ptr(), len(cos), NUMBERS[cos.dtype])
            self._told.table(number, *at)
        self._positions = positions

    def through(self, hidden: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """All layers over rows [1, tokens, hidden] -> [len(keep), hidden], the rows in `keep` alone."""
        programs, out = self._programs, self._rows
        programs.tell_kept(self._told, self._steps, keep, hidden.shape[1])
        for first, last in programs.segments():
            ends = last == len(programs.layers)
            if programs.layers[first].module is not None:
                hidden = self.layer(first, hidden, None, keep if ends else None)
                continue
            hidden = settled(hidden).contiguous()
            kept = _address(keep) if ends else (0, 0)
            programs.stack.run(first, last, self._told, hidden.data_ptr(), out.data_ptr(), 0, *kept)
            hidden = out
        return out[0, : len(keep)]

    def _turn_by(self, number: int, tables: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        if tables is None:
            raise ValueError("a layer that turns its heads was given no tables")
        cos, sin = (table if table.stride(-1) == 1 else table.contiguous() for table in tables)
        self._tables[number] = (cos, sin)
        self._told.table(number, cos.data_ptr(), sin.data_ptr(), cos.stride(-2), 0, 0, NUMBERS[cos.dtype])

    def _add(self, rows: torch.Tensor, delta: torch.Tensor, norm: NormWeights | None, by: float) -> None:
        at = rows.data_ptr()
        before = None if norm is None else norm.native
        self._programs.kernels.residual(
            NUMBERS[rows.dtype],
            rows.shape[-1],
            at,
            delta.data_ptr(),
            0,
            before,
            by,
            at,
            None,
            0,
            rows.shape[-2],
            self._programs.threads,
        )
