"""DynoSim's side of `dynosim.py`, in its own environment: one replay of a trace in virtual time.

Takes one JSON object as its argument, prints one as its last line. Reading the trace is timed apart, by a replay
that is told to stop after the first virtual millisecond. Processor seconds are the process's; `thread_s` are those
of the thread that asked, to show whether any other worked; wall seconds are as DynoSim tells them, reading left out.
Standard library and `dynamo.replay` only.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from time import process_time, thread_time
from typing import Any

from dynamo.replay import run_trace_replay

PACKAGES = ("ai-dynamo", "ai-dynamo-runtime")


def main(asked: dict[str, Any]) -> None:
    settings = {"trace_block_size": asked["block"], "extra_engine_args": {"engine": asked["engine"]}}
    begun = process_time()
    run_trace_replay(asked["trace"], max_sim_time_ms=1.0, **settings)
    reading = process_time() - begun
    begun, alone = process_time(), thread_time()
    report = run_trace_replay(asked["trace"], capture_per_request=asked["each"], **settings)
    whole, thread = process_time() - begun, thread_time() - alone
    told = report.summary
    row = {
        "versions": {name: version(name) for name in PACKAGES},
        "requests": told["completed_requests"],
        "seconds": whole - reading, "reading_s": reading, "thread_s": thread - reading,
        "wall_s": told["wall_time_ms"] / 1e3,
        "peak_mib": peak_mib(),
        "hit": told["first_admission_prefix_cache_reused_ratio"],
        "computed_tokens": told["committed_prefill_tokens"],
        "tpot_s": {"mean": told["mean_tpot_ms"] / 1e3},
        "end_s": told["duration_ms"] / 1e3,
    }  # fmt: skip
    if asked["each"]:
        row["preemptions"] = sum(one["readmission_count"] for one in report.per_request)
        row["each"] = [
            [one["arrival_time_ms"] / 1e3, one["input_length"], one["output_length"],
             one["admission_history"][0]["reused_input_tokens"], one["ttft_ms"] / 1e3,
             one["e2e_latency_ms"] / 1e3]
            for one in report.per_request
        ]  # fmt: skip
    print(json.dumps(row))


def peak_mib() -> float:
    """Of this program: what `getrusage` counts begins with the process that started it."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) / 1024


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
