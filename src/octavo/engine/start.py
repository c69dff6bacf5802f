"""From what was asked to an engine, with what only costs time at start out of the way.

Importing torch and Transformers and loading a model make a million objects that all stay: the collector of
cycles would look at them over and over and find nothing, a sixth of the time. It rests meanwhile. While
Python imports, another thread checks that the default model's files are whole. How long idle threads spin is
said before torch comes, since that is when its runtime asks. Knows no model.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octavo.config import Config
from octavo.models.embedded import is_cached

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.server.host import Host

SPINS = "20000"
"""Half a millisecond or so: longer than the Python between two calls of a step, far shorter than a slice of a core."""
Progress = Callable[[str, float], None]


def start_engine(config: Config, progress: Progress | None = None, host: Host | None = None) -> Engine:
    """Import what is needed, load the model, in the host's thread where there is one, and build the engine.

    Raises `ConfigError` or `ModelError`.
    """
    with collector_resting(), ThreadPoolExecutor(1, "octavo-check") as beside:
        checked = beside.submit(is_cached) if config.model.model is None else None
        spin_briefly()
        from octavo.engine.build import build_engine

        whole = None if checked is None else checked.result
        build = functools.partial(build_engine, config, progress, whole)
        return build() if host is None else host.call(build)


def spin_briefly() -> None:
    """Let idle threads of GCC's OpenMP runtime sleep soon, where neither the user nor an imported torch has decided.

    By default they spin for milliseconds, on a machine with other work in the time of those who compute.
    """
    if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS


@contextmanager
def collector_resting() -> Iterator[None]:
    """Without collections of cycles but those asked for; afterwards as before."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
