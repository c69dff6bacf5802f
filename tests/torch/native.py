"""Random paged worlds for the native kernels' tests, and attention written out in float64 to hold them against."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from octavo.geometry.dtypes import FP32, Dtype
from octavo.geometry.state import Component, Growing
from octavo.kernels.interface import AttentionRule, AttentionStep
from octavo.kernels.quantise import dequantise, quantise
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.runtime.arena import Arena


@dataclass
class Shape:
    """What a layer looks like."""

    kv_heads: int = 2
    group: int = 3
    dim: int = 64
    v_dim: int = 64
    block: int = 16
    dtype: Dtype = FP32
    q_dtype: torch.dtype = torch.float32

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def exact(q, keys, values, first_position, rule):
    """float64 attention of queries [tokens, heads, dim] over keys, values [context, kv_heads, dim]."""
    tokens, heads, _ = q.shape
    group = heads // keys.shape[1]
    k = keys.double().repeat_interleave(group, 1).permute(1, 2, 0)  # [heads, dim, context]
    v = values.double().repeat_interleave(group, 1).transpose(0, 1)
    scores = (q.double().transpose(0, 1) @ k) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    positions = np.arange(first_position, first_position + tokens)
    low = torch.from_numpy(rule.first_read(positions))[:, None]
    at = torch.arange(len(keys))[None]
    scores.masked_fill_((at < low) | (at > torch.from_numpy(positions)[:, None]), float("-inf"))
    if rule.sinks is not None:
        scores = torch.cat((scores, rule.sinks.double().view(heads, 1, 1).expand(heads, tokens, 1)), -1)
        return (torch.softmax(scores, -1)[..., :-1] @ v).transpose(0, 1)
    return (torch.softmax(scores, -1) @ v).transpose(0, 1)


@dataclass
class World:
    """Sequences in an arena in which everything that no sequence wrote is NaN, and what they should read."""

    shape: Shape
    backend: object
    slots: int = 0
    seed: int = 0
    spread: float = 1.0
    keys: list = field(default_factory=list)
    values: list = field(default_factory=list)

    def __post_init__(self):
        s = self.shape
        self.random = np.random.default_rng(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        state = Growing((Component("k", (s.kv_heads, s.dim), s.dtype), Component("v", (s.kv_heads, s.v_dim), s.dtype)))
        layout = make_layout(served_groups((state,)), s.block, self.backend.block_order)
        self.arena = Arena(layout, self.slots)
        self.arena.bytes.fill_(0xFF)
        self.pages = self.arena.pages(0)

    def random_rows(self, tokens, heads, dim, dtype):
        return (torch.randn(tokens, heads, dim, generator=self.generator) * self.spread).to(dtype)

    def step(self, starts, counts, rule, *, shared=None, poison_below=True):
        """Sequence i computes positions starts[i] .. starts[i] + counts[i] - 1; what is before them was written.

        `shared` tells of each sequence how many positions at its front, in whole blocks, lie where those of the
        first sequence lie. Chunks must be ordered as a step packs them. Returns (AttentionStep, q, k, v).
        """
        s = self.shape
        starts, counts = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
        contexts = starts + counts
        shared = np.zeros_like(starts) if shared is None else np.minimum(shared, starts) // s.block * s.block
        columns = int(-(-contexts.max() // s.block))
        free = self.random.permutation(self.slots)
        tables = np.full((len(starts) + 1, columns), -7, np.int32)
        rows = self.random.permutation(len(starts) + 1)[: len(starts)].astype(np.int64)
        firsts = rule.first_read(starts) // s.block if poison_below else np.zeros_like(starts)
        common = int(shared.max()) // s.block  # the blocks that are shared come first of the free ones
        taken = common
        for row, first, context, same in zip(rows, firsts, contexts, shared // s.block, strict=True):
            tables[row, first:same] = free[first:same]
            own, end = max(int(first), int(same)), -(-int(context) // s.block)
            tables[row, own:end] = free[taken : taken + end - own]
            taken += end - own
        offsets = np.concatenate(([0], np.cumsum(counts)))
        q = self.random_rows(offsets[-1], s.heads, s.dim, s.q_dtype)
        k_new, v_new = [], []
        self.keys, self.values = [], []
        front = {
            role: self.random_rows(int(shared.max()), s.kv_heads, dim, s.q_dtype)
            for role, dim in (("k", s.dim), ("v", s.v_dim))
            if shared.any()
        }
        for row, first, start, context, same in zip(rows, firsts, starts, contexts, shared, strict=True):
            where = torch.arange(int(first) * s.block, max(int(first) * s.block, start))
            blocks = torch.from_numpy(tables[row].astype(np.int64))[where // s.block]
            for role, dim, new, kept in (("k", s.dim, k_new, self.keys), ("v", s.v_dim, v_new, self.values)):
                x = self.random_rows(context, s.kv_heads, dim, s.q_dtype)
                if same:
                    x[:same] = front[role][:same]
                new.append(x[start:])
                kept.append(self._stored(role, x, blocks, where))
        where = np.concatenate([np.arange(a, b) for a, b in zip(starts, contexts, strict=True)])
        token_rows = np.repeat(rows, counts)
        decodes = int((counts == 1).sum())
        step = AttentionStep(
            block_tokens=s.block,
            decodes=decodes,
            rows=rows,
            offsets=offsets,
            starts=starts,
            contexts=contexts,
            tables=tables,
            write_blocks=torch.from_numpy(tables[token_rows, where // s.block].astype(np.int64)),
            write_offsets=torch.from_numpy(where % s.block),
        )
        return step, q, torch.cat(k_new), torch.cat(v_new)

    def _stored(self, role, x, blocks, where):
        """Put the rows at positions `where` into pages; what all of `x` reads as from there."""
        pages, scales = getattr(self.pages, role), getattr(self.pages, role + "_scales")
        if scales is None:
            self._place(pages, blocks, where % self.shape.block, x[where].to(pages.dtype))
            return x.to(pages.dtype)
        values, by = quantise(x, pages.dtype)
        self._place(pages.view(torch.uint8), blocks, where % self.shape.block, values.view(torch.uint8)[where])
        self._place(scales, blocks, where % self.shape.block, by[where])
        return dequantise(values, by)

    def _place(self, pages, blocks, inside, rows):
        if self.backend.block_order == "heads_tokens":
            pages[blocks, :, inside] = rows
        else:
            pages[blocks, inside] = rows

    def run(self, starts, counts, rule, backend=None, shared=None):
        """(output, exact output) of one step."""
        backend = backend or self.backend
        step, q, k, v = self.step(starts, counts, rule, shared=shared)
        backend.write(k, v, self.pages, step)
        out = backend.attend(q, (k.transpose(0, 1)[None], v.transpose(0, 1)[None]), self.pages, step, rule)
        right = [
            exact(q[step.offsets[i] : step.offsets[i + 1]], self.keys[i], self.values[i], int(step.starts[i]), rule)
            for i in range(step.chunks)
        ]
        return out, torch.cat(right)


PLAIN = AttentionRule(0.125)
