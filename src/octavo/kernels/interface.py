"""The seam between the runtime and attention kernels: `AttentionBackend`, `Pages`, `AttentionStep`.

Owns the words in which a kernel is told what to do, and nothing else: no allocation, no plan, no
model. A backend keeps no state between steps but scratch memory.

Invariant: `write` of a layer comes before `attend` of that layer in the same step, so a query
finds every position of its own sequence up to and including itself in the pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from octavo.memory.layout import BlockOrder


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """One layer's keys and values in the arena, as views of all places where a block may start.

    Block `u` is `k[u]`: [block_tokens, kv_heads, head_dim] in the order `tokens_heads`, or
    [kv_heads, block_tokens, head_dim] in the order `heads_tokens`. Where they are kept in eight
    bits, every row of the last axis has a scale in `k_scales[u]` and `v_scales[u]`: see `quantise`.
    """

    k: torch.Tensor
    v: torch.Tensor
    token_bytes: int
    """Of one position's key and value, scales included."""
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None

    @property
    def quantised(self) -> bool:
        return self.k_scales is not None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionStep:
    """One group's share of a step, the same for all its layers. Built once per step.

        packed tokens:  d d d d d | p p p p p p | q q q
                        decodes     chunk 5       chunk 6

    The first `decodes` chunks are single tokens, longest context first; chunk i covers packed
    tokens `offsets[i] .. offsets[i + 1] - 1`, which are positions `starts[i] .. contexts[i] - 1`.
    """

    block_tokens: int
    decodes: int
    rows: npt.NDArray[np.int64]
    """Per chunk, its row in `tables`."""
    offsets: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    contexts: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    """[rows, blocks]: where each block starts, as an index into `Pages`; mirrored, never written by kernels."""
    write_blocks: torch.Tensor
    """int64 [tokens] on the device: the block that each packed token is written to."""
    write_offsets: torch.Tensor
    """int64 [tokens] on the device: its place inside that block."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """What a backend derives once and uses in every layer (masks, index tensors)."""

    @property
    def chunks(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """How scores become weights in one layer.

    A query at position p reads positions max(0, p - window + 1) .. p, and with `chunk_tokens` none
    before the chunk that p is in: from p - p % chunk_tokens on. Scores are scaled, then capped
    (`softcap * tanh(score / softcap)`); `sinks` [heads] adds one logit per head that takes weight
    and gives no value.

    Blocks that hold only positions before the first that is read may belong to another sequence
    by now: a kernel never gathers them.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    chunk_tokens: int | None = None

    def first_read(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first position that a query at each of `positions` reads."""
        first = np.zeros_like(positions)
        if self.window is not None:
            np.maximum(first, positions - self.window + 1, out=first)
        if self.chunk_tokens is not None:
            np.maximum(first, positions - positions % self.chunk_tokens, out=first)
        return first


class AttentionBackend(Protocol):
    """Paged attention over a ragged batch."""

    @property
    def name(self) -> str: ...

    @property
    def block_order(self) -> BlockOrder: ...

    @property
    def reads_whole_blocks(self) -> bool:
        """Whether it gathers what a query does not see, weighted with zero: then that must be finite."""
        ...

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: Pages, step: AttentionStep) -> None:
        """Store the step's new keys and values, each [tokens, kv_heads, head_dim]."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        pages: Pages,
        step: AttentionStep,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Attention of `q` [tokens, heads, dim] over its sequences' pages -> [tokens, heads, v_dim].

        `new` holds the step's keys and values as the model made them, [1, kv_heads, tokens, dim]
        each: a chunk that starts its sequence can read them directly.
        """
        ...
