"""A plan as text that a person reads in ten seconds: one block for each question, most important first.

Owns the words and columns. Every figure comes from the plan; every line about bytes says of what.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import floor
from textwrap import wrap

from octavo.planner.values import Holding, Plan, StateGroup
from octavo.planner.wording import duration, layers, parameters, size

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 24
_COLUMNS, _LAST_COLUMN = 120, 72
_INDENT = " " * 10


def report(plan: Plan) -> Iterator[str]:
    """The lines of the plan, none wider than a usual window."""
    for line in _report(plan):
        yield from _wrapped(line)


def _wrapped(line: str) -> list[str]:
    """A long line goes on below its last column."""
    if len(line) <= _COLUMNS:
        return [line]
    column = max((match.end() for match in re.finditer(r"\s{2,}", line[:_LAST_COLUMN])), default=0)
    return wrap(line, _COLUMNS, subsequent_indent=" " * column, replace_whitespace=False, break_on_hyphens=False)


def _report(plan: Plan) -> Iterator[str]:
    yield from _title(plan)
    for block in (_state, _request, _ledger, _capacity, _limits, _roofline, _workload, _levers):
        lines = list(block(plan))
        if lines:
            yield ""
            yield from lines
    said = [*(f"warning: {text}" for text in plan.warnings), *(f"note: {text}" for text in (*plan.rules, *plan.notes))]
    if said:
        yield ""
        yield from said


def _title(plan: Plan) -> Iterator[str]:
    many = "devices" if plan.devices > 1 else "a device"
    where = plan.device.name if plan.device else f"{many} of {size(plan.memory_bytes)}" if plan.memory_bytes else many
    if plan.devices > 1:
        where = f"{plan.devices} {'x ' if plan.device else ''}{where} (tp {plan.tp}, pp {plan.pp}, dp {plan.dp})"
    size_text = ""
    if plan.weights.total_parameters:
        active = plan.weights.active_parameters
        of_them = f", {parameters(active)} active" if active and active != plan.weights.total_parameters else ""
        size_text = f"{parameters(plan.weights.total_parameters)} parameters{of_them}; "
    yield f"{plan.model} on {where}, charged as by {plan.engine}"
    yield f"{_INDENT}{size_text}{plan.state.attention_mode}, keys and values in {plan.state.kv_dtype}"


def _state(plan: Plan) -> Iterator[str]:
    state = plan.state
    yield f"STATE     of the whole model, shares at {plan.context:,} tokens"
    for group in state.groups:
        share = f"{group.share_at_context:>6.1%}"
        yield f"{_INDENT}{layers(group.layers):<10} {_law(group):<18} {_figure(group):<22} {share}  {group.says}"
    yield (
        f"{_INDENT}grows by {size(state.bytes_per_token_growing)} per token ({state.bytes_per_token_growing:,} B)"
        + (
            f"; {size(state.bytes_per_token_windowed)} more until windows are full"
            if state.bytes_per_token_windowed
            else ""
        )
        + (
            f"; {size(state.fixed_bytes_per_sequence)} a sequence whatever its length"
            if state.fixed_bytes_per_sequence
            else ""
        )
    )


def _law(group: StateGroup) -> str:
    return f"{group.kind} {group.window_tokens:,}" if group.window_tokens else group.kind


def _figure(group: StateGroup) -> str:
    if group.bytes_per_token:
        return f"{size(group.bytes_per_token)} per token"
    return f"{size(group.bytes_per_sequence)} per sequence" if group.bytes_per_sequence else "nothing"


def _request(plan: Plan) -> Iterator[str]:
    state, where = plan.state, " a device" if plan.tp * plan.pp > 1 else ""
    windows = f" + {size(state.device_bytes_per_token_windowed)} per token up to the window" * bool(
        state.device_bytes_per_token_windowed
    )
    page = ""
    if plan.capacity:
        tokens = f" ({plan.capacity.block_tokens:,} tokens)" if plan.capacity.block_tokens else ""
        page = f", in blocks of {size(plan.capacity.page_bytes)}{tokens}"
        if plan.capacity.page_bytes != plan.capacity.block_bytes:
            page += f" out of slabs of {size(plan.capacity.block_bytes)}"
    yield (
        f"REQUEST   fixed {size(state.device_fixed_bytes_per_sequence)} + "
        f"{size(state.device_bytes_per_token_growing)} per token{windows}{where}{page}"
    )
    most = max(plan.sequence_bytes.values()) or 1
    for context, needed in plan.sequence_bytes.items():
        charged = plan.sequence_bytes_per_device[context]
        bar = _bar(needed / most)
        there = " on a device" if where else ""
        yield f"{_INDENT}{context:>11,} tokens  {size(needed):>11} needed {bar} {size(charged):>11} set aside{there}"


def _bar(share: float) -> str:
    eighths = round(share * _WIDTH * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_BARS[rest] if rest else "")).ljust(_WIDTH)[:_WIDTH]


def _ledger(plan: Plan) -> Iterator[str]:
    budget = plan.budget
    if budget is None:
        return
    yield f"LEDGER    {size(budget.total_bytes)} of one device ({budget.total_bytes:,} B)"
    lines = [("weights", budget.weights), *(("runtime", line) for line in budget.runtime), ("KV cache", budget.kv),
             ("headroom", budget.headroom)]  # fmt: skip
    for part, line in lines:
        label = part if part != "runtime" or line.label == "runtime" else f"  {line.label}"
        share = line.predicted_bytes / budget.total_bytes
        yield f"{_INDENT}{label:<32} {size(line.predicted_bytes):>10}  {share:>6.1%}  {line.basis}"
    if budget.missing_bytes:
        yield f"{_INDENT}{'missing':<32} {size(budget.missing_bytes):>10}          more is asked for than there is"
    yield f"{_INDENT}{'sum':<32} {size(sum(budget.by_label.values())):>10}  {1:>6.1%}  exactly the device"


def _capacity(plan: Plan) -> Iterator[str]:
    found = plan.capacity
    if found is None:
        return
    per = " on each device (all ranks of a replica hold the same sequences)" if plan.tp * plan.pp > 1 else ""
    unit = "blocks" if found.page_bytes == found.block_bytes else "slabs"
    of_length = f" in sequences of {found.tokens_context:,}" if len(plan.state.groups) > 1 else ""
    yield f"CAPACITY  {found.tokens:,} tokens{of_length}: {found.blocks:,} {unit} of {size(found.block_bytes)}{per}"
    for context, count in found.sequences.items():
        copies = f", {count * plan.dp:,} in all {plan.dp} replicas" if plan.dp > 1 else ""
        # never rounded up: 0.998 is not 1.00
        exactly = f"{floor(100 * found.concurrency[context]) / 100:.2f}{copies}"
        yield f"{_INDENT}{context:>11,} tokens  {count:>8,} {_sequences(count)} at once ({exactly})"
    made_for = f" (the model was made for {plan.context_length:,})" if plan.context_length else ""
    longest = "any length" if found.largest_context >= 2**40 else f"{found.largest_context:,} tokens"
    yield f"{_INDENT}largest context that fits: {longest}{made_for}"
    yield f"{_INDENT}{'fits' if found.fits else 'DOES NOT FIT'}: {found.margin}"


def _sequences(count: int) -> str:
    return "sequence" if count == 1 else "sequences"


def _limits(plan: Plan) -> Iterator[str]:
    found = plan.limits
    if found is None:
        return
    least = min(limit.sequences for limit in found.all)
    waits = f"; a step then waits for {found.step_bound}" if found.step_bound else ""
    yield f"LIMIT     {found.binding}, at {least:,} {_sequences(least)} of {found.context:,}{waits}"
    others = ", ".join(f"{x.resource} {x.sequences:,}" for x in found.all if x.resource != found.binding)
    yield f"{_INDENT}the next ones: {others}"
    if found.memory_from_tokens is not None:
        yield f"{_INDENT}memory limits from {found.memory_from_tokens:,} live tokens on"
    if found.memory_from_context is not None:
        yield f"{_INDENT}that is, when sequences average {found.memory_from_context:,} tokens or more"


def _roofline(plan: Plan) -> Iterator[str]:
    found = plan.roofline
    if found is None:
        return
    yield f"ROOFLINE  lower bounds at dense peak rates{', one replica' if plan.dp > 1 else ''}"
    yield (
        f"{_INDENT}decode  batch {found.batch:,} at {found.context:,}: {duration(found.decode_s)} a step, "
        f"{found.decode_bound}-bound; {found.tokens_per_s:,.0f} tokens/s "
        f"(reads {size(found.decode_weights_bytes)} weights + {size(found.decode_state_bytes)} state)"
    )
    yield f"{_INDENT}prefill {found.context:,} tokens: {duration(found.prefill_s)}, {found.prefill_bound}-bound"
    arithmetic = f"from batch {found.batch_arithmetic_bound:,} on" if found.batch_arithmetic_bound else "at no batch"
    yield (
        f"{_INDENT}state reads overtake weights from batch {found.batch_state_overtakes_weights:,} on; "
        f"arithmetic bounds decode {arithmetic}"
    )
    if found.dollars_per_million_tokens is not None:
        yield f"{_INDENT}${found.dollars_per_million_tokens:,.3f} per million output tokens at least"


def _workload(plan: Plan) -> Iterator[str]:
    found = plan.workload
    if found is None:
        return
    yield (
        f"WORKLOAD  {found.source}: {found.requests:,} sequences, mean {found.mean_tokens:,.0f}, "
        f"longest {found.max_tokens:,}, declared {found.declared_max_tokens:,}"
    )
    where = ", one device" if plan.tp * plan.pp > 1 else ""
    yield f"{_INDENT}all live at once they need {size(found.live_bytes)} (sum over the sequences{where})"
    yield from _holding(found.contiguous, f"{found.contiguous.blocks:,} runs of {found.declared_max_tokens:,}")
    partial = f"{found.paged.partial_blocks:,}" if found.paged.partial_blocks else "none"
    of = f" of {plan.capacity.block_tokens}" if plan.capacity and plan.capacity.block_tokens else ""
    yield from _holding(found.paged, f"{found.paged.blocks:,} paged blocks{of}, {partial} partial")


def _holding(held: Holding, what: str) -> Iterator[str]:
    verb = "reserved" if held.way == "contiguous" else "set aside"
    at_once = "" if held.sequences_at_once is None else f"; {held.sequences_at_once:,} at once in the KV cache"
    yield (
        f"{_INDENT}{held.way:<10} {size(held.set_aside_bytes)} {verb}, {size(held.useful_bytes)} useful "
        f"({held.useful_share:.1%}): {what}{at_once}"
    )
    causes = [("reserved", held.waste.reserved_bytes), ("internal", held.waste.internal_bytes),
              ("padding", held.waste.padding_bytes), ("external", held.waste.external_bytes)]  # fmt: skip
    yield f"{_INDENT}{'':<10} wasted: " + ", ".join(f"{name} {size(number)}" for name, number in causes)


def _levers(plan: Plan) -> Iterator[str]:
    if plan.levers:
        now = plan.sequence_bytes_per_device[plan.context]
        at_once = "" if plan.capacity is None else f", {plan.capacity.sequences[plan.context]:,} at once"
        yield f"LEVERS    now {size(now)} a sequence of {plan.context:,}{at_once}"
    for lever in plan.levers:
        parts = [size(lever.sequence_bytes)] if lever.sequence_bytes is not None else []
        parts += (
            [f"{lever.sequences:,} {'parked' if lever.name == 'host tier' else 'at once'}"]
            if lever.sequences is not None
            else []
        )
        parts += [duration(lever.seconds)] if lever.seconds is not None else []
        yield f"{_INDENT}{lever.name:<20} {', '.join(parts):<32} {lever.says}"
