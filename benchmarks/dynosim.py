"""octavo's simulator beside DynoSim (`ai-dynamo` of PyPI) on one trace: speed, memory, and what each foretells.

Both replay the trace through one replica in virtual time: the same blocks, as many of them, seats and tokens a step,
with and without reuse by hash ids. First each costs steps in its own way (octavo by its roofline, DynoSim by its
built-in polynomial): their speed compares, their latencies do not. Then both are given one and the same law, linear
in new prompt tokens and in positions read, so that what still differs is what they decide, request by request; under
it also sequences that only decode, of which octavo takes many steps at once.

Every run is a process of its own, and repetitions alternate. Times are processor seconds; reading the trace is told
apart from simulating. DynoSim's environment is made from PyPI under `--cache`, once. Prints a table, then a JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, thread_time
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent / "peers"))

from dynosim_law import Law
from environments import Unavailable, make_environment, peer_variables
from machine_facts import described, machine_facts
from run import default_cache

from octavo.cost.step import Float64
from octavo.memory.prefix import PrefixDirectory
from octavo.planner.asked import Asked as Planned
from octavo.policy.bundle import Policies
from octavo.simulate.deploy import Replica, replica_of
from octavo.simulate.drive import Simulation
from octavo.simulate.formats import read_trace
from octavo.simulate.measure import Measured, quantiles
from octavo.simulate.sources import OpenLoop

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Case:
    title: str
    law: bool
    """One for both sides, instead of what each has of its own."""
    reuse: bool = False
    whole: bool = False
    """octavo reuses whole blocks only, as DynoSim does; it has no such option, and is patched for this."""
    running: int = 0
    """Instead of the trace: so many that begin together and decode DECODED tokens each."""


DECODED = 4_000
CASES = {
    "own-reuse": Case("each its own costs, reuse", False, True),
    "own": Case("each its own costs, no reuse", False),
    "law-reuse": Case("one law for both, reuse", True, True),
    "law-whole": Case("one law for both, reuse of whole blocks only", True, True, whole=True),
    "law": Case("one law for both, no reuse", True),
    "running-16": Case(f"one law for both, no trace: 16 decode {DECODED:,} tokens each", True, running=16),
    "running-256": Case(f"one law for both, no trace: 256 decode {DECODED:,} tokens each", True, running=256),
}
TRACE_BLOCK = 512
"""Tokens that one hash id of the trace stands for, whatever the blocks of the caches."""
SIDES = ("octavo", "DynoSim")
SHOWN = (
    ("requests", 10), ("req/CPU s", 11), ("min", 8), ("max", 8), ("with reading", 14), ("wall s", 8), ("MiB", 6),
    ("hit %", 7), ("TTFT s", 8), ("p50", 7), ("p99", 7), ("TPOT ms", 9), ("preempted", 11), ("virtual s", 11),
)  # fmt: skip
ALIKE_S = 1e-3
"""Within this, two simulators are said to foretell the same first token."""


def main() -> None:
    options = parsed()
    if options.play is not None:
        print(json.dumps(played(json.loads(options.play))))
        return
    python = options.python or made(options)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, python, Path(folder))
        print(described(bench.facts))
        print(bench.described())
        for _ in range(options.repeat):
            for case in options.cases:
                for side in SIDES:
                    bench.play(case, side)
        rows = [bench.row(case, side) for case in options.cases for side in SIDES]
        ratios = told(options.cases, rows)
        differences = {case: bench.differences(case) for case in options.cases if CASES[case].law}
    for case, found in differences.items():
        print(f"{CASES[case].title}: {said(found)}")
    report = {"benchmark": "dynosim", "machine": bench.facts, "deployment": bench.deployment()}
    print(json.dumps(report | {"rows": rows, "octavo_over_dynosim": ratios, "differences": differences}))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trace", type=Path, default=Path("../shared/data/traces/mooncake/conversation_trace.jsonl.gz"))
    add("--model", default="../shared/data/configs/meta-llama__Meta-Llama-3.1-8B/config.json")
    add("--device", default="h200-sxm", help="of the replica (default h200-sxm)")
    add("--tp", type=int, default=4, help="such devices (default 4)")
    add("--block", type=int, default=512, help="tokens of a block of the caches (default 512, as the trace's hash ids)")
    add("--requests", type=int, help="the first of the trace; all if not given")
    add("--cases", default=",".join(CASES), help=f"by commas, out of {', '.join(CASES)}")
    add("--repeat", type=int, default=3, help="runs of each (default 3)")
    add("--limit-s", type=float, default=180.0, help="seconds that a run may take (default 180)")
    add("--minutes", type=float, default=20.0, help="in all; runs that are left then are left out (default 20)")
    add("--setup-minutes", type=float, default=15.0, help="for DynoSim's environment, if it is missing")
    add("--cache", type=Path, default=default_cache(), help="where environments are kept")
    add("--python", type=Path, help="a Python that has DynoSim; no environment is made then")
    add("--make-only", action="store_true", help="make the environment, then stop")
    add("--play", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.cases = options.cases.split(",")
    if not set(options.cases) <= set(CASES):
        parser.error(f"--cases must be out of {', '.join(CASES)}")
    for name in ("tp", "block", "repeat", "limit_s", "minutes", "setup_minutes"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if options.requests is not None and options.requests < 1:
        parser.error("--requests must be at least 1")
    return options


def made(options: argparse.Namespace) -> Path:
    found = make_environment("dynosim", options.cache.resolve(), 60 * options.setup_minutes, print)
    if isinstance(found, Unavailable):
        raise SystemExit(f"DynoSim: {found.reason}")
    if options.make_only:
        raise SystemExit(0)
    return found.python


def replica(asked: dict[str, Any]) -> Replica:
    planned = Planned.of(
        device=asked["device"], tp=asked["tp"], block_size=str(asked["block"]), max_num_batched_tokens="8192"
    )
    return replica_of(asked["model"], planned)


class Bench:
    """Runs both sides and keeps what each run came to. A run that ends badly is a row with the reason."""

    def __init__(self, options: argparse.Namespace, python: Path, folder: Path) -> None:
        self.options, self.python = options, python
        self.deadline = perf_counter() + 60 * options.minutes
        self.facts = machine_facts()
        self.trace = folder / "trace.jsonl"
        self.lines = unpacked(options.trace, self.trace, options.requests)
        self.asked = {"device": options.device, "tp": options.tp, "block": options.block, "model": str(options.model)}
        self.replica = replica(self.asked)
        self.law = Law.near(self.replica.cost)
        self.profile = folder / "law.npz"
        self.law.write_profile(self.profile)
        self.runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.failed: dict[tuple[str, str], str] = {}

    def deployment(self) -> dict[str, Any]:
        one = self.replica
        return {
            "model": one.model, "device": one.device, "tp": one.tp, "requests": self.lines, "blocks": one.slabs,
            "block_tokens": self.options.block, "max_num_seqs": one.max_num_seqs, "law": asdict(self.law),
            "max_num_batched_tokens": one.max_num_batched_tokens, "max_model_len": one.max_model_len,
        }  # fmt: skip

    def described(self) -> str:
        one, law = self.replica, self.law
        return (
            f"{self.lines:,} requests of {self.options.trace.name}; {one.model} on {one.tp} {one.device}: "
            f"{one.slabs:,} blocks of {self.options.block}, {one.max_num_seqs} seats, "
            f"{one.max_num_batched_tokens:,} tokens a step\n"
            f"one law: {1e6 * law.prompt_token_s:.2f} us a prompt token; {1e3 * law.decode_s:.3f} ms if any decode, "
            f"{1e9 * law.position_s:.3f} ns a position they read"
        )

    def play(self, case: str, side: str) -> None:
        """One run; the first one of DynoSim is followed by another, not timed, that tells of each request."""
        runs = self.runs.setdefault((case, side), [])
        if perf_counter() > self.deadline:
            self.failed.setdefault((case, side), "runs left out: the --minutes were over")
        if (case, side) in self.failed:
            return
        print(f"{side}, {CASES[case].title}, run {len(runs) + 1}", file=sys.stderr, flush=True)
        try:
            if side == "octavo":
                runs.append(self._asked([sys.executable, str(Path(__file__)), "--play"], self._octavo(case)))
                return
            command = [str(self.python), str(HERE / "peers" / "simulate_dynosim.py")]
            row = self._asked(command, self._dynosim(case, each=False))
            if not runs:
                whole = self._asked(command, self._dynosim(case, each=True))
                row |= {name: whole[name] for name in ("each", "preemptions")}
            runs.append(row)
        except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
            lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
            self.failed[case, side] = lines[-1] if lines else type(error).__name__

    def _octavo(self, case: str) -> dict[str, Any]:
        one = CASES[case]
        law = asdict(self.law) if one.law else None
        reuse = "prefix" if one.reuse else "none"
        return self.asked | {"trace": self._trace(one), "reuse": reuse, "law": law, "whole": one.whole}

    def _dynosim(self, case: str, *, each: bool) -> dict[str, Any]:
        one = CASES[case]
        external = {"type": "external", "provider": "dynamo_profile", "config": {"path": str(self.profile)}}
        engine = {
            "backend": "vllm", "block_size": self.options.block, "num_gpu_blocks": self.replica.slabs,
            "max_num_seqs": self.replica.max_num_seqs, "max_model_len": self.replica.max_model_len,
            "max_num_batched_tokens": self.replica.max_num_batched_tokens, "enable_prefix_caching": one.reuse,
            "enable_chunked_prefill": True, "timing_model": external if one.law else {"type": "polynomial"},
        }  # fmt: skip
        return {"trace": self._trace(one), "block": TRACE_BLOCK, "engine": engine, "each": each}

    def _trace(self, one: Case) -> str:
        if not one.running:
            return str(self.trace)
        path = self.trace.with_name(f"running-{one.running}.jsonl")
        lines = (
            {"timestamp": 0, "input_length": 16, "output_length": DECODED, "hash_ids": [number]}
            for number in range(one.running)
        )
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        return str(path)

    def _asked(self, command: list[str], asked: dict[str, Any]) -> dict[str, Any]:
        own = command[0] == sys.executable
        run = subprocess.run(
            [*command, json.dumps(asked)], capture_output=True, text=True, check=True, timeout=self.options.limit_s,
            env=None if own else peer_variables(),
        )  # fmt: skip
        row: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        return row

    def row(self, case: str, side: str) -> dict[str, Any]:
        """The median run's times; what is foretold is the same in every run."""
        runs = self.runs[case, side]
        row: dict[str, Any] = {"case": case, "side": side, "runs": len(runs), "failed": self.failed.get((case, side))}
        if not runs:
            return row
        rates = [run["requests"] / run["seconds"] for run in runs]
        whole = [run["requests"] / (run["seconds"] + run["reading_s"]) for run in runs]
        row |= {"rate": median(rates), "rate_min": min(rates), "rate_max": max(rates), "rate_whole": median(whole)}
        row |= {
            name: median(run[name] for run in runs)
            for name in ("seconds", "thread_s", "reading_s", "wall_s", "peak_mib")
        }
        row |= {name: value for name, value in runs[0].items() if name not in ("each", *row)}
        return row | {"ttft_s": quantiles(np.array([one[4] for one in runs[0]["each"]]))}

    def differences(self, case: str) -> dict[str, Any]:
        """Request by request, of the first run of each."""
        if not all(self.runs[case, side] for side in SIDES):
            return {}
        return compared(*(self.runs[case, side][0]["each"] for side in SIDES))


