"""How fast octavo simulates: requests a second of processor time, memory, and what cost grows with.

- the Mooncake conversation trace through one replica, with and without reuse, at 512- and at 16-token blocks;
- `--million`: a million requests with the lengths of Azure's conversation trace, Poisson arrivals;
- the cost of a step against how many run, and of a run against how many end (`--svg FILE` draws both);
- `--calls`: how many function calls a request takes, by what they serve, in the first requests of the trace with reuse.

Every case runs in a process of its own, so that its peak of memory is its own; times are processor seconds of it,
reading the trace left out. A spin of plain Python beside each says how fast the machine was just then. Another
simulator on the same trace: `dynosim.py`. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from machine_facts import described, machine_facts

from octavo.planner.asked import Asked as Planned
from octavo.policy.bundle import Policies
from octavo.simulate.deploy import Replica, replica_of
from octavo.simulate.drive import Simulation
from octavo.simulate.formats import read_trace
from octavo.simulate.lengths import Empirical
from octavo.simulate.measure import Measured
from octavo.simulate.plots import lines_over_time
from octavo.simulate.sources import OpenLoop
from octavo.simulate.synthetic import Arrivals, Synthetic
from octavo.simulate.trace import TraceRequest

MOONCAKE = {
    "512": {},
    "512 reuse": {"reuse": "prefix"},
    "16": {"block": 16},
    "16 reuse": {"block": 16, "reuse": "prefix"},
}
GATE, GOAL = 1_000, 5_000
AZURE_RATE = 6.0
"""Requests a second: what one replica of the million just keeps up with."""
SPIN = 5_000_000
RUNNING = (16, 64, 256, 1024)
ENDING = (250, 1000, 4000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", default="../shared/data/traces/mooncake/conversation_trace.jsonl.gz")
    parser.add_argument("--azure", default="../shared/data/traces/azure2023/AzureLLMInferenceTrace_conv.csv")
    parser.add_argument("--model", default="../shared/data/configs/meta-llama__Meta-Llama-3.1-8B/config.json")
    parser.add_argument("--requests", type=int, help="of the Mooncake trace; all if not given")
    parser.add_argument("--million", type=int, nargs="?", const=1_000_000, help="so many Azure-like requests; minutes")
    parser.add_argument("--calls", type=int, nargs="?", const=2_000, help="only count calls, of so many requests")
    parser.add_argument("--svg", help="draw what cost grows with into this file")
    parser.add_argument("--limit-s", type=float, default=600.0, help="of each case")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case is not None:
        print(json.dumps(CASES[asked.case.split(":")[0]](asked, asked.case.partition(":")[2])))
        return
    if asked.calls is not None:
        asked.requests = asked.calls
        print(json.dumps(calls(asked)))
        return
    found: dict[str, Any] = {"machine": machine_facts(), "cases": {}}
    print(described(found["machine"]))
    heads = (("requests", 10), ("CPU s", 9), ("req/CPU s", 11), ("single", 9), ("leaps", 9), ("MiB", 7), ("B/req", 8))
    print(" " * 34 + "".join(f"{name:>{width}}" for name, width in heads) + f"{'spin s':>8}")
    for name, case in cases(asked):
        row = in_a_process(case)
        found["cases"][name] = row
        print(told(name, row), flush=True)
    found["growth"] = growth(found["cases"])
    for line in found["growth"]["lines"]:
        print(line)
    if asked.svg is not None:
        Path(asked.svg).write_text(drawn(found["cases"]), "utf-8")
    for name in ("Mooncake, blocks of 512", "Mooncake, blocks of 512 reuse"):
        row = found["cases"][name]
        if "requests" in row:
            rate = row["requests"] / row["seconds"]
            against = f"gate {GATE:,} {met(rate, GATE)}, goal {GOAL:,} {met(rate, GOAL)}"
            print(f"{name}: {rate:,.0f} requests a CPU second; {against}")
    print(json.dumps(found))


def met(rate: float, wanted: float) -> str:
    return "met" if rate >= wanted else "not met"


def cases(asked: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    for name in MOONCAKE:
        yield f"Mooncake, blocks of {name}", ["--case", f"mooncake:{name}"]
    for running in RUNNING:
        yield f"steps of {running} that run", ["--case", f"running:{running}"]
    for ending in ENDING:
        yield f"{ending} that begin and end", ["--case", f"ending:{ending}"]
    if asked.million:
        yield f"{asked.million:,} as of Azure", ["--case", f"azure:{asked.million}"]


def in_a_process(case: list[str]) -> dict[str, Any]:
    given = [argument for argument in sys.argv[1:] if argument != "--case"]
    run = subprocess.run([sys.executable, __file__, *given, *case], capture_output=True, text=True, check=False)
    if run.returncode:
        return {"failed": run.stderr.strip().splitlines()[-1:] or [f"exit {run.returncode}"]}
    row: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return row


def told(name: str, row: dict[str, Any]) -> str:
    if "requests" not in row:
        return f"{name:34}{row.get('failed', row)}"
    cells = f"{name:34}{row['requests']:>10,}{row['seconds']:>9.2f}{row['requests'] / row['seconds']:>11,.0f}"
    cells += f"{row['singles']:>9,}{row['leaps']:>9,}{row['peak_mib']:>7.0f}{row['bytes_per_request']:>8,.0f}"
    return f"{cells}{row['spin_s']:>8.2f}"


# -- cases ------------------------------------------------------------------------------------------


def simulated(
    replica: Replica, requests: tuple[TraceRequest, ...], policies: Policies, limit_s: float
) -> dict[str, Any]:
    before = peak_mib()
    measured = Measured()
    simulation = Simulation(replica.core(policies), OpenLoop(requests), [measured])
    begun, wall, until = process_time(), perf_counter(), 0.0
    while simulation.core.has_work or simulation.source.next_ns() is not None:
        until += 3600.0
        simulation.run(until)
        if perf_counter() - wall > limit_s:
            break
    took, ended = process_time() - begun, sum(measured.ended.values())
    return {
        "requests": ended, "of": len(requests), "seconds": took, "singles": simulation.steps,
        "leaps": simulation.leaps, "steps": measured.steps, "peak_mib": peak_mib(),
        "bytes_per_request": (peak_mib() - before) * 2**20 / max(1, ended), "spin_s": spin(),
        "mean_batch": measured.running_steps / max(1, measured.steps),
    }  # fmt: skip


def mooncake(asked: argparse.Namespace, kind: str) -> dict[str, Any]:
    chosen = MOONCAKE[kind]
    replica = replica_of(
        asked.model,
        Planned.of(device="h200-sxm", tp=4, block_size=str(chosen.get("block", 512)), max_num_batched_tokens="8192"),
    )
    requests = read_trace(asked.trace, limit=asked.requests).requests
    return simulated(replica, requests, Policies.named(reuse=chosen.get("reuse", "none")), asked.limit_s)


def azure(asked: argparse.Namespace, count: str) -> dict[str, Any]:
    seen = read_trace(asked.azure).requests
    made = Synthetic(
        requests=int(count),
        arrivals=Arrivals(rate=AZURE_RATE),
        input_tokens=Empirical(tuple(entry.input_tokens for entry in seen)),
        output_tokens=Empirical(tuple(entry.output_tokens for entry in seen)),
        seed=1,
    ).draw()
    replica = replica_of(asked.model, Planned.of(device="h100-sxm", max_num_batched_tokens="8192"))
    return simulated(replica, made, Policies(), asked.limit_s)


def _small(running: int) -> Replica:
    layers = Planned.of(device="h200-sxm", layers=8, kv_heads=4, head_dim=64, weights_bytes=10**9,
                        max_num_seqs=str(running), max_num_batched_tokens="16384")  # fmt: skip
    return replica_of(None, layers)


def running(asked: argparse.Namespace, count: str) -> dict[str, Any]:
    """So many decode together for 4,000 steps: nothing enters or ends meanwhile."""
    n = int(count)
    requests = tuple(TraceRequest(arrival_ns=0, input_tokens=16, output_tokens=4_000) for _ in range(n))
    return simulated(_small(n), requests, Policies(), asked.limit_s)


def ending(asked: argparse.Namespace, count: str) -> dict[str, Any]:
    """So many begin and end, 64 at a time, in the same number of steps."""
    n = int(count)
    output = 64 * 4_000 // n
    requests = tuple(
        TraceRequest(arrival_ns=0, input_tokens=16, output_tokens=max(2, output - i % 7)) for i in range(n)
    )
    return simulated(_small(64), requests, Policies(), asked.limit_s)


CASES: dict[str, Callable[[argparse.Namespace, str], dict[str, Any]]] = {
    "mooncake": mooncake, "azure": azure, "running": running, "ending": ending,
}  # fmt: skip


def spin() -> float:
    begun, total = process_time(), 0
    for number in range(SPIN):
        total += number
    return process_time() - begun


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


KINDS = (
    (
        "kept blocks: keys, nodes, eviction",
        ("memory/keys", "memory/prefix", "memory/sharing", "memory/shelf", "eviction"),
    ),
    ("slots, tables, adoption", ("octavo/memory",)),
    ("deciding and learning", ("octavo/scheduling", "octavo/policy")),
    ("virtual time, costs, figures", ("octavo/simulate", "octavo/cost", "octavo/planner", "octavo/geometry")),
    ("numpy's own Python", ("/numpy/",)),
    ("built-in functions and methods", ("~",)),
    ("the rest of the library", ("",)),
)


def calls(asked: argparse.Namespace) -> dict[str, float]:
    """Calls a request, by kind of the function called. Profiled: no time is told."""
    profile, kept = cProfile.Profile(), Simulation.run

    def run(self: Simulation, until_s: float | None = None) -> None:
        profile.enable()
        kept(self, until_s)
        profile.disable()

    Simulation.run = run  # type: ignore[method-assign]
    row = mooncake(asked, "512 reuse")
    found = dict.fromkeys((name for name, _ in KINDS), 0.0)
    for (file, _, _), (_, many, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        name = next(name for name, parts in KINDS if any(part in file for part in parts))
        found[name] += many / row["requests"]
    for name, many in found.items():
        print(f"{name:36}{many:>8,.0f}")
    print(f"{'together':36}{sum(found.values()):>8,.0f}")
    return found


# -- what it grows with -----------------------------------------------------------------------------


def growth(rows: dict[str, Any]) -> dict[str, Any]:
    lines, found = [], {}
    for counts, name in ((RUNNING, "steps of {} that run"), (ENDING, "{} that begin and end")):
        for count in counts:
            row = rows.get(name.format(count), {})
            if "steps" in row:
                found[name.format(count)] = 1e6 * row["seconds"] / row["steps"]
                each = 1e6 * row["seconds"] / row["requests"]
                lines.append(
                    f"{name.format(count):34}{found[name.format(count)]:>9.2f} us a step, {each:>9.1f} us a request"
                )
    return {"us_per_step": found, "lines": lines}


def drawn(rows: dict[str, Any]) -> str:
    curves = []
    for counts, name, label in (
        (RUNNING, "steps of {} that run", "running together, nobody ends (CPU us a step)"),
        (ENDING, "{} that begin and end", "that begin and end, 64 at a time (CPU ms in all / 10)"),
    ):
        points = []
        for count in counts:
            row = rows.get(name.format(count), {})
            if "steps" in row:
                y = 1e6 * row["seconds"] / row["steps"] if counts is RUNNING else 1e2 * row["seconds"]
                points.append((float(count), y))
        curves.append((label, points))
    svg = lines_over_time(curves, "cost against sequences").replace("seconds</text>", "sequences</text>")
    body = svg.split("</svg>")[0] + "</svg>"
    return body.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


if __name__ == "__main__":
    main()
