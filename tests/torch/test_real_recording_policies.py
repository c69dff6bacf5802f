"""Real runs under every policy, tiers and preemptions among them, recorded and replayed without model or copies."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from checkpoints import tiny_llama

from octavo import LLM, EngineCore, SamplingParams
from octavo.errors import ModelError
from octavo.memory.cache import KVCache
from octavo.memory.tiering import Below, tiered_cache
from octavo.models.embedded import embedded_checkpoint
from octavo.policy.bundle import Policies
from octavo.policy.eviction import eviction_named
from octavo.policy.placement import placement_named
from octavo.scheduling.events import Event, Preempted, Transferred
from octavo.scheduling.request import Request
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.recording import (
    Divergence,
    RecordedExecutor,
    RecordedMover,
    Recorder,
    Recording,
    RecordingExecutor,
    RecordingMover,
    replay,
)

TIERS = {"reuse": "prefix", "preemption": "offload"}
OTHERWISE = {
    "admission": "guaranteed_no_evict",
    "batching": "request",
    "allocation": "contiguous-max",
    "reuse": "none",
    "preemption": "recompute",
    "placement": "drop",
    "eviction": "cheapest_to_rebuild",
}


@dataclass
class Run:
    """What a real engine did, and what a fresh core over the same memory is made of."""

    core: EngineCore
    asked: dict[str, Any]
    recording: Recording
    events: list[Event] = field(default_factory=list)

    def again(self, **changed: Any) -> EngineCore:
        """A core without a model, under the same policies but for those that are changed."""
        asked, scheduler = self.asked | changed, self.core.scheduler
        names = ("allocation", "batching", "admission", "reuse", "preemption")
        policies = Policies.named(**{name: asked[name] for name in names if name in asked})
        old, mover, tiering = scheduler.cache, None, None
        keys = old.sharing.directory.space if old.sharing is not None and policies.reuse.shares else None
        eviction = eviction_named(asked.get("eviction", "lru"))
        if scheduler.tiering is None:
            contiguous = policies.allocation.contiguous
            cache = KVCache(old.layout, old.pool.slabs, old.rows, contiguous=contiguous, keys=keys, eviction=eviction)
        else:
            disk = scheduler.tiering.disk
            below = Below(
                scheduler.tiering.host.pool.slabs,
                placement_named(asked.get("placement", "write_back")),
                disk_slots=() if disk is None else tuple(disk.slots),
                timeout_s=10.0,
            )
            cache, tiering = tiered_cache(old.layout, old.pool.slabs, old.rows, below, keys=keys, eviction=eviction)
            mover = RecordedMover(self.recording)
        fresh = Scheduler(cache, scheduler.limits, policies, tiering)
        return EngineCore(fresh, RecordedExecutor(self.recording), depth=self.core.depth, mover=mover)


def recorded(model: str, requests: list[Request], **asked: Any) -> Run:
    """One third of the requests at the start, the others while it runs, one of them aborted."""
    llm = LLM(model, **asked)
    core, recording = llm.engine.core, Recording()
    core.executor = RecordingExecutor(core.executor, recording)
    if core.mover is not None:
        core.mover = RecordingMover(core.mover, recording)
    recorder, ids, coming = Recorder(core, recording), [], list(requests)
    run = Run(recorder, asked, recording)
    for step in range(3000):
        if coming and (len(requests) - len(coming) < len(requests) // 3 or step % 3 == 0):
            ids.append(recorder.submit(coming.pop(0), time.monotonic()))
        if step == 11:
            recorder.abort(ids[2], time.monotonic())
        if not recorder.has_work and not coming:
            break
        run.events += recorder.step(time.monotonic())
    assert not recorder.has_work
    recorder.close()
    return run


def conversations(tokens: int, longest: int, outputs: int, *, count: int = 18) -> list[Request]:
    """Prompts of which many begin alike, and some come again."""
    random = Random(5)
    texts = [[random.randrange(3, tokens) for _ in range(longest)] for _ in range(4)]
    return [
        Request(
            request_id=str(index),
            prompt_token_ids=np.array(random.choice(texts)[: random.randint(longest // 2, longest)], dtype=np.int32),
            params=SamplingParams(temperature=1.0, seed=index, max_tokens=random.randint(2, outputs)).with_defaults({}),
            eos_token_ids=(2,),
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("tiny"), initializer_range=0.5))


SMALL = {"num_gpu_blocks_override": 16, "block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 6}


@pytest.mark.parametrize(
    ("asked", "changed"),
    [
        ({}, "batching"),
        ({"pipeline_depth": 1}, "admission"),
        ({"batching": "request"}, "admission"),
        ({"allocation": "contiguous-pow2"}, "allocation"),
        ({"allocation": "contiguous-max", "admission": "guaranteed_no_evict"}, "batching"),
        ({"reuse": "prefix", "eviction": "lru"}, "eviction"),
        ({"reuse": "prefix", "pipeline_depth": 1}, "reuse"),
        (TIERS | {"placement": "write_back"}, "preemption"),
        (TIERS | {"placement": "write_through", "pipeline_depth": 1}, "placement"),
        (TIERS | {"placement": "break_even"}, "preemption"),
        (TIERS | {"preemption": "auto", "disk": True}, "placement"),
        ({"preemption": "offload"}, "preemption"),
    ],
)
def test_a_real_run_replays_under_every_policy_and_no_other(
    tiny: str, tmp_path: Path, asked: dict[str, Any], changed: str
) -> None:
    asked = dict(asked)
    if asked.get("preemption"):
        asked["host_bytes"] = "64KiB"
    if asked.pop("disk", False):
        asked |= {"disk_path": str(tmp_path), "disk_bytes": "1MiB"}
    run = recorded(tiny, conversations(32, 24, 30), **SMALL, **asked)
    assert_replays(run, changed)
    if run.core.mover is not None:
        assert {event.route for event in run.events if isinstance(event, Transferred)} >= {"demote", "promote"}
        assert any(isinstance(event, Preempted) for event in run.events)


@pytest.mark.slow
def test_a_run_of_smollm2_replays_under_its_policies_and_no_others() -> None:
    try:
        checkpoint = embedded_checkpoint()
    except ModelError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    sizes = {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 64, "max_num_seqs": 4, "dtype": "float32"}
    asked = TIERS | {"host_bytes": "16MiB", "pipeline_depth": 1}
    run = recorded(str(checkpoint), conversations(40_000, 40, 40, count=8), **sizes, **asked)
    assert any(isinstance(event, Preempted) for event in run.events)
    for changed in ("preemption", "admission", "reuse"):
        assert_replays(run, changed)


def assert_replays(run: Run, changed: str) -> None:
    """The same plans under the same policies; under one that is changed, the first plan that differs is named."""
    assert replay(run.recording, run.again()) == len(run.recording.plans) > 20
    with pytest.raises(Divergence, match=r"^step \d+: ") as differs:
        replay(run.recording, run.again(**{changed: OTHERWISE[changed]}))
    assert 0 <= differs.value.step < len(run.recording.plans)
