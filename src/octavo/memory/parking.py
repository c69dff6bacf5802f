"""Suspended sequences on the host: their state goes down whole, and comes back whole or not at all.

    suspend: tables -> Suspended, all on the device --park--> blocks that only it holds are copied to the host
    resume:  the host's blocks are loaded into a row --ended--> exactly the state that was suspended

Blocks that others reference too stay where they are: they take no room of their own. Owns what is on its way down, and
which suspensions have lost a part. Keys play no role, but a block that can be found again on the device is not copied
a second time.

Invariant: a suspension references each of its slots, in whichever tier, until it is resumed or dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from octavo.memory.cache import KVCache
from octavo.memory.errands import Errands
from octavo.memory.loading import Loading, Wanted
from octavo.memory.nodes import NO_SLOT, Node
from octavo.memory.tiers import HOST_TIER, HostTier
from octavo.memory.transfers import Ended
from octavo.memory.values import DEVICE, HOST, Int64, NewBlocks, Reservation, Shortfall, Suspended


@dataclass(slots=True, eq=False)
class _Move:
    ticket: int
    group: int
    entry: int
    """Which of the suspension's blocks of the group."""
    source: int
    target: int


class Parking:
    def __init__(
        self, cache: KVCache, host: HostTier, loading: Loading, errands: Errands, *, publishes: bool = True
    ) -> None:
        """`publishes`: what can be found on the device may be found in its copy too, by whoever begins like it."""
        self._cache = cache
        self._host = host
        self._loading = loading
        self._errands = errands
        self._publishes = publishes
        self._moving: dict[_Move, None] = {}
        self._broken: dict[int, str] = {}
        """Tickets of suspensions that lack a part, and why."""

    # -- down -------------------------------------------------------------------------------------

    def own_blocks(self, row: int) -> list[int]:
        """Blocks of each group that only this row holds: what would have to move."""
        return [int(np.count_nonzero(self._own(group, row))) for group in range(len(self._cache.tables))]

    def can_park(self, counts: Sequence[int]) -> bool:
        """Whether there is room on the host for so many blocks of each group, and somebody to copy them."""
        return self._errands.answers("arenas") and self._host.has_room(counts)

    def park(self, row: int) -> Suspended | None:
        """Suspend the row and begin to copy what only it holds; None, and nothing done, without room."""
        room = self._host.take(self.own_blocks(row))
        if room is None:
            return None
        own = [np.flatnonzero(self._own(group, row)).tolist() for group in range(len(self._cache.tables))]
        value = self._cache.suspend(row)
        if self._cache.sharing is not None:
            self._cache.let_go(self._cache.sharing.drop_doubles(value.ticket), value.touched)
        for group, entries in enumerate(own):
            moves = [
                _Move(value.ticket, group, entry, value.slots[group][entry][1], int(target))
                for entry, target in zip(entries, room[group], strict=True)
            ]
            for move in moves:
                self._moving[move] = None
                self._cache.pool.slots[group].refs[move.source] += 1
            if moves:
                self._errands.ask(
                    "demote",
                    group,
                    [(move.source, move.target) for move in moves],
                    partial(self._parked, moves),
                    late=lambda: self._lose(value.ticket, "timed_out"),
                )
        return value

    def _own(self, group: int, row: int) -> np.ndarray:
        slots = self._cache.tables[group].row(row)
        mine: np.ndarray = self._cache.pool.slots[group].refs[slots] == 1
        return mine

    def _parked(self, moves: list[_Move], ended: Ended) -> None:
        for move, reason in zip(moves, ended.reasons, strict=True):
            del self._moving[move]
            value = self._cache.suspensions.get(move.ticket)
            source, target = (np.array([slot], dtype=np.int64) for slot in (move.source, move.target))
            if reason:
                self._lose(move.ticket, reason)
            elif value is not None:
                entries = list(value.slots[move.group])
                entries[move.entry] = (HOST, move.target)
                slots = list(value.slots)
                slots[move.group] = tuple(entries)
                self._cache.replace(replace(value, slots=tuple(slots)))
                self._publish(move)
                self._host.reference(move.group, target)
                self._cache.unreference(move.group, source, -1)
            self._cache.unreference(move.group, source, -1, used=False)
            self._host.unreference(move.group, target)

    def _publish(self, move: _Move) -> None:
        """A block that can be found on the device can be found in this copy too."""
        sharing = self._cache.sharing
        if self._publishes and sharing is not None and sharing.directory.keyed[move.group][move.source]:
            node = sharing.directory.node_of(move.group, move.source)
            if node.places[HOST_TIER][move.group] == NO_SLOT:
                self._host.publish(node, move.group, move.target)

    def _lose(self, ticket: int, reason: str) -> None:
        if ticket in self._cache.suspensions:
            self._broken.setdefault(ticket, reason)

    @property
    def frees_soon(self) -> bool:
        """Whether room comes back when copies under way end."""
        return self._errands.answers("arenas") and bool(self._moving)

    # -- while it is suspended ----------------------------------------------------------------------

    def is_moving(self, ticket: int) -> bool:
        """Whether copies of it are still to end, and none has been lost or late."""
        return ticket not in self._broken and any(move.ticket == ticket for move in self._moving)

    @property
    def any_broken(self) -> bool:
        """Whether some suspension lacks a part."""
        return bool(self._broken)

    def broken(self, ticket: int) -> str | None:
        """Why it cannot be resumed."""
        return self._broken.get(ticket)

    def drop(self, ticket: int) -> None:
        """Give a suspension up, in every tier."""
        value = self._cache.suspensions[ticket]
        self._broken.pop(ticket, None)
        for group, entries in enumerate(value.slots):
            here = [slot for tier, slot in entries if tier == HOST]
            self._host.unreference(group, np.array(here, dtype=np.int64))
        self._cache.drop(value)

    # -- up -----------------------------------------------------------------------------------------

    def device_blocks(self, ticket: int) -> list[int]:
        """Blocks of each group that it holds on the device."""
        value = self._cache.suspensions[ticket]
        return [sum(tier == DEVICE for tier, _ in entries) for entries in value.slots]

    def resume(self, row: int, ticket: int, upto: int) -> Reservation | Shortfall:
        """Put it into an empty row that has room for positions 0 .. upto - 1, and begin to load; all or nothing."""
        cache = self._cache
        value = cache.suspensions[ticket]
        lineage = [] if cache.sharing is None else cache.sharing.lineage(ticket)
        parts = [self._parts(value, group, lineage) for group in range(len(cache.tables))]
        more = [
            max(0, layout.blocks_for(upto) - value.firsts[group] - len(value.slots[group]))
            for group, layout in enumerate(cache.layout.groups)
        ]
        found = [(g, np.array([slot for _, slot in again], dtype=np.int64)) for g, (again, _) in enumerate(parts)]
        for group, slots in found:  # before room is made: they must not go for it
            if len(slots):
                assert cache.sharing is not None
                cache.sharing.shelf.take_up(group, slots)
        taken = cache.take([n + len(lacking) for n, (_, lacking) in zip(more, parts, strict=True)])
        if isinstance(taken, Shortfall):
            for group, slots in found:
                cache.unreference(group, slots, -1, used=False)
            return taken
        return self._seat(row, value, parts, taken)

    def _parts(self, value: Suspended, group: int, lineage: list[Node]) -> tuple[list[tuple[int, int]], list[Wanted]]:
        """Of what is on the host: (entry, device slot) of what the device has all the same; what must be copied."""
        layout, again, lacking = self._cache.layout.groups[group], [], []
        full = value.tokens // layout.block_tokens if layout.block_tokens else 0
        for entry, (tier, slot) in enumerate(value.slots[group]):
            if tier != HOST:
                continue
            index = value.firsts[group] + entry
            node = lineage[index] if layout.block_tokens and index < min(full, len(lineage)) else None
            if node is not None and node.slots[group] != NO_SLOT:
                again.append((entry, node.slots[group]))
            else:
                lacking.append(Wanted(group, index, node, node is not None, host=slot, full=index < full))
        return again, lacking

    def _seat(
        self,
        row: int,
        value: Suspended,
        parts: list[tuple[list[tuple[int, int]], list[Wanted]]],
        taken: tuple[Int64, ...],
    ) -> Reservation:
        cache = self._cache
        new, wanted = [], []
        for group, (again, lacking) in enumerate(parts):
            slots = [slot for _, slot in value.slots[group]]
            self._host.unreference(group, np.array([slots[entry] for entry, _ in again], dtype=np.int64))
            for entry, slot in again:
                slots[entry] = slot
            for one, slot in zip(lacking, taken[group], strict=False):
                one.target = slots[one.index - value.firsts[group]] = int(slot)
                wanted.append(one)
            whole = np.concatenate([np.array(slots, dtype=np.int64), taken[group][len(lacking) :]])
            indices = cache.tables[group].adopt(row, value.firsts[group], whole)
            if len(whole):
                new.append(NewBlocks(group, np.full(len(whole), row, dtype=np.int64), indices, whole))
        cache.seat_suspended(row, value)
        if wanted:
            self._loading.begin(row, wanted)
        return Reservation(tuple(new))

    def held(self) -> list[tuple[int, int, int]]:
        """(tier, group, slot) of what copies touch, for the invariants."""
        return [(tier, m.group, slot) for m in self._moving for tier, slot in ((0, m.source), (HOST_TIER, m.target))]
