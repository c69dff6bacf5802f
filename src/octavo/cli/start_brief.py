"""The start table in short: what a person who chats or runs a batch wants to know before the first answer.

Owns which rows those are. Every figure and reason comes from the `Deployment`.
"""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from octavo.engine.engine import Engine

ROWS = ("device", "geometry", "KV cache", "blocks", "max_model_len")


def print_brief(console: Console, engine: Engine, title: str) -> None:
    """Some lines of the start table, then what loading found worth saying."""
    console.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
    if engine.deployment is not None:
        table = Table(box=None, show_header=False, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("what", no_wrap=True)
        table.add_column("decided", max_width=34, overflow="fold")
        table.add_column("why", ratio=1, style="dim", overflow="fold")
        for row in engine.deployment.rows():
            if row.name in ROWS:
                table.add_row(escape(row.name), escape(row.value), escape(row.reason))
        console.print(table)
        for warning in engine.deployment.warnings:
            console.print(f"[yellow]warning:[/yellow] {escape(warning)}")
    for note in engine.notes:
        console.print(f"[dim]note: {escape(note)}[/dim]")
