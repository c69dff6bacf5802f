"""The mover: blocks arrive whole, every order ends exactly once, and never while a copy may touch its slots."""

from __future__ import annotations

import inspect
import random
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.torch.movers import LAYOUT, SLABS, Scripted, block, disk_of, ended, filled, give, key, kv, movers

from octavo.errors import ConfigError, InvariantViolation
from octavo.memory.groups import StateGroup
from octavo.memory.layout import make_layout
from octavo.memory.transfers import Mover as MoverSeam
from octavo.memory.transfers import Order, TimedOut
from octavo.runtime.arena import Arena
from octavo.runtime.block_copy import runs
from octavo.runtime.mover import Budget, Mover

torch.set_num_threads(1)


@pytest.fixture
def make():
    with movers() as maker:
        yield maker


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("route", ["demote", "promote"])
def test_blocks_arrive_whole_and_nothing_else_changes(make, route, group):
    mover, device, host = make()
    read, written = (device, host) if route == "demote" else (host, device)
    before = written.bytes.clone()
    sources, targets = (0, 1, 2, 5, 4), (3, 4, 5, 0, 1)
    number = give(mover, route, group, sources, targets)
    (notice,) = ended(mover)
    size = LAYOUT.groups[group].block_bytes
    assert (notice.number, notice.status, notice.bytes) == (number, "done", 5 * size)
    assert notice.reasons == ("",) * 5
    for source, target in zip(sources, targets, strict=True):
        assert block(written, group, target) == block(read, group, source)
        start = LAYOUT.address(group, target)
        before[start : start + size] = written.bytes[start : start + size]
    assert torch.equal(before, written.bytes)
    assert mover.poll(0.0) == []
    assert mover.pending == 0


def test_neighbouring_blocks_are_one_copy_and_padding_is_never_crossed():
    size = LAYOUT.groups[1].block_bytes
    per_slab = LAYOUT.groups[1].blocks_per_slab
    assert LAYOUT.padding_bytes_per_slab[1] > 0
    assert runs(LAYOUT, 1, range(per_slab), range(per_slab)) == [(0, 0, per_slab * size)]
    assert len(runs(LAYOUT, 1, range(2 * per_slab), range(2 * per_slab))) == 2
    assert len(runs(LAYOUT, 0, (0, 1, 2), (4, 5, 6))) == 1
    assert len(runs(LAYOUT, 0, (0, 1, 2), (6, 5, 4))) == 3


def test_an_order_behind_a_stuck_one_ends_at_its_deadline_without_having_begun(make):
    gate = threading.Event()
    faults = Scripted(gate=gate)
    mover, _, host = make(faults=faults)
    before = host.bytes.clone()
    give(mover, "demote", 0, (0,), (0,))
    assert faults.reached.wait(10)
    behind = give(mover, "demote", 0, (1,), (1,), timeout=0.01)
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
    number = give(mover, "demote", 0, (0, 1, 2, 3), (2, 3, 4, 5))
    assert faults.reached.wait(10)
    mover.cancel(number)
    for _ in range(20):
        assert mover.poll(0.0) == []
    gate.set()
    (notice,) = ended(mover)
    assert (notice.status, notice.bytes) == ("cancelled", 2 * size)
    assert notice.reasons == ("", "", "not_begun", "not_begun")
    assert [block(host, 0, slot) for slot in (2, 3)] == [block(device, 0, slot) for slot in (0, 1)]
    assert [block(host, 0, slot) for slot in (4, 5)] == before[4:]
    mover.cancel(number)
    assert mover.poll(0.0) == []


def test_an_error_in_a_copy_is_a_failed_order_and_the_next_is_served(make):
    faults = Scripted(fail=True)
    mover, _, _ = make(faults=faults)
    give(mover, "demote", 0, (0, 1), (0, 1))
    notice = ended(mover)[-1]
    assert (notice.status, notice.bytes, notice.reasons) == ("failed", 0, ("error: injected",) * 2)
    faults.fail = False
    give(mover, "demote", 0, (0, 1), (0, 1))
    assert ended(mover)[-1].status == "done"


def test_a_lost_completion_is_noticed_once_the_copy_has_ended(make):
    gate = threading.Event()
    faults = Scripted(lose=True, gate=gate)
    mover, _, _ = make(faults=faults)
    give(mover, "promote", 0, (0,), (0,))
    assert faults.reached.wait(10)
    for _ in range(20):
        assert mover.poll(0.0) == []
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
    numbers = [give(mover, "demote", 0, (n,), (n,)) for n in range(3)]
    notices = ended(mover, count=3)
    assert sorted(n.number for n in notices) == numbers
    assert {n.status for n in notices} == {"failed"}


