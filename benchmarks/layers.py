"""Steps of the real model with its layers fused and as Transformers runs them, in one process, interleaved.

Decode steps at several batch sizes and a prefill of one prompt, on two engines that differ in `--fuse` alone:
both have native attention and packed linear layers. With `--without` both are fused, and differ in one part of a
step. Each repetition times both, one after the other; the ratio is the median of the pairs' ratios. `--clock own`
is the calling thread's processor time, which other programs disturb least (with `--threads 1`). `outside` is what is
left of a step's time when that inside matrix products, attention and octavo's other native calls is taken off:
Python, small torch operations, scheduling, text.
Prints a table, then one JSON line. Stops starting new cases after --limit seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from machine_facts import described, machine_facts, torch_facts

from octavo import LLM, SamplingParams
from octavo.kernels.cpu import NativeAttention
from octavo.kernels.linear import PackedLinear

PROMPT = 16
"""Tokens of a prompt whose decodes are timed."""
WARM = 4


class Clock:
    """Seconds inside calls that are not to be counted as outside."""

    def __init__(self, own: bool) -> None:
        self.inside = 0.0
        self.now = time.thread_time if own else time.perf_counter

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            try:
                return call(*args, **kwargs)
            finally:
                self.inside += self.now() - start

        return timed


class TimedStack:
    """The native programs of an executor, with a clock."""

    def __init__(self, stack: Any, clock: Clock) -> None:
        self.run = clock.wrap(stack.run)
        self.add = stack.add


@contextmanager
def listening(clock: Clock, llms: Sequence[LLM]) -> Iterator[None]:
    """Time the calls by which an engine reaches its kernels, and torch's own matrix products."""
    places = [(PackedLinear, "_run"), (PackedLinear, "argmax"), (NativeAttention, "attend"), (NativeAttention, "write")]
    places.append((torch.nn.functional, "linear"))
    kept = [(holder, name, getattr(holder, name)) for holder, name in places]
    for holder, name, call in kept:
        setattr(holder, name, clock.wrap(call))
    stacks = [(programs, programs.stack) for llm in llms if (programs := llm.engine.core.executor._layers) is not None]
    for programs, stack in stacks:
        programs.stack = TimedStack(stack, clock)
    try:
        yield
    finally:
        for holder, name, call in kept:
            setattr(holder, name, call)
        for programs, stack in stacks:
            programs.stack = stack


