"""The sampler's rules on one row: what Transformers' processors give, extremes, and log-probabilities."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import octavo.runtime.sampler as sampler_module
from octavo.errors import InvariantViolation
from octavo.runtime.sampler import LOGPROB_FLOOR, Sampler
from octavo.scheduling.plan import NO_TOKEN, Admission, TokenLogprobs
from octavo.scheduling.request import Request, SamplingParams

INF = math.inf


def admission(
    row: int, prompt: Sequence[int], outputs: Sequence[int], eos: tuple[int, ...], **params: Any
) -> Admission:
    params.setdefault("seed", 1)
    request = Request(
        request_id=f"r{row}",
        prompt_token_ids=np.array(prompt, np.int32),
        params=SamplingParams(**params),
        eos_token_ids=eos,
    )
    return Admission(row, row, request, np.array(outputs, np.int32))


def choose(
    logits: Any, *, prompt: Sequence[int] = (0,), outputs: Sequence[int] = (), eos: tuple[int, ...] = (), **params: Any
) -> tuple[int, TokenLogprobs | None]:
    table = torch.as_tensor(logits, dtype=torch.float32)[None]
    sampler = Sampler(1, table.shape[1], "cpu")
    sampler.admit(admission(0, prompt, outputs, eos, **params))
    at = np.array([len(prompt) + len(outputs)], np.int64)
    tokens, logprobs = sampler.sample(table, np.zeros(1, np.int32), at)
    return int(tokens[0]), logprobs.get(0)


def draws(logits: torch.Tensor, count: int, **params: Any) -> np.ndarray:
    """`count` draws from one row of logits, at different positions."""
    lanes = 500
    sampler = Sampler(lanes, logits.shape[-1], "cpu")
    for row in range(lanes):
        sampler.admit(admission(row, [0], [], (), **{"seed": row, **params}))
    table, rows = logits.expand(lanes, -1).contiguous(), np.arange(lanes, dtype=np.int32)
    steps = [sampler.sample(table, rows, np.full(lanes, p, np.int64))[0] for p in range(1, 1 + count // lanes)]
    return np.concatenate(steps)


def agrees(seen: np.ndarray, probabilities: torch.Tensor) -> None:
    """No token outside the support, and a chi-square that a right sampler passes but once in about 10 000."""
    counts = np.bincount(seen, minlength=len(probabilities)).astype(np.float64)
    expected = probabilities.double().numpy() * len(seen)
    assert counts[expected == 0].sum() == 0
    big = expected >= 5
    counts, expected = (np.append(v[big], v[~big].sum()) if v[~big].sum() > 0 else v[big] for v in (counts, expected))
    expected = np.maximum(expected, 1e-9)
    freedom = max(len(counts) - 1, 1)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 8


def reference(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    """Transformers' processors in the sampler's order; only kept tokens have a probability."""
    scores, ids = logits[None].clone(), torch.tensor([[0]])
    if "temperature" in params:
        scores = TemperatureLogitsWarper(params["temperature"])(ids, scores)
    if "min_p" in params:
        scores = MinPLogitsWarper(params["min_p"])(ids, scores)
    if "top_k" in params:
        scores = TopKLogitsWarper(params["top_k"])(ids, scores)
    if "top_p" in params:
        scores = TopPLogitsWarper(params["top_p"])(ids, scores)
    return scores.softmax(-1)[0]


RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 5},
    {"top_k": 70},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 3.0, "top_p": 0.97},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("vocab", [11, 200, 1300])
def test_draws_follow_the_distribution_of_transformers_processors(rules: dict[str, Any], vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    agrees(draws(logits, 10_000, **{"temperature": 1.0, **rules}), reference(logits, **rules))


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("vocab", [11, 200, 1300])
def test_kept_tokens_and_their_probabilities_are_those_of_transformers(rules: dict[str, Any], vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(7 + vocab)) * 2
    wanted = reference(logits, **rules)
    got = probabilities(logits, **{"temperature": 1.0, **rules})
    assert (wanted[got > 0] > 0).all()
    assert (got[wanted > 1e-10] > 0).all()
    assert torch.allclose(got, wanted, atol=1e-6)


def probabilities(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    """The probability of every token, read off the integer weights of the draw."""
    sampler = Sampler(1, len(logits), "cpu")
    sampler.admit(admission(0, [0], [], (), **params))
    original, answers = sampler_module._inverse, []

    def spy(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        answers.append(weights.clone())
        return original(weights, uniform)

    orders = []
    sort = torch.Tensor.sort
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "_inverse", spy)
        patch.setattr(torch.Tensor, "sort", lambda self, *a, **k: orders.append(sort(self, *a, **k)) or orders[-1])
        sampler.sample(logits[None], np.zeros(1, np.int32), np.ones(1, np.int64))
    weights = answers[-1][0].double()
    result = torch.zeros(len(logits) + 1, dtype=torch.float64)
    if orders:  # narrow: the last sort put the kept tokens in the order of their ids
        result.index_add_(0, orders[-1].values[0], weights)
    else:
        result[:-1] = weights
    return (result[:-1] / weights.sum()).float()


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3))
    prompt, outputs = [1, 2, 3, 3, 9], [4, 4, 9]
    scores = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + outputs]), logits[None].clone())
    token, _ = choose(logits, prompt=prompt, outputs=outputs, temperature=0, repetition_penalty=penalty)
    assert token == int(scores.argmax())


def test_repetition_penalty_looks_at_the_prompt_and_the_others_do_not() -> None:
    logits = [0.0, 5.0, 4.0]
    assert choose(logits, prompt=[1], temperature=0, repetition_penalty=2.0)[0] == 2
    assert choose(logits, prompt=[1], temperature=0, presence_penalty=2.0, frequency_penalty=2.0)[0] == 1
    assert choose(logits, prompt=[0], outputs=[1], temperature=0, presence_penalty=2.0)[0] == 2


def test_frequency_penalty_counts_and_presence_penalty_does_not() -> None:
    logits = [0.0, 5.0, 1.5]
    assert choose(logits, outputs=[1, 1, 1], temperature=0, presence_penalty=2.0)[0] == 1
    assert choose(logits, outputs=[1], temperature=0, frequency_penalty=2.0)[0] == 1
    assert choose(logits, outputs=[1, 1], temperature=0, frequency_penalty=2.0)[0] == 2


def test_sampled_tokens_are_counted() -> None:
    sampler = Sampler(1, 100, "cpu")
    sampler.admit(admission(0, [0], [], (), temperature=0, frequency_penalty=1.0))
    logits = torch.linspace(0, 1.98, 100)[None]
    seen = [int(sampler.sample(logits, np.zeros(1, np.int32), np.array([1 + i]))[0][0]) for i in range(100)]
    expected, counts = [], np.zeros(100, np.float32)
    for _ in range(100):
        expected.append(int((logits[0].numpy() - counts).argmax()))
        counts[expected[-1]] += 1
    assert seen == expected
    assert len(set(seen)) > 40


def test_a_tiny_repetition_penalty_never_makes_a_nan() -> None:
    assert choose([1.0, 2.0, -3.0], prompt=[0, 1, 2], temperature=0, repetition_penalty=1e-300)[0] == 0
    assert choose([0.0, -2.0, -3.0], prompt=[0, 1, 2], temperature=1, repetition_penalty=1e-300)[0] in {0, 1, 2}
    assert choose([1.0, 2.0, 1.5], prompt=[1], temperature=0, repetition_penalty=1e4)[0] == 2


def test_logit_bias_forces_and_forbids() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1))
    best = int(logits.argmax())
    assert choose(logits, temperature=0, logit_bias={7: 100})[0] == 7
    assert choose(logits, temperature=0, logit_bias={best: -100})[0] == int(logits.argsort(descending=True)[1])
    assert choose(logits, temperature=1.0, logit_bias={7: 100})[0] == 7
    assert (draws(logits, 2000, temperature=1.0, logit_bias={best: -100}) != best).all()


def test_bias_is_applied_before_penalties() -> None:
    logits, params = [0.0, -1.0, 2.6], {"temperature": 0, "logit_bias": {1: 6.0}, "repetition_penalty": 2.0}
    assert choose(logits, prompt=[1], **params)[0] == 2  # (-1 + 6) / 2 = 2.5, not -1 * 2 + 6 = 4


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_end_tokens_are_impossible_before_min_tokens(temperature: float) -> None:
    logits = [0.0, 50.0, 40.0, 1.0]
    rules = {"temperature": temperature, "min_tokens": 2, "stop_token_ids": [2], "eos": (1, 10_000)}
    assert choose(logits, prompt=[0, 0], outputs=[], **rules)[0] in {0, 3}
    assert choose(logits, prompt=[0, 0], outputs=[3], **rules)[0] in {0, 3}
    assert choose(logits, prompt=[0, 0], outputs=[3, 3], **rules)[0] == 1
    assert choose(logits, prompt=[0, 0], **{**rules, "ignore_eos": True})[0] == 1


def test_a_bias_cannot_lift_min_tokens() -> None:
    assert choose([0.0, 0.0, 1.0], temperature=0, min_tokens=1, eos=(1,), logit_bias={1: 100})[0] == 2


def test_rules_that_leave_no_token_say_so() -> None:
    for temperature in (0, 1.0):
        assert choose([0.0, -INF], temperature=temperature, min_tokens=1, eos=(0,))[0] == NO_TOKEN


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [[math.nan, 1.0, 2.0], [1.0, INF, 0.0], [-INF, -INF, -INF], [-INF, math.nan, 1.0]])
@pytest.mark.parametrize("rules", [{}, {"top_p": 0.5}, {"top_k": 2}, {"logprobs": 2}, {"frequency_penalty": 1.0}])
def test_a_row_without_a_finite_maximum_gets_no_token(
    bad: list[float], temperature: float, rules: dict[str, Any]
) -> None:
    assert choose(bad, temperature=temperature, **rules) == (NO_TOKEN, None)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-INF, 1.0, -INF, 1.0, -INF])
    for rules in ({}, {"top_p": 0.99}, {"top_k": 4}, {"min_p": 0.0}):
        assert set(draws(logits, 1000, temperature=1.0, **rules)) == {1, 3}


@pytest.mark.parametrize(
    "rules",
    [
        {"temperature": 0},
        {"temperature": 1e-9},
        {"temperature": 1e-320},
        {"temperature": 1e-5},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "min_p": 1.0},
    ],
    ids=str,
)
def test_every_way_to_ask_for_the_likeliest_gives_the_lowest_id_of_the_largest(rules: dict[str, Any]) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(5))
    assert choose(logits, **rules)[0] == int(logits.argmax())
    if rules.get("min_p") != 1.0 and rules["temperature"] != 1e-5:  # those two keep every tie
        tied = torch.zeros(300)
        tied[[40, 90, 250]] = 3.0
        assert choose(tied, **rules)[0] == 40


@pytest.mark.parametrize("scale", [1e30, 3e38])
@pytest.mark.parametrize("rules", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"logprobs": 3}])
def test_huge_logits_are_harmless(scale: float, rules: dict[str, Any]) -> None:
    token, logprobs = choose([-scale, 0.0, scale, -scale], temperature=1.0, **rules)
    assert token == 2
    if logprobs is not None:
        assert all(math.isfinite(value) for _, value in (*logprobs.top, (0, logprobs.logprob)))


@pytest.mark.parametrize("vocab", [5, 100, 3000])
def test_among_equal_logits_the_lowest_ids_are_kept(vocab: int) -> None:
    flat = torch.zeros(vocab)
    assert set(draws(flat, 1000, temperature=1.0, top_k=3)) == {0, 1, 2}
    keep = math.ceil(0.3 * vocab)
    assert max(draws(flat, 3000, temperature=1.0, top_p=0.3)) <= keep - 1
    agrees(draws(flat, 10_000, temperature=1.0), torch.full((vocab,), 1 / vocab))
    _, logprobs = choose(flat, temperature=0, logprobs=4)
    assert [token for token, _ in logprobs.top] == [0, 1, 2, 3]


def test_top_k_larger_than_the_vocabulary_keeps_all() -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(2))
    for top_k in (30, 31, 2**31 - 1, 0, -1):
        assert (draws(logits, 1000, temperature=1.0, top_k=top_k) == draws(logits, 1000, temperature=1.0)).all()
    assert (draws(logits, 1000, temperature=1.0, top_p=1.0) == draws(logits, 1000, temperature=1.0)).all()


def test_log_probabilities_are_the_raw_log_softmax() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(4)) * 3
    wanted = logits.log_softmax(-1)
    rules = {"top_k": 2, "temperature": 0.3, "logit_bias": {17: 100}, "frequency_penalty": 1.0, "logprobs": 5}
    token, got = choose(logits, outputs=[17], **rules)
    assert token == 17
    assert got.token_id == 17
    assert got.logprob == pytest.approx(float(wanted[17]), abs=1e-5)
    assert got.rank == int((wanted > wanted[17]).sum()) + 1
    values, ids = wanted.topk(5)
    assert [i for i, _ in got.top] == ids.tolist()
    assert [v for _, v in got.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_zero_logprobs_reports_the_chosen_token_alone_and_none_reports_nothing() -> None:
    assert choose([0.0, 1.0], temperature=0, logprobs=0)[1].top == ()
    assert choose([0.0, 1.0], temperature=0)[1] is None
    _, one = choose([3.0], temperature=0, logprobs=20)
    assert (one.logprob, one.rank, one.top) == (0.0, 1, ((0, 0.0),))


def test_impossible_tokens_report_a_finite_floor() -> None:
    _, got = choose([0.0, -INF, -INF], temperature=0, logprobs=3)
    assert got.top == ((0, 0.0), (1, LOGPROB_FLOOR), (2, LOGPROB_FLOOR))


def test_rank_orders_equal_logits_by_id() -> None:
    _, got = choose([1.0, 2.0, 2.0, 2.0], temperature=0, logit_bias={3: 50}, logprobs=2)
    assert (got.token_id, got.rank) == (3, 3)


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.randn(1, 50)
    before = logits.clone()
    sampler = Sampler(1, 50, "cpu")
    sampler.admit(admission(0, [1], [2], (5,), top_p=0.5, logit_bias={1: 5}, frequency_penalty=1.0, min_tokens=9))
    sampler.sample(logits, np.zeros(1, np.int32), np.array([2]))
    assert torch.equal(logits, before)


def test_sampling_without_a_seed_is_a_bug_of_the_engine() -> None:
    with pytest.raises(InvariantViolation, match="seed"):
        choose([0.0, 1.0], temperature=1.0, seed=None)
    assert choose([0.0, 1.0], temperature=0, seed=None)[0] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_chosen_from_as_their_float32_values(dtype: torch.dtype) -> None:
    logits = torch.randn(6, 400, generator=torch.Generator().manual_seed(8)).to(dtype)
    rows, positions = np.arange(6, dtype=np.int32), np.full(6, 3, np.int64)
    results = []
    for table in (logits, logits.float()):
        sampler = Sampler(6, 400, "cpu")
        rules = [{"temperature": 0}, {}, {"top_p": 0.5}, {"top_k": 9}, {"min_p": 0.2}, {"frequency_penalty": 2.0}]
        for row, rule in enumerate(rules):
            sampler.admit(admission(row, [0], [1, 2], (), **{"logprobs": 3, **rule}))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            results.append(sampler.sample(table, rows, positions))
    assert results[0][0].tolist() == results[1][0].tolist()
    assert results[0][1] == results[1][1]
