"""Refusals that need not be weighed again: who was refused for want of blocks, and what would have to change.

A steady admission policy (`STEADY`) weighs what is free against what is promised. Growing takes from one what it
takes from the other, or more; whoever enters does too. So it refuses the same sequence again until a reference to
some block is given back, or the sequence finds more, or less, to start from: with tiers below the device, until
anything is kept, given up or copied anywhere. Owns that rule; decides nothing.

Invariant: with and without this memory the plans are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.memory.nodes import NO_SLOT, Node
from octavo.memory.prefix import Match
from octavo.policy.admission import STEADY

if TYPE_CHECKING:
    from octavo.memory.sharing import Sharing
    from octavo.scheduling.scheduler import Scheduler
    from octavo.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Refusal:
    """One sequence, weighed and refused while others ran."""

    given_back: int
    """`KVCache.given_back` at that time."""
    last: Node | None = None
    """The last whole block of what it could have started from."""
    next_key: bytes | None = None
    """Of the block after that one, where it has one."""
    whole: int = 0
    """Blocks of that start."""
    next: Node | None = None
    next_kept: bool = False
    history: tuple[int, ...] | None = None
    """`Tiering.history` at that time."""


def remembered(scheduler: Scheduler, sequence: Sequence, match: Match) -> Refusal | None:
    """What to remember of this refusal; None where it has to be weighed anew each time."""
    cache, policies = scheduler.cache, scheduler.policies
    if type(policies.admission) not in STEADY or policies.batching.whole_batches or not len(scheduler.running):
        return None
    if cache.gives_up and _computing_prompts(scheduler):
        return None
    sharing, chain, tiering = cache.sharing, sequence.chain, scheduler.tiering
    history = None if tiering is None else tiering.history
    if sharing is None or chain is None:
        return Refusal(cache.given_back, history=history)
    if tiering is not None and not tiering.placement.constant:
        return None
    if not sharing.all_grow:
        return None
    whole = len(match.path)
    key = chain.keys[whole] if whole < len(chain.keys) else None
    after = None if key is None else sharing.directory.find(key)
    last = match.path[-1] if whole else None
    return Refusal(cache.given_back, last, key, whole, after, _kept(after), history)


def still_refused(scheduler: Scheduler, refusal: Refusal) -> bool:
    """Whether weighing it again would come to the same."""
    cache = scheduler.cache
    if refusal.given_back != cache.given_back or not len(scheduler.running):
        return False
    if refusal.history is not None:
        return scheduler.tiering is not None and scheduler.tiering.history == refusal.history
    if cache.sharing is None:
        return True
    if refusal.last is not None and not _kept(refusal.last):
        return False
    return refusal.next_key is None or _as_it_was(cache.sharing, refusal)


def awaits(scheduler: Scheduler, sequence: Sequence, refusal: Refusal) -> bool:
    """Whether a running sequence is computing what comes after what it can start from, and enough to wait for."""
    sharing, chain = scheduler.cache.sharing, sequence.chain
    if sharing is None or chain is None:
        return False
    return sharing.computes(chain, refusal.whole, scheduler.policies.reuse.wait_tokens)


def _as_it_was(sharing: Sharing, refusal: Refusal) -> bool:
    assert refusal.next_key is not None
    after = sharing.directory.find(refusal.next_key)
    return after is refusal.next and _kept(after) == refusal.next_kept


def _computing_prompts(scheduler: Scheduler) -> bool:
    """Whether what is promised to those who run may fall: of windows and chunks it does, as prompts are computed."""
    running = scheduler.running
    rows = running.order
    ahead = running.known[rows] + running.pending[rows] - scheduler.cache.committed[rows]
    return bool((ahead > 1 + scheduler.plans_ahead).any())


def _kept(node: Node | None) -> bool:
    """Whether every group keeps its state."""
    return node is not None and NO_SLOT not in node.slots
