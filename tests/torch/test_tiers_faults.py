"""Tiers whose disk fills, tears, rots, stalls or lies, and movers that fail: the tokens are those of an engine without.

Every fault strikes in the middle of eight conversations, after their first turn. Never a wrong token, never a hang
(each run has a deadline), never a leak (all pools at rest); and each fault shows in an event with its reason.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from disk_faults import Faulty, flip
from test_reuse import bench
from test_tiers_equality import expected, room
from tier_engines import TieredEngine, converse

from octavo.memory.transfers import Order
from octavo.observe.fold import Fold
from octavo.observe.names import failure_class
from octavo.runtime.disk_format import HEADER_BYTES, Places
from octavo.scheduling.events import Restarted, Transferred

EVERY = ("demote", "promote", "store", "load")


class Unsteady:
    """What a mover's lanes suffer once `on`: of orders of `routes`, a share fails, is lost, or takes long."""

    def __init__(self, routes=EVERY, *, fails=0.0, loses=0.0, slow=0.0, delay_s=0.0, seed=0):
        self.routes, self.fails, self.lost, self.slow, self.delay_s = routes, fails, loses, slow, delay_s
        self.random = Random(seed)
        self.on = False

    def _strikes(self, order: Order, share: float) -> bool:
        return self.on and order.route in self.routes and self.random.random() < share

    def before_batch(self, order: Order, first_block: int) -> None:
        if self._strikes(order, self.slow):
            time.sleep(self.delay_s)
        if self._strikes(order, self.fails):
            raise OSError("injected")

    def loses(self, order: Order) -> bool:
        return self._strikes(order, self.lost)


def tiered(path: Path | None, name: str = "llama", **options) -> TieredEngine:
    slabs, host_slabs, rows = room(name)
    given = {"placement": "write_through", "preemption": "offload"} | options
    return TieredEngine(bench(name), slabs=slabs, host_slabs=host_slabs, rows=rows, path=path, **given)


def strike_after_first_turn(engine: TieredEngine, strike: Callable[[], None], name: str = "llama") -> None:
    """Hold the conversations, with the fault from the second turn on, against those without tiers."""
    turns = 0

    def run(prompts, wanted):
        nonlocal turns
        turns += 1
        if turns == 2:
            strike()
        return engine.run(prompts, wanted)

    assert converse(run) == expected(name)
    assert turns == 3


def assert_told(engine: TieredEngine, route: str, reason: str) -> None:
    """Copies failed for this reason; others of the same block came too late, or were called off with it."""
    told = set(reasons(engine, route))
    assert reason in told
    assert told <= {reason, "absent", "not_begun"}


def reasons(engine: TieredEngine, route: str) -> dict[str, int]:
    """Of the copies that did not arrive; the metric of failures must tell the same."""
    found: dict[str, int] = {}
    for event in engine.of(Transferred):
        for reason in event.reasons if event.route == route else ():
            found[reason] = found.get(reason, 0) + 1
    fold = Fold(8)
    fold.take(engine.events)
    told = {label: int(n) for label, n in fold.counters["transfer_failures_total"].items() if n}
    for reason, count in found.items():
        assert told[f"{route}/{failure_class(reason)}"] == count
    return found


# -- the disk ---------------------------------------------------------------------------------------


def system_calls(engine: TieredEngine) -> Faulty:
    """Those of every store of the engine, from now on."""
    calls = Faulty()
    for store in engine.tiers.disk:
        getattr(store, "inner", store)._calls = calls
    return calls


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("write_error", errno.ENOSPC, "disk_full"),
        ("write_error", errno.EIO, "io_error"),
        ("most", 0, "short_write"),
    ],
)
def test_what_the_disk_does_not_take_is_never_found_there(field, value, reason, shared, tmp_path) -> None:
    """A store that failed stayed visible to lookups elsewhere, and every hit on it was gibberish (faults, 8)."""
    with tiered(tmp_path, shared=shared) as engine:
        calls = system_calls(engine)
        strike_after_first_turn(engine, lambda: setattr(calls, field, value))
        engine.assert_at_rest()
        assert_told(engine, "store", reason)
        assert sum(store.stats().refusals[reason] for store in engine.tiers.disk) == reasons(engine, "store")[reason]
        stored = engine.tally()["store"]
    with tiered(tmp_path, shared=shared) as engine:
        assert 0 < sum(len(store.stored()) for store in engine.tiers.disk) <= stored
        assert converse(engine.run) == expected("llama")
        assert engine.tally()["disk tokens"] > 0
        engine.assert_at_rest()


def test_writes_that_the_system_cuts_short_are_finished(tmp_path) -> None:
    with tiered(tmp_path) as engine:
        calls = system_calls(engine)
        strike_after_first_turn(engine, lambda: setattr(calls, "most", 100))
        engine.assert_at_rest()
        assert reasons(engine, "store") == reasons(engine, "load") == {}
        assert engine.tally()["load"] > 0


