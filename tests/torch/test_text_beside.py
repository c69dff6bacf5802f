"""Where text is made: whole outputs beside the steps, streams and what a stop string may end after each of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.worlds import VOCAB
from tests.pure.worlds import engine as make_core

from octavo import LLM, SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.memory.check import is_empty

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


class Bytes:
    """A decoder whose tokens are bytes of a character of two or three, so that text comes late and in parts."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.fails = False

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.threads.add(threading.current_thread().name)
        if self.fails and threading.current_thread() is not threading.main_thread():
            raise ValueError("this tokenizer is broken")
        table = [b"a", b"\xc3", b"\xa4", b"b", b"\xe4", b"\xbd", b"\xa0", b"\xff", b"cd", b""]
        shown = [i for i in ids if not (skip_special_tokens and i == 2)]
        return b"".join(table[i % len(table)] for i in shown).decode(errors="replace")


def made(audit: bool = True) -> tuple[LLM, Bytes]:
    """Around an engine that echoes the prompt over and over."""
    decoder = Bytes()
    core = make_core(slabs=40, context=200, audit=audit)
    return LLM.from_engine(Engine(core, Intake(decoder, defaults={}, eos_token_ids=(), vocab_size=VOCAB))), decoder


def decoded_in_steps(llm: LLM, decoder: Bytes) -> list[bool]:
    """Whether each step that follows asks for text in the thread that steps."""
    counts: list[bool] = []
    own = llm.engine.step

    def step() -> object:
        decoder.threads.clear()
        batch = own()
        counts.append(threading.current_thread().name in decoder.threads)
        return batch

    llm.engine.step = step  # type: ignore[method-assign, assignment]
    return counts


def test_whole_outputs_are_decoded_by_another_thread_which_then_is_gone() -> None:
    llm, decoder = made()
    counts = decoded_in_steps(llm, decoder)
    params = [SamplingParams(max_tokens=n, temperature=0.0) for n in (3, 20, 9)]
    outputs = llm.generate(PROMPTS, params)
    assert counts
    assert not any(counts)
    assert all(output.outputs[0].text for output in outputs)
    assert not any("octavo-text" in thread.name for thread in threading.enumerate())
    assert is_empty(llm.engine.core.scheduler.cache)


def test_streams_and_stop_strings_are_decoded_step_by_step() -> None:
    llm, decoder = made()
    counts = decoded_in_steps(llm, decoder)
    params = SamplingParams(max_tokens=9, temperature=0.0)
    assert "".join(delta.text for delta in llm.stream(PROMPTS[0], params))
    assert any(counts)
    counts.clear()
    stopped = llm.generate(PROMPTS[0], SamplingParams(max_tokens=9, temperature=0.0, stop="b"))[0].outputs[0]
    assert any(counts)
    assert (stopped.finish_reason, stopped.stop_reason, len(stopped.token_ids)) == ("stop", "b", 3)


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    count=st.integers(0, 40),
    stop_ids=st.lists(st.integers(0, 9), max_size=2),
    least=st.integers(0, 6),
    include=st.booleans(),
    skip=st.booleans(),
)
def test_they_have_the_text_that_a_stream_gives(
    prompt: list[int], count: int, stop_ids: list[int], least: int, include: bool, skip: bool
) -> None:
    llm, _ = made(audit=False)
    params = SamplingParams(
        max_tokens=count,
        min_tokens=min(least, count),
        temperature=0.0,
        stop_token_ids=stop_ids,
        include_stop_str_in_output=include,
        skip_special_tokens=skip,
        n=2,
    )
    whole = llm.generate(prompt, params)[0]
    parts = {0: "", 1: ""}
    for delta in llm.stream(prompt, params):
        parts[delta.index] += delta.text
    assert parts == {choice.index: choice.text for choice in whole.outputs}


def test_a_tokenizer_that_fails_fails_the_call_and_leaves_nothing() -> None:
    llm, decoder = made()
    decoder.fails = True
    with pytest.raises(ValueError, match="this tokenizer is broken"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0.0))
    decoder.fails = False
    assert llm.generate([3], SamplingParams(max_tokens=4, temperature=0.0))[0].outputs[0].text == "bbbb"
    assert not llm.engine.has_work
    assert is_empty(llm.engine.core.scheduler.cache)


def test_calls_from_several_threads_each_get_their_text() -> None:
    llm, _ = made(audit=False)
    params = SamplingParams(max_tokens=30, temperature=0.0)
    texts: dict[int, list[str]] = {}

    def call(i: int) -> None:
        for _ in range(4):
            texts.setdefault(i, []).append(llm.generate([[i], [i, 3]], params)[i % 2].outputs[0].text)

    threads = [threading.Thread(target=call, args=(i,)) for i in (0, 3, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == {0: ["a" * 30] * 4, 3: ["b" * 30] * 4, 8: ["cd" * 30] * 4}
    assert not llm.engine.has_work
