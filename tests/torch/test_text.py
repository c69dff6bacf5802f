"""Streams of text through real tokenizers, built here: byte-level BPE and byte-fallback like SentencePiece's.

Faults met elsewhere, each with a test: characters split over tokens, a word that starts while bytes are
pending, bytes that are no text. These need the `tokenizers` library; the rest of the rules are pure tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from octavo.engine.text import BROKEN, MAX_HELD, MAX_WINDOW_TOKENS, Detokenizer, decoder_of

TEXT = "삼겹살 👋🏽 ďábelské 你好"
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other dog",
    "삼겹살 구이 맛있다 삼겹살",
    "ďábelské ódy příliš žluťoučký kůň",
    "你好 世界 你们 好 世 界",
    "👋🏽 👋 🎉 👩‍👩‍👧 wave",
    "שלום hello עולם world",
]


def byte_level() -> Tokenizer:
    """Byte-level BPE with every byte, some merges (so that tokens cut characters anywhere) and special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2's: words begin with a visible space, unknown characters fall to bytes, one space is stripped."""
    words = ["▁", "▁the", "▁hello", "▁world", "h", "e", "l", "o", "w", "r", "d", "t", "你", "▁你好", ",", "▁▁", "s"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    merges: list[tuple[str, str]] = []
    model = models.BPE(
        {p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer is BYTE_LEVEL:
        return list(tokenizer.encode(text).ids)
    ids = []
    for char in text.replace(" ", "▁"):
        found = tokenizer.token_to_id(char)
        ids += [found] if found is not None else [3 + byte for byte in char.encode()]
    return ids


def stream(tokenizer: Any, prompt: Sequence[int], output: Sequence[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in output), detokenizer.flush()]


def batch(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], skip: bool = True) -> str:
    before = tokenizer.decode(list(prompt), skip_special_tokens=skip)
    return tokenizer.decode([*prompt, *output], skip_special_tokens=skip)[len(before) :]


@BOTH
@pytest.mark.parametrize("prompt", ["", "hello", "好", "hello world " * 20])
def test_characters_split_over_tokens_arrive_whole(tokenizer: Tokenizer, prompt: str) -> None:
    before, ids = encode(tokenizer, prompt), encode(tokenizer, TEXT)
    assert len(ids) > len(TEXT) * 0.8
    pieces = stream(tokenizer, before, ids)
    assert "".join(pieces) == TEXT
    assert BROKEN not in "".join(pieces)
    assert pieces[-1] == ""  # nothing of a whole text waits for the end


@BOTH
def test_a_word_may_follow_a_pending_character(tokenizer: Tokenizer) -> None:
    text = "שלום hello עולם world שלום"
    assert "".join(stream(tokenizer, [], encode(tokenizer, text))) == text
    cut = encode(tokenizer, "שלום")[:-1]  # the last letter stays half
    word = encode(tokenizer, " hello")
    joined = "".join(stream(tokenizer, [], [*cut, *word]))
    assert joined.startswith("שלו")
    assert joined.endswith(" hello")


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=120), st.integers(0, 20), st.booleans())
@example([2] * 90, 0, True)
@settings(max_examples=400)
def test_any_byte_level_ids_stream_to_what_decoding_all_gives(ids: list[int], prompt: int, skip: bool) -> None:
    before, output = ids[:prompt], ids[prompt:]
    joined = "".join(stream(BYTE_LEVEL, before, output, skip))
    whole = BYTE_LEVEL.decode(before, skip_special_tokens=skip)
    if whole.endswith(BROKEN):  # the output may complete the prompt's last character: it is then the output's
        full = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
        assert full.endswith(joined)
        assert whole.rstrip(BROKEN) in full[: len(full) - len(joined)] + BROKEN * MAX_HELD
    else:
        assert joined == batch(BYTE_LEVEL, before, output, skip)


WRITING = st.text(st.characters(codec="utf-8"), max_size=60)


@given(WRITING, WRITING)
@settings(max_examples=300)
def test_valid_text_streams_exactly(text: str, prompt: str) -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        if tokenizer is BYTE_FALLBACK:  # which shows each byte of an unfinished character as a U+FFFD
            text, prompt = (t.replace("▁", "").replace(BROKEN, "") for t in (text, prompt))
        before, ids = encode(tokenizer, prompt), encode(tokenizer, text)
        assert "".join(stream(tokenizer, before, ids)) == batch(tokenizer, before, ids)
        if tokenizer is BYTE_LEVEL:
            assert batch(tokenizer, before, ids) == text


