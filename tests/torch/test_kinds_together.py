"""Every kind of state with everything that happens to a sequence at once: chunks, preemption, aborts, both
allocations, both depths, the audit after every step. Who is not aborted gets the tokens of Transformers' `generate`.
"""

from __future__ import annotations

import numpy as np
import pytest
from hard_run import Careless
from test_reuse import BLOCK, KINDS, bench
from tiny import Bench, tiny_prompts

from octavo.memory.cache import KVCache
from octavo.memory.check import is_empty
from octavo.policy.allocation import allocation_named
from octavo.policy.bundle import Policies
from octavo.scheduling.audit import Audit
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Event, Finished, Preempted, StepTokens
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request, SamplingParams
from octavo.scheduling.scheduler import Scheduler

WANTED, ROWS, BUDGET = 10, 4, 16
NEAR_TIE = 1e-4
PRESSED = ("llama", "deepseek_v3", "bamba")
"""Where a pool for one of the longest surely makes others give way; the tests of equality press the others harder."""


def run(made: Bench, slabs: int, allocation: str, depth: int, aborts: dict[int, int]) -> list[Event]:
    """All prompts at once; sequence `i` is aborted after step `aborts[i]`."""
    executor, layout = made.executor(block_tokens=BLOCK, n_slabs=slabs, rows=ROWS)
    # Admission that never looks whether the next block is there, so that somebody has to give way.
    policies = Policies(allocation=allocation_named(allocation), admission=Careless())
    cache = KVCache(layout, slabs, ROWS, contiguous=policies.allocation.contiguous)
    scheduler = Scheduler(cache, Limits(ROWS, BUDGET, 128, made.vocab_size), policies)
    core = EngineCore(scheduler, executor, depth=depth, audit=Audit(full_every=1))
    params = SamplingParams(temperature=0.0, max_tokens=WANTED, seed=0).with_defaults({})
    for i, prompt in enumerate(tiny_prompts()):
        core.submit(Request(request_id=str(i), prompt_token_ids=np.asarray(prompt, np.int32), params=params), 0.0)
    events: list[Event] = []
    for step in range(2_000):
        if not core.has_work:
            break
        events += core.step(0.0)
        for number, at in aborts.items():
            if step == at:
                core.abort(number, 0.0)
    events += scheduler.drain_events()
    assert not core.has_work
    assert is_empty(cache)
    return events


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("allocation", ["paged", "contiguous-max"])
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_state_survives_everything_at_once(name: str, allocation: str, depth: int) -> None:
    made = bench(name)
    _, layout = made.executor(block_tokens=BLOCK)
    lengths = [len(prompt) + WANTED - 1 for prompt in tiny_prompts()]
    paged = allocation == "paged"
    slabs = layout.slabs_for(max(lengths), (1 + depth) * BUDGET if paged else None)
    events = run(made, slabs, allocation, depth, {1: 4, 3: 7, 5: 12})
    tokens: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, StepTokens):
            for number, token in event.pairs():
                tokens.setdefault(number, []).append(token)
    ended = {event.sequence_id: event.reason for event in events if isinstance(event, Finished)}
    assert sorted(ended) == list(range(len(lengths)))
    for number, prompt in enumerate(tiny_prompts()):
        got = tokens.get(number, [])
        theirs, leads = made.generate(prompt, WANTED)
        wrong = next((i for i, token in enumerate(got) if token != theirs[i]), None)
        assert wrong is None or leads[wrong] < NEAR_TIE, f"sequence {number} differs at token {wrong}"
        assert ended[number] == "abort" or len(got) == WANTED
    if paged and name in PRESSED:
        assert any(isinstance(event, Preempted) for event in events), "the pool holds one of the longest"
