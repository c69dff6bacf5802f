"""Engines that share a directory while they run: each finds what the other has stored, and a replay finds it too."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from tests.pure.tier_worlds import A, B, TierWorld, text

from octavo.memory.transfers import Appeared, Notice, Order
from octavo.simulate.recording import (
    RecordedExecutor,
    RecordedMover,
    Recorder,
    Recording,
    RecordingExecutor,
    RecordingMover,
    replay,
)
from octavo.simulate.toy_mover import ToyMover


class FolderMover(ToyMover):
    """Its disk is a directory by key, which others fill as well; at each poll it looks for what they have left."""

    folder: dict[bytes, Any]
    known: set[bytes]

    def poll(self, now: float) -> list[Notice]:
        fresh = [key for key in self.folder if key not in self.known]
        self.known.update(fresh)
        told: list[Notice] = [Appeared(0, tuple(fresh))] if fresh else []
        return told + super().poll(now)

    def _read(self, order: Order, i: int) -> Any:
        if order.route != "load":
            return super()._read(order, i)
        cells = self.folder.get(order.keys[i])
        return ("absent", None) if cells is None else ("", cells)

    def _write(self, order: Order, i: int, cells: Any) -> None:
        if order.route != "store":
            super()._write(order, i, cells)
        elif cells is not None:
            self.folder[order.keys[i]] = cells
            self.known.add(order.keys[i])


def sharing(folder: dict[bytes, Any], **more: Any) -> TierWorld:
    world = TierWorld(**({"slabs": 12, "host_slabs": 12, "disk_slots": 60, "placement": "write_through"} | more))
    mover = FolderMover(world.executor, 12, world.tiering.disk.slots if world.tiering.disk else ())
    mover.folder, mover.known = folder, set(folder)
    world.mover = world.core.mover = mover
    return world


@pytest.mark.parametrize("depth", [0, 1])
def test_each_finds_what_the_other_has_stored_since_both_began(depth: int) -> None:
    folder: dict[bytes, Any] = {}
    one, other = sharing(folder, depth=depth), sharing(folder, depth=depth)
    assert one.cached(one.serve(A)) == {}
    assert other.cached(other.serve(A)) == {"disk": 16}
    other.serve(B)
    assert one.cached(one.serve(B)) == {"disk": 16}
    assert one.cached(one.serve(B, salt="another")) == {}
    for world in (one, other):
        world.assert_right()
        world.assert_all_can_be_had()


def test_what_the_other_has_taken_away_again_is_a_recompute() -> None:
    folder: dict[bytes, Any] = {}
    one, other = sharing(folder), sharing(folder)
    one.serve(A)
    other.step()
    folder.clear()
    number = other.serve(A)
    other.assert_right()
    assert other.cached(number) == {}
    assert not other.tiering.disk or other.kept_in(A) == [{"device", "host", "disk"}] * 4, "computed and stored anew"


def test_more_than_it_has_slots_for_is_forgotten_from_the_oldest_use_on() -> None:
    folder: dict[bytes, Any] = {}
    one, other = sharing(folder), sharing(folder, disk_slots=6)
    for prompt in (A, B):
        one.serve(prompt)
    assert other.cached(other.serve(B)) == {"disk": 16}
    assert other.tiering.disk is not None
    assert other.tiering.disk.blocks == [6]
    other.assert_right()
    other.assert_all_can_be_had()


def test_worlds_that_share_a_directory_answer_as_each_alone() -> None:
    for seed in range(8):
        rng, folder = Random(seed), dict[bytes, Any]()
        worlds = [sharing(folder, depth=depth, disk_slots=rng.choice([6, 20, 60]), seed=seed) for depth in (0, 1)]
        for _ in range(12):
            world = rng.choice(worlds)
            world.ask(text(17, rng.randrange(3))[: rng.randrange(5, 18)] + text(rng.randrange(9), rng.randrange(3)), 3)
            world.step(rng.randrange(8))
            if rng.random() < 0.1 and folder:
                del folder[rng.choice(list(folder))]
            if rng.random() < 0.3:
                world.core.abort(rng.choice(list(world.asked)), world.time)
        for world in worlds:
            world.finish()
            world.assert_right()
            world.assert_all_can_be_had()


def test_a_recorded_run_that_found_the_others_blocks_is_replayed_without_them() -> None:
    folder: dict[bytes, Any] = {}
    one, other = sharing(folder), sharing(folder)
    recording = Recording()
    other.core.executor = RecordingExecutor(other.executor, recording)
    other.core.mover = RecordingMover(other.mover, recording)
    other.core = Recorder(other.core, recording)  # type: ignore[assignment]
    for prompt in (A, B, A):
        one.serve(prompt)
        assert other.cached(other.serve(prompt)), "found, though never computed here"
    again = sharing({})
    again.core.executor, again.core.mover = RecordedExecutor(recording), RecordedMover(recording)
    assert replay(recording, again.core) == len(recording.plans) == 3