class Decoding:
    """An engine with `batch` sequences that all decode."""

    def __init__(self, llm: LLM, batch: int, steps: int, clock: Clock, prompt: int = PROMPT) -> None:
        self.engine, self.clock, self.batch = llm.engine, clock, batch
        params = SamplingParams(temperature=0, max_tokens=steps + WARM + 8, ignore_eos=True)
        self.names = [f"{batch}-{i}" for i in range(batch)]
        for i, name in enumerate(self.names):
            said = [100 + (37 * i + 11 * j) % 40000 for j in range(prompt)]
            self.engine.add(name, {"prompt_token_ids": said}, params)
        for _ in range(WARM + -(-batch * prompt // 512)):
            self.engine.step()

    def step(self) -> tuple[float, float]:
        """Seconds of a step, and of it outside."""
        self.clock.inside = 0.0
        start = self.clock.now()
        self.engine.step()
        wall = self.clock.now() - start
        return wall, wall - self.clock.inside

    def end(self) -> None:
        for name in self.names:
            self.engine.discard(name)
        while self.engine.has_work:
            self.engine.step()


class Prefilling:
    """One prompt of `tokens`, a step each time."""

    def __init__(self, llm: LLM, tokens: int, clock: Clock) -> None:
        self.engine, self.clock, self.tokens, self.number = llm.engine, clock, tokens, 0

    def step(self) -> tuple[float, float]:
        self.number += 1
        prompt = [100 + (37 * self.number + 11 * j) % 40000 for j in range(self.tokens)]
        name = f"prefill-{self.number}"
        self.engine.add(name, {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=1))
        self.clock.inside = 0.0
        start = self.clock.now()
        while self.engine.core.has_work:
            self.engine.step()
        wall = self.clock.now() - start
        inside = self.clock.inside
        self.engine.discard(name)
        return wall, wall - inside

    def end(self) -> None:
        pass


def measured(make: Callable[[LLM], Any], llms: dict[str, LLM], repeat: int) -> dict[str, Any]:
    """Medians of both, and the median ratio of pairs (unfused over fused)."""
    cases = {name: make(llm) for name, llm in llms.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(repeat):
        for name, case in cases.items():
            times[name].append(case.step())
    for case in cases.values():
        case.end()
    row: dict[str, Any] = {}
    for name, pairs in times.items():
        row[f"{name}_ms"] = round(1e3 * statistics.median(wall for wall, _ in pairs), 3)
        row[f"{name}_min_ms"] = round(1e3 * min(wall for wall, _ in pairs), 3)
        row[f"{name}_outside_ms"] = round(1e3 * statistics.median(outside for _, outside in pairs), 3)
        row[f"{name}_outside"] = round(statistics.median(outside / wall for wall, outside in pairs), 4)
    pairs_of = zip(times["off"], times["auto"], strict=True)
    row["ratio"] = round(statistics.median(off / auto for (off, _), (auto, _) in pairs_of), 3)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--prefill", nargs="*", type=int, default=[2048])
    parser.add_argument("--repeat", type=int, default=30, help="steps of each decode; a tenth of it of a prefill")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which no new case is begun")
    parser.add_argument("--clock", choices=("passed", "own"), default="passed")
    parser.add_argument("--without", choices=("last", "largest"), help="as what is compared: fused too, but for this")
    parser.add_argument("--layer-by-layer", action="store_true", help="Transformers' forward around the fused layers")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    facts = machine_facts() | torch_facts()
    began = time.monotonic()
    results: dict[str, list[dict[str, Any]]] = {}
    for dtype in options.dtype:
        results[dtype] = run_dtype(dtype, options, began)
    print(f"\n{described(facts)}")
    print(json.dumps({"benchmark": "layers", "results": results, "machine": facts}))


def run_dtype(dtype: str, options: argparse.Namespace, began: float) -> list[dict[str, Any]]:
    most = max([*options.batch, 1])
    tokens = most * (PROMPT + options.repeat + 64) + 2 * max([*options.prefill, 0]) + 1024
    llms = {
        fuse: LLM(
            dtype=dtype, fuse="auto" if options.without else fuse, linear_backend="native",
            max_num_seqs=most, max_kv_tokens=tokens,
            max_num_batched_tokens=max([512, *options.prefill]),
        )
        for fuse in ("auto", "off")
    }  # fmt: skip
    executor = llms["off"].engine.core.executor
    if options.without == "last":  # the last layer attends with every row
        executor._layers.tell_kept = lambda told, steps, keep, rows: rows
    if options.without == "largest":  # logits are stored, and searched by numpy
        executor._sampler.takes_largest = lambda rows: False
    if options.layer_by_layer:
        llms["auto"].engine.core.executor._layers.whole = None
    print(f"\n{dtype}: {llms['auto'].engine.notes[-1]}")
    print(f"{'':16}{'fused ms':>10}{'outside':>9}{'unfused ms':>12}{'outside':>9}{'ratio':>7}")
    clock, rows = Clock(options.clock == "own"), []
    cases: list[tuple[str, Callable[[LLM], Any], int]] = [
        (f"decode {batch}", lambda llm, batch=batch: Decoding(llm, batch, options.repeat, clock), options.repeat)
        for batch in options.batch
    ]
    cases += [
        (f"prefill {n}", lambda llm, n=n: Prefilling(llm, n, clock), max(3, options.repeat // 10))
        for n in options.prefill
    ]
    with listening(clock, list(llms.values())):
        for name, make, repeat in cases:
            if time.monotonic() - began > options.limit:
                print(f"{name:16}not begun: --limit {options.limit:g}")
                continue
            row = {"case": name} | measured(make, llms, repeat)
            rows.append(row)
            print(
                f"{name:16}{row['auto_ms']:>10}{row['auto_outside']:>9.1%}{row['off_ms']:>12}"
                f"{row['off_outside']:>9.1%}{row['ratio']:>7}",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    main()
