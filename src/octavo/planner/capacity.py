"""What fits into the KV bytes of one device, in whole blocks, and by what margin.

Owns the words for fitting: a pool of exactly one request is no fit, since a running request takes a
block before it gives one back; the margin is always said.
"""

from __future__ import annotations

from octavo.planner.charging import AnyPaging
from octavo.planner.values import Capacity


def capacity_of(paging: AnyPaging, kv_bytes: int, context: int, contexts: tuple[int, ...]) -> Capacity:
    needed = {n: paging.units_for(n) for n in contexts}
    units = paging.units(kv_bytes)
    largest = paging.largest_context(kv_bytes)
    fits = paging.usable_units(kv_bytes) > needed[context]
    return Capacity(
        kv_bytes=kv_bytes,
        block_bytes=paging.unit_bytes,
        page_bytes=paging.page_bytes,
        block_tokens=paging.block_tokens,
        blocks=units,
        usable_blocks=paging.usable_units(kv_bytes),
        tokens=paging.tokens(kv_bytes, context),
        tokens_context=context,
        sequences={n: paging.sequences(kv_bytes, n) for n in contexts},
        concurrency={n: paging.concurrency(kv_bytes, n) for n in contexts},
        blocks_per_sequence=needed,
        largest_context=largest,
        needed_context=context,
        fits=fits,
        margin=_margin(paging, kv_bytes, context, largest),
    )


def _margin(paging: AnyPaging, kv_bytes: int, context: int, largest: int) -> str:
    needed, usable = paging.units_for(context), paging.usable_units(kv_bytes)
    spare = usable - needed
    units = "blocks" if paging.page_bytes == paging.unit_bytes else "slabs"
    if spare < 0:
        missing = -spare * paging.unit_bytes
        return (
            f"one sequence of {context:,} needs {needed:,} {units} and {usable:,} are there: "
            f"short of {-spare:,} ({missing:,} B); the longest that fits is {largest:,}"
        )
    if spare == 0:
        return f"one sequence of {context:,} takes every one of {usable:,} {units}: it would start and could not go on"
    share = 100 * spare / needed
    return (
        f"one sequence of {context:,} takes {needed:,} of {usable:,} {units}; {spare:,} to spare ({share:,.0f}% of it)"
    )
