"""Remembering who was refused changes no plan: random traffic, recorded with the memory and replayed without it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.worlds import VOCAB, one_group, request, two_groups

from octavo.memory.cache import KVCache
from octavo.memory.keys import KeySpace
from octavo.policy.admission import MaxUtilization
from octavo.policy.bundle import Policies
from octavo.scheduling import entry
from octavo.scheduling.core import EngineCore
from octavo.scheduling.limits import Limits
from octavo.scheduling.plan import Executor
from octavo.scheduling.refusal import Refusal, still_refused
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.executors import EchoExecutor
from octavo.simulate.recording import RecordedExecutor, Recorder, Recording, RecordingExecutor, replay
from octavo.simulate.toy_model import toy_layout


def core(seed: int, executor: Executor) -> EngineCore:
    random = Random(seed)
    mixed = toy_layout((2, 2), laws=(random.choice(("window_8", "constant")), "full"))
    layout = random.choice((one_group(2), one_group(4), two_groups(4), mixed))
    policies = Policies.named(
        admission=random.choice(("max_utilization", "max_utilization", "guaranteed_no_evict")),
        batching=random.choice(("iteration", "iteration", "iteration", "request")),
        allocation=random.choice(("paged", "paged", "paged", "contiguous-max")),
    )
    shared = not policies.allocation.contiguous and random.random() < 0.8
    keys = KeySpace("toy", layout.groups[-1].block_tokens) if shared else None
    slabs, rows = random.choice((16, 24, 40)), random.choice((3, 6, 9))
    cache = KVCache(layout, slabs, rows, contiguous=policies.allocation.contiguous, keys=keys)
    limits = Limits(rows, random.choice((rows, 16, 64)), 48, VOCAB)
    return EngineCore(Scheduler(cache, limits, policies), executor, depth=random.choice((0, 1)))


def traffic(seed: int) -> Recording:
    """More than fits: long queues, common beginnings, ends that nobody knows of, aborts, resets."""
    random = Random(seed + 1)
    recording = Recording()
    run = Recorder(core(seed, RecordingExecutor(EchoExecutor(), recording)), recording)
    texts = [[random.randrange(1, 6) for _ in range(24)] for _ in range(3)]
    now, ids = 0.0, []
    for index in range(80):
        now += 1.0
        while random.random() < 0.4:
            asked = request(
                random.choice(texts)[: random.randint(1, 24)],
                random.randint(1, 24),
                name=f"r{index}",
                eos=(random.randrange(1, 6),) if random.random() < 0.3 else (),
                true_output=1,
                priority=random.choice((0, 0, 0, 1)),
            )
            if run.scheduler.cache.max_tokens_per_sequence() >= len(asked.prompt_token_ids) + 24:
                ids.append(run.submit(replace(asked, cache_salt=random.choice(("", "", "s"))), now))
        if ids and random.random() < 0.05:
            run.abort(random.choice(ids), now)
        run.step(now)
    while run.has_work:
        now += 1.0
        run.step(now)
    return recording


def replayed_without_memory(seed: int, recording: Recording) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "still_refused", lambda *_: False)
        return replay(recording, core(seed, RecordedExecutor(recording)))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**40))
def test_the_plans_are_those_of_weighing_everybody_again(seed: int) -> None:
    recording = traffic(seed)
    assert replayed_without_memory(seed, recording) == len(recording.plans)


def test_the_worlds_remember_often_and_forget_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above is worth what its worlds contain."""
    answers = {True: 0, False: 0}
    shared = 0

    def counted(scheduler: Scheduler, refusal: Refusal) -> bool:
        nonlocal shared
        answer = still_refused(scheduler, refusal)
        answers[answer] += 1
        shared += answer and scheduler.cache.sharing is not None
        return answer

    for seed in range(14):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(entry, "still_refused", counted)
            recording = traffic(seed)
        assert replayed_without_memory(seed, recording) == len(recording.plans)
    assert min(answers.values()) > 150
    assert shared > 100


def test_a_policy_of_ones_own_is_asked_at_every_step() -> None:
    class Counting(MaxUtilization):
        asked = 0

        def admits(self, view: object) -> bool:
            self.asked += 1
            return super().admits(view)  # type: ignore[arg-type]

    policy = Counting()
    cache = KVCache(one_group(4), 8, 4)
    scheduler = Scheduler(cache, Limits(4, 64, 32, VOCAB), Policies(admission=policy))
    engine = EngineCore(scheduler, EchoExecutor())
    engine.submit(request(20, 9), 0.0)
    engine.submit(request(20, 9), 0.0)
    for _ in range(5):
        engine.step(0.0)
    assert policy.asked == 6


def test_who_was_refused_is_not_weighed_again_until_blocks_return() -> None:
    asked: list[np.ndarray] = []
    weigh = entry._try_to_seat
    cache = KVCache(one_group(4), 8, 4)
    engine = EngineCore(Scheduler(cache, Limits(4, 64, 32, VOCAB), Policies()), EchoExecutor())
    engine.submit(request(20, 9), 0.0)
    engine.submit(request(20, 9), 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "_try_to_seat", lambda *given: (asked.append(given[2]), weigh(*given))[1])
        for _ in range(9):
            engine.step(0.0)
        assert len(asked) == 2  # each once: the first is seated, the second refused and remembered
        engine.step(0.0)
        assert len(asked) == 3
    assert len(engine.scheduler.running) == 1
