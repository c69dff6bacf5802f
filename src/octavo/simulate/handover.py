"""Continuous batching in one small world, told step by step.

A and B decode. A ends and its blocks return. At the next eligible step C, which waited for want of
blocks, is prefilled in them beside B, and B computes a token in every step. `walk_through` runs
this through the real scheduler and raises `InvariantViolation` when any part of it did not happen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.errors import InvariantViolation
from octavo.memory.cache import KVCache
from octavo.memory.check import check, is_empty
from octavo.memory.inspect import table_lines
from octavo.memory.layout import Layout
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Event, Finished, StepTokens
from octavo.scheduling.limits import Limits
from octavo.scheduling.plan import StepPlan
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.toy_model import VOCAB, ToyExecutor, ToyModel, toy_layout, toy_request

SLABS = 7
ROWS = 4
_REQUESTS = {  # prompt, output tokens; in blocks of 4: A and B hold six of the seven when A ends
    "A": (list(range(1, 7)), 4),
    "B": (list(range(11, 19)), 8),
    "C": (list(range(21, 28)), 5),
}
_C_ARRIVES_AT = 2


class _Watched(ToyExecutor):
    """Keeps the last plan, to tell who computed what."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(ToyModel(), layout, SLABS, ROWS)
        self.last: StepPlan | None = None

    def submit(self, plan: StepPlan) -> None:
        self.last = plan
        super().submit(plan)


@dataclass(slots=True)
class _Story:
    names: dict[int, str] = field(default_factory=dict)
    """By sequence id."""
    lines: list[str] = field(default_factory=list)
    steps_of: dict[str, list[int]] = field(default_factory=dict)
    """Steps in which each one computed something."""
    slots_of: dict[str, list[int]] = field(default_factory=dict)
    """Slots that each one was given, in order."""
    tokens_of: dict[str, list[int]] = field(default_factory=dict)
    ended_at: dict[str, int] = field(default_factory=dict)


def walk_through(depth: int = 0) -> list[str]:
    """The handover as lines of text. Raises `InvariantViolation` (`handover`) when it did not happen."""
    layout = toy_layout()
    cache, executor = KVCache(layout, SLABS, ROWS), _Watched(layout)
    limits = Limits(max_num_seqs=ROWS, max_num_batched_tokens=32, max_model_len=64, vocab_size=VOCAB)
    core = EngineCore(Scheduler(cache, limits), executor, depth=depth)
    story = _Story()
    for name in "AB":
        _submit(core, story, name)
    step = 0
    while core.has_work:
        _require(step < 64, "the story does not end")
        if step == _C_ARRIVES_AT:
            _submit(core, story, "C")
        executor.last = None
        events = core.step(float(step))
        check(cache)
        _tell(story, step, core, executor.last, events)
        step += 1
    _check_outcome(story, cache, depth)
    first = story.steps_of["C"][0]
    story.lines.append(
        f"A ended in step {story.ended_at['A']}; in step {first} C was prefilled in A's blocks, "
        f"beside B, which computed in every step from 0 to {story.steps_of['B'][-1]}"
    )
    return story.lines


def _submit(core: EngineCore, story: _Story, name: str) -> None:
    prompt, output_tokens = _REQUESTS[name]
    sequence_id = core.submit(toy_request(name, prompt, output_tokens), 0.0)
    story.names[sequence_id] = name
    story.steps_of[name], story.slots_of[name], story.tokens_of[name] = [], [], []
    story.lines.append(f"        {name} arrives: {len(prompt)} prompt tokens, {output_tokens} to generate")


def _tell(story: _Story, step: int, core: EngineCore, plan: StepPlan | None, events: list[Event]) -> None:
    said = []
    if plan is not None:
        for i, sequence_id in enumerate(plan.sequence_ids.tolist()):
            name, start, count = story.names[sequence_id], int(plan.starts[i]), int(plan.counts[i])
            kind = "prefills" if start < len(_REQUESTS[name][0]) else "decodes"
            said.append(f"{name} {kind} {start}" + (f"..{start + count - 1}" if count > 1 else ""))
            story.steps_of[name].append(step)
        seated = dict(zip(plan.rows.tolist(), plan.sequence_ids.tolist(), strict=True))
        for blocks in plan.new_blocks:
            for row, slot in zip(blocks.rows.tolist(), blocks.slots.tolist(), strict=True):
                story.slots_of[story.names[seated[row]]].append(slot)
    for event in events:
        if isinstance(event, StepTokens):
            for sequence_id, token in event.pairs():
                story.tokens_of[story.names[sequence_id]].append(token)
        elif isinstance(event, Finished):
            story.ended_at[story.names[event.sequence_id]] = step
            said.append(f"{story.names[event.sequence_id]} ends, its blocks return")
    pool, running = core.scheduler.cache.pool, core.scheduler.running
    waiting = [sequence.request.request_id for sequence in core.scheduler.waiting]
    if waiting:
        said.append(f"{', '.join(waiting)} waits for blocks")
    free = f"{pool.free.count} of {SLABS} blocks free"
    story.lines.append(f"step {step:2d} {'; '.join(said) or 'nothing to plan'} ({free})")
    names = {row: running.sequence(row).request.request_id for row in running.order.tolist()}
    story.lines.extend(f"        {line}" for line in table_lines(core.scheduler.cache, names))


def _check_outcome(story: _Story, cache: KVCache, depth: int) -> None:
    a, b, c = (story.steps_of[name] for name in "ABC")
    end = story.ended_at["A"]
    _require(end > _C_ARRIVES_AT, f"A ended in step {end}, before C arrived")
    _require(c[0] == end + 1, f"A ended in step {end}, C entered in step {c[0]}")
    _require(b == list(range(len(b))) and b[-1] > c[0], f"B computed in steps {b}")
    c_first = story.slots_of["C"][: -(-len(_REQUESTS["C"][0]) // 4)]
    _require(set(c_first) <= set(story.slots_of["A"]), f"C took slots {c_first}, A had {story.slots_of['A']}")
    _require(len(a) <= _REQUESTS["A"][1] + depth, f"A computed in steps {a}")
    for name, (prompt, output_tokens) in _REQUESTS.items():
        answer = ToyModel().answer(toy_request(name, prompt, output_tokens), len(prompt) + output_tokens)
        _require(story.tokens_of[name] == answer.tokens, f"{name} got {story.tokens_of[name]}, alone {answer.tokens}")
    _require(is_empty(cache), f"{cache.pool.free.count} of {SLABS} blocks are free at the end")


def _require(holds: bool, detail: str) -> None:
    if not holds:
        raise InvariantViolation("handover", detail)
