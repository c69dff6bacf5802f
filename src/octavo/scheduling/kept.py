"""What is kept for reuse, as those ask for it who run the engine: forget all, pin a prefix, count what went.

Owns the pins, and what of the evictions has been told. Blocks and tiers are `memory`'s.
"""

from __future__ import annotations

from octavo.errors import RequestError
from octavo.memory.cache import KVCache
from octavo.memory.keys import Chain
from octavo.memory.pins import Pin, Pins
from octavo.memory.snapshots import Snapshots
from octavo.memory.tiering import Tiering
from octavo.memory.values import Int32

PINNED_SHARE = 0.25
"""Of the positions that the device holds, how many may be pinned."""


class Kept:
    def __init__(self, cache: KVCache, tiering: Tiering | None, snapshots: Snapshots) -> None:
        self._cache = cache
        self._tiering = tiering
        self._snapshots = snapshots
        self.pins: Pins | None = None
        """None without reuse."""
        self._told = 0
        self._told_below = (0, 0)
        if cache.sharing is not None:
            shelves = [cache.sharing.shelf]
            if tiering is not None and tiering.host.shelf is not None:
                shelves.append(tiering.host.shelf)
            most = int(PINNED_SHARE * cache.max_tokens_per_sequence())
            self.pins = Pins(cache.sharing.directory, shelves, most)

    def pin(self, token_ids: Int32, salt: str, now: float, ttl_s: float) -> Pin:
        """What is kept of this text goes last for `ttl_s` seconds. Raises `RequestError`."""
        sharing = self._cache.sharing
        if sharing is None or self.pins is None:
            remedy = "cannot be pinned, since nothing is kept here; start the engine with reuse=prefix"
            raise RequestError("prompt", f"{len(token_ids)} tokens", remedy)
        if not 0 < ttl_s < float("inf"):
            raise RequestError("ttl", ttl_s, "must be a positive number of seconds")
        self.pins.expire(now)
        chain = Chain(sharing.directory.space, salt)
        chain.extend(token_ids)
        tiers = 1 if self._tiering is None else self._tiering.reach
        match = sharing.match(chain, token_ids, len(token_ids), tiers)
        return self.pins.pin(match.path, now + ttl_s, salt)

    def unpin(self, name: str) -> bool:
        """False when there is no such pin, or no longer."""
        return self.pins is not None and self.pins.unpin(name)

    def live_pins(self, now: float) -> list[Pin]:
        """In the order in which they were made."""
        self.expire_pins(now)
        return [] if self.pins is None else self.pins.live()

    def expire_pins(self, now: float) -> None:
        if self.pins is not None:
            self.pins.expire(now)

    def next_end_of_pins(self) -> float:
        """When the first pin ends; infinite where there is none."""
        return float("inf") if self.pins is None else self.pins.next_end

    def forget_all(self) -> list[int]:
        """Nothing computed so far is found again, pinned or not. Blocks of each group that this freed at once."""
        if self._cache.sharing is None:
            return [0] * len(self._cache.tables)
        if self.pins is not None:
            self.pins.clear()
        freed = self._cache.sharing.forget_all()
        if self._tiering is not None:
            self._tiering.forget_all()
        self._snapshots.forget_all()
        return freed

    def evictions_untold(self) -> int:
        """Kept blocks given up on the device since this was last asked."""
        if self._cache.sharing is None:
            return 0
        before, self._told = self._told, self._cache.sharing.shelf.evicted_blocks
        return self._told - before

    def evictions_below_untold(self) -> tuple[int, int]:
        """The same of the host and of the disk."""
        if self._tiering is None:
            return 0, 0
        before, self._told_below = self._told_below, self._tiering.evicted_blocks
        host, disk = (now - then for now, then in zip(self._told_below, before, strict=True))
        return host, disk
