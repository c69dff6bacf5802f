"""Who gets in, and in which order; what can never fit is refused at once, with the arithmetic."""

from __future__ import annotations

from random import Random

import pytest
from tests.pure.worlds import VOCAB, ToyWorld, endings, request

from octavo.errors import CapacityError, ConfigError, RequestError
from octavo.policy.allocation import Paged
from octavo.policy.bundle import Policies
from octavo.scheduling.entry import MAX_PASSED
from octavo.scheduling.events import Admitted, Event, Finished, Preempted, StepPlanned
from octavo.scheduling.limits import Limits, checked_limit
from octavo.simulate.toy_model import ToyModel

POOL = 8
BLOCK = 4
ROOM = POOL * BLOCK


def admitted(events: list[Event]) -> list[int]:
    return [event.sequence_id for event in events if isinstance(event, Admitted)]


# -- policies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_guaranteed_no_evict_never_pauses_what_it_started(depth: int) -> None:
    for seed in range(12):
        rng = Random(seed)
        policies = Policies.named(admission="guaranteed_no_evict")
        world = ToyWorld(slabs=14, seqs=6, budget=9, depth=depth, policies=policies, model=ToyModel(ends_every=15))
        for _ in range(20):
            world.ask(rng.randint(1, 14), rng.randint(1, 20), eos=(0,), priority=rng.choice((0, 0, 3)))
            world.step(rng.randint(0, 3))
        world.finish()
        world.assert_all_answered()
        assert world.count(Preempted) == 0


def test_max_utilization_packs_more_than_the_guarantee_and_pays_in_preemptions() -> None:
    most, paused = {}, {}
    for admission in ("max_utilization", "guaranteed_no_evict"):
        world = ToyWorld(slabs=16, seqs=8, policies=Policies.named(admission=admission))
        for _ in range(8):
            world.ask(4, 24)
        world.finish()
        world.assert_all_answered()
        most[admission] = max(plan.chunks for plan in world.executor.plans)
        paused[admission] = world.count(Preempted)
    assert most == {"max_utilization": 8, "guaranteed_no_evict": 2}
    assert paused["max_utilization"] > paused["guaranteed_no_evict"] == 0


def test_the_guarantee_counts_what_still_drains() -> None:
    world = ToyWorld(slabs=8, depth=1, policies=Policies.named(admission="guaranteed_no_evict"))
    first = world.ask(8, 20)
    world.step(3)
    second = world.ask(20, 5)
    world.core.abort(first, world.time)
    assert (world.cache.pool.draining, world.cache.pool.free.count) == ([3], 5)
    world.step()
    assert second not in world.running, "its prompt fits into five blocks, its maximum of six does not"
    world.finish()
    world.assert_all_answered()
    assert endings(world.events)[second].reason == "length"


# -- order ------------------------------------------------------------------------------------------


def test_lower_priority_values_enter_first_and_equals_in_order_of_arrival() -> None:
    world = ToyWorld(seqs=1)
    ids = [world.ask(3, 2, priority=priority) for priority in (5, 0, -1, 5, -1, 0)]
    world.finish()
    assert admitted(world.events) == [ids[i] for i in (2, 4, 1, 5, 0, 3)]


def test_a_request_of_high_priority_passes_those_that_wait_and_none_that_runs() -> None:
    world = ToyWorld(seqs=1)
    running, waiting = world.ask(3, 6), world.ask(3, 2)
    world.step(2)
    urgent = world.ask(3, 2, priority=-5)
    world.finish()
    assert admitted(world.events) == [running, urgent, waiting]


def test_short_requests_pass_a_big_one_that_waits_for_blocks() -> None:
    """Fault 51, one direction: ten blocks are free, the head needs twelve, the next one."""
    world = ToyWorld(slabs=20, seqs=8)
    world.ask(36, 12)  # nine blocks, twelve in the end
    world.step()
    big = world.ask(46, 2)
    small = [world.ask(3, 2) for _ in range(3)]
    world.step()
    assert [i in world.running for i in (big, *small)] == [False, True, True, True]
    world.finish()
    world.assert_all_answered()


def test_a_big_request_is_not_starved_by_short_ones_that_keep_coming() -> None:
    """Fault 51, the other direction: a bounded number pass it, then the line waits for it."""
    world = ToyWorld(slabs=12, seqs=8, audit=False)
    world.ask(2, 3)
    world.step()
    big = world.ask(44, 2)  # the whole pool
    short = []
    while big not in world.running:
        short.append(world.ask(2, 3))  # one block each, three steps each: there is always room for them
        world.step()
        assert len(short) < MAX_PASSED + 10, "the big one is starved"
    order = admitted(world.events)
    assert len([i for i in order[: order.index(big)] if i in short]) == MAX_PASSED
    world.finish()
    world.assert_all_answered()


