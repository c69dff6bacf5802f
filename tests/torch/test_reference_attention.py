"""The reference kernels against attention written out query by query in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from octavo.geometry.dtypes import BF16, FP32
from octavo.geometry.state import Component, Growing
from octavo.kernels.interface import AttentionRule
from octavo.kernels.reference import ReferenceAttention
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.runtime.arena import Arena
from octavo.runtime.step_tensors import StepTensors
from octavo.scheduling.plan import NewBlocks, StepPlan

KV_HEADS, HEADS, DIM, V_DIM, BLOCK = 2, 6, 8, 12, 4
ROWS = 12


def attention_by_hand(q, keys, values, position, rule):
    """One query [heads, dim] over one sequence's keys and values [tokens, kv_heads, dim]."""
    low = 0 if rule.window is None else max(0, position - rule.window + 1)
    if rule.chunk_tokens is not None:
        low = max(low, position - position % rule.chunk_tokens)
    out = []
    for head in range(HEADS):
        k = keys[low : position + 1, head // (HEADS // KV_HEADS)].double()
        v = values[low : position + 1, head // (HEADS // KV_HEADS)].double()
        scores = (k @ q[head].double()) * rule.scale
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        weights = scores.exp()
        total = weights.sum() + (0 if rule.sinks is None else math.exp(float(rule.sinks[head])))
        out.append((weights[:, None] * v).sum(0) / total)
    return torch.stack(out)


class World:
    """Sequences whose keys and values are kept both in an arena and in plain tensors."""

    def __init__(self, dtype=FP32, tile_bytes=3 << 20, seed=0):
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        state = Growing((Component("k", (KV_HEADS, DIM), dtype), Component("v", (KV_HEADS, V_DIM), dtype)))
        layout = make_layout(served_groups((state,)), BLOCK, "tokens_heads")
        self.arena = Arena(layout, 200)
        self.arena.bytes.fill_(0xFF)  # every stale element is a NaN
        self.pages = self.arena.pages(0)
        self.tensors = StepTensors(self.arena, ROWS)
        self.backend = ReferenceAttention(tile_bytes)
        self.free = self.random.permutation(200).tolist()
        self.blocks = [0] * ROWS
        self.keys = [torch.zeros(0, KV_HEADS, DIM) for _ in range(ROWS)]
        self.values = [torch.zeros(0, KV_HEADS, V_DIM) for _ in range(ROWS)]

    def give_up(self, row, rule):
        """Blocks that no query from here on can read go to somebody else, who fills them with NaN."""
        first = int(rule.first_read(np.asarray([len(self.keys[row])]))[0]) // BLOCK
        for unit in self.tensors._tables[0].units[row, :first]:
            self.pages.k[unit] = self.pages.v[unit] = float("nan")

    def step(self, chunks, rule):
        """Worst absolute error of a step of (row, tokens) chunks."""
        rows = [row for row, _ in chunks]
        starts = [len(self.keys[row]) for row in rows]
        counts = [count for _, count in chunks]
        grown = []
        for row, start, count in zip(rows, starts, counts, strict=True):
            while self.blocks[row] * BLOCK < start + count:
                grown.append((row, self.blocks[row], self.free.pop()))
                self.blocks[row] += 1
        columns = np.asarray(grown, np.int32).reshape(-1, 3).T
        plan = StepPlan(
            1, 0.0, np.asarray(rows, np.int64), np.asarray(rows, np.int32), np.asarray(starts, np.int32),
            np.asarray(counts, np.int32), np.zeros(len(rows), np.bool_), np.zeros(sum(counts), np.int32), (),
            (NewBlocks(0, *columns),),
        )  # fmt: skip
        inputs = self.tensors.build(plan)
        step = inputs.steps[0]
        total = sum(counts)
        q = torch.randn(total, HEADS, DIM, generator=self.generator)
        k = torch.randn(total, KV_HEADS, DIM, generator=self.generator)
        v = torch.randn(total, KV_HEADS, V_DIM, generator=self.generator)
        k, v = k.to(self.pages.k.dtype).float(), v.to(self.pages.v.dtype).float()
        for chunk in range(step.chunks):
            row, span = int(step.rows[chunk]), slice(step.offsets[chunk], step.offsets[chunk + 1])
            self.keys[row] = torch.cat((self.keys[row], k[span]))
            self.values[row] = torch.cat((self.values[row], v[span]))
        self.backend.write(k, v, self.pages, step)
        new = (k.transpose(0, 1)[None], v.transpose(0, 1)[None])
        out = self.backend.attend(q, new, self.pages, step, rule)
        assert out.shape == (total, HEADS, V_DIM)
        worst = 0.0
        for chunk in range(step.chunks):
            row = int(step.rows[chunk])
            for token in range(step.offsets[chunk], step.offsets[chunk + 1]):
                position = int(step.starts[chunk]) + token - int(step.offsets[chunk])
                right = attention_by_hand(q[token], self.keys[row], self.values[row], position, rule)
                error = float((out[token].double() - right).abs().max())
                worst = max(worst, error if math.isfinite(error) else math.inf)
        return worst


SINKS = torch.linspace(-2, 2, HEADS)
RULES = {
    "plain": AttentionRule(0.3),
    "window": AttentionRule(0.3, window=5),
    "window of one": AttentionRule(0.3, window=1),
    "softcap": AttentionRule(0.5, softcap=1.5),
    "sinks": AttentionRule(0.5, sinks=SINKS),
    "chunks": AttentionRule(0.3, chunk_tokens=6),
    "chunks of one": AttentionRule(0.3, chunk_tokens=1),
    "chunks of a block, sinks": AttentionRule(0.3, chunk_tokens=BLOCK, sinks=SINKS),
    "a window within chunks": AttentionRule(0.3, window=5, chunk_tokens=8),
    "all together": AttentionRule(0.7, window=6, softcap=2.0, sinks=SINKS),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tile_bytes", [1, 2000, 3 << 20])
def test_ragged_steps_equal_attention_written_out(name, tile_bytes):
    world = World(tile_bytes=tile_bytes)
    rule = RULES[name]
    assert world.step([(0, 9), (1, 1), (2, 17), (3, 4)], rule) < 1e-5
    for _ in range(4):
        live = world.random.permutation(8).tolist()
        chunks = [(row, int(world.random.choice([1, 1, 1, 2, 7]))) for row in live]
        assert world.step(chunks, rule) < 1e-5


def test_a_chunk_of_many_queries_is_cut_without_a_trace(monkeypatch):
    monkeypatch.setattr("octavo.kernels.reference.QUERY_ROWS", 5)
    monkeypatch.setattr("octavo.kernels.reference.MEMO_ELEMENTS", 30)
    world = World()
    for rule in (RULES["plain"], RULES["window"], RULES["chunks"]):
        assert world.step([(0, 3), (1, 1)], rule) < 1e-5
        assert world.step([(0, 23), (1, 12)], rule) < 1e-5


@pytest.mark.parametrize("name", [name for name in RULES if RULES[name].window or RULES[name].chunk_tokens])
@pytest.mark.parametrize("tile_bytes", [1, 3 << 20])
def test_blocks_that_cannot_be_read_any_more_are_never_gathered(name, tile_bytes):
    world = World(tile_bytes=tile_bytes)
    rule = RULES[name]
    for _ in range(8):
        chunks = [(row, int(world.random.choice([1, 1, 2, 9]))) for row in range(6)]
        for row, _ in chunks:
            world.give_up(row, rule)
        assert world.step(chunks, rule) < 1e-5


def test_pages_of_a_narrower_type_are_read_as_they_were_stored():
    world = World(dtype=BF16)
    assert world.step([(0, 9), (1, 3)], RULES["plain"]) < 1e-5
    assert world.step([(0, 1), (1, 6)], RULES["plain"]) < 1e-5


def test_a_nan_in_one_sequence_stays_in_it():
    world = World()
    world.step([(row, 3 + row) for row in range(4)], RULES["plain"])
    first = world.tensors._tables[0].units[1, 0]
    world.pages.v[first] = float("nan")
    assert world.step([(1, 1)], RULES["plain"]) == math.inf
    assert world.step([(0, 1), (2, 1), (3, 1)], RULES["plain"]) < 1e-5
