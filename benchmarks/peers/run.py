"""octavo and its peers on the same workloads, in one go: same weights, precision, token ids and threads.

Every engine runs in a process of its own, in a virtual environment made from PyPI packages under `--cache`
(kept there, never in the checkout; octavo's is the one that runs this). A round starts each engine in turn,
lets it play its workloads and ends it, so no engine waits in memory while another is timed; `--repeat` rounds
interleave the repetitions. Greedy, end of sequence ignored, exact token counts. Prints a table for each
workload, then one JSON line. An engine that cannot be had, dies or hangs stands in the table with the reason.

    python benchmarks/peers/run.py --make-only
    python benchmarks/peers/run.py --workloads W1,W2,W4 --dtype fp32,bf16
    python benchmarks/peers/run.py --workloads W2 --engines octavo,vllm --scale 0.1
    python benchmarks/peers/run.py --workloads W4 --engines octavo:reuse,octavo:reuse:attention_backend=reference
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1]))

from comparison import Asked, rows, table
from engines import DEFAULT, DTYPES, ENGINES, chosen
from machine_facts import described, machine_facts
from model_forms import MODELS
from rounds import Bounds, Rounds, prepared
from workloads import NAMES, SEED, Workload, drawn_workloads, find_file, read_workloads

HERE = Path(__file__).resolve().parent
SMALLEST_VOCABULARY = 49152


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    workloads, source = chosen_workloads(options)
    facts = machine_facts()
    ready = {
        dtype: prepared(options.choices, options.model, dtype, options.cache, options.setup_s)
        for dtype in options.dtypes
    }
    if options.make_only:
        _print_made(ready)
        return
    print(f"{options.model}, {source}, {options.threads} threads, {options.repeat} rounds")
    print(described(facts))
    rate = memory_rate(options.threads)
    deadline = time.monotonic() + 60 * options.minutes
    reports = []
    for dtype in options.dtypes:
        bounds = Bounds(deadline, options.limit, options.minutes)
        rounds = Rounds(ready[dtype], workloads, dtype, options, bounds, rate)
        rounds.play(options.repeat)
        reports.append(_report(rounds, workloads, dtype))
    report = {"benchmark": "peers", "model": options.model, "source": source, "machine": facts, "scale": options.scale}
    report |= {"threads": options.threads, "repeat": options.repeat, "dtypes": reports}
    print(json.dumps(report))


def memory_rate(threads: int) -> Callable[[], float]:
    import torch

    from octavo.runtime.memory_rate import MemoryRate

    torch.set_num_threads(threads)
    return MemoryRate().read


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", nargs="?", type=Path, help="workloads.json; without it the shared one, else drawn from a seed")
    add(
        "--model", default=MODELS[0], help=f"{' or '.join(MODELS)}, or a directory of safetensors (default {MODELS[0]})"
    )
    add(
        "--dtype",
        default="fp32",
        help=f"by commas, out of {', '.join(DTYPES)}: of weights, activations and KV cache; int8: weights",
    )
    add("--workloads", default="W1,W2", help="by commas (default W1,W2)")
    add("--engines", default=DEFAULT, help=f"by commas, out of {', '.join(ENGINES)}, with options as name:option=value")
    add("--repeat", type=int, default=1, help="rounds (default 1)")
    add("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of every engine (default 2)")
    add("--scale", type=float, default=1.0, help="lengths of prompts and outputs times this, to try things out")
    add("--max-num-batched-tokens", type=int, default=1024, help="tokens of a forward pass (default 1024)")
    add("--limit", type=float, default=240.0, help="seconds that an engine may take for one workload (default 240)")
    add(
        "--minutes", type=float, default=60.0, help="in all, environments aside; what is left over says so (default 60)"
    )
    add("--setup-minutes", type=float, default=60.0, help="for environments and checkpoints that are missing")
    add("--make-only", action="store_true", help="make environments and checkpoints, then stop")
    add("--cache", type=Path, default=default_cache(), help="where environments and checkpoints are kept")
    options = parser.parse_args(arguments)
    for name in ("repeat", "threads", "max_num_batched_tokens", "limit", "minutes", "setup_minutes"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if not 0 < options.scale <= 1:
        parser.error("--scale must be above 0 and at most 1")
    options.dtypes, options.workloads = options.dtype.split(","), options.workloads.split(",")
    if not set(options.dtypes) <= set(DTYPES):
        parser.error(f"--dtype must be out of {', '.join(DTYPES)}")
    if options.model not in MODELS and not Path(options.model).is_dir():
        parser.error(f"--model {options.model} is no directory, nor one of {', '.join(MODELS)}")
    options.cache = options.cache.resolve()
    if HERE.parents[1] in options.cache.parents:
        parser.error(f"--cache {options.cache} is inside the checkout; name another directory")
    try:
        options.choices = chosen(options.engines)
    except ValueError as error:
        parser.error(f"--engines: {error}")
    options.setup_s = 60 * options.setup_minutes
    return options


def default_cache() -> Path:
    named = os.environ.get("OCTAVO_PEERS_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo-peers"


def chosen_workloads(options: argparse.Namespace) -> tuple[list[Workload], str]:
    path = find_file(options.file, HERE)
    if path is None:
        known, source = drawn_workloads(SMALLEST_VOCABULARY), f"no workloads.json found: drawn from seed {SEED} instead"
    else:
        known, source = read_workloads(path), f"token ids of {path.name}"
    unknown = [name for name in options.workloads if name not in known]
    if unknown:
        raise SystemExit(
            f"--workloads: {', '.join(unknown)} not there; there are {', '.join(known) or ', '.join(NAMES)}"
        )
    return [known[name].scaled(options.scale) for name in options.workloads], source


def _report(rounds: Rounds, workloads: list[Workload], dtype: str) -> dict[str, Any]:
    """Prints the settings and the tables of one precision; gives back what the JSON line holds of them."""
    print(f"\n{dtype}: how each engine was set")
    for label, settings in rounds.settings.items():
        print(f"  {label}: " + ", ".join(f"{name} {value}" for name, value in settings.items()))
    reported = []
    for workload in workloads:
        asked = Asked(tuple(len(j.prompt) for j in workload.jobs), tuple(j.max_tokens for j in workload.jobs))
        made = rows(asked, rounds.lines[workload.name])
        if not made:
            continue
        print(f"\n{dtype} {workload.described()}")
        print("\n".join(table(made)))
        reported.append({"name": workload.name, "about": workload.described(), "rows": made})
    print("speed: output tokens/s (one sequence: decode) over the first engine's; equal: same tokens as the first")
    return {"dtype": dtype, "settings": rounds.settings, "workloads": reported}


def _print_made(ready: dict[str, dict[str, Any]]) -> None:
    for dtype, engines in ready.items():
        for label, made in engines.items():
            print(f"{dtype} {label}: {getattr(made, 'reason', '') or 'ready'}")


if __name__ == "__main__":
    main()
