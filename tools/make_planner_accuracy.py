"""Write `docs/planner-accuracy.md`: what the planner says beside what engines printed, record by record.

Run it after a change of the planner's rules: `python tools/make_planner_accuracy.py`. Records are public
start-up logs (tests/pure/capacity_public.jsonl). A prediction never sees the figure it is compared with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.planner_records import (
    Insufficient,
    Record,
    config_of,
    device_bytes,
    device_name,
    growing_config_of,
    indexed_config_of,
    kv_dtype,
    number,
    read_records,
    require,
    rounding,
    whole,
)

from octavo.errors import ConfigError
from octavo.planner.asked import Asked
from octavo.planner.build import Ground, ground_of, plan_for
from octavo.planner.charging import AnyPaging, paging_for
from octavo.planner.largest_step import first_rank_samples, largest_step
from octavo.planner.pools import CellPool, TokenPool

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "tests" / "pure" / "capacity_public.jsonl"
PUBLISHED = ROOT / "tests" / "pure" / "published_configs.json"
PAGE = ROOT / "docs" / "planner-accuracy.md"
GIB, MIB = 2**30, 2**20
ABOUT = (
    "Written by `python tools/make_planner_accuracy.py`; do not edit. Each row is a figure that a real engine "
    "printed beside what the planner says from the record's inputs. The rules depend on engine, version and "
    "geometry alone."
)
HEADS = ("| record | engine | figure | planner | printed | off by |", "|---|---|---|---:|---:|---:|")
ESTIMATES = (
    "What a plan says where weights and runtime are not given: the largest step from tokens, widths and vocabulary, "
    "and the KV cache that a config and a device alone make. Not counted above."
)
SWAP_BYTES = 4 * GIB
"""vLLM V0's default swap space on the host."""


@dataclass(frozen=True)
class Comparison:
    """One figure: predicted, observed, and the range of predictions that the record's rounding allows."""

    record: str
    engine: str
    what: str
    predicted: float
    observed: float
    low: float
    high: float
    unit: str

    @property
    def within_rounding(self) -> bool:
        return self.low <= self.observed <= self.high

    @property
    def error(self) -> float:
        """Relative; 0 within the record's own rounding."""
        if self.within_rounding:
            return 0.0
        return abs(self.predicted - self.observed) / self.observed


@dataclass(frozen=True)
class Skipped:
    record: str
    engine: str
    missing: str


def compare_record(record: Record) -> tuple[list[Comparison], list[Skipped]]:
    """Every figure of a record that its inputs suffice to predict, and what is missing for the rest."""
    found: list[Comparison] = []
    skipped: list[Skipped] = []
    for rule in RULES:
        try:
            found += list(rule(record))
        except Insufficient as missing:
            skipped.append(Skipped(record.id, record.rules.label, str(missing)))
        except ConfigError as error:
            skipped.append(Skipped(record.id, record.rules.label, f"refused: {error}"))
    unique = list(dict.fromkeys(skipped))
    return found, [] if found else unique


def ground(record: Record, config: dict[str, Any] | None = None) -> Ground:
    engine = record.rules
    given = {"tp": whole(record, "tp"), "pp": whole(record, "pp"), "block_size": whole(record, "block_size"),
             "context": whole(record, "max_model_len"),
             "max_num_batched_tokens": whole(record, "max_num_batched_tokens"),
             "max_num_seqs": whole(record, "max_num_seqs"),
             "speculative_tokens": whole(record, "num_speculative_tokens")}  # fmt: skip
    for theirs, ours in (("page_size", "block_size"), ("tokens_per_block", "block_size"), ("n_ctx", "context"),
                         ("n_ubatch", "max_num_batched_tokens"), ("n_seq_max", "max_num_seqs")):  # fmt: skip
        given[ours] = given.get(ours) or whole(record, theirs)
    version = f"{engine.name} {'.'.join(map(str, engine.version))}" if engine.version != (999,) else engine.name
    given["device"] = device_name(record)
    options = {name: value for name, value in given.items() if value}
    return ground_of(config or config_of(record), Asked.of(engine=version, kv_dtype=kv_dtype(record), **options))


def paging(record: Record, config: dict[str, Any] | None = None) -> tuple[Ground, AnyPaging]:
    there = ground(record, config)
    return there, paging_for(there.engine, there.device, there.charge)


def made(record: Record, what: str, predicted: float, observed: Any, unit: str, width: float = 0.0) -> Comparison:
    """`width`: how far the prediction may be off because of what it was made from."""
    seen = require(number(observed), what)
    allowed = rounding(observed) + width
    return Comparison(
        record.id, record.rules.label, what, predicted, seen, predicted - allowed, predicted + allowed, unit
    )


