"""The attention kernels alone: octavo's own beside plain torch, in one process, interleaved, as paired ratios.

Decodes at batch sizes and contexts, and prefills of one chunk, over pages whose blocks are scattered as
a running engine scatters them. Each repetition times both backends one after the other, so that a
disturbance meets both; the ratio is the median of the pairs' ratios. With one thread times are processor
time, so that others on the machine weigh less. GB/s are bytes of keys and values over the least time,
beside what one pass over a large array reads; GFLOP/s count what a query sees. With `--shared`, decodes
begin with so many positions in the same blocks, whose bytes count once. Prints a table, then one JSON line.

    python benchmarks/kernels.py --threads 1 --batch 32 --context 300 1060 --shared 0 1024 --prefill 1024 4096
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from machine_facts import described, machine_facts, torch_facts

from octavo.geometry.dtypes import BF16, FP8, FP16, FP32, INT8, Dtype
from octavo.geometry.state import Component, Growing
from octavo.kernels.cpu import NativeAttention, instruction_sets
from octavo.kernels.interface import AttentionBackend, AttentionRule, AttentionStep
from octavo.kernels.reference import ReferenceAttention
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.runtime.arena import Arena

DTYPES = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "int8": INT8, "fp8": FP8}
COMPUTED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Case:
    """One step of `batch` equal chunks."""

    kind: str
    batch: int
    start: int
    count: int
    shared: int = 0

    @property
    def context(self) -> int:
        return self.start + self.count

    @property
    def seen(self) -> int:
        """Pairs of a query and a key that it sees."""
        return self.batch * sum(range(self.start + 1, self.context + 1))


@dataclass(frozen=True, slots=True)
class Layer:
    """What is attended over: SmolLM2-135M's heads unless told otherwise."""

    kv_heads: int
    heads: int
    dim: int
    dtype: Dtype
    computed: torch.dtype
    block_tokens: int

    def run(self, case: Case, backend: AttentionBackend) -> Callable[[], torch.Tensor]:
        """Attention of one step, pages and tables in place."""
        component = (self.kv_heads, self.dim)
        state = Growing((Component("k", component, self.dtype), Component("v", component, self.dtype)))
        layout = make_layout(served_groups((state,)), self.block_tokens, backend.block_order)
        blocks = -(-case.context // self.block_tokens)
        common = case.shared // self.block_tokens
        slots = common + (blocks - common) * case.batch
        arena = Arena(layout, slots)
        pages = arena.pages(0)
        for part, seed in ((pages.k, 1), (pages.v, 2)):
            _fill(part, seed, backend.block_order == "heads_tokens")
        for scales in (pages.k_scales, pages.v_scales):
            if scales is not None:
                scales.fill_(0.01)
        units = arena.units(0, np.random.default_rng(0).permutation(slots).astype(np.int32))
        tables = np.tile(units[:common], (case.batch, 1))
        tables = np.ascontiguousarray(np.hstack((tables, units[common:].reshape(case.batch, blocks - common))))
        rows = np.arange(case.batch)
        positions = np.tile(np.arange(case.start, case.context), case.batch)
        token_rows = np.repeat(rows, case.count)
        step = AttentionStep(
            block_tokens=self.block_tokens,
            decodes=case.batch if case.count == 1 else 0,
            rows=rows,
            offsets=np.arange(case.batch + 1) * case.count,
            starts=np.full(case.batch, case.start),
            contexts=np.full(case.batch, case.context),
            tables=tables,
            write_blocks=torch.from_numpy(tables[token_rows, positions // self.block_tokens].astype(np.int64)),
            write_offsets=torch.from_numpy(positions % self.block_tokens),
        )
        generator = torch.Generator().manual_seed(0)
        tokens = case.batch * case.count
        q, k, v = (
            torch.randn(tokens, heads, self.dim, generator=generator).to(self.computed)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        new = tuple(x.transpose(0, 1)[None].contiguous() for x in (k, v))
        rule = AttentionRule(self.dim**-0.5)
        backend.write(k, v, pages, step)
        return lambda: backend.attend(q, new, pages, step, rule)

    def bytes_of(self, case: Case) -> float:
        row = self.dim * self.dtype.bits / 8 + self.dtype.scale_bytes
        common = case.shared // self.block_tokens * self.block_tokens
        return (common + case.batch * (case.context - common)) * self.kv_heads * 2 * row


def _fill(pages: torch.Tensor, seed: int, heads_first: bool) -> None:
    """Small numbers, the same in either order, block by block so that no copy of the whole is made."""
    generator = torch.Generator().manual_seed(seed)
    for block in pages.transpose(1, 2) if heads_first else pages:
        block.copy_(torch.randn(block.shape, generator=generator).clamp_(-3, 3))


def read_bandwidth(megabytes: int = 256) -> float:
    """GB/s of reading one large array with torch's threads: the best of a few passes."""
    array = torch.ones(megabytes << 18)
    best = min(_seconds(array.sum) for _ in range(5))
    return array.numel() * 4 / best / 1e9


def _seconds(call: Callable[[], object]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begun = clock()
    call()
    return clock() - begun


def measured(layer: Layer, case: Case, native: AttentionBackend, repeat: int) -> dict[str, object]:
    calls = [layer.run(case, backend) for backend in (native, ReferenceAttention())]
    results = [call() for call in calls]  # also warms both
    difference = float((results[0].float() - results[1].float()).abs().max())
    inner = max(1, round(2e-3 / max(1e-6, _seconds(calls[0]))))
    times = np.array(
        [[_seconds(lambda call=call: [call() for _ in range(inner)]) for call in calls] for _ in range(repeat)]
    )
    times /= inner
    least = times.min(axis=0)
    flops = 4 * case.seen * layer.heads * layer.dim
    return {
        **asdict(case),
        "native_us": round(least[0] * 1e6, 1),
        "reference_us": round(least[1] * 1e6, 1),
        "ratio": round(float(np.median(times[:, 1] / times[:, 0])), 2),
        "native_gb_s": round(layer.bytes_of(case) / least[0] / 1e9, 1),
        "native_gflop_s": round(flops / least[0] / 1e9, 1),
        "largest_difference": float(f"{difference:.1e}"),
    }


def cases(options: argparse.Namespace) -> list[Case]:
    decodes = [
        Case("decode", batch, context - 1, 1, shared)
        for batch in options.batch
        for context in options.context
        for shared in options.shared
        if shared < context
    ]
    return [*decodes, *(Case("prefill", 1, 0, count) for count in options.prefill)]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if not instruction_sets():
        raise SystemExit("the native kernels were not built: install octavo where there is a C++ compiler")
    native = NativeAttention(options.instruction_set)
    facts = machine_facts() | torch_facts() | {"instruction_set": native.instruction_set}
    bandwidth = read_bandwidth()
    print(f"read bandwidth of one large array: {bandwidth:.1f} GB/s")
    results = {}
    for name in options.dtype:
        computed = COMPUTED.get(name, torch.float32)
        layer = Layer(options.kv_heads, options.heads, options.dim, DTYPES[name], computed, options.block_size)
        print(f"\n{name}: {layer.heads} heads over {layer.kv_heads} of {layer.dim}, blocks of {layer.block_tokens}")
        print(f"{'':28}{'native us':>11}{'torch us':>11}{'ratio':>7}{'GB/s':>7}{'of read':>9}{'GFLOP/s':>9}")
        rows = []
        for case in cases(options):
            if layer.bytes_of(case) > options.most_gib * 2**30:
                continue
            with torch.inference_mode():
                row = measured(layer, case, native, options.repeat)
            rows.append(row)
            label = f"{case.kind} {case.batch} x {case.context}" + (f", {case.shared} shared" if case.shared else "")
            share = row["native_gb_s"] / bandwidth
            print(
                f"{label:28}{row['native_us']:>11}{row['reference_us']:>11}{row['ratio']:>7}"
                f"{row['native_gb_s']:>7}{share:>9.0%}{row['native_gflop_s']:>9}",
                flush=True,
            )
        results[name] = rows
    print(f"\n{described(facts)}")
    print(json.dumps({"benchmark": "kernels", "read_gb_s": round(bandwidth, 1), "results": results, "machine": facts}))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp32", "bf16"], help="of keys and values")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--context", nargs="+", type=int, default=[128, 1024, 4096])
    parser.add_argument("--shared", nargs="+", type=int, default=[0], help="positions that all decodes begin with")
    parser.add_argument("--prefill", nargs="*", type=int, default=[2048], help="lengths of a chunk with no past")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, help="torch's own choice if not given")
    parser.add_argument("--instruction-set", choices=["avx512", "avx2", "portable"], help="the fastest if not given")
    parser.add_argument("--most-gib", type=float, default=1.5, help="larger cases are left out")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
