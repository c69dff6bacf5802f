"""Small worlds for the pure tests: toy layouts, requests, and an engine over an executor without a model."""

from __future__ import annotations

from random import Random

import numpy as np

from octavo.geometry.dtypes import BF16
from octavo.geometry.state import Component
from octavo.memory.cache import KVCache
from octavo.memory.layout import Layout, StateGroup, make_layout
from octavo.policy.bundle import Policies
from octavo.scheduling.audit import Audit
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Event, Finished, StepTokens
from octavo.scheduling.limits import Limits
from octavo.scheduling.plan import Executor
from octavo.scheduling.request import Request, SamplingParams
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.executors import EchoExecutor

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
    cache = KVCache(layout or one_group(), slabs, seqs, contiguous=policies.allocation.contiguous)
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
