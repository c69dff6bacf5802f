"""What each target asks, and how its figure is read from the JSON lines of the benchmarks that a section ran.

Owns the table of targets and the arithmetic of W3 over the measured peak. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]
"""The JSON line of one benchmark."""


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the table."""

    section: str
    says: str
    gate: float | None
    goal: float | None
    figure: float | None
    """None: not to be had, see `note`."""
    note: str = ""
    at_most: bool = False
    """Met below the gate; otherwise above."""

    @property
    def met(self) -> str:
        if self.figure is None:
            return "no figure"
        if self._reaches(self.gate):
            return "goal met" if self._reaches(self.goal) else "met"
        return "missed"

    def _reaches(self, bound: float | None) -> bool:
        if self.figure is None or bound is None:
            return False
        return self.figure <= bound if self.at_most else self.figure >= bound


def over_peers(section: str, says: str, bounds: tuple[float, float | None], row: Report | None) -> Target:
    """octavo over the best peer of the same kind in one run."""
    if row is None or row["speed"] is None:
        return Target(section, says, *bounds, None, "octavo did not run" if row is None else row["reason"])
    if row["over_best_peer"] is None:
        return Target(section, says, *bounds, None, "no peer ran")
    note = f"{row['speed']:.1f} tok/s beside {row['best_peer']}'s {row['speed'] / row['over_best_peer']:.1f}"
    return Target(section, says, *bounds, row["over_best_peer"], note)


def own_row(report: Report, dtype: str, workload: str, *, reuse: bool = False) -> Report | None:
    """octavo's line of one table of the comparison with peers."""
    for one in report["dtypes"]:
        for played in one["workloads"]:
            if (one["dtype"], played["name"]) == (dtype, workload):
                return next((row for row in played["rows"] if row["base"] == "octavo" and row["reuse"] == reuse), None)
    return None


def peers_targets(section: str, reports: Sequence[Report], asked: Sequence[tuple[Any, ...]]) -> list[Target]:
    """`asked`: (dtype, workload, reuse, gate, goal) of each line."""
    made = []
    for dtype, workload, reuse, gate, goal in asked:
        says = f"{workload} {dtype}{', reuse' if reuse else ''}: times the best peer"
        made.append(over_peers(section, says, (gate, goal), own_row(reports[0], dtype, workload, reuse=reuse)))
    return made


def bandwidth_target(section: str, limits: Report) -> Target:
    row = next(row for row in limits["rows"] if row["step"] == "decode, 1")
    note = f"{1e3 * row['seconds']:.1f} ms a token, {limits['rates']['read_bytes_per_s'] / 1e9:.1f} GB/s measured"
    return Target(section, f"decode of one, {limits['dtype']}: share of the limit", 0.6, 0.75, row["of_limit"], note)


def peak_target(section: str, peers: Report, limits: Report, arithmetic: Any) -> Target:
    """W3's arithmetic over its time, as a share of what the machine multiplies and adds."""
    dtype, says = limits["dtype"], f"W3 {limits['dtype']}: share of the measured peak, end to end"
    row = own_row(peers, dtype, "W3")
    if row is None or not row["seconds"]:
        return Target(section, says, 0.65, 0.75, None, "octavo did not run")
    flops = w3_flops(arithmetic, row["requests"])
    rate, peak = flops / row["seconds"], best_flops(limits["rates"], dtype)
    note = f"{flops / 1e9:.0f} GFLOP in {row['seconds']:.1f} s = {rate / 1e9:.0f} of {peak / 1e9:.0f} GFLOP/s"
    return Target(section, says, 0.65, 0.75, rate / peak, note)


def w3_flops(arithmetic: Any, requests: int, tokens_in: int = 4096, tokens_out: int = 64) -> int:
    """Every position once: prompts, then each token that is fed back."""
    starts = [0] * requests
    flops = arithmetic.step(starts, [tokens_in] * requests, requests).flops
    for number in range(tokens_out - 1):
        flops += arithmetic.step([tokens_in + number] * requests, [1] * requests, requests).flops
    return int(flops)


def best_flops(rates: Report, dtype: str) -> float:
    kinds = ("fp32",) if dtype == "fp32" else ("fp32", dtype)
    return max(*(rates["product_flops"][kind] for kind in kinds), rates["fma_flops"] or 0.0)


def scheduler_targets(section: str, report: Report) -> list[Target]:
    made = []
    for running, share in ((256, 1 / 10), (1024, 1 / 15)):
        row = next(row for row in report["rows"] if row["running"] == running and not row["audit"])
        note = f"{row['median_ms']:.3f} ms a step beside vLLM's {row['vllm_ms']:.2f}"
        says = f"scheduler, {running} decodes: share of vLLM's"
        made.append(Target(section, says, share, None, row["of_vllm"], note, at_most=True))
    return made


def outside_targets(section: str, report: Report) -> list[Target]:
    made = []
    for dtype, rows in report["results"].items():
        for row in rows:
            note = f"{row['auto_ms']:.1f} ms a step" if "auto_ms" in row else ""
            says = f"decode of 32, {dtype}: share outside native calls"
            made.append(Target(section, says, 0.1, None, row["auto_outside"], note, at_most=True))
    return made


def ready_targets(section: str, report: Report) -> list[Target]:
    note = f"{report['starts']} starts of {report['dtype']}, {min(report['all_s']):.1f} to {max(report['all_s']):.1f} s"
    return [
        Target(section, "ready, embedded default, warm: seconds", 5.0, None, report["ready_s"], note, at_most=True),
        Target(
            section, "peak RSS with a 256 MB pool: GB", 1.2, None, report["peak_gb"], "after an answer", at_most=True
        ),
    ]


def serve_target(section: str, report: Report) -> Target:
    note = f"{len(report['offline'])} repetitions"
    return Target(section, "served over offline, 32 streams", 0.95, None, report["ratio_median"], note)


def table(targets: Sequence[Target]) -> list[str]:
    text = [f"{'section':<12}{'target':<52}{'gate':>8}{'goal':>7}{'figure':>9}  {'':<10}{'':<6}"]
    for one in targets:
        gate = "" if one.gate is None else ("<=" if one.at_most else ">=") + format(one.gate, ".3g")
        goal = "" if one.goal is None else f"{one.goal:.2f}"
        figure = "-" if one.figure is None else f"{one.figure:.3f}"
        text.append(f"{one.section:<12}{one.says:<52}{gate:>8}{goal:>7}{figure:>9}  {one.met:<10}{one.note}")
    return text
