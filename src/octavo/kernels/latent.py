"""Paged attention over latents (MLA) in plain torch: `LatentAttention`, its pages and its rule.

Owns the arithmetic. A layer keeps per position one latent and one rotary key, whatever its heads; keys and
values of the heads are linear in the latent, so the weight that would expand them can be moved to the other side:

    absorbed   q . (W_k latent)     = (W_k^T q) . latent         sum of w (W_v latent) = W_v (sum of w latent)
    expanded   k, v = W_k latent, W_v latent for every position that a query reads, then attention head by head

Both are exact. Decodes are always absorbed, in tiles of similar context length; a run of a chunk's queries takes
whichever costs fewer multiplications (`expands`).

Invariant: a hidden position gets weight exactly zero, and its latent is finite because the arena never shows a
sequence what a former owner of a block left behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from octavo.kernels.interface import AttentionStep

TILE_BYTES = 3 << 20
"""Gathered latents of one tile of decodes: about what a core's L2 cache holds."""
QUERY_ROWS = 256
"""A run of a chunk has at least so many queries, where the chunk has."""
MASK_ELEMENTS = 1 << 24
"""And more while its mask stays within this."""
WORK_ELEMENTS = 1 << 24
"""Scores, and keys and values of expanded heads, that are held at once."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentPages:
    """One layer's latents [units, block_tokens, rank] and rotary keys [units, block_tokens, rope_dim]."""

    latent: torch.Tensor
    rope_k: torch.Tensor
    token_bytes: int
    """Of one position's latent and rotary key."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentRule:
    """How one layer attends: its scale, and the weight that expands a latent into keys and values of the heads."""

    scale: float
    weight: torch.Tensor
    """[heads, nope_dim + v_dim, rank]: keys first."""
    v_dim: int

    @property
    def nope_dim(self) -> int:
        """Of a key, the part that comes from the latent."""
        return self.weight.shape[1] - self.v_dim


def expands(queries: int, keys: int, rule: LatentRule, rope_dim: int) -> bool:
    """Whether `queries` queries of one sequence over `keys` positions cost fewer multiplications expanded.

    Counted per head, scores and weighted sums of all pairs, masked ones too, as they are computed.
    """
    lifted, rank = rule.weight.shape[1:]
    absorbed = queries * rank * lifted + queries * keys * (2 * rank + rope_dim)
    expanded = keys * rank * lifted + queries * keys * (lifted + rope_dim)
    return bool(expanded < absorbed)


@dataclass(slots=True, eq=False)
class _Tile:
    """Decodes `first .. last - 1`, each over as many gathered blocks."""

    first: int
    last: int
    index: torch.Tensor
    """The blocks to gather, sequence by sequence."""
    length: int
    """Gathered positions of a sequence to keep."""
    mask: torch.Tensor | None
    """[sequences, 1, length]: 0 or minus infinity."""


class LatentAttention:
    """See the module docstring. One instance belongs to one executor: it reuses scratch memory."""

    name = "latent"

    def __init__(self, tile_bytes: int = TILE_BYTES) -> None:
        self._tile_bytes = tile_bytes
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def write(self, latent: torch.Tensor, rope_k: torch.Tensor, pages: LatentPages, step: AttentionStep) -> None:
        """Store the step's latents [tokens, rank] and rotary keys [tokens, rope_dim]."""
        where = (step.write_blocks, step.write_offsets)
        pages.latent.index_put_(where, latent.to(pages.latent.dtype))
        pages.rope_k.index_put_(where, rope_k.to(pages.rope_k.dtype))

    def attend(
        self,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        pages: LatentPages,
        step: AttentionStep,
        rule: LatentRule,
    ) -> torch.Tensor:
        """Attention of `q` [tokens, heads, nope_dim + rope_dim] over its sequences' pages -> [tokens, heads, v_dim].

        `new` holds what `write` was given: a chunk that starts its sequence reads it directly.
        """
        out = q.new_empty(q.shape[0], q.shape[1], rule.v_dim)
        if step.decodes:
            out[: step.decodes] = self._decodes(q[: step.decodes], pages, step, rule)
        for chunk in range(step.decodes, step.chunks):
            own = slice(int(step.offsets[chunk]), int(step.offsets[chunk + 1]))
            start = int(step.starts[chunk])
            if start == 0:
                # Rounded as the pages round them: later chunks will read them from there.
                latent = new[0][own].to(pages.latent.dtype).to(q.dtype)
                rope_k = new[1][own].to(pages.rope_k.dtype).to(q.dtype)
            else:
                context = int(step.contexts[chunk])
                blocks = step.tables[step.rows[chunk], : -(-context // step.block_tokens)]
                index = torch.from_numpy(blocks.astype(np.int64)).to(q.device)
                latent, rope_k = (part[0] for part in self._gather(pages, index, 1, context, q.dtype))
            out[own] = _chunk(q[own], latent, rope_k, start, rule)
        return out

    def _decodes(self, q: torch.Tensor, pages: LatentPages, step: AttentionStep, rule: LatentRule) -> torch.Tensor:
        """Queries [decodes, heads, dim] -> [decodes, heads, v_dim], the weights moved once for all of them."""
        q_latent, q_rope = _absorb(q, rule), q[..., rule.nope_dim :]
        found = torch.empty_like(q_latent)
        for tile in self._tiles(step, pages, q.device):
            own = slice(tile.first, tile.last)
            latent, rope_k = self._gather(pages, tile.index, tile.last - tile.first, tile.length, q.dtype)
            found[own] = _mixed(q_latent[own], q_rope[own], (latent, rope_k), tile.mask, rule)
        return _lift(found, rule)

    def _tiles(self, step: AttentionStep, pages: LatentPages, device: torch.device) -> list[_Tile]:
        key = ("latent", self._tile_bytes, pages.token_bytes)
        tiles: list[_Tile] | None = step.memo.get(key)
        if tiles is None:
            most = max(1, self._tile_bytes // (pages.token_bytes * step.block_tokens))
            tiles = step.memo[key] = list(_decode_tiles(step, most, device))
        return tiles

    def _gather(
        self, pages: LatentPages, index: torch.Tensor, sequences: int, length: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks one after the other: latents [sequences, length, rank] and rotary keys likewise."""
        found = []
        for role, part in (("latent", pages.latent), ("rope_k", pages.rope_k)):
            flat = self._buffer(role, (len(index), *part.shape[1:]), part)
            torch.index_select(part, 0, index, out=flat)
            found.append(flat.view(sequences, -1, part.shape[-1])[:, :length].to(dtype))
        return found[0], found[1]

    def _buffer(self, role: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Scratch memory that is kept: a fresh allocation of this size costs a page fault every 4 KiB."""
        needed = prod(shape)
        held = self._scratch.get((role, like.dtype))
        if held is None or held.numel() < needed:
            held = torch.empty(needed + needed // 4, dtype=like.dtype, device=like.device)
            self._scratch[role, like.dtype] = held
        return held[:needed].view(shape)


def _decode_tiles(step: AttentionStep, most_blocks: int, device: torch.device) -> Iterator[_Tile]:
    """Contexts fall, so the first of a tile has the most blocks; a tile's shortest has more than half of them."""
    contexts = step.contexts[: step.decodes]
    blocks = -(-contexts // step.block_tokens)
    first = 0
    while first < step.decodes:
        width = int(blocks[first])
        last = first + 1
        while last < step.decodes and (last + 1 - first) * width <= most_blocks and 2 * blocks[last] > width:
            last += 1
        own = contexts[first:last]
        # Past its end a sequence gathers its own last block again: never a block that it does not own.
        columns = np.minimum(np.arange(width), blocks[first:last, None] - 1)
        units = step.tables[step.rows[first:last, None], columns].astype(np.int64)
        length = int(own[0])
        hidden = np.arange(length) >= own[:, None]
        mask = _additive(hidden, device)[:, None] if hidden.any() else None
        yield _Tile(first, last, torch.from_numpy(units.reshape(-1)).to(device), length, mask)
        first = last


def _chunk(q: torch.Tensor, latent: torch.Tensor, rope_k: torch.Tensor, start: int, rule: LatentRule) -> torch.Tensor:
    """One chunk: queries [tokens, heads, dim] at positions `start ..` over latents of positions 0 up to its end."""
    tokens, context = q.shape[0], latent.shape[0]
    rows = max(QUERY_ROWS, MASK_ELEMENTS // context)
    found = []
    for low in range(0, tokens, rows):
        run = q[low : low + rows]
        keys = start + low + len(run)
        part = (latent[:keys], rope_k[:keys])
        if expands(len(run), keys, rule, rope_k.shape[1]):
            found.append(_expanded(run, part, start + low, rule))
        else:
            found.append(_absorbed(run, part, start + low, rule))
    return found[0] if len(found) == 1 else torch.cat(found)


def _absorbed(q: torch.Tensor, kept: tuple[torch.Tensor, torch.Tensor], start: int, rule: LatentRule) -> torch.Tensor:
    """Queries [tokens, heads, dim] at `start ..` in latent space, as many at once as scores may be held."""
    tokens, heads = q.shape[:2]
    q_latent, q_rope = _absorb(q, rule), q[..., rule.nope_dim :]
    found = torch.empty_like(q_latent)
    rows = max(1, WORK_ELEMENTS // (heads * kept[0].shape[0]))
    for low in range(0, tokens, rows):
        own = slice(low, min(tokens, low + rows))
        keys = start + own.stop
        part = (kept[0][None, :keys], kept[1][None, :keys])
        queries = (q_latent[own].flatten(0, 1)[None], q_rope[own].flatten(0, 1)[None])
        mask = _causal(start + low, own.stop - low, q.device)[:, None]
        found[own] = _mixed(*queries, part, mask, rule).view(-1, heads, found.shape[-1])
    return _lift(found, rule)


def _expanded(q: torch.Tensor, kept: tuple[torch.Tensor, torch.Tensor], start: int, rule: LatentRule) -> torch.Tensor:
    """Queries [tokens, heads, dim] at `start ..` over keys and values made from the latents, a few heads at a time."""
    latent, rope_k = kept
    (tokens, heads, dim), keys = q.shape, latent.shape[0]
    lifted = rule.weight.shape[1]
    at_once = max(1, WORK_ELEMENTS // (keys * (lifted + dim + 2 * tokens)))
    mask = None if start == 0 else _causal(start, tokens, q.device).to(q.dtype)
    out = q.new_empty(heads, tokens, rule.v_dim)
    for first in range(0, heads, at_once):
        own = slice(first, min(heads, first + at_once))
        both = linear(latent, rule.weight[own].flatten(0, 1)).view(keys, -1, lifted)
        shared = rope_k[:, None].expand(-1, both.shape[1], -1)
        k = torch.cat((both[..., : rule.nope_dim], shared), dim=-1).transpose(0, 1)
        v = both[..., rule.nope_dim :].transpose(0, 1)
        query = q[:, own].transpose(0, 1)
        out[own] = scaled_dot_product_attention(
            query[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=rule.scale
        )[0]
    return out.transpose(0, 1)


def _absorb(q: torch.Tensor, rule: LatentRule) -> torch.Tensor:
    """The part of queries [tokens, heads, dim] that meets latents, moved into their space: [tokens, heads, rank]."""
    nope = rule.nope_dim
    return torch.bmm(q[..., :nope].transpose(0, 1), rule.weight[:, :nope]).transpose(0, 1)


def _lift(found: torch.Tensor, rule: LatentRule) -> torch.Tensor:
    """Mixed latents [tokens, heads, rank] -> values [tokens, heads, v_dim]."""
    return torch.bmm(found.transpose(0, 1), rule.weight[:, rule.nope_dim :].transpose(1, 2)).transpose(0, 1)


def _mixed(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    rule: LatentRule,
) -> torch.Tensor:
    """Latents weighted by attention: queries [n, m, rank] and [n, m, rope_dim] over n sequences -> [n, m, rank].

    The m queries of a sequence are the heads of one token or of several; `mask` [rows, 1, keys] has a row a token.
    """
    latent, rope_k = kept
    scores = torch.bmm(q_latent, latent.transpose(1, 2))
    scores = torch.baddbmm(scores, q_rope, rope_k.transpose(1, 2), beta=rule.scale, alpha=rule.scale).float()
    if mask is not None:
        scores.view(len(mask), -1, scores.shape[-1]).add_(mask)
    return torch.bmm(torch.softmax(scores, dim=-1).to(latent.dtype), latent)


def _causal(start: int, queries: int, device: torch.device) -> torch.Tensor:
    """[queries, start + queries]: what queries at `start ..` see of all positions up to the last of them."""
    positions = torch.arange(start + queries, device=device)
    hidden = positions > positions[start:, None]
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def _additive(hidden: np.ndarray, device: torch.device) -> torch.Tensor:
    """0 where a position is visible, minus infinity elsewhere."""
    where = torch.from_numpy(hidden).to(device)
    return torch.zeros(where.shape, device=device).masked_fill_(where, float("-inf"))
