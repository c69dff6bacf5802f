"""`TorchExecutor`: acts on step plans with a Transformers model over a paged arena.

Owns the arena, the mirror of the block tables and the order forward -> sample -> result. Decides
nothing: what runs and where it is stored is the plan's. Results are kept until collected.

Invariant: a chunk for which no token can be chosen (its logits are not finite, say) fails alone.
Its neighbours' tokens come from their own rows, and nothing it wrote is read by another sequence.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from octavo.errors import ConfigError, InvariantViolation
from octavo.kernels.interface import AttentionBackend
from octavo.kernels.latent import LatentPages
from octavo.kernels.reference import ReferenceAttention
from octavo.memory.layout import Layout
from octavo.memory.values import Int32, Int64
from octavo.models.bridge import Bridge, PagedCache
from octavo.models.fused import programs_of
from octavo.models.recurrent import SlotStates
from octavo.runtime.arena import Arena
from octavo.runtime.pool_pages import PoolPages
from octavo.runtime.step_tensors import StepInputs, StepTensors
from octavo.scheduling.plan import NO_TOKEN, Admission, StepPlan, StepResult, TokenLogprobs

_RULED_OUT = "every token is ruled out by the request's own parameters"
_NOT_FINITE = "the model's logits are not finite"


class RowSampler(Protocol):
    """What the executor asks of a sampler: state per row, one token per row of logits."""

    def admit(self, admission: Admission) -> None: ...

    def sample(self, logits: torch.Tensor, rows: Int64, positions: Int64) -> tuple[Int32, dict[int, TokenLogprobs]]:
        """A token for each row of `logits`, NO_TOKEN where none can be chosen.

        `positions` are those of the tokens being sampled; log-probabilities are keyed by row of `logits`.
        """
        ...

    def takes_largest(self, rows: Int64) -> bool:
        """Whether all these rows are given the token of their largest logit, the lowest of equals, and no more."""
        ...


class TorchExecutor:
    """See the module docstring. Everything lives on the device of the model."""

    def __init__(
        self,
        model: PreTrainedModel,
        layout: Layout,
        n_slabs: int,
        *,
        rows: int,
        sampler: RowSampler,
        clock: Callable[[], float] = time.monotonic,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.backend = ReferenceAttention() if backend is None else backend
        if layout.block_order != self.backend.block_order:
            remedy = f"the {self.backend.name} kernels read blocks in the order {self.backend.block_order}"
            raise ConfigError("block_order", layout.block_order, remedy)
        self.arena = Arena(layout, n_slabs, model.device)
        self._bridge = Bridge(model.eval())
        attending = [layer for group in layout.groups if group.block_tokens for layer in group.layers]
        keeping = [layer for group in layout.groups if not group.block_tokens for layer in group.layers]
        self._pages = {layer: self.arena.pages(layer) for layer in attending}
        self._group_of = {layer: self.arena.group_of(layer) for layer in attending}
        self._slots = {layer: self.arena.slots(layer) for layer in keeping}
        self._layers = programs_of(model, self.backend, self._pages, self._group_of, layout.groups)
        whole = self.backend.reads_whole_blocks or any(isinstance(p, LatentPages) for p in self._pages.values())
        self._tensors = StepTensors(self.arena, rows, clears=whole)
        self._sampler = sampler
        self._clock = clock
        self._results: deque[StepResult] = deque()
        self._pool_pages: PoolPages | None = None

    def ask_ahead(self, ahead_bytes: int, now_s: float = 0.0) -> None:
        """Have the pool's pages from the system before they are written, so many bytes ahead.

        For `now_s` seconds at most before this returns, and then while nothing runs.
        """
        if ahead_bytes > 0 and self.arena.device.type == "cpu":
            self._pool_pages = PoolPages(self.arena.bytes, ahead_bytes)
            self._pool_pages.ask_now(now_s)
            self._pool_pages.used(0)

    @property
    def model(self) -> PreTrainedModel:
        return self._bridge.model

    def submit(self, plan: StepPlan) -> None:
        """Run one plan. On every device the result is there when this returns."""
        pool = self._pool_pages
        if pool is None:
            self._run(plan)
            return
        pool.step_begins()
        for blocks in plan.new_blocks:
            if len(blocks.slots):
                pool.used(self.arena.layout.address(blocks.group, int(blocks.slots.max())))
        try:
            self._run(plan)
        finally:
            pool.step_ended()

    def _run(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._sampler.admit(admission)
        inputs = self._tensors.build(plan)
        tokens = np.full(plan.chunks, NO_TOKEN, dtype=np.int32)
        logprobs: dict[int, TokenLogprobs] = {}
        failures: tuple[tuple[int, str], ...] = ()
        if plan.chunks:
            with torch.inference_mode():
                if self._finds_largest(plan.rows[inputs.sampling]):
                    failures = self._largest(plan, inputs, tokens)
                else:
                    logits = self._forward(inputs)
                    if len(inputs.sampling):
                        logprobs, failures = self._sample(plan, inputs.sampling, logits, tokens)
        for blocks in plan.copies_after:
            self.arena.copy(blocks.group, blocks.sources, blocks.targets)
        self._results.append(StepResult(plan.number, tokens, self._clock(), logprobs, failures))

    def pretend(self, plan: StepPlan) -> None:
        """Take a plan as run without running it: tables and rows are kept up, nothing is computed, tokens are 0."""
        for admission in plan.admissions:
            self._sampler.admit(admission)
        self._tensors.build(plan)
        self._tensors.last_tokens[plan.rows[plan.samples]] = 0
        tokens = np.where(plan.samples, 0, NO_TOKEN).astype(np.int32)
        self._results.append(StepResult(plan.number, tokens, self._clock()))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def close(self) -> None:
        if self._pool_pages is not None:
            self._pool_pages.close()
        self._results.clear()

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        if self._layers is not None and self._layers.whole is not None:
            return self._layers.logits(inputs.token_ids, inputs.positions, inputs.keep, inputs.steps)
        cache = PagedCache(self.backend, self._pages, self._group_of, inputs.steps, self.arena.layout.groups)
        if self._layers is not None:
            cache.layers = self._layers.begin(inputs.steps, inputs.token_ids.shape[1])
        if inputs.states is not None:
            cache.slot_states = SlotStates(self._slots, inputs.states)
        return self._bridge.logits(inputs.token_ids, inputs.positions, inputs.keep, cache)

    def _sample(
        self, plan: StepPlan, sampling: Int64, logits: torch.Tensor, tokens: Int32
    ) -> tuple[dict[int, TokenLogprobs], tuple[tuple[int, str], ...]]:
        """Fill `tokens` of the sampling chunks; what no token could be chosen for comes back by name."""
        positions = (plan.starts[sampling] + plan.counts[sampling]).astype(np.int64)
        sampled, logprobs = self._sampler.sample(logits.float(), plan.rows[sampling], positions)
        failures = self._enter(plan, sampling, sampled, tokens, lambda i: float(logits[i].amax()))
        return {int(sampling[i]): chosen for i, chosen in logprobs.items()}, failures

    def _finds_largest(self, rows: Int32) -> bool:
        whole = None if self._layers is None else self._layers.whole
        return whole is not None and whole.finds_largest and len(rows) > 0 and self._sampler.takes_largest(rows)

    def _largest(self, plan: StepPlan, inputs: StepInputs, tokens: Int32) -> tuple[tuple[int, str], ...]:
        """A forward pass and its tokens where each is that of its row's largest logit."""
        if self._layers is None:
            raise InvariantViolation("largest logits are found by fused layers", "the executor has none")
        found = self._layers.largest(inputs.token_ids, inputs.positions, inputs.keep, inputs.steps)
        peaks, ids = (part.numpy() for part in found)
        sampled = np.where(np.isfinite(peaks), ids, NO_TOKEN).astype(np.int32)
        return self._enter(plan, inputs.sampling, sampled, tokens, lambda i: float(peaks[i]))

    def _enter(
        self, plan: StepPlan, sampling: Int64, sampled: Int32, tokens: Int32, peak: Callable[[int], float]
    ) -> tuple[tuple[int, str], ...]:
        """Tokens of the sampling chunks; those that have none fail, for a reason that their largest logit tells."""
        rows = plan.rows[sampling]
        tokens[sampling] = sampled
        failures: tuple[tuple[int, str], ...] = ()
        if sampled.min() == NO_TOKEN:
            lost = np.flatnonzero(sampled == NO_TOKEN)
            failures = tuple((int(sampling[i]), _RULED_OUT if math.isfinite(peak(i)) else _NOT_FINITE) for i in lost)
            rows, sampled = np.delete(rows, lost), np.delete(sampled, lost)
        self._tensors.last_tokens[rows] = sampled
        return failures
