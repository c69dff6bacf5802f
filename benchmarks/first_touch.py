"""What the first write to memory costs, by how the system gives the pages: small or huge, at the write or asked before.

Memory is mapped as the KV pool is, touched once in each way, touched again, and given back. `--rest` seconds pass
before each, since hypervisors take back what guests do not use (free page reporting), and a page that has to be got
from the host takes far longer than one that is only zeroed; with `--rest 0` pages mostly are there still. Prints a
table of medians, seconds of the processor and ms for 2 MiB, then one JSON line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import resource
import statistics
import time
from collections.abc import Sequence

from machine_facts import described, machine_facts

from octavo.runtime.host_pages import PagesAhead

MIB = 1 << 20
WAYS = {
    "small pages, written": (False, False),
    "small pages, asked for": (False, True),
    "huge pages, written": (True, False),
    "huge pages, asked for": (True, True),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="touched each time (default 512)")
    parser.add_argument("--rest", type=float, default=4.0, help="seconds before each (default 4)")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.mib < 2 or options.repeat < 1:
        parser.error("--mib must be at least 2 and --repeat at least 1")
    facts = machine_facts()
    taken: dict[str, list[tuple[float, float, int]]] = {way: [] for way in WAYS}
    for _ in range(options.repeat):
        for way, (huge, asked) in WAYS.items():
            time.sleep(options.rest)
            taken[way].append(touched(options.mib * MIB, huge=huge, asked=asked))
    report(options, facts, taken)


def touched(size: int, *, huge: bool, asked: bool) -> tuple[float, float, int]:
    """Processor seconds of the first touch and of a second write, and the faults of the first."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        held = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(held)
        before, faults = time.process_time(), _faults()
        if asked:
            pages = PagesAhead(address, size, ahead_bytes=size)
            pages.used(0)
            while pages.lacking:
                pages.ask()
        else:
            ctypes.memset(address, 1, size)
        first, faults = time.process_time() - before, _faults() - faults
        before = time.process_time()
        ctypes.memset(address, 2, size)
        again = time.process_time() - before
        del held
    return first, again, faults


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def report(
    options: argparse.Namespace, facts: dict[str, object], taken: dict[str, list[tuple[float, float, int]]]
) -> None:
    print(f"{options.mib} MiB, {options.rest:g} s of rest before each, {options.repeat} of each in turn")
    print(f"{'':26}{'first s':>9}{'least':>9}{'most':>9}{'ms/2 MiB':>10}{'again s':>9}{'faults':>9}")
    rows = []
    for way, runs in taken.items():
        firsts = [first for first, _, _ in runs]
        first, again = statistics.median(firsts), statistics.median(again for _, again, _ in runs)
        faults = int(statistics.median(count for _, _, count in runs))
        print(
            f"{way:26}{first:>9.3f}{min(firsts):>9.3f}{max(firsts):>9.3f}{first / options.mib * 2e3:>10.2f}"
            f"{again:>9.3f}{faults:>9}"
        )
        rows.append({"way": way, "first_s": firsts, "again_s": again, "faults": faults})
    print(described(facts))
    print(json.dumps({"benchmark": "first_touch", "machine": facts, "mib": options.mib, "rest": options.rest,
                      "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
