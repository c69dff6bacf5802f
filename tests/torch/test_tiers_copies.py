"""Copies between arenas: whatever order the slots come in, each block arrives in its place and nothing else changes."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.torch.movers import LAYOUT, kv

from octavo.memory.groups import StateGroup
from octavo.memory.layout import make_layout
from octavo.runtime.arena import Arena
from octavo.runtime.block_copy import BlockCopier, copy_rows

PLAIN = make_layout((StateGroup("full", (0, 1), (kv(2, 5), kv(2, 5))),), 3)
SLABS = 24


def slots(random: Random, count: int, most: int) -> list[int]:
    """Neighbours, neighbours backwards, an ascending choice, or anything."""
    first = random.randrange(most - count + 1)
    run = list(range(first, first + count))
    return random.choice((run, run[::-1], sorted(random.sample(range(most), count)), random.sample(range(most), count)))


@given(seed=st.integers(0, 10**6))
def test_rows_arrive_in_their_places(seed: int) -> None:
    random = Random(seed)
    count = random.randrange(1, 40)
    sources, targets = slots(random, count, 64), slots(random, count, 64)
    made = np.random.default_rng(seed)
    read, written = made.integers(0, 255, (64, 7), np.uint8), made.integers(0, 255, (64, 7), np.uint8)
    want = written.copy()
    for source, target in zip(sources, targets, strict=True):
        want[target] = read[source]
    copy_rows(written, read, sources, targets)
    assert (written == want).all()


@pytest.mark.parametrize("down", [True, False])
@pytest.mark.parametrize(("layout", "group"), [(PLAIN, 0), (LAYOUT, 0), (LAYOUT, 1)])
@given(seed=st.integers(0, 10**6))
def test_blocks_arrive_whole_in_slabs_with_and_without_padding(layout, group, down, seed) -> None:
    random = Random(seed)
    device, host = Arena(layout, SLABS), Arena(layout, SLABS)
    generator = torch.Generator().manual_seed(seed)
    for arena in (device, host):
        arena.bytes.random_(0, 255, generator=generator)
    read, written = (device, host) if down else (host, device)
    most = SLABS * layout.groups[group].blocks_per_slab
    count = random.randrange(1, most + 1)
    sources, targets = slots(random, count, most), slots(random, count, most)
    want, size = written.bytes.clone(), layout.groups[group].block_bytes
    for source, target in zip(sources, targets, strict=True):
        start, end = layout.address(group, source), layout.address(group, target)
        want[end : end + size] = read.bytes[start : start + size]
    copier = BlockCopier(device, host)
    copier.copy(down, group, sources, targets)
    assert torch.equal(written.bytes, want)
    copier.close()
