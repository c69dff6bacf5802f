"""From a plan to what the forward pass needs: `StepTensors` makes `StepInputs`.

Owns the executor's mirror of the block tables (per group, kept up from the plan's diffs alone)
and the last token each row sampled. Does not own slots, bytes or models.

    plan order:    chunk 0 (37 tokens)   chunk 1 (1)   chunk 2 (1)
    packed order:  chunk 2, chunk 1 | chunk 0           decodes first, longest context first

Packing is free, because attention is the only place where tokens meet; results go back in the plan's order.
Where every chunk is the token that follows the one of the step before, as in most steps, what changed is changed
in place: inputs hold until the next ones are built.

Invariant: a table entry at or past a row's `blocks` is never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import InvariantViolation
from octavo.kernels.interface import AttentionStep
from octavo.models.recurrent import StateStep
from octavo.runtime.arena import Arena
from octavo.scheduling.plan import PENDING, NewBlocks, StepPlan

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One forward pass: tensors on the device, and how its results map back to the plan. Holds until the next."""

    token_ids: torch.Tensor
    """int64 [1, tokens], packed."""
    positions: torch.Tensor
    """int64 [1, tokens], packed."""
    keep: torch.Tensor
    """int64 [samples]: the packed token whose logits are wanted, for each sampling chunk in plan order."""
    sampling: Int64
    """The plan's chunks that sample."""
    steps: tuple[AttentionStep, ...]
    """One per group; that of constant state says only whose chunks there are."""
    states: StateStep | None
    """Where the chunks' constant states lie, in a model that has them."""


class _Rows:
    """Numbers that are changed in place, and the tensor that shows them: they themselves on a CPU, else a copy."""

    def __init__(self, array: Int64, device: torch.device) -> None:
        self.array = array
        self._device = device
        self._own = torch.from_numpy(array)

    def shown(self) -> torch.Tensor:
        return self._own if self._device.type == "cpu" else self._own.to(self._device)


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """A plan's chunks as they are packed, in arrays that a step which goes on from there changes in place."""

    same: tuple[bytes, bytes, bytes]
    """The plan's rows, counts and samples: so has whoever goes on."""
    coming: npt.NDArray[np.int32]
    """In plan order, where each chunk goes on."""
    decodes: int
    gather: Int64
    """Of each packed token, its place in the plan's."""
    token_rows: Int64
    rows: Int64
    offsets: Int64
    starts: Int64
    contexts: Int64
    ids: _Rows
    positions: _Rows
    places: tuple[tuple[_Rows, _Rows], ...]
    """Per group, the block that each packed token is written to and its place in there."""
    sampling: Int64
    keep: torch.Tensor

    def goes_on(self, plan: StepPlan) -> bool:
        """Whether each of the plan's chunks is one token, and follows the one that the same chunk was."""
        if self.decodes < len(self.rows) or plan.starts.tobytes() != self.coming.tobytes():
            return False
        return self.same == _same(plan)

    def go_on(self) -> None:
        for part in (self.coming, self.starts, self.contexts, self.positions.array):
            part += 1


def _same(plan: StepPlan) -> tuple[bytes, bytes, bytes]:
    return plan.rows.tobytes(), plan.counts.tobytes(), plan.samples.tobytes()


class _Table:
    """One group's tables, [rows, blocks] in units of the arena, growing in both directions as needed."""

    def __init__(self, rows: int) -> None:
        self.units = np.zeros((rows, 16), dtype=np.int32)

    def put(self, rows: npt.NDArray[np.int32], indices: npt.NDArray[np.int32], units: npt.NDArray[np.int32]) -> None:
        highest = int(indices.max()) + 1
        if highest > self.units.shape[1]:
            wider = np.zeros((self.units.shape[0], max(highest, 2 * self.units.shape[1])), dtype=np.int32)
            wider[:, : self.units.shape[1]] = self.units
            self.units = wider
        self.units[rows, indices] = units


