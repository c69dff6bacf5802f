"""The sampler over batches: no row sees its neighbours, rows are reused cleanly, greedy batches cost an argmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import octavo.runtime.sampler as sampler_module
from octavo.runtime.sampler import NO_TOKEN, Sampler
from octavo.scheduling.plan import Admission, TokenLogprobs
from octavo.scheduling.request import Request, SamplingParams

VOCAB = 1501  # odd, so that the rows of a table are aligned differently
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95, "logprobs": 0},
    {"temperature": 1.2, "top_p": 0.999},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.0, "top_k": 1200, "top_p": 0.9},
    {"temperature": 0.5, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 0, "frequency_penalty": 1.0, "presence_penalty": -0.5},
    {"temperature": 0.9, "logit_bias": {3: 5, 700: -100}, "min_tokens": 4, "stop_token_ids": [5, 6]},
    {"temperature": 3.0, "top_k": 7, "min_p": 0.3, "top_p": 0.6, "logprobs": 20},
]


def admit(sampler: Sampler, row: int, identity: int, *, prompt: int = 4, outputs: tuple[int, ...] = ()) -> None:
    """Give `row` to sequence `identity`, whose parameters and seed follow from its number."""
    request = Request(
        request_id=f"s{identity}",
        prompt_token_ids=np.arange(prompt, dtype=np.int32),
        params=SamplingParams(**{"seed": identity * 7919 - 40, **KINDS[identity % len(KINDS)]}),
        choice=identity % 3,
        eos_token_ids=(2,),
    )
    sampler.admit(Admission(row, identity, request, np.array(outputs, np.int32)))


def table(count: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.to(dtype)


def alone(logits: torch.Tensor, identity: int, length: int, **how: Any) -> tuple[int, TokenLogprobs | None]:
    sampler = Sampler(1, VOCAB, "cpu")
    admit(sampler, 0, identity, **how)
    tokens, logprobs = sampler.sample(logits[None], np.zeros(1, np.int32), np.array([length], np.int64))
    return int(tokens[0]), logprobs.get(0)


@given(
    identities=st.lists(st.integers(0, 60), min_size=1, max_size=24, unique=True),
    seed=st.integers(0, 50),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spread=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=40)
def test_a_row_is_the_same_alone_and_in_any_batch(
    identities: list[int], seed: int, dtype: torch.dtype, spread: int, data: st.DataObject
) -> None:
    seats = data.draw(st.permutations(range(len(identities) * spread)))[: len(identities)]
    lengths = [4 + identity % 9 for identity in identities]
    sampler, logits = Sampler(len(identities) * spread, VOCAB, "cpu"), table(len(identities), seed, dtype)
    for seat, identity in zip(seats, identities, strict=True):
        admit(sampler, seat, identity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_slice", data.draw(st.integers(1, 30)))
        tokens, logprobs = sampler.sample(logits, np.array(seats, np.int32), np.array(lengths, np.int64))
    for i, identity in enumerate(identities):
        assert (int(tokens[i]), logprobs.get(i)) == alone(logits[i], identity, lengths[i])


def test_a_seeded_row_ignores_seeded_and_other_neighbours() -> None:
    logits = table(4, 9)
    wanted, _ = alone(logits[1], 4, 8)
    for others in ((2, 3, 5), (15, 0, 26), (7, 8, 9)):
        sampler = Sampler(4, VOCAB, "cpu")
        for row, identity in enumerate((others[0], 4, others[1], others[2])):
            admit(sampler, row, identity)
        tokens, _ = sampler.sample(logits, np.arange(4, dtype=np.int32), np.full(4, 8, np.int64))
        assert tokens[1] == wanted


def test_a_bad_row_fails_alone() -> None:
    logits = table(22, 3)
    logits[5, 100], logits[9], logits[13, 4] = float("nan"), -float("inf"), float("inf")
    sampler = Sampler(22, VOCAB, "cpu")
    for row in range(22):
        admit(sampler, row, row)
    tokens, logprobs = sampler.sample(logits, np.arange(22, dtype=np.int32), np.full(22, 6, np.int64))
    assert np.flatnonzero(tokens == NO_TOKEN).tolist() == [5, 9, 13]
    for row in set(range(22)) - {5, 9, 13}:
        assert (int(tokens[row]), logprobs.get(row)) == alone(logits[row], row, 6)


def run(sampler: Sampler, row: int, start: int, count: int) -> list[int]:
    """Sample `count` tokens for a row, each position with its own logits."""
    seats = np.array([row], np.int32)
    return [
        int(sampler.sample(table(1, 1000 + start + i), seats, np.array([start + i], np.int64))[0][0])
        for i in range(count)
    ]


@pytest.mark.parametrize("identity", range(len(KINDS)))
@pytest.mark.parametrize("paused_at", [1, 3, 7])
def test_a_row_admitted_again_with_its_outputs_goes_on_as_if_never_paused(identity: int, paused_at: int) -> None:
    steady = Sampler(1, VOCAB, "cpu")
    admit(steady, 0, identity)
    whole = run(steady, 0, 4, 12)
    sampler = Sampler(3, VOCAB, "cpu")
    admit(sampler, 2, identity)
    first = run(sampler, 2, 4, paused_at)
    admit(sampler, 0, identity, outputs=tuple(first))
    assert first + run(sampler, 0, 4 + paused_at, 12 - paused_at) == whole


@pytest.mark.parametrize("before", range(len(KINDS)))
def test_a_reused_row_keeps_nothing_of_its_last_sequence(before: int) -> None:
    sampler = Sampler(1, VOCAB, "cpu")
    for after in range(len(KINDS)):
        admit(sampler, 0, before)
        run(sampler, 0, 4, 3)
        admit(sampler, 0, after)
        fresh = Sampler(1, VOCAB, "cpu")
        admit(fresh, 0, after)
        assert run(sampler, 0, 4, 3) == run(fresh, 0, 4, 3)
    admit(sampler, 0, 0)
    assert (sampler._bans, sampler._bias, sampler._seen) == ({}, {}, {})


def test_choices_of_one_seed_differ() -> None:
    sampler = Sampler(8, VOCAB, "cpu")
    for row in range(8):
        request = Request(
            request_id="same",
            prompt_token_ids=np.array([1], np.int32),
            params=SamplingParams(seed=5, temperature=2.0),
            choice=row,
        )
        sampler.admit(Admission(row, row, request, np.empty(0, np.int32)))
    logits = table(1, 1).expand(8, -1)
    tokens, _ = sampler.sample(logits, np.arange(8, dtype=np.int32), np.ones(8, np.int64))
    assert len(set(tokens.tolist())) > 5


def test_a_greedy_batch_is_one_argmax_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(64, VOCAB, "cpu")
    for row in range(64):
        admit(sampler, row, 11 * row)  # kind 0
    forbidden = ("sort", "topk", "softmax", "exp_", "cumsum", "__getitem__")
    for name in forbidden:
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("more than an argmax"))
    monkeypatch.setattr(Sampler, "_choose", lambda *_: pytest.fail("more than an argmax"))
    logits = table(64, 2)
    tokens, logprobs = sampler.sample(logits, np.arange(64, dtype=np.int32), np.full(64, 9, np.int64))
    assert tokens.tolist() == logits.argmax(1).tolist()
    assert tokens.dtype == np.int32
    assert logprobs == {}


def test_top_p_sorts_the_vocabulary_only_where_the_likeliest_tokens_do_not_suffice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at: list[tuple[int, int]] = []
    original = sampler_module._likeliest

    def spy(work: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        looked_at.append((len(work), count))
        return original(work, count)

    monkeypatch.setattr(sampler_module, "_likeliest", spy)
    sampler = Sampler(10, VOCAB, "cpu")
    for row in range(10):
        admit(sampler, row, 3 + 11 * row)  # top_p 0.95
    logits = table(10, 6) * 3
    logits[4] *= 0  # flat: 95 % of the mass needs 95 % of the tokens
    tokens, _ = sampler.sample(logits, np.arange(10, dtype=np.int32), np.full(10, 5, np.int64))
    assert looked_at == [(10, 64), (1, 1024), (1, VOCAB)]
    assert tokens.min() >= 0


def test_the_stages_of_top_p_and_a_full_sort_give_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens() -> list[int]:
        sampler = Sampler(44, VOCAB, "cpu")
        for row in range(44):
            admit(sampler, row, row)
        logits = table(44, 12, torch.bfloat16)  # many equal values
        return sampler.sample(logits, np.arange(44, dtype=np.int32), np.full(44, 5, np.int64))[0].tolist()

    staged = tokens()
    monkeypatch.setattr(sampler_module, "_STAGES", ())
    assert tokens() == staged
    monkeypatch.setattr(sampler_module, "_STAGES", (1, 2, 3, 90))
    assert tokens() == staged


def test_the_inverse_gives_each_token_its_share_and_none_to_those_without_weight() -> None:
    weights = torch.tensor([[0, 3, 0, 1, 4, 0]])
    draws = torch.arange(16, dtype=torch.float64) / 16
    tokens = sampler_module._inverse(weights.expand(16, -1).contiguous(), draws)
    assert tokens.tolist() == [1] * 6 + [3] * 2 + [4] * 8
    last = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert sampler_module._inverse(torch.tensor([[2**57, 2**57 - 1, 0]]), last).tolist() == [1]


@pytest.mark.parametrize("operation", ["exp", "sub", "div"])
def test_elementwise_results_do_not_depend_on_place_or_length(operation: str) -> None:
    """What the sampler's independence of the batch rests on, of this build of torch."""
    values = -torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 40
    other = torch.tensor(0.7)
    compute = (lambda v: v.exp()) if operation == "exp" else (lambda v: getattr(v, operation)(other))
    wanted = compute(values)
    for offset in range(33):
        for length in (*range(1, 40), 777):
            buffer = torch.empty(900)
            part = buffer[offset : offset + length].copy_(values[:length])
            assert torch.equal(compute(part), wanted[:length])
    assert torch.equal(compute(values.repeat(3, 50).t())[:2000, 1], wanted)


def test_rows_out_of_a_larger_table_are_found_by_their_seat() -> None:
    sampler = Sampler(100, VOCAB, "cpu")
    for row in range(100):
        admit(sampler, row, row)
    rows = np.array([98, 3, 57], np.int32)
    rows.flags.writeable = False
    logits = table(3, 4)
    positions = np.array([9, 5, 7], np.int64)
    positions.flags.writeable = False
    tokens, logprobs = sampler.sample(logits, rows, positions)
    for i, row in enumerate(rows.tolist()):
        assert (int(tokens[i]), logprobs.get(i)) == alone(logits[i], row, int(positions[i]))


def test_an_empty_batch_gives_nothing() -> None:
    sampler = Sampler(4, VOCAB, "cpu")
    admit(sampler, 0, 3)
    tokens, logprobs = sampler.sample(table(0, 1), np.empty(0, np.int32), np.empty(0, np.int64))
    assert (tokens.shape, tokens.dtype, logprobs) == ((0,), np.int32, {})
