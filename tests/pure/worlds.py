"""Small worlds for the pure tests: toy layouts, requests, and an engine over an executor without a model."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from octavo.geometry.dtypes import BF16
from octavo.geometry.state import Component
from octavo.memory.cache import KVCache
from octavo.memory.check import is_empty
from octavo.memory.groups import StateGroup
from octavo.memory.keys import KeySpace
from octavo.memory.layout import Layout, make_layout
from octavo.policy.bundle import Policies
from octavo.scheduling.audit import Audit
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Event, Finished, StepTokens
from octavo.scheduling.limits import Limits
from octavo.scheduling.plan import Executor, StepPlan, StepResult
from octavo.scheduling.request import Request, SamplingParams
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.executors import EchoExecutor
from octavo.simulate.toy_laws import laws_of
from octavo.simulate.toy_model import Answer, ToyExecutor, ToyModel, toy_layout

VOCAB = 1000


def one_group(block_tokens: int = 4) -> Layout:
    kv = (Component("k", (2, 8), BF16), Component("v", (2, 8), BF16))
    return make_layout([StateGroup("full", (0, 1), (kv, kv))], block_tokens)


def two_groups(block_tokens: int = 4) -> Layout:
    """Groups whose blocks differ in bytes: two of the second fit where one of the first does."""
    wide = (Component("k", (4, 8), BF16), Component("v", (4, 8), BF16))
    narrow = (Component("k", (2, 8), BF16), Component("v", (2, 8), BF16))
    groups = [StateGroup("wide", (0,), (wide,)), StateGroup("narrow", (1,), (narrow,))]
    return make_layout(groups, block_tokens)


def request(
    prompt: int | list[int],
    max_tokens: int | None = 8,
    *,
    name: str = "r",
    priority: int = 0,
    eos: tuple[int, ...] = (),
    true_output: int | None = None,
    seed: int = 0,
) -> Request:
    rng = Random(seed)
    ids = prompt if isinstance(prompt, list) else [rng.randrange(1, VOCAB) for _ in range(prompt)]
    return Request(
        request_id=name,
        prompt_token_ids=np.array(ids, dtype=np.int32),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0).with_defaults({}),
        eos_token_ids=eos,
        priority=priority,
        true_output_tokens=true_output,
    )


def engine(
    *,
    layout: Layout | None = None,
    slabs: int = 16,
    seqs: int = 8,
    budget: int = 64,
    context: int = 4096,
    policies: Policies | None = None,
    depth: int = 0,
    executor: Executor | None = None,
    audit: bool = True,
    max_waiting: int | None = None,
) -> EngineCore:
    policies = policies or Policies()
    layout = layout or one_group()
    keys = KeySpace("toy", layout.groups[0].block_tokens) if policies.reuse.shares else None
    cache = KVCache(layout, slabs, seqs, contiguous=policies.allocation.contiguous, keys=keys)
    limits = Limits(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=context,
        vocab_size=VOCAB,
        max_waiting=max_waiting,
    )
    scheduler = Scheduler(cache, limits, policies)
    return EngineCore(scheduler, executor or EchoExecutor(), depth=depth, audit=Audit(full_every=1) if audit else None)


def drain(core: EngineCore, *, now: float = 0.0, steps: int = 10_000) -> list[Event]:
    """Step until nothing is left; fails when that takes more than `steps`."""
    events: list[Event] = []
    for _ in range(steps):
        if not core.has_work:
            return events + core.scheduler.drain_events()
        events += core.step(now)
    raise AssertionError(f"still working after {steps} steps")


def outputs(events: list[Event]) -> dict[int, list[int]]:
    """Tokens of each sequence id, in order."""
    tokens: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, StepTokens):
            for sequence_id, token in event.pairs():
                tokens.setdefault(sequence_id, []).append(token)
    return tokens


def endings(events: list[Event]) -> dict[int, Finished]:
    return {event.sequence_id: event for event in events if isinstance(event, Finished)}


def expected(asked: Request, count: int) -> list[int]:
    """What `EchoExecutor` answers to this request."""
    prompt = asked.prompt_token_ids
    return [int(prompt[(len(prompt) + i) % len(prompt)]) for i in range(count)]


class Watched:
    """Passes plans to another executor and keeps them."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.inner.submit(plan)

    def collect(self) -> StepResult:
        return self.inner.collect()

    def close(self) -> None:
        self.inner.close()

    def computed_by(self, sequence_id: int) -> list[tuple[int, int, int]]:
        """(plan, first position, positions) of each of the sequence's chunks."""
        return [
            (plan.number, int(plan.starts[i]), int(plan.counts[i]))
            for plan in self.plans
            for i in np.flatnonzero(plan.sequence_ids == sequence_id).tolist()
        ]


