"""How long `octavo serve` takes until it answers, and the most memory that it held by then.

Starts the server several times, one after the other, with the files of the default model (or `--model`) in the
page cache, and measures from starting the process to the line that says it is ready, and to the first token of a
streamed answer. `imports` is what importing torch and Transformers' model code alone takes, in between.
Memory is the process's highest (VmHWM), after several answers at once. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from machine_facts import described, machine_facts
from serve import DTYPES, Asked, Started, cpu_seconds, port_of, streams

IMPORTS = "import torch, transformers.models.llama.modeling_llama"
ANSWERS, TOKENS = 8, 16


@dataclass(frozen=True, slots=True)
class Start:
    ready_s: float
    answered_s: float
    """Until the first answers were whole."""
    cpu_s: float
    """Of all threads, until it was ready."""
    peak_gb: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as for octavo serve (default: the embedded model)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="auto", help="of the model (default: its own)")
    parser.add_argument("--repeat", type=int, default=3, help="starts that count, after one that warms (default 3)")
    parser.add_argument("--pool", default="256MB", help="bytes of KV cache (default 256MB)")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error("--repeat must be at least 1")
    facts = machine_facts()
    command = [sys.executable, "-m", "octavo", "serve", *([options.model] if options.model else []), "--port=0"]
    command += [f"--kv-cache-memory-bytes={options.pool}", f"--dtype={DTYPES[options.dtype]}"]
    starts, imports = [], []
    for number in range(options.repeat + 1):
        begun = time.monotonic()
        subprocess.run([sys.executable, "-c", IMPORTS], check=True)
        imported = time.monotonic() - begun
        start = one_start(command)
        if number:
            starts.append(start)
            imports.append(imported)
    report(options, facts, starts, imports)


def one_start(command: Sequence[str]) -> Start:
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    with Started(process):
        port = port_of(process)
        ready_s, cpu_s = time.monotonic() - begun, cpu_seconds(process.pid)
        asyncio.run(streams(port, Asked(None, [[1, 2, 3]] * ANSWERS, TOKENS, {})))
        answered_s = time.monotonic() - begun
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8"))
        peak = int(found[1]) * 1024 / 1e9 if found else float("nan")
        return Start(ready_s, answered_s, cpu_s, peak)


def report(
    options: argparse.Namespace, facts: dict[str, object], starts: Sequence[Start], imports: Sequence[float]
) -> None:
    print(f"{options.model or 'the embedded model'}, dtype {options.dtype}, pool {options.pool}")
    columns = {
        "imports s": list(imports),
        "ready s": [start.ready_s for start in starts],
        "answered s": [start.answered_s for start in starts],
        "CPU s": [start.cpu_s for start in starts],
        "peak GB": [start.peak_gb for start in starts],
    }
    print(f"{'':12}{'median':>9}{'least':>9}{'most':>9}")
    for name, values in columns.items():
        print(f"{name:12}{statistics.median(values):>9.3f}{min(values):>9.3f}{max(values):>9.3f}")
    print(described(facts))
    line = {
        "benchmark": "ready",
        "machine": facts,
        "model": options.model,
        "dtype": options.dtype,
        "pool": options.pool,
        "starts": len(starts),
        "imports_s": statistics.median(imports),
        "ready_s": statistics.median(columns["ready s"]),
        "all_s": columns["ready s"],
        "peak_gb": max(columns["peak GB"]),
        "rows": [asdict(start) for start in starts],
    }
    print(json.dumps(line))


if __name__ == "__main__":
    os.environ.pop("OPENBLAS_CORETYPE", None)
    main()
