"""Attention over latents against keys and values written out head by head, query by query, in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.interface import AttentionStep
from octavo.kernels.latent import Chosen, Kept, LatentAttention, LatentPages, LatentRule, expands
from octavo.kernels.quantise import dequantise, quantise

HEADS, RANK, NOPE, ROPE, V_DIM = 3, 20, 8, 4, 6
SCALE = 0.4


def close(mine, right):
    error = float((mine.double() - right).abs().max())
    return math.isfinite(error) and error < 1e-5


class World:
    """Sequences whose latents are kept both in scattered pages and in plain tensors."""

    def __init__(self, block, seed=0, dtype=torch.float32, tile_bytes=3 << 20, rank=RANK):
        self.random = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.block, units = block, 400
        nan = float("nan")  # whatever is not written must never be read, not even with weight zero
        self.pages = LatentPages(
            Kept(torch.full((units, block, rank), nan, dtype=dtype)),
            Kept(torch.full((units, block, ROPE), nan, dtype=dtype)),
            (rank + ROPE) * dtype.itemsize,
        )  # fmt: skip
        self.weight = self.normal(HEADS, NOPE + V_DIM, rank) * rank**-0.5
        self.rule = LatentRule(SCALE, self.weight, V_DIM)
        self.kernel = LatentAttention(tile_bytes)
        self.free = self.random.permutation(units).tolist()
        self.tables = np.full((16, units), -1, dtype=np.int32)  # an entry that nobody filled addresses nothing
        self.latents, self.ropes = {}, {}
        self.most = None  # positions that an index, here a random one, lets a query read
        self.choice = {}  # (row, position) -> those
        self.rounded = lambda x: x.to(dtype).float()

    def zero(self, unit):
        """As the arena does with what a step does not fill."""
        self.pages.latent.rows[unit].zero_()
        self.pages.rope_k.rows[unit].zero_()

    def choose(self, step):
        """A random choice for every query, in the form in which an index hands it on."""
        positions, hidden = [], {}
        for tile in self.kernel.tiles(step, self.pages, torch.device("cpu")):
            if tile.length <= self.most:
                positions.append(None)
                continue
            rows = [torch.randperm(tile.length, generator=self.generator)[: self.most - 1]
                    for _ in range(tile.first, tile.last)]  # fmt: skip
            rows = [torch.cat((row, torch.zeros(1, dtype=torch.int64))) for row in rows]  # position 0 for all
            for i, row in enumerate(rows):
                at = (int(step.rows[tile.first + i]), int(step.contexts[tile.first + i]) - 1)
                self.choice[at] = set(row.tolist())
            rows = [torch.tensor(sorted(set(row.tolist())) + [999] * (self.most - len(set(row.tolist()))))
                    for row in rows]  # fmt: skip
            positions.append(torch.stack(rows))
        for chunk in range(step.decodes, step.chunks):
            start, context = int(step.starts[chunk]), int(step.contexts[chunk])
            if context > self.most:
                hidden[chunk] = torch.rand(context - start, context, generator=self.generator) < 0.6
                hidden[chunk][:, 0] = False
                for i, row in enumerate(hidden[chunk]):
                    self.choice[int(step.rows[chunk]), start + i] = set(torch.nonzero(~row)[:, 0].tolist())
        return Chosen(tuple(positions), hidden)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def step(self, chunks):
        """Run (row, tokens) chunks and hold every output against the definition."""
        for row, _ in chunks:
            self.latents.setdefault(row, torch.empty(0, self.weight.shape[2]))
            self.ropes.setdefault(row, torch.empty(0, ROPE))
        singles = sorted((c for c in chunks if c[1] == 1), key=lambda c: -len(self.latents[c[0]]))
        chunks = [*singles, *(c for c in chunks if c[1] > 1)]
        rows = np.asarray([row for row, _ in chunks])
        counts = np.asarray([count for _, count in chunks])
        starts = np.asarray([len(self.latents[row]) for row in rows])
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        for row, start, count in zip(rows, starts, counts, strict=True):
            for index in range(-(-start // self.block), -(-(start + count) // self.block)):
                unit = self.tables[row, index] = self.free.pop()
                self.zero(unit)
        of = np.repeat(rows, counts)
        step = AttentionStep(
            block_tokens=self.block, decodes=len(singles), rows=rows, starts=starts, contexts=starts + counts,
            offsets=np.concatenate(([0], np.cumsum(counts))), tables=self.tables,
            write_blocks=torch.from_numpy(self.tables[of, positions // self.block].astype(np.int64)),
            write_offsets=torch.from_numpy(positions % self.block),
        )  # fmt: skip
        total = int(counts.sum())
        q = self.normal(total, HEADS, NOPE + ROPE)
        new = (self.normal(total, self.weight.shape[2]), self.normal(total, ROPE))
        kept = tuple(self.rounded(part) for part in new)
        for i, row in enumerate(rows.tolist()):
            own = slice(step.offsets[i], step.offsets[i + 1])
            self.latents[row] = torch.cat((self.latents[row], kept[0][own]))
            self.ropes[row] = torch.cat((self.ropes[row], kept[1][own]))
        self.kernel.write(*new, self.pages, step)
        rule = self.rule if self.most is None else replace(self.rule, chosen=self.choose(step))
        out = self.kernel.attend(q, new, self.pages, step, rule)
        assert out.shape == (total, HEADS, V_DIM)
        return all(
            close(out[token], self.by_hand(q[token], int(of[token]), int(positions[token]))) for token in range(total)
        )

    def by_hand(self, q, row, position):
        latent, rope = self.latents[row][: position + 1].double(), self.ropes[row][: position + 1].double()
        chosen = sorted(p for p in self.choice.get((row, position), range(position + 1)) if p <= position)
        latent, rope = latent[chosen], rope[chosen]
        out = []
        for head in range(HEADS):
            both = latent @ self.weight[head].double().T
            keys = torch.cat((both[:, :NOPE], rope), dim=1)
            weights = torch.exp(keys @ q[head].double() * SCALE)
            total = weights.sum() + (0 if self.rule.sinks is None else math.exp(float(self.rule.sinks[head])))
            out.append(weights @ both[:, NOPE:] / total)
        return torch.stack(out)


@settings(max_examples=40, deadline=None)
@given(
    block=st.sampled_from([1, 2, 3, 5, 16]),
    seed=st.integers(0, 2**16),
    tile_bytes=st.sampled_from([1, 900, 4000, 3 << 20]),
    steps=st.lists(
        st.lists(st.sampled_from([0, 1, 1, 1, 2, 3, 9, 24]), min_size=6, max_size=6), min_size=1, max_size=5
    ),
)
def test_ragged_steps_over_scattered_pages_equal_attention_written_out(block, seed, tile_bytes, steps):
    world = World(block, seed, tile_bytes=tile_bytes)
    for counts in steps:
        chunks = [(row, count) for row, count in enumerate(counts) if count]
        if chunks:
            assert world.step(chunks)


@pytest.mark.parametrize("absorbed", [True, False])
def test_both_ways_of_attending_a_chunk_are_exact(monkeypatch, absorbed):
    monkeypatch.setattr("octavo.kernels.latent.expands", lambda *_: not absorbed)
    for rows, work in ((256, 1 << 24), (4, 1), (7, 200)):
        monkeypatch.setattr("octavo.kernels.latent.QUERY_ROWS", rows)
        monkeypatch.setattr("octavo.kernels.latent.MASK_ELEMENTS", 1)
        monkeypatch.setattr("octavo.kernels.latent.WORK_ELEMENTS", work)
        world = World(4)
        assert world.step([(0, 30), (1, 1), (2, 2)])
        assert world.step([(0, 11), (1, 26), (2, 1)])


def test_latents_kept_in_a_narrower_type_are_read_as_they_were_stored():
    world = World(4, dtype=torch.bfloat16)
    assert world.step([(0, 9), (1, 3)])
    assert world.step([(0, 1), (1, 6)])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_latents_in_eight_bits_are_read_as_they_were_rounded(dtype):
    world = World(4)
    for name in ("latent", "rope_k"):
        rows = getattr(world.pages, name).rows
        kept = Kept(torch.zeros(rows.shape, dtype=torch.int8).view(dtype), torch.zeros(rows.shape[:2]))
        object.__setattr__(world.pages, name, kept)
    world.rounded = lambda x: dequantise(*quantise(x, dtype))
    world.zero = lambda unit: None
    assert world.step([(0, 9), (1, 3), (2, 1)])
    assert world.step([(0, 1), (1, 6), (2, 1)])


def test_sinks_take_weight_and_give_no_value():
    world = World(4)
    world.rule = replace(world.rule, sinks=torch.tensor([-1.0, 0.5, 2.0]))
    assert world.step([(0, 9), (1, 3), (2, 1)])
    assert world.step([(0, 1), (1, 6), (2, 1)])


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("tile_bytes", [1, 3 << 20])
def test_only_what_an_index_chose_is_read(monkeypatch, absorbed, tile_bytes):
    monkeypatch.setattr("octavo.kernels.latent.expands", lambda *_: not absorbed)
    world = World(4, tile_bytes=tile_bytes)
    world.most = 5
    assert world.step([(0, 9), (1, 3), (2, 30)])
    assert world.step([(0, 1), (1, 6), (2, 1), (3, 4)])
    assert world.step([(0, 1), (1, 1), (2, 1), (3, 1)])


def test_in_half_precision_the_error_is_that_of_rounding():
    world = World(4, dtype=torch.bfloat16)
    world.step([(0, 30), (1, 7)])
    contexts = np.asarray([30, 7])
    step = AttentionStep(4, 2, np.asarray([0, 1]), np.arange(3), contexts - 1, contexts, world.tables,
                         torch.empty(0), torch.empty(0))  # fmt: skip
    q = world.normal(2, HEADS, NOPE + ROPE).bfloat16()
    world.weight = world.weight.bfloat16()
    rule = LatentRule(SCALE, world.weight, V_DIM)
    out = world.kernel.attend(q, (q, q), world.pages, step, rule)
    for row in (0, 1):
        right = world.by_hand(q[row], row, int(contexts[row]) - 1)
        assert float((out[row].double() - right).abs().max()) < 0.02 * float(right.abs().max())


def test_a_sequence_gets_the_same_alone_and_beside_others():
    alone, beside = World(4, seed=3), World(4, seed=3)
    for world in (alone, beside):
        world.step([(row, 5 + 6 * row) for row in range(5)])
    q = alone.normal(5, HEADS, NOPE + ROPE)

    def decode(world, rows):
        contexts = np.asarray([len(world.latents[row]) for row in rows])
        step = AttentionStep(4, len(rows), np.asarray(rows), np.arange(len(rows) + 1), contexts - 1, contexts,
                             world.tables, torch.empty(0), torch.empty(0))  # fmt: skip
        return world.kernel.attend(q[rows], (q, q), world.pages, step, world.rule)

    together = decode(beside, [4, 3, 2, 1, 0])
    for place, row in enumerate([4, 3, 2, 1, 0]):
        assert torch.allclose(decode(alone, [row])[0], together[place], atol=1e-6)


def test_a_nan_in_one_sequence_stays_in_it():
    world = World(4)
    world.step([(row, 3 + row) for row in range(4)])
    world.pages.latent.rows[world.tables[1, 0]] = float("nan")
    assert not world.step([(1, 1)])
    assert world.step([(0, 1), (2, 1), (3, 1)])


def test_the_cheaper_way_is_chosen_by_counting_multiplications():
    rule = LatentRule(1.0, torch.empty(128, 256, 512, device="meta"), 128)  # DeepSeek-V3
    assert expands(1, 2, rule, 64) is False, "a decode does not expand what it reads"
    assert expands(2048, 2048, rule, 64) is True, "a chunk that starts its sequence does"
    # 131072 (keys - queries) < 768 x queries x keys: many keys must be expanded for each chunk anew
    assert [expands(n, 32_000, rule, 64) for n in (169, 171)] == [False, True]
    few_heads = LatentRule(1.0, torch.empty(4, 256, 512, device="meta"), 128)
    assert expands(171, 32_000, few_heads, 64) is True, "the number of heads cancels"
