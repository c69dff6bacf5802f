"""The mover of virtual time: what a transfer takes, what stops it, what goes wrong, and that it always ends once."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.worlds import one_group, request

from octavo.cost.step import LinearCost
from octavo.cost.transfer import TransferLaw
from octavo.errors import ConfigError, InvariantViolation
from octavo.memory.keys import KeySpace
from octavo.memory.tiering import Below, tiered_cache
from octavo.memory.transfers import LANES, SIDES, Ended, Mover, Order, TimedOut
from octavo.policy.bundle import Policies
from octavo.policy.placement import WriteThrough
from octavo.scheduling.audit import Audit
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Admitted, Arrived, Transferred
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate import drive
from octavo.simulate.drive import Simulation
from octavo.simulate.executors import NANOSECONDS, SimExecutor, seconds
from octavo.simulate.links import Links, SeededFaults, SimMover

SIZES = (1000, 500)
LAWS = {
    "demote": TransferLaw(1000.0, 0.5),
    "promote": TransferLaw(2000.0, 0.25),
    "store": TransferLaw(1000.0, 1.0),
    "load": TransferLaw(500.0, 1.0),
}


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def mover(**options: Any) -> SimMover:
    return SimMover(SIZES, Links(LAWS, **options.pop("bounds", {})), **options)


def demote(number: int, *slots: int, timeout: float | None = None, group: int = 0) -> Order:
    return Order(number, "demote", group, slots, slots, (), timeout)


def ends(notices: list[Any]) -> list[int]:
    return [notice.number for notice in notices if isinstance(notice, Ended)]


def test_it_is_a_mover() -> None:
    taken: Mover = mover()
    assert taken.poll(0.0) == []


def test_an_order_takes_the_latency_and_its_bytes_and_is_told_when_it_is_due() -> None:
    sim = mover()
    sim.poll(10.0)
    sim.submit(demote(1, 0, 1))
    assert sim.next_ns() == 12_500_000_000
    assert sim.poll(12.4) == []
    (end,) = sim.poll(12.5)
    assert end == Ended(1, demote(1, 0, 1), "done", 2000, 2.5, ("", ""))
    assert sim.next_ns() is None
    assert sim.pending == 0


def test_a_lane_serves_one_order_after_the_other_and_the_lanes_do_not_wait_for_each_other() -> None:
    sim = mover()
    sim.submit(Order(1, "load", 0, (0,), (5,), (key(0),)))
    sim.submit(demote(2, 0))
    sim.submit(demote(3, 1))
    assert ends(sim.poll(1.5)) == [2]
    assert ends(sim.poll(2.9)) == []
    notices = sim.poll(3.0)
    assert ends(notices) == [1, 3]
    assert [notice.seconds for notice in notices if isinstance(notice, Ended)] == [3.0, 1.5]


def test_an_idle_lane_begins_at_the_moment_of_the_last_poll_not_where_it_stopped() -> None:
    sim = mover()
    sim.submit(demote(1, 0))
    assert ends(sim.poll(100.0)) == [1]
    sim.submit(demote(2, 0))
    assert sim.next_ns() == 101_500_000_000


@pytest.mark.parametrize(("bound", "took"), [(100.0, 10.5), (5000.0, 1.5)])
def test_a_budget_slows_what_is_faster_than_it(bound: float, took: float) -> None:
    sim = mover(bounds={"bytes_per_second": bound})
    sim.submit(demote(1, 0))
    assert sim.next_ns() == round(took * NANOSECONDS)
    with pytest.raises(ConfigError, match="disk_bytes_per_second"):
        Links(disk_bytes_per_second=0)


def test_a_deadline_is_told_at_once_and_the_end_only_once_the_block_under_way_is_over() -> None:
    sim = mover()
    sim.submit(demote(1, 0, 1, 2, timeout=2.0))
    assert sim.next_ns() == 2_000_000_000
    assert sim.poll(2.0) == [TimedOut(1)]
    assert sim.next_ns() == 2_500_000_000
    (end,) = sim.poll(9.0)
    assert end == Ended(1, demote(1, 0, 1, 2, timeout=2.0), "timed_out", 2000, 2.5, ("", "", "not_begun"))


def test_an_order_done_at_its_deadline_is_done() -> None:
    sim = mover()
    sim.submit(demote(1, 0, timeout=1.5))
    (end,) = sim.poll(4.0)
    assert isinstance(end, Ended)
    assert end.status == "done"


def test_an_order_that_waits_behind_another_past_its_deadline_never_begins() -> None:
    sim = mover()
    sim.submit(demote(1, 0, 1, 2))
    sim.submit(demote(2, 3, timeout=1.0))
    late, end = sim.poll(1.0)
    assert late == TimedOut(2)
    assert isinstance(end, Ended)
    assert (end.status, end.seconds, end.bytes, end.reasons) == ("timed_out", 0.0, 0, ("not_begun",))
    assert ends(sim.poll(3.5)) == [1]


def test_a_cancelled_order_ends_after_the_block_under_way_and_the_next_begins_then() -> None:
    sim = mover()
    sim.submit(demote(1, 0, 1, 2))
    sim.submit(demote(2, 3))
    sim.submit(demote(3, 4))
    sim.poll(1.0)
    sim.cancel(3)
    sim.cancel(1)
    assert sim.next_ns() == 1_000_000_000
    assert ends(sim.poll(1.0)) == [3]
    (end,) = sim.poll(1.5)
    assert isinstance(end, Ended)
    assert (end.number, end.status, end.reasons) == (1, "cancelled", ("", "not_begun", "not_begun"))
    assert sim.next_ns() == 3_000_000_000
    sim.cancel(1)
    assert ends(sim.poll(3.0)) == [2]


def test_what_is_stored_can_be_loaded_under_its_key_alone_until_it_is_forgotten() -> None:
    sim = mover(stored=[[(key(7), 2)], []])
    sim.submit(Order(1, "load", 0, (2, 2, 3), (0, 1, 2), (key(7), key(8), key(7))))
    (end,) = sim.poll(100.0)
    assert isinstance(end, Ended)
    assert (end.status, end.reasons, end.bytes) == ("failed", ("", "wrong_key", "absent"), 1000)
    sim.submit(Order(2, "store", 1, (4,), (2,), (key(9),)))
    sim.forget(1, (2,))
    sim.forget(0, (2,))
    assert sim.records == {(0, 2): key(7)}  # its turn comes after the store under way
    sim.poll(200.0)
    assert sim.records == {}
    sim.submit(Order(3, "store", 1, (4,), (2,), (key(9),)))
    sim.poll(300.0)
    assert sim.records == {(1, 2): key(9)}


def test_a_store_that_is_cancelled_leaves_no_record_of_what_the_slot_held_before() -> None:
    sim = mover(stored=[[(key(1), 0), (key(2), 1)], []])
    sim.submit(Order(1, "store", 0, (4, 5), (0, 1), (key(3), key(4))))
    sim.cancel(1)
    sim.poll(10.0)
    assert sim.records == {(0, 0): key(3)}


def test_two_copies_that_meet_in_a_slot_are_a_broken_invariant() -> None:
    sim = mover()
    sim.submit(demote(1, 0))
    sim.submit(Order(2, "demote", 0, (0,), (1,)))  # two may read
    for clash in (
        Order(3, "demote", 0, (7,), (1,)),
        Order(4, "promote", 0, (6,), (0,)),
        Order(5, "promote", 0, (1,), (7,)),
    ):
        with pytest.raises(InvariantViolation, match="transfer-slots"):
            mover_with(clash)
    sim.poll(9.0)
    sim.submit(Order(6, "promote", 0, (1,), (0,)))


def mover_with(clash: Order) -> None:
    sim = mover()
    sim.submit(demote(1, 0))
    sim.submit(Order(2, "demote", 0, (0,), (1,)))
    sim.submit(clash)


@pytest.mark.parametrize(
    "order",
    [
        Order(1, "demote", 0, (), ()),
        Order(1, "demote", 0, (0, 1), (0,)),
        Order(1, "demote", 0, (0,), (0,), (key(0),)),
        Order(1, "store", 0, (0,), (0,)),
    ],
)
def test_an_order_that_makes_no_sense_is_a_broken_invariant(order: Order) -> None:
    with pytest.raises(InvariantViolation, match="transfer-order"):
        mover().submit(order)


def test_a_number_under_way_is_not_taken_twice_and_nothing_is_taken_after_close() -> None:
    sim = mover()
    sim.submit(demote(1, 0))
    with pytest.raises(InvariantViolation, match="a second time"):
        sim.submit(demote(1, 1))
    sim.submit(demote(2, 1))
    sim.close()
    assert ends(sim.poll(0.0)) == [2, 1]
    with pytest.raises(InvariantViolation, match="after close"):
        sim.submit(demote(3, 0))


def test_faults_depend_on_the_seed_and_the_order_alone() -> None:
    faults = SeededFaults(3, fails=0.5, stalls=0.5, loses_word=0.5)
    orders = [demote(number, 0, 1, 2) for number in range(1, 40)]

    def told(order: Order) -> tuple[Any, ...]:
        return faults.delay_ns(order), faults.loses(order), [faults.reason(order, block) for block in range(3)]

    forward = [told(order) for order in orders]
    assert forward == [told(order) for order in reversed(orders)][::-1]
    assert len({delay for delay, _, _ in forward}) > 10
    assert forward != [
        (other.delay_ns(order), other.loses(order), [other.reason(order, block) for block in range(3)])
        for other in [SeededFaults(4, fails=0.5, stalls=0.5, loses_word=0.5)]
        for order in orders
    ]
    assert told(orders[0]) != (0, False, [""] * 3) or told(orders[1]) != (0, False, [""] * 3)


class Lost(SeededFaults):
    """Everything is copied, and nobody hears of it."""


def test_a_lost_word_fails_the_whole_order_and_a_stall_delays_its_end() -> None:
    sim = mover(faults=Lost(0, loses_word=1.0))
    sim.submit(demote(1, 0, 1))
    (end,) = sim.poll(9.0)
    assert isinstance(end, Ended)
    assert (end.status, end.bytes, end.reasons) == ("failed", 0, ("lost_completion",) * 2)
    slow = mover(faults=SeededFaults(1, stalls=1.0, stall_s=1000.0))
    slow.submit(demote(1, 0, timeout=2.0))
    assert slow.poll(3.0) == [TimedOut(1)]
    assert slow.pending == 1
    due = slow.next_ns()
    assert due is not None
    assert due > 3 * NANOSECONDS
    assert ends(slow.poll(seconds(due))) == [1]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_each_order_ends_once_in_the_order_of_time_and_every_notice_is_announced(seed: int) -> None:
    rng = Random(seed)
    faults = SeededFaults(seed, fails=0.1, stalls=0.2, stall_s=6.0, loses_word=0.1)
    sim = mover(faults=faults)
    open_: dict[int, Order] = {}
    late: set[int] = set()
    told: Counter[int] = Counter()
    now = 0.0

    def settle(at: float) -> None:
        due = sim.next_ns()
        notices = sim.poll(at)
        assert bool(notices) == (due is not None and due <= round(at * NANOSECONDS))
        for notice in notices:
            if isinstance(notice, TimedOut):
                assert notice.number not in late
                late.add(notice.number)
                continue
            order = open_.pop(notice.number)
            assert notice.order == order
            assert (notice.status == "timed_out") == (order.number in late)
            assert notice.bytes == notice.reasons.count("") * SIZES[order.group]
            told[order.number] += 1

    number = 0
    for _ in range(25):
        act = rng.random()
        if act < 0.5:
            busy = {(order.group, slot) for order in open_.values() for slot in order.targets}
            group = rng.randrange(2)
            free = [slot for slot in range(6) if (group, slot) not in busy]
            if free:
                number += 1
                targets = tuple(rng.sample(free, rng.randint(1, min(3, len(free)))))
                sources = tuple(rng.randrange(6) for _ in targets)
                timeout = rng.choice([None, 0.0, 1.0, 4.0])
                open_[number] = Order(number, "demote", group, sources, targets, (), timeout)
                sim.submit(open_[number])
        elif act < 0.65 and open_:
            sim.cancel(rng.choice(sorted(open_)))
        else:
            now += rng.choice([0.0, 0.3, 1.0, 3.0])
            settle(now)
    while (due := sim.next_ns()) is not None:
        now = max(now, seconds(due))
        settle(now)
    assert open_ == {}
    assert told == Counter(range(1, number + 1))


def test_routes_and_lanes_agree() -> None:
    assert set(SIDES) == set(LANES)
    assert all(("disk" in SIDES[route]) == (LANES[route] == "disk") for route in SIDES)


# -- the clock of a simulation ------------------------------------------------------------------------


class Turns:
    """Requests at given moments."""

    def __init__(self, requests: list[tuple[int, Request]]) -> None:
        self._coming = requests
        self.ended_at: dict[str, int] = {}

    def next_ns(self) -> int | None:
        return self._coming[0][0] if self._coming else None

    def pop(self) -> Request:
        return self._coming.pop(0)[1]

    def ended(self, request_id: str, now_ns: int) -> None:
        self.ended_at[request_id] = now_ns


class Kept:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def observe(self, happenings: Any) -> None:
        self.events.extend(happenings)

    def at_rest(self, now_ns: int, scheduler: Scheduler) -> None:
        pass


def simulated(links: Links, faults: SeededFaults | None = None, slabs: int = 12, **below: Any) -> tuple[Turns, Kept]:
    """Eight turns of four conversations whose blocks do not fit the device together."""
    layout = one_group()
    policies = Policies.named(reuse="prefix", preemption="offload")
    tiers = Below(**{"host_slabs": 40, **below})
    cache, tiering = tiered_cache(layout, slabs, 4, tiers, keys=KeySpace("toy", layout.groups[0].block_tokens))
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=4096, vocab_size=1000, max_waiting=None)
    mover = SimMover([layout.groups[0].block_bytes], links, faults=faults)
    scheduler = Scheduler(cache, limits, policies, tiering)
    core = EngineCore(scheduler, SimExecutor(LinearCost()), audit=Audit(full_every=1), mover=mover)
    turns = Turns([(turn * NANOSECONDS, request(20, 12, seed=turn % 4, name=f"turn {turn}")) for turn in range(8)])
    kept = Kept()
    Simulation(core, turns, [kept]).run()
    assert not core.has_work
    return turns, kept


@pytest.mark.parametrize("faults", [None, SeededFaults(5, fails=0.2, stalls=0.2, stall_s=40.0, loses_word=0.1)])
def test_a_simulation_with_tiers_ends_and_blocks_move(faults: SeededFaults | None) -> None:
    turns, kept = simulated(Links(), faults, host_slabs=8, disk_slots=(30,))
    assert len(turns.ended_at) == 8
    moved = Counter(event.route for event in kept.events if isinstance(event, Transferred) and event.blocks)
    assert set(moved) >= ({"demote", "promote", "store"} if faults else set(SIDES))


def test_a_slow_link_delays_only_who_waits_for_it_and_the_clock_skips_the_wait() -> None:
    fast, _ = simulated(Links())
    slow, kept = simulated(Links({"promote": TransferLaw(1e9, 0.25)}))
    waited = [event for event in kept.events if isinstance(event, Arrived)]
    assert waited
    assert all(event.waited_s >= 0.25 for event in waited)
    later = [name for name in fast.ended_at if slow.ended_at[name] > fast.ended_at[name] + NANOSECONDS // 5]
    assert later
    assert len(later) < 8


def test_copies_after_which_nothing_can_ever_be_computed_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "_MOST_WAITS", 0)
    with pytest.raises(InvariantViolation, match="1 steps plan nothing although there is work"):
        simulated(Links({"promote": TransferLaw(1e9, 5.0)}))


def test_what_is_written_to_the_disk_after_the_last_has_ended_is_no_fault_however_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drive, "_MOST_WAITS", 2)
    slow = TransferLaw(1e9, 3.0)
    turns, kept = simulated(Links({"store": slow}), disk_slots=(60,), placement=WriteThrough())
    ended = max(turns.ended_at.values())
    late = [event for event in kept.events if isinstance(event, Transferred) and event.now * NANOSECONDS > ended]
    assert len(late) > 2


def test_who_arrives_while_others_wait_for_copies_is_planned_at_once() -> None:
    _, kept = simulated(Links({"promote": TransferLaw(1e9, 2.5)}), slabs=20)
    waits = [(event.now - event.waited_s, event.now) for event in kept.events if isinstance(event, Arrived)]
    admitted = [event.now for event in kept.events if isinstance(event, Admitted)]
    meanwhile = [now for now in admitted if any(began < now < ended for began, ended in waits)]
    assert meanwhile
    assert meanwhile[0] == round(meanwhile[0])  # they arrive at whole seconds
