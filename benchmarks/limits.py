"""How near the machine's limits a step comes: bytes that it must read, arithmetic that it must do.

Measures what this machine reads from memory and multiplies at best with so many threads, then times decode
steps of several batches and one long prompt through octavo, and prints the share of the limit that each
reaches. Bytes of keys and values and the arithmetic of attention are octavo's own geometry; weights are read
once a step, and the embedding of a step's few tokens is not counted. The limit of a step is the slower of
reading and arithmetic, as if each ran at the measured rate and alone. Prints a table, then one JSON line.

    python benchmarks/limits.py --dtype bf16
    python benchmarks/limits.py --dtype fp32 --batches 1,8 --option linear_backend=torch
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent))

from machine_facts import described, machine_facts, torch_facts
from machine_rates import Rates, measure_rates

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
UNWANTED = "OPENBLAS_CORETYPE"
MOST_STEPS = 4000


@dataclass(frozen=True, slots=True)
class Work:
    """What a step cannot do without."""

    weight_bytes: int
    state_bytes: int
    flops: int

    def parts_s(self, rates: Rates, dtype: str) -> tuple[float, float]:
        """(seconds of reading, seconds of arithmetic) at the measured rates."""
        return (self.weight_bytes + self.state_bytes) / rates.read_bytes_per_s, self.flops / rates.best_flops(dtype)


@dataclass(frozen=True, slots=True)
class Timed:
    """One kind of step, several times."""

    name: str
    tokens: int
    seconds: list[float]
    work: Work


class Arithmetic:
    """Bytes and products of steps of one model, from its config alone."""

    def __init__(self, config: dict[str, Any], dtype: str) -> None:
        from octavo.cost.laws import laws_of
        from octavo.geometry.dtypes import dtype_named
        from octavo.geometry.from_config import geometry_from_config
        from octavo.geometry.weights import weights_from_config

        kept = dtype_named(dtype)
        self.geometry = geometry_from_config(config, kept)
        self._laws = laws_of(self.geometry)
        weights = weights_from_config(config, dtype=kept)
        self._head = (self.geometry.vocab_size or 0) * self.geometry.hidden_size
        # a table of embeddings of its own is only looked into; one that is the head as well is read whole
        looked_into = 0 if config.get("tie_word_embeddings", True) else self._head
        self._weight_bytes = round(weights.total_bytes * (1 - looked_into / weights.total_parameters))
        self._body = weights.active_parameters - self._head - looked_into

    def step(self, starts: Sequence[int], counts: Sequence[int], sampled: int) -> Work:
        """Chunks from `starts` of so many positions each, of which `sampled` need the next token."""
        first, many = np.asarray(starts, dtype=np.int64), np.asarray(counts, dtype=np.int64)
        tokens = int(many.sum())
        state = sum(int(law.read(first, many).sum()) * law.bytes_per_position for law in self._laws)
        pairs = sum(int(law.pairs(first, many).sum()) * law.flops_per_pair for law in self._laws)
        return Work(self._weight_bytes, state, 2 * (self._body * tokens + self._head * sampled) + pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    import torch

    torch.set_num_threads(options.threads)
    facts = machine_facts() | torch_facts()
    print(described(facts))
    before = measure_rates(options.threads, options.megabytes)
    engine, config = make_engine(options)
    arithmetic = Arithmetic(config, options.dtype)
    timed = [time_decode(engine, arithmetic, batch, options) for batch in options.batches]
    timed.append(time_prefill(engine, arithmetic, options))
    engine.close()
    # again, since a limit that something else held down for a moment would flatter every step
    rates = before.or_better(measure_rates(options.threads, options.megabytes))
    print("\n".join(rates.described()))
    rows = [row(one, rates, options.dtype) for one in timed]
    name = options.model or "the embedded model"
    print(f"{name}, {options.dtype}: " + ", ".join(f"{one.name} {one.value}" for one in engine.deployment.rows()))
    print_table(rows)
    report = {"benchmark": "limits", "model": name, "dtype": options.dtype, "machine": facts, "options": options.kwargs}
    print(json.dumps(report | {"rates": asdict(rates), "rows": rows}))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="directory, hub id or GGUF file; the embedded SmolLM2-135M-Instruct if not given")
    add("--dtype", choices=tuple(DTYPES), default="bf16", help="of weights, activations and KV cache (default bf16)")
    add("--batches", default="1,8,32,128", help="sequences that decode at once, by commas (default 1,8,32,128)")
    add("--context", type=int, default=128, help="positions of each before it decodes (default 128)")
    add("--steps", type=int, default=16, help="decode steps timed of each batch (default 16)")
    add("--prefill", type=int, default=2048, help="tokens of the prompt that is computed in one step (default 2048)")
    add("--repeat", type=int, default=3, help="such prompts (default 3)")
    add("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of torch and of the kernels (default 2)")
    add("--megabytes", type=int, default=512, help="size of the array whose reading is timed (default 512)")
    add("--option", action="append", default=[], help="an option of octavo's, as name=value; may be given again")
    options = parser.parse_args(arguments)
    for name in ("context", "steps", "prefill", "repeat", "threads", "megabytes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    try:
        options.batches = [int(word) for word in options.batches.split(",")]
    except ValueError:
        parser.error("--batches: give whole numbers by commas")
    if min(options.batches) < 1:
        parser.error("--batches: must be at least 1")
    options.kwargs = {}
    for text in options.option:
        name, _, value = text.partition("=")
        options.kwargs[name] = {"true": True, "false": False}.get(value, int(value) if value.isdecimal() else value)
    return options


def make_engine(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """An engine with room for the largest batch and the long prompt, and the model's raw config."""
    import torch

    from octavo.config import Config
    from octavo.engine.build import engine_for
    from octavo.models.load import load_checkpoint

    longest = max(options.prefill + 2, options.context + most_tokens(max(options.batches), options))
    blocks = -(-(options.context + most_tokens(max(options.batches), options)) // 16)
    loaded = load_checkpoint(options.model, dtype=DTYPES[options.dtype], skip_tokenizer_init=True)
    asked = {
        "skip_tokenizer_init": True,
        "max_model_len": longest,
        "num_gpu_blocks_override": max(blocks * max(options.batches), -(-longest // 16)) + 1,
        "max_num_seqs": max(options.batches),
        "max_num_batched_tokens": max(options.prefill, *options.batches),
        "device": "cpu",
    }
    engine = engine_for(Config.from_kwargs(**asked | options.kwargs), loaded, torch.device("cpu"))
    return engine, loaded.config_json


def most_tokens(batch: int, options: argparse.Namespace) -> int:
    """Output of one sequence: the steps timed, and those in which the others' prompts are still computed."""
    return int(options.steps + 4 + -(-batch * (options.context + 1) // options.prefill))


def time_decode(engine: Any, arithmetic: Arithmetic, batch: int, options: argparse.Namespace) -> Timed:
    """Steps in which all sequences of a batch decode and nothing else happens."""
    from octavo.scheduling.events import StepPlanned, StepTokens

    events: list[Any] = []
    engine.observers.append(events.extend)
    names = _add(engine, batch, options.context, most_tokens(batch, options))
    made: Counter[int] = Counter()
    seconds: list[float] = []
    works: list[Work] = []
    for _ in range(MOST_STEPS):
        start = time.perf_counter()
        engine.step()
        took = time.perf_counter() - start
        planned = [event for event in events if isinstance(event, StepPlanned)]
        tokens = [event for event in events if isinstance(event, StepTokens)]
        if planned and not planned[-1].prefill_tokens and planned[-1].running == batch and len(made) == batch:
            seconds.append(took)
            works.append(arithmetic.step([options.context + n - 1 for n in made.values()], [1] * batch, batch))
        for event in tokens:
            made.update(event.sequence_ids.tolist())
        events.clear()
        if len(seconds) > options.steps or not engine.core.has_work:
            break
    engine.observers.remove(engine.observers[-1])
    for name in names:
        engine.abort(name)
        engine.discard(name)
    return Timed(f"decode, {batch}", batch, seconds[1:], works[len(works) // 2])


def time_prefill(engine: Any, arithmetic: Arithmetic, options: argparse.Namespace) -> Timed:
    """One prompt in one step, whose last position gives the only token."""
    seconds = []
    for _ in range(options.repeat + 1):  # the first is for warming up
        (name,) = _add(engine, 1, options.prefill, 1)
        start = time.perf_counter()
        while engine.core.has_work:
            engine.step()
        seconds.append(time.perf_counter() - start)
        engine.discard(name)
    work = arithmetic.step([0], [options.prefill], 1)
    return Timed(f"prefill, {options.prefill}", options.prefill, seconds[1:], work)


def _add(engine: Any, count: int, tokens: int, output: int) -> list[str]:
    """Requests with different prompts, so that nothing is shared."""
    from octavo import SamplingParams

    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    names = [f"{count}-{tokens}-{i}-{time.perf_counter_ns()}" for i in range(count)]
    random = np.random.default_rng(count + tokens)
    vocabulary = engine.core.scheduler.limits.vocab_size
    for name in names:
        engine.add(name, {"prompt_token_ids": random.integers(3, vocabulary, tokens).tolist()}, params)
    return names


def row(timed: Timed, rates: Rates, dtype: str) -> dict[str, Any]:
    work, took = timed.work, median(timed.seconds)
    reading, arithmetic = work.parts_s(rates, dtype)
    return {
        "step": timed.name,
        "seconds": took,
        "seconds_min": min(timed.seconds),
        "seconds_max": max(timed.seconds),
        "tokens_per_s": timed.tokens / took,
        "weight_bytes": work.weight_bytes,
        "state_bytes": work.state_bytes,
        "flops": work.flops,
        "reading_s": reading,
        "arithmetic_s": arithmetic,
        "bound": "reading" if reading >= arithmetic else "arithmetic",
        "of_limit": max(reading, arithmetic) / took,
        "flops_per_s": work.flops / took,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    heads = ("ms", "min", "max", "tok/s", "MB read", "GFLOP", "reading ms", "arith. ms", "GFLOP/s", "of limit")
    print(f"\n{'step':<16}" + "".join(f"{head:>11}" for head in heads) + "  bound by")
    for one in rows:
        values = [1e3 * one[name] for name in ("seconds", "seconds_min", "seconds_max")]
        values += [one["tokens_per_s"], (one["weight_bytes"] + one["state_bytes"]) / 1e6, one["flops"] / 1e9]
        values += [1e3 * one["reading_s"], 1e3 * one["arithmetic_s"], one["flops_per_s"] / 1e9]
        print(
            f"{one['step']:<16}" + "".join(f"{v:>11.1f}" for v in values) + f"{one['of_limit']:>11.0%}  {one['bound']}"
        )
    print("of limit: the slower of reading and arithmetic at the measured rates, over the time taken (median)")


if __name__ == "__main__":
    if UNWANTED in os.environ:
        # It is read when numpy is loaded, so the process has to start again without it.
        kept = {name: value for name, value in os.environ.items() if name != UNWANTED}
        os.execve(sys.executable, sys.orig_argv, kept)
    main()