def test_short_requests_wait_little_behind_a_big_one() -> None:
    world = ToyWorld(slabs=12, seqs=8, audit=False)
    world.ask(8, 25)
    world.step()
    big = world.ask(44, 2)
    short = []
    for _ in range(20):
        short.append(world.ask(3, 2))
        world.step()
    waits = sorted(endings(world.events)[i].record.queue_time for i in short if i in endings(world.events))
    assert len(waits) >= 15
    assert waits[-1] <= 1.0
    assert big not in world.running


def test_nobody_passes_a_sequence_that_was_preempted() -> None:
    world = ToyWorld(slabs=12, seqs=8)
    old = world.ask(20, 24)
    paused = world.ask(16, 8)
    while not world.count(Preempted):
        world.step()
    assert world.running == [old]
    urgent = world.ask(40, 4, priority=-1)
    small = world.ask(3, 2)
    while old not in endings(world.events):
        world.step()
        assert small not in world.running, "it passed a preempted sequence"
    world.finish()
    world.assert_all_answered()
    order = admitted(world.events)
    assert order.index(urgent) < order.index(small)
    assert [i for i in order if i in (paused, small)] == [paused, paused, small]


def test_the_queue_is_bounded_where_a_bound_is_set() -> None:
    world = ToyWorld(seqs=1, max_waiting=2)
    world.ask(3, 3)
    world.step()
    world.ask(3, 3)
    world.ask(3, 3)
    with pytest.raises(RequestError, match="2 requests wait already; try later"):
        world.ask(3, 3)
    world.finish()
    world.ask(3, 3)
    world.finish()
    world.assert_all_answered()


# -- what can never fit -------------------------------------------------------------------------------


def test_a_prompt_larger_than_the_pool_is_refused_at_once_and_nobody_behind_it_is_blocked() -> None:
    """Fault 14: within the context limit, beyond the pool."""
    world = ToyWorld(slabs=POOL)
    with pytest.raises(CapacityError) as caught:
        world.ask(ROOM + 1, 1)
    assert caught.value.field == "prompt"
    for figure in ("prompt 33", "9 blocks of 4 tokens", "has 8 (32 tokens)"):
        assert figure in str(caught.value)
    served = world.ask(5, 3)
    world.finish()
    assert list(endings(world.events)) == [served]


def test_a_prompt_that_fits_with_an_answer_that_does_not_is_refused_at_once() -> None:
    """Fault 14, second half."""
    world = ToyWorld(slabs=POOL)
    with pytest.raises(CapacityError, match=r"max_tokens=.*prompt 20 \+ 14 output tokens.*needs 9 blocks"):
        world.ask(20, 14)
    world.step()
    assert not world.core.has_work
    assert world.executor.plans == []


@pytest.mark.parametrize(
    ("prompt", "output", "field", "needs"),
    [
        (ROOM, 1, "prompt", "prompt 32 + 1 output tokens': needs 9 blocks of 4 tokens"),
        (ROOM, None, "prompt", "prompt 32 + 1 output tokens': needs 9 blocks of 4 tokens"),
        (ROOM + 1, 0, "prompt", "prompt 33 + 0 output tokens': needs 9 blocks of 4 tokens"),
        (63, None, "prompt", "prompt 63 + 1 output tokens': needs 16 blocks of 4 tokens"),
        (ROOM - 1, 2, "max_tokens", "prompt 31 + 2 output tokens': needs 9 blocks of 4 tokens"),
        (20, 44, "max_tokens", "prompt 20 + 44 output tokens': needs 16 blocks of 4 tokens"),
    ],
)
def test_past_a_limit_that_was_cut_to_the_pool_the_pool_is_named_and_not_the_context(
    prompt: int, output: int | None, field: str, needs: str
) -> None:
    world = ToyWorld(slabs=POOL)
    limits = Limits(4, 64, ROOM, VOCAB, context_tokens=64)
    with pytest.raises(CapacityError) as caught:
        checked_limit(request(prompt, output), limits, world.cache, Paged())
    assert caught.value.field == field
    for part in (needs, "the whole pool has 8 (32 tokens)", "start with a larger KV cache"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "output", "field"), [(64, None, "prompt"), (70, 1, "prompt"), (20, 45, "max_tokens")]
)
@pytest.mark.parametrize("cut", [True, False])
def test_past_the_context_itself_no_larger_cache_is_advised(
    prompt: int, output: int | None, field: str, cut: bool
) -> None:
    world = ToyWorld(slabs=POOL)
    limits = Limits(4, 64, ROOM if cut else 64, VOCAB, context_tokens=64 if cut else None)
    with pytest.raises(RequestError, match=r"the context (holds|of) 64") as caught:
        checked_limit(request(prompt, output), limits, world.cache, Paged())
    assert (type(caught.value), caught.value.field) == (RequestError, field)
    assert ("this KV cache has room for 32" in str(caught.value)) == cut


