"""What moving whole blocks costs beside the least it could cost.

Between two arenas: the mover's demote and promote against one plain copy of the same bytes, for blocks that lie
apart and for neighbours. On disk: `DiskPool` written and read through, against large sequential writes and reads of
as many bytes on the same file system (in the page cache unless --size exceeds memory; both sides alike, so the price
of checksums and system calls shows in full). Repetitions are interleaved. Prints a table, then one JSON line.

    python benchmarks/tiers.py --block-kib 512 --mib 256 --folder /var/tmp
"""

from __future__ import annotations

import argparse
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
from octavo.runtime.disk import DiskPool
from octavo.runtime.disk_format import Identity, Places, block_checksum, checksum
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
    print(f"{'case':<26}{'against':<26}{'speed, of that':>14}")
    for row in rows:
        print(f"{row['case']:<26}{row['against']:<26}{row['ratio']:>14.0%}")
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
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for repeat in range(repeats + 1):
        for case in cases:
            started = time.perf_counter()
            case.run()
            if repeat:  # the first warms up
                times[case.name].append(time.perf_counter() - started)
    median = {name: statistics.median(found) for name, found in times.items()}
    return [
        {"case": case.name, "against": case.against, "ratio": round(median[case.against] / median[case.name], 3)}
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

    def moved(route: Route, slots: tuple[int, ...]) -> Callable[[], None]:
        return lambda: finish(mover, Order(route, 0, slots, neighbours))

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
    """The engine would do something else meanwhile; this waits, and adds at most the length of a nap."""
    mover.submit(order)
    while True:
        for notice in mover.poll():
            if isinstance(notice, Ended):
                if notice.status != "done":
                    raise SystemExit(f"the copy was not made: {notice.status}, {notice.reasons[:3]}")
                return
        time.sleep(0.0002)


def disk_rows(folder: Path, layout: Layout, blocks: int, repeats: int) -> list[dict[str, Any]]:
    size = layout.slab_bytes
    host = Arena(layout, blocks)
    host.bytes.random_(0, 255)
    memory = memoryview(host.bytes.numpy())
    arena = [memory[index * size : (index + 1) * size] for index in range(blocks)]
    keys = [checksum(b"%d" % index) for index in range(blocks)]
    apart = list(range(blocks))
    random.Random(0).shuffle(apart)
    pool = DiskPool(
        folder / "pool",
        Identity.of("benchmark", layout.signature, "full"),
        size,
        Places.of(size).file_bytes(blocks),
    )
    plain = os.open(folder / "plain", os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(plain, 0, len(memory))

    def check(reasons: Sequence[str | None]) -> None:
        if any(reasons):
            raise SystemExit(f"the disk refused: {reasons}")

    def write_plain() -> None:
        for start in range(0, len(memory), CHUNK):
            os.pwrite(plain, memory[start : start + CHUNK], start)
        os.fdatasync(plain)

    def write_pool() -> None:
        for start in range(0, blocks, per_batch):
            check(pool.put_all(keys[start : start + per_batch], arena[start : start + per_batch]))
        pool.flush()

    def read_plain() -> None:
        for start in range(0, len(memory), CHUNK):
            os.preadv(plain, [memory[start : start + CHUNK]], start)

    def read_pool(order: Sequence[int]) -> None:
        for start in range(0, blocks, per_batch):
            part = order[start : start + per_batch]
            check(pool.get_all([keys[index] for index in part], [arena[index] for index in part]))

    def hash_alone() -> None:
        for block in arena:
            block_checksum(block)

    per_batch = max(1, CHUNK // size)
    try:
        return measured(
            [
                Case("sequential write", "sequential write", write_plain),
                Case("pool write", "sequential write", write_pool),
                Case("sequential read", "sequential read", read_plain),
                Case("pool read, neighbours", "sequential read", lambda: read_pool(range(blocks))),
                Case("pool read, apart", "sequential read", lambda: read_pool(apart)),
                Case("checksum alone", "sequential read", hash_alone),
            ],
            repeats,
        )
    finally:
        pool.close()
        os.close(plain)


if __name__ == "__main__":
    main()
