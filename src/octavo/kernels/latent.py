"""Paged attention over latents (MLA) in plain torch: `LatentAttention`, its pages and its rule.

Owns the arithmetic. A layer keeps per position one latent and one rotary key, whatever its heads; keys and
values of the heads are linear in the latent, so the weight that would expand them can be moved to the other side:

    absorbed   q . (W_k latent)     = (W_k^T q) . latent         sum of w (W_v latent) = W_v (sum of w latent)
    expanded   k, v = W_k latent, W_v latent for every position that a query reads, then attention head by head

Both are exact. Decodes are always absorbed, in tiles of similar context length; a run of a chunk's queries takes
whichever costs fewer multiplications (`expands`). Where an index chose what is read (`Chosen`), a decode gathers
only that.

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
from octavo.kernels.quantise import dequantise, quantise

TILE_BYTES = 3 << 20
"""Gathered latents of one tile of decodes: about what a core's L2 cache holds."""
QUERY_ROWS = 256
"""A run of a chunk has at least so many queries, where the chunk has."""
MASK_ELEMENTS = 1 << 24
"""And more while its mask stays within this."""
WORK_ELEMENTS = 1 << 24
"""Scores, and keys and values of expanded heads, that are held at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """One component in pages: rows [units, block_tokens, dim], in eight bits with a scale a row (see `quantise`)."""

    rows: torch.Tensor
    scales: torch.Tensor | None = None

    def write(self, new: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Store rows [tokens, dim] at (unit, offset) of each."""
        if self.scales is None:
            self.rows.index_put_(where, new.to(self.rows.dtype))
            return
        values, scales = quantise(new, self.rows.dtype)
        self.rows.view(torch.int8).index_put_(where, values.view(torch.int8))
        self.scales.index_put_(where, scales)

    def at(self, where: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The rows at (unit, offset), in the shape of those."""
        if self.scales is None:
            return self.rows[where].to(dtype)
        # Torch gathers no floats of eight bits, whose bits are as good.
        values = self.rows.view(torch.int8)[where].view(self.rows.dtype)
        return dequantise(values, self.scales[where]).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class LatentPages:
    """One layer's latents, rotary keys, and the keys of its index if it has one."""

    latent: Kept
    rope_k: Kept
    token_bytes: int
    """Of one position's latent and rotary key, scales included."""
    index_k: Kept | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """What an index lets the queries of a step read, beside that nobody reads ahead."""

    positions: tuple[torch.Tensor | None, ...]
    """Per tile of decodes, int64 [sequences, most], those past a context's end without effect; None: all."""
    hidden: dict[int, torch.Tensor]
    """Per longer chunk, [queries, context]: true where a query may not read; left out: all may be read."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentRule:
    """How one layer attends: its scale, and the weight that expands a latent into keys and values of the heads."""

    scale: float
    weight: torch.Tensor
    """[heads, nope_dim + v_dim, rank]: keys first."""
    v_dim: int
    sinks: torch.Tensor | None = None
    """[heads]: one more logit per head, which takes weight and gives no value."""
    chosen: Chosen | None = None

    @property
    def nope_dim(self) -> int:
        """Of a key, the part that comes from the latent."""
        return int(self.weight.shape[1]) - self.v_dim


def expands(queries: int, keys: int, rule: LatentRule, rope_dim: int) -> bool:
    """Whether `queries` queries of one sequence over `keys` positions cost fewer multiplications expanded.

    Counted per head, scores and weighted sums of all pairs, masked ones too, as they are computed.
    """
    lifted, rank = rule.weight.shape[1:]
    absorbed = queries * rank * lifted + queries * keys * (2 * rank + rope_dim)
    expanded = keys * rank * lifted + queries * keys * (lifted + rope_dim)
    return bool(expanded < absorbed)


@dataclass(slots=True, eq=False)
class Tile:
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
        pages.latent.write(latent, where)
        pages.rope_k.write(rope_k, where)

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
            start, context = int(step.starts[chunk]), int(step.contexts[chunk])
            if start == 0 and pages.latent.scales is None:
                # Rounded as the pages round them: later chunks will read them from there.
                kept = (new[0][own].to(pages.latent.rows.dtype), new[1][own].to(pages.rope_k.rows.dtype))
                latent, rope_k = (part.to(q.dtype) for part in kept)
            else:
                index = blocks_of(step, chunk, context, q.device)
                latent = self.gather("latent", pages.latent, index, (1, context), q.dtype)[0]
                rope_k = self.gather("rope_k", pages.rope_k, index, (1, context), q.dtype)[0]
            hidden = None if rule.chosen is None else rule.chosen.hidden.get(chunk)
            out[own] = _chunk(q[own], (latent, rope_k), start, hidden, rule)
        return out

    def _decodes(self, q: torch.Tensor, pages: LatentPages, step: AttentionStep, rule: LatentRule) -> torch.Tensor:
        """Queries [decodes, heads, dim] -> [decodes, heads, v_dim], the weights moved once for all of them."""
        q_latent, q_rope = _absorb(q, rule), q[..., rule.nope_dim :]
        found = torch.empty_like(q_latent)
        for number, tile in enumerate(self.tiles(step, pages, q.device)):
            own = slice(tile.first, tile.last)
            positions = None if rule.chosen is None else rule.chosen.positions[number]
            if positions is None:
                shape = (tile.last - tile.first, tile.length)
                latent = self.gather("latent", pages.latent, tile.index, shape, q.dtype)
                rope_k = self.gather("rope_k", pages.rope_k, tile.index, shape, q.dtype)
                mask = tile.mask
            else:
                where, mask = _places(positions, step, own)
                latent, rope_k = pages.latent.at(where, q.dtype), pages.rope_k.at(where, q.dtype)
            found[own] = _mixed(q_latent[own], q_rope[own], (latent, rope_k), mask, rule)
        return _lift(found, rule)

    def tiles(self, step: AttentionStep, pages: LatentPages, device: torch.device) -> list[Tile]:
        """How the step's decodes are cut, the same for all layers whose pages are alike."""
        key = ("latent", self._tile_bytes, pages.token_bytes)
        tiles: list[Tile] | None = step.memo.get(key)
        if tiles is None:
            most = max(1, self._tile_bytes // (pages.token_bytes * step.block_tokens))
            tiles = step.memo[key] = list(_decode_tiles(step, most, device))
        return tiles

    def gather(
        self, role: str, kept: Kept, index: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        """The blocks of `index`, sequence by sequence, as `shape` (sequences, positions) of rows; overwritten later."""
        rows = kept.rows if kept.scales is None else kept.rows.view(torch.int8)
        flat = self._buffer(role, (len(index), *rows.shape[1:]), rows)
        torch.index_select(rows, 0, index, out=flat)
        if kept.scales is not None:
            flat = dequantise(flat.view(kept.rows.dtype), kept.scales[index])
        return flat.view(shape[0], -1, flat.shape[-1])[:, : shape[1]].to(dtype)

    def _buffer(self, role: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Scratch memory that is kept: a fresh allocation of this size costs a page fault every 4 KiB."""
        needed = prod(shape)
        held = self._scratch.get((role, like.dtype))
        if held is None or held.numel() < needed:
            held = torch.empty(needed + needed // 4, dtype=like.dtype, device=like.device)
            self._scratch[role, like.dtype] = held
        return held[:needed].view(shape)


def blocks_of(step: AttentionStep, chunk: int, context: int, device: torch.device) -> torch.Tensor:
    """The blocks that hold the first `context` positions of a chunk's sequence, in order."""
    blocks = step.tables[step.rows[chunk], : -(-context // step.block_tokens)]
    return torch.from_numpy(blocks.astype(np.int64)).to(device)


def _places(
    positions: torch.Tensor, step: AttentionStep, own: slice
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Where chosen positions [sequences, most] of decodes lie, and a mask [sequences, 1, most] of those to come."""
    device = positions.device
    last = torch.from_numpy(step.contexts[own]).to(device)[:, None] - 1
    tables = torch.from_numpy(step.tables[step.rows[own]].astype(np.int64)).to(device)
    hidden, positions = positions > last, positions.minimum(last)
    where = (tables.gather(1, positions // step.block_tokens), positions % step.block_tokens)
    return where, torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))[:, None]


def _decode_tiles(step: AttentionStep, most_blocks: int, device: torch.device) -> Iterator[Tile]:
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
        yield Tile(first, last, torch.from_numpy(units.reshape(-1)).to(device), length, mask)
        first = last


def _chunk(
    q: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor],
    start: int,
    hidden: torch.Tensor | None,
    rule: LatentRule,
) -> torch.Tensor:
    """One chunk: queries [tokens, heads, dim] at `start ..` over latents and rotary keys of positions 0 up to its end.

    `hidden` [tokens, context] says what an index keeps from a query.
    """
    tokens, context = q.shape[0], kept[0].shape[0]
    rows = max(QUERY_ROWS, MASK_ELEMENTS // context)
    found = []
    for low in range(0, tokens, rows):
        run = q[low : low + rows]
        keys = start + low + len(run)
        part = (kept[0][:keys], kept[1][:keys])
        unchosen = None if hidden is None else hidden[low : low + rows, :keys]
        # torch's own attention knows no sinks
        if rule.sinks is None and expands(len(run), keys, rule, kept[1].shape[1]):
            found.append(_expanded(run, part, start + low, unchosen, rule))
        else:
            found.append(_absorbed(run, part, start + low, unchosen, rule))
    return found[0] if len(found) == 1 else torch.cat(found)


def _absorbed(
    q: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor],
    start: int,
    hidden: torch.Tensor | None,
    rule: LatentRule,
) -> torch.Tensor:
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
        unchosen = None if hidden is None else hidden[own, :keys]
        mask = causal_mask(start + low, own.stop - low, q.device, unchosen)[:, None]
        found[own] = _mixed(*queries, part, mask, rule).view(-1, heads, found.shape[-1])
    return _lift(found, rule)


def _expanded(
    q: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor],
    start: int,
    hidden: torch.Tensor | None,
    rule: LatentRule,
) -> torch.Tensor:
    """Queries [tokens, heads, dim] at `start ..` over keys and values made from the latents, a few heads at a time."""
    latent, rope_k = kept
    (tokens, heads, dim), keys = q.shape, latent.shape[0]
    lifted = rule.weight.shape[1]
    at_once = max(1, WORK_ELEMENTS // (keys * (lifted + dim + 2 * tokens)))
    plain = start == 0 and hidden is None
    mask = None if plain else causal_mask(start, tokens, q.device, hidden).to(q.dtype)
    out = q.new_empty(heads, tokens, rule.v_dim)
    for first in range(0, heads, at_once):
        own = slice(first, min(heads, first + at_once))
        both = linear(latent, rule.weight[own].flatten(0, 1)).view(keys, -1, lifted)
        shared = rope_k[:, None].expand(-1, both.shape[1], -1)
        k = torch.cat((both[..., : rule.nope_dim], shared), dim=-1).transpose(0, 1)
        v = both[..., rule.nope_dim :].transpose(0, 1)
        query = q[:, own].transpose(0, 1)
        out[own] = scaled_dot_product_attention(
            query[None], k[None], v[None], attn_mask=mask, is_causal=plain, scale=rule.scale
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
    scores = torch.baddbmm(scores, q_rope, rope_k.transpose(1, 2), beta=rule.scale, alpha=rule.scale)
    if scores.dtype != torch.float64:
        scores = scores.float()
    if mask is not None:
        scores.view(len(mask), -1, scores.shape[-1]).add_(mask)
    if rule.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sinks = rule.sinks.to(scores.dtype).repeat(scores.shape[1] // len(rule.sinks))
        column = sinks[None, :, None].expand(len(scores), -1, 1)
        weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    return torch.bmm(weights.to(latent.dtype), latent)


def causal_mask(start: int, queries: int, device: torch.device, unchosen: torch.Tensor | None = None) -> torch.Tensor:
    """[queries, start + queries]: what queries at `start ..` see of all positions up to the last of them."""
    positions = torch.arange(start + queries, device=device)
    hidden = positions > positions[start:, None]
    if unchosen is not None:
        hidden |= unchosen
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def _additive(hidden: np.ndarray, device: torch.device) -> torch.Tensor:
    """0 where a position is visible, minus infinity elsewhere."""
    where = torch.from_numpy(hidden).to(device)
    return torch.zeros(where.shape, device=device).masked_fill_(where, float("-inf"))
