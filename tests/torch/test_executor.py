"""The executor's own promises: one sequence's failure is its own, and engines do not meet."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import Bench, tiny_config, tiny_prompts

from octavo.errors import ConfigError
from octavo.geometry.dtypes import FP32
from octavo.geometry.state import Component
from octavo.memory.groups import StateGroup
from octavo.memory.layout import make_layout
from octavo.models.trial import Trial, subjects
from octavo.runtime.executor import TorchExecutor
from octavo.runtime.sampler import Sampler
from octavo.scheduling.plan import NO_TOKEN, StepPlan

POISON = 125


@pytest.fixture
def bench():
    return Bench(tiny_config("llama"))


def poisoned(bench):
    with torch.no_grad():
        bench.served.get_input_embeddings().weight[POISON] = float("nan")


def test_a_sequence_without_finite_logits_fails_alone(bench):
    prompts = [p for p in tiny_prompts() if len(p) > 3]
    right, _ = bench.serve(prompts, 8)
    poisoned(bench)
    executor, layout = bench.executor(rows=6)
    made = subjects([*prompts, [5, POISON, 9, 9]], 8)
    Trial(executor, layout, 80, 6, seed=1).run(made)
    assert made[-1].failure == "the model's logits are not finite"
    assert made[-1].outputs == []
    assert [subject.outputs for subject in made[:-1]] == right


def test_blocks_of_failed_sequences_are_safe_for_their_next_owners(bench):
    prompts = [tiny_prompts()[0], tiny_prompts()[5], tiny_prompts()[3]]
    right, _ = bench.serve(prompts, 8)
    poisoned(bench)
    executor, layout = bench.executor(rows=3)
    trial = Trial(executor, layout, 80, 3, seed=2)
    for free in trial._free:
        del free[24:]  # so few blocks that the next owners must take those of the failed
    failing = subjects([[POISON] * 30] * 3, 8)
    trial.run(failing)
    assert all(subject.failure for subject in failing)
    after = subjects(prompts, 8)
    trial.run(after)
    assert [subject.outputs for subject in after] == right


def test_two_engines_taking_turns_do_not_disturb_each_other():
    benches = [Bench(tiny_config("gemma2")), Bench(tiny_config("gpt_neox"))]
    prompts = tiny_prompts()[:4]
    alone = [bench.serve(prompts, 8, seed=4)[0] for bench in benches]
    trials = []
    for bench in benches:
        executor, layout = bench.executor(rows=5)
        trials.append((Trial(executor, layout, 80, 5, seed=4), subjects(prompts, 8), executor))
    recorded = [bench.serve(prompts, 8, seed=4)[1].plans for bench in benches]
    tokens = [{}, {}]
    for turn in range(max(len(plans) for plans in recorded)):
        for which, (_, _, executor) in enumerate(trials):
            if turn < len(recorded[which]):
                plan = recorded[which][turn]
                executor.submit(plan)
                result = executor.collect()
                for sequence, token in zip(plan.sequence_ids.tolist(), result.tokens.tolist(), strict=True):
                    if token != NO_TOKEN:
                        tokens[which].setdefault(sequence, []).append(token)
    assert [[tokens[which][i] for i in range(len(prompts))] for which in range(2)] == alone


def test_results_come_in_the_order_of_plans(bench):
    executor, _ = bench.executor()
    empty = np.zeros(0, np.int32)
    for number in (3, 4, 5):
        executor.submit(
            StepPlan(number, 0.0, empty.astype(np.int64), empty, empty, empty, empty.astype(np.bool_), empty)
        )
    assert [executor.collect().number for _ in range(3)] == [3, 4, 5]
    executor.close()


def test_time_comes_from_the_given_clock(bench):
    executor, layout = bench.executor()
    executor._clock = iter(range(100)).__next__
    trial = Trial(executor, layout, 80, 8)
    trial.run(subjects([[4, 5, 6]], 2))
    assert executor._clock() == len(trial.plans)


def test_a_layout_in_another_order_is_refused(bench):
    _, layout = bench.executor()
    keys_and_values = (Component("k", (2, 16), FP32), Component("v", (2, 16), FP32))
    layers = layout.groups[0].layers
    other = make_layout([StateGroup("full", layers, (keys_and_values,) * len(layers))], 4, "heads_tokens")
    with pytest.raises(ConfigError, match="block_order"):
        TorchExecutor(bench.served, other, 10, rows=1, sampler=Sampler(1, 128, "cpu"))


def test_the_result_does_not_depend_on_who_else_is_in_the_batch(bench):
    prompts = tiny_prompts()
    together, _ = bench.serve(prompts, 10, rows=7, n_slabs=160)
    alone = [bench.serve([prompt], 10, rows=1)[0][0] for prompt in prompts]
    assert together == alone
