"""`--against LOG`: what an engine printed, part by part, beside what the planner says of the same inputs.

Every step from one printed figure to the next is shown with what it comes from: weights, runtime, page
rounding, windows charged at full length, state counted in blocks. What is left over is said, as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from octavo.planner.asked import Asked
from octavo.planner.build import Ground, ground_of
from octavo.planner.charging import AnyPaging, paging_for
from octavo.planner.engines import engine_named
from octavo.planner.largest_step import first_rank_samples
from octavo.planner.logs import Printed, read_log
from octavo.planner.paging import Paging
from octavo.planner.pools import CellPool, TokenPool
from octavo.planner.source import Model
from octavo.planner.wording import size

_FROM_LOG = ("context", "tp", "pp", "max_num_batched_tokens", "max_num_seqs")
_LLAMA_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl")


@dataclass(frozen=True, slots=True)
class Step:
    """One figure: what was printed, what the planner says, and why they differ if they do."""

    what: str
    printed: float | None
    predicted: float | None
    unit: str
    says: str
    slack: float = 0.0
    """How far both may be apart because of the digits that were printed."""

    @property
    def unexplained(self) -> float | None:
        """Share of the printed figure that nothing here explains; 0 within the printed digits."""
        if self.printed is None or self.predicted is None or not self.printed:
            return None
        apart = self.printed - self.predicted
        return 0.0 if abs(apart) <= self.slack else apart / self.printed


def explain(model: Model, asked: Asked, log: str) -> dict[str, Any]:
    """The explanation as plain values. The command line's options go before what the log says."""
    printed = read_log(log)
    ground = ground_of(model, _with_log(asked, printed))
    paging = paging_for(ground.engine, ground.device, ground.charge)
    steps = [*_budget(printed), *_pool(printed, ground, paging), *_need(printed, ground, paging)]
    return {
        "log": log,
        "model": ground.source.name,
        "engine": ground.engine.label,
        "printed": dict(printed.figures),
        "steps": [
            {"what": s.what, "printed": s.printed, "predicted": s.predicted, "unit": s.unit, "says": s.says,
             "unexplained": s.unexplained}
            for s in steps
        ],
        "rules": list(paging.notes),
    }  # fmt: skip


def _with_log(asked: Asked, printed: Printed) -> Asked:
    """What was asked, and where nothing was, what the log says of the same option."""
    given: dict[str, Any] = {name: getattr(asked, name) for name in asked.given}
    for name in _FROM_LOG:
        if name not in given and printed.get(name):
            given[name] = int(printed.figures[name])
    if "block_size" not in given and printed.get("block_tokens") and "padding_percent" not in printed.figures:
        given["block_size"] = int(printed.figures["block_tokens"])
    if "engine" not in given:
        named = (
            f"{printed.engine}-{printed.version}"
            if printed.version and printed.engine != "llamacpp"
            else printed.engine
        )
        given["engine"] = engine_named(named).label.replace(" ", "-")
    if "kv_dtype" not in given:
        kind = printed.other.get("key_type" if printed.engine == "llamacpp" else "kv_dtype", "auto").lower()
        if printed.engine != "llamacpp" or kind in _LLAMA_TYPES:
            given["kv_dtype"] = kind
    return Asked.of(**given)


def _budget(printed: Printed) -> Iterator[Step]:
    """From the device to the KV cache, where the log states the parts."""
    total, share = printed.get("total_bytes"), printed.get("utilization")
    weights, kv = printed.get("weights_bytes"), printed.get("kv_bytes")
    other, activation = printed.get("non_torch_bytes"), _largest_step(printed)
    if total and share:
        slack = sum(printed.rounding.get(name, 0) for name in ("budget_bytes", "total_bytes"))
        says = f"{share:g} x {size(total)} of the device"
        yield Step("budget", printed.get("budget_bytes"), total * share, "bytes", says, slack)
    if weights is not None:
        yield Step("weights", weights, None, "bytes", "as loaded; not for keys and values")
    if other is not None:
        yield Step("outside the framework", other, None, "bytes", "context, libraries, communication between devices")
    if activation is not None:
        yield Step("largest step", activation, None, "bytes", "activations of the profiled step; grows with its tokens")
    parts = (total, share, weights, other, activation)
    if kv is not None and all(part is not None for part in parts):
        left = (total or 0) * (share or 0) - (weights or 0) - (other or 0) - (activation or 0)
        slack = sum(
            printed.rounding.get(f"{name}_bytes", 0)
            for name in ("kv", "total", "weights", "non_torch", "activation", "peak")
        )
        yield Step("KV cache", kv, left, "bytes", "budget - weights - outside - largest step", slack)


def _less_on_first_rank(printed: Printed, ground: Ground) -> int:
    """Where a log quotes one rank and not the one with the least."""
    stated = _largest_step(printed)
    if stated is None or printed.times("kv_bytes") > 1:
        return 0
    return first_rank_samples(ground.engine, ground.asked.tp, ground.geometry, ground.step_limits, stated)


def _largest_step(printed: Printed) -> float | None:
    weights, activation = printed.get("weights_bytes"), printed.get("activation_bytes")
    if activation is None and printed.get("peak_bytes") is not None and weights is not None:
        return printed.figures["peak_bytes"] - weights
    return activation