@pytest.mark.parametrize("shared", [False, True])
def test_reads_that_fail_are_computed_again(shared, tmp_path) -> None:
    with tiered(tmp_path, shared=shared) as engine:
        calls = system_calls(engine)
        strike_after_first_turn(engine, lambda: setattr(calls, "read_error", errno.EIO))
        engine.assert_at_rest()
        assert_told(engine, "load", "io_error")
        assert {event.reason for event in engine.of(Restarted)} == {"io_error"}


def damage_blocks(engine: TieredEngine, *, header: bool) -> None:
    """A bit of every block on the disk, or of its header, turns."""
    random = Random(2)
    for store in engine.tiers.disk:
        if hasattr(store, "folder"):
            for path in sorted(store.folder.rglob("*-*-*")):
                flip(path, random.randrange(80) if header else HEADER_BYTES + random.randrange(store.block_bytes))
            continue
        places = Places.of(store.block_bytes)
        for _, slot in store.stored():
            start = places.header(slot) if header else places.block(slot)
            start += random.randrange(80 if header else store.block_bytes)
            flip(store.inner.path, start, 1 << random.randrange(8))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "bamba"])
@pytest.mark.parametrize(("header", "reason"), [(False, "bad_checksum"), (True, "bad_header")])
def test_bits_that_turn_on_the_disk_are_seen_and_computed_again(header, reason, name, tmp_path) -> None:
    shared = name == "gemma3_text"
    with tiered(tmp_path, name, shared=shared) as engine:
        strike_after_first_turn(engine, lambda: damage_blocks(engine, header=header), name)
        engine.assert_at_rest()
        assert_told(engine, "load", reason)
        assert sum(store.stats().misses[reason] for store in engine.tiers.disk) == reasons(engine, "load")[reason]


@pytest.mark.parametrize("shared", [False, True])
def test_what_was_cut_off_the_disk_is_computed_again(shared, tmp_path) -> None:
    with tiered(tmp_path, shared=shared) as engine:
        calls = system_calls(engine)

        def cut() -> None:
            calls.write_error = errno.ENOSPC  # or later writes would lengthen the file again, with holes
            for store in engine.tiers.disk:
                files = sorted(store.folder.rglob("*-*-*")) if shared else [store.inner.path]
                for path in files:
                    os.truncate(path, path.stat().st_size - 600 if shared else Places.of(store.block_bytes).block(1))

        strike_after_first_turn(engine, cut)
        engine.assert_at_rest()
        assert_told(engine, "load", "truncated")


def test_a_disk_that_vanishes_is_a_disk_of_misses(tmp_path) -> None:
    """The folder is emptied behind the engine's back, as another process of its kind may do."""

    def empty() -> None:
        for path in tmp_path.rglob("*-*-*"):
            path.unlink()

    with tiered(tmp_path, shared=True) as engine:
        strike_after_first_turn(engine, empty)
        engine.assert_at_rest()
        assert set(reasons(engine, "load")) == {"absent"}


# -- the copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "bamba"])
@pytest.mark.parametrize("route", EVERY)
def test_copies_that_fail_are_computed_again(route, name, tmp_path) -> None:
    faults = Unsteady((route,), fails=0.5)
    with tiered(tmp_path, name, faults=faults) as engine:
        strike_after_first_turn(engine, lambda: setattr(faults, "on", True), name)
        engine.assert_at_rest()
        assert_told(engine, route, "error: injected")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("route", EVERY)
def test_copies_whose_end_is_never_told_hold_nobody_up(route, depth, tmp_path) -> None:
    faults = Unsteady((route,), loses=0.5, seed=1)
    with tiered(tmp_path, faults=faults, depth=depth) as engine:
        strike_after_first_turn(engine, lambda: setattr(faults, "on", True))
        engine.assert_at_rest(counted=False)  # copies of which nobody was told were made all the same
        found = set(reasons(engine, route))
        assert "lost_completion" in found
        assert found <= {"lost_completion", "not_begun"}, "those that follow a lost one are called off"


@pytest.mark.parametrize("shared", [False, True])
def test_a_disk_that_takes_too_long_is_not_waited_for(shared, tmp_path) -> None:
    faults = Unsteady(("load", "store"), slow=0.3, delay_s=0.3)
    with tiered(tmp_path, shared=shared, faults=faults, timeout_s=0.05) as engine:
        strike_after_first_turn(engine, lambda: setattr(faults, "on", True))
        engine.assert_at_rest()
        assert "timed_out" in {event.status for event in engine.of(Transferred)}
        assert {event.reason for event in engine.of(Restarted)} <= {"timed_out"}


@pytest.mark.parametrize("route", ["demote", "promote"])
def test_a_stuck_copy_between_arenas_is_not_waited_for(route, tmp_path) -> None:
    faults = Unsteady((route,), slow=0.3, delay_s=0.3)
    with tiered(tmp_path, faults=faults, timeout_s=0.05) as engine:
        strike_after_first_turn(engine, lambda: setattr(faults, "on", True))
        engine.assert_at_rest()
        assert "timed_out" in {event.status for event in engine.of(Transferred)}
