"""Executors without a model, the handover told step by step, and the explorer behind `octavo check`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.pure.worlds import drain, endings, engine, expected, outputs, request

from octavo.cost.step import LinearCost
from octavo.errors import InvariantViolation
from octavo.memory import check as memory_check
from octavo.memory import check_tiers
from octavo.memory.adoption import adopt
from octavo.memory.cache import KVCache
from octavo.memory.prefix import Match
from octavo.memory.sharing import Sharing
from octavo.memory.tables import BlockTables
from octavo.memory.values import Adoption, NewBlocks
from octavo.policy.admission import GuaranteedNoEvict
from octavo.policy.chaos import Chaos
from octavo.scheduling import audit
from octavo.scheduling.plan import Admission, StepPlan
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.executors import SimExecutor
from octavo.simulate.explore import WHOLE_RUN, explore
from octavo.simulate.explore_worlds import World, all_worlds
from octavo.simulate.handover import walk_through
from octavo.simulate.toy_model import ToyExecutor, ToyModel, toy_layout, toy_request

# -- executors --------------------------------------------------------------------------------------


def test_echo_answers_with_the_prompt_over_and_over() -> None:
    core = engine()
    asked = request([5, 6, 7], 7)
    only = core.submit(asked, 0.0)
    assert outputs(drain(core))[only] == [5, 6, 7, 5, 6, 7, 5] == expected(asked, 7)


def test_sim_moves_a_virtual_clock_by_the_cost_of_each_step() -> None:
    executor = SimExecutor(LinearCost(step_s=1.0, token_s=0.1, context_token_s=0.0))
    core = engine(executor=executor)
    only = core.submit(request(10, 3), 0.0)
    events = drain(core)
    assert executor.clock_s == pytest.approx((1 + 1.0) + 2 * (1 + 0.1))
    assert endings(events)[only].record.finished_s == pytest.approx(executor.clock_s)
    assert endings(events)[only].record.first_token_s == pytest.approx(2.0)


@pytest.mark.parametrize("true_output", [1, 4, 9])
def test_sim_ends_a_request_at_its_true_length(true_output: int) -> None:
    core = engine(executor=SimExecutor(LinearCost()))
    only = core.submit(request(6, 20, eos=(3,), true_output=true_output), 0.0)
    events = drain(core)
    assert len(outputs(events)[only]) == true_output
    assert endings(events)[only].reason == "stop"


def plan(number: int, block: tuple[int, int] | None, *, end: int = 4, row: int | None = None) -> StepPlan:
    """One chunk of positions 0 .. end - 1; `block` is (index, slot); `row` is newly seated, or else row 0 goes on."""
    seat = np.array([row or 0], dtype=np.int32)
    asked = toy_request("r", list(range(1, end + 1)), 4)
    return StepPlan(
        number=number,
        planned_s=0.0,
        sequence_ids=seat.astype(np.int64),
        rows=seat,
        starts=np.zeros(1, dtype=np.int32),
        counts=np.array([end], dtype=np.int32),
        samples=np.array([True]),
        token_ids=asked.prompt_token_ids,
        admissions=() if row is None else (Admission(row, row, asked, np.empty(0, dtype=np.int32)),),
        new_blocks=() if block is None else (NewBlocks(0, seat, *np.array([block], dtype=np.int32).T),),
    )


def test_the_toy_executor_refuses_a_plan_that_breaks_the_contract() -> None:
    executor = ToyExecutor(ToyModel(), toy_layout(), 4, 2)
    executor.submit(plan(0, (0, 2), row=0))
    for broken, name in (
        (plan(1, (0, 3)), "executor-tables"),  # a second block in the first place
        (plan(1, None, end=5), "executor-tables"),  # a position beyond the blocks
        (plan(1, (0, 2), row=1), "in-flight-slots"),  # plan 0 still touches slot 2
    ):
        with pytest.raises(InvariantViolation) as caught:
            executor.submit(broken)
        assert caught.value.name == name
    executor.collect()
    executor.submit(plan(2, (0, 2), row=1))


@pytest.mark.parametrize("heads", [(2,), (4, 2)])
def test_the_toy_model_reads_every_position_it_has_kept(heads: tuple[int, ...]) -> None:
    """Spoiling one cell of the arena, whichever of those in use, changes what comes next."""
    clean = None
    for spoiled in range(-1, 4):
        layout = toy_layout(heads)
        executor = ToyExecutor(ToyModel(), layout, 8, 2)
        core = engine(layout=layout, slabs=8, seqs=2, executor=executor)
        only = core.submit(request(4, 3), 0.0)
        events = core.step(0.0)
        if spoiled >= 0:
            executor._arena[np.flatnonzero(executor._arena)[spoiled]] ^= np.uint64(1)
        tokens = outputs(events + drain(core))[only]
        clean = clean or tokens
        assert (tokens == clean) == (spoiled < 0)


# -- the handover -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_the_walk_through_tells_the_handover(depth: int) -> None:
    lines = walk_through(depth)
    text = "\n".join(lines)
    ended = next(i for i, line in enumerate(lines) if "A ends, its blocks return" in line)
    entered = next(i for i, line in enumerate(lines) if "C prefills" in line)
    assert "B decodes" in lines[ended]
    assert "C waits for blocks" in lines[ended]
    assert "B decodes" in lines[entered]
    steps = [line for line in lines if line.startswith("step")]
    assert steps.index(lines[entered]) == steps.index(lines[ended]) + 1
    assert "A0 -> 0" in text
    assert lines[-1].startswith("A ended in step")
    assert "(7 of 7 blocks free)" in steps[-1]
    assert walk_through(depth) == lines


def test_a_scheduler_that_hands_nothing_over_does_not_pass_the_walk_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seats kept until everybody has ended: what batching by request does."""
    monkeypatch.setattr("octavo.policy.batching.IterationBatching.whole_batches", True)
    with pytest.raises(InvariantViolation, match="handover"):
        walk_through()