def _pool(printed: Printed, ground: Ground, paging: AnyPaging) -> Iterator[Step]:
    """From the KV cache's bytes to blocks, tokens and concurrency, or back."""
    kv = printed.get("kv_bytes")
    if isinstance(paging, CellPool):
        yield from _cells(printed, ground, paging)
        return
    if isinstance(paging, TokenPool):
        yield from _tokens(printed, paging)
        return
    block = f"a block is {paging.block_tokens:,} tokens, {size(paging.unit_bytes)} a device"
    if kv is not None:
        less = _less_on_first_rank(printed, ground)
        if less:
            yield Step("sampling on the first rank", None, less, "bytes",
                       "the rank that was quoted does not sample; the first one does and has so much less")  # fmt: skip
            kv -= less
        blocks = paging.units(int(kv))
        rest = int(kv) - blocks * paging.unit_bytes
        slack = printed.rounding.get("kv_bytes", 0) / paging.unit_bytes + 1
        if printed.get("blocks") is not None:
            yield Step(
                "blocks", printed.get("blocks"), blocks, "blocks", f"{block}; {size(rest)} make no whole block", slack
            )
        if printed.get("tokens") is not None:
            tokens = paging.tokens(int(kv), ground.context)
            per_block = tokens / blocks if blocks else 0
            yield Step("tokens", printed.get("tokens"), tokens, "tokens", _tokens_say(paging, block), slack * per_block)
        if printed.get("concurrency") is not None:
            predicted = blocks / paging.units_for(ground.context)
            per = f"{paging.units_for(ground.context):,} blocks for {ground.context:,} tokens"
            slack = slack / paging.units_for(ground.context) + printed.rounding.get("concurrency", 0)
            yield Step(
                "concurrency", printed.get("concurrency"), predicted, "x", f"{per}; one block is never usable", slack
            )
    elif printed.get("blocks") is not None:
        held = printed.figures["blocks"] * paging.unit_bytes
        yield Step("KV cache", None, held, "bytes", f"{block}; so much do the printed blocks take")
    elif printed.get("tokens") is not None and paging.prints == "blocks":
        held = printed.figures["tokens"] / paging.block_tokens * paging.unit_bytes if paging.block_tokens else 0
        yield Step("KV cache", None, held, "bytes", f"{block}; so much do the printed tokens take")


def _tokens_say(paging: Paging, block: str) -> str:
    ways = {
        "blocks": f"blocks x tokens of a block; {block}",
        "groups": f"blocks / {len(paging.groups)} groups x tokens of a block, as if all needed equally many; {block}",
        "concurrency": f"concurrency x the longest request: not tokens that any request may have; {block}",
    }
    return ways[paging.prints]


def _tokens(printed: Printed, paging: TokenPool) -> Iterator[Step]:
    tokens = printed.get("tokens")
    if tokens is None:
        return
    held = paging.pool_bytes(int(tokens))
    stated = printed.get("pool_bytes")
    if stated is None and printed.get("key_bytes") is not None:
        stated = printed.figures["key_bytes"] + (printed.get("value_bytes") or 0)
    each = size(paging.pool_bytes(0) / paging.page_tokens)
    says = f"{int(tokens):,} tokens and a page more, {each} each; printed as GB, meant as GiB"
    slack = sum(printed.rounding.get(name, 0) for name in ("pool_bytes", "key_bytes", "value_bytes"))
    yield Step("KV cache", stated, held, "bytes", says, slack)


def _cells(printed: Printed, ground: Ground, paging: CellPool) -> Iterator[Step]:
    held = paging.reserved_bytes(ground.context, ground.seqs)
    window = paging.window_cells(ground.context, ground.seqs)
    says = f"{paging.cells(ground.context):,} cells"
    if paging.window_cell_bytes:
        says += f", and {window:,} for windows: one for each of {ground.seqs} sequences and one micro-batch"
    slack = 0.01 * 2**20
    yield Step("KV cache", printed.get("kv_bytes"), held - ground.seqs * paging.state_bytes, "bytes", says, slack)
    if printed.get("state_bytes") is not None:
        yield Step("recurrent state", printed.get("state_bytes"), ground.seqs * paging.state_bytes, "bytes",
                   f"of {ground.seqs} sequences, all in float32", slack)  # fmt: skip


def _need(printed: Printed, ground: Ground, paging: AnyPaging) -> Iterator[Step]:
    """What one longest request takes in this engine, beside what it needs."""
    needed, charged = ground.device.bytes_kept(ground.context), paging.bytes_for(ground.context)
    if printed.get("needed_bytes") is not None:
        slack = printed.rounding.get("needed_bytes", 0)
        yield Step(
            "one longest request",
            printed.get("needed_bytes"),
            charged,
            "bytes",
            "in whole blocks of every group",
            slack,
        )
    full = ground.context * ground.device.bytes_per_token + ground.device.fixed_bytes_per_sequence
    windows = 0
    if ground.device.bytes_per_token_windowed and any("full length" in note for note in paging.notes):
        windows = full - needed
    yield Step(
        "needed by it", None, needed, "bytes", f"{ground.context:,} tokens, windows and state counted as they are"
    )
    if windows:
        yield Step("windows at full length", None, windows, "bytes", "charged beyond what their layers can read")
    yield Step(
        "page rounding",
        None,
        charged - needed - windows,
        "bytes",
        "whole blocks, padding of groups, a step's chunk in windows",
    )


def explanation_lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['log']}: {found['model']}, printed by {found['engine']}"
    yield f"{'':<24} {'printed':>14} {'planner':>14} {'left over':>10}"
    for step in found["steps"]:
        left = "" if step["unexplained"] is None else f"{step['unexplained']:.2%}"
        printed, predicted = (_shown(step[name], step["unit"]) for name in ("printed", "predicted"))
        yield f"{step['what']:<24} {printed:>14} {predicted:>14} {left:>10}  {step['says']}"
    for note in found["rules"]:
        yield f"note: {note}"


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return size(value)
    return f"{value:.2f}x" if unit == "x" else f"{value:,.0f}"
