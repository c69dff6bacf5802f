"""What a batch shows while it runs, and the line at its end. Everything goes to stderr.

Owns the counts: a fold over the engine's events and over the rows that are written. On a terminal a bar
follows them; elsewhere a plain line comes now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from octavo.cli.batch_output import is_error
from octavo.scheduling.events import Event, StepPlanned, StepTokens

PLAIN_EVERY_S = 15.0


@dataclass(slots=True)
class Counts:
    """`clock` gives seconds."""

    rows: int
    written: int = 0
    errors: int = 0
    tokens: int = 0
    running: int = 0
    slabs: int = 1
    free_slabs: int = 1
    least_free: int | None = None
    clock: Callable[[], float] = time.monotonic
    begun_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun_s = self.clock()

    def observe(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, StepTokens):
                self.tokens += len(event.tokens)
            elif isinstance(event, StepPlanned):
                self.running, self.free_slabs = event.running, event.free_slabs
                self.least_free = min(
                    event.free_slabs, event.free_slabs if self.least_free is None else self.least_free
                )

    def note(self, row: dict[str, Any]) -> None:
        self.written += 1
        self.errors += is_error(row)

    @property
    def seconds(self) -> float:
        return self.clock() - self.begun_s

    @property
    def pace(self) -> str:
        return f"{self.tokens / self.seconds:,.1f} tokens/s" if self.seconds > 0 else "0 tokens/s"

    @property
    def kv_use(self) -> str:
        return f"KV {1 - self.free_slabs / self.slabs:.0%}"

    def line(self) -> str:
        return f"{self.written:,}/{self.rows:,} rows, {self.running} running, {self.pace}, {self.kv_use}"

    def closing(self, earlier: int) -> str:
        """What the run came to. `earlier` rows were there when it began."""
        here = self.written - earlier
        peak = 1 - (self.slabs if self.least_free is None else self.least_free) / self.slabs
        parts = [
            f"{self.written:,} of {self.rows:,} rows",
            *([f"{earlier:,} of them from before"] if earlier else []),
            f"{self.errors:,} errors",
            *([f"{self.tokens:,} tokens in {self.seconds:.1f} s", self.pace, f"peak KV {peak:.0%}"] if here else []),
        ]
        return ", ".join(parts)


class _Now(ProgressColumn):
    """Pace and KV use, read whenever the bar is drawn."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def render(self, task: Task) -> Text:
        counts = self._counts
        return Text(f"{counts.pace}, {counts.kv_use}")


@contextmanager
def shown(counts: Counts, console: Console, *, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields what is to be called with each row that was written."""
    if quiet:
        yield counts.note
    elif console.is_terminal:
        with _bar(counts, console) as note:
            yield note
    else:
        yield _plain(counts, console)


@contextmanager
def _bar(counts: Counts, console: Console) -> Iterator[Callable[[dict[str, Any]], None]]:
    columns = (
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} rows"), BarColumn(bar_width=None), _Now(counts),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("rows", total=counts.rows, completed=counts.written)

        def note(row: dict[str, Any]) -> None:
            counts.note(row)
            bar.update(task, completed=counts.written)

        yield note


def _plain(counts: Counts, console: Console) -> Callable[[dict[str, Any]], None]:
    last_s = counts.clock()

    def note(row: dict[str, Any]) -> None:
        nonlocal last_s
        counts.note(row)
        if counts.clock() - last_s >= PLAIN_EVERY_S:
            last_s = counts.clock()
            console.print(counts.line(), markup=False, soft_wrap=True)

    return note
