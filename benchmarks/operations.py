"""Where the time of a whole workload goes, by kind of operation: a run of `LLM.generate`, once for each type.

Kinds inside a step's native layer call are timed by the extension itself on the thread that leads; what is around
it (output head, embedding, plans, sampling, scheduling, text) by wrapping the calls. `--clock own` counts the time in
which that thread had a core, which other programs disturb least (with `--threads 1`); `passed` the time that passed,
which with several threads holds what they wait for each other. With `--reuse prefix` every run starts with nothing
kept, so that what it finds is its own. Prints a table for each type, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine_facts import described, machine_facts, torch_facts
from workloads import NAMES, Workload, drawn_workloads, find_file, read_workloads

from octavo import LLM, SamplingParams

CLOCKS = {"passed": 1, "own": 2}
BLOCK = 16


class Around:
    """Seconds in calls, without those in calls inside them that are watched too."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.spent: dict[str, float] = {}
        self._inner: list[float] = []

    def watch(self, holder: Any, name: str, kind: str) -> None:
        call = getattr(holder, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.clock()
            self._inner.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                spent = self.clock() - start
                self.spent[kind] = self.spent.get(kind, 0.0) + spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        setattr(holder, name, timed)


class Layers:
    """A native stack whose calls can be watched."""

    def __init__(self, stack: Any) -> None:
        self.run = stack.run


def watched(llm: LLM, around: Around) -> Any:
    """Watch what an engine's step calls; returns the native stack, which times itself."""
    engine = llm.engine
    core, executor = engine.core, engine.core.executor
    programs = executor._layers
    if programs is None or programs.whole is None:
        raise SystemExit("the model's steps are not one native call here: nothing to divide")
    stack, programs.stack = programs.stack, Layers(programs.stack)
    around.watch(programs.stack, "run", "layers, but for what is below")
    for holder, name, kind in (
        (type(programs.whole), "head", "output head"),
        (type(programs.whole), "largest", "output head"),
        (type(programs.whole), "embed", "embedding"),
        (type(programs), "begin", "attention plans"),
        (executor._tensors, "build", "step tensors"),
        (executor, "_sample", "sampling"),
        (executor, "submit", "rest of the executor"),
        (core.scheduler, "schedule", "schedule"),
        (core, "step", "rest of the core"),
        (engine._streams, "fold", "text and deltas"),
        (engine, "step", "rest of the engine"),
    ):
        around.watch(holder, name, kind)
    return stack


def run(dtype: str, workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    blocks = sum(-(-(len(job.prompt) + job.max_tokens) // BLOCK) for job in workload.jobs) + 8
    llm = LLM(
        dtype=dtype, threads=options.threads, max_model_len=workload.longest, max_num_seqs=len(workload.jobs),
        num_gpu_blocks_override=blocks, max_num_batched_tokens=2048, reuse=options.reuse,
    )  # fmt: skip
    params = [SamplingParams(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True) for job in workload.jobs]
    prompts = [{"prompt_token_ids": list(job.prompt)} for job in workload.jobs]
    clock = time.thread_time if options.clock == "own" else time.perf_counter
    around = Around(clock)
    kept = {(holder, name): getattr(holder, name) for holder, name in _classes(llm)}
    stack = watched(llm, around)
    best: dict[str, Any] = {}
    try:
        for _ in range(options.repeat):
            llm.reset_prefix_cache()
            around.spent.clear()
            stack.time(CLOCKS[options.clock])
            start = clock()
            outputs = llm.generate(prompts, params)
            seconds = clock() - start
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            if not best or seconds < best["seconds"]:
                best = {"seconds": seconds, "tokens": tokens, "kinds": _kinds(stack, around, seconds)}
    finally:
        for (holder, name), call in kept.items():
            setattr(holder, name, call)
    return best


def _classes(llm: LLM) -> list[tuple[Any, str]]:
    programs = llm.engine.core.executor._layers
    return (
        []
        if programs is None
        else [(type(programs), "begin"), *((type(programs.whole), n) for n in ("head", "largest", "embed"))]
    )


def _kinds(stack: Any, around: Around, seconds: float) -> list[dict[str, Any]]:
    inside = {name: (spent, calls) for name, spent, calls in stack.times()}
    rest = dict(around.spent)
    rest["layers, but for what is below"] = rest.get("layers, but for what is below", 0.0) - sum(
        s for s, _ in inside.values()
    )
    found = [{"kind": name, "seconds": spent, "calls": calls} for name, (spent, calls) in inside.items()]
    found += [{"kind": name, "seconds": spent, "calls": None} for name, spent in rest.items()]
    found.append({"kind": "outside of steps", "seconds": seconds - sum(row["seconds"] for row in found), "calls": None})
    return sorted(found, key=lambda row: -row["seconds"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--workload", choices=NAMES, default="W2")
    parser.add_argument("--file", type=Path, default=None, help="a workloads.json; drawn from a seed if there is none")
    parser.add_argument("--scale", type=float, default=1.0, help="lengths times this")
    parser.add_argument("--requests", type=int, default=None, help="the first so many alone")
    parser.add_argument("--outputs", type=int, default=None, help="tokens of each; 1: prompts alone")
    parser.add_argument("--repeat", type=int, default=2, help="runs, of which the fastest is told")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--reuse", choices=("none", "prefix"), default="none")
    parser.add_argument("--clock", choices=list(CLOCKS), default="passed")
    options = parser.parse_args(arguments)
    file = find_file(options.file, Path(__file__).resolve().parent)
    known = drawn_workloads(49152) if file is None else read_workloads(file)
    workload = known[options.workload].scaled(options.scale)
    jobs = workload.jobs[: options.requests]
    if options.outputs is not None:
        jobs = tuple(replace(job, max_tokens=options.outputs) for job in jobs)
    workload = replace(workload, jobs=jobs)
    facts = machine_facts() | torch_facts()
    source = "drawn from a seed" if file is None else "from a file"
    print(f"{workload.described()}; {source}; clock: {options.clock}; reuse: {options.reuse}")
    results = {}
    for dtype in options.dtype:
        results[dtype] = found = run(dtype, workload, options)
        print(f"\n{dtype}: {found['seconds']:.2f} s, {found['tokens'] / found['seconds']:.1f} tokens/s")
        for row in found["kinds"]:
            calls = "" if row["calls"] is None else f"{row['calls']:>9,}"
            print(
                f"  {row['kind']:32}{row['seconds']:>9.3f} s{row['seconds'] / found['seconds']:>8.1%}{calls}",
                flush=True,
            )
    print(f"\n{described(facts)}")
    asked = {"workload": workload.name, "reuse": options.reuse, "clock": options.clock}
    print(json.dumps({"benchmark": "operations", **asked, "results": results, "machine": facts}))


if __name__ == "__main__":
    main()