# -- the explorer -----------------------------------------------------------------------------------


def test_every_invariant_is_explored_by_name_and_holds() -> None:
    found = explore(seed=1, steps=2_400)
    names = [*memory_check.INVARIANTS, *audit.INVARIANTS, *check_tiers.INVARIANTS, *WHOLE_RUN]
    assert [one.name for one in found] == names
    assert [one for one in found if not one.passed] == []
    states = {one.name: one.states_visited for one in found}
    assert states["slot-moves"] == 16
    assert min(states[name] for name in (*memory_check.INVARIANTS, *audit.INVARIANTS)) > 300
    assert min(states[name] for name in check_tiers.INVARIANTS) > 100
    assert states["empty-after-drain"] == len(all_worlds())
    assert states["tiers-at-rest"] == sum(bool(world.placement) for world in all_worlds()) == 48


def test_the_same_seed_explores_the_same_and_another_one_something_else() -> None:
    worlds = (World(depth=1), World((4, 2), chaos=True))
    first = explore(seed=5, steps=120, worlds=worlds)
    assert explore(seed=5, steps=120, worlds=worlds) == first
    assert explore(seed=6, steps=120, worlds=worlds) != first


def test_the_worlds_cover_every_pair_of_mechanisms() -> None:
    labels = [world.label for world in all_worlds()]
    assert len(set(labels)) == len(labels) == 4 * ((3 + 1) * 5 + 6) * 2
    assert sum("chaos" in label for label in labels) == 32 + 8
    assert sum("constant" in label and "window" in label for label in labels) == 40 + 12
    assert sum("offload" in label and "reuse none" in label for label in labels) == 8


def _leaks_one_block(patch: pytest.MonkeyPatch) -> str:
    unreference = KVCache.unreference
    patch.setattr(
        KVCache, "unreference", lambda self, group, slots, to, **how: unreference(self, group, slots[1:], to, **how)
    )
    return "references-equal-occurrences"


def _frees_in_flight(patch: pytest.MonkeyPatch) -> str:
    unreference = KVCache.unreference
    patch.setattr(
        KVCache, "unreference", lambda self, group, slots, _, **how: unreference(self, group, slots, -1, **how)
    )
    return "in-flight-slots"


