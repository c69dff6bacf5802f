"""Paged attention in plain torch: the backend that every other one is compared with.

Owns the arithmetic of paged attention and how a ragged batch is cut into dense pieces. Decodes go
in tiles of similar context length, small enough that the gathered keys and values stay in cache;
longer chunks go one by one. Masks and index tensors are made once per step and kind of layer, not
once per layer. Keys and values are never repeated over the query heads that share them.

Invariant: a masked position gets weight exactly zero, and its value is finite because the arena
never shows a sequence what a former owner of a block left behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from octavo.kernels.interface import AttentionRule, AttentionStep, Pages
from octavo.kernels.quantise import dequantise, quantise
from octavo.memory.layout import BlockOrder

TILE_BYTES = 3 << 20
"""Gathered keys and values of one tile of decodes: about what a core's L2 cache holds."""
QUERY_ROWS = 256
"""Queries of one chunk that are masked together, so that a mask has at most this many rows."""
MEMO_ELEMENTS = 1 << 24
"""A mask larger than this is rebuilt in every layer rather than kept for the step."""


@dataclass(slots=True, eq=False)
class _Piece:
    """A dense piece of the batch: `first .. last - 1` packed tokens over `blocks` gathered blocks a sequence."""

    first: int
    last: int
    sequences: int
    blocks: int
    skip: int
    """Gathered positions to drop at the front (single sequences only)."""
    length: int
    """Gathered positions to keep, counted from `skip`."""
    index: torch.Tensor
    """Which blocks to gather."""
    mask: torch.Tensor | None
    direct: bool = False
    """The chunk starts its sequence and is plainly causal: what it reads is what it brings."""


