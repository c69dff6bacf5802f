"""Where every row of a step is greedy and nothing else is asked, logits are not stored: tokens are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_native_engine import NativeBench
from tiny import tiny_config, tiny_prompts

from octavo.kernels.cpu import NativeAttention, instruction_sets
from octavo.models.fused import fuse
from octavo.models.fused_run import LayerPrograms
from octavo.models.linear import Packing
from octavo.models.trial import Trial, subjects
from octavo.runtime.sampler import Sampler
from octavo.scheduling.plan import Admission
from octavo.scheduling.request import Request, SamplingParams

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native kernels were not built")

WANTED = 12


def fused_bench(name, dtype=torch.float32, twins=()):
    bench = NativeBench(tiny_config(name), dtype=dtype)
    head = bench.served.get_output_embeddings().weight
    with torch.no_grad():
        for one, other in twins:
            head[other] = head[one]
    assert fuse(bench.served, NativeAttention(), 128).stack is not None
    Packing().apply(bench.served)
    return bench


@pytest.fixture
def asked(monkeypatch):
    """How often either way was taken."""
    counts = {"logits": 0, "largest": 0}
    for name in counts:
        own = getattr(LayerPrograms, name)

        def counted(self, *args, own=own, name=name):
            counts[name] += len(args[2]) > 0
            return own(self, *args)

        monkeypatch.setattr(LayerPrograms, name, counted)
    return counts


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", torch.float32), ("llama", torch.bfloat16), ("olmo2", torch.float16)]
)
def test_tokens_are_those_of_stored_logits_whatever_is_equal(name, dtype, asked, monkeypatch):
    """Every second token of the vocabulary has the logit of the one before it."""
    vocabulary = tiny_config(name).vocab_size
    served = {}
    for stored in (True, False):
        bench = fused_bench(name, dtype, [(i, i + 1) for i in range(0, vocabulary - 1, 2)])
        with monkeypatch.context() as patched:
            if stored:
                patched.setattr(Sampler, "takes_largest", lambda *args: False)
            served[stored], _ = bench.serve(tiny_prompts(), WANTED, pause=2)
    assert asked["logits"] > asked["largest"] > 10, "the trial at load asks for logits too"
    assert served[True] == served[False]
    assert all(token % 2 == 0 for tokens in served[False] for token in tokens)
    assert len({token for tokens in served[False] for token in tokens}) > 5


def test_logits_that_the_rows_type_would_make_equal_are_told_apart():
    bench = NativeBench(tiny_config("llama"), dtype=torch.bfloat16)
    head = bench.served.get_output_embeddings().weight
    with torch.no_grad():
        head.zero_()
        head[3, 0] = head[9, 0] = 1.0
        head[9, 1] = 2.0**-12
    stack = fuse(bench.served, NativeAttention(), 128).stack
    Packing().apply(bench.served)
    assert stack.finds_largest
    values, tokens = stack.largest(torch.ones((1, head.shape[1]), dtype=torch.bfloat16))
    assert (float(values), int(tokens)) == (1.0 + 2.0**-12, 9)


def test_it_is_taken_where_all_are_greedy_and_nowhere_else(asked):
    sampler = Sampler(4, 128, "cpu")
    cases = [
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(temperature=1.0, top_k=1), True),
        (SamplingParams(temperature=1.0, seed=3), False),
        (SamplingParams(temperature=0.0, logprobs=0), False),
        (SamplingParams(temperature=0.0, frequency_penalty=0.5), False),
        (SamplingParams(temperature=0.0, logit_bias={5: 1.0}), False),
        (SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[7]), False),
    ]
    for params, largest in cases:
        for row, own in enumerate((SamplingParams(temperature=0.0), params)):
            request = Request(
                request_id=str(row), prompt_token_ids=np.array([5], np.int32), params=own.with_defaults({})
            )
            sampler.admit(Admission(row, row, request, np.zeros(0, np.int32)))
        assert sampler.takes_largest(np.array([0]))
        assert sampler.takes_largest(np.array([1, 0])) is largest
    bench = fused_bench("llama")
    asked["logits"] = 0
    bench.serve(tiny_prompts(), 2)
    assert asked["largest"] > 2
    assert asked["logits"] == 0
    capped = NativeBench(tiny_config("gemma2"))
    assert fuse(capped.served, NativeAttention(), 128).stack is not None
    Packing().apply(capped.served)
    before = asked["largest"]
    capped.serve(tiny_prompts(), 2)
    assert asked["largest"] == before, "a cap may make equals of two logits"


def test_whoever_listens_for_the_head_is_told_of_logits(asked):
    bench, heard = fused_bench("llama"), []
    bench.served.get_output_embeddings().register_forward_pre_hook(lambda *args: heard.append(1))
    bench.serve(tiny_prompts()[:2], 2)
    assert heard
    assert asked["largest"] == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sequence_without_finite_logits_fails_alone(value, asked):
    bench = fused_bench("llama")
    with torch.no_grad():
        bench.served.get_input_embeddings().weight[77] = value
    asked["logits"] = 0
    executor, layout = bench.executor()
    made = subjects([[5, 6, 77, 9], [5, 6, 7, 9]], 3)
    Trial(executor, layout, 80, 8, seed=1).run(made)
    assert [subject.failure for subject in made] == ["the model's logits are not finite", None]
    assert [len(subject.outputs) for subject in made] == [0, 3]
    assert asked["largest"] > 0
    assert asked["logits"] == 0
