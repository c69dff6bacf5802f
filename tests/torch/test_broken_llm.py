"""Calls of one `LLM` that overlap: a call while a stream is open, streams side by side, threads, streams never read."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from tests.pure.worlds import VOCAB
from tests.pure.worlds import engine as make_core

from octavo import LLM, SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.errors import EngineDeadError, RequestError
from octavo.memory.check import is_empty

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@pytest.fixture
def llm() -> LLM:
    """Around an engine that echoes the prompt over and over, audited after every step."""
    core = make_core(slabs=40, context=200)
    return LLM.from_engine(Engine(core, Intake(None, defaults={}, eos_token_ids=(), vocab_size=VOCAB)))


def echo(prompt: list[int], count: int) -> tuple[int, ...]:
    return tuple(prompt[i % len(prompt)] for i in range(count))


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0)


def assert_nothing_left(llm: LLM) -> None:
    llm.generate([[1]], params(1))
    assert not llm.engine.has_work
    assert is_empty(llm.engine.core.scheduler.cache)


def test_a_call_while_a_stream_is_open_takes_nothing_from_it(llm: LLM) -> None:
    tokens: list[int] = []
    for i, delta in enumerate(llm.stream([[1, 2, 3]], params(12))):
        tokens += delta.token_ids
        if i in (0, 3):
            output = llm.generate([[4, 5]], params(20))[0].outputs[0]
            assert output.token_ids == echo([4, 5], 20)
    assert tuple(tokens) == echo([1, 2, 3], 12)
    assert_nothing_left(llm)


def test_streams_side_by_side_get_their_own_tokens(llm: LLM) -> None:
    streams: list[Any] = [llm.stream([prompt], params(9 + i)) for i, prompt in enumerate(PROMPTS)]
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    ended: set[int] = set()
    for _ in range(100):
        for i, stream in enumerate(streams):
            delta = next(stream, None)
            if delta is None:
                ended.add(i)
            else:
                assert delta.request_id == "0"
                tokens[i] += delta.token_ids
    assert len(ended) == 3
    assert [tuple(one) for one in tokens] == [echo(prompt, 9 + i) for i, prompt in enumerate(PROMPTS)]
    assert_nothing_left(llm)


def test_a_stream_that_is_never_read_leaves_nothing(llm: LLM) -> None:
    stream = llm.stream([[1, 2, 3]], params(50))
    assert llm.engine.has_work
    del stream
    gc.collect()
    assert not llm.engine.has_work
    assert_nothing_left(llm)


def test_a_stream_dropped_in_the_middle_of_a_step_ends_after_it(llm: LLM) -> None:
    held: list[Any] = [llm.stream([[1, 2, 3]], params(50))]
    next(held[0])
    llm.engine.observers.append(lambda events: held.clear())
    assert llm.generate([[4, 5]], params(6))[0].outputs[0].token_ids == echo([4, 5], 6)
    assert_nothing_left(llm)


def test_threads_take_turns_and_each_gets_its_own(llm: LLM) -> None:
    wrong: list[str] = []

    def call(number: int) -> None:
        prompt = PROMPTS[number % 3]
        for round_ in range(6):
            count = 5 + round_
            if (number + round_) % 2:
                got = llm.generate([prompt], params(count))[0].outputs[0].token_ids
            else:
                got = tuple(token for delta in llm.stream([prompt], params(count)) for token in delta.token_ids)
            if got != echo(prompt, count):
                wrong.append(f"{prompt}: {got}")

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert_nothing_left(llm)


def test_a_refused_call_while_a_stream_is_open_harms_neither(llm: LLM) -> None:
    stream = llm.stream([[1, 2, 3]], params(4))
    first = next(stream)
    with pytest.raises(RequestError):
        llm.generate([[1], [VOCAB + 5]], params(3))
    rest = [token for delta in stream for token in delta.token_ids]
    assert (*first.token_ids, *rest) == echo([1, 2, 3], 4)
    assert_nothing_left(llm)


def test_when_the_engine_dies_an_open_stream_ends_with_the_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream([[1, 2, 3]], params(50))
    next(stream)

    def broken() -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(llm.engine.core.executor, "collect", broken)
    with pytest.raises(EngineDeadError):
        llm.generate([[4, 5]], params(5))
    assert [delta.finish_reason for delta in stream] == ["error"]