def unpacked(trace: Path, plain: Path, most: int | None) -> int:
    """Both read the same plain file."""
    packed = trace.read_bytes()
    whole = gzip.decompress(packed) if trace.suffix == ".gz" else packed
    lines = [line for line in whole.splitlines(keepends=True) if line.strip()][:most]
    plain.write_bytes(b"".join(lines))
    return len(lines)


def compared(ours: list[list[float]], theirs: list[list[float]]) -> dict[str, Any]:
    """Two lists of (arrival, input, output, reused, TTFT, whole time), matched by the first three."""
    mine, other = (np.array(sorted(rows), dtype=np.float64) for rows in (ours, theirs))
    if mine.shape != other.shape or np.abs(mine[:, :3] - other[:, :3]).max(initial=0.0) > ALIKE_S:
        return {"matched": False}
    reused, first, whole = (other[:, at] - mine[:, at] for at in (3, 4, 5))
    return {
        "matched": True,
        "requests": len(mine),
        "same_reuse": float((reused == 0).mean()),
        "less_reuse": float((reused < 0).mean()),
        "more_reuse": float((reused > 0).mean()),
        "same_ttft": float((np.abs(first) <= ALIKE_S).mean()),
        "ttft_difference_s": spread(first),
        "e2e_difference_s": spread(whole),
    }


