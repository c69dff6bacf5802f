"""Faults that prefix caches of other engines have had in their kernels and batches, each named in words."""

from __future__ import annotations

import numpy as np
import pytest
from test_reuse import Engine, bench

from octavo.scheduling.events import Admitted
from octavo.scheduling.plan import StepPlan

MIXED = ("llama", "gemma3_text", "llama4_text", "deepseek_v3", "bamba", "gemma3n_text")


def words(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 120, size=count).tolist()


def watched(engine: Engine) -> list[StepPlan]:
    plans: list[StepPlan] = []
    submit = engine.core.executor.submit

    def keep(plan: StepPlan) -> None:
        plans.append(plan)
        submit(plan)

    engine.core.executor.submit = keep  # type: ignore[method-assign]
    return plans


@pytest.mark.parametrize("name", MIXED)
def test_a_hit_beside_misses_reads_through_its_table_like_everybody(name: str) -> None:
    """A hit in a batch once made a kernel read pages as if they lay in a row (faults, 44)."""
    made = bench(name)
    kept = words(17, 1)
    batch = [words(5, 2), kept + words(2, 3), words(8, 4), words(3, 5)]
    alone = [Engine(made, reuse=False, slabs=120).run([prompt], 6)[0] for prompt in batch]
    engine = Engine(made, reuse=True, slabs=240)
    engine.run([words(7, 9), kept, words(6, 8)], 3)  # so that what is kept does not begin the arena
    plans = watched(engine)
    assert engine.run(batch, 6) == alone
    mixed = plans[0]
    assert mixed.chunks == 4
    hit = int(np.flatnonzero(mixed.counts + mixed.starts == len(batch[1]))[0])
    assert mixed.starts[hit] >= 16, "the hit has a past"
    assert np.count_nonzero(mixed.starts == 0) >= 2, "others have none, but for a first token that happens to be kept"


@pytest.mark.parametrize("name", MIXED)
def test_a_long_new_prompt_beside_a_continuation_of_the_same_length_keeps_both_right(name: str) -> None:
    """Where the longest chunk is as long as the longest sequence, a fast path once forgot that another has a past
    (faults, 45)."""
    made = bench(name)
    kept = words(12, 1)
    new, goes_on = words(16, 2), kept + words(4, 3)
    alone = [Engine(made, reuse=False, slabs=120).run([prompt], 6)[0] for prompt in (new, goes_on)]
    engine = Engine(made, reuse=True, slabs=240)
    engine.run([kept], 2)
    plans = watched(engine)
    assert engine.run([new, goes_on], 6) == alone
    both = plans[0]
    assert both.chunks == 2
    if name != "bamba":  # there the chunk of a prompt ends where its state is copied
        assert both.counts.max() == (both.starts + both.counts).max() == 16
    assert both.starts.max() >= 8


@pytest.mark.parametrize("name", ["llama", "gemma3n_text", "gemma3_text"])
def test_answers_stay_with_their_topics_where_longer_texts_are_kept(name: str) -> None:
    """Cut to a shared beginning, a longer entry once left its tail to layers that borrow keys and values
    (faults, 43)."""
    made = bench(name)
    system = words(9, 50)
    topics = [words(24, 60 + topic) for topic in range(5)]
    asked = [system + topics[(number * 7) % 5][: 3 + (number * 5) % 20] for number in range(40)]
    plain, reusing = Engine(made, reuse=False, slabs=400), Engine(made, reuse=True, slabs=160)
    for first in range(0, 40, 8):
        assert reusing.run(asked[first : first + 8], 3) == plain.run(asked[first : first + 8], 3)
    assert reusing.hits > 20


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "mamba2", "gemma3_text"])
@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_a_prompt_kept_whole_to_a_blocks_end_is_sent_again_without_an_empty_query(name: str, length: int) -> None:
    made = bench(name)
    engine = Engine(made, reuse=True, slabs=120)
    first = engine.run([words(length, 3)], 4)
    assert engine.run([words(length, 3)], 4) == first
    assert engine.run([words(length, 3)] * 3, 1) == [first[0][:1]] * 3
    cached = [event.cached_tokens for event in engine.events if isinstance(event, Admitted)]
    assert max(cached) < length
