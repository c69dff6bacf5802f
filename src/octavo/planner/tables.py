"""The table of accelerators as text and JSON, with what is unverified marked as such."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from octavo.planner.accelerators import Accelerator
from octavo.planner.wording import digits


def device_rows(rows: Iterable[Accelerator]) -> list[dict[str, Any]]:
    return [
        {
            "name": row.name,
            "vendor": row.vendor,
            "kind": row.kind,
            "memory_bytes": row.memory_bytes,
            "bandwidth_bytes_per_s": row.bandwidth_bytes_per_s,
            "dense_flops_per_s": dict(row.flops_per_s),
            "host_bytes_per_s": row.host_bytes_per_s,
            "verified": row.verified,
            "source": row.source,
            "second_source": row.second_source,
            "note": row.note,
        }
        for row in rows
    ]


def device_table(rows: Sequence[Accelerator]) -> Iterator[str]:
    cells = [("name", "GiB", "GB/s", "bf16", "fp8", "host GB/s", "sources"), *(_cells(row) for row in rows)]
    yield from aligned(cells, left=(0, 6))
    yield "dense TFLOP/s, never sparse; GiB as the runtime reports it; unverified: no second source agrees yet"


def _cells(row: Accelerator) -> tuple[str, ...]:
    rate = {name: digits(value / 1e12) for name, value in row.flops_per_s.items()}
    sources = row.source if row.verified else f"unverified: {row.source}"
    return (
        row.name,
        digits(row.memory_bytes / 2**30),
        digits(row.bandwidth_bytes_per_s / 1e9),
        rate["bf16"],
        rate.get("fp8", "-"),
        digits(row.host_bytes_per_s / 1e9),
        sources,
    )


def aligned(cells: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Iterator[str]:
    """Columns as wide as their widest cell; those in `left` begin, all others end, at one place."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        parts = [
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(parts).rstrip()