def spread(differences: Float64) -> dict[str, float]:
    apart = np.abs(differences)
    return {
        "mean": float(differences.mean()),
        "p50": float(np.median(differences)),
        "p99_abs": float(np.quantile(apart, 0.99)),
        "max_abs": float(apart.max()),
    }


# -- octavo's side ----------------------------------------------------------------------------------


def played(asked: dict[str, Any]) -> dict[str, Any]:
    one = replica(asked)
    begun = process_time()
    requests = read_trace(asked["trace"]).requests
    reading = process_time() - begun
    law = Law(**asked["law"]) if asked["law"] is not None else None
    if asked["whole"]:
        PrefixDirectory._partly_shared = lambda *_: (None, 0)  # type: ignore[method-assign]
    measured = Measured()
    begun, wall, alone = process_time(), perf_counter(), thread_time()
    core = one.core(Policies.named(reuse=asked["reuse"]), cost=law)
    simulation = Simulation(core, OpenLoop(requests), [measured])
    while simulation.core.has_work or simulation.source.next_ns() is not None:
        simulation.run(measured.end_s + 3_600.0)
    took, walls, thread = process_time() - begun, perf_counter() - wall, thread_time() - alone
    names = ("arrival", "input_tokens", "output_tokens", "cached_tokens", "ttft", "e2e")
    columns = [measured.column(name) for name in names]
    return {
        "requests": sum(measured.ended.values()), "refused": sum(measured.refused.values()),
        "seconds": took, "reading_s": reading, "thread_s": thread, "wall_s": walls,
        "peak_mib": peak_mib(),
        "hit": float(columns[3].sum() / columns[1].sum()), "computed_tokens": measured.prefill_tokens,
        "tpot_s": quantiles(measured.column("tpot")),
        "end_s": measured.end_s, "preemptions": measured.preemptions, "steps": measured.steps,
        "each": [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)],
    }  # fmt: skip