def test_a_limit_above_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="the context holds 64"):
        Limits(4, 64, 65, VOCAB, context_tokens=64)


@pytest.mark.parametrize("heads", [(2,), (4, 2), (6, 2)])
@pytest.mark.parametrize("depth", [0, 1])
def test_every_length_around_the_pools_size_is_answered_or_refused(heads: tuple[int, ...], depth: int) -> None:
    """Fault 57: two rules that disagree by a page. There is one figure, and it is exact."""
    world = ToyWorld(heads=heads, slabs=POOL, depth=depth)
    capacity = world.cache.max_tokens_per_sequence()
    for total in range(capacity - 3 * BLOCK, capacity + BLOCK + 2):
        for prompt in sorted({1, total // 2, total - 2, total - 1}):
            fits = total - 1 <= capacity  # the last token is never computed
            if fits:
                world.ask(prompt, total - prompt)
                world.finish(most=200)
            else:
                with pytest.raises(CapacityError):
                    world.ask(prompt, total - prompt)
    world.assert_all_answered()
    assert world.count(Preempted) == 0


def test_the_printed_capacity_is_the_one_that_admission_counts_with() -> None:
    """Fault 17: prompts of capacity - 1, capacity and capacity + 1 tokens."""
    world = ToyWorld(slabs=POOL)
    capacity = world.cache.max_tokens_per_sequence()
    assert capacity == ROOM
    for prompt in (capacity - 1, capacity):
        world.ask(prompt, 1)
        world.finish()
    with pytest.raises(CapacityError, match=f"{capacity} tokens"):
        world.ask(capacity + 1, 1)
    world.assert_all_answered()


@pytest.mark.parametrize("heads", [(2,), (4, 2), (6, 2)])
@pytest.mark.parametrize("more", [0, 1, 2])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("admission", ["max_utilization", "guaranteed_no_evict"])
def test_a_pool_of_exactly_one_longest_request_serves_it(
    heads: tuple[int, ...], more: int, depth: int, admission: str
) -> None:
    """Fault 56: need, need + 1 and need + 2 blocks, with and without another one beside it."""
    context = 41
    need = ToyWorld(heads=heads).cache.layout.slabs_for(context - 1)
    world = ToyWorld(
        heads=heads,
        slabs=need + more,
        context=context,
        budget=8,
        depth=depth,
        policies=Policies.named(admission=admission),
    )
    longest = world.ask(30, 11)
    world.finish(most=30)
    assert len(world.executor.computed_by(longest)) == 4 + 10, "it was prefilled once"
    both = [world.ask(38, 3), world.ask(30, 11)]
    world.finish(most=80)
    assert endings(world.events)[both[0]].record.preemptions == 0
    world.assert_all_answered()


def test_a_context_larger_than_the_pool_serves_what_the_pool_holds() -> None:
    world = ToyWorld(slabs=POOL, context=1000)
    open_ended = world.ask(20, None)
    world.finish()
    assert len(world.tokens(open_ended)) == ROOM + 1 - 20
    with pytest.raises(CapacityError):
        world.ask(ROOM + 1, None)


def test_without_max_tokens_the_answer_fills_the_context() -> None:
    """Fault 25: max_tokens left out."""
    world = ToyWorld(slabs=30, context=24)
    only = world.ask(20, None)
    world.finish()
    assert len(world.tokens(only)) == 4
    assert endings(world.events)[only].reason == "length"


@pytest.mark.parametrize(
    ("prompt", "most", "field"), [(24, 1, "prompt"), (25, 0, "prompt"), (30, None, "prompt"), (20, 5, "max_tokens")]
)
def test_what_passes_the_context_is_refused_and_never_an_empty_success(
    prompt: int, most: int | None, field: str
) -> None:
    """Faults 26 and 27: too many tokens asked, or a conversation longer than the context."""
    world = ToyWorld(slabs=30, context=24)
    with pytest.raises(RequestError) as caught:
        world.ask(prompt, most)
    assert caught.value.field == field
    assert "24" in str(caught.value)
    assert not world.core.has_work


def test_max_tokens_0_is_an_empty_answer_without_a_step() -> None:
    world = ToyWorld(slabs=2)
    empty = world.ask(20, 0)
    assert not world.core.has_work
    world.finish()
    end = endings(world.events)[empty]
    assert (end.reason, end.record.output_tokens, end.record.allocated_blocks) == ("length", 0, {"g0": 0})
    assert world.executor.plans == []


def test_a_refused_request_leaves_no_trace() -> None:
    world = ToyWorld(slabs=POOL)
    first = world.ask(5, 2)
    for prompt, most in ((100, 1), (5, 100), (0, 3)):
        with pytest.raises(RequestError):
            world.core.submit(request([1] * prompt, most), 0.0)
    second = world.ask(5, 2)
    assert second == first + 1
    world.finish()
    assert world.count(Finished) == 2


def test_token_ids_beyond_the_vocabulary_are_refused() -> None:
    world = ToyWorld()
    with pytest.raises(RequestError, match="token ids run from 0 to 999"):
        world.submit(request([1, 1000], 2))


# -- contiguous allocation ------------------------------------------------------------------------------


@pytest.mark.parametrize(("allocation", "waits"), [("contiguous", True), ("paged", False)])
def test_a_contiguous_request_waits_although_enough_blocks_are_free_because_no_run_is_long_enough(
    allocation: str, waits: bool
) -> None:
    world = ToyWorld(slabs=9, policies=Policies.named(allocation=allocation))
    # Two blocks each: 0 1, 2 3, 4 5, 6 7. The first and the third end at once: 0 1, 4 5 and 8 are free.
    ids = [world.ask(prompt, most) for prompt, most in ((5, 2), (4, 5), (5, 2), (4, 5))]
    world.step(2)
    assert set(endings(world.events)) == {ids[0], ids[2]}
    late = world.ask(9, 3)  # three blocks
    told = [event for event in world.step() if isinstance(event, StepPlanned)]
    assert (late not in world.running) == waits
    if waits:
        assert (told[0].free_slabs, world.cache.pool.free.largest_run()) == (5, 2)
        assert told[0].resource == "kv_blocks"
    world.finish()
    world.assert_all_answered()


def test_a_contiguous_request_whose_run_can_never_exist_is_refused_where_paged_serves_it() -> None:
    declared = {"prompt": 10, "max_tokens": 30}  # ten blocks declared; a power of two is sixteen
    for allocation, slabs, served in (
        ("paged", 10, True),
        ("contiguous-max", 10, True),
        ("contiguous-pow2", 10, False),
        ("contiguous-pow2", 16, True),
        ("contiguous-max", 9, False),
    ):
        world = ToyWorld(slabs=slabs, policies=Policies.named(allocation=allocation))
        if served:
            world.ask(**declared)
            world.finish()
            world.assert_all_answered()
        else:
            with pytest.raises(CapacityError, match=f"whole pool has {slabs}"):
                world.ask(**declared)


def test_what_each_contiguous_allocation_sets_aside() -> None:
    """Prompt 6, at most 20 more, 5 in truth: 25, 16 and 10 positions to be computed, in blocks of four."""
    held = {}
    for allocation in ("paged", "contiguous-max", "contiguous-pow2", "contiguous-oracle"):
        world = ToyWorld(slabs=16, policies=Policies.named(allocation=allocation))
        world.ask(6, 20, true_output=5)
        world.step()
        held[allocation] = int(world.cache.tables[0].counts.sum())
        world.finish()
    assert held == {"paged": 2, "contiguous-max": 7, "contiguous-pow2": 4, "contiguous-oracle": 3}


def test_a_sequence_that_outlives_its_true_length_ends_where_its_run_does() -> None:
    """A run is never extended, so that what a trace says wrongly costs its own request alone."""
    lengths = {}
    for allocation in ("contiguous-pow2", "contiguous-oracle"):
        world = ToyWorld(slabs=16, policies=Policies.named(allocation=allocation))
        only = world.ask(6, 20, true_output=5)
        world.finish()
        lengths[allocation] = len(world.tokens(only))
        assert world.tokens(only) == world.alone(only).tokens[: lengths[allocation]]
    assert lengths == {"contiguous-pow2": 16 + 1 - 6, "contiguous-oracle": 5}


def test_the_oracle_asks_for_true_lengths() -> None:
    world = ToyWorld(policies=Policies.named(allocation="contiguous-oracle"))
    with pytest.raises(RequestError, match="true_output_tokens=None"):
        world.ask(5, 5)
