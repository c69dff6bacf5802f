"""Looks, from time to time, for blocks that other processes have left in a directory that this one shares with them.

Owns a thread and what it has found and not yet told; which slot a block gets is the core's, which learns of it with
the mover's notices. A look takes as long as the directory is large: the longer it took, the longer the next one
waits. Invariant: the engine's thread never waits for a look, and none begins after `close`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

from octavo.memory.transfers import Appeared

LOOK_S = 1.0
"""Between two looks, at least."""
_SHARE = 0.05
"""Of the time that looking may take."""
_MOST = 4096
"""Blocks of a group that are told of at a time, and kept in mind until then: those used last."""


@runtime_checkable
class SharedStore(Protocol):
    """A store that other processes write to as well."""

    def appeared(self) -> list[bytes]:
        """Keys that others have brought there since the last call, the oldest use first. Passes no `OSError`."""
        ...


class Looker:
    """`stores` by group; those that nobody else writes to are left alone."""

    def __init__(self, stores: Sequence[object], look_s: float = LOOK_S) -> None:
        self._stores = [(group, store) for group, store in enumerate(stores) if isinstance(store, SharedStore)]
        self._look_s = look_s
        self._lock = threading.Lock()
        self._found: dict[int, list[bytes]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="octavo-disk-look", daemon=True)
        if self._stores:
            self._thread.start()

    def take(self) -> list[Appeared]:
        """What has appeared since the last call."""
        with self._lock:
            found, self._found = self._found, {}
        return [Appeared(group, tuple(keys)) for group, keys in sorted(found.items())]

    def close(self) -> None:
        """After the look under way."""
        self._closing.set()
        if self._stores:
            self._thread.join()

    def _serve(self) -> None:
        wait = self._look_s
        while not self._closing.wait(wait):
            begun = time.monotonic()
            for group, store in self._stores:
                with suppress(OSError):
                    keys = store.appeared()
                    with self._lock:
                        if keys:
                            self._found[group] = [*self._found.get(group, []), *keys][-_MOST:]
            wait = max(self._look_s, (time.monotonic() - begun) / _SHARE)