class ToyWorld:
    """An engine over the toy model, whose answers depend on what it reads from its blocks.

    `heads`, `laws` and `slab_bytes` are those of `toy_layout`.
    """

    def __init__(
        self,
        *,
        heads: tuple[int, ...] = (2,),
        slabs: int = 16,
        seqs: int = 8,
        laws: tuple[str, ...] = (),
        slab_bytes: int = 0,
        model: ToyModel | None = None,
        **more: Any,
    ) -> None:
        layout = toy_layout(heads, laws=laws, most_slab_bytes=slab_bytes)
        self.model = replace(model or ToyModel(), laws=laws_of(layout))
        self.executor = Watched(ToyExecutor(self.model, layout, slabs, seqs))
        self.core = engine(layout=layout, slabs=slabs, seqs=seqs, executor=self.executor, **more)
        self.scheduler = self.core.scheduler
        self.cache = self.scheduler.cache
        self.asked: dict[int, Request] = {}
        self.events: list[Event] = []
        self.time = 0.0

    def submit(self, asked: Request) -> int:
        sequence_id = self.core.submit(asked, self.time)
        self.asked[sequence_id] = asked
        return sequence_id

    def ask(self, prompt: int, max_tokens: int | None, **fields: Any) -> int:
        """Submit a request with a prompt of its own."""
        return self.submit(request(prompt, max_tokens, seed=len(self.asked), **fields))

    def step(self, steps: int = 1) -> list[Event]:
        """Events of these steps; time moves by one second a step."""
        new: list[Event] = []
        for _ in range(steps):
            new += self.core.step(self.time)
            self.time += 1.0
        self.events += new
        return new

    def finish(self, most: int = 3_000) -> None:
        """Run dry: nothing is left, and the pool is empty."""
        for _ in range(most):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, f"still working after {most} steps"
        self.events += self.scheduler.drain_events()
        assert is_empty(self.cache)

    @property
    def running(self) -> list[int]:
        """Sequence ids in order of admission."""
        return self.scheduler.running.sequence_id[self.scheduler.running.order].tolist()

    def tokens(self, sequence_id: int) -> list[int]:
        return outputs(self.events).get(sequence_id, [])

    def alone(self, sequence_id: int) -> Answer:
        """What this request gets with the engine to itself."""
        asked = self.asked[sequence_id]
        most, context = asked.params.max_tokens, self.scheduler.limits.max_model_len
        limit = min(context, self.cache.max_tokens_per_sequence() + 1) if most is None else asked.prompt_tokens + most
        return self.model.answer(asked, limit)

    def assert_all_answered(self) -> None:
        """Each request that was not aborted got what it would have got alone; each aborted one a beginning of it."""
        ends = endings(self.events)
        assert sorted(ends) == sorted(self.asked)
        for sequence_id, end in ends.items():
            answer, got = self.alone(sequence_id), self.tokens(sequence_id)
            if end.reason == "abort":
                assert got == answer.tokens[: len(got)]
            else:
                assert (got, end.reason) == (answer.tokens, answer.reason)

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)