FALLBACK_PIECES = st.one_of(
    st.sampled_from(["the", " hello", "你", "👋🏽", "ď", " ", "  ", "\n", ",", "好", "<s>", "</s>"]),
    st.characters(exclude_characters="▁" + BROKEN, codec="utf-8"),
)


def fallback_ids(pieces: list[str]) -> list[int]:
    special = {"<s>": 1, "</s>": 2}
    return [i for p in pieces for i in ([special[p]] if p in special else encode(BYTE_FALLBACK, p))]


@given(st.lists(FALLBACK_PIECES, max_size=40), st.integers(0, 10))
@settings(max_examples=300)
def test_valid_byte_fallback_ids_with_special_tokens_stream_exactly(pieces: list[str], prompt: int) -> None:
    before, output = fallback_ids(pieces[:prompt]), fallback_ids(pieces[prompt:])
    assert "".join(stream(BYTE_FALLBACK, before, output)) == batch(BYTE_FALLBACK, before, output)


@given(st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=100), st.integers(0, 12), st.booleans())
@example([*encode(BYTE_FALLBACK, "你好👋"), 258, 258, 258, 258, 258, *encode(BYTE_FALLBACK, "▁the")], 0, True)
@settings(max_examples=400)
def test_any_byte_fallback_ids_keep_every_character_that_decoding_all_has(
    ids: list[int], prompt: int, skip: bool
) -> None:
    before, output = ids[:prompt], ids[prompt:]
    joined, whole = "".join(stream(BYTE_FALLBACK, before, output, skip)), batch(BYTE_FALLBACK, before, output, skip)
    if BROKEN in BYTE_FALLBACK.decode(before, skip_special_tokens=skip):
        return  # the output may complete the prompt's last character
    if BROKEN not in whole:
        assert joined == whole
    else:
        rest = iter(joined)  # whatever is broken, good characters are all there, in order
        assert all(char in rest for char in whole if char != BROKEN)


@BOTH
@pytest.mark.parametrize("byte", [0xFF, 0xE4, 0x80, 0xF0, 0xC3])
def test_invalid_bytes_never_stall_the_stream(tokenizer: Tokenizer, byte: int) -> None:
    bad = 3 + byte if tokenizer is BYTE_FALLBACK else byte_id(byte)
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=True)
    sent, length = "", 0
    for count in range(1, 300):
        sent += detokenizer.push(bad)
        length = max(length, len(detokenizer._window))
        assert len(sent) >= count - MAX_HELD
    for token in encode(tokenizer, " hello"):
        sent += detokenizer.push(token)
    sent += detokenizer.flush()
    assert sent == BROKEN * 299 + " hello"
    assert length <= MAX_WINDOW_TOKENS


@BOTH
def test_good_text_after_bad_bytes_is_whole(tokenizer: Tokenizer) -> None:
    bad = 3 + 0xFF if tokenizer is BYTE_FALLBACK else byte_id(0xFF)
    for count in (1, 2, 3, 5, 9, 47, 48, 49, 200):
        ids = [*encode(tokenizer, "the "), *[bad] * count, *encode(tokenizer, " " + TEXT)]
        joined = "".join(stream(tokenizer, [], ids))
        assert joined == "the " + BROKEN * count + " " + TEXT


def byte_id(byte: int) -> int:
    """The byte-level token of one byte."""
    for token, index in BYTE_LEVEL.get_vocab().items():
        if len(token) == 1 and BYTE_LEVEL.decode([index]).encode() == bytes([byte]):
            return index
    return byte_table()[byte]


