"""A real run, recorded and replayed without its model: the scheduler decides the same."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from checkpoints import tiny_llama

from octavo import LLM, EngineCore, SamplingParams
from octavo.memory.cache import KVCache
from octavo.policy.bundle import Policies
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.recording import Divergence, RecordedExecutor, Recorder, Recording, RecordingExecutor, replay


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("admission", ["max_utilization", "guaranteed_no_evict"])
def test_the_replay_of_a_real_run_makes_the_same_plans(tmp_path: Path, admission: str, depth: int) -> None:
    checkpoint = tiny_llama(tmp_path, initializer_range=0.5)
    llm = LLM(
        str(checkpoint), num_gpu_blocks_override=14, block_size=4, admission=admission, max_num_batched_tokens=32,
        max_num_seqs=8, pipeline_depth=depth,
    )  # fmt: skip
    core, recording = llm.engine.core, Recording()
    core.executor = RecordingExecutor(core.executor, recording)
    run, random = Recorder(core, recording), Random(3)
    ids = []
    for step in range(400):
        if step % 2 == 0 and len(ids) < 20:
            ids.append(run.submit(_request(random, len(ids)), float(step)))
        if step == 11:
            run.abort(ids[2], float(step))
        if not run.has_work:
            break
        run.step(float(step))
    assert not run.has_work
    again = _core(core, Policies.named(admission=admission), recording, depth)
    assert replay(recording, again) == len(recording.plans) > 20
    if admission == "max_utilization":
        other = _core(core, Policies.named(admission="guaranteed_no_evict"), recording, depth)
        with pytest.raises(Divergence) as differs:
            replay(recording, other)
        assert differs.value.step >= 0


def _core(core: EngineCore, policies: Policies, recording: Recording, depth: int) -> EngineCore:
    cache, limits = core.scheduler.cache, core.scheduler.limits
    assert isinstance(limits, Limits)
    fresh = KVCache(cache.layout, cache.pool.slabs, cache.rows)
    return EngineCore(Scheduler(fresh, limits, policies), RecordedExecutor(recording), depth=depth)


def _request(random: Random, index: int) -> Request:
    params = SamplingParams(temperature=1.0, seed=index, max_tokens=random.randint(1, 20)).with_defaults({})
    prompt = np.array([random.randrange(3, 32) for _ in range(random.randint(1, 25))], dtype=np.int32)
    return Request(request_id=str(index), prompt_token_ids=prompt, params=params, eos_token_ids=(2,))