def _forgets_an_answer(patch: pytest.MonkeyPatch) -> str:
    report = Scheduler._report_end

    def sometimes(self: Scheduler, sequence: object, reason: str, *rest: object, **more: object) -> None:
        if reason != "stop":
            report(self, sequence, reason, *rest, **more)  # type: ignore[arg-type]

    patch.setattr(Scheduler, "_report_end", sometimes)
    return "all-requests-answered"


def _forgets_what_it_had(patch: pytest.MonkeyPatch) -> str:
    seat = Scheduler.welcome

    def skip_one(self: Scheduler, sequence: object, draft: object, match: object) -> None:
        seat(self, sequence, draft, match)  # type: ignore[arg-type]
        row = sequence.row  # type: ignore[attr-defined]
        if sequence.preemptions:  # type: ignore[attr-defined]
            self.running.feed[row] = np.roll(self.running.feed[row], 1)

    patch.setattr(Scheduler, "welcome", skip_one)
    return "tokens-unchanged-by-policy"


def _lets_nobody_in(patch: pytest.MonkeyPatch) -> str:
    patch.setattr("octavo.scheduling.scheduler.enter", lambda scheduler, draft: None)
    return "progress"


def _gives_up_what_is_read(patch: pytest.MonkeyPatch) -> str:
    give_up = BlockTables.give_up
    patch.setattr(BlockTables, "give_up", lambda self, rows, firsts: give_up(self, rows, firsts + 1))
    return "nothing-readable-given-up"


def _gives_up_too_little(patch: pytest.MonkeyPatch) -> str:
    give_up = BlockTables.give_up
    patch.setattr(BlockTables, "give_up", lambda self, rows, firsts: give_up(self, rows, np.maximum(firsts - 3, 0)))
    return "held-within-charge"


def _forgets_to_copy(patch: pytest.MonkeyPatch) -> str:
    """A block that is kept and wanted in part is given away as an empty one."""

    def adopted(*given: object) -> object:
        got = adopt(*given)  # type: ignore[arg-type]
        return replace(got, copies=()) if isinstance(got, Adoption) else got

    patch.setattr("octavo.scheduling.starting.adopt", adopted)
    return "tokens-unchanged-by-policy"


def _forgets_doubles(patch: pytest.MonkeyPatch) -> str:
    """Who holds the first of two equal blocks, and a copy of its own, never lets go of the first."""
    end = Sharing.end
    patch.setattr(Sharing, "end", lambda self, row: end(self, row)[:0])
    return "references-equal-occurrences"


def _shares_past_the_match(patch: pytest.MonkeyPatch) -> str:
    """A hit is one position longer than what is alike."""
    match = Sharing.match

    def longer(self: Sharing, chain: object, tokens: object, limit: int, *tiers: int) -> Match:
        found = match(self, chain, tokens, limit, *tiers)  # type: ignore[arg-type]
        return replace(found, tokens=found.tokens + 1) if found.partial and found.tokens < limit else found

    patch.setattr(Sharing, "match", longer)
    return "tokens-unchanged-by-policy"


def _guarantees_what_it_has_not(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(GuaranteedNoEvict, "admits", lambda self, view: True)
    return "guarantee-never-pauses"


@pytest.mark.parametrize(
    "plant",
    [
        _leaks_one_block,
        _frees_in_flight,
        _forgets_an_answer,
        _forgets_what_it_had,
        _lets_nobody_in,
        _gives_up_what_is_read,
        _gives_up_too_little,
        _forgets_to_copy,
        _forgets_doubles,
        _shares_past_the_match,
        _guarantees_what_it_has_not,
    ],
)
def test_a_planted_bug_fails_the_invariant_it_breaks_and_says_where(
    plant: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = plant(monkeypatch)
    found = {one.name: one for one in explore(seed=0, steps=1_600, worlds=all_worlds()[::3])}
    assert not found[name].passed
    assert "operation" in found[name].detail or "depth" in found[name].detail


def test_chaos_answers_the_same_for_the_same_seed() -> None:
    wanted = np.array([3, 1, 5], dtype=np.int64)
    one, two = Chaos(4), Chaos(4)
    assert [one.split(wanted, 6).tolist() for _ in range(9)] == [two.split(wanted, 6).tolist() for _ in range(9)]
