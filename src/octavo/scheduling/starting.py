"""What a waiting sequence would start from: nothing, kept blocks, blocks on their way up, or its own suspended state.

Owns no state. A start holds nothing until its sequence is seated; `take` then makes it the row's, all or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.memory.adoption import adopt, lower_blocks, shared_blocks
from octavo.memory.loading import Wanted
from octavo.memory.prefix import NO_MATCH, Match
from octavo.memory.values import DEVICE, NOTHING_NEW, Adoption, Reservation, Shortfall
from octavo.scheduling.moving import lose_suspension
from octavo.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from octavo.scheduling.draft import Draft
    from octavo.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class Start:
    match: Match
    """Of suspended state: as many positions as it has, none of them looked up."""
    shared: list[int]
    """Blocks of each group that it takes from nobody."""
    ticket: int | None = None
    """Of its suspended state."""
    waits: bool = False
    """Whether copies have to end before it can compute."""
    by_tier: dict[str, int] = field(default_factory=dict)
    """Positions that were found kept, by the lowest tier that any of their state comes from."""

    @property
    def tokens(self) -> int:
        return self.match.tokens


def start_of(scheduler: Scheduler, draft: Draft, sequence: Sequence) -> Start | None:
    """None when it had better wait: for a block that is being computed or copied, or for its own state to be moved."""
    cache, tiering = scheduler.cache, scheduler.tiering
    if sequence.suspended is not None and tiering is not None:
        ticket = sequence.suspended
        if tiering.parking.is_moving(ticket):
            return None
        if tiering.parking.broken(ticket) is None and tiering.reach > 1:
            own = Match(tokens=cache.suspensions[ticket].tokens)
            return Start(own, tiering.parking.device_blocks(ticket), ticket, waits=True)
        lose_suspension(scheduler, sequence)
    match = _match(scheduler, draft, sequence)
    if match is None:
        return None
    return kept(scheduler, match)


def kept(scheduler: Scheduler, match: Match) -> Start:
    """A start from what was matched."""
    waits = scheduler.tiering is not None and bool(lower_blocks(scheduler.cache, match))
    by_tier = {DEVICE: match.tokens} if match.tokens else {}
    return Start(match, shared_blocks(scheduler.cache, match), waits=waits, by_tier=by_tier)


def _match(scheduler: Scheduler, draft: Draft, sequence: Sequence) -> Match | None:
    sharing, chain, tiering = scheduler.cache.sharing, sequence.chain, scheduler.tiering
    if sharing is None or chain is None or draft.budget <= 0:
        return NO_MATCH
    tokens = sequence.tokens()
    chain.extend(tokens)
    match = (sharing if tiering is None else tiering).match(chain, tokens, len(tokens) - 1)
    # A whole batch enters together or not at all: nobody in it can wait for another.
    policies = scheduler.policies
    if not policies.batching.whole_batches and sharing.awaited(match, chain, policies.reuse.wait_tokens):
        return None
    return match


def on_the_device(scheduler: Scheduler, sequence: Sequence) -> Start:
    """What is left to start from when nothing can be brought up."""
    sharing, chain = scheduler.cache.sharing, sequence.chain
    assert sharing is not None
    assert chain is not None
    tokens = sequence.tokens()
    return kept(scheduler, sharing.match(chain, tokens, len(tokens) - 1))


def take(
    scheduler: Scheduler, draft: Draft, sequence: Sequence, start: Start, reserve: int
) -> Reservation | Adoption | Shortfall | None:
    """Blocks of the row just seated, with room for `reserve` positions; copies upwards begin.

    None when what lies below cannot be brought up now nor soon: it has to start from less.
    """
    cache, tiering, row = scheduler.cache, scheduler.tiering, sequence.row
    if start.ticket is not None and tiering is not None:
        got: Reservation | Shortfall = tiering.parking.resume(row, start.ticket, reserve)
        if not isinstance(got, Shortfall):
            sequence.suspended = None
        return got
    if sequence.chain is None:
        return cache.reserve(row, reserve) if reserve else NOTHING_NEW
    lower: list[Wanted] = []
    if start.waits and tiering is not None:
        held = tiering.lower(start.match)
        if held is None:
            return Shortfall(0, 0, draining=1) if tiering.stages_soon else None
        lower = held
    adopted = adopt(cache, row, start.match, sequence.chain, reserve, scheduler.next_plan, lower)
    if isinstance(adopted, Adoption):
        draft.copies.extend((row, copy) for copy in adopted.copies)
    if lower and tiering is not None:
        if isinstance(adopted, Shortfall):
            tiering.loading.let_go(lower)
        else:
            start.by_tier = tiering.tokens_by_tier(start.match, lower)
            tiering.loading.begin(row, lower)
    return adopted