# -- the figures ----------------------------------------------------------------------------------


def ledger(record: Record) -> Iterator[Comparison]:
    """KV bytes that are left of a device of stated memory, stated weights and stated runtime."""
    seen = record.observed
    total, share = device_bytes(record), number(record.inputs.get("gpu_memory_utilization"))
    kv = seen.get("available_kv_gib", seen.get("kv_gib"))
    if total is None or share is None or kv is None:
        raise Insufficient("memory of the device, weights and runtime")
    weights, other = number(seen.get("weights_gib")), number(seen.get("non_torch_gib"))
    peak = number(seen.get("peak_act_gib"))
    if peak is None and number(seen.get("peak_torch_gib")) is not None and weights is not None:
        peak = number(seen["peak_torch_gib"]) - weights
    if weights is None or other is None or peak is None:
        raise Insufficient("weights and runtime")
    known = {"memory": total, "utilization": share, "weights_bytes": round(weights * GIB),
             "runtime_bytes": round((other + peak) * GIB)}  # fmt: skip
    there = ground(record)
    options = {"tp": there.asked.tp, "context": there.asked.context, "engine": there.asked.engine, **known}
    plan = plan_for(config_of(record), Asked.of(**{k: v for k, v in options.items() if v is not None}))
    yield made(record, "KV bytes of the ledger", plan.budget.kv.predicted_bytes / GIB, kv, "GiB", width=0.015)


def from_bytes(record: Record) -> Iterator[Comparison]:
    """Blocks, tokens and concurrency that a stated number of KV bytes makes."""
    seen = record.observed
    name = next(
        (n for n in ("available_kv_gib", "available_kv_gib_per_gpu", "kv_gib", "kv_budget_mib") if n in seen), None
    )
    size = number(seen.get(name)) if name else None
    if size is None:
        raise Insufficient("bytes of the KV cache")
    there, pages = paging(record)
    if isinstance(pages, CellPool):
        raise Insufficient("a pool that is not declared")
    unit = MIB if name.endswith("mib") else GIB
    size -= _less_on_first_rank(record, there) / unit
    low, high = ((size + sign * rounding(seen[name])) * unit for sign in (-1, 1))

    def figure(what: str, of: Callable[[int], float], observed: Any, name: str) -> Comparison:
        predicted, width = of(int(size * unit)), rounding(observed)
        value = require(number(observed), what)
        least, most = of(int(low)) - width, of(int(high)) + width
        return Comparison(record.id, record.rules.label, what, predicted, value, least, most, name)

    units_for = pages.units_for(there.context)
    if "gpu_blocks" in seen or "blocks" in seen:
        yield figure("blocks", pages.units, seen.get("gpu_blocks", seen.get("blocks")), "blocks")
    if "kv_tokens" in seen or "tokens" in seen:
        yield figure(
            "tokens", lambda kv: pages.tokens(kv, there.context), seen.get("kv_tokens", seen.get("tokens")), "tokens"
        )
    if "max_concurrency" in seen and there.asked.context:
        yield figure("concurrency", lambda kv: pages.units(kv) / units_for, seen["max_concurrency"], "x")
    if "kv_mib" in seen:
        yield figure(
            "bytes in whole blocks", lambda kv: pages.units(kv) * pages.unit_bytes / MIB, seen["kv_mib"], "MiB"
        )
    if seen.get("result") == "refused" and there.asked.context:
        fits = pages.largest_context(int(high)) >= there.asked.context
        yield Comparison(
            record.id,
            record.rules.label,
            "refused at start",
            float(not fits),
            1.0,
            float(not fits),
            float(not fits),
            "",
        )


def _less_on_first_rank(record: Record, there: Ground) -> int:
    """Where a log quotes a rank that does not sample; the tokens that it prints are the least of all ranks."""
    peak = number(record.observed.get("peak_act_gib"))
    if peak is None or record.observed.get("kv_tokens") is None:
        return 0
    return first_rank_samples(there.engine, there.asked.tp, there.geometry, there.step_limits, peak * GIB)