class ReferenceAttention:
    """See the module docstring. One instance belongs to one executor: it reuses scratch memory."""

    name = "reference"
    block_order: BlockOrder = "tokens_heads"
    reads_whole_blocks = True

    def __init__(self, tile_bytes: int = TILE_BYTES) -> None:
        self._tile_bytes = tile_bytes
        self._scratch: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: Pages, step: AttentionStep) -> None:
        where = (step.write_blocks, step.write_offsets)
        for new, held, scales in ((k, pages.k, pages.k_scales), (v, pages.v, pages.v_scales)):
            if scales is None:
                held.index_put_(where, new.to(held.dtype))
                continue
            values, row_scales = quantise(new, held.dtype)
            held.view(torch.int8).index_put_(where, values.view(torch.int8))
            scales.index_put_(where, row_scales)

    def attend(
        self,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        pages: Pages,
        step: AttentionStep,
        rule: AttentionRule,
    ) -> torch.Tensor:
        pieces = self._pieces(step, pages, rule, q)
        if len(pieces) == 1:
            return self._attend_piece(q, new, pages, pieces[0], rule)
        out = q.new_empty(q.shape[0], q.shape[1], pages.v.shape[-1])
        for piece in pieces:
            out[piece.first : piece.last] = self._attend_piece(q, new, pages, piece, rule)
        return out

    def _attend_piece(
        self,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        pages: Pages,
        piece: _Piece,
        rule: AttentionRule,
    ) -> torch.Tensor:
        queries = q[piece.first : piece.last]
        tokens, heads = queries.shape[:2]
        if piece.direct and not pages.quantised:
            # Rounded as the pages round them: later chunks will read them from there.
            k = new[0][:, :, piece.first : piece.last].to(pages.k.dtype).to(q.dtype)
            v = new[1][:, :, piece.first : piece.last].to(pages.v.dtype).to(q.dtype)
        else:
            k = self._gather("k", pages.k, pages.k_scales, piece, q.dtype)
            v = self._gather("v", pages.v, pages.v_scales, piece, q.dtype)
        # [sequences, heads, 1, dim] for a tile of decodes, [1, heads, tokens, dim] for a chunk
        grouped = queries.unsqueeze(2) if piece.sequences == tokens else queries.transpose(0, 1).unsqueeze(0)
        result = _weighted(grouped, k, v, piece, rule)  # [sequences, heads, queries, v_dim]
        return result.transpose(1, 2).reshape(tokens, heads, v.shape[-1])

    def _gather(
        self, role: str, pages: torch.Tensor, scales: torch.Tensor | None, piece: _Piece, dtype: torch.dtype
    ) -> torch.Tensor:
        """The piece's blocks, one after the other: [sequences, kv_heads, length, dim]."""
        flat = self._gathered(role, pages, piece.index)
        if scales is not None:
            wide = self._buffer(f"{role} read", flat.shape, torch.float32, pages.device)
            flat = dequantise(flat, self._gathered(f"{role} scales", scales, piece.index), wide)
        joined = flat.view(piece.sequences, -1, *pages.shape[2:])
        return joined[:, piece.skip : piece.skip + piece.length].to(dtype).transpose(1, 2)

    def _gathered(self, role: str, pages: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The blocks of `index` [blocks, *block shape], in memory that the next piece uses again."""
        out = self._buffer(role, (len(index), *pages.shape[1:]), pages.dtype, pages.device)
        torch.index_select(pages, 0, index, out=out)
        return out

    def _buffer(self, role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Scratch memory that is kept: a fresh allocation of this size costs a page fault every 4 KiB."""
        needed = prod(shape)
        held = self._scratch.get((role, dtype))
        if held is None or held.numel() < needed:
            held = torch.empty(needed + needed // 4, dtype=dtype, device=device)
            self._scratch[role, dtype] = held
        return held[:needed].view(shape)

    def _pieces(self, step: AttentionStep, pages: Pages, rule: AttentionRule, q: torch.Tensor) -> list[_Piece]:
        read_bytes = pages.token_bytes
        if pages.quantised:  # they lie in the cache as they are read
            read_bytes += 4 * (pages.k[0].numel() + pages.v[0].numel()) // step.block_tokens
        tile_blocks = max(1, self._tile_bytes // (read_bytes * step.block_tokens))
        key = (rule.window, rule.chunk_tokens, tile_blocks, q.dtype)
        pieces: list[_Piece] | None = step.memo.get(key)
        if pieces is None:
            pieces = list(_decode_pieces(step, rule, tile_blocks, q))
            keep = True
            for chunk in range(step.decodes, step.chunks):
                for piece in _chunk_pieces(step, chunk, rule, q):
                    pieces.append(piece)
                    keep = keep and (piece.mask is None or piece.mask.numel() <= MEMO_ELEMENTS)
            if keep:
                step.memo[key] = pieces
        return pieces


def _decode_pieces(step: AttentionStep, rule: AttentionRule, tile_blocks: int, q: torch.Tensor) -> Iterator[_Piece]:
    """Tiles of decodes. Contexts fall, so the first of a tile has the most blocks."""
    contexts = step.contexts[: step.decodes]
    lowest = rule.first_read(contexts - 1)
    first_block = lowest // step.block_tokens
    blocks = -(-contexts // step.block_tokens) - first_block
    first = 0
    while first < step.decodes:
        most = int(blocks[first])
        last = first + 1
        while last < step.decodes and (last + 1 - first) * most <= tile_blocks and 2 * blocks[last] > most:
            last += 1
        most = int(blocks[first:last].max())
        yield _tile(step, slice(first, last), lowest[first:last], most, q)
        first = last


def _tile(step: AttentionStep, part: slice, lowest: np.ndarray, most: int, q: torch.Tensor) -> _Piece:
    bt = step.block_tokens
    contexts = step.contexts[part]
    first_block = lowest // bt
    columns = first_block[:, None] + np.arange(most)
    # Past its end a sequence gathers its own last block again: never a block that it does not own.
    np.minimum(columns, ((contexts - 1) // bt)[:, None], out=columns)
    units = step.tables[step.rows[part, None], columns].astype(np.int64)
    count = part.stop - part.start
    index = torch.from_numpy(units.reshape(-1)).to(q.device)
    if count == 1:
        skip = int(lowest[0] - first_block[0] * bt)
        return _Piece(part.start, part.stop, 1, most, skip, int(contexts[0] - lowest[0]), index, None)
    positions = first_block[:, None] * bt + np.arange(most * bt)
    visible = (positions >= lowest[:, None]) & (positions < contexts[:, None])
    mask = None if visible.all() else _additive(visible, q)[:, None, None, :]  # [sequences, 1, 1, positions]
    return _Piece(part.start, part.stop, count, most, 0, most * bt, index, mask)


def _chunk_pieces(step: AttentionStep, chunk: int, rule: AttentionRule, q: torch.Tensor) -> Iterator[_Piece]:
    """One chunk of several positions, `QUERY_ROWS` queries at a time unless it is plainly causal."""
    bt = step.block_tokens
    offset, start, context = int(step.offsets[chunk]), int(step.starts[chunk]), int(step.contexts[chunk])
    positions = np.arange(start, context)
    firsts = rule.first_read(positions)
    if not firsts[-1] and start == 0:
        index = _units(step, chunk, 0, context, q)
        yield _Piece(offset, offset + context, 1, len(index), 0, context, index, None, direct=True)
        return
    for low in range(start, context, QUERY_ROWS):
        high = min(context, low + QUERY_ROWS)
        part = slice(low - start, high - start)
        lowest = int(firsts[part][0])
        keys = np.arange(lowest, high)
        visible = (keys <= positions[part, None]) & (keys >= firsts[part, None])
        first, last = offset + low - start, offset + high - start
        mask = _additive(visible, q)
        index = _units(step, chunk, lowest, high, q)
        yield _Piece(first, last, 1, len(index), lowest % bt, high - lowest, index, mask)


def _units(step: AttentionStep, chunk: int, low: int, high: int, q: torch.Tensor) -> torch.Tensor:
    """Where the blocks of positions low .. high - 1 start."""
    blocks = slice(low // step.block_tokens, -(-high // step.block_tokens))
    return torch.from_numpy(step.tables[step.rows[chunk], blocks].astype(np.int64)).to(q.device)


def _additive(visible: np.ndarray, q: torch.Tensor) -> torch.Tensor:
    """0 where a key is visible, minus infinity elsewhere."""
    hidden = torch.from_numpy(~visible).to(q.device)
    return torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))


def _weighted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: _Piece, rule: AttentionRule) -> torch.Tensor:
    """Softmax attention of q [n, heads, queries, dim] over k, v [n, kv_heads, keys, dim]."""
    n, heads, queries, _ = q.shape
    kv_heads = k.shape[1]
    if rule.softcap is None and rule.sinks is None:
        if queries == 1:
            # A decode reads the keys of each head once for all query heads that share it, as queries of that
            # head: torch's own grouping reads them once for each, in bf16 at a seventh of the speed.
            shared_q = q.reshape(n, kv_heads, heads // kv_heads, -1)
            found = scaled_dot_product_attention(shared_q, k, v, attn_mask=piece.mask, scale=rule.scale)
            return found.reshape(n, heads, 1, -1)
        return scaled_dot_product_attention(
            q, k, v, attn_mask=piece.mask, is_causal=piece.direct, scale=rule.scale, enable_gqa=heads != kv_heads
        )
    # The query heads that share a key head become more queries of that head.
    grouped = q.reshape(n, kv_heads, heads // kv_heads, queries, -1).flatten(2, 3)
    scores = torch.matmul(grouped, k.transpose(2, 3)) * rule.scale
    scores = scores.view(n, heads, queries, -1)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if piece.mask is not None:
        scores = scores + piece.mask
    elif piece.direct:
        hidden = torch.ones(queries, queries, dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if rule.sinks is not None:
        sinks = rule.sinks.to(scores.dtype).view(1, heads, 1, 1).expand(n, heads, queries, 1)
        weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    shared = weights.to(v.dtype).reshape(n, kv_heads, -1, weights.shape[-1])
    return torch.matmul(shared, v).view(n, heads, queries, -1)
