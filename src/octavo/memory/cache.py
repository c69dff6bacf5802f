"""The KV cache: who holds which blocks, and for how long.

Rows are the seats of live sequences. The verbs are all-or-nothing: a `Shortfall` means that
nothing changed. Owns tables and references; the pool owns slots and slabs; whoever decides what
to do about a shortfall is the scheduler.

    reserve ----> FILLING ----commit----> READY
                     |                      |
                     +---release, slide-----+----> EMPTY, or DRAINING until `settle(plan)` when a
                                                   plan that touches the row is still in flight;
                                                   a block that can be found again (`sharing`) stays READY

Invariant (checked by `memory.check`): references of a slot = its occurrences in tables, suspensions, pins
and doubles; 0 <= committed tokens <= room in the row's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np

from octavo.errors import ConfigError, InvariantViolation
from octavo.memory.keys import KeySpace
from octavo.memory.layout import BOUNDLESS, Layout, largest
from octavo.memory.pool import BlockPool
from octavo.memory.sharing import Sharing
from octavo.memory.slots import SlotState
from octavo.memory.tables import BlockTables
from octavo.memory.values import (
    DEVICE,
    NOTHING_NEW,
    BlockCopies,
    Int64,
    NewBlocks,
    Reservation,
    Shortfall,
    Suspended,
)
from octavo.policy.eviction import Eviction, LeastRecentlyUsed

_DRAINING = int(SlotState.DRAINING)


class KVCache:
    def __init__(
        self,
        layout: Layout,
        slabs: int,
        rows: int,
        *,
        contiguous: bool = False,
        keys: KeySpace | None = None,
        eviction: Eviction | None = None,
        below: Sequence[Sequence[int]] = (),
    ) -> None:
        """`keys` switches reuse on: without them no block ever serves a second sequence.

        `below[tier][group]`: slots of the tiers below the device, in which blocks may be found too.
        """
        if keys is not None and contiguous:
            raise ConfigError("reuse", "prefix", "blocks in contiguous runs cannot be shared; use paged allocation")
        self.layout = layout
        self.pool = BlockPool(layout, slabs, contiguous=contiguous)
        self.rows = rows
        self.tables = tuple(BlockTables(rows) for _ in layout.groups)
        self.committed = np.zeros(rows, dtype=np.int64)
        """Positions of each row that have been computed and learned of."""
        self.touched = np.full(rows, -1, dtype=np.int64)
        """Number of the last plan that includes each row."""
        self.settled = -1
        """All plans up to this number have completed."""
        self.suspensions: dict[int, Suspended] = {}
        self._returns = 0
        self._tickets = 0
        self._draining: dict[int, list[tuple[int, Int64]]] = {}
        self._block_tokens = tuple(g.block_tokens for g in layout.groups)
        # A contiguous run is given up whole, as in the engines that it stands for.
        self.sharing = None if keys is None else Sharing(self.pool, rows, keys, eviction or LeastRecentlyUsed(), below)
        self.make_way: Callable[[Sequence[int], Shortfall], bool] | None = None
        """Told of who lacks room that unsaved blocks take; whether some of them may go now after all."""
        self.copied: Callable[[], list[tuple[int, int, int]]] | None = None
        """(tier, group, slot) of what copies between tiers reference, for the invariants."""
        self.arriving: Container[int] | None = None
        """Rows that wait for copies, for the invariants."""
        self.pins: dict[int, list[tuple[int, Int64]]] = {}
        """(group, slots) that a plan in flight copies from, by plan: referenced until it completes."""
        self._plain = len(self._block_tokens) == 1 and self._block_tokens[0] > 0 and not contiguous
        self._sliding = () if contiguous else tuple(i for i, g in enumerate(layout.groups) if g.slides)
        self._most_tokens = layout.most_tokens(slabs, 1 if self._sliding else None)  # every request asks

    # -- room ---------------------------------------------------------------------------------

    def room_tokens(self, row: int) -> int:
        """Positions that the row's blocks can hold; constant state holds any number."""
        return min(int(t.counts[row]) * (b or BOUNDLESS) for t, b in zip(self.tables, self._block_tokens, strict=True))

    def missing_blocks(self, row: int, upto: int) -> list[int]:
        """Blocks of each group that the row lacks to hold positions 0 .. upto - 1."""
        return [
            max(0, group.blocks_for(upto) - int(table.counts[row]))
            for group, table in zip(self.layout.groups, self.tables, strict=True)
        ]

    @property
    def gives_up(self) -> bool:
        """Whether blocks leave a sequence's tables while it runs."""
        return bool(self._sliding)

    @property
    def given_back(self) -> int:
        """Grows whenever a newcomer could have more room than before, or find more of what it needs referenced."""
        return self._returns + (0 if self.sharing is None else self.sharing.replaced_blocks)

    def blocks_charged(self, tokens: int, step_tokens: int) -> list[int]:
        """Blocks of each group that a sequence holds at most on its way to `tokens` positions.

        `step_tokens` is the most that it computes in one step.
        """
        return self.layout.blocks_for(tokens, step_tokens if self._sliding else None)

    def blocks_to_come(self, rows: Int64, tokens: Int64, step_tokens: Int64 | None) -> list[int]:
        """Blocks of each group that these rows together still have to reserve to reach `tokens` positions.

        `step_tokens` is the most that each computes in one step; where no blocks are given up it does not matter.
        """
        come = []
        for group, table in zip(self.layout.groups, self.tables, strict=True):
            held = table.counts[rows]
            if self._sliding:
                held -= table.firsts[rows]
            if group.slides and self._sliding and step_tokens is not None:
                most = group.most_blocks_many(tokens, step_tokens)
            else:
                most = -(-tokens // group.block_tokens) if group.block_tokens else np.ones_like(tokens)
            come.append(int(np.add.reduce(np.maximum(0, most - held))))
        return come

    def max_tokens_per_sequence(self) -> int:
        """The most positions that one sequence alone could hold in this pool, computing one at a time."""
        return self._most_tokens

    def largest_step(self, tokens: int, most: int) -> int:
        """The most positions a step, up to `most`, with which a sequence can reach `tokens` alone in this pool."""
        if not self._sliding or self.layout.slabs_for(tokens, most) <= self.pool.slabs:
            return most
        return self.layout.largest_step(tokens, most, self.pool.slabs)

    def largest_reservable(self, row: int, upto: int) -> int:
        """The most positions, up to `upto`, that `reserve` would find room for now; at least what it has."""
        have = min(upto, self.room_tokens(row))
        return largest(have, upto, lambda tokens: self.pool.shortfall(self.missing_blocks(row, tokens)) is None)

    # -- verbs --------------------------------------------------------------------------------

    def reserve(self, row: int, upto: int) -> Reservation | Shortfall:
        """Blocks for positions 0 .. upto - 1 of the row, in all groups, or a `Shortfall`.

        With contiguous allocation the first reservation of a row is its only one.
        """
        if not self._plain:
            return self.reserve_many(np.array([row], dtype=np.int64), np.array([upto], dtype=np.int64))
        table = self.tables[0]
        missing = -(-upto // self._block_tokens[0]) - int(table.counts[row])
        if missing <= 0:
            return NOTHING_NEW
        taken = self.take([missing])
        if isinstance(taken, Shortfall):
            return taken
        owners = np.empty(missing, dtype=np.int64)
        owners.fill(row)
        return Reservation((NewBlocks(0, owners, table.append(row, taken[0]), taken[0]),))

    def reserve_many(self, rows: Int64, upto: Int64) -> Reservation | Shortfall:
        """`reserve` for all of `rows` (no repeats) together: all of them or none."""
        if self._plain:
            return self._reserve_plain(rows, upto)
        needs = []
        for table, tokens in zip(self.tables, self._block_tokens, strict=True):
            have = table.counts[rows]
            short = (upto > have * tokens) if tokens else (have == 0)
            needs.append(short.nonzero()[0])
        if not any(map(len, needs)):
            return NOTHING_NEW
        if self.pool.contiguous:
            self._require_new_runs(rows[np.unique(np.concatenate(needs))])
        missing = [
            np.maximum(1, -(-upto[need] // tokens) - table.counts[rows[need]]) if tokens else np.ones_like(need)
            for need, table, tokens in zip(needs, self.tables, self._block_tokens, strict=True)
        ]
        taken = self.take([int(m.sum()) for m in missing])
        if isinstance(taken, Shortfall):
            return taken
        return Reservation(
            tuple(
                self._append(group, rows[need], more, slots)
                for group, (need, more, slots) in enumerate(zip(needs, missing, taken, strict=True))
                if len(slots)
            )
        )

    def _reserve_plain(self, rows: Int64, upto: Int64) -> Reservation | Shortfall:
        """`reserve_many` of one group of pages."""
        size, table = self._block_tokens[0], self.tables[0]
        have = table.counts[rows]
        need = (upto > have * size).nonzero()[0]
        if not len(need):
            return NOTHING_NEW
        if len(need) == 1:  # as most often: a step is short beside a block
            return self.reserve(int(rows[need[0]]), int(upto[need[0]]))
        missing = -(-upto[need] // size) - have[need]
        taken = self.take([int(np.add.reduce(missing))])
        return taken if isinstance(taken, Shortfall) else Reservation((self._append(0, rows[need], missing, taken[0]),))

    def take(self, counts: list[int]) -> tuple[Int64, ...] | Shortfall:
        """`counts[g]` slots of each group g with one reference each, giving up cached blocks if need be."""
        if self.sharing is None:
            return self.pool.take(counts)  # which looks itself
        short = self.pool.shortfall(counts)
        if short is not None and self.make_way is not None and self.make_way(counts, short):
            short = self.pool.shortfall(counts)
        if short is not None:
            return short
        if not self.sharing.shelf.evict_for(counts):
            if self.copied is None:  # else a copy may hold a block that comes after them
                raise InvariantViolation("eviction", f"cached blocks {self.pool.cached}, and none is offered")
            return Shortfall(self.pool.slabs_needed(counts), self.pool.free.count, draining=self.pool.slabs)
        if self.copied is not None and self._copies_hold_begun_slabs(counts):
            return Shortfall(self.pool.slabs_needed(counts), self.pool.free.count, draining=self.pool.slabs)
        return self.pool.take(counts)

    def _copies_hold_begun_slabs(self, counts: list[int]) -> bool:
        """Where every free slab is counted on, none is begun while copies alone hold slots in slabs of the group's."""
        if self.copied is None or self.sharing is None or not self.sharing.shelf.frugal:
            return False
        pool = self.pool
        short = [g for g, n in enumerate(counts) if pool.blocks_per_slab[g] > 1 and n > pool.free_in_begun(g)]
        return bool(short) and any(
            not tier and g in short and pool.slots[g].refs[slot] == 1 for tier, g, slot in self.copied()
        )

    def _append(self, group: int, rows: Int64, missing: Int64, slots: Int64) -> NewBlocks:
        table = self.tables[group]
        if len(slots) == len(rows):
            return NewBlocks(group, rows, table.append_one_each(rows, slots), slots)
        if len(rows) == 1:
            return NewBlocks(group, np.repeat(rows, missing), table.append(int(rows[0]), slots), slots)
        owners = np.repeat(rows, missing)
        indices = np.arange(len(slots)) - np.repeat(missing.cumsum() - missing - table.counts[rows], missing)
        table.append_at(owners, indices, slots)
        return NewBlocks(group, owners, indices, slots)

    def slide(self, rows: Int64) -> None:
        """Release what neither a plan in flight nor a later one can read.

        Plans in flight begin at the first position not committed, or beyond. So what goes is touched by none of them
        and can be had at once: what a sequence holds is all that it takes from others.
        """
        for group in self._sliding:
            table = self.tables[group]
            firsts = self.layout.groups[group].first_block(self.committed[rows])
            moved = np.flatnonzero(firsts > table.firsts[rows])
            if len(moved):
                self.unreference(group, table.give_up(rows[moved], firsts[moved]), self.settled)

    def will_slide(self, rows: Int64, positions: Int64) -> bool:
        """Whether `slide` releases blocks of these rows once their positions below `positions` are committed."""
        return any(
            bool((self.layout.groups[group].first_block(positions) > self.tables[group].firsts[rows]).any())
            for group in self._sliding
        )

    def touch(self, rows: Int64, plan: int) -> None:
        """A plan includes these rows: their slots stay until it completes."""
        self.touched[rows] = plan

    def commit(self, rows: Int64, upto: Int64) -> None:
        """Positions below `upto` of each row have been computed; blocks that are full become READY."""
        before = self.committed[rows]
        self.committed[rows] = upto
        for group, tokens in enumerate(self._block_tokens):
            if not tokens:
                continue
            first, last = before // tokens, upto // tokens
            if group in self._sliding:
                first = np.minimum(last, np.maximum(first, self.tables[group].firsts[rows]))
            if len(full := self.tables[group].between(rows, first, last)):
                self.pool.slots[group].move(full, SlotState.READY)

    def release(self, row: int, *, used: bool = True) -> int:
        """The row's sequence has left: its blocks lose a reference. Returns how many blocks that was.

        Not `used`: it had not begun.
        """
        touched, released = int(self.touched[row]), 0
        if self.sharing is not None:
            self.let_go(self.sharing.end(row), touched)
        for group, table in enumerate(self.tables):
            slots = table.clear(row)
            self.unreference(group, slots, touched, used=used, once=True)
            released += len(slots)
        self._reset(row)
        return released

    def suspend(self, row: int) -> Suspended:
        """Take the row's state out of its tables, whole; the row is empty afterwards."""
        self._tickets += 1
        value = Suspended(
            ticket=self._tickets,
            tokens=int(self.committed[row]),
            touched=int(self.touched[row]),
            firsts=tuple(int(table.firsts[row]) for table in self.tables),
            slots=tuple(tuple((DEVICE, slot) for slot in table.clear(row).tolist()) for table in self.tables),
        )
        self.suspensions[value.ticket] = value
        if self.sharing is not None:
            self.sharing.park(row, value.ticket)
        self._reset(row)
        return value

    def resume(self, row: int, value: Suspended) -> Reservation:
        """Put a suspended state into an empty row, exactly as it was; all of it is on the device."""
        if any(tier != DEVICE for entries in value.slots for tier, _ in entries):
            raise InvariantViolation("suspensions", f"ticket {value.ticket} is not on the device as a whole")
        if any(table.counts[row] for table in self.tables):
            raise InvariantViolation("suspensions", f"row {row} holds blocks; only an empty row can resume")
        self.seat_suspended(row, value)
        new = []
        for group, entries in enumerate(value.slots):
            slots = np.array([slot for _, slot in entries], dtype=np.int64)
            indices = self.tables[group].adopt(row, value.firsts[group], slots)
            if len(slots):
                new.append(NewBlocks(group, np.full(len(slots), row, dtype=np.int64), indices, slots))
        return Reservation(tuple(new))

    def seat_suspended(self, row: int, value: Suspended) -> None:
        """A suspension ends in this row, whose tables are another's business."""
        self._forget(value)
        if self.sharing is not None:
            self.sharing.unpark(row, value.ticket)
        self.committed[row] = value.tokens
        self.touched[row] = value.touched

    def drop(self, value: Suspended) -> None:
        """Give up a suspended state, as far as it is on the device."""
        self._forget(value)
        if self.sharing is not None:
            self.let_go(self.sharing.drop(value.ticket), value.touched)
        for group, entries in enumerate(value.slots):
            slots = np.array([slot for tier, slot in entries if tier == DEVICE], dtype=np.int64)
            self.unreference(group, slots, value.touched)

    def replace(self, value: Suspended) -> None:
        """Part of a suspended state has moved: references are the mover's."""
        if value.ticket not in self.suspensions:
            raise InvariantViolation("suspensions", f"ticket {value.ticket} was resumed or dropped before")
        self.suspensions[value.ticket] = value

    def settle(self, plan: int) -> None:
        """All plans up to `plan` have completed: what they kept DRAINING is EMPTY, or cached where it can be found."""
        self.settled = max(self.settled, plan)
        for number in sorted(number for number in self.pins if number <= self.settled) if self.pins else ():
            for group, slots in self.pins.pop(number):
                self.unreference(group, slots, number)
        for number in sorted(number for number in self._draining if number <= self.settled) if self._draining else ():
            self._returns += 1
            for group, slots in self._draining.pop(number):
                columns = self.pool.slots[group]
                # A slot may have been taken up again since, and may even drain anew for a later plan.
                due = slots[(columns.state[slots] == _DRAINING) & (columns.last_plan[slots] <= self.settled)]
                self._retire(group, due)

    def unpin(self, plan: int, copies: BlockCopies) -> None:
        """This plan, which has not been made yet, is not going to make these copies."""
        pinned = self.pins[plan]
        pinned.pop(
            next(i for i, (group, slots) in enumerate(pinned) if group == copies.group and slots is copies.sources)
        )
        if not pinned:
            del self.pins[plan]
        self.unreference(copies.group, copies.sources, -1, used=False)

    # -- inside -------------------------------------------------------------------------------

    def _require_new_runs(self, rows: Int64) -> None:
        for table in self.tables:
            outgrown = rows[table.counts[rows] > 0]
            if len(outgrown):
                raise InvariantViolation("contiguous-runs", f"row {outgrown[0]} outgrew its run")

    def _reset(self, row: int) -> None:
        self.committed[row], self.touched[row] = 0, -1

    def _forget(self, value: Suspended) -> None:
        if self.suspensions.pop(value.ticket, None) is not value:
            raise InvariantViolation("suspensions", f"ticket {value.ticket} was resumed or dropped before")

    def unreference(self, group: int, slots: Int64, touched: int, *, used: bool = True, once: bool = False) -> None:
        """These slots lose a reference each, of somebody whom plan `touched` was the last to include.

        `used`: by somebody who read them, so that they are among the last to go. `once`: none is named twice, surely.
        """
        if not len(slots):
            return
        self._returns += 1
        refs = self.pool.slots[group].refs
        if once or self.sharing is None or len(set(slots.tolist())) == len(slots):
            left = refs[slots] - 1
            refs[slots] = left
            gone = slots[left == 0]
        else:  # rows that share a block may give it up together
            np.subtract.at(refs, slots, 1)
            gone = slots[refs[slots] == 0]
            gone = gone[np.sort(np.unique(gone, return_index=True)[1])]
        if touched <= self.settled and self.sharing is None and self.copied is None:
            # Nobody else has touched them, and no plan that did is in flight.
            self._retire(group, gone, used=used)
            return
        last_plan = self.pool.slots[group].last_plan
        last_plan[slots] = np.maximum(last_plan[slots], touched)
        busy = last_plan[gone] > self.settled
        if np.count_nonzero(busy):
            waits = gone[busy]
            self.pool.drain(group, waits)
            for plan in np.unique(last_plan[waits]).tolist():
                self._draining.setdefault(plan, []).append((group, waits[last_plan[waits] == plan]))
            gone = gone[~busy]
        self._retire(group, gone, used=used)
        if used and self.copied is not None and self.sharing is not None:
            # A copy may be the last to let go, and has not read them for anybody.
            self.sharing.shelf.use(group, slots[refs[slots] > 0])

    def _retire(self, group: int, slots: Int64, *, used: bool = True) -> None:
        """Nobody references these slots and no plan touches them: they are cached, or EMPTY."""
        if self.sharing is not None and len(slots):
            keyed = self.sharing.directory.keyed[group][slots]
            kept = slots[keyed]
            if len(kept):
                draining = kept[self.pool.slots[group].state[kept] == _DRAINING]
                self.pool.undrain(group, draining)
                self.sharing.shelf.keep(group, kept, used=used)
                slots = slots[~keyed]
        if len(slots):
            self.pool.give(group, slots)

    def let_go(self, doubles: list[tuple[int, int]], touched: int) -> None:
        """Blocks that were referenced besides tables lose that reference."""
        for group, slot in doubles:
            self.unreference(group, np.array([slot], dtype=np.int64), touched)
