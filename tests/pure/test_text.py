"""Where text stops: stop strings in any split of the text, stop tokens, min_tokens, and what is held back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.engine.text import Detokenizer, StopChecker, TextStream
from octavo.scheduling.request import Request, SamplingParams


class Words:
    """A tokenizer of whole strings: token i is `pieces[i]`; the first is special."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = ["<eos>", *pieces]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[i] for i in ids if i or not skip_special_tokens)


class Bytes:
    """A tokenizer of single bytes."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")


def made(tokenizer: Any, *, eos: tuple[int, ...] = (0,), **params: Any) -> TextStream:
    request = Request(
        request_id="r", prompt_token_ids=np.array([1], np.int32), params=SamplingParams(**params), eos_token_ids=eos
    )
    return TextStream(tokenizer, request)


def whole(stream: TextStream, tokens: Sequence[int]) -> str:
    """Everything that a client gets when the tokens come one by one."""
    text = ""
    for token in tokens:
        delta = stream.push([token])
        text += delta.text
        if delta.token_index is not None:
            break
    return text + stream.finish()


def expected(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """By trying every end: the stop string complete first, of several the longest."""
    for end in range(len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def cut(text: str, places: Sequence[int]) -> list[str]:
    edges = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def checked(stops: Sequence[str], include: bool, pieces: Sequence[str]) -> tuple[str, str | None]:
    checker = StopChecker(tuple(stops), include)
    text = ""
    for piece in pieces:
        text += checker.push(piece)
        # Nothing sent may have to be taken back: neither a stop string nor the beginning of one.
        if checker.matched is None:
            seen = "".join(pieces)[: len(text) + len(checker._held)]
            longest = max((n for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])), default=0)
            assert len(checker._held) == longest
    return text + checker.flush(), checker.matched


ALPHABET = st.text("ab", min_size=1, max_size=5)


@given(st.text("aabbc", max_size=40), st.lists(ALPHABET, max_size=4), st.booleans(), st.lists(st.integers(0, 40)))
@settings(max_examples=300)
@example("cab", ["ab", "b"], False, [])
@example("cab", ["b", "ab"], False, [])
@example("aaab", ["aab"], True, [2])
@example("DEFGHIJ", ["DEFGHIJ"], False, [3, 4, 6])
@example("aabaabaab", ["aabaabb", "baab"], False, [1, 2, 3, 4, 5, 6, 7, 8])
def test_the_cut_is_exact_in_any_split(text: str, stops: list[str], include: bool, places: list[int]) -> None:
    assert checked(stops, include, cut(text, places)) == expected(text, stops, include)


def test_no_part_of_a_stop_string_is_sent_before_it_matches() -> None:
    checker = StopChecker(("DEFGHIJ",), include=False)
    assert [checker.push(piece) for piece in ("abc", "DEF", "G", "HI", "J", "more")] == ["abc", "", "", "", "", ""]
    assert checker.matched == "DEFGHIJ"
    assert checker.flush() == ""


def test_what_was_held_is_sent_as_soon_as_it_cannot_be_a_stop_string() -> None:
    checker = StopChecker(("ta ga",), include=False)
    assert [checker.push(piece) for piece in ("be", "ta", " g", "o", " ta")] == ["be", "", "", "ta go", " "]
    assert checker.flush() == "ta"


def test_a_stop_string_inside_one_token_cuts_it() -> None:
    tokenizer = Words("brown fox", " and more")
    assert whole(made(tokenizer, stop="own fo"), [1, 2]) == "br"
    assert whole(made(tokenizer, stop="own fo", include_stop_str_in_output=True), [1, 2]) == "brown fo"


def test_a_stop_string_across_tokens_is_found() -> None:
    tokenizer = Words("alpha", " beta", " gamma", " delta")
    stream = made(tokenizer, stop=["ta ga"])
    deltas = [stream.push([token]) for token in (1, 2, 3)]
    assert [d.text for d in deltas] == ["alpha", " be", ""]
    assert (deltas[2].stopped, deltas[2].token_index, stream.finish()) == ("ta ga", 0, "")


def test_a_second_stop_string_is_tested_on_the_same_text() -> None:
    tokenizer = Words("one", " two", " three")
    assert whole(made(tokenizer, stop=["never to be found in here", " thr"]), [1, 2, 3]) == "one two"
    assert whole(made(tokenizer, stop=[" thr", "o"]), [1, 2, 3]) == ""
    assert whole(made(tokenizer, stop=[" thr", "w"]), [1, 2, 3]) == "one t"


def test_several_tokens_in_one_step_stop_at_the_right_one() -> None:
    stream = made(Words("a", "b", "c", "d"), stop=["bc"])
    delta = stream.push([1, 2, 3, 4, 4])
    assert (delta.text, delta.stopped, delta.token_index, stream.tokens) == ("a", "bc", 2, 3)
    assert stream.push([1]).text == ""
    assert stream.finish() == ""


@pytest.mark.parametrize("one_by_one", [True, False])
def test_the_text_of_a_stop_token_does_not_leak(one_by_one: bool) -> None:
    tokens, tokenizer = [1, 2, 3, 1], Words("see ", "you ", "later")
    for include, wanted in ((False, "see you "), (True, "see you later")):
        stream = made(tokenizer, stop_token_ids=[3], include_stop_str_in_output=include)
        if one_by_one:
            assert whole(stream, tokens) == wanted
        else:
            delta = stream.push(tokens)
            assert (delta.text + stream.finish(), delta.stop_token, delta.token_index) == (wanted, 3, 2)


def test_the_end_token_is_text_only_where_asked() -> None:
    tokenizer = Words("hi")
    assert whole(made(tokenizer), [1, 0, 1]) == "hi"
    assert whole(made(tokenizer, skip_special_tokens=False), [1, 0, 1]) == "hi"
    assert whole(made(tokenizer, ignore_eos=True), [1, 0, 1]) == "hihi"
    assert whole(made(tokenizer, ignore_eos=True, skip_special_tokens=False), [1, 0, 1]) == "hi<eos>hi"
    asked = made(tokenizer, include_stop_str_in_output=True, skip_special_tokens=False)
    assert whole(asked, [1, 0, 1]) == "hi<eos>"


def test_nothing_stops_before_min_tokens() -> None:
    tokenizer = Words("x", "stop", "st", "op")
    assert whole(made(tokenizer, stop="stop", min_tokens=2), [2, 2, 1, 2, 1]) == "stopstopx"
    assert whole(made(tokenizer, stop="stop", min_tokens=2), [2, 3, 4, 1]) == "stop"
    assert whole(made(tokenizer, stop_token_ids=[2], min_tokens=1), [2, 1, 2, 1]) == "stopx"


def test_held_text_arrives_when_the_sequence_ends() -> None:
    stream = made(Words("wait for ", "it"), stop=["it all"])
    assert [stream.push([1]).text, stream.push([2]).text, stream.finish()] == ["wait for ", "", "it"]


def test_held_text_arrives_before_a_stop_token() -> None:
    stream = made(Words("wait for ", "it", "END"), stop=["it all"], stop_token_ids=[3])
    delta = stream.push([1, 2, 3])
    assert (delta.text, delta.stop_token, stream.finish()) == ("wait for ", 3, "it")


def test_a_stop_string_of_several_bytes_stops_between_characters() -> None:
    text = "你好 👋🏽!"
    for include, wanted in ((False, "你好 "), (True, "你好 👋🏽")):
        stream = made(Bytes(), eos=(), stop="👋🏽", include_stop_str_in_output=include)
        assert whole(stream, list(text.encode())) == wanted
    assert whole(made(Bytes(), eos=(), stop="�"), [*b"ab", 0xE4]) == "ab"


def test_a_stop_string_completed_by_the_last_flush_is_reported() -> None:
    stream = made(Bytes(), eos=(), stop="�")
    assert stream.push([0x61, 0xE4]).text == "a"
    assert stream.stopped is None
    assert stream.finish() == ""
    assert stream.stopped == "�"


def test_an_empty_push_and_an_empty_stream_add_nothing() -> None:
    stream = made(Words("a"), stop="zz")
    assert stream.push([]).text == ""
    assert stream.finish() == ""


@given(st.lists(st.integers(0, 255), max_size=200), st.lists(st.integers(0, 200), max_size=6))
def test_streams_of_any_bytes_equal_decoding_them_at_once(ids: list[int], places: list[int]) -> None:
    stream = made(Bytes(), eos=())
    edges = [0, *sorted(p % (len(ids) + 1) for p in places), len(ids)]
    text = "".join(stream.push(ids[a:b]).text for a, b in pairwise(edges))
    assert text + stream.finish() == Bytes().decode(ids)


def test_streams_do_not_share_anything() -> None:
    streams = [made(Bytes(), eos=(), stop="ab") for _ in range(3)]
    texts = ["你xa", "aaab!", "ä"]
    sent = ["", "", ""]
    for i in range(max(len(t.encode()) for t in texts)):
        for k, stream in enumerate(streams):
            sent[k] += stream.push(list(texts[k].encode())[i : i + 1]).text
    assert [s + stream.finish() for s, stream in zip(sent, streams, strict=True)] == ["你xa", "aa", "ä"]


def test_a_long_stop_string_costs_no_more_per_character() -> None:
    checker = StopChecker(("a" * 4096, "b" * 4096), include=False)
    sent = "".join(checker.push("a" * 4095 + "c") for _ in range(20))
    assert (len(sent), checker.matched) == (20 * 4096, None)
    assert checker.push("a" * 4096) == ""
    assert checker.matched == "a" * 4096


def test_pushing_after_flush_does_not_repeat_text() -> None:
    detokenizer = Detokenizer(Bytes(), [1], skip_special_tokens=True)
    assert [detokenizer.push(0xE4), detokenizer.flush(), detokenizer.flush()] == ["", "�", ""]
    assert detokenizer.push(0x61) == "a"
