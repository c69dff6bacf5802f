"""The state machine of a slot, as a table of legal moves.

    EMPTY ----reserve----> FILLING ----last position computed----> READY
      ^                      |  |                                  |  ^
      |<--drop, nothing------+  +--leaves its table, in flight--+  |  | a hit cancels
      |   in flight                                             v  v  | the freeing
      +<-----------------plans and transfers completed-------- DRAINING

A FILLING slot is writable by exactly one sequence; a READY slot is never written again; a
DRAINING slot belongs to nobody but a plan in flight may still touch it.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from octavo.errors import InvariantViolation
from octavo.memory.values import Int64


class SlotState(IntEnum):
    EMPTY = 0
    FILLING = 1
    READY = 2
    DRAINING = 3


LEGAL_MOVES: tuple[tuple[SlotState, SlotState], ...] = (
    (SlotState.EMPTY, SlotState.FILLING),
    (SlotState.FILLING, SlotState.READY),
    (SlotState.FILLING, SlotState.EMPTY),
    (SlotState.FILLING, SlotState.DRAINING),
    (SlotState.READY, SlotState.EMPTY),
    (SlotState.READY, SlotState.DRAINING),
    (SlotState.DRAINING, SlotState.EMPTY),
    (SlotState.DRAINING, SlotState.READY),
)

_LEGAL = np.zeros((len(SlotState), len(SlotState)), dtype=bool)
for _before, _after in LEGAL_MOVES:
    _LEGAL[_before, _after] = True
_LEGAL_TO = tuple(bytes(before for before in SlotState if _LEGAL[before, after]) for after in SlotState)
"""By the state after: the states that may become it, a byte each."""
_LEGAL_ONE: list[list[bool]] = _LEGAL.tolist()


class GroupSlots:
    """Columns of one group's slots: state, references, and the last plan that may touch a freed one."""

    def __init__(self, total: int) -> None:
        self.state = np.zeros(total, dtype=np.uint8)
        self.refs = np.zeros(total, dtype=np.int32)
        self.last_plan = np.full(total, -1, dtype=np.int64)

    def move(self, slots: Int64, after: SlotState) -> None:
        """Move slots to a state. Raises `InvariantViolation` on an illegal move, changing nothing."""
        if self.state[slots].tobytes().translate(None, _LEGAL_TO[after]):  # some are left: not legal
            bad = next(slot for slot in slots.tolist() if not _LEGAL[self.state[slot], after])
            before = SlotState(int(self.state[bad])).name
            raise InvariantViolation("slot-moves", f"slot {bad}: {before} -> {after.name} is not a legal move")
        self.state[slots] = int(after)  # numpy takes long over members of an Enum

    def move_one(self, slot: int, after: SlotState) -> int:
        """`move` of one slot, ten times as fast; returns the state before."""
        before = int(self.state[slot])
        if not _LEGAL_ONE[before][int(after)]:
            raise InvariantViolation(
                "slot-moves", f"slot {slot}: {SlotState(before).name} -> {after.name} is not a legal move"
            )
        self.state[slot] = int(after)
        return before

    def count(self, state: SlotState) -> int:
        return int(np.count_nonzero(self.state == state))
