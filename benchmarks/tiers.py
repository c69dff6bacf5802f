"""What moving whole blocks costs beside the least it could cost.

Between two arenas: the mover's demote and promote against one plain copy of the same bytes, for blocks that lie
apart and for neighbours. On disk: the stores written and read through in the mover's batches, against large
sequential writes and reads of as many bytes on the same file system into the same memory (in the page cache unless
--mib exceeds memory; both sides alike, so the price of checksums and system calls shows in full). Writes of the file
are flushed on both sides; those of the folder, whose files are new and flushed by nobody, are held against new files.
Repetitions are interleaved; where others use the machine, processor time says more than time. Prints a table, then
one JSON line.

    python benchmarks/tiers.py --block-kib 512 --mib 256 --folder /var/tmp
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from octavo.runtime.disk_store import DiskStore, Placed
from octavo.runtime.mover import Mover

BLOCK_TOKENS = 16
CHUNK = 8 << 20


@dataclass(frozen=True)
class Case:
    name: str
    against: str
    """The case of which its speed is a share; its own name for a base."""
    run: Callable[[], None]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    torch.set_num_threads(1)
    facts = machine_facts() | torch_facts()
    layout = layout_of(options.block_kib << 10)
    blocks = max(2, (options.mib << 20) // layout.slab_bytes)
    print(f"{blocks} blocks of {layout.slab_bytes} bytes; {described(facts)}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = arena_rows(layout, blocks, options.repeats) + disk_rows(Path(folder), layout, blocks, options.repeats)
    print(f"{'case':<26}{'against':<28}{'speed, of that':>14}{'by processor time':>19}")
    for row in rows:
        print(f"{row['case']:<26}{row['against']:<28}{row['ratio']:>14.0%}{row['processor_ratio']:>19.0%}")
    result = {"benchmark": "tiers", "block_bytes": layout.slab_bytes, "blocks": blocks, "rows": rows}
    print(json.dumps(result | {"facts": facts}))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-kib", type=int, default=512, help="bytes of a block, in KiB")
    parser.add_argument("--mib", type=int, default=256, help="bytes moved in a repetition, in MiB")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", help="where the pool file lies; the default is the temporary directory")
    return parser.parse_args(arguments)


def layout_of(block_bytes: int) -> Layout:
    """One group of eight layers whose blocks have about that many bytes."""
    width = max(1, block_bytes // (8 * 2 * BLOCK_TOKENS * 4))
    components = (Component("k", (1, width), FP32), Component("v", (1, width), FP32))
    return make_layout((StateGroup("full", tuple(range(8)), (components,) * 8),), BLOCK_TOKENS)


def measured(cases: Sequence[Case], repeats: int) -> list[dict[str, Any]]:
    """The ratio of the medians; every repetition runs all cases, so that a busy machine hits all of them."""
    times: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    for repeat in range(repeats + 1):
        for case in cases:
            started, used = time.perf_counter(), time.process_time()
            case.run()
            if repeat:  # the first warms up
                times[case.name].append((time.perf_counter() - started, time.process_time() - used))
    median = {name: [statistics.median(part) for part in zip(*found, strict=True)] for name, found in times.items()}
    return [
        {
            "case": case.name,
            "against": case.against,
            "ratio": round(median[case.against][0] / median[case.name][0], 3),
            "processor_ratio": round(median[case.against][1] / median[case.name][1], 3),
        }
        for case in cases
        if case.name != case.against
    ]


def arena_rows(layout: Layout, blocks: int, repeats: int) -> list[dict[str, Any]]:
    device, host = Arena(layout, blocks), Arena(layout, blocks)
    device.bytes.random_(0, 255)
    mover = Mover(device, host)
    apart = list(range(blocks))
    random.Random(0).shuffle(apart)
    neighbours = tuple(range(blocks))
    base = "plain copy"

    numbers = itertools.count(1)

    def moved(route: Route, slots: tuple[int, ...]) -> Callable[[], None]:
        return lambda: finish(mover, Order(next(numbers), route, 0, slots, neighbours))

    def plain() -> None:
        device.bytes.copy_(host.bytes)

    cases = [Case(base, base, plain)]
    for route in ("demote", "promote"):
        cases.append(Case(f"{route}, neighbours", base, moved(route, neighbours)))
        cases.append(Case(f"{route}, apart", base, moved(route, tuple(apart))))
    try:
        return measured(cases, repeats)
    finally:
        mover.close()


def finish(mover: Mover, order: Order) -> None:
    """The engine would do something else meanwhile; this waits."""
    mover.submit(order)
    while True:
        for notice in mover.poll(time.monotonic()):
            if isinstance(notice, Ended):
                if notice.status != "done":
                    raise SystemExit(f"the copy was not made: {notice.status}, {notice.reasons[:3]}")
                return
        mover.wait()


def disk_rows(folder: Path, layout: Layout, blocks: int, repeats: int) -> list[dict[str, Any]]:
    size = layout.slab_bytes
    host = Arena(layout, blocks)
    host.bytes.random_(0, 255)
    memory = memoryview(host.bytes.numpy())
    arena = [memory[index * size : (index + 1) * size] for index in range(blocks)]
    placed = [Placed(slot, checksum(b"%d" % slot), block) for slot, block in enumerate(arena)]
    apart = random.Random(0).sample(placed, blocks)
    identity = Identity.of("benchmark", layout.signature, "full")
    slots = DiskSlots(folder / "slots", identity, size, Places.of(size).file_bytes(blocks))
    files = DiskFolder(folder / "files", identity, size, blocks * (HEADER_BYTES + size))
    plain = os.open(folder / "plain", os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(plain, 0, len(memory))
    per_batch = max(1, CHUNK // size)

    def in_batches(act: Callable[[Sequence[Placed]], Sequence[str | None]], order: Sequence[Placed]) -> None:
        for start in range(0, blocks, per_batch):
            reasons = act(order[start : start + per_batch])
            if any(reasons):
                raise SystemExit(f"the disk refused: {reasons}")

    def read(store: DiskStore, order: Sequence[Placed]) -> Callable[[], None]:
        return lambda: in_batches(store.read, order)

    def write_plain() -> None:
        for start in range(0, len(memory), CHUNK):
            os.pwrite(plain, memory[start : start + CHUNK], start)
        os.fdatasync(plain)

    def write_slots() -> None:
        in_batches(slots.write, placed)
        slots.flush()

    def write_new() -> None:
        for index, block in enumerate(arena):
            path = folder / f"new{index}"
            path.unlink(missing_ok=True)
            new = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(new, block, 0)
            os.close(new)

    def write_files() -> None:
        files.forget(range(blocks))
        in_batches(files.write, placed)

    def read_plain() -> None:
        for start in range(0, len(memory), CHUNK):
            os.preadv(plain, [memory[start : start + CHUNK]], start)

    def hash_alone() -> None:
        for block in arena:
            block_checksum(block)

    flushed, new, sequential = "sequential write, flushed", "new files of a block each", "sequential read"
    try:
        return measured(
            [
                Case(flushed, flushed, write_plain),
                Case("slots, write", flushed, write_slots),
                Case(sequential, sequential, read_plain),
                Case("slots, read neighbours", sequential, read(slots, placed)),
                Case("slots, read apart", sequential, read(slots, apart)),
                Case("checksums alone", sequential, hash_alone),
                Case(new, new, write_new),
                Case("folder, write", new, write_files),
                Case("folder, read", sequential, read(files, placed)),
            ],
            repeats,
        )
    finally:
        slots.close()
        files.close()
        os.close(plain)


if __name__ == "__main__":
    main()
