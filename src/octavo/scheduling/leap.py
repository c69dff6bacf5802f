"""Many decode steps at once, where it is certain that nothing else happens in them but that the last one may end
sequences.

While nothing arrives, ends or could run short, every step decodes one token of everybody who runs, and who waits
goes on waiting. `quiet_steps` says for how many steps that is so, `advance` takes them: the columns, tables and
counters end as if each had been planned and learned of singly, block for block (`leap_blocks`). Serves virtual time;
a device has to compute each step anyway.

Invariant: `expand(advance(...))` are the events that single steps would have given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo.errors import InvariantViolation
from octavo.memory.values import Int32, Int64
from octavo.policy.admission import STEADY
from octavo.scheduling.entry import LOOKAHEAD
from octavo.scheduling.events import Event, Finished, Resource, StepEnded, StepPlanned, StepTokens
from octavo.scheduling.leap_blocks import Blocks, first_slide, take_blocks, until_full, within
from octavo.scheduling.refusal import still_refused

if TYPE_CHECKING:
    from octavo.memory.tiering import Tiering
    from octavo.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRun:
    """Consecutive steps in which everybody decoded one token; the last one may have ended some."""

    first: int
    """Number of the first plan."""
    moments: npt.NDArray[np.float64]
    """When each step was planned, and when the last one was done: one more than there are steps."""
    rows: Int64
    sequence_ids: Int64
    tokens: Int32
    """The token of each row, the same in every step but the last."""
    last: Int32
    """Those of the last step."""
    waiting: int
    free_slabs: Int64
    """Once each step had its blocks."""
    evicted: Int64
    """Kept blocks given up in each step."""
    resource: Resource
    ended: tuple[Finished, ...] = ()
    """Who ended in the last step."""
    evicted_below: tuple[int, int] = (0, 0)
    """Kept blocks of the host and the disk given up in the last step."""

    @property
    def steps(self) -> int:
        return len(self.moments) - 1


def quiet_steps(scheduler: Scheduler, refused_for: Resource | None = None) -> int:
    """For how many steps all decode and nobody enters, up to and with the one in which somebody reaches a limit.

    Blocks are not looked at. `refused_for` is what bound the step before, where that step was one of decode tokens
    alone that seated, paused and ended nobody, and nothing has been submitted since; None where one of them is not so.
    """
    running = scheduler.running
    rows = running.live_rows()
    if not len(rows) or scheduler.in_flight:
        return 0
    if len(rows) > scheduler.limits.max_num_batched_tokens:
        return 0
    waiting = len(scheduler.waiting)
    if waiting and not _go_on_waiting(scheduler, refused_for):
        return 0
    computed, known = running.computed[rows], running.known[rows]
    if np.count_nonzero((computed != known - 1) | (computed < running.feed_tokens[rows])):
        return 0
    steps = int(np.minimum.reduce(running.limit[rows] - known))
    cache = scheduler.cache
    if cache.sharing is not None and (scheduler.snapshots.needed or (waiting and refused_for == "kv_blocks")):
        # Constant state is copied where a block is completed; and it may be what somebody waits to start from.
        steps = min(steps, int(until_full(computed, cache.sharing.directory.space.block_tokens).min()))
    if cache.gives_up and ((waiting and refused_for == "kv_blocks") or scheduler.tiering is not None):
        steps = min(steps, first_slide(cache, rows, computed, steps))
    if scheduler.tiering is not None:
        steps = min(steps, _until_copies(scheduler, scheduler.tiering, rows, steps))
        if waiting and refused_for == "kv_blocks":
            if not _all_remembered(scheduler):
                return 0
            steps = min(steps, within(cache, rows, computed, steps, cache.pool.free.count))
    return steps


def _until_copies(scheduler: Scheduler, tiering: Tiering, rows: Int64, steps: int) -> int:
    """So many of these steps say nothing to the mover, if nothing comes from it meanwhile."""
    running, cache = scheduler.running, scheduler.cache
    slack = tiering.slack if tiering.at_rest else -1
    if slack < 0 or scheduler.untold_steps or running.loading[rows].any():
        return 0
    positions = running.computed[rows]
    if tiering.placement.at_once and cache.sharing is not None:
        steps = min(steps, 1 + int(until_full(positions, cache.sharing.directory.space.block_tokens).min()))
    return within(cache, rows, positions, steps, slack)


def _all_remembered(scheduler: Scheduler) -> bool:
    """Whether all whom the next step would look at have been refused, and are again."""
    looked_at = islice(scheduler.waiting, LOOKAHEAD + 1)
    return all(one.refusal is not None and still_refused(scheduler, one.refusal) for one in looked_at)


def _go_on_waiting(scheduler: Scheduler, refused_for: Resource | None) -> bool:
    if refused_for == "kv_blocks":
        # In a whole batch it is growth that was short, and seats of ended members have been given up for it.
        return type(scheduler.policies.admission) in STEADY and not scheduler.policies.batching.whole_batches
    return refused_for in ("sequence_limit", "token_budget")


def advance(
    scheduler: Scheduler,
    tokens: Int32,
    moments: npt.NDArray[np.float64],
    refused_for: Resource | None = None,
    last: Int32 | None = None,
) -> DecodeRun | None:
    """Take up to `len(moments) - 1` decode steps, as many as there are blocks for; None where not even one. A step in
    which a pin ends is the first of another run.

    Step j is planned at `moments[j]` and done at `moments[j + 1]`; `tokens` are those of `live_rows()` in each, and
    `last` those of the last step if all are taken. The caller has asked `quiet_steps`, has drained the events, and
    knows that no other token is a stop.
    """
    running, cache = scheduler.running, scheduler.cache
    rows, asked = running.live_rows(), _until_a_pin_ends(scheduler, moments)
    if asked < len(moments) - 1:
        last = None
    if np.count_nonzero(running.stop_ids[rows] == tokens[:, None]):
        raise InvariantViolation("quiet-steps", "a token that ends a sequence is none to leap with")
    left = int(np.minimum.reduce(running.limit[rows] - running.known[rows]))
    if asked > left:
        raise InvariantViolation("quiet-steps", f"a sequence passes its limit within {asked} steps")
    first, begun, before = scheduler.next_plan, running.computed[rows], running.last_token[rows]
    running.learn_repeated(rows, tokens, asked)
    blocks = take_blocks(scheduler, rows, Blocks(begun, first, asked))
    steps = len(blocks.free_slabs)
    running.known[rows] -= asked - steps
    if not steps:
        running.last_token[rows] = before
        return None
    scheduler.take_numbers(steps)
    running.computed[rows] = begun + steps
    cache.touch(rows, first + steps - 1)
    cache.settle(first + steps - 1)
    if scheduler.tiering is not None:
        for took in np.diff(moments[: steps + 1]).tolist():
            scheduler.tiering.rates.learn_step(len(rows), took)
    waiting, ids = len(scheduler.waiting), running.sequence_id[rows]
    ending = tokens if last is None or steps < asked else last
    if ending is not tokens:
        running.relearn_last(rows, ending)
    if ending is not tokens or steps == left:
        scheduler.end_reached(rows, ending, float(moments[steps]))
    return DecodeRun(
        first=first,
        moments=moments[: steps + 1],
        rows=rows,
        sequence_ids=ids,
        tokens=tokens,
        last=ending,
        waiting=waiting,
        free_slabs=blocks.free_slabs,
        evicted=blocks.evicted,
        resource=(refused_for or "none") if waiting else "compute",
        ended=tuple(event for event in scheduler.drain_events() if isinstance(event, Finished)),
        evicted_below=scheduler.kept.evictions_below_untold(),
    )


def _until_a_pin_ends(scheduler: Scheduler, moments: npt.NDArray[np.float64]) -> int:
    """So many steps are planned before the next pin ends, once those are over that end by the first."""
    kept = scheduler.kept
    kept.expire_pins(float(moments[0]))
    return int(moments[:-1].searchsorted(kept.next_end_of_pins()))


def expand(run: DecodeRun) -> Iterator[Event]:
    """The same as single steps tell it."""
    running, end = len(run.rows), run.steps - 1
    moments, evicted = run.moments.tolist(), run.evicted.tolist()
    for step, free in enumerate(run.free_slabs.tolist()):
        number, tokens = run.first + step, run.last if step == end else run.tokens
        yield StepPlanned(moments[step], number, running, run.waiting, running, 0, free, run.resource)
        yield StepTokens(moments[step + 1], number, run.sequence_ids, tokens, run.rows)
        below = (0, 0)
        if step == end:
            yield from run.ended
            below = run.evicted_below
        yield StepEnded(moments[step + 1], number, moments[step], evicted_blocks=evicted[step], evicted_below=below)
