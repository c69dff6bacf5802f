"""Copies between arenas: whatever order the slots come in, each block arrives in its place and nothing else changes."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.torch.movers import LAYOUT, kv

from octavo.errors import InvariantViolation
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


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("down", [True, False])
@pytest.mark.parametrize(("layout", "group"), [(PLAIN, 0), (LAYOUT, 0), (LAYOUT, 1)])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_blocks_arrive_whole_in_slabs_with_and_without_padding(layout, group, down, native, seed) -> None:
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
    if not native:
        copier.native = None
    copier.copy(down, group, sources, targets)
    assert torch.equal(written.bytes, want)
    copier.close()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("width", [128, 129, 1024])
def test_copies_past_the_caches_move_every_byte_and_no_other(native, width) -> None:
    """Blocks of 16, of 16.1 (whose lines the processor cannot stream) and of 128 KiB, more than 4 MiB in one call."""
    layout = make_layout((StateGroup("full", (0, 1), (kv(1, width),) * 2),), 8)
    count = 5 * 2**20 // layout.slab_bytes
    device, host = Arena(layout, count + 3), Arena(layout, count + 3)
    device.bytes.random_(0, 255)
    before = host.bytes.random_(0, 255).clone()
    random = Random(width)
    sources, targets = random.sample(range(count + 3), count), random.sample(range(count + 3), count)
    copier = BlockCopier(device, host)
    if not native:
        copier.native = None
    copier.copy(True, 0, sources, targets)
    want, rows = before.reshape(-1, layout.slab_bytes), device.bytes.reshape(-1, layout.slab_bytes)
    want[targets] = rows[sources]
    assert torch.equal(host.bytes, want.flatten())
    copier.close()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("down", "sources", "targets"), [(True, [0, 24], [0, 1]), (False, [0, 1], [2, -1])])
def test_slots_that_an_arena_has_not_are_refused_before_anything_moves(native, down, sources, targets) -> None:
    device, host = Arena(PLAIN, SLABS), Arena(PLAIN, SLABS)
    for arena in (device, host):
        arena.bytes.random_(0, 255)
    before = [arena.bytes.clone() for arena in (device, host)]
    copier = BlockCopier(device, host)
    if not native:
        copier.native = None
    with pytest.raises(InvariantViolation, match="outside"):
        copier.copy(down, 0, sources, targets)
    with pytest.raises(InvariantViolation, match="outside"):
        copier.host_blocks(0, [SLABS], [0], [bytes(32)])
    assert all(torch.equal(arena.bytes, was) for arena, was in zip((device, host), before, strict=True))
    copier.close()


@pytest.mark.parametrize("group", [0, 1])
def test_blocks_for_a_disk_are_those_of_the_arena_in_place(group) -> None:
    device, host = Arena(LAYOUT, SLABS), Arena(LAYOUT, SLABS)
    host.bytes.random_(0, 255)
    copier = BlockCopier(device, host)
    slots = list(range(SLABS * LAYOUT.groups[group].blocks_per_slab))[::-1]
    batch = copier.host_blocks(group, slots, slots, [bytes(32)] * len(slots))
    size = LAYOUT.groups[group].block_bytes
    for at, slot in enumerate(slots):
        start = LAYOUT.address(group, slot)
        assert bytes(batch[at].block) == bytes(host.bytes[start : start + size].numpy())
        assert batch.addresses[at] == host.bytes.data_ptr() + start
    batch[0].block[:] = bytes(size)
    assert not host.bytes[LAYOUT.address(group, slots[0]) :][:size].any()
    copier.close()
