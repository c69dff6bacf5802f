"""POST /v1/completions: every form of prompt, streams, choices, log-probabilities, where text stops."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.server.serving import BOS, END, Running, byte_tokenizer, served

PATH = "/v1/completions"
TEXT = "삼겹살 👋🏽 ďábelské 你好"


def echoed(text: str, count: int) -> str:
    """The text of `count` tokens, one a byte, of a prompt that is repeated."""
    raw = text.encode()
    return (raw * (count // len(raw) + 1))[:count].decode(errors="replace")


def texts(events: list[Any], index: int = 0) -> str:
    return "".join(c["text"] for e in events[:-1] for c in e["choices"] if c["index"] == index)


def test_a_completion_has_openais_shape_and_says_what_it_cost(server: Running) -> None:
    answer = server.post(PATH, {"model": "echo", "prompt": "hello", "max_tokens": 7}).json()
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "echo")
    assert answer["choices"] == [
        {"index": 0, "text": "hellohe", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 7, 12)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    (record,) = usage["octavo"]
    assert list(record) == [
        "index", "input_tokens", "cached_tokens", "output_tokens", "allocated_blocks", "attention_mode", "cache_dtype",
        "queue_time", "prefill_time", "decode_time", "preempted_time", "preemptions",
    ]  # fmt: skip
    assert (record["input_tokens"], record["output_tokens"], record["allocated_blocks"]) == (5, 7, {"full": 3})


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["abab"]),
        (["ab", "xyz"], ["abab", "xyzx"]),
        ([64, 65], ["ab" * 2]),
        ([[64, 65], [66]], ["abab", "cccc"]),
    ],
)
def test_a_prompt_is_a_text_or_ids_alone_or_in_a_list(server: Running, prompt: Any, expected: list[str]) -> None:
    answer = server.post(PATH, {"prompt": prompt, "max_tokens": 4}).json()
    ids = byte_tokenizer()("ab").input_ids
    shift = ids[0] - 64  # where the alphabet begins
    if isinstance(prompt, list) and not isinstance(prompt[0], str):
        expected = [bytes(b - shift for b in text.encode()).decode() for text in expected]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))


def test_choices_are_numbered_prompt_by_prompt_and_a_prompt_counts_once(server: Running) -> None:
    answer = server.post(PATH, {"prompt": ["ab", "xyz"], "n": 3, "max_tokens": 3}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["aba"] * 3 + ["xyz"] * 3
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 18
    assert [record["index"] for record in answer["usage"]["octavo"]] == [0, 1, 2, 3, 4, 5]


def test_a_thousand_prompts_are_one_request(server: Running) -> None:
    prompts = [f"{i:04d}" for i in range(1000)]
    answer = server.post(PATH, {"prompt": prompts, "max_tokens": 4}).json()
    assert [choice["text"] for choice in answer["choices"]] == prompts


@pytest.mark.parametrize("count", [1, 2, 3, 20, 41, 80])
def test_a_stream_joins_to_the_whole_answer_and_never_splits_a_character(server: Running, count: int) -> None:
    body = {"prompt": TEXT, "max_tokens": count}
    whole = server.post(PATH, body).json()["choices"][0]["text"]
    events = server.events(PATH, body)
    assert events[-1] == "[DONE]"
    assert texts(events) == whole == echoed(TEXT, count)
    ends = len(echoed(TEXT, count).rstrip("\ufffd"))
    assert "\ufffd" not in whole[:ends]
    assert all("\ufffd" not in c["text"] for e in events[:-2] for c in e["choices"])


def test_every_choice_of_a_stream_ends_once_and_the_stream_ends_once(server: Running) -> None:
    body = {
        "prompt": ["abc", "defgh"],
        "n": 3,
        "max_tokens": 6,
        "stop": ["g"],
        "stream_options": {"include_usage": True},
    }
    events = server.events(PATH, body)
    assert events.count("[DONE]") == 1
    ends = [(c["index"], c["finish_reason"]) for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
    assert sorted(ends) == [(0, "length"), (1, "length"), (2, "length"), (3, "stop"), (4, "stop"), (5, "stop")]
    assert [texts(events, i) for i in range(6)] == ["abcabc"] * 3 + ["def"] * 3
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 3 * 6 + 3 * 4
    assert all(e["usage"] is None for e in events[:-2])
    after = [e for e in events[:-2] if any(c["finish_reason"] for c in e["choices"])]
    assert len(after) == 6


def test_usage_is_in_a_stream_only_where_it_is_asked_for(server: Running) -> None:
    events = server.events(PATH, {"prompt": "ab", "max_tokens": 2})
    assert all("usage" not in event for event in events[:-1])


@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        ("ta ga", "alpha be", "ta ga"),
        (["never, never here", "ga"], "alpha beta ", "ga"),
        (["lph", "alpha beta"], "a", "lph"),
        (["gammaalph"], "alpha beta ", "gammaalph"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_exactly_before_a_stop_string(
    server: Running, stop: Any, expected: str, reason: str, stream: bool
) -> None:
    body = {"prompt": "alpha beta gamma", "max_tokens": 60, "stop": stop}
    if stream:
        events = server.events(PATH, body)
        text, last = texts(events), events[-2]["choices"][0]
    else:
        last = server.post(PATH, body).json()["choices"][0]
        text = last["text"]
    assert (text, last["finish_reason"], last["stop_reason"]) == (expected, "stop", reason)
    server.until_empty()


def test_a_stop_string_can_be_kept(server: Running) -> None:
    body = {"prompt": "alpha beta", "max_tokens": 60, "stop": "ta", "include_stop_str_in_output": True}
    assert server.post(PATH, body).json()["choices"][0]["text"] == "alpha beta"


@pytest.mark.parametrize("stream", [False, True])
def test_the_text_of_a_stop_token_is_left_out(server: Running, stream: bool) -> None:
    (beta,) = byte_tokenizer()("b").input_ids
    body = {"prompt": "alpha beta", "max_tokens": 60, "stop_token_ids": [beta]}
    if stream:
        events = server.events(PATH, body)
        text, last = texts(events), events[-2]["choices"][0]
    else:
        last = server.post(PATH, body).json()["choices"][0]
        text = last["text"]
    assert (text, last["finish_reason"], last["stop_reason"]) == ("alpha ", "stop", beta)


def test_the_models_own_end_stops_and_can_be_ignored(server: Running) -> None:
    body = {"prompt": "ab<|im_end|>", "max_tokens": 7}
    choice = server.post(PATH, body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", None)
    choice = server.post(PATH, body | {"ignore_eos": True}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ababa", "length")
    shown = body | {"ignore_eos": True, "skip_special_tokens": False}
    assert server.post(PATH, shown).json()["choices"][0]["text"] == "ab<|im_end|>ab<|im_end|>a"


@pytest.mark.parametrize("missing", [{}, {"max_tokens": None}])
def test_without_max_tokens_an_answer_may_fill_the_context(missing: dict[str, None]) -> None:
    from tests.server.serving import make_core

    with served(make_core(context=100)) as server:
        answer = server.post(PATH, {"prompt": "hello", **missing}).json()
        assert answer["usage"]["completion_tokens"] == 95
        assert answer["choices"][0]["finish_reason"] == "length"


# -- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_name_every_token_where_it_stands(server: Running, stream: bool) -> None:
    body = {"prompt": "a👋", "max_tokens": 7, "logprobs": 2}
    if stream:
        parts = [c["logprobs"] for e in server.events(PATH, body)[:-1] for c in e["choices"] if c["logprobs"]]
        got = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    else:
        got = server.post(PATH, body).json()["choices"][0]["logprobs"]
    assert got["tokens"] == ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x91", "bytes:\\x8b", "a", "bytes:\\xf0"]
    assert got["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    assert got["token_logprobs"] == [-0.5] * 7
    assert got["top_logprobs"][0] == {"a": -0.5, "b": -1.5}


def test_logprobs_of_the_chosen_token_alone(server: Running) -> None:
    got = server.post(PATH, {"prompt": "ab", "max_tokens": 2, "logprobs": 0}).json()["choices"][0]["logprobs"]
    assert got["top_logprobs"] == [{"a": -0.5}, {"b": -0.5}]


def test_an_impossible_token_has_a_finite_logprob(server: Running) -> None:
    """Minus infinity is no JSON; the echo reports it for all but three tokens."""
    raw = server.post(PATH, {"prompt": "ab", "max_tokens": 2, "logprobs": 5}).text

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    answer = json.loads(raw, parse_constant=refuse)
    assert min(answer["choices"][0]["logprobs"]["top_logprobs"][0].values()) == -9999.0


# -- the prompt in the answer ---------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [TEXT, byte_tokenizer()(TEXT).input_ids])
def test_echo_puts_the_prompt_before_the_text(server: Running, prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 6, "n": 2, "echo": True}
    whole = [choice["text"] for choice in server.post(PATH, body).json()["choices"]]
    assert whole == [TEXT + "삼겹"] * 2
    events = server.events(PATH, body)
    assert [texts(events, i) for i in range(2)] == whole


def test_echo_of_a_prompt_alone_generates_nothing(server: Running) -> None:
    answer = server.post(PATH, {"prompt": "ab", "max_tokens": 0, "echo": True}).json()
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("ab", 0)
    assert texts(server.events(PATH, {"prompt": "ab", "max_tokens": 0, "echo": True})) == "ab"


def test_token_ids_can_be_asked_for(server: Running) -> None:
    (choice,) = server.post(PATH, {"prompt": [5, 6], "max_tokens": 3, "return_token_ids": True}).json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [5, 6, 5])
    chunks = server.events(PATH, {"prompt": [5, 6], "max_tokens": 3, "return_token_ids": True})[:-1]
    ids = [token for e in chunks for c in e["choices"] for token in c["token_ids"]]
    assert ids == [5, 6, 5]


# -- the beginning of a prompt --------------------------------------------------------------------


def llama_like() -> Any:
    from tokenizers import processors

    made = byte_tokenizer()
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    made.chat_template = "<s>" + made.chat_template
    return made


def test_a_second_beginning_is_told_and_can_be_avoided() -> None:
    """Text that a template has written already begins with `<s>`; a plain prompt gets its `<s>` here."""
    with served(tokenizer=llama_like()) as server:
        options = {"max_tokens": 1, "return_token_ids": True}
        plain = server.post(PATH, {"prompt": "ab", **options})
        assert plain.json()["choices"][0]["prompt_token_ids"][0] == BOS
        assert plain.json()["choices"][0]["prompt_token_ids"][1] != BOS
        assert "X-Octavo-Warning" not in plain.headers
        twice = server.post(PATH, {"prompt": "<s>ab", **options})
        assert twice.json()["choices"][0]["prompt_token_ids"][:2] == [BOS, BOS]
        assert "add_special_tokens=false" in twice.headers["X-Octavo-Warning"]
        once = server.post(PATH, {"prompt": "<s>ab", "add_special_tokens": False, **options})
        assert once.json()["choices"][0]["prompt_token_ids"][:2] != [BOS, BOS]
        assert "X-Octavo-Warning" not in once.headers
        chat = server.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "return_token_ids": True}
        )
        ids = chat.json()["choices"][0]["prompt_token_ids"]
        assert ids.count(BOS) == 1
        assert ids[0] == BOS


def test_without_a_tokenizer_ids_go_in_and_come_out() -> None:
    with served(tokenizer=None) as server:
        (choice,) = server.post(PATH, {"prompt": [5, 6, END], "max_tokens": 9}).json()["choices"]
        assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [5, 6, END], "stop")
        for path, body in ((PATH, {"prompt": "ab"}), (PATH, {"prompt": [5], "stop": "x"}),
                           ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]}),
                           ("/tokenize", {"prompt": "ab"}), ("/detokenize", {"tokens": [5]})):  # fmt: skip
            refused = server.post(path, body)
            assert refused.status_code == 400, refused.text
            assert (
                "tokenizer" in refused.json()["error"]["message"] or "detokenize" in refused.json()["error"]["message"]
            )
