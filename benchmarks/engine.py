"""octavo beside Transformers: the same token ids, weights, dtype and machine, in one run.

Replays workloads W1 to W4 through octavo, through Transformers' `generate` on padded batches and
through its continuous batching, repetitions interleaved so that a change of the machine's mood hits
all of them. `--policies` runs octavo's own baselines in the same way, which says what paging and
iteration-level batching gain. Prints tables, then one JSON line.

    python benchmarks/engine.py --workloads W2
    python benchmarks/engine.py --workloads W2 --engines octavo --kv-share 0.4 \\
        --policies paged/iteration,contiguous-max/iteration,paged/request,contiguous-max/request
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from machine_facts import described, machine_facts, torch_facts
from measures import Replay, equal_outputs, figures, median_replay, sparkline
from workloads import NAMES, SEED, Job, Workload, drawn_workloads, find_file, read_workloads

ENGINES = ("octavo", "hf-padded", "hf-continuous")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
UNWANTED = "OPENBLAS_CORETYPE"
"""A hint that slows numpy down on every machine but the one it was set for; figures are taken without it."""

COLUMNS = {
    "s": 9,
    "CPU s": 9,
    "out tok/s": 11,
    "all tok/s": 11,
    "TTFT p50": 10,
    "p99": 9,
    "TPOT p50": 10,
    "p99 ": 8,
    "steps": 7,
    "equal": 8,
    "time": 8,
}
"""Headings and widths; `time` is relative to the first engine."""


class Runner(Protocol):
    name: str

    def run(self, workload: Workload, settings: Any) -> Replay: ...


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    loaded = load(options)
    workloads, source = chosen_workloads(options, loaded.config_json["vocab_size"])
    runners = make_runners(options, loaded)
    facts = machine_facts() | torch_facts()
    print(f"{loaded.name}, {options.dtype}, {source}")
    print(described(facts))
    reports = [compare(workload, runners, options) for workload in workloads]
    report = {"benchmark": "engine", "model": loaded.name, "dtype": options.dtype, "source": source, "machine": facts}
    report |= {"scale": options.scale, "repeat": options.repeat, "kv_share": options.kv_share, "workloads": reports}
    print(json.dumps(report))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "file", nargs="?", type=Path, help="workloads.json; without it the shared one, else workloads drawn from a seed"
    )
    add("--model", help="directory, hub id or GGUF file; the embedded SmolLM2-135M-Instruct if not given")
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="of weights, activations and KV cache (default fp32)")
    add("--workloads", default=",".join(NAMES), help="by commas (default all four)")
    add("--engines", default=",".join(ENGINES), help=f"by commas, out of {', '.join(ENGINES)} (default all)")
    add("--policies", default="paged/iteration", help="allocation/batching[/reuse] that octavo runs with, by commas")
    add("--repeat", type=int, default=3, help="repetitions of every engine, interleaved (default 3)")
    add("--scale", type=float, default=1.0, help="lengths of prompts and outputs times this, to try things out")
    add("--kv-share", type=float, default=1.0, help="KV blocks, as a share of what all requests need at once")
    add("--block-size", type=int, default=16, help="tokens per block of octavo (default 16)")
    add("--max-num-batched-tokens", type=int, default=1024, help="tokens a step at most, octavo's and continuous HF's")
    add("--padded-batch", type=int, default=16, help="requests in a padded batch (default 16, the best for W2)")
    add(
        "--hf-page-size", type=int, default=256, help="tokens per block of continuous HF (default 256, its own default)"
    )
    add("--hf-no-sharing", action="store_true", help="continuous HF without shared prefix blocks (its default is with)")
    add("--threads", type=int, help="torch threads; torch's own choice if not given")
    options = parser.parse_args(arguments)
    for name in ("repeat", "block_size", "max_num_batched_tokens", "padded_batch", "hf_page_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.threads is not None and options.threads < 1:
        parser.error("--threads must be at least 1")
    if not 0 < options.scale <= 1 or not 0 < options.kv_share <= 1:
        parser.error("--scale and --kv-share must be above 0 and at most 1")
    options.workloads, options.engines = options.workloads.split(","), options.engines.split(",")
    options.policies = [tuple(pair.split("/")) for pair in options.policies.split(",")]
    if not set(options.engines) <= set(ENGINES):
        parser.error(f"--engines must be out of {', '.join(ENGINES)}")
    if any(len(choice) not in (2, 3) for choice in options.policies):
        parser.error("--policies must be pairs such as paged/iteration, or paged/iteration/prefix, by commas")
    return options


def load(options: argparse.Namespace) -> Any:
    import torch
    from transformers.utils import logging

    from octavo.models.load import load_checkpoint

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    return load_checkpoint(options.model, dtype=DTYPES[options.dtype], skip_tokenizer_init=True)


def chosen_workloads(options: argparse.Namespace, vocab_size: int) -> tuple[list[Workload], str]:
    path = find_file(options.file, Path(__file__).resolve().parent)
    if path is None:
        known, source = drawn_workloads(vocab_size), f"no workloads.json found: drawn from seed {SEED} instead"
    else:
        known, source = read_workloads(path), f"token ids of {path.name}"
    unknown = [name for name in options.workloads if name not in known]
    if unknown:
        raise SystemExit(f"--workloads: {', '.join(unknown)} not there; there are {', '.join(known)}")
    return [known[name].scaled(options.scale) for name in options.workloads], source


def make_runners(options: argparse.Namespace, loaded: Any) -> list[Runner]:
    from replay_octavo import OctavoReplay
    from replay_transformers import ContinuousReplay, PaddedReplay
    from shared_weights import sharing_weights

    twins = {name: sharing_weights(loaded.model) for name in options.engines if name != "octavo"}
    runners: list[Runner] = []
    if "octavo" in options.engines:
        runners += [OctavoReplay(loaded, *pair) for pair in options.policies]
    if "hf-padded" in twins:
        runners.append(PaddedReplay(twins["hf-padded"], options.padded_batch))
    if "hf-continuous" in twins:
        share = not options.hf_no_sharing
        runners.append(ContinuousReplay(twins["hf-continuous"], options.hf_page_size, share_blocks=share))
    return runners


def compare(workload: Workload, runners: list[Runner], options: argparse.Namespace) -> dict[str, Any]:
    settings = settings_for(workload, options)
    warm = Workload("warm-up", "", (Job(workload.jobs[0].prompt[:16], 4),))
    for runner in runners:
        runner.run(warm, settings)
    replays: dict[str, list[Replay]] = {runner.name: [] for runner in runners}
    for _ in range(options.repeat):
        for runner in runners:
            replays[runner.name].append(runner.run(workload, settings))
            done = replays[runner.name][-1]
            print(f"  {workload.name} {runner.name}: {done.seconds:.2f} s", file=sys.stderr, flush=True)
    chosen = {name: median_replay(several) for name, several in replays.items()}
    rows = [figures(replay, workload.input_tokens) for replay in chosen.values()]
    first = next(iter(chosen.values()))
    for row, (name, replay) in zip(rows, chosen.items(), strict=True):
        row["all_seconds"] = [one.seconds for one in replays[name]]
        row["all_cpu_seconds"] = [one.cpu_seconds for one in replays[name]]
        row["equal_outputs"] = equal_outputs(first, replay)
    print_comparison(workload, rows, settings)
    for row, replay in zip(rows, chosen.values(), strict=True):
        print_iterations(row, replay)
    return {"name": workload.name, "about": workload.described(), "kv_blocks": settings.kv_blocks, "rows": rows}


def settings_for(workload: Workload, options: argparse.Namespace) -> Any:
    """A pool of the asked share of what all requests need together, and of no less than the longest one needs."""
    from replay_octavo import Settings

    block = options.block_size
    needs = [-(-job.positions // block) for job in workload.jobs]
    return Settings(
        kv_blocks=max(*needs, round(sum(needs) * options.kv_share), 2),
        block_tokens=block,
        max_num_seqs=min(len(workload.jobs), options.max_num_batched_tokens),
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=max(workload.longest, 64),
    )


def print_comparison(workload: Workload, rows: list[dict[str, Any]], settings: Any) -> None:
    count = len(workload.jobs)
    print(f"\n{workload.described()}; KV cache {settings.kv_blocks * settings.block_tokens:,} tokens")
    print(f"{'engine':<32}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items()))
    for row in rows:
        values = (
            f"{row['seconds']:.2f}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['output_tokens_per_s']:.1f}",
            f"{row['total_tokens_per_s']:.1f}",
            _seconds(row["ttft_p50_s"]),
            _seconds(row["ttft_p99_s"]),
            _milli(row["tpot_p50_s"]),
            _milli(row["tpot_p99_s"]),
            str(row["steps"]),
            f"{row['equal_outputs']}/{count}",
            f"{row['seconds'] / rows[0]['seconds']:.2f}x",
        )
        cells = zip(values, COLUMNS.values(), strict=True)
        print(f"{row['engine']:<32}" + "".join(f"{value:>{width}}" for value, width in cells))
    print(f"TTFT in s, TPOT in ms; equal: requests with the same tokens as {rows[0]['engine']}")


def print_iterations(row: dict[str, Any], replay: Replay) -> None:
    print(f"\n{row['engine']}: " + ", ".join(f"{name} {value}" for name, value in row["policies"].items()))
    sizes = "  ".join(f"{size}: {steps}" for size, steps in row["batch_size_by_iteration"].items())
    print(f"  sequences in an iteration: {sizes}")
    print(f"  KV use by iteration: mean {row['kv_used_mean']:.0%}, peak {row['kv_used_peak']:.0%} {sparkline(replay)}")
    print(f"  preemptions {row['preemptions']}, tokens recomputed {row['recomputed_tokens']}")
    if row["waste_mean"]:
        print("  KV wasted, mean: " + ", ".join(f"{cause} {share:.1%}" for cause, share in row["waste_mean"].items()))
    if row["parts_s"]:
        parts = ", ".join(f"{name} {value / row['seconds']:.2%}" for name, value in row["parts_s"].items())
        print(f"  share of the time: {parts}; the rest is the front end")
    if row["limiting_resource_steps"]:
        bound = ", ".join(f"{name} {steps}" for name, steps in row["limiting_resource_steps"].items())
        print(f"  steps bound by: {bound}")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _milli(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.1f}"


if __name__ == "__main__":
    if UNWANTED in os.environ:
        # It is read when numpy is loaded, so the process has to start again without it.
        kept = {name: value for name, value in os.environ.items() if name != UNWANTED}
        os.execve(sys.executable, sys.orig_argv, kept)
    main()
