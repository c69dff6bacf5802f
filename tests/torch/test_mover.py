"""The mover: blocks arrive whole, every order ends exactly once, and never while a copy may touch its slots."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError, InvariantViolation
from octavo.geometry.dtypes import FP32
from octavo.geometry.state import Component
from octavo.memory.groups import StateGroup
from octavo.memory.layout import make_layout
from octavo.runtime.arena import Arena
from octavo.runtime.block_copy import runs
from octavo.runtime.disk import DiskPool
from octavo.runtime.disk_format import Identity, checksum
from octavo.runtime.mover import Budget, Mover
from octavo.memory.transfers import Ended, Order, TimedOut

torch.set_num_threads(1)


def kv(heads, dim):
    return (Component("k", (heads, dim), FP32), Component("v", (heads, dim), FP32))


LAYOUT = make_layout((StateGroup("wide", (0, 2), (kv(2, 10), kv(2, 10))), StateGroup("narrow", (1,), (kv(1, 12),))), 3)
SLABS = 8


def key(n):
    return checksum(b"%d" % n)


def filled(seed):
    arena = Arena(LAYOUT, SLABS)
    arena.bytes.copy_(torch.randint(0, 255, arena.bytes.shape, generator=torch.Generator().manual_seed(seed)))
    return arena


def block(arena, group, slot):
    start = LAYOUT.address(group, slot)
    return bytes(arena.bytes[start : start + LAYOUT.groups[group].block_bytes].numpy())


def disk_of(path, slots=16):
    return [
        DiskPool(path / f"pool{i}", Identity.of("model", LAYOUT.signature, g.name), g.block_bytes, 4096 * (slots + 1))
        for i, g in enumerate(LAYOUT.groups)
    ]


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


@pytest.fixture
def make():
    made = []

    def maker(**options):
        device, host = filled(1), filled(2)
        mover = Mover(device, host, **options)
        made.append(mover)
        return mover, device, host

    yield maker
    for mover in made:
        mover.close()
        for pool in mover.disk:
            pool.close()


def ended(mover, seconds=10.0, count=1):
    """Notices until `count` orders have ended."""
    notices, until = [], time.monotonic() + seconds
    while sum(isinstance(n, Ended) for n in notices) < count:
        assert time.monotonic() < until, f"only {notices}"
        notices += mover.poll()
        time.sleep(0.0005)
    return notices


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("route", ["demote", "promote"])
def test_blocks_arrive_whole_and_nothing_else_changes(make, route, group):
    mover, device, host = make()
    read, written = (device, host) if route == "demote" else (host, device)
    before = written.bytes.clone()
    sources, targets = (0, 1, 2, 5, 4), (3, 4, 5, 0, 1)
    number = mover.submit(Order(route, group, sources, targets))
    (notice,) = ended(mover)
    size = LAYOUT.groups[group].block_bytes
    assert (notice.transfer, notice.status, notice.bytes) == (number, "done", 5 * size)
    assert notice.reasons == ("",) * 5
    for source, target in zip(sources, targets, strict=True):
        assert block(written, group, target) == block(read, group, source)
        start = LAYOUT.address(group, target)
        before[start : start + size] = written.bytes[start : start + size]
    assert torch.equal(before, written.bytes)
    assert mover.poll() == []
    assert mover.pending == 0


def test_neighbouring_blocks_are_one_copy_and_padding_is_never_crossed():
    size = LAYOUT.groups[1].block_bytes
    per_slab = LAYOUT.groups[1].blocks_per_slab
    assert LAYOUT.padding_bytes_per_slab[1] > 0
    assert runs(LAYOUT, 1, range(per_slab), range(per_slab)) == [(0, 0, per_slab * size)]
    assert len(runs(LAYOUT, 1, range(2 * per_slab), range(2 * per_slab))) == 2
    assert len(runs(LAYOUT, 0, (0, 1, 2), (4, 5, 6))) == 1
    assert len(runs(LAYOUT, 0, (0, 1, 2), (6, 5, 4))) == 3


def test_blocks_go_to_disk_and_come_back_and_a_lost_one_says_why(make, tmp_path):
    mover, _, host = make(disk=disk_of(tmp_path))
    mover.submit(Order("store", 1, sources=(0, 1, 2), keys=(key(0), key(1), key(2))))
    assert ended(mover)[-1].status == "done"
    mover.disk[1].drop(key(1))
    mover.submit(Order("load", 1, targets=(6, 7, 8), keys=(key(0), key(1), key(2))))
    notice = ended(mover)[-1]
    assert notice.status == "failed"
    assert notice.reasons == ("", "absent", "")
    assert notice.bytes == 2 * LAYOUT.groups[1].block_bytes
    assert block(host, 1, 6) == block(host, 1, 0)
    assert block(host, 1, 8) == block(host, 1, 2)


def test_a_stuck_load_times_out_at_once_and_ends_only_when_the_copy_has(make, tmp_path):
    gate = threading.Event()
    faults = Scripted(gate=gate)
    mover, _, _ = make(disk=disk_of(tmp_path), faults=faults)
    stuck = mover.submit(Order("load", 0, targets=(1,), keys=(key(1),), timeout=0.02))
    assert faults.reached.wait(10)
    time.sleep(0.03)
    assert mover.poll() == [TimedOut(stuck)]
    for _ in range(20):
        assert mover.poll() == []
    assert mover.pending == 1
    gate.set()
    (notice,) = ended(mover)
    assert (notice.transfer, notice.status, notice.reasons) == (stuck, "timed_out", ("absent",))


def test_an_order_behind_a_stuck_one_ends_at_its_deadline_without_having_begun(make):
    gate = threading.Event()
    faults = Scripted(gate=gate)
    mover, _, host = make(faults=faults)
    before = host.bytes.clone()
    mover.submit(Order("demote", 0, (0,), (0,)))
    assert faults.reached.wait(10)
    behind = mover.submit(Order("demote", 0, (1,), (1,), timeout=0.01))
    notices = ended(mover)
    assert notices[0] == TimedOut(behind)
    assert (notices[1].status, notices[1].seconds, notices[1].bytes) == ("timed_out", 0.0, 0)
    assert notices[1].reasons == ("not_begun",)
    assert torch.equal(before, host.bytes)
    gate.set()
    assert ended(mover)[-1].status == "done"
    assert faults.batches == 1


def test_a_cancelled_order_ends_after_the_batch_under_way_and_starts_no_other(make):
    gate = threading.Event()
    faults = Scripted(gate=gate)
    size = LAYOUT.groups[0].block_bytes
    mover, device, host = make(faults=faults, budget=Budget(batch_bytes=2 * size))
    before = [block(host, 0, slot) for slot in range(6)]
    number = mover.submit(Order("demote", 0, (0, 1, 2, 3), (2, 3, 4, 5)))
    assert faults.reached.wait(10)
    assert mover.cancel(number)
    for _ in range(20):
        assert mover.poll() == []
    gate.set()
    (notice,) = ended(mover)
    assert (notice.status, notice.bytes) == ("cancelled", 2 * size)
    assert notice.reasons == ("", "", "not_begun", "not_begun")
    assert [block(host, 0, slot) for slot in (2, 3)] == [block(device, 0, slot) for slot in (0, 1)]
    assert [block(host, 0, slot) for slot in (4, 5)] == before[4:]
    assert not mover.cancel(number)


def test_a_stuck_disk_does_not_hold_up_copies_between_arenas(make, tmp_path):
    gate = threading.Event()

    class DiskOnly(Scripted):
        def before_batch(self, order, first_block):
            if order.route == "load":
                super().before_batch(order, first_block)

    mover, _, _ = make(disk=disk_of(tmp_path), faults=DiskOnly(gate=gate))
    stuck = mover.submit(Order("load", 0, targets=(0,), keys=(key(0),)))
    quick = mover.submit(Order("promote", 0, (3,), (3,)))
    assert ended(mover)[-1].transfer == quick
    gate.set()
    assert ended(mover)[-1].transfer == stuck


def test_an_error_in_a_copy_is_a_failed_order_and_the_next_is_served(make):
    faults = Scripted(fail=True)
    mover, _, _ = make(faults=faults)
    mover.submit(Order("demote", 0, (0, 1), (0, 1)))
    notice = ended(mover)[-1]
    assert (notice.status, notice.bytes, notice.reasons) == ("failed", 0, ("error: injected",) * 2)
    faults.fail = False
    mover.submit(Order("demote", 0, (0, 1), (0, 1)))
    assert ended(mover)[-1].status == "done"


def test_a_lost_completion_is_noticed_once_the_copy_has_ended(make):
    gate = threading.Event()
    faults = Scripted(lose=True, gate=gate)
    mover, _, _ = make(faults=faults)
    mover.submit(Order("promote", 0, (0,), (0,)))
    assert faults.reached.wait(10)
    for _ in range(20):
        assert mover.poll() == []
    gate.set()
    notice = ended(mover)[-1]
    assert (notice.status, notice.reasons, notice.bytes) == ("failed", ("lost_completion",), 0)
    assert mover.pending == 0


def test_a_thread_that_dies_leaves_no_order_without_an_end(make, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    class Dies(Scripted):
        def loses(self, order):
            raise SystemExit

    mover, _, _ = make(faults=Dies())
    numbers = [mover.submit(Order("demote", 0, (n,), (n,))) for n in range(3)]
    notices = ended(mover, count=3)
    assert sorted(n.transfer for n in notices) == numbers
    assert {n.status for n in notices} == {"failed"}


def test_the_budget_is_kept(make):
    size = LAYOUT.groups[0].block_bytes
    mover, _, _ = make(budget=Budget(bytes_per_second=size / 0.02, batch_bytes=size))
    started = time.monotonic()
    mover.submit(Order("demote", 0, tuple(range(6)), tuple(range(6))))
    notice = ended(mover)[-1]
    assert time.monotonic() - started >= 5 * 0.02
    assert notice.seconds >= 5 * 0.02


def test_cancelling_ends_the_wait_for_a_budget(make):
    size = LAYOUT.groups[0].block_bytes
    mover, _, _ = make(budget=Budget(bytes_per_second=size / 100, batch_bytes=size))
    number = mover.submit(Order("demote", 0, (0, 1), (0, 1)))
    time.sleep(0.05)
    mover.cancel(number)
    assert ended(mover, seconds=5)[-1].status == "cancelled"


def test_close_waits_for_the_batch_under_way_and_every_order_is_still_reported(make):
    faults = Scripted(delay=0.1)
    mover, _, _ = make(faults=faults)
    numbers = [mover.submit(Order("demote", 0, (n,), (n,))) for n in range(4)]
    assert faults.reached.wait(10)
    mover.close()
    assert faults.inside == 0
    notices = mover.poll()
    assert sorted(n.transfer for n in notices) == numbers
    assert {n.status for n in notices} == {"cancelled"}
    with pytest.raises(InvariantViolation, match="after close"):
        mover.submit(Order("demote", 0, (0,), (0,)))


@pytest.mark.parametrize(
    "order",
    [
        Order("demote", 0, (0, 1), (0,)),
        Order("demote", 0, (), ()),
        Order("demote", 0, (SLABS,), (0,)),
        Order("promote", 1, (0,), (-1,)),
        Order("store", 0, sources=(0,), keys=(key(0),)),
        Order("load", 0, targets=(0,)),
    ],
)
def test_an_order_that_makes_no_sense_is_a_broken_invariant(make, order):
    mover, _, _ = make()
    with pytest.raises(InvariantViolation, match="transfer-order"):
        mover.submit(order)


def test_arenas_of_two_layouts_and_budgets_of_nothing_are_refused():
    other = Arena(make_layout((StateGroup("wide", (0,), (kv(2, 10),)),), 3), 2)
    with pytest.raises(ConfigError, match="host_bytes"):
        Mover(filled(1), other)
    with pytest.raises(ConfigError, match="bytes_per_second"):
        Budget(bytes_per_second=0)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6))
def test_whatever_is_cancelled_late_lost_or_broken_each_order_ends_once_and_says_the_truth(seed):
    rng = random.Random(seed)

    class Chaos:
        def __init__(self):
            self.rng = random.Random(seed + 1)
            self.touching = set()

        def before_batch(self, order, first_block):
            self.touching.add(order.targets)
            time.sleep(self.rng.choice([0, 0, 0.001, 0.003]))
            broken = self.rng.random() < 0.1
            if broken:
                self.touching.discard(order.targets)
                raise OSError("injected")

        def loses(self, order):
            self.touching.discard(order.targets)
            return self.rng.random() < 0.2

    chaos = Chaos()
    device, host = filled(1), filled(2)
    mover = Mover(device, host, budget=Budget(batch_bytes=2 * LAYOUT.groups[0].block_bytes), faults=chaos)
    free, open_, closed, late = list(range(SLABS)), {}, {}, set()

    def settle():
        for notice in mover.poll():
            if isinstance(notice, TimedOut):
                assert notice.transfer in open_
                assert notice.transfer not in late
                late.add(notice.transfer)
                continue
            order = open_.pop(notice.transfer)
            assert order.targets not in chaos.touching
            assert (notice.status == "timed_out") == (notice.transfer in late)
            for source, target, reason in zip(order.sources, order.targets, notice.reasons, strict=True):
                assert reason or block(host, 0, target) == block(device, 0, source)
            closed[notice.transfer] = notice
            free.extend(order.targets)

    count = 0
    for _ in range(30):
        act = rng.random()
        if act < 0.5 and free:
            targets = tuple(free.pop(rng.randrange(len(free))) for _ in range(rng.randint(1, min(5, len(free)))))
            sources = tuple(rng.randrange(SLABS) for _ in targets)
            order = Order("demote", 0, sources, targets, timeout=rng.choice([None, None, 0.0, 0.002]))
            open_[mover.submit(order)] = order
            count += 1
        elif act < 0.7 and open_:
            mover.cancel(rng.choice(sorted(open_)))
        else:
            settle()
    if rng.random() < 0.5:
        mover.close()
    until = time.monotonic() + 10
    while open_ and time.monotonic() < until:
        settle()
    mover.close()
    settle()
    assert len(closed) == count
    assert sorted(free) == list(range(SLABS))
