"""The start table: what was decided and why, and the ledger with predicted beside measured.

Owns the layout for a terminal of 80 columns or more; every figure and reason comes from the
`Deployment` and its `Ledger`. Prints to stderr: stdout belongs to the text.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from octavo.deployment import Deployment, Row
from octavo.planner.ledger import Ledger, Line

WIDTH = 100
"""Columns where nobody says how many there are."""
_LABEL_WIDTH = 22
_LEDGER = "ledger: "


def stderr_console() -> Console:
    """Follows COLUMNS and the terminal; without either, `WIDTH` columns."""
    probe = Console(stderr=True, highlight=False)
    if probe.is_terminal or "COLUMNS" in os.environ:
        return probe
    return Console(stderr=True, highlight=False, width=WIDTH, file=sys.stderr)


def print_start(
    console: Console,
    deployment: Deployment,
    ledger: Ledger,
    *,
    title: str,
    more: Sequence[Row] = (),
    notes: Sequence[str] = (),
) -> None:
    """The whole table; `more` are rows that a command decided itself, `notes` what loading found."""
    rows = deployment.rows()
    first_ledger = next(i for i, row in enumerate(rows) if row.name.startswith(_LEDGER))
    console.print(f"[bold]{escape(title)}[/bold]")
    console.print(_decided((*rows[:first_ledger], *more)))
    console.print()
    console.print(ledger_table(ledger))
    console.print()
    console.print(_decided(row for row in rows[first_ledger:] if not row.name.startswith(_LEDGER)))
    console.print()
    for warning in deployment.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}")
    for note in notes:
        console.print(f"[dim]note: {escape(note)}[/dim]")
    console.print()


def ledger_table(ledger: Ledger, *, why: bool = True) -> Table:
    """`total = weights + runtime + KV + headroom`, in exact bytes. A blank means that nothing was measured."""
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("memory, bytes")
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    if why:
        table.add_column("from", ratio=1, style="dim", overflow="fold")
    for label, predicted, measured, basis in _ledger_rows(ledger):
        cells = (_hanging(label), f"{predicted:,}", "" if measured is None else f"{measured:,}")
        table.add_row(*cells, *((escape(basis),) if why else ()), style="bold" if label == "total" else None)
    return table


def _ledger_rows(ledger: Ledger) -> Iterator[tuple[str, int, int | None, str]]:
    """(label, predicted, measured, basis); a sum counts as measured when all of its lines are."""

    def summed(lines: Sequence[Line]) -> int | None:
        sizes = [line.measured_bytes for line in lines]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def row(line: Line, indent: str = "") -> tuple[str, int, int | None, str]:
        return indent + line.label, line.predicted_bytes, line.measured_bytes, line.basis

    yield row(ledger.weights)
    yield "runtime", ledger.runtime_bytes, summed(ledger.runtime), "the sum of"
    for line in ledger.runtime:
        yield row(line, "  ")
    yield row(ledger.kv)
    yield row(ledger.headroom)
    total = summed([line for line in ledger.lines if line is not ledger.headroom])
    yield "total", ledger.total_bytes, total, "weights + runtime + KV + headroom, summed exactly"


def _hanging(label: str) -> str:
    """Wrapped, with the indent of its first line kept."""
    indent = label[: len(label) - len(label.lstrip())]
    return textwrap.fill(label, _LABEL_WIDTH, subsequent_indent=indent)


def _decided(rows: Iterable[Row]) -> Table:
    table = Table(box=None, show_header=False, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("what", min_width=22, no_wrap=True)
    table.add_column("decided", max_width=34, overflow="fold")
    table.add_column("why", ratio=1, style="dim", overflow="fold")
    for row in rows:
        table.add_row(escape(row.name), escape(row.value), escape(row.reason))
    return table
