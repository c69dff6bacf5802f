"""Do processes that are alike take alike for the same steps? Several engines, asked in turn for the same decode steps.

What is a process's own (where its memory lies, how it is backed) shows between columns, what is the machine's mood
between rows. Prints of each process how much of its large memory is in huge pages and what the first touch of the
pool's memory costs beside the second, then the milliseconds of a step by turn, then one JSON line.

    python benchmarks/processes.py --own-time               where others use the machine
    python benchmarks/processes.py --processes 10 --turns 3
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine_facts import described, machine_facts
from prediction_engine import engine_of, run_here
from prediction_runs import Timed
from workloads import Job

BLOCKS = 600
LARGE_KB = 8 << 10
"""Resident; smaller pieces of memory are not looked at."""
HUGE_BYTES = 2 << 20


def main() -> None:
    options = parsed()
    if options.inside:
        inside(options)
        return
    print(described(machine_facts()))
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--inside"]
    processes = []
    facts = []
    for number in range(options.processes):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        facts.append(told := asked_of(process, "facts"))
        print(
            f"  process {number + 1}: {told['huge_mb']} of {told['large_mb']} MB of large memory in huge pages; "
            f"2 MB of the pool take {told['first_ms']:.2f} ms when first touched, {told['again_ms']:.2f} ms again"
        )
    turns = []
    for _ in range(options.turns):
        turns.append([asked_of(process, "step") for process in processes])
        print("  ms a step  " + " ".join(f"{ms:7.2f}" for ms in turns[-1]), flush=True)
    for process in processes:
        process.communicate()
    table = np.array(turns)
    columns, rows = np.median(table, axis=0), np.median(table, axis=1)
    apart = {name: float(found.std(ddof=1) / found.mean()) for name, found in (("processes", columns), ("turns", rows))}
    print(
        f"medians of processes {columns.min():.2f} to {columns.max():.2f} ms (deviation {apart['processes']:.1%}), "
        f"of turns {rows.min():.2f} to {rows.max():.2f} ms ({apart['turns']:.1%})"
    )
    clock = "own" if options.own_time else "wall"
    print(json.dumps({"benchmark": "processes", "clock": clock, "facts": facts, "ms": turns, "deviation": apart}))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--processes", type=int, default=5)
    add("--turns", type=int, default=6)
    add("--steps", type=int, default=24, help="of each process and turn (default 24)")
    add("--dtype", default="float32")
    add("--own-time", action="store_true", help="one thread, by its processor time instead of the wall")
    add("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.processes, options.turns) < 2 or options.steps < 2:
        parser.error("--processes, --turns and --steps must be at least 2")
    return options


def asked_of(process: subprocess.Popen[str], what: str) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(what + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline() or "null")


def inside(options: argparse.Namespace) -> None:
    """One of the processes: answers a line with a line. Kernels are not timed first, which may end otherwise."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asked = {"model": None, "dtype": options.dtype, "max_model_len": 1024, "max_num_seqs": 8, "least_s": 0.0,
             "linear": "native", "max_num_batched_tokens": 256, "threads": 1 if options.own_time else None,
             "own_time": options.own_time}  # fmt: skip
    engine, _ = engine_of(asked, BLOCKS)
    timed = Timed("steps", (Job(tuple(range(3, 35)), options.steps + 2),), (0.0,))
    for line in sys.stdin:
        if line.strip() == "facts":
            first_ms, again_ms = touched(engine, options.own_time), touched(engine, options.own_time)
            run_here(asked, engine, timed, 1)
            answers.write(json.dumps({"first_ms": first_ms, "again_ms": again_ms, **huge_pages()}) + "\n")
        else:
            (ran,) = run_here(asked, engine, timed, 1)
            answers.write(json.dumps(1e3 * float(np.median([took for _, took in ran.steps[2:]]))) + "\n")
        answers.flush()


def touched(engine: Any, own_time: bool) -> float:
    """Milliseconds that writing 2 MB of the pool takes, of all of it."""
    clock = time.process_time if own_time else time.perf_counter
    memory = engine.core.executor.arena.bytes
    begun = clock()
    memory.zero_()
    return 1e3 * (clock() - begun) * HUGE_BYTES / len(memory)


def huge_pages() -> dict[str, int]:
    """MB of large anonymous pieces of memory that are resident, and of them in huge pages. Where not said: zeros."""
    large = huge = resident = 0
    anonymous = False
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        words = line.split()
        if not words[0].endswith(":"):
            anonymous = len(words) == 5
        elif words[0] == "Rss:":
            resident = int(words[1])
        elif words[0] == "AnonHugePages:" and anonymous and resident > LARGE_KB:
            large, huge = large + resident, huge + int(words[1])
    return {"large_mb": large >> 10, "huge_mb": huge >> 10}


if __name__ == "__main__":
    main()