class StepTensors:
    """See the module docstring. `rows` is the size of the running set.

    `clears`: whether what a step does not fill of a new block is zeroed, for kernels that read whole blocks.
    """

    def __init__(self, arena: Arena, rows: int, *, clears: bool = True) -> None:
        self._arena = arena
        self._clears = clears
        self._device = arena.device
        self._tables = [_Table(rows) for _ in arena.layout.groups]
        self._constant = next((i for i, group in enumerate(arena.layout.groups) if group.block_tokens == 0), None)
        self._computed = np.zeros(rows, dtype=np.int64)
        self._packed: _Packed | None = None
        self.last_tokens = np.zeros(rows, dtype=np.int32)
        """The token each row sampled last: what PENDING stands for."""

    def build(self, plan: StepPlan) -> StepInputs:
        """Apply the plan's diffs and lay out its chunks. What was built before holds no longer."""
        self._apply(plan)
        packed = self._packed
        if packed is not None and packed.goes_on(plan):
            packed.go_on()
        else:
            packed = self._packed = self._pack(plan)
        self._computed[packed.rows] = packed.contexts
        self._fill(packed, plan)
        return StepInputs(
            packed.ids.shown()[None],
            packed.positions.shown()[None],
            packed.keep,
            packed.sampling,
            tuple(self._attention_step(group, packed) for group in range(len(self._tables))),
            self._state_step(packed),
        )

    def _pack(self, plan: StepPlan) -> _Packed:
        starts, counts = plan.starts.astype(np.int64), plan.counts.astype(np.int64)
        contexts = starts + counts
        first = np.cumsum(counts) - counts
        order, decodes = _packing(counts, contexts)
        rows, starts, counts = plan.rows[order].astype(np.int64), starts[order], counts[order]
        offsets = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        running = np.arange(offsets[-1])
        ends = np.empty(len(order), dtype=np.int64)
        ends[order] = offsets[1:] - 1
        sampling = np.flatnonzero(plan.samples)
        return _Packed(
            same=_same(plan),
            coming=plan.starts + plan.counts,
            decodes=decodes,
            gather=running + np.repeat(first[order] - offsets[:-1], counts),
            token_rows=np.repeat(rows, counts),
            rows=rows,
            offsets=offsets,
            starts=starts,
            contexts=contexts[order],
            ids=self._rows(len(running)),
            positions=_Rows(running + np.repeat(starts - offsets[:-1], counts), self._device),
            places=tuple((self._rows(len(running)), self._rows(len(running))) for _ in self._tables),
            sampling=sampling,
            keep=self._to_device(ends[sampling]),
        )

    def _rows(self, tokens: int) -> _Rows:
        return _Rows(np.zeros(tokens, dtype=np.int64), self._device)

    def _fill(self, packed: _Packed, plan: StepPlan) -> None:
        """Tokens, and where their keys and values go: what differs from step to step in no simple way."""
        ids = packed.ids.array
        ids[:] = plan.token_ids[packed.gather]
        pending = ids == PENDING
        if pending.any():
            ids[pending] = self.last_tokens[packed.token_rows[pending]]
        for table, group, place in zip(self._tables, self._arena.layout.groups, packed.places, strict=True):
            blocks, inside = place[0].array, place[1].array
            if group.block_tokens:
                np.divmod(packed.positions.array, group.block_tokens, out=(blocks, inside))
                blocks[:] = table.units[packed.token_rows, blocks]
            else:
                blocks[:] = table.units[packed.token_rows, 0]

    def _state_step(self, packed: _Packed) -> StateStep | None:
        if self._constant is None:
            return None
        units = self._tables[self._constant].units[packed.rows, 0].astype(np.int64)
        starting = packed.starts == 0
        # Single tokens come longest context first, so those that start their sequences are the last of them.
        going_on = packed.decodes - int(np.count_nonzero(starting[: packed.decodes]))
        return StateStep(going_on, tuple(packed.offsets.tolist()), tuple(starting.tolist()), self._to_device(units))

    def _attention_step(self, group: int, packed: _Packed) -> AttentionStep:
        blocks, inside = packed.places[group]
        return AttentionStep(
            block_tokens=self._arena.layout.groups[group].block_tokens,
            decodes=packed.decodes,
            rows=packed.rows,
            offsets=packed.offsets,
            starts=packed.starts,
            contexts=packed.contexts,
            tables=self._tables[group].units,
            write_blocks=blocks.shown(),
            write_offsets=inside.shown(),
        )

    def _apply(self, plan: StepPlan) -> None:
        """Enter new blocks, fill those that begin as copies, and make what is left of them safe to read."""
        for admission in plan.admissions:
            self._computed[admission.row] = admission.computed
        taken = [blocks for blocks in plan.new_blocks if len(blocks.rows)]
        for blocks in taken:
            self._tables[blocks.group].put(blocks.rows, blocks.indices, self._arena.units(blocks.group, blocks.slots))
        if self._constant is not None:
            for row in plan.rows[plan.starts == 0]:
                self._arena.clear(self._constant, int(self._tables[self._constant].units[row, 0]))
        for copies in plan.copies_before:
            self._arena.copy(copies.group, copies.sources, copies.targets)
        if taken and self._clears:
            starts = self._computed.copy()
            starts[plan.rows] = plan.starts
            ends = starts.copy()
            ends[plan.rows] += plan.counts
            for blocks in taken:
                self._clear(blocks, starts, ends)

    def _clear(self, blocks: NewBlocks, starts: Int64, ends: Int64) -> None:
        """Zero what this step will not fill of new blocks.

        Attention gathers whole blocks and gives hidden positions weight zero, which is no
        protection from an infinity or a NaN that a former owner left there.
        """
        block_tokens = self._arena.layout.groups[blocks.group].block_tokens
        if not block_tokens:
            return
        units = self._tables[blocks.group].units[blocks.rows, blocks.indices]
        begins = blocks.indices.astype(np.int64) * block_tokens
        for i in np.flatnonzero(ends[blocks.rows] < begins + block_tokens):
            valid = int(starts[blocks.rows[i]] - begins[i])
            if valid < block_tokens:
                self._arena.clear(blocks.group, int(units[i]), max(0, valid))

    def _to_device(self, array: Int64) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)


def _packing(counts: Int64, contexts: Int64) -> tuple[Int64, int]:
    """The order in which chunks are packed, and how many of them are single tokens."""
    if len(counts) and counts.min() < 1:
        raise InvariantViolation("plan", f"a chunk of {int(counts.min())} tokens was scheduled")
    longer = counts > 1
    order = np.lexsort((np.arange(len(counts)), np.where(longer, 0, -contexts), longer))
    return order, int(len(counts) - np.count_nonzero(longer))
