"""What moving whole blocks costs beside the least it could cost, for blocks of several sizes.

Everything goes through the mover, in its batches, between neighbouring slots ("neighbours") or slots that lie anywhere
on both sides ("apart"):

- demote and promote, between two arenas: against one memmove of as many bytes, and against a memmove of each block in
  the same order, less what calling it costs;
- store and load, in slots of a preallocated file: against writes and reads of 8 MiB in sequence of the same file from
  and into the same memory, by one thread as a plain program would and by as many as octavo uses; against the least that
  proving them can cost, which is calls of the sizes that octavo makes with a checksum of each piece while it is in the
  caches, and neither headers nor keys; and against a plain call to the system for each block in the same order;
- the same in a folder that processes share: loads against reads of 8 MiB in sequence, and against opening, reading and
  closing each file; stores against new files of a block each.

The file is in the page cache on both sides alike, so that the price of checksums and of calls shows in full; nothing is
flushed but between repetitions, where it is not counted. With --uncached the slots' file is asked to leave the page
cache before each read, and a write counts until it is on the disk: what an engine sees that comes back to state of long
ago. Repetitions are interleaved; where others use the machine, processor time, which counts all threads, says more than
time. Prints a table, then one JSON line.

    python benchmarks/tiers.py --block-kib 16 64 512 --seconds 60 --folder /var/tmp
    python benchmarks/tiers.py --uncached
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from machine_facts import described, machine_facts, torch_facts

from octavo.geometry.dtypes import FP32
from octavo.geometry.state import Component
from octavo.memory.groups import StateGroup
from octavo.memory.layout import Layout, make_layout
from octavo.memory.transfers import Ended, Order, Route
from octavo.runtime.arena import Arena
from octavo.runtime.disk_folder import DiskFolder
from octavo.runtime.disk_format import HEADER_BYTES, Identity, Places, block_checksum, checksum
from octavo.runtime.disk_slots import DiskSlots
from octavo.runtime.disk_store import THREADS
from octavo.runtime.mover import Mover

BLOCK_TOKENS = 16
CHUNK = 8 << 20
WRITTEN, READ = 4 << 20, 512 << 10
"""What octavo hashes and writes, or reads and hashes, at a time."""
LEAST, MOST = 3, 15
"""Repetitions."""
Slots = tuple[int, ...]
NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Case:
    name: str
    against: tuple[str, ...]
    """Cases of which its speed is a share; none for a base."""
    run: Callable[[], None]
    before: Callable[[], None] = lambda: None
    """Not counted."""
    less: Callable[[], None] | None = None
    """What it costs to do nothing in the same way, which is taken off."""


@dataclass
class Room:
    """Two arenas of so many blocks, slots in and out of order, and the memory of both as addresses."""

    layout: Layout
    blocks: int
    device: Arena = field(init=False)
    host: Arena = field(init=False)

    def __post_init__(self) -> None:
        self.device, self.host = Arena(self.layout, self.blocks), Arena(self.layout, self.blocks)
        self.device.bytes.random_(0, 255)
        self.host.bytes.random_(0, 255)
        self.size = self.layout.slab_bytes
        self.neighbours: Slots = tuple(range(self.blocks))
        self.apart: Slots = tuple(random.Random(0).sample(self.neighbours, self.blocks))
        self.apart_too: Slots = tuple(random.Random(1).sample(self.neighbours, self.blocks))
        self.memory = memoryview(self.host.bytes.numpy())

    def block(self, slot: int) -> memoryview:
        return self.memory[slot * self.size : (slot + 1) * self.size]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    torch.set_num_threads(1)
    facts = machine_facts() | torch_facts()
    print(f"{options.mib} MiB a repetition; {described(facts)}")
    heads = ("KiB", "case", "against", "speed, of that", "by processor time")
    print(f"{heads[0]:>5}  {heads[1]:<36}{heads[2]:<36}{heads[3]:>14}{heads[4]:>19}")
    rows = []
    for kib in options.block_kib:
        layout = layout_of(kib << 10)
        room = Room(layout, max(2, (options.mib << 20) // layout.slab_bytes))
        for found in rows_of(room, options, options.seconds / len(options.block_kib)):
            print(
                f"{kib:>5}  {found['case']:<36}{found['against']:<36}{found['ratio']:>14.0%}"
                f"{found['processor_ratio']:>19.0%}",
                flush=True,
            )
            rows.append({"block_kib": kib} | found)
    told = {"benchmark": "tiers", "mib": options.mib, "uncached": options.uncached, "rows": rows, "facts": facts}
    print(json.dumps(told))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-kib", type=int, nargs="+", default=[16, 64, 256, 512, 1024], help="bytes, in KiB")
    parser.add_argument("--mib", type=int, default=64, help="bytes moved in a repetition, in MiB")
    parser.add_argument("--seconds", type=float, default=60, help="about how long it may take")
    parser.add_argument("--folder", help="where files lie; the default is the temporary directory")
    parser.add_argument("--uncached", action="store_true", help="the file alone, read from the disk and written to it")
    return parser.parse_args(arguments)


def layout_of(block_bytes: int) -> Layout:
    """One group of eight layers whose blocks have about that many bytes."""
    width = max(1, block_bytes // (8 * 2 * BLOCK_TOKENS * 4))
    components = (Component("k", (1, width), FP32), Component("v", (1, width), FP32))
    return make_layout((StateGroup("full", tuple(range(8)), (components,) * 8),), BLOCK_TOKENS)


def rows_of(room: Room, options: argparse.Namespace, seconds: float) -> list[dict[str, Any]]:
    """Of one block size: half of the time for the arenas and the file, half for the folder."""
    with tempfile.TemporaryDirectory(dir=options.folder) as found:
        if options.uncached:
            return file_rows(room, Path(found), seconds, uncached=True)
        return (
            arena_rows(room, seconds / 4)
            + file_rows(room, Path(found), seconds / 4)
            + folder_rows(room, Path(found), seconds / 2)
        )


def measured(cases: Sequence[Case], seconds: float) -> list[dict[str, Any]]:
    """The ratio of the medians; every repetition runs all cases, so that a busy machine hits all of them."""
    times: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    begun = time.perf_counter()
    for repeat in range(MOST + 1):
        if repeat > LEAST and time.perf_counter() - begun > seconds:
            break
        for case in cases:
            case.before()
            took = timed(case.run)
            nothing = (0.0, 0.0) if case.less is None else timed(case.less)
            if repeat:  # the first warms up
                times[case.name].append((took[0] - nothing[0], took[1] - nothing[1]))
    median = {name: [statistics.median(part) for part in zip(*found, strict=True)] for name, found in times.items()}
    return [
        {
            "case": case.name,
            "against": base,
            "ratio": round(median[base][0] / median[case.name][0], 3),
            "processor_ratio": round(median[base][1] / median[case.name][1], 3),
        }
        for case in cases
        for base in case.against
    ]


def timed(act: Callable[[], None]) -> tuple[float, float]:
    started, used = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - started, time.process_time() - used


def ordered(mover: Mover, route: Route, sources: Slots, targets: Slots, keys: Sequence[bytes] = ()) -> None:
    """The engine would do something else meanwhile; this waits."""
    mover.submit(Order(next(NUMBERS), route, 0, sources, targets, tuple(keys)))
    while True:
        for notice in mover.poll(time.monotonic()):
            if isinstance(notice, Ended):
                if notice.status != "done":
                    raise SystemExit(f"the copy was not made: {notice.status}, {notice.reasons[:3]}")
                return
        mover.wait()


def arena_rows(room: Room, seconds: float) -> list[dict[str, Any]]:
    mover = Mover(room.device, room.host)
    device, host, size = room.device.bytes.data_ptr(), room.host.bytes.data_ptr(), room.size

    def blocks(written: int, read: int, bytes_each: int) -> Callable[[], None]:
        pairs = [(written + b * size, read + a * size) for a, b in zip(room.apart, room.apart_too, strict=True)]

        def act() -> None:
            for there, here in pairs:
                ctypes.memmove(there, here, bytes_each)

        return act

    whole, each = "one memmove", "memmove of each block"
    cases = [
        Case(whole, (), lambda: ctypes.memmove(host, device, room.blocks * size)),
        Case(each, (), blocks(host, device, size), less=blocks(host, device, 0)),
    ]
    for route in ("demote", "promote"):
        for name, sources, targets, against in (
            ("neighbours", room.neighbours, room.neighbours, (whole,)),
            ("apart", room.apart, room.apart_too, (whole, each)),
        ):
            act = lambda route=route, s=sources, t=targets: ordered(mover, route, s, t)  # noqa: E731
            cases.append(Case(f"{route}, {name}", against, act))
    try:
        return measured(cases, seconds)
    finally:
        mover.close()


def file_rows(room: Room, folder: Path, seconds: float, uncached: bool = False) -> list[dict[str, Any]]:
    identity = Identity.of("benchmark", room.layout.signature, "full")
    places = Places.of(room.size)
    store = DiskSlots(folder / "slots", identity, room.size, places.file_bytes(room.blocks))
    plain = os.open(folder / "slots", os.O_RDWR)
    mover = Mover(room.device, room.host, [store])
    keys = [checksum(b"%d" % slot) for slot in room.neighbours]
    total = room.blocks * room.size
    pool = ThreadPoolExecutor(THREADS)

    def in_sequence(call: Callable[..., int]) -> Callable[[], None]:
        def act() -> None:
            for start in range(0, total, CHUNK):
                call(plain, [room.memory[start : start + CHUNK]], start)

        return act

    def hashed_first() -> None:
        for start in range(0, total, WRITTEN):
            piece = room.memory[start : start + WRITTEN]
            block_checksum(piece)
            os.pwritev(plain, [piece], start)

    def then_hashed(_: int, pieces: Sequence[memoryview], start: int) -> int:
        read = os.preadv(plain, pieces, start)
        block_checksum(pieces[0])
        return read

    def by_threads(call: Callable[..., int], chunk: int = CHUNK) -> Callable[[], None]:
        def part(first: int) -> None:
            for start in range(first * chunk, total, THREADS * chunk):
                call(plain, [room.memory[start : start + chunk]], start)

        def act() -> None:
            for _ in pool.map(part, range(THREADS)):
                pass

        return act

    def each_block(call: Callable[..., int]) -> Callable[[], None]:
        pairs = [
            (room.block(there), places.block(here)) for here, there in zip(room.apart, room.apart_too, strict=True)
        ]

        def act() -> None:
            for block, start in pairs:
                call(plain, [block], start)

        return act

    def flushed() -> None:
        os.fdatasync(plain)

    def unread() -> None:
        if uncached:
            os.fdatasync(plain)
            os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_DONTNEED)

    def written(act: Callable[[], None]) -> Callable[[], None]:
        def until_it_is_there() -> None:
            act()
            os.fdatasync(plain)

        return until_it_is_there if uncached else act

    def disk(route: Route, here: Slots, there: Slots) -> Callable[[], None]:
        sources, targets = (there, here) if route == "store" else (here, there)
        return lambda: ordered(mover, route, sources, targets, [keys[slot] for slot in here])

    writes, reads = "writes of 8 MiB", "reads of 8 MiB"
    writes_too, reads_too = f"{writes}, {THREADS} threads", f"{reads}, {THREADS} threads"
    writes_proven, reads_proven = "writes of 4 MiB, hashed", f"reads of 512 KiB, hashed, {THREADS} threads"
    write_each, read_each = "a plain write of each block", "a plain read of each block"
    all_in_order, any_order = (room.neighbours, room.neighbours), (room.apart, room.apart_too)
    cases = [  # plain writes lay waste to the headers, so each is followed by a store of all
        Case(writes, (), written(in_sequence(os.pwritev)), flushed),
        Case(writes_too, (), written(by_threads(os.pwritev)), flushed),
        Case(writes_proven, (writes,), written(hashed_first), flushed),
        Case("store, neighbours", (writes, writes_too, writes_proven), written(disk("store", *all_in_order)), flushed),
        Case(reads, (), in_sequence(os.preadv), unread if uncached else flushed),
        Case(reads_too, (), by_threads(os.preadv), unread if uncached else flushed),
        Case(reads_proven, (reads,), by_threads(then_hashed, READ), unread if uncached else flushed),
        Case("load, neighbours", (reads, reads_too, reads_proven), disk("load", *all_in_order), unread),
        Case("load, neighbours on disk", (reads,), disk("load", room.neighbours, room.apart), unread),
        Case(read_each, (), each_block(os.preadv), unread),
        Case("load, apart", (reads, read_each), disk("load", *any_order), unread),
        Case(write_each, (), written(each_block(os.pwritev)), flushed),
        Case("store, apart", (writes, write_each), written(disk("store", *any_order)), flushed),
    ]
    try:
        return measured(cases, seconds)
    finally:
        pool.shutdown()
        os.close(plain)
        mover.close()


def folder_rows(room: Room, folder: Path, seconds: float) -> list[dict[str, Any]]:
    identity = Identity.of("benchmark", room.layout.signature, "full")
    capacity = room.blocks * (HEADER_BYTES + room.size)
    plain = os.open(folder / "plain", os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(plain, room.memory[:], 0)
    keys = tuple(checksum(b"%d" % slot) for slot in room.neighbours)
    opened: dict[str, Any] = {}

    def anew() -> None:
        """An empty folder: what has just been deleted slows the file system down for a while."""
        close()
        shutil.rmtree(folder / "files", ignore_errors=True)
        opened["store"] = DiskFolder(folder / "files", identity, room.size, capacity)
        opened["mover"] = Mover(room.device, room.host, [opened["store"]])

    def close() -> None:
        if opened:
            opened["mover"].close()

    def new_files() -> None:
        for slot in room.neighbours:
            new = os.open(folder / "new" / keys[slot].hex(), os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(new, room.block(slot), 0)
            os.close(new)

    def emptied() -> None:
        shutil.rmtree(folder / "new", ignore_errors=True)
        (folder / "new").mkdir()

    def each_file() -> None:
        for slot in room.neighbours:
            file = os.open(folder / "new" / keys[slot].hex(), os.O_RDONLY)
            os.preadv(file, [room.block(slot)], 0)
            os.close(file)

    def reads() -> None:
        for start in range(0, len(room.memory), CHUNK):
            os.preadv(plain, [room.memory[start : start + CHUNK]], start)

    def act(route: Route) -> Callable[[], None]:
        return lambda: ordered(opened["mover"], route, room.neighbours, room.neighbours, keys)

    new, sequence, each = "new files of a block each", "reads of 8 MiB, one file", "open, read, close of each"
    try:
        return measured(
            [
                Case(new, (), new_files, emptied),
                Case("store, folder", (new,), act("store"), anew),
                Case(sequence, (), reads),
                Case(each, (), each_file),
                Case("load, folder", (sequence, each), act("load")),
            ],
            seconds,
        )
    finally:
        close()
        os.close(plain)


if __name__ == "__main__":
    main()
