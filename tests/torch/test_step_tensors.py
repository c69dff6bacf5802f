"""From plans to tensors: packing, tables kept from diffs, pending tokens, blocks made safe to read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.errors import InvariantViolation
from octavo.geometry.dtypes import FP32
from octavo.geometry.state import Component, Constant, Growing
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.runtime.arena import Arena
from octavo.runtime.step_tensors import StepTensors
from octavo.scheduling.plan import PENDING, Admission, BlockCopies, NewBlocks, StepPlan
from octavo.scheduling.request import Request, SamplingParams

BLOCK = 4


@pytest.fixture
def tensors():
    state = Growing((Component("k", (1, 2), FP32), Component("v", (1, 2), FP32)))
    return StepTensors(Arena(make_layout(served_groups((state,)), BLOCK, "tokens_heads"), 64), 6)


def plan(chunks, tokens, new=(), samples=None, admitted=()):
    """`chunks`: (row, start, count); `new`: (row, index, slot)."""
    rows, starts, counts = (np.asarray(c, np.int32) for c in zip(*chunks, strict=True))
    blocks = np.asarray(new, np.int32).reshape(-1, 3).T
    params = SamplingParams(temperature=0.0, seed=0)
    request = Request(request_id="r", prompt_token_ids=np.asarray([1], np.int32), params=params)
    admissions = tuple(Admission(row, row, request, np.zeros(0, np.int32)) for row in admitted)
    flags = np.ones(len(rows), np.bool_) if samples is None else np.asarray(samples, np.bool_)
    ids = np.asarray(tokens, np.int32)
    return StepPlan(
        1, 0.0, rows.astype(np.int64), rows, starts, counts, flags, ids, admissions, (NewBlocks(0, *blocks),)
    )


def test_decodes_are_packed_first_with_the_longest_context_in_front(tensors):
    made = tensors.build(
        plan(
            [(0, 0, 3), (1, 2, 1), (2, 6, 1)],
            [10, 11, 12, 20, 30],
            [(0, 0, 7), (1, 0, 9), (2, 0, 3), (2, 1, 50)],
            samples=[False, True, True],
        )
    )
    assert made.token_ids.tolist() == [[30, 20, 10, 11, 12]]
    assert made.positions.tolist() == [[6, 2, 0, 1, 2]]
    step = made.steps[0]
    assert (step.decodes, step.rows.tolist(), step.offsets.tolist()) == (2, [2, 1, 0], [0, 1, 2, 5])
    assert step.contexts.tolist() == [7, 3, 3]
    assert step.write_blocks.tolist() == [50, 9, 7, 7, 7]
    assert step.write_offsets.tolist() == [2, 2, 0, 1, 2]
    assert made.sampling.tolist() == [1, 2]
    assert made.keep.tolist() == [1, 0]


def test_a_pending_token_is_the_one_its_row_sampled_last(tensors):
    tensors.last_tokens[:] = [5, 6, 7, 8, 9, 10]
    made = tensors.build(plan([(4, 1, 1), (0, 2, 2)], [PENDING, 44, PENDING], [(4, 0, 1), (0, 0, 2)]))
    assert made.token_ids.tolist() == [[9, 44, 5]]


def test_tables_grow_past_their_first_width_and_keep_what_they_held(tensors):
    tensors.build(plan([(1, 0, 1)], [3], [(1, 0, 12)]))
    tensors.build(plan([(1, 1, 3)], [3, 3, 3], [(1, index, 10 + index) for index in range(1, 40)]))
    assert tensors._tables[0].units[1, :40].tolist() == [12, *range(11, 50)]


def test_a_new_block_shows_nothing_of_its_former_owner(tensors):
    arena = tensors._arena
    arena.bytes.fill_(0xFF)
    tensors.build(plan([(0, 0, 5)], [1] * 5, [(0, 0, 2), (0, 1, 3), (0, 2, 4)], admitted=[0]))
    v = arena.view(0, "v")
    assert v[2].isnan().all(), "this step fills the block itself"
    assert not v[3].isnan().any()
    assert not v[4].isnan().any(), "reserved ahead and not yet reached"


def test_what_a_shared_block_holds_already_is_kept(tensors):
    arena = tensors._arena
    arena.bytes.fill_(1)
    tensors.build(plan([(0, 6, 1)], [1], [(0, 0, 2), (0, 1, 3)], admitted=[0]))
    v = arena.view(0, "v")
    assert v[2].all()
    assert v[3][:2].all()
    assert not v[3][2:].any()


def test_a_row_that_changes_hands_starts_from_nothing(tensors):
    arena = tensors._arena
    tensors.build(plan([(0, 0, 8)], [1] * 8, [(0, 0, 2), (0, 1, 3)], admitted=[0]))
    arena.bytes.fill_(0xFF)
    tensors.build(plan([(0, 0, 2)], [1, 1], [(0, 0, 9)], admitted=[0]))
    assert not arena.view(0, "v")[9].isnan().any()


def test_an_empty_chunk_is_a_broken_plan(tensors):
    with pytest.raises(InvariantViolation, match="0 tokens"):
        tensors.build(plan([(0, 0, 0)], [], []))


# -- what goes on in place --------------------------------------------------------------------------


def shown(made):
    """Everything that a forward pass is told, as plain values."""
    steps = [
        (
            *(step.block_tokens, step.decodes, step.tables.tolist()),
            *(part.tolist() for part in (step.rows, step.offsets, step.starts, step.contexts)),
            *(part.tolist() for part in (step.write_blocks, step.write_offsets)),
        )
        for step in made.steps
    ]
    states = made.states
    kept = None if states is None else (states.decodes, states.offsets, states.starting, states.units.tolist())
    return made.token_ids.tolist(), made.positions.tolist(), made.keep.tolist(), made.sampling.tolist(), steps, kept


def schedules(seed, groups):
    """Plans of up to six rows that mostly go on by one token; now and then one leaves, comes, pauses or is long."""
    random = np.random.default_rng(seed)
    reached, held = dict.fromkeys(range(6), 0), {}
    order = list(range(6))
    for _ in range(300):
        if random.random() < 0.1:
            random.shuffle(order)
        chunks, new = [], []
        for row in order:
            event = random.random()
            if event < 0.01:
                reached[row] = 0  # another sequence has its seat
                held = {key: slot for key, slot in held.items() if key[1] != row}
            elif event < 0.02:
                continue
            count = int(random.integers(2, 9)) if reached[row] == 0 or event > 0.99 else 1
            chunks.append((row, reached[row], count))
            for group in range(groups):
                last = 0 if group == 0 and groups == 2 else (reached[row] + count - 1) // BLOCK
                for index in range(last + 1):
                    if (group, row, index) not in held or random.random() < 0.002:
                        held[group, row, index] = int(random.integers(0, 64))
                        new.append((group, row, index, held[group, row, index]))
            reached[row] += count
        tokens = sum(count for _, _, count in chunks)
        ids = np.where(random.random(tokens) < 0.7, PENDING, random.integers(0, 100, tokens))
        made = with_states(chunks, ids, new)
        yield replace(
            made, new_blocks=made.new_blocks[:groups], samples=np.asarray([r % 5 > 0 for r, _, _ in chunks], np.bool_)
        )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("groups", [1, 2])
def test_steps_that_go_on_in_place_are_those_that_are_laid_out_anew(seed, groups, request):
    first = request.getfixturevalue("tensors" if groups == 1 else "hybrid")
    second = StepTensors(Arena(first._arena.layout, 64), 6)
    went_on = 0
    for number, one in enumerate(schedules(seed, groups)):
        for each in (first, second):
            each.last_tokens[:] = number + np.arange(6)
        packed, second._packed = first._packed, None
        made, anew = first.build(one), second.build(one)
        assert shown(made) == shown(anew)
        assert (first._computed == second._computed).all()
        went_on += packed is first._packed
    assert went_on > 100, "most steps go on"


def test_a_step_that_goes_on_has_the_tensors_of_the_one_before(tensors):
    before = tensors.build(plan([(0, 2, 1), (1, 2, 1)], [5, 6], [(0, 0, 7), (1, 0, 8)]))
    after = tensors.build(plan([(0, 3, 1), (1, 3, 1)], [7, PENDING]))
    assert after.token_ids.data_ptr() == before.token_ids.data_ptr()
    assert after.steps[0].contexts.tolist() == [4, 4]
    assert after.steps[0].write_offsets.tolist() == [3, 3]


# -- constant state --------------------------------------------------------------------------------


@pytest.fixture
def hybrid():
    """Group 0 keeps constant state, group 1 all positions; a slab holds one block of each."""
    states = (
        Constant((Component("conv", (2, 3), FP32), Component("recurrent", (4,), FP32))),
        Growing((Component("k", (1, 2), FP32), Component("v", (1, 2), FP32))),
    )
    return StepTensors(Arena(make_layout(served_groups(states), BLOCK, "tokens_heads"), 64), 6)


def with_states(chunks, tokens, new, **more):
    """`plan` with blocks of both groups: `new` has (group, row, index, slot)."""
    made = plan(chunks, tokens)
    by_group = [[entry[1:] for entry in new if entry[0] == group] for group in (0, 1)]
    blocks = tuple(
        NewBlocks(group, *np.asarray(entries, np.int32).reshape(-1, 3).T) for group, entries in enumerate(by_group)
    )
    return replace(made, new_blocks=blocks, **more)


def test_chunks_are_sorted_into_those_that_go_on_and_those_that_start(hybrid):
    new = [(0, row, 0, 10 + row) for row in range(5)] + [(1, row, 0, row) for row in range(5)]
    made = hybrid.build(with_states([(0, 0, 3), (1, 2, 1), (2, 0, 1), (3, 6, 1), (4, 2, 2)], [1] * 8, new))
    states = made.states
    assert made.positions.tolist() == [[6, 2, 0, 0, 1, 2, 2, 3]]
    assert (states.decodes, states.offsets) == (2, (0, 1, 2, 3, 6, 8))
    assert states.starting == (False, False, True, True, False)
    assert states.units.tolist() == hybrid._arena.units(0, np.asarray([13, 11, 12, 10, 14], np.int32)).tolist()
    assert [(part.first, part.last, part.stacked, part.starts) for part in states.parts] == [
        (0, 2, True, False), (2, 3, False, True), (3, 6, False, True), (6, 8, False, False),
    ]  # fmt: skip


def test_a_model_without_constant_state_has_none(tensors):
    assert tensors.build(plan([(0, 0, 1)], [1], [(0, 0, 1)])).states is None


def test_the_state_of_a_chunk_at_position_zero_is_zeroed_and_of_no_other(hybrid):
    arena = hybrid._arena
    arena.bytes.fill_(0xFF)
    new = [(0, 0, 0, 3), (0, 1, 0, 4), (1, 0, 0, 0), (1, 1, 0, 1)]
    hybrid.build(with_states([(0, 0, 2), (1, 2, 1)], [1] * 3, new))
    slots = arena.slots(0)
    zeroed, kept = arena.units(0, np.asarray([3, 4], np.int32)).tolist()
    for view in (*slots.convolutions, *slots.recurrences):
        assert not view[zeroed].any()
        assert view[kept].isnan().all()


def test_what_a_plan_copies_first_is_there_when_the_chunk_runs(hybrid):
    arena = hybrid._arena
    source, target = arena.units(0, np.asarray([9, 3], np.int32)).tolist()
    arena.slots(0).recurrences[0][source] = 5.0
    copies = (BlockCopies(0, np.asarray([9], np.int32), np.asarray([3], np.int32)),)
    hybrid.build(with_states([(0, 2, 2)], [1] * 2, [(0, 0, 0, 3), (1, 0, 0, 0)], copies_before=copies))
    assert (arena.slots(0).recurrences[0][target] == 5.0).all()


def test_a_block_that_begins_as_a_copy_shows_nothing_past_what_was_meant(hybrid):
    """Copied whole, and then made safe: another sequence may have gone on in it, and failed."""
    arena = hybrid._arena
    source, target = arena.units(1, np.asarray([9, 4], np.int32)).tolist()
    arena.view(1, "v")[source] = float("nan")
    arena.view(1, "v")[source][:2] = 7.0
    copies = (BlockCopies(1, np.asarray([9], np.int32), np.asarray([4], np.int32)),)
    hybrid.build(with_states([(0, 2, 1)], [1], [(0, 0, 0, 3), (1, 0, 0, 4)], copies_before=copies))
    v = arena.view(1, "v")[target]
    assert (v[:2] == 7.0).all()
    assert not v[2:].any()
