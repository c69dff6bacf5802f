"""A plan as one HTML file with charts: no script, no font, no picture from elsewhere.

Owns the page's order and words. Every figure comes from the plan; everything from outside is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib import resources

from octavo.planner.charts import columns, curve, parts_bar, stacked_rows
from octavo.planner.report import report
from octavo.planner.values import Holding, Plan
from octavo.planner.wording import duration, layers, size


@cache
def _style() -> str:
    return resources.files("octavo.planner").joinpath("data", "page.css").read_text("utf-8")


def page(plan: Plan) -> str:
    """The whole file."""
    title = f"{plan.model}: what fits"
    body = "".join(
        (_head(plan), _warnings(plan), _cards(plan), _state(plan), _request(plan), _ledger(plan), _capacity(plan),
         _roofline(plan), _workload(plan), _levers(plan), _text(plan))
    )  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_style()}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def _head(plan: Plan) -> str:
    where = plan.device.name if plan.device else "a device of no name"
    many = f"{plan.devices} x " if plan.devices > 1 else ""
    how = f", tp {plan.tp}, pp {plan.pp}, dp {plan.dp}" if plan.devices > 1 else ""
    about = f"{many}{where}{how}; charged as by {plan.engine}; {plan.state.attention_mode} in {plan.state.kv_dtype}"
    return f'<h1>{escape(plan.model)}</h1><p class="soft">{escape(about)}</p>'


def _warnings(plan: Plan) -> str:
    return "".join(f'<p class="warn">{escape(text)}</p>' for text in plan.warnings)


def _cards(plan: Plan) -> str:
    state = plan.state
    cards = [(size(state.bytes_per_token_growing), "per token, as long as the sequence grows")]
    if state.bytes_per_token_windowed:
        cards.append((size(state.bytes_per_token_windowed), "more per token until windows are full"))
    if state.fixed_bytes_per_sequence:
        cards.append((size(state.fixed_bytes_per_sequence), "per sequence, whatever its length"))
    cards.append((size(plan.sequence_bytes[plan.context]), f"needed by one sequence of {plan.context:,}"))
    if plan.capacity is not None:
        at_once = plan.capacity.sequences[plan.context]
        cards.append((f"{at_once:,}", f"sequences of {plan.context:,} at once on a device"))
        verdict = "fits" if plan.capacity.fits else "does not fit"
        cards.append((verdict, plan.capacity.margin))
    if plan.limits is not None:
        cards.append(
            (
                plan.limits.binding,
                f"limits first; memory from {plan.capacity.tokens if plan.capacity else 0:,} live tokens on",
            )
        )
    return (
        '<div class="cards">'
        + "".join(f'<div class="card"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in cards)
        + "</div>"
    )


def _state(plan: Plan) -> str:
    rows = [
        (
            layers(group.layers),
            f"{group.kind} {group.window_tokens:,}" if group.window_tokens else group.kind,
            size(group.bytes_per_token or group.bytes_per_sequence)
            + (" a token" if group.bytes_per_token else " a sequence"),
            size(group.bytes_at_context),
            f"{group.share_at_context:.1%}",
            group.says,
        )
        for group in plan.state.groups
    ]
    kept = [(f"{layers(g.layers)}, {g.kind}", g.bytes_at_context) for g in plan.state.groups if g.bytes_at_context]
    chart = parts_bar(kept, size, f"state of one sequence of {plan.context:,} tokens") if kept else ""
    heads = ("layers", "law", "bytes", f"at {plan.context:,}", "share", "keeps")
    return _section("State by layer group, whole model", chart + _table(heads, rows, numbers=(2, 3, 4)))


def _request(plan: Plan) -> str:
    where = " on one device" if plan.tp * plan.pp > 1 else ""
    lines = [
        ("needed", [(n, needed) for n, needed, _ in plan.curve]),
        ("set aside, in whole blocks", [(n, charged) for n, _, charged in plan.curve]),
    ]
    drawn = curve(lines, size, "bytes of one sequence by its length", "tokens")
    rows = [
        (f"{n:,}", size(needed), size(plan.sequence_bytes_per_device[n])) for n, needed in plan.sequence_bytes.items()
    ]
    return _section(
        f"One request{where}: fixed + slope + page",
        drawn + _table(("tokens", "needed, whole model", "set aside, one device"), rows, numbers=(0, 1, 2)),
    )


def _ledger(plan: Plan) -> str:
    budget = plan.budget
    if budget is None:
        return ""
    parts = [("weights", budget.weights.predicted_bytes), ("runtime", budget.runtime_bytes),
             ("KV cache", budget.kv.predicted_bytes), ("headroom", budget.headroom.predicted_bytes)]  # fmt: skip
    runtime = [(f"runtime: {line.label}" if line.label != "runtime" else "runtime", line) for line in budget.runtime]
    lines = [("weights", budget.weights), *runtime,
             ("KV cache", budget.kv), ("headroom", budget.headroom)]  # fmt: skip
    rows = [(label, size(line.predicted_bytes), f"{line.predicted_bytes:,}", line.basis) for label, line in lines]
    if budget.missing_bytes:
        rows.append(
            ("missing", size(budget.missing_bytes), f"{budget.missing_bytes:,}", "more is asked for than there is")
        )
    rows.append(("sum", size(budget.total_bytes), f"{sum(budget.by_label.values()):,}", "exactly the device"))
    chart = parts_bar(parts, size, "memory of one device")
    return _section("Ledger of one device", chart + _table(("", "", "bytes", "from"), rows, numbers=(1, 2), why=3))


def _capacity(plan: Plan) -> str:
    found = plan.capacity
    if found is None:
        return ""
    chart = columns([(f"{n:,}", count) for n, count in found.sequences.items()], "sequences at once by their length")
    longest = "any" if found.largest_context >= 2**40 else f"{found.largest_context:,}"
    facts = (
        f"<p>{found.tokens:,} tokens in sequences of {found.tokens_context:,}; {found.blocks:,} blocks of "
        f"{escape(size(found.block_bytes))}; largest context that fits: {longest}.</p><p>{escape(found.margin)}</p>"
    )
    return _section("Capacity of one device: sequences at once, by length (logarithmic)", chart + facts)


def _roofline(plan: Plan) -> str:
    found = plan.roofline
    if found is None:
        return ""
    arithmetic = f"from batch {found.batch_arithmetic_bound:,} on" if found.batch_arithmetic_bound else "at no batch"
    turns = (
        f"state reads overtake weights from batch {found.batch_state_overtakes_weights:,} on; "
        f"arithmetic bounds decode {arithmetic}"
    )
    rows = [
        (f"decode, batch {found.batch:,} at {found.context:,}", duration(found.decode_s), found.decode_bound,
         f"reads {size(found.decode_weights_bytes)} of weights and {size(found.decode_state_bytes)} of state"),
        (f"prefill of {found.context:,}", duration(found.prefill_s), found.prefill_bound, ""),
        ("tokens per second", f"{found.tokens_per_s:,.0f}", "", turns),
    ]  # fmt: skip
    if found.dollars_per_million_tokens is not None:
        rows.append(("dollars per million tokens", f"{found.dollars_per_million_tokens:,.3f}", "", "at least"))
    return _section(
        "Roofline: lower bounds at dense peak rates", _table(("", "", "bound by", ""), rows, numbers=(1,), why=3)
    )


def _workload(plan: Plan) -> str:
    found = plan.workload
    if found is None:
        return ""
    rows = [(held.way, _parts(held)) for held in (found.contiguous, found.paged)]
    chart = stacked_rows(rows, size, "bytes set aside, by what becomes of them")
    about = (
        f"<p>{found.requests:,} sequences of {escape(found.source)}, "
        f"mean {found.mean_tokens:,.0f}, longest {found.max_tokens:,}; "
        f"all live at once they need {escape(size(found.live_bytes))}.</p>"
    )
    table = _table(
        ("", "set aside", "useful", "share", "at once"),
        [(h.way, size(h.set_aside_bytes), size(h.useful_bytes), f"{h.useful_share:.1%}",
          "" if h.sequences_at_once is None else f"{h.sequences_at_once:,}") for h in (found.contiguous, found.paged)],
        numbers=(1, 2, 3, 4),
    )  # fmt: skip
    return _section(f"Paged against a reservation of {found.declared_max_tokens:,} each", about + chart + table)


def _parts(held: Holding) -> Sequence[tuple[str, float]]:
    waste = held.waste
    return (("useful", held.useful_bytes), ("reserved", waste.reserved_bytes), ("internal", waste.internal_bytes),
            ("padding", waste.padding_bytes))  # fmt: skip


def _levers(plan: Plan) -> str:
    rows = [
        (
            lever.name,
            "" if lever.sequence_bytes is None else size(lever.sequence_bytes),
            "" if lever.sequences is None else f"{lever.sequences:,}",
            "" if lever.seconds is None else duration(lever.seconds),
            lever.says,
        )
        for lever in plan.levers
    ]
    return (
        _section(
            "Levers: what each would change",
            _table(("", "a sequence", "at once", "moves in", ""), rows, numbers=(1, 2, 3), why=4),
        )
        if rows
        else ""
    )


def _text(plan: Plan) -> str:
    lines = escape("\n".join(report(plan)))
    return f"<section><details><summary>As text</summary><pre>{lines}</pre></details></section>"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), why: int = -1) -> str:
    def cell(tag: str, column: int, text: str) -> str:
        kind = ' class="n"' if column in numbers else ' class="why"' if column == why and tag == "td" else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(heads))
    lines = "".join(f"<tr>{''.join(cell('td', i, text) for i, text in enumerate(row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
