"""Movers over two small arenas and pools on disk, faults that act as told, and waiting for what ends."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

import torch

from octavo.geometry.dtypes import FP32
from octavo.geometry.state import Component
from octavo.memory.groups import StateGroup
from octavo.memory.layout import make_layout
from octavo.memory.transfers import Ended, Order
from octavo.runtime.arena import Arena
from octavo.runtime.disk_format import Identity, Places
from octavo.runtime.disk_slots import DiskSlots
from octavo.runtime.mover import Mover


def kv(heads, dim):
    return (Component("k", (heads, dim), FP32), Component("v", (heads, dim), FP32))


LAYOUT = make_layout((StateGroup("wide", (0, 2), (kv(2, 10), kv(2, 10))), StateGroup("narrow", (1,), (kv(1, 12),))), 3)
SLABS = 8


def key(n):
    return n.to_bytes(32, "big")


def filled(seed):
    arena = Arena(LAYOUT, SLABS)
    arena.bytes.copy_(torch.randint(0, 255, arena.bytes.shape, generator=torch.Generator().manual_seed(seed)))
    return arena


def block(arena, group, slot):
    start = LAYOUT.address(group, slot)
    return bytes(arena.bytes[start : start + LAYOUT.groups[group].block_bytes].numpy())


def disk_of(path, slots=16):
    return [
        DiskSlots(
            path / f"pool{i}",
            Identity.of("model", LAYOUT.signature, g.name),
            g.block_bytes,
            Places.of(g.block_bytes).file_bytes(slots),
        )
        for i, g in enumerate(LAYOUT.groups)
    ]


NUMBERS = itertools.count(1)


def give(mover, route, group, sources, targets, keys=(), timeout=None):
    """Order it; the order's number."""
    order = Order(next(NUMBERS), route, group, tuple(sources), tuple(targets), tuple(keys), timeout)
    mover.submit(order)
    return order.number


class Scripted:
    """Holds batches at a gate, slows them, makes them fail, loses word of their end."""

    def __init__(self, delay=0.0, fail=False, lose=False, gate=None):
        self.delay, self.fail, self.lose, self.gate = delay, fail, lose, gate
        self.reached = threading.Event()
        self.inside = 0
        self.batches = 0

    def before_batch(self, order, first_block):
        self.batches += 1
        self.inside += 1
        self.reached.set()
        try:
            if self.gate is not None:
                assert self.gate.wait(20)
            time.sleep(self.delay)
            if self.fail:
                raise OSError("injected")
        finally:
            self.inside -= 1

    def loses(self, order):
        return self.lose


@contextlib.contextmanager
def movers():
    """Makes movers, each with its device and host, and closes them."""
    made = []

    def maker(**options):
        device, host = filled(1), filled(2)
        mover = Mover(device, host, **options)
        made.append(mover)
        return mover, device, host

    try:
        yield maker
    finally:
        for mover in made:
            mover.close()


def ended(mover, seconds=10.0, count=1):
    """Notices until `count` orders have ended."""
    notices, until = [], time.monotonic() + seconds
    while sum(isinstance(n, Ended) for n in notices) < count:
        assert time.monotonic() < until, f"only {notices}"
        notices += mover.poll(0.0)
        time.sleep(0.0005)
    return notices
