"""Linear layers alone: torch's beside octavo's packed ones, in every form that weights are kept in, by rows.

The matrices are those of a model's decoder layers, each layer with its own so that they come from memory as they do
in a model, and the output head, of which no more than 128 rows are asked. Torch multiplies by the same type, for
int8 and int4 by its own packed kernels. Both are timed in turns; a ratio is the median of the ratios of a turn.
Beside the rates stands the share of what this machine reads or multiplies at best, whichever bounds the product.
At the end: how many of 256 rows change a bit when fewer rows are multiplied together. A table, then one JSON line.

    python benchmarks/linear.py
    python benchmarks/linear.py --dtypes bf16 --rows 1,32 --turns 3 --layers 10
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

sys.path.append(str(Path(__file__).resolve().parent))

from machine_facts import described, machine_facts, torch_facts
from machine_rates import Rates, measure_rates

from octavo.kernels.linear import GROUP, PackedLinear, linear_instruction_sets, quantise_groups

SHAPES = {"qkv": (576, 960), "output": (576, 576), "gate and up": (576, 3072), "down": (1536, 576)}
"""(inputs, outputs) of SmolLM2-135M's layers."""
HEAD, LAYERS, HEAD_ROWS = (576, 49152), 30, 128
ROW_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16, "int4": torch.bfloat16}
STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.int4}
COUNTS = (1, 2, 3, 8, 13, 32, 100)
"""Rows multiplied together, when bits are compared with those of 256."""

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Group:
    """The matrices of one place in every layer, in both forms."""

    inputs: int
    outputs: int
    theirs: list[Product]
    ours: list[PackedLinear]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    rates = measure_rates(torch.get_num_threads(), options.megabytes)
    facts = machine_facts() | torch_facts() | {"instruction_set": linear_instruction_sets()[0]}
    print(described(facts), *rates.described(), "", sep="\n")
    print(
        f"{'':<6}{'rows':>5}{'torch ms':>10}{'octavo ms':>11}{'ratio':>7}{'GFLOP/s':>9}{'GB/s':>7}{'of limit':>10}"
        "  ratio by matrix"
    )
    found = [row for name in options.dtypes for row in measured(name, options, rates)]
    bits = {name: {who: changed(name, who) for who in ("torch", "octavo")} for name in options.dtypes}
    for name, who in bits.items():
        print(
            f"{name}: of 256 rows, {who['torch']} have other bits in torch when fewer run together, "
            f"{who['octavo']} in octavo"
        )
    print(json.dumps({"benchmark": "linear", "machine": facts, "rows": found, "rows_that_change_bits": bits}))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtypes", default="fp32,bf16,int8,int4", help="forms of weights, by commas")
    add("--rows", default="1,8,32,128", help="rows multiplied together, by commas")
    add("--layers", type=int, default=LAYERS, help=f"decoder layers (default {LAYERS})")
    add("--turns", type=int, default=5, help="turns of each measurement (default 5)")
    add("--megabytes", type=int, default=512, help="array that is read to measure memory (default 512)")
    add("--cpu-time", action="store_true", help="one thread, and its own time: for a machine that is busy")
    add("--threads", type=int, help="torch threads; torch's own choice if not given")
    options = parser.parse_args(arguments)
    options.dtypes = options.dtypes.split(",")
    if options.cpu_time:
        options.threads = 1
    options.rows = [int(rows) for rows in options.rows.split(",")]
    if not set(options.dtypes) <= set(STORED):
        parser.error(f"--dtypes: there are {', '.join(STORED)}")
    return options


def measured(name: str, options: argparse.Namespace, rates: Rates) -> list[dict[str, Any]]:
    """One form of weights over all row counts."""
    generator = torch.Generator().manual_seed(0)
    groups = {place: made(name, shape, options.layers, generator) for place, shape in SHAPES.items()}
    groups["head"] = made(name, HEAD, 1, generator)
    found = []
    for rows in options.rows:
        by_place = {
            place: timed(group, min(rows, HEAD_ROWS) if place == "head" else rows, name, options)
            for place, group in groups.items()
        }
        found.append(told(name, rows, groups, by_place, rates))
    return found


def made(name: str, shape: tuple[int, int], count: int, generator: torch.Generator) -> Group:
    inputs, outputs = shape
    theirs, ours = [], []
    for _ in range(count):
        weight = torch.randn(outputs, inputs, generator=generator).mul_(0.05).to(ROW_TYPES[name])
        theirs.append(theirs_of(name, weight))
        ours.append(PackedLinear([weight], storage=STORED[name]))
    return Group(inputs, outputs, theirs, ours)