def test_the_budget_is_kept(make):
    size = LAYOUT.groups[0].block_bytes
    mover, _, _ = make(budget=Budget(bytes_per_second=size / 0.02, batch_bytes=size))
    started = time.monotonic()
    give(mover, "demote", 0, tuple(range(6)), tuple(range(6)))
    notice = ended(mover)[-1]
    assert time.monotonic() - started >= 5 * 0.02
    assert notice.seconds >= 5 * 0.02


def test_cancelling_ends_the_wait_for_a_budget(make):
    size = LAYOUT.groups[0].block_bytes
    mover, _, _ = make(budget=Budget(bytes_per_second=size / 100, batch_bytes=size))
    number = give(mover, "demote", 0, (0, 1), (0, 1))
    time.sleep(0.05)
    mover.cancel(number)
    assert ended(mover, seconds=5)[-1].status == "cancelled"


def test_close_waits_for_the_batch_under_way_and_every_order_is_still_reported(make):
    faults = Scripted(delay=0.1)
    mover, _, _ = make(faults=faults)
    numbers = [give(mover, "demote", 0, (n,), (n,)) for n in range(4)]
    assert faults.reached.wait(10)
    mover.close()
    assert faults.inside == 0
    notices = mover.poll(0.0)
    assert sorted(n.number for n in notices) == numbers
    assert {n.status for n in notices} == {"cancelled"}
    with pytest.raises(InvariantViolation, match="after close"):
        give(mover, "demote", 0, (0,), (0,))


@pytest.mark.parametrize(
    ("route", "group", "sources", "targets", "keys"),
    [
        ("demote", 0, (0, 1), (0,), ()),
        ("demote", 0, (), (), ()),
        ("demote", 0, (SLABS,), (0,), ()),
        ("demote", 0, (0,), (0,), (key(0),)),
        ("promote", 1, (0,), (-1,), ()),
        ("store", 0, (0,), (0,), ()),
        ("store", 0, (0,), (0,), (b"short",)),
        ("store", 0, (0,), (16,), (key(0),)),
        ("load", 0, (-1,), (0,), (key(0),)),
        ("load", 0, (0,), (SLABS,), (key(0),)),
    ],
)
def test_an_order_that_makes_no_sense_is_a_broken_invariant(make, tmp_path, route, group, sources, targets, keys):
    mover, _, _ = make(disk=disk_of(tmp_path))
    with pytest.raises(InvariantViolation, match="transfer-order"):
        give(mover, route, group, sources, targets, keys)
    assert mover.pending == 0


def test_it_says_how_long_a_copy_took_not_how_long_it_waited(make):
    faults = Scripted(delay=0.1)
    mover, _, _ = make(faults=faults)
    for n in range(2):
        give(mover, "demote", 0, (n,), (n,))
    for notice in ended(mover, count=2):
        assert 0.1 <= notice.seconds < 0.19


def test_it_fits_the_seam_of_the_core(make):
    mover, _, _ = make()
    seam = [name for name in vars(MoverSeam) if not name.startswith("_")]
    assert sorted(seam) == ["cancel", "close", "forget", "poll", "submit", "wait"]
    for name in seam:
        assert inspect.signature(getattr(MoverSeam, name)).parameters.keys() == {
            "self",
            *inspect.signature(getattr(mover, name)).parameters,
        }


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
        for notice in mover.poll(0.0):
            if isinstance(notice, TimedOut):
                assert notice.number in open_
                assert notice.number not in late
                late.add(notice.number)
                continue
            order = open_.pop(notice.number)
            assert order.targets not in chaos.touching
            assert (notice.status == "timed_out") == (notice.number in late)
            for source, target, reason in zip(order.sources, order.targets, notice.reasons, strict=True):
                assert reason or block(host, 0, target) == block(device, 0, source)
            closed[notice.number] = notice
            free.extend(order.targets)

    count = 0
    for _ in range(30):
        act = rng.random()
        if act < 0.5 and free:
            targets = tuple(free.pop(rng.randrange(len(free))) for _ in range(rng.randint(1, min(5, len(free)))))
            sources = tuple(rng.randrange(SLABS) for _ in targets)
            count += 1
            order = Order(count, "demote", 0, sources, targets, timeout=rng.choice([None, None, 0.0, 0.002]))
            open_[count] = order
            mover.submit(order)
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