def byte_table() -> dict[int, int]:
    """Byte to id, by GPT-2's rule: printable bytes stand for themselves, the others are moved up in order."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in kept]
    letters = {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(moved)}
    return {b: BYTE_LEVEL.token_to_id(letter) for b, letter in letters.items()}


def test_a_text_whose_tokens_all_end_inside_a_character_is_sent_as_it_comes() -> None:
    class Shifted:
        """Tokens of three bytes that never end where a character ends."""

        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            parts = {0: b"\xe4", 1: b"\xbd\xa0\xe5", 2: b"\xa5\xbd\xe4", 3: b"\xbd\xa0"}
            return b"".join(parts[i] for i in ids).decode(errors="replace")

    ids = [0, *[1, 2] * 500, 3]
    pieces = stream(Shifted(), [], ids)
    assert "".join(pieces) == "你" + "好你" * 500
    assert max(map(len, pieces)) <= 2
    assert pieces[0] == pieces[-1] == ""


@BOTH
@pytest.mark.parametrize("kind", ["words", "specials", "characters"])
def test_work_per_token_does_not_grow_with_the_text(tokenizer: Tokenizer, kind: str) -> None:
    class Counting:
        decoded = 0

        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            Counting.decoded += len(ids)
            return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    text = {"words": " hello the world", "specials": "", "characters": "👋你ď"}[kind]
    ids = (encode(tokenizer, text) or [1]) * 100
    detokenizer = Detokenizer(Counting(), encode(tokenizer, "hello") * 1000, skip_special_tokens=True)
    costs = []
    for token in ids:
        Counting.decoded = 0
        detokenizer.push(token)
        costs.append(Counting.decoded)
    assert max(costs) <= 2 * MAX_WINDOW_TOKENS
    assert sum(costs) / len(costs) < 24


@BOTH
def test_leading_spaces_follow_the_prompt(tokenizer: Tokenizer) -> None:
    hello = encode(tokenizer, " hello")
    for prompt in ("the", "the world", "the "):
        assert "".join(stream(tokenizer, encode(tokenizer, prompt), hello)) == " hello"
    start = [0] if tokenizer is BYTE_LEVEL else [1]
    assert "".join(stream(tokenizer, start, hello)) == batch(tokenizer, start, hello)
    assert "".join(stream(tokenizer, encode(tokenizer, "the") + start * 50, hello)) == " hello"


@BOTH
def test_special_tokens_in_the_middle_change_nothing_else(tokenizer: Tokenizer) -> None:
    hello, special = encode(tokenizer, " hello"), 1
    ids = [*hello, *[special] * 60, *hello, special, *hello]
    assert "".join(stream(tokenizer, hello, ids)) == " hello" * 3
    assert "".join(stream(tokenizer, hello, ids, skip=False)) == batch(tokenizer, hello, ids, skip=False)


@BOTH
def test_ids_that_the_tokenizer_does_not_know_add_nothing(tokenizer: Tokenizer) -> None:
    hello = encode(tokenizer, " hello")
    assert "".join(stream(tokenizer, hello, [*hello, 99_999, *hello])) == " hello hello"


def test_a_prompt_that_ends_inside_a_character_leaves_it_to_the_output() -> None:
    ids = [byte_table()[b] for b in "好".encode()]
    assert "".join(stream(BYTE_LEVEL, [*encode(BYTE_LEVEL, "dog"), *ids[:2]], [ids[2], *ids])) == "好好"
    text = encode(BYTE_LEVEL, "dog" + BROKEN)
    assert "".join(stream(BYTE_LEVEL, text, encode(BYTE_LEVEL, " dog"))) == " dog"


def test_a_true_replacement_character_in_the_text_is_kept() -> None:
    text = f"the {BROKEN} dog {BROKEN * 7}"
    assert "".join(stream(BYTE_LEVEL, [], encode(BYTE_LEVEL, text))) == text


def fast(clean_up: bool) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=BYTE_LEVEL, clean_up_tokenization_spaces=clean_up)


@pytest.mark.parametrize("clean_up", [True, False])
def test_transformers_tokenizers_are_used_without_their_cleaning_up(clean_up: bool) -> None:
    text = "the dog , is n't ."
    assert "".join(stream(fast(clean_up), [], encode(BYTE_LEVEL, text))) == text


def test_a_python_tokenizer_is_asked_not_to_clean_up() -> None:
    class Python:
        clean_up_tokenization_spaces = True

        def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
            assert clean_up_tokenization_spaces is False
            return BYTE_LEVEL.decode(ids, skip_special_tokens=skip_special_tokens)

    assert "".join(stream(Python(), [], encode(BYTE_LEVEL, TEXT))) == TEXT


def test_prompts_may_be_arrays() -> None:
    prompt = np.array(encode(BYTE_LEVEL, "the"), np.int32)
    assert "".join(stream(BYTE_LEVEL, prompt, encode(BYTE_LEVEL, TEXT))) == TEXT


def make_word_level(decoder: Callable[[], Any]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"un": 0, "##able": 1, "dog": 2, "##s": 3, ".": 4}, unk_token="un"))
    tokenizer.decoder = decoder()
    return tokenizer


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_tokenizers_that_join_words_with_spaces_stream_exactly(ids: list[int]) -> None:
    tokenizer = make_word_level(lambda: decoders.WordPiece(cleanup=False))
    assert "".join(stream(tokenizer, [2], ids)) == batch(tokenizer, [2], ids)


def test_the_decoder_of_a_decoder_is_itself() -> None:
    assert decoder_of(BYTE_LEVEL) is BYTE_LEVEL
    assert decoder_of(fast(True)).decode(encode(BYTE_LEVEL, "dog")) == "dog"
