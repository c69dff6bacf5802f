"""From what was asked to an engine, with what only costs time at start out of the way.

Importing torch and Transformers and loading a model make a million objects that all stay: the collector of
cycles would look at them over and over and find nothing, a sixth of the time. It rests meanwhile, and those who
ask for a collection while the model loads need not wait for it to look at what was imported. What holds no
interpreter lock is begun before the imports (see `early`), what nobody needs is not imported (`lean_imports`).
Knows no model.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from octavo.config import Config
from octavo.engine.early import SPINS, Early, begin_early, spin_briefly
from octavo.models.lean_imports import lean_imports

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.server.host import Host

__all__ = ["SPINS", "begin_early", "collector_resting", "spin_briefly", "start_engine"]

Progress = Callable[[str, float], None]


def start_engine(
    config: Config,
    progress: Progress | None = None,
    host: Host | None = None,
    *,
    early: Early | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> Engine:
    """Import what is needed, load the model, in the host's thread where there is one, and build the engine.

    `early`: what has been begun already, in a process of octavo's own, where torch and Transformers need not be
    whole for others. `meanwhile` is called while the host's thread builds. Raises `ConfigError` or `ModelError`.
    """
    own_process = early is not None
    early = early or begin_early(embedded=config.model.model is None)
    with collector_resting():
        import octavo.engine.engine  # noqa: F401 - numpy and octavo's own, while torch's libraries load

        early.libraries.result()
        with lean_imports() if own_process else nullcontext():  # the model's own module comes while it loads
            from octavo.engine.build import build_engine

            with imports_set_aside():
                whole = None if early.whole is None else early.whole.result
                build = functools.partial(build_engine, config, progress, whole, keeps_verdicts=True)
                if host is None:
                    return build()
                built = host.begin(build)
                if meanwhile is not None:
                    meanwhile()
                return built.result()


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


@contextmanager
def imports_set_aside() -> Iterator[None]:
    """What exists now is not looked at by collections until afterwards, unless somebody set objects aside before."""
    ours = not gc.get_freeze_count()
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()
