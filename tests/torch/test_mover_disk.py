"""The mover with a disk: what is stored comes back or says why, what is forgotten is gone, and who waits is woken."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tests.torch.movers import LAYOUT, NUMBERS, Scripted, block, disk_of, ended, give, key, movers

from octavo.errors import InvariantViolation
from octavo.memory.transfers import Order, TimedOut
from octavo.runtime.mover import WAIT_S

torch.set_num_threads(1)


@pytest.fixture
def make():
    with movers() as maker:
        yield maker


def test_blocks_go_to_disk_and_come_back_and_a_lost_one_says_why(make, tmp_path):
    mover, _, host = make(disk=disk_of(tmp_path))
    give(mover, "store", 1, (0, 1, 2), (3, 4, 5), (key(0), key(1), key(2)))
    assert ended(mover)[-1].status == "done"
    mover.disk[1].forget([4])
    give(mover, "load", 1, (3, 4, 5), (6, 7, 8), (key(0), key(1), key(2)))
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
    stuck = give(mover, "load", 0, (0,), (1,), (key(1),), timeout=0.02)
    assert faults.reached.wait(10)
    time.sleep(0.03)
    assert mover.poll(0.0) == [TimedOut(stuck)]
    for _ in range(20):
        assert mover.poll(0.0) == []
    assert mover.pending == 1
    gate.set()
    (notice,) = ended(mover)
    assert (notice.number, notice.status, notice.reasons) == (stuck, "timed_out", ("absent",))


def test_a_stuck_disk_does_not_hold_up_copies_between_arenas(make, tmp_path):
    gate = threading.Event()

    class DiskOnly(Scripted):
        def before_batch(self, order, first_block):
            if order.route == "load":
                super().before_batch(order, first_block)

    mover, _, _ = make(disk=disk_of(tmp_path), faults=DiskOnly(gate=gate))
    stuck = give(mover, "load", 0, (0,), (0,), (key(0),))
    quick = give(mover, "promote", 0, (3,), (3,))
    assert ended(mover)[-1].number == quick
    gate.set()
    assert ended(mover)[-1].number == stuck


def test_nothing_is_asked_of_a_disk_that_is_not_there_and_no_number_is_taken_twice(make):
    mover, _, _ = make(faults=Scripted(delay=0.05))
    with pytest.raises(InvariantViolation, match="without a disk"):
        give(mover, "store", 0, (0,), (0,), (key(0),))
    with pytest.raises(InvariantViolation, match="without a disk"):
        mover.forget(0, (1,))
    order = Order(next(NUMBERS), "demote", 0, (0,), (0,))
    mover.submit(order)
    with pytest.raises(InvariantViolation, match="a second time"):
        mover.submit(order)


def test_what_is_forgotten_is_not_found_by_a_later_run_and_what_is_stored_after_is(make, tmp_path):
    mover, _, _ = make(disk=disk_of(tmp_path))
    give(mover, "store", 0, (0, 1), (2, 3), (key(0), key(1)))
    mover.forget(0, (2, 3))  # in turn: what was ordered before is erased with the rest
    give(mover, "store", 0, (2,), (3,), (key(2),))
    assert [notice.status for notice in ended(mover, count=2)] == ["done", "done"]
    assert mover.disk[0].stored() == [(key(2), 3)]
    mover.close()
    again = disk_of(tmp_path)
    assert [store.stored() for store in again] == [[(key(2), 3)], []]
    for store in again:
        store.close()


def test_forgetting_does_not_hold_up_the_engine_and_is_done_even_if_the_mover_closes_first(make, tmp_path):
    gate = threading.Event()
    faults = Scripted()
    mover, _, _ = make(disk=disk_of(tmp_path), faults=faults)
    give(mover, "store", 0, (0,), (0,), (key(0),))
    ended(mover)
    faults.gate = gate
    faults.reached.clear()
    give(mover, "load", 0, (0,), (5,), (key(0),))
    assert faults.reached.wait(10)
    started = time.monotonic()
    mover.forget(0, (0,))
    assert time.monotonic() - started < 1
    assert mover.disk[0].stored() == [(key(0), 0)]
    gate.set()
    mover.close()
    assert mover.disk[0].stored() == []


def test_records_are_erased_at_the_end_even_if_the_disk_thread_died(make, tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    class Dies(Scripted):
        def loses(self, order):
            if order.route == "load":
                raise SystemExit
            return False

    mover, _, _ = make(disk=disk_of(tmp_path), faults=Dies())
    give(mover, "store", 0, (0,), (0,), (key(0),))
    ended(mover)
    give(mover, "load", 0, (0,), (5,), (key(0),))
    mover.forget(0, (0,))
    assert ended(mover)[-1].reasons == ("lost_completion",)
    assert mover.disk[0].stored() == [(key(0), 0)]
    mover.close()
    assert mover.disk[0].stored() == []


def test_an_erasure_that_breaks_is_counted_and_the_lane_goes_on(make, tmp_path, monkeypatch):
    mover, _, _ = make(disk=disk_of(tmp_path))

    def breaks(slots):
        raise OSError("injected")

    monkeypatch.setattr(mover.disk[0], "forget", breaks)
    mover.forget(0, (0,))
    give(mover, "store", 0, (0,), (0,), (key(0),))
    assert ended(mover)[-1].status == "done"
    assert mover.erasures_failed == 1


def test_waiting_ends_with_the_order_and_otherwise_after_a_moment(make):
    gate = threading.Event()
    faults = Scripted(gate=gate)
    mover, _, _ = make(faults=faults)
    started = time.monotonic()
    mover.wait()
    assert WAIT_S * 0.9 <= time.monotonic() - started < 5
    number = give(mover, "demote", 0, (0,), (0,))
    assert faults.reached.wait(10)
    mover.wait()
    assert mover.poll(0.0) == []
    gate.set()
    until = time.monotonic() + 10
    notices = []
    while not notices:
        assert time.monotonic() < until
        mover.wait()
        notices = mover.poll(0.0)
    assert notices[0].number == number
    give(mover, "demote", 0, (0,), (0,))
    time.sleep(0.05)
    started = time.monotonic()
    mover.wait()  # it has ended already
    assert time.monotonic() - started < WAIT_S
    ended(mover)


def test_waiting_ends_at_a_deadline_and_at_once_where_a_cancelled_order_can_be_told(make):
    gate = threading.Event()
    mover, _, _ = make(faults=Scripted(gate=gate))
    give(mover, "demote", 0, (0,), (0,))
    behind = give(mover, "demote", 0, (1,), (1,), timeout=0.004)
    started = time.monotonic()
    mover.wait()
    assert time.monotonic() - started < WAIT_S
    assert mover.poll(0.0)[0] == TimedOut(behind)
    third = give(mover, "demote", 0, (2,), (2,))
    mover.cancel(third)
    started = time.monotonic()
    mover.wait()
    assert time.monotonic() - started < WAIT_S
    assert [notice.number for notice in mover.poll(0.0)] == [third]
    gate.set()


def test_a_load_waits_for_erasures_and_not_for_stores_that_nobody_waits_for(make, tmp_path):
    gate = threading.Event()
    faults = Scripted(gate=gate)
    mover, _, _ = make(disk=disk_of(tmp_path), faults=faults)
    give(mover, "store", 1, (0,), (0,), (key(0),))
    assert faults.reached.wait(10)
    later = [give(mover, "store", 1, (slot,), (slot,), (key(slot),)) for slot in (1, 2)]
    mover.forget(1, [7])
    after = give(mover, "store", 1, (3,), (3,), (key(3),))
    load = give(mover, "load", 1, (5,), (6,), (key(5),))
    gate.set()
    assert [notice.number for notice in ended(mover, count=5)][1:] == [*later, load, after]