def from_tokens(record: Record) -> Iterator[Comparison]:
    """Bytes of a pool of stated tokens; concurrency of stated blocks or tokens."""
    seen = record.observed
    tokens = number(seen.get("kv_tokens"))
    sizes = [name for name in ("kv_gb", "k_gb", "true_kv_gb", "kv_gib") if number(seen.get(name)) is not None]
    for asked, name in _declared(record):
        _, pages = paging(record)
        yield made(record, f"bytes of {asked:,} tokens", pages.pool_bytes(asked) / GIB, seen[name], "GiB")
    if tokens is not None and sizes:
        _, pages = paging(record, growing_config_of(record))
        for name in sizes:
            half = 2 if name == "k_gb" else 1
            size = pages.pool_bytes(int(tokens)) if isinstance(pages, TokenPool) else pages.bytes_for(int(tokens))
            yield made(
                record, "bytes of keys" if half == 2 else "bytes of the pool", size / half / GIB, seen[name], "GiB"
            )
    if "needed_gib" in seen and number(seen["needed_gib"]) is not None:
        there, pages = paging(record)
        yield made(record, "bytes of one request", pages.bytes_for(there.context) / GIB, seen["needed_gib"], "GiB")
    if ("block" in seen and "mamba_pad_pct" in seen) or "available_kv_gib_per_gpu" in seen:
        _, pages = paging(record)
        yield made(record, "positions of a block", pages.block_tokens, seen["block"], "tokens")
    if "cpu_blocks" in seen:
        _, pages = paging(record)
        yield made(record, "blocks of the swap space", SWAP_BYTES // pages.unit_bytes, seen["cpu_blocks"], "blocks")
    if not sizes and not {"needed_gib", "block", "cpu_blocks"} & set(seen) and not list(_declared(record)):
        raise Insufficient("bytes of the KV cache")


def _declared(record: Record) -> Iterator[tuple[int, str]]:
    declared = record.inputs.get("max_total_tokens")
    for tokens in declared if isinstance(declared, list) else []:
        if f"kv_gb_{tokens}" in record.observed:
            yield tokens, f"kv_gb_{tokens}"


def concurrency(record: Record) -> Iterator[Comparison]:
    """What a log's own blocks and longest request make of its concurrency: uniform state needs no geometry."""
    seen = record.observed
    length = number(record.inputs.get("max_model_len"))
    block = number(record.inputs.get("block_size"))
    blocks, said = number(seen.get("gpu_blocks")), seen.get("max_concurrency")
    if length is None or block is None or blocks is None or said is None:
        raise Insufficient("blocks and concurrency")
    if number(seen.get("kv_tokens")) is not None:
        yield made(record, "tokens of the blocks", blocks * block, seen["kv_tokens"], "tokens")
    yield made(record, "concurrency of the blocks", blocks * block / length, said, "x")


def declared_cells(record: Record) -> Iterator[Comparison]:
    """llama.cpp: bytes that a declared context reserves."""
    if record.rules.name != "llamacpp":
        raise Insufficient("an engine that declares its cells")
    kinds = record.inputs.get("type_k")
    if isinstance(kinds, list):
        for kind, size in zip(kinds, record.observed["mib"], strict=True):
            there, pages = _cells(record, kind)
            yield made(record, f"bytes in {kind}", pages.reserved_bytes(there.context, there.seqs) / MIB, size, "MiB")
        return
    there, pages = _cells(record, kv_dtype(record))
    cells = pages.cells(there.context) * pages.cell_bytes
    window = pages.window_cells(there.context, there.seqs)
    figures = {"kv_mib": cells + window * pages.window_cell_bytes, "full_mib": cells, "ckv_mib": cells,
               "k_mib": cells / 2, "swa_mib": window * pages.window_cell_bytes, "kv_mb_llamacpp": cells}  # fmt: skip
    for name, size in figures.items():
        if number(record.observed.get(name)) is not None:
            yield made(record, f"bytes ({name.removesuffix('_mib')})", size / MIB, record.observed[name], "MiB")
    several = record.observed.get("kv_mib")
    if isinstance(several, list):
        yield made(record, "bytes of attention", cells / MIB, several[0], "MiB")
        _, both = _cells(record, kv_dtype(record), indexed_config_of(record))
        index = both.cells(there.context) * both.cell_bytes - cells
        yield made(record, "bytes of the index", index / MIB, several[1], "MiB")
    if "swa_cells" in record.observed:
        yield made(record, "cells of a window", window, record.observed["swa_cells"], "cells")


def _cells(record: Record, kind: str, config: dict[str, Any] | None = None) -> tuple[Ground, CellPool]:
    there = ground(record, growing_config_of(record))
    options = {"engine": "llamacpp", "kv_dtype": "q8_kv" if kind.lower() == "q8_kv" else kind,
               "context": there.asked.context, "max_num_seqs": there.asked.max_num_seqs,
               "max_num_batched_tokens": there.asked.max_num_batched_tokens}  # fmt: skip
    try:
        config = config or config_of(record)
    except Insufficient:
        config = growing_config_of(record)
    here = ground_of(config, Asked.of(**{k: v for k, v in options.items() if v is not None}))
    pages = paging_for(here.engine, here.device, here.charge)
    if not isinstance(pages, CellPool):
        raise Insufficient("cells")
    return here, pages


def estimates(record: Record, published: dict[str, dict[str, Any]]) -> Iterator[Comparison]:
    """What is estimated where nothing was measured: the largest step, and all of a device by its config alone."""
    seen = record.observed
    weights, peak = number(seen.get("weights_gib")), seen.get("peak_act_gib")
    if weights is not None and number(seen.get("peak_torch_gib")) is not None:
        peak = round(number(seen["peak_torch_gib"]) - weights, 2)
    if peak is not None and "vocab" in record.arch and whole(record, "tp") in (None, 1):
        there = ground(record)
        step = largest_step(there.engine, there.geometry, there.step_limits)
        yield made(record, "largest step", step.predicted_bytes / GIB, peak, "GiB")
    config, kv = published.get(record.model), number(seen.get("available_kv_gib"))
    if config is not None and weights is None and kv is not None and device_name(record):
        there = ground(record, config)
        share = number(record.inputs.get("gpu_memory_utilization")) or 0.9
        given = {name: getattr(there.asked, name) for name in there.asked.given} | {"utilization": share}
        plan = plan_for(config, Asked.of(**given))
        yield made(record, "KV bytes by config alone", plan.budget.kv.predicted_bytes / GIB, kv, "GiB")


RULES = (ledger, from_bytes, from_tokens, concurrency, declared_cells)


# -- the page -------------------------------------------------------------------------------------


def compare_all(records: list[Record]) -> tuple[list[Comparison], list[Skipped]]:
    found: list[Comparison] = []
    skipped: list[Skipped] = []
    for record in records:
        some, missing = compare_record(record)
        found += some
        skipped += missing
    return found, skipped


def page(records: list[Record]) -> str:
    found, skipped = compare_all(records)
    exact = sum(c.within_rounding for c in found)
    errors = [c.error for c in found]
    of_records = len({c.record for c in found})
    summary = (
        f"{len(found)} figures of {of_records} records; {exact} within the record's own rounding; "
        f"median error {median(errors):.2%}, largest {max(errors):.1%}."
    )
    lines = [
        "# How close the planner comes",
        "",
        ABOUT,
        "",
        summary,
        "",
        *HEADS,
    ]
    for c in found:
        off = "within rounding" if c.within_rounding else f"{c.error:.2%}"
        lines.append(
            f"| {c.record} | {c.engine} | {c.what} | {_shown(c.predicted)} {c.unit} | {_shown(c.observed)} | {off} |"
        )
    lines += ["", "## Estimates", "", ESTIMATES, "", *HEADS]
    published = json.loads(PUBLISHED.read_text("utf-8"))
    lines += [
        f"| {c.record} | {c.engine} | {c.what} | {_shown(c.predicted)} {c.unit} | {_shown(c.observed)} "
        f"| {c.predicted - c.observed:+.2f} GiB |"
        for record in records
        for c in estimates(record, published)
    ]
    lines += ["", "## Not explained", ""]
    rest = [c for c in found if c.error > 0.01]
    lines += [
        f"- {c.record}: {c.what}, {_shown(c.predicted)} {c.unit} against {_shown(c.observed)} ({c.error:.1%})"
        for c in rest
    ]
    lines += [
        *([] if rest else ["Nothing above 1%."]),
        "",
        "## Inputs that do not suffice",
        "",
        "| record | engine | what the record does not say |",
        "|---|---|---|",
    ]
    by_record: dict[str, list[str]] = {}
    for s in skipped:
        by_record.setdefault(f"{s.record} | {s.engine}", []).append(s.missing)
    lines += [f"| {key} | {_joined(missing)} |" for key, missing in by_record.items()]
    return "\n".join(lines) + "\n"


def _joined(missing: list[str]) -> str:
    dull = {"an engine that declares its cells", "blocks and concurrency", "memory of the device, weights and runtime"}
    telling = [text for text in missing if text not in dull]
    return "; ".join(dict.fromkeys(telling or missing))


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 10_000 else f"{value:,.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="?", type=Path, default=RECORDS)
    parser.add_argument("--output", type=Path, default=PAGE)
    given = parser.parse_args()
    given.output.write_text(page(read_records(given.records)), "utf-8")


if __name__ == "__main__":
    main()