def peak_mib() -> float:
    """Of this program: what `getrusage` counts begins with the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) / 1024


# -- what is printed --------------------------------------------------------------------------------


def told(cases: list[str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The table; gives back octavo's speed over DynoSim's of each case."""
    print("\n" + " " * 10 + "".join(f"{name:>{width}}" for name, width in SHOWN))
    ratios = {}
    for case in cases:
        pair = {row["side"]: row for row in rows if row["case"] == case}
        print(CASES[case].title)
        for side in SIDES:
            print("  " + line(pair[side]))
        if all("rate" in pair[side] for side in SIDES):
            ours, theirs = pair["octavo"], pair["DynoSim"]
            found = {name: ours[name] / theirs[name] for name in ("rate", "rate_whole", "peak_mib")}
            ratios[case] = found
            print(
                f"  octavo over DynoSim: {found['rate']:.2f} of its requests a CPU second, "
                f"{found['rate_whole']:.2f} with reading, {found['peak_mib']:.2f} of its memory"
            )
    return ratios


def line(row: dict[str, Any]) -> str:
    if "rate" not in row:
        return f"{row['side']:8}{row['failed']}"
    cells = (
        f"{row['requests']:,}", f"{row['rate']:,.0f}", f"{row['rate_min']:,.0f}", f"{row['rate_max']:,.0f}",
        f"{row['rate_whole']:,.0f}", f"{row['wall_s']:.2f}", f"{row['peak_mib']:.0f}", f"{100 * row['hit']:.2f}",
        f"{row['ttft_s']['mean']:.3f}", f"{row['ttft_s']['p50']:.3f}", f"{row['ttft_s']['p99']:.2f}",
        f"{1e3 * row['tpot_s']['mean']:.2f}", f"{row['preemptions']:,}", f"{row['end_s']:,.1f}",
    )  # fmt: skip
    body = "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, SHOWN, strict=True))
    return f"{row['side']:8}{body}" + (f"  then {row['failed']}" if row["failed"] else "")


def said(found: dict[str, Any]) -> str:
    if not found.get("matched"):
        return "the requests of the two could not be matched"
    first = found["ttft_difference_s"]
    apart = f"p99 {1e3 * first['p99_abs']:.2f} ms, largest {1e3 * first['max_abs']:.2f} ms"
    return (
        f"{100 * found['same_reuse']:.1f}% of {found['requests']:,} requests reuse as much in DynoSim, "
        f"{100 * found['less_reuse']:.1f}% less, {100 * found['more_reuse']:.1f}% more; "
        f"{100 * found['same_ttft']:.1f}% get their first token within {1e3 * ALIKE_S:.0f} ms of the same delay "
        f"(mean difference {1e3 * first['mean']:+.2f} ms, {apart})"
    )


if __name__ == "__main__":
    main()
