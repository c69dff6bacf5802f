"""What a layer of latent attention reads where an index of its own chooses it (sparse attention, DSA).

Transformers' own indexer says what is chosen. It is run once for each tile of decodes, as a batch, and once for each
run of a longer chunk's queries, over index keys gathered from pages, with the causal mask that it would have had; so
a sequence's choice is the one it would have alone. Owns the running, and `Chosen` as what takes the place of its
indices on their way to the attention function, also through layers that share the choice of one before them.

    indexer(tokens of one run) -> its `update_indexer` stores new keys, answers with all that the run may see
                               -> indices, kept where a context is longer than what may be chosen

Invariant: whatever is chosen, nobody reads ahead; a short context is read whole. Between equal scores the choice is
torch's, here as in Transformers, and may differ with the shape of a run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from octavo.errors import ModelError
from octavo.kernels.interface import AttentionStep
from octavo.kernels.latent import WORK_ELEMENTS, Chosen, Kept, LatentAttention, LatentPages, blocks_of, causal_mask

_STANDS_IN = "octavo_stands_in"
_TAKES = ("hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids", "cache")
"""The indexers that are served, by what they take."""


def run_indexes(model: nn.Module) -> None:
    """Let the model's indexers choose from pages where they are given some. Raises `ModelError` for unknown ones."""
    for module in list(model.modules()):
        indexer = getattr(module, "indexer", None)
        if not isinstance(indexer, nn.Module) or isinstance(indexer.forward, partial):
            continue
        taken = tuple(inspect.signature(indexer.forward).parameters)
        if taken != _TAKES or not hasattr(indexer, "index_topk") or not hasattr(indexer, "n_heads"):
            name = type(indexer).__name__
            raise ModelError("model", name, f"its index chooses by {', '.join(taken)}, which is not served")
        indexer.forward = partial(_choose, indexer, indexer.forward)
        module.register_forward_pre_hook(_give_mask, with_kwargs=True)


def stands_in(mask: torch.Tensor | None) -> bool:
    """Whether an attention mask is only there because a layer looks at it for its indexer."""
    return getattr(mask, _STANDS_IN, False)


def _give_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    if kwargs.get("attention_mask") is None and "hidden_states" in kwargs:
        kwargs["attention_mask"] = kwargs["hidden_states"].new_zeros((1, 1, 1, 1))
        setattr(kwargs["attention_mask"], _STANDS_IN, True)
    return args, kwargs


def _choose(
    indexer: nn.Module,
    forward: Callable[..., torch.Tensor],
    *taken: Any,
    cache: Any = None,
) -> torch.Tensor | Chosen:
    """The indexer's forward, under its own name; `taken` as in `_TAKES`."""
    if not hasattr(cache, "paged_index"):
        return forward(*taken, cache=cache)
    hidden_states, q_resid, position_embeddings, _, position_ids = taken
    tokens = (hidden_states, q_resid, *position_embeddings, position_ids)
    paged: PagedIndex = cache.paged_index(indexer.layer_idx)
    return paged.choose(indexer, forward, tokens)


@dataclass(frozen=True, slots=True, eq=False)
class PagedIndex:
    """The index keys of one layer in pages, and the step in which they are looked through."""

    kernel: LatentAttention
    pages: LatentPages
    kept: Kept
    step: AttentionStep

    def choose(
        self, indexer: nn.Module, forward: Callable[..., torch.Tensor], tokens: tuple[torch.Tensor, ...]
    ) -> Chosen:
        """Store the step's index keys and choose for all its queries. `tokens` are told per token, [1, tokens, ...]."""
        most: Any = indexer.index_topk
        heads: Any = indexer.n_heads
        positions = []
        for tile in self.kernel.tiles(self.step, self.pages, tokens[0].device):
            own = slice(tile.first, tile.last)
            shape = (tile.last - tile.first, tile.length)
            mask = tokens[0].new_zeros(shape[0], 1, shape[1], dtype=torch.float32) if tile.mask is None else tile.mask
            cut = [part[:, own].transpose(0, 1) for part in tokens]
            indices = _run(forward, cut, mask, _Keys(self, self.kept, own, tile.index, shape))
            positions.append(indices[:, 0].long() if tile.length > most else None)
        hidden = {}
        for chunk in range(self.step.decodes, self.step.chunks):
            unchosen = self._chunk(chunk, forward, tokens, most, heads)
            if unchosen is not None:
                hidden[chunk] = unchosen
        return Chosen(tuple(positions), hidden)

    def _chunk(
        self,
        chunk: int,
        forward: Callable[..., torch.Tensor],
        tokens: tuple[torch.Tensor, ...],
        most: int,
        heads: int,
    ) -> torch.Tensor | None:
        """What the index keeps from the queries of one chunk, [queries, context]; None where it chooses everything."""
        step, device = self.step, tokens[0].device
        offset, end = int(step.offsets[chunk]), int(step.offsets[chunk + 1])
        start, context = int(step.starts[chunk]), int(step.contexts[chunk])
        unchosen = torch.ones(end - offset, context, dtype=torch.bool, device=device)
        rows = max(1, WORK_ELEMENTS // (heads * context))
        for low in range(0, end - offset, rows):
            high = min(end - offset, low + rows)
            own = slice(offset + low, offset + high)
            mask = causal_mask(start + low, high - low, device)[None]
            keys = _Keys(self, self.kept, own, blocks_of(step, chunk, start + high, device), (1, start + high))
            indices = _run(forward, [part[:, own] for part in tokens], mask, keys)
            unchosen[low:high].scatter_(1, indices[0].long(), False)
        return unchosen if context > most else None


def _run(
    forward: Callable[..., torch.Tensor], tokens: list[torch.Tensor], mask: torch.Tensor, keys: _Keys
) -> torch.Tensor:
    hidden_states, q_resid, cos, sin, position_ids = tokens
    return forward(hidden_states, q_resid, (cos, sin), mask, position_ids, cache=keys)


@dataclass(frozen=True, slots=True, eq=False)
class _Keys:
    """What an indexer takes for its cache in one run."""

    index: PagedIndex
    kept: Kept
    own: slice
    """The run's tokens in the packed row."""
    blocks: torch.Tensor
    shape: tuple[int, int]
    """Sequences, and positions of each that the run may see."""

    def update_indexer(self, new: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Store keys [sequences, tokens, dim] and answer with [sequences, positions, dim]."""
        step = self.index.step
        kept = self.kept
        kept.write(new.flatten(0, 1), (step.write_blocks[self.own], step.write_offsets[self.own]))
        return self.index.kernel.gather("index_k", kept, self.blocks, self.shape, new.dtype)
