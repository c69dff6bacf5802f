"""Decides what each step computes, and learns what came of it. No prefill phase, no decode phase.

    submit -> waiting --enter--> running --learn--> finished
                 ^                  |
                 +-----preempt------+

A sequence has tokens it has and tokens it has computed; each step lets some catch up within the
token budget (see `RunningSet`). Owns the queue and the running set; room is `growth`, admission
is `entry`, who gives way and what becomes of state that moves is `moving`, what is kept for reuse
is `keeping`, requests are checked in `limits`. Knows no clock: `now` is an argument.

Progress: after every step, if nothing runs and something waits, then somebody enters on the next,
or a copy with a deadline is under way.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import numpy as np

from octavo.errors import CapacityError, PolicyError, RequestError
from octavo.memory.cache import KVCache
from octavo.memory.keys import Chain
from octavo.memory.snapshots import Snapshots
from octavo.memory.tiering import Tiering
from octavo.memory.values import Int32, Int64
from octavo.policy.bundle import Policies
from octavo.scheduling.draft import Draft
from octavo.scheduling.entry import enter
from octavo.scheduling.events import (
    Admitted,
    CacheReset,
    Event,
    Finished,
    FinishReason,
    RefusalReason,
    Refused,
    StepPlanned,
    StepTokens,
    Submitted,
)
from octavo.scheduling.growth import grow
from octavo.scheduling.keeping import copies_after, key_filled
from octavo.scheduling.kept import Kept
from octavo.scheduling.limits import Limits, checked_limit
from octavo.scheduling.moving import lose_suspension
from octavo.scheduling.plan import Admission, StepPlan, StepResult
from octavo.scheduling.records import note_peak, record_of
from octavo.scheduling.request import Request
from octavo.scheduling.running import RunningSet
from octavo.scheduling.sequence import Sequence, SequenceState
from octavo.scheduling.starting import Start
from octavo.scheduling.waiting import WaitingQueue


class Scheduler:
    def __init__(
        self, cache: KVCache, limits: Limits, policies: Policies | None = None, tiering: Tiering | None = None
    ) -> None:
        self.cache = cache
        self.tiering = tiering
        """None: there is no tier below the device."""
        self.limits = limits
        self.policies = policies or Policies()
        self.running = RunningSet(cache.rows)
        self.waiting = WaitingQueue()
        self.snapshots = Snapshots(cache, self.policies.reuse.keeps)
        self.kept = Kept(cache, tiering, self.snapshots)
        if cache.sharing is not None:
            cache.sharing.shelf.frugal = self.policies.admission.guarantees
        self.in_flight = 0
        """Plans submitted and not yet learned of."""
        self.plans_ahead = 0
        """How many of them there may be when the next one is made."""
        self._sequences: dict[int, Sequence] = {}
        self._next_sequence = 0
        self._next_plan = 0
        self._events: list[Event] = []
        self._left_over: Draft | None = None
        """What sequences were given in steps that computed nothing: the next plan tells of it."""

    # -- requests -----------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> int:
        """Queue a request; returns its sequence id. Raises `RequestError`, having queued nothing."""
        try:
            limit = checked_limit(request, self.limits, self.cache, self.policies.allocation)
        except RequestError as error:
            reason: RefusalReason = "never_fits" if isinstance(error, CapacityError) else "invalid"
            self._events.append(Refused(now, request.request_id, reason))
            raise
        if self.limits.max_waiting is not None and len(self.waiting) >= self.limits.max_waiting:
            self._events.append(Refused(now, request.request_id, "queue_full"))
            raise RequestError("request", request.request_id, f"{len(self.waiting)} requests wait already; try later")
        sequence = Sequence(self._next_sequence, request, arrival_s=now, limit=limit)
        sharing = self.cache.sharing
        if sharing is not None:
            sequence.chain = Chain(sharing.directory.space, request.cache_salt)
            sequence.chain.extend(request.prompt_token_ids)
        self._next_sequence += 1
        self._events.append(Submitted(now, sequence.sequence_id, request.request_id, request.prompt_tokens))
        if limit == request.prompt_tokens:
            self._report_end(sequence, "length", now)
        else:
            self._sequences[sequence.sequence_id] = sequence
            self.waiting.push(sequence)
        return sequence.sequence_id

    def abort(self, sequence_id: int, now: float, reason: FinishReason = "abort") -> bool:
        """End a sequence wherever it is; `stop` when its text met a stop string. False when it has ended already."""
        return self._end_early(sequence_id, now, reason, None)

    def fail_all(self, error: str, now: float) -> None:
        """The engine is gone: every sequence ends with an error, nobody is left waiting."""
        for sequence_id in list(self._sequences):
            self._end_early(sequence_id, now, "error", error)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences) or self.in_flight > 0

    def drain_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def reset_kept(self, now: float) -> list[int]:
        """Nothing computed so far is found again. Returns how many blocks of each group that freed at once."""
        freed = self.kept.forget_all()
        if self.cache.sharing is not None:
            self._events.append(CacheReset(now, self.kept.evictions_untold()))
        return freed

    # -- decide -------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None when there is nothing to compute now."""
        self.kept.expire_pins(now)
        if self.tiering is not None:
            self.tiering.prepare()
        draft = self._draft(now)
        grow(self, draft)
        if len(self.waiting):
            enter(self, draft)
        rows, counts = draft.chunks()
        if self._left_over is not None:
            draft.take_over(self._left_over)
            self._left_over = None
        if not len(rows):
            if draft.admissions or draft.new_blocks:
                self._left_over = draft
            return None
        plan = self._plan(draft, rows, counts)
        self._note(plan, draft)
        return plan

    def _draft(self, now: float) -> Draft:
        rows = self.running.order
        wanted = self.running.wanted(rows)
        if self.in_flight:
            wanted[self.running.singly[rows]] = 0
        budget = self.limits.max_num_batched_tokens
        if len(rows) <= budget and not np.count_nonzero(wanted > 1):
            return Draft(now, rows, wanted, budget - int(np.count_nonzero(wanted)))
        given, name = self.policies.batching.split(wanted, budget), self.policies.batching.name
        wrong = given.shape != wanted.shape or np.count_nonzero((given < 0) | (given > wanted))
        total = int(given.sum())
        if wrong or total > budget:
            raise PolicyError(f"batching {name!r} gave more than was wanted or allowed")
        if not total and np.count_nonzero(wanted):
            raise PolicyError(f"batching {name!r} gave nothing although {wanted} is wanted")
        return Draft(now, rows, given, budget - total)

    def _plan(self, draft: Draft, rows: Int64, counts: Int64) -> StepPlan:
        running = self.running
        starts = running.computed[rows]
        token_ids = running.tokens_at(rows, starts, counts)
        after = starts + counts
        pending = running.pending[rows]
        samples = after == running.known[rows] + pending
        running.computed[rows] = after
        running.pending[rows] = pending + samples
        number = self._next_plan
        self._next_plan += 1
        self.cache.touch(rows, number)
        for row, _ in draft.copies:  # also of who waits for other copies, and may leave before the plan has completed
            self.cache.touch(np.array([row], dtype=np.int64), number)
        self.in_flight += 1
        return StepPlan(
            number=number,
            planned_s=draft.now,
            sequence_ids=running.sequence_id[rows],
            rows=rows,
            starts=starts.astype(np.int32),
            counts=counts.astype(np.int32),
            samples=samples,
            token_ids=token_ids,
            admissions=tuple(draft.admissions),
            new_blocks=draft.merged_blocks(),
            copies_before=tuple(copy for _, copy in draft.copies),
            copies_after=copies_after(self, number, rows, after) if self.snapshots.needed else (),
        )

    def _note(self, plan: StepPlan, draft: Draft) -> None:
        decodes = int(np.count_nonzero((plan.counts == 1) & (plan.starts >= self.running.prompt[plan.rows])))
        bound_by = draft.bound_by or ("none" if len(self.waiting) else "compute")
        self._events.append(
            StepPlanned(
                now=draft.now,
                number=plan.number,
                running=plan.chunks,
                waiting=len(self.waiting),
                decode_tokens=decodes,
                prefill_tokens=plan.tokens - decodes,
                free_slabs=self.cache.pool.available_slabs,
                resource=bound_by,
            )
        )

    # -- moves that `growth` and `entry` ask for ------------------------------------------------

    @property
    def untold_steps(self) -> bool:
        """Whether the next plan has to tell of steps that computed nothing."""
        return self._left_over is not None

    @property
    def next_plan(self) -> int:
        """The number of the plan that is being made."""
        return self._next_plan

    def welcome(self, sequence: Sequence, draft: Draft, start: Start) -> None:
        """A sequence has been seated and has its blocks."""
        self.waiting.remove(sequence)
        match, by_tier = start.match, start.by_tier
        if sequence.cached_tokens is None:
            sequence.cached_tokens = by_tier
        sequence.restored_tokens = match.tokens if start.ticket is not None else 0
        if self.tiering is not None and sequence.row in self.tiering.loading:
            self.running.loading[sequence.row] = True
            sequence.waits_since_s = draft.now
        resumed = sequence.preemptions > 0
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = draft.now
        if sequence.paused_at_s is not None:
            sequence.preempted_s += draft.now - sequence.paused_at_s
            sequence.paused_at_s = None
        draft.admissions.append(
            Admission(sequence.row, sequence.sequence_id, sequence.request, sequence.outputs, match.tokens)
        )
        again = max(0, sequence.given_up_tokens - match.tokens)
        sequence.spared_tokens = sequence.restored_tokens or sequence.given_up_tokens - again
        sequence.given_up_tokens = 0
        sequence.recomputed_tokens += again
        self._events.append(
            Admitted(
                draft.now, sequence.sequence_id, sequence.row, resumed, match.tokens - sequence.restored_tokens,
                match.asked, match.known, match.unused, again, tuple(by_tier.items()), sequence.restored_tokens,
            )
        )  # fmt: skip

    def back_to_line(self, sequence: Sequence) -> None:
        """It was seated and found no room: it keeps its place in the queue."""
        sequence.state = SequenceState.WAITING

    def say(self, event: Event) -> None:
        self._events.append(event)

    def leave(self, row: int) -> int:
        """Empty the seat and release its blocks; returns how many."""
        return self._leave([row])

    def take_numbers(self, steps: int) -> int:
        """Numbers for plans that `leap` takes at once; returns the first."""
        first = self._next_plan
        self._next_plan += steps
        return first

    def release_ended_seats(self) -> bool:
        """Give back what ended members of a whole batch still hold; False when there are none."""
        ended = self.running.order[self.running.done[self.running.order]].tolist()
        if ended:
            self._leave(ended)
        return bool(ended)

    # -- learn --------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Learn what a plan came to. Sequences that left meanwhile are not in their rows: theirs is dropped."""
        self.in_flight -= 1
        if self.tiering is not None:
            self.tiering.rates.learn_step(plan.tokens, result.finished_s - plan.planned_s)
        seats = plan.rows
        alive = (self.running.sequence_id[seats] == plan.sequence_ids) & ~self.running.done[seats]
        for index, reason in result.failures:
            if alive[index]:
                alive[index] = False
                self._finish([int(plan.rows[index])], "error", now, error=reason)
        everyone = np.count_nonzero(alive) == len(alive)
        rows = seats if everyone else seats[alive]
        ends = (plan.starts + plan.counts).astype(np.int64)
        if not everyone:
            ends = ends[alive]
        self.cache.commit(rows, ends)
        if self.cache.sharing is not None:
            key_filled(self, self.cache.sharing, rows, ends)
            self.snapshots.learn(plan.number, rows.tolist(), (ends >= self.running.prompt[rows]).tolist())
        self.cache.settle(plan.number)
        got = alive & plan.samples
        whole = np.count_nonzero(got) == len(got)
        self._learn_tokens(plan, result, now, slice(None) if whole else got.nonzero()[0])

    def _learn_tokens(self, plan: StepPlan, result: StepResult, now: float, got: slice | Int64) -> None:
        rows, tokens = plan.rows[got], result.tokens[got]
        if not len(rows):
            return
        self.running.learn(rows, tokens)
        sequence_ids = plan.sequence_ids[got]
        logprobs = {}
        if result.logprobs:
            wanted = range(plan.chunks) if isinstance(got, slice) else got.tolist()
            logprobs = {int(plan.sequence_ids[i]): result.logprobs[i] for i in wanted if i in result.logprobs}
        self._events.append(StepTokens(now, plan.number, sequence_ids, tokens, rows, logprobs))
        first = self.running.known[rows] - self.running.prompt[rows] == 1
        for row in rows[first].tolist() if np.count_nonzero(first) else ():
            self.running.sequence(row).first_token_s = now
        self.end_reached(rows, tokens, now)

    # -- ends ---------------------------------------------------------------------------------

    def end_reached(self, rows: Int64, tokens: Int32, now: float) -> None:
        """End those whose last token, of `tokens`, is a stop, or who have reached their limit."""
        stopped, full = self.running.ended_by(rows, tokens)
        for index in (stopped | full).nonzero()[0].tolist():
            reason: FinishReason = "stop" if stopped[index] else "length"
            self._finish([int(rows[index])], reason, now, stop_token=int(tokens[index]) if stopped[index] else None)

    def _finish(
        self,
        rows: ListLike[int],
        reason: FinishReason,
        now: float,
        *,
        stop_token: int | None = None,
        error: str | None = None,
    ) -> None:
        """The sequences in these rows have ended. In a whole batch their seats wait for the others."""
        for row in rows:
            sequence = self.running.sequence(row)
            held = [int(table.counts[row] - table.firsts[row]) for table in self.cache.tables]
            note_peak(sequence, held)
            outputs = int(self.running.known[row] - self.running.prompt[row])
            self.running.end(row)
            del self._sequences[sequence.sequence_id]
            self._report_end(sequence, reason, now, outputs=outputs, stop_token=stop_token, error=error)
        order = self.running.order
        if not self.policies.batching.whole_batches:
            self._leave(rows)
        elif self.running.done[order].all():
            self._leave(order.tolist())

    def _leave(self, rows: ListLike[int]) -> int:
        """Empty the seats and release their blocks; returns how many."""
        blocks = 0
        for row in rows:
            if not self.running.done[row]:  # else it has been told
                held = [int(table.counts[row] - table.firsts[row]) for table in self.cache.tables]
                note_peak(self.running.sequence(row), held)
            if self.tiering is not None:
                self.tiering.loading.abandon(row)
            self.untold(row)
            blocks += self.cache.release(row)
            self.snapshots.forget(row)
        self.running.unseat(rows)
        return blocks

    def untold(self, row: int) -> None:
        """The row's sequence leaves: no later plan tells of it."""
        if self._left_over is not None:
            for copies in self._left_over.withdraw(row):
                self.cache.unpin(self._next_plan, copies)

    def _end_early(self, sequence_id: int, now: float, reason: FinishReason, error: str | None) -> bool:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return False
        if sequence.state is SequenceState.RUNNING:
            self._finish([sequence.row], reason, now, error=error)
        else:
            self.waiting.remove(sequence)
            if sequence.suspended is not None:
                lose_suspension(self, sequence)
            del self._sequences[sequence_id]
            self._report_end(sequence, reason, now, outputs=len(sequence.outputs), error=error)
        return True

    def _report_end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        *,
        outputs: int = 0,
        stop_token: int | None = None,
        error: str | None = None,
    ) -> None:
        sequence.state = SequenceState.FINISHED
        record = record_of(sequence, now, outputs, self.limits, self.cache)
        self._events.append(Finished(now, sequence.sequence_id, reason, stop_token, record, error))
