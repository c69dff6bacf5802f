"""Published runs of vLLM beside what octavo's simulator predicts of them from kernel tables.

Three runs of 300 requests with ShareGPT lengths (vLLM 0.19, RTX 4090 and RTX PRO 6000; LLMServingSim's repository,
MIT), each with every request's arrival and tokens' moments. The same arrivals and lengths go through octavo's
scheduler in virtual time, with steps costed from kernel timings of the same devices. Scheduler and engine differ from
vLLM's, and so do details of memory: what is off is printed as it is. The roofline predicts them too, without any
table; and over designed steps it says how many times its prediction the tables' is, which is what its interval is
from. Takes half a minute; needs no model and no GPU.

    python benchmarks/prediction_vllm.py ../shared/data/measured
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.cost.design import Range, Scene, design
from octavo.cost.roofline import Factor, Factors, RooflineCost
from octavo.cost.step import CostModel, StepShape
from octavo.cost.tables import Link, Tables, TablesCost
from octavo.geometry.dtypes import BF16
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.parallel import Parallelism, device_geometries
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.planner.accelerators import device_named
from octavo.planner.roofline import Machine
from octavo.simulate.deploy import Replica
from octavo.simulate.drive import Simulation
from octavo.simulate.measure import Measured
from octavo.simulate.sources import OpenLoop
from octavo.simulate.trace import TraceRequest

LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
         "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
         "max_position_embeddings": 131072}  # fmt: skip
QWEN = {"model_type": "qwen3", "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936,
        "max_position_embeddings": 40960}  # fmt: skip
PCIE = Link(16e9, 20e-6, "as that run's own config file says: 16 GB/s and 20 us")
Run = tuple[str, str, str, dict[str, Any], int]
RUNS: tuple[Run, ...] = (
    ("RTX4090", "Llama-3.1-8B", "meta-llama/Llama-3.1-8B", LLAMA, 1),
    ("RTXPRO6000", "Llama-3.1-8B", "meta-llama/Llama-3.1-8B", LLAMA, 1),
    ("RTXPRO6000", "Qwen3-32B", "Qwen/Qwen3-32B", QWEN, 2),
)
COMPARED = ((RUNS[0], 1), (RUNS[1], 1), (RUNS[1], 2), (RUNS[2], 1), (RUNS[2], 2))
"""Kernel tables to compare with, some of other ranks than the runs had."""
MEMORY_BYTES = {"RTX4090": 24 * 2**30, "RTXPRO6000": 96 * 2**30}
ACCELERATORS = {"RTX4090": "rtx-4090", "RTXPRO6000": "rtx-pro-6000-blackwell-server"}
WEIGHTS_BYTES = {"Llama-3.1-8B": 16.06e9, "Qwen3-32B": 65.5e9}
RESERVED = 0.9
FIGURES = ("span", "TTFT mean", "TTFT p50", "TTFT p99", "TPOT mean", "TPOT p50", "TPOT p99")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with kernel_tables/ and vllm_runs/")
    parser.add_argument("--host-ms", type=float, default=0.0, help="of a step; vLLM overlaps it (default 0)")
    options = parser.parse_args(arguments)
    reports = [one for run in RUNS for one in report(options.folder, run, options.host_ms / 1e3)]
    print(f"{'':38}" + "".join(f"{name:>22}" for name in FIGURES))
    for one in reports:
        cells = [f"{one['predicted'][n]:.4g}/{one['measured'][n]:.4g} {one['off'][n]:+.1%}" for n in FIGURES]
        print(f"{one['run'] + ', ' + one['cost']:38}" + "".join(f"{cell:>22}" for cell in cells))
    print("predicted/measured (s, TPOT in ms) and what it is off by")
    ratios = {f"{run[0]} {run[1]} tp{ranks}": roofline_ratios(options.folder, run, ranks) for run, ranks in COMPARED}
    print("\nkernel tables over roofline, designed steps   p10    p50    p90")
    for name, found in (*ratios.items(), ("all", np.concatenate(list(ratios.values())))):
        print(f"{name:42}" + "".join(f"{value:7.2f}" for value in np.quantile(found, (0.1, 0.5, 0.9))))
    told = {name: np.quantile(found, (0.1, 0.5, 0.9)).tolist() for name, found in ratios.items()}
    line = {"benchmark": "prediction_vllm", "host_ms": options.host_ms, "runs": reports, "tables_over_roofline": told}
    print(json.dumps(line))


def report(folder: Path, run: Run, host_s: float) -> list[dict[str, Any]]:
    device, name, _, _, ranks = run
    logs = folder / "vllm_runs" / device / name
    requests = [json.loads(line) for line in (logs / "vllm_requests.jsonl").read_text().splitlines()]
    meta = json.loads((logs / "vllm_meta.json").read_text())
    measured = figures_of(*measured_times(requests))
    reports = []
    for label, cost in (
        ("tables", tables_cost(folder, run, ranks, host_s)),
        ("roofline", roofline_cost(run, ranks, host_s)),
    ):
        predicted = simulated(replica_of_run(run, meta, cost), requests)
        off = {figure: predicted[figure] / measured[figure] - 1 for figure in FIGURES}
        about = {"run": f"{device} {name} tp{ranks}", "cost": label}
        reports.append(about | {"measured": measured, "predicted": predicted, "off": off})
    return reports


def tables_cost(folder: Path, run: Run, ranks: int, host_s: float) -> TablesCost:
    device, _, long_name, config, _ = run
    return TablesCost(
        tables=Tables.read(folder / "kernel_tables" / device / long_name / "bf16" / f"tp{ranks}"),
        layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ranks=ranks,
        link=PCIE if ranks > 1 else None,
        host_s=Factor(host_s, "an option: vLLM schedules while the device computes"),
    )


def roofline_cost(run: Run, ranks: int, host_s: float) -> RooflineCost:
    device, name, _, config, _ = run
    accelerator = device_named(ACCELERATORS[device])
    if ranks > 1:
        accelerator = replace(accelerator, device_link_bytes_per_s=PCIE.bytes_per_s)
    share = device_geometries(geometry_from_config(config, BF16), Parallelism(tensor=ranks))[0]
    size = WEIGHTS_BYTES[name] / ranks
    machine = Machine(accelerator=accelerator, geometry=share, weights_bytes=int(size), parameters=size / 2,
                      active_parameters=size / 2, weight_bits=16)  # fmt: skip
    factors = Factors(
        host_s=Factor(host_s, "an option"),
        exchange_s=Factor(PCIE.latency_s, PCIE.source),
        link=Factor(1.0, PCIE.source),
    )
    return RooflineCost(machine=machine, ranks=ranks, factors=factors)


def roofline_ratios(folder: Path, run: Run, ranks: int) -> np.ndarray:
    """The tables' seconds of designed steps over the roofline's."""
    tables, roofline = tables_cost(folder, run, ranks, 0.0), roofline_cost(run, ranks, 0.0)
    within = Range(max_batch=256, max_context=16_384, max_step_tokens=2048, pool_tokens=500_000)
    shapes = [shape_of(scene) for seed in range(8) for scene in design(within, seed)]
    return np.array([tables.step_seconds(shape) / roofline.step_seconds(shape) for shape in shapes])


def shape_of(scene: Scene) -> StepShape:
    starts = [*scene.decodes, *(scene.start if place == 0 else 0 for place in range(len(scene.chunks)))]
    counts = [*(1 for _ in scene.decodes), *scene.chunks]
    return StepShape.from_chunks(starts, counts, len(scene.decodes) + (len(scene.chunks) if scene.ends else 0))


def measured_times(requests: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, float]:
    """TTFT and TPOT of each request, from its arrival, and the span."""
    arrival = np.array([one["arrival_time"] for one in requests])
    # Two clocks: nobody is queued before arriving, so the least difference is what lies between them.
    shift = min(one["queued_ts"] - one["arrival_time"] for one in requests)
    first = np.array([one["first_token_ts"] for one in requests]) - shift
    last = np.array([one["last_token_ts"] for one in requests]) - shift
    tokens = np.array([one["output_toks"] for one in requests])
    tpot = (last - first)[tokens > 1] / (tokens[tokens > 1] - 1)
    return first - arrival, tpot, float(last.max() - arrival.min())


def replica_of_run(run: Run, meta: dict[str, Any], cost: CostModel) -> Replica:
    device, name, _, config, ranks = run
    geometry = geometry_from_config(config, BF16)
    share = device_geometries(geometry, Parallelism(tensor=ranks))[0]
    layout = make_layout(served_groups(share.layers), 16)
    blocks = meta.get("kv_cache", {}).get("num_gpu_blocks")
    if blocks is None:
        free = RESERVED * MEMORY_BYTES[device] - WEIGHTS_BYTES[name] / ranks - 2 * 2**30
        blocks = int(free // layout.slab_bytes)
    engine = meta["engine_kwargs"]
    return Replica(
        model=name,
        device=device,
        tp=ranks,
        layout=layout,
        slabs=blocks,
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        max_model_len=min(engine["max_model_len"] or 2**20, layout.most_tokens(blocks) + 1),
        attention_mode=geometry.attention_mode,
        cache_dtype="bf16",
        cost=cost,
    )


def simulated(replica: Replica, requests: list[dict[str, Any]]) -> dict[str, float]:
    start = min(one["arrival_time"] for one in requests)
    made = [
        TraceRequest(
            arrival_ns=round((one["arrival_time"] - start) * 1e9),
            input_tokens=one["input_toks"],
            output_tokens=one["output_toks"],
        )
        for one in sorted(requests, key=lambda one: one["arrival_time"])
    ]
    measured = Measured()
    Simulation(replica.core(), OpenLoop(made), [measured]).run()
    tpot = measured.column("tpot")
    return figures_of(measured.column("ttft"), tpot[~np.isnan(tpot)], measured.end_s)


def figures_of(ttft: np.ndarray, tpot: np.ndarray, span: float) -> dict[str, float]:
    return {
        "span": span,
        "TTFT mean": float(ttft.mean()),
        "TTFT p50": float(np.quantile(ttft, 0.5)),
        "TTFT p99": float(np.quantile(ttft, 0.99)),
        "TPOT mean": 1e3 * float(tpot.mean()),
        "TPOT p50": 1e3 * float(np.quantile(tpot, 0.5)),
        "TPOT p99": 1e3 * float(np.quantile(tpot, 0.99)),
    }


if __name__ == "__main__":
    main()
