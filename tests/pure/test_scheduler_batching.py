"""Who computes what in a step: iteration-level batching, chunked prefill beside decodes, whole batches."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from tests.pure.worlds import ToyWorld, endings, request

from octavo.policy.bundle import Policies
from octavo.scheduling.events import Admitted, StepPlanned
from octavo.simulate.toy_model import STOP_ID, ToyModel


@pytest.mark.parametrize("depth", [0, 1])
def test_a_short_request_ends_and_the_waiting_one_enters_the_next_step_while_the_long_one_never_waits(
    depth: int,
) -> None:
    world = ToyWorld(slabs=7, depth=depth)
    short, long = world.ask(6, 4), world.ask(8, 8)
    world.step(2)
    waiting = world.ask(7, 4)
    while short not in endings(world.events):
        world.step()
        assert waiting not in world.running, "it fits only when the short one has ended"
    freed = world.cache.pool.free.count
    new = world.step()
    assert [event.sequence_id for event in new if isinstance(event, Admitted)] == [waiting]
    assert freed >= 3
    last = world.executor.plans[-1]
    assert sorted(last.sequence_ids.tolist()) == [long, waiting], "prefill and decode in one step"
    world.finish()
    steps = [number for number, _, _ in world.executor.computed_by(long)]
    assert steps == list(range(8)), "the long one computed in every step from the first to its last"
    world.assert_all_answered()


def test_a_request_that_arrives_while_others_decode_joins_them() -> None:
    """Fault 47: a second client joining a running batch."""
    world = ToyWorld(slabs=32)
    for _ in range(5):
        world.ask(5, 9)
        world.step(2)
    world.finish()
    world.assert_all_answered()
    assert max(plan.chunks for plan in world.executor.plans) >= 4


def test_a_long_prompt_is_computed_in_chunks_within_the_budget_and_decodes_go_on_beside_it() -> None:
    world = ToyWorld(slabs=40, seqs=4, budget=8)
    decoding = world.ask(3, 30)
    world.step(2)
    long = world.ask(40, 3)
    world.step(7)
    assert world.executor.computed_by(long) == [(2 + i, 7 * i, min(7, 40 - 7 * i)) for i in range(6)] + [(8, 40, 1)]
    world.finish()
    steps = [number for number, _, _ in world.executor.computed_by(decoding)]
    assert steps == list(range(30)), "a decode waited for a prefill"
    assert max(plan.tokens for plan in world.executor.plans) == 8
    world.assert_all_answered()


def test_no_step_exceeds_its_token_budget_and_none_is_empty() -> None:
    rng = Random(5)
    world = ToyWorld(slabs=30, seqs=6, budget=11)
    for _ in range(25):
        world.ask(rng.randint(1, 30), rng.randint(1, 12))
        world.step(rng.randint(0, 2))
    world.finish()
    assert all(1 <= plan.tokens <= 11 for plan in world.executor.plans)
    assert all((plan.counts >= 1).all() for plan in world.executor.plans)
    world.assert_all_answered()


def test_decodes_are_not_starved_by_a_stream_of_prefills() -> None:
    world = ToyWorld(slabs=60, seqs=6, budget=8)
    decoding = world.ask(2, 40)
    world.step()
    for _ in range(39):
        if len(world.scheduler.waiting) < 3:
            world.ask(20, 1)
        world.step()
    assert [number for number, _, _ in world.executor.computed_by(decoding)] == list(range(40))
    world.finish()
    world.assert_all_answered()


def test_prefills_are_finished_in_order_of_admission() -> None:
    world = ToyWorld(slabs=60, seqs=4, budget=10)
    first, second = world.ask(25, 2), world.ask(25, 2)
    world.finish()
    order = [ids for plan in world.executor.plans for ids in plan.sequence_ids.tolist()]
    assert order.index(second) > order.index(first)
    assert world.executor.computed_by(first)[:3] == [(0, 0, 10), (1, 10, 10), (2, 20, 5)]
    assert world.executor.computed_by(second)[0] == (2, 0, 5)


def test_the_last_token_of_a_sequence_is_never_computed() -> None:
    world = ToyWorld()
    only = world.ask(5, 3)
    world.finish()
    assert world.executor.computed_by(only) == [(0, 0, 5), (1, 5, 1), (2, 6, 1)]
    assert len(world.tokens(only)) == 3


@pytest.mark.parametrize("heads", [(2,), (4, 2)])
def test_depth_0_and_1_give_the_same_tokens(heads: tuple[int, ...]) -> None:
    answers = []
    for depth in (0, 1):
        rng = Random(11)
        world = ToyWorld(heads=heads, slabs=18, seqs=5, budget=12, depth=depth, model=ToyModel(ends_every=10))
        for _ in range(30):
            world.ask(rng.randint(1, 14), rng.randint(1, 14), eos=(STOP_ID,))
            world.step(rng.randint(0, 3))
        world.finish()
        world.assert_all_answered()
        answers.append({i: (world.tokens(i), endings(world.events)[i].reason) for i in world.asked})
    assert answers[0] == answers[1]
    assert {reason for _, reason in answers[0].values()} == {"stop", "length"}


def test_at_depth_1_an_end_that_was_not_foreseen_costs_one_step_in_vain_and_gives_no_token() -> None:
    world = ToyWorld(depth=1, model=ToyModel(ends_every=3))
    ids = [world.ask(4, 20, eos=(STOP_ID,)) for _ in range(6)]
    world.finish()
    world.assert_all_answered()
    for sequence_id in ids:
        end = endings(world.events)[sequence_id]
        assert len(world.executor.computed_by(sequence_id)) == len(world.tokens(sequence_id)) + (end.reason == "stop")


# -- batching by request: the baseline ----------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_in_a_whole_batch_seats_and_blocks_are_held_until_the_last_member_ends(depth: int) -> None:
    world = ToyWorld(slabs=30, seqs=4, depth=depth, policies=Policies.named(batching="request"))
    short, long, late = world.ask(6, 2), world.ask(6, 9), None
    world.step()
    late = world.ask(3, 2)
    held = []
    while long not in endings(world.events):
        world.step()
        if short in endings(world.events) and long not in endings(world.events):
            held.append(world.cache.tables[0].counts.tolist())
            assert short in world.running
            assert late not in world.running, "nobody joins a batch that runs"
    assert len(held) >= 5
    assert all(sum(count > 0 for count in counts) == 2 for counts in held)
    assert world.running == []
    world.step()
    assert world.running == [late]
    world.finish()
    world.assert_all_answered()


def test_a_member_that_has_ended_is_not_computed_again() -> None:
    world = ToyWorld(slabs=30, policies=Policies.named(batching="request"))
    short, long = world.ask(6, 2), world.ask(6, 9)
    world.finish()
    assert len(world.executor.computed_by(short)) == 2
    assert len(world.executor.computed_by(long)) == 9


def test_a_whole_batch_whose_members_run_short_takes_the_blocks_of_ended_ones_first() -> None:
    world = ToyWorld(slabs=7, policies=Policies.named(batching="request"))
    world.ask(8, 2)
    long = world.ask(8, 20)
    world.finish()
    world.assert_all_answered()
    assert endings(world.events)[long].record.preemptions == 0


def test_a_whole_batch_seats_no_more_than_its_prompts_have_blocks_for() -> None:
    world = ToyWorld(slabs=9, budget=8, policies=Policies.named(batching="request"))
    ids = [world.ask(16, 1) for _ in range(4)]  # four blocks each, one block of the nine is kept
    world.step()
    assert world.running == ids[:2]
    assert world.cache.pool.free.count == 7, "their prompts are computed in chunks, and promised their blocks"
    world.finish()
    world.assert_all_answered()
    assert all(end.record.preemptions == 0 for end in endings(world.events).values())


ALLOCATIONS = ("paged", "contiguous-max", "contiguous-pow2", "contiguous-oracle")


def test_all_pairs_of_allocation_and_batching_give_the_same_tokens() -> None:
    model = ToyModel(ends_every=9)
    answers = {}
    for allocation, batching, admission, depth in product(
        ALLOCATIONS, ("iteration", "request"), ("max_utilization", "guaranteed_no_evict"), (0, 1)
    ):
        policies = Policies.named(allocation=allocation, batching=batching, admission=admission)
        world = ToyWorld(slabs=16, seqs=4, budget=9, depth=depth, model=model, policies=policies)
        rng = Random(2)
        for i in range(14):
            prompt, most = rng.randint(1, 12), rng.randint(1, 14)
            draft = request(prompt, most, seed=i, eos=(STOP_ID,))
            true_output = len(model.answer(draft, prompt + most).tokens)
            world.submit(request(prompt, most, seed=i, eos=(STOP_ID,), true_output=true_output))
            world.step(rng.randint(0, 1))
        world.finish()
        answers[allocation, batching, admission, depth] = {i: world.tokens(i) for i in world.asked}
        assert answers[allocation, batching, admission, depth] == {i: world.alone(i).tokens for i in world.asked}
    assert len(answers) == 32


def test_the_request_baseline_takes_more_steps_than_iteration_for_the_same_work() -> None:
    steps = {}
    for batching in ("iteration", "request"):
        world = ToyWorld(slabs=60, seqs=4, policies=Policies.named(batching=batching))
        for i in range(12):
            world.ask(4, 20 if i % 4 == 0 else 2)
        world.finish()
        steps[batching] = world.count(StepPlanned)
    assert steps["iteration"] < steps["request"]


# -- what is told of it ---------------------------------------------------------------------------------


def test_a_step_says_how_many_decode_and_prefill_tokens_it_had_and_what_bound_it() -> None:
    world = ToyWorld(slabs=8, seqs=2, budget=6)
    world.ask(3, 9)
    world.step()
    world.ask(12, 2)
    world.ask(2, 2)
    told = [event for event in world.step(2) if isinstance(event, StepPlanned)]
    assert [(event.decode_tokens, event.prefill_tokens) for event in told] == [(1, 5), (1, 5)]
    assert [event.resource for event in told] == ["sequence_limit", "sequence_limit"]
    assert told[0].waiting == 1


def test_the_record_of_a_request_adds_up() -> None:
    world = ToyWorld(slabs=32, seqs=1)
    first, second = world.ask(5, 3), world.ask(6, 4)
    world.finish()
    record = endings(world.events)[second].record
    assert (record.input_tokens, record.output_tokens, record.preemptions) == (6, 4, 0)
    assert record.allocated_blocks == {"g0": 3}
    assert record.arrival_s == 0.0
    assert record.queue_time == 3.0, "it waited for the first one's three steps"
    assert record.queue_time + record.prefill_time + record.decode_time == record.finished_s - record.arrival_s
    assert endings(world.events)[first].record.queue_time == 0.0


def test_events_of_one_sequence_come_in_order() -> None:
    world = ToyWorld(slabs=12, seqs=4, depth=1)
    for _ in range(8):
        world.ask(7, 9)
    world.finish()
    for sequence_id in world.asked:
        kinds = [type(e).__name__ for e in world.events if getattr(e, "sequence_id", None) == sequence_id]
        assert kinds[0] == "Submitted"
        assert kinds[-1] == "Finished"
        assert kinds.count("Finished") == 1
        assert kinds.count("Admitted") == kinds.count("Preempted") + 1
    assert [plan.number for plan in world.executor.plans] == list(range(len(world.executor.plans)))