def theirs_of(name: str, weight: torch.Tensor) -> Product:
    """Torch's product by the same matrix in the same form; its int8 has one scale for an output."""
    if name == "int8":
        scales = weight.abs().amax(1) / 127
        whole, small = torch.round(weight / scales[:, None]).to(torch.int8), scales.to(torch.bfloat16)
        return lambda x: torch._weight_int8pack_mm(x, whole, small)
    if name == "int4":
        whole, scales = quantise_groups(weight, torch.int4)
        packed = torch._convert_weight_to_int4pack_for_cpu(whole.to(torch.int32), 1)
        scale, shift = scales.transpose(0, 1).unbind(-1)
        pairs = torch.stack((scale, shift + 8 * scale), -1).to(torch.bfloat16).contiguous()
        return lambda x: torch._weight_int4pack_mm_for_cpu(x, packed, GROUP, pairs)
    return lambda x: linear(x, weight)


def timed(group: Group, rows: int, name: str, options: argparse.Namespace) -> list[tuple[float, float]]:
    """(torch's seconds, ours) of each turn over all matrices of a place; a first turn warms up."""
    x = torch.randn(rows, group.inputs, generator=torch.Generator().manual_seed(rows)).to(ROW_TYPES[name])
    found = []
    clock = time.thread_time if options.cpu_time else time.perf_counter
    with torch.inference_mode():
        for turn in range(options.turns + 1):
            pair = []
            for products in (group.theirs, group.ours):
                start = clock()
                for product in products:
                    product(x)
                pair.append(clock() - start)
            if turn:
                found.append((pair[0], pair[1]))
    return found


def told(
    name: str, rows: int, groups: dict[str, Group], by_place: dict[str, list[tuple[float, float]]], rates: Rates
) -> dict[str, Any]:
    """One line of the table, printed and as values."""
    turns = list(zip(*by_place.values(), strict=True))
    theirs = statistics.median(sum(pair[0] for pair in turn) for turn in turns)
    ours = statistics.median(sum(pair[1] for pair in turn) for turn in turns)
    ratio = statistics.median(sum(p[0] for p in turn) / sum(p[1] for p in turn) for turn in turns)
    size = sum(packed.nbytes for group in groups.values() for packed in group.ours)
    work = sum(
        2 * group.inputs * group.outputs * len(group.ours) * (min(rows, HEAD_ROWS) if place == "head" else rows)
        for place, group in groups.items()
    )
    best = rates.best_flops("bf16" if name == "bf16" else "fp32")
    limit = (
        max(size / rates.read_bytes_per_s, work / best) if name in ("fp32", "bf16") else size / rates.read_bytes_per_s
    )
    places = {place: round(statistics.median(a / b for a, b in pairs), 2) for place, pairs in by_place.items()}
    told_places = ", ".join(f"{place} {value:.2f}" for place, value in places.items())
    print(
        f"{name:<6}{rows:>5}{theirs * 1e3:>10.1f}{ours * 1e3:>11.1f}{ratio:>6.2f}x{work / ours / 1e9:>9.0f}"
        f"{size / ours / 1e9:>7.1f}{limit / ours:>10.0%}  {told_places}",
        flush=True,
    )
    return {
        "dtype": name,
        "rows": rows,
        "torch_ms": theirs * 1e3,
        "octavo_ms": ours * 1e3,
        "ratio": ratio,
        "gflops": work / ours / 1e9,
        "gbytes": size / ours / 1e9,
        "of_limit": limit / ours,
        "by_matrix": places,
    }


def changed(name: str, who: str) -> int:
    """Rows of 256 whose result has other bits in some smaller company."""
    generator = torch.Generator().manual_seed(1)
    group = made(name, SHAPES["down"], 1, generator)
    x = torch.randn(256, group.inputs, generator=generator).to(ROW_TYPES[name])
    product: Product = group.theirs[0] if who == "torch" else group.ours[0]
    differs = torch.zeros(256, dtype=torch.bool)
    with torch.inference_mode():
        together = product(x)
        for count in COUNTS:
            for first in range(0, 256 - count + 1, count):
                part = product(x[first : first + count].contiguous())
                differs[first : first + count] |= (part != together[first : first + count]).any(1)
    return int(differs.sum())


if __name__ == "__main__":
    main()
