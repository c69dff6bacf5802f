"""Starts an engine for a command: progress on a terminal while it loads, and interpreters kept quiet.

Owns what people see between pressing return and the start table. Decides nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo.config import Config
from octavo.engine.early import begin_early
from octavo.engine.start import start_engine as engine_of

if TYPE_CHECKING:
    from octavo.engine.early import Early
    from octavo.engine.engine import Engine
    from octavo.server.host import Host

Tell = Callable[[str, float], None]


def start_engine(
    asked: Mapping[str, Any],
    *,
    quiet: bool,
    host: Host | None = None,
    early: Early | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> Engine:
    """Check what was asked, which takes no time, then load, in the host's thread where there is one.

    `early`: what has been begun already. `meanwhile` is called while the host's thread loads. Raises `ConfigError` or
    `ModelError`.
    """
    config = Config.from_kwargs(**asked)
    early = early or begin_early(embedded=config.model.model is None)
    with _progress(shown=not quiet and sys.stderr.isatty()) as tell:
        return engine_of(config, tell, host, early=early, meanwhile=meanwhile)


@contextmanager
def _progress(*, shown: bool) -> Iterator[Tell]:
    if not shown:
        yield lambda stage, fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda stage, fraction: bar.update(task, description=stage, completed=fraction)
