"""Many requests in a small pool: everybody gets the tokens they would have had alone, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from checkpoints import tiny_llama

from octavo import LLM, SamplingParams
from octavo.memory.check import is_empty

REQUESTS = 300


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(
        tmp_path_factory.mktemp("llama"), initializer_range=0.5, max_position_embeddings=256, vocab_size=128
    )


def made_up(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 60 tokens, outputs of 1 to 40, a third of them sampled with a seed."""
    random = Random(seed)
    prompts = [[random.randrange(3, 128) for _ in range(random.randint(1, 60))] for _ in range(count)]
    params = [
        SamplingParams(
            temperature=random.choice([0.0, 0.0, 1.3]), seed=i, max_tokens=random.randint(1, 40), ignore_eos=True
        )
        for i in range(count)
    ]
    return prompts, params


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[tuple[int, ...]]:
    """What each request gets when nothing else runs."""
    llm = LLM(str(checkpoint), num_gpu_blocks_override=64, block_size=4, max_num_seqs=1)
    prompts, params = made_up(REQUESTS, 0)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("depth", [0, 1])
def test_three_hundred_requests_with_random_aborts_in_a_tenth_of_the_pool(
    checkpoint: Path, alone: list[tuple[int, ...]], depth: int
) -> None:
    prompts, params = made_up(REQUESTS, 0)
    blocks = sum(-(-(len(p) + s.max_tokens - 1) // 4) for p, s in zip(prompts, params, strict=True))
    llm = LLM(
        str(checkpoint),
        num_gpu_blocks_override=blocks // 10,
        block_size=4,
        max_num_seqs=256,
        max_num_batched_tokens=256,
        pipeline_depth=depth,
        audit=True,
    )
    engine, random = llm.engine, Random(1)
    names = [f"r{i}" for i in range(REQUESTS)]
    for name, prompt, one in zip(names, prompts, params, strict=True):
        engine.add(name, prompt, one, priority=random.randrange(3))
    open_names, aborted = set(names), set()
    while open_names:
        open_names.difference_update(engine.step().finished)
        if open_names and random.random() < 0.15:
            name = random.choice(sorted(open_names))
            assert engine.abort(name)
            aborted.add(name)
    outputs = {name: engine.take(name).outputs[0] for name in names}
    reasons = {name: output.finish_reason for name, output in outputs.items()}
    assert {name for name, reason in reasons.items() if reason == "abort"} <= aborted
    assert sum(output.record.preemptions for output in outputs.values()) > 0
    for i, name in enumerate(names):
        expected = alone[i] if reasons[name] == "length" else alone[i][: len(outputs[name].token_ids)]
        assert outputs[name].token_ids == expected, name
    while engine.core.has_work:
        engine.step()
    assert is_empty(engine.core.scheduler.cache)
    assert not engine.has_work


@pytest.mark.parametrize("batching", ["iteration", "request"])
@pytest.mark.parametrize("allocation", ["paged", "contiguous-max", "contiguous-pow2"])
@pytest.mark.parametrize("admission", ["max_utilization", "guaranteed_no_evict"])
def test_every_pair_of_mechanisms_gives_the_same_tokens(
    checkpoint: Path, alone: list[tuple[int, ...]], allocation: str, batching: str, admission: str
) -> None:
    prompts, params = made_up(REQUESTS, 0)
    few = slice(0, 40)
    llm = LLM(
        str(checkpoint),
        num_gpu_blocks_override=80,
        block_size=4,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        allocation=allocation,
        batching=batching,
        admission=admission,
        audit=True,
    )
    served = [output.outputs[0].token_ids for output in llm.generate(prompts[few], params[few])]
    assert served == alone[few]
    assert is_empty(llm.engine.core.scheduler.cache)
