"""State that is moved rather than lost: the tiers below the device, as the scheduler sees them.

    saving    cached blocks go down before their room is taken      (extends prefix reuse)
    loading   a sequence starts from what lies below                (extends prefix reuse)
    parking   a running sequence goes down as it is, and comes back (preemption by offload)

The first two and the third are switched apart: by the placement, and by the preemption action. Owns nothing itself:
each part owns its copies. Talks to a mover in values, so that the same decisions come out beside any of them.

Invariant: a slot is free in no tier while a copy touches it; nothing is found before every byte of it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.errors import ConfigError
from octavo.memory.adoption import first_shared, lower_blocks
from octavo.memory.cache import KVCache
from octavo.memory.errands import Errands
from octavo.memory.keys import Chain, KeySpace
from octavo.memory.layout import BOUNDLESS, Layout
from octavo.memory.loading import Arrivals, Loading, Wanted
from octavo.memory.nodes import NO_SLOT
from octavo.memory.parking import Parking
from octavo.memory.prefix import Match
from octavo.memory.saving import Saving
from octavo.memory.tiers import HOST_TIER, DiskTier, HostTier
from octavo.memory.transfers import Appeared, Notice, Order
from octavo.memory.values import TIERS, Int32
from octavo.policy.eviction import Eviction, LeastRecentlyUsed
from octavo.policy.placement import Bargain, Placement, WriteBack
from octavo.policy.rates import Rates


class Tiering:
    def __init__(
        self,
        cache: KVCache,
        host: HostTier,
        disk: DiskTier | None,
        placement: Placement,
        *,
        rates: Rates | None = None,
        timeout_s: float | None = 30.0,
    ) -> None:
        if cache.pool.contiguous:
            raise ConfigError("host_memory", "contiguous", "runs are not moved between tiers; use paged allocation")
        self.cache = cache
        self.host = host
        self.disk = disk
        self.placement = placement
        self.rates = rates or Rates()
        self.errands = Errands(self.rates, timeout_s)
        self.loading = Loading(cache, host, disk, self.errands)
        self.parking = Parking(cache, host, self.loading, self.errands, publishes=placement.saves)
        self.saving = (
            None if cache.sharing is None else Saving(cache, cache.sharing, host, disk, placement, self.errands)
        )
        cache.copied, cache.arriving = self.held, self.loading
        self._erase: list[tuple[int, Sequence[int]]] = []

    # -- with the mover -----------------------------------------------------------------------------

    def settle(self, notices: Sequence[Notice]) -> Arrivals:
        """Learn what became of copies, and what others have left on the disk. Returns whose blocks have all arrived,
        and whose will not."""
        self.errands.settle([notice for notice in notices if not isinstance(notice, Appeared)])
        for notice in notices:
            if isinstance(notice, Appeared) and self.disk is not None:
                self.disk.appear(notice.group, notice.keys)
        return self.loading.take_arrivals()

    def prepare(self) -> None:
        """Before a step is planned: copy ahead of need, but where somebody waits for room that such copies hold."""
        lacked, self.host.lacked = self.host.lacked, 0
        if self.saving is not None and not lacked:
            self.saving.ahead()

    def take_orders(self) -> list[Order]:
        """What the mover is to begin."""
        if self.saving is not None:
            self.saving.give_orders()
        return self.errands.take_orders()

    def take_cancels(self) -> list[int]:
        return self.errands.take_cancels()

    def take_erased(self) -> list[tuple[int, Sequence[int]]]:
        """(group, disk slots) whose records no later run may find. Before the orders that follow."""
        erased, self._erase = self._erase, []
        if self.saving is not None and self.saving.erase:
            erased += [(group, [slot]) for group, slot in self.saving.erase]
            self.saving.erase = []
        return erased

    @property
    def pending(self) -> bool:
        """Whether notices are to come."""
        return len(self.errands) > 0 or (self.saving is not None and self.saving.queued)

    @property
    def awaited(self) -> bool:
        """Whether notices are to come before a deadline."""
        return self.errands.awaited

    @property
    def frees_soon(self) -> bool:
        """Whether copies under way, none of them late, will free room on the device when they end."""
        return self.parking.frees_soon or (self.saving is not None and self.saving.frees_soon)

    @property
    def holds_room(self) -> bool:
        """Whether copies under way, be they late, hold room on the device."""
        return self.errands.under_way("arenas") or self.frees_soon

    @property
    def reach(self) -> int:
        """How many tiers can be read from now, the device included."""
        if not self.errands.answers("arenas"):
            return 1
        return 3 if self.disk is not None and self.errands.answers("disk") else 2

    @property
    def at_rest(self) -> bool:
        """Whether nothing is to be said to the mover."""
        saving = self.saving
        talks = saving is not None and (saving.queued or saving.erase)
        return not (talks or self.errands.asked or self._erase or self.host.lacked)

    @property
    def slack(self) -> int:
        """Blocks of the device that may be taken before the mover is to be told something; below 0: it is due now."""
        return self.cache.pool.available_slabs if self.saving is None else self.saving.slack

    @property
    def history(self) -> tuple[int, ...]:
        """Changes whenever a start from below could come to something else than before."""
        kept = 0 if self.cache.sharing is None else self.cache.sharing.directory.changes
        return kept, *self.errands.history

    # -- starting from what lies below ----------------------------------------------------------------

    def match(self, chain: Chain, tokens: Int32, limit: int) -> Match:
        """The longest start that can be had, from below where that is worth it; as `Sharing.match`."""
        sharing = self.cache.sharing
        assert sharing is not None
        here = sharing.match(chain, tokens, limit)
        if self.reach == 1:
            return here
        if self.disk is not None and self.reach > DISK_REACH:
            self._recall(chain, tokens)
        below = sharing.match(chain, tokens, limit, self.reach)
        if below.tokens <= here.tokens or any(node.coming for node in below.path):
            return below if below.tokens > here.tokens else here
        wanted = lower_blocks(self.cache, below)
        fits = self._staged_positions(wanted)
        if fits < below.tokens:
            below = sharing.match(chain, tokens, fits, self.reach)
            if below.tokens <= here.tokens:
                return here
            wanted = lower_blocks(self.cache, below)
        sizes = [self.cache.layout.groups[one.group].block_bytes for one in wanted]
        on_disk = [_is_on_disk(one) for one in wanted]
        bargain = Bargain(
            here.tokens, below.tokens, sum(sizes), sum(size for size, low in zip(sizes, on_disk, strict=True) if low)
        )
        return below if self.placement.worth_loading(bargain, self.rates) else here

    def _staged_positions(self, wanted: Sequence[Wanted]) -> int:
        """Of a start, how many positions can be brought up at once: what is on the disk is staged on the host."""
        staged = sorted(one.index for one in wanted if _is_on_disk(one))
        if not staged or self.cache.sharing is None:
            return BOUNDLESS
        room = self.host.room_after(sum(tier == HOST_TIER for tier, _, _ in self.held()))
        room -= len(wanted) - len(staged)  # what is on the host already stays there meanwhile
        if len(staged) <= room:
            return BOUNDLESS
        return staged[max(0, room)] * self.cache.sharing.directory.space.block_tokens

    def _recall(self, chain: Chain, tokens: Int32) -> None:
        """Blocks that the disk has of this text, be it of an earlier run, get their nodes."""
        assert self.cache.sharing is not None
        assert self.disk is not None
        directory = self.cache.sharing.directory
        size = directory.space.block_tokens
        reach = self.disk.reach(chain.keys) if directory.keys_identify else len(chain.keys)
        if not reach or not any(self.disk.blocks):
            return
        # Some on the way may have nothing: constant state stands at few positions, a window has lost its start.
        node = directory.root(chain.root)
        for index, key in enumerate(chain.keys[:reach]):
            if node is None:
                return
            before, node = node, directory.child(node, key, tokens[index * size : (index + 1) * size])
            if node is None:
                directory.forget_if_bare(before)
                return
            for group in range(len(self.cache.tables)):
                self.disk.adopt(node, group)
        if node is not None:
            directory.forget_if_bare(node)

    def lower(self, match: Match) -> list[Wanted] | None:
        """Hold what the match lacks on the device; None when it cannot be brought there now."""
        wanted = lower_blocks(self.cache, match)
        return wanted if not wanted or self.loading.hold(wanted) else None

    @property
    def stages_soon(self) -> bool:
        """Whether who lacked room on the host will have it when copies under way, none of them late, have ended."""
        copying = any(self.errands.answers(lane) and self.errands.under_way(lane) for lane in ("arenas", "disk"))
        held = sum(tier == HOST_TIER for tier, _, _ in self.held())
        return copying and self.host.lacked <= self.host.room_after(held)

    def tokens_by_tier(self, match: Match, wanted: Sequence[Wanted]) -> dict[str, int]:
        """Positions of the match by the lowest tier that any of their state comes from.

        Constant state is that of all positions; those that lie before every window go with the first inside.
        """
        if self.cache.sharing is None:
            return {}
        layouts, depth, lowest = self.cache.layout.groups, dict[int, int](), 0
        for one in wanted:
            tier = 2 if one.disk != NO_SLOT else HOST_TIER
            if layouts[one.group].block_tokens:
                depth[one.index] = max(depth.get(one.index, 0), tier)
            else:
                lowest = max(lowest, tier)
        starts = [first_shared(self.cache, g, match) for g, layout in enumerate(layouts) if layout.block_tokens]
        begin, size = min(starts, default=0), self.cache.sharing.directory.space.block_tokens
        found: dict[str, int] = {}
        for index in range(-(-match.tokens // size)):
            tokens = min(size, match.tokens - index * size)
            name = TIERS[max(lowest, depth.get(max(index, begin), 0))]
            found[name] = found.get(name, 0) + tokens
        return found

    @property
    def evicted_blocks(self) -> tuple[int, int]:
        """Of the host and of the disk, so far."""
        host = 0 if self.host.shelf is None else self.host.shelf.evicted_blocks
        return host, 0 if self.disk is None else self.disk.evicted_blocks

    # -- ends -----------------------------------------------------------------------------------------

    def forget_all(self) -> None:
        """Nothing that lies below is found again, by this run or a later one. After the device has forgotten."""
        if self.host.shelf is not None:
            self.host.shelf.forget_all()
        if self.disk is not None:
            self._erase += [(group, slots) for group, slots in enumerate(self.disk.forget_all()) if slots]

    def held(self) -> list[tuple[int, int, int]]:
        """(tier, group, slot) of every reference of a copy, for the invariants."""
        saving = [] if self.saving is None else self.saving.held()
        return saving + self.loading.held() + self.parking.held()


def _is_on_disk(one: Wanted) -> bool:
    return one.node is not None and one.node.places[HOST_TIER][one.group] == NO_SLOT


DISK_REACH = 2
"""More tiers than these include the disk."""


@dataclass(frozen=True, slots=True)
class Below:
    """What there is below the device, and how it is used."""

    host_slabs: int
    placement: Placement = field(default_factory=WriteBack)
    host_eviction: Eviction = field(default_factory=LeastRecentlyUsed)
    disk_slots: tuple[int, ...] = ()
    """By group; empty: there is no disk."""
    stored: tuple[tuple[tuple[bytes, int], ...], ...] = ()
    """By group: (identity, slot) of blocks of an earlier run, the oldest use first."""
    timeout_s: float | None = 30.0
    rates: Rates = field(default_factory=Rates)
    disk_eviction: Eviction = field(default_factory=LeastRecentlyUsed)


def tiered_cache(
    layout: Layout,
    slabs: int,
    rows: int,
    below: Below,
    *,
    keys: KeySpace | None = None,
    eviction: Eviction | None = None,
) -> tuple[KVCache, Tiering]:
    """A KV cache on the device, and the tiers below it. Without `keys` they serve suspended sequences alone."""
    host_slots = [below.host_slabs * group.blocks_per_slab for group in layout.groups]
    slots = [host_slots, below.disk_slots] if below.disk_slots else [host_slots]
    cache = KVCache(layout, slabs, rows, keys=keys, eviction=eviction, below=slots)
    directory = None if cache.sharing is None else cache.sharing.directory
    host = HostTier(layout, below.host_slabs, directory, below.host_eviction)
    disk = None
    if below.disk_slots and directory is not None:
        disk = DiskTier(below.disk_slots, directory, below.disk_eviction, below.stored)
    return cache, Tiering(cache, host, disk, below.placement, rates=below.rates, timeout_s=below.timeout_s)
