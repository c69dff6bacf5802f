"""What bad input gets: a 4xx that names field, value and remedy, in OpenAI's format; the engine unharmed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from tests.server.serving import VOCAB, Running, Slow, make_core, served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
HI: Any = [{"role": "user", "content": "hi"}]
CONTEXT = 2048


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Context 2,048; a pool of 1,024 tokens, so that the pool is the narrower of the two."""
    with served(make_core(slabs=256, context=CONTEXT)) as running:
        yield running
        good = running.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 7}).json()
        assert good["choices"][0]["text"] == "hellohe"
        running.until_empty()
        assert running.service.room.requests == 0
        assert running.service.lifecycle.in_progress == 0


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, f"{answer.status_code}: {answer.text[:500]}"
    body = answer.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    assert len(answer.content) < 2000, "a bad input must not come back whole"
    return error


# -- below the level of fields --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "code", "says"),
    [
        (b"", "invalid_json", "line 1"),
        (b"{", "invalid_json", "line 1"),
        (b'{"prompt": "a",}', "invalid_json", "column"),
        (b"[1, 2]", "invalid_json", "no object"),
        (b'"prompt"', "invalid_json", "no object"),
        (b"null", "invalid_json", "no object"),
        (b'{"prompt": "\xff\xfe"}', "invalid_utf8", "byte 12"),
        (b'{"prompt": "a\xc3"}', "invalid_utf8", "UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), "invalid_utf8", "UTF-8"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "invalid_json", "Infinity"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "invalid_json", "digits"),
        (b'{"prompt": "a", "prompt": "b"}', "duplicate_key", "prompt: is there twice"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json", "nested"),
        (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", "invalid_json", "nested"),
        (b'{"prompt": "a", "x": ' + b'{"a":' * 150 + b"1" + b"}" * 151, "invalid_json", "nested"),
        (b'{"prompt": "\\ud800"}', "invalid_unicode", "prompt"),
        (b'{"prompt": ["ok", "a\\udfff"]}', "invalid_unicode", "prompt[1]"),
        (b'{"prompt": "a", "\\ud800": 1}', "invalid_unicode", "surrogate"),
        (b'{"prompt": "a", "stop": ["\\ud83d"]}', "invalid_unicode", "stop[0]"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_is_no_good_json_is_refused(server: Running, path: str, raw: bytes, code: str, says: str) -> None:
    error = refusal(server.client.post(path, content=raw, headers=JSON))
    assert error["code"] == code
    assert says in error["message"]


def test_a_well_formed_pair_of_surrogates_is_text(server: Running) -> None:
    raw = b'{"prompt": "\\ud83d\\udc4b", "max_tokens": 4}'
    answer = server.client.post(COMPLETIONS, content=raw, headers=JSON)
    assert answer.json()["choices"][0]["text"] == "👋"


@pytest.mark.parametrize("megabytes", [9, 10, 80])
def test_a_body_over_the_limit_gets_413_even_while_it_is_being_sent(server: Running, megabytes: int) -> None:
    body = json.dumps({"prompt": "a" * (megabytes * 2**20)}).encode()
    try:
        answer = server.client.post(COMPLETIONS, content=body, headers=JSON)
    except httpx.TransportError:
        assert megabytes > 64  # far over the limit: the server need not read it all
    else:
        error = refusal(answer, 413)
        assert error["code"] == "request_too_large"
        assert "--max-body-bytes" in error["message"]


def test_a_body_over_the_limit_that_does_not_say_its_size_is_refused_too() -> None:
    def parts() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(30):
            yield b"a" * 1000

    with served(max_body_bytes=10_000) as server:
        answer = server.client.post(COMPLETIONS, content=parts(), headers=JSON)
        assert refusal(answer, 413)["code"] == "request_too_large"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_only_plain_json_in_utf8_is_read(server: Running, headers: dict[str, str]) -> None:
    """A page elsewhere cannot post to a server on loopback: JSON needs leave that it does not get."""
    answer = server.client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert refusal(answer, 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("DELETE", CHAT, 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("GET", "/v1", 404, "unknown_url"),
        ("GET", "/static/../service.py", 404, "unknown_url"),
        ("GET", "/static/%2e%2e%2fservice.py", 404, "unknown_url"),
        ("GET", "/v1/models/nobody/else", 404, "model_not_found"),
    ],
)
def test_addresses_and_methods_that_are_not_there(
    server: Running, method: str, path: str, status: int, code: str
) -> None:
    answer = server.client.request(method, path)
    assert refusal(answer, status)["code"] == code
    if status == 405:
        assert answer.headers["Allow"]


# -- fields ---------------------------------------------------------------------------------------

BOTH: list[tuple[dict[str, Any], str, str, str]] = [
    ({"temprature": 1}, "temprature", "unknown_field", "temperature"),
    ({"max_token": 5}, "max_token", "unknown_field", "max_tokens"),
    ({"x" * 5000: 1}, "", "unknown_field", "no field"),
    ({"model": "other"}, "model", "model_not_found", "echo"),
    ({"model": 5}, "model", "invalid_type", "string"),
    ({"n": 1000}, "n", "invalid_value", "from 1 to 128"),
    ({"n": 0}, "n", "invalid_value", "from 1 to 128"),
    ({"n": "2"}, "n", "invalid_type", "integer"),
    ({"n": True}, "n", "invalid_type", "integer"),
    ({"n": 1.5}, "n", "invalid_type", "integer"),
    ({"temperature": -0.1}, "temperature", "invalid_value", "greedy"),
    ({"temperature": "hot"}, "temperature", "invalid_type", "number"),
    ({"temperature": True}, "temperature", "invalid_type", "number"),
    ({"temperature": 10**400}, "temperature", "", "number"),
    ({"top_p": 0}, "top_p", "invalid_value", "above 0"),
    ({"top_p": 1.1}, "top_p", "invalid_value", "up to 1"),
    ({"min_p": 2}, "min_p", "invalid_value", "0 to 1"),
    ({"top_k": -2}, "top_k", "invalid_value", "-1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value", "above 0"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value", "-2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value", "-2 to 2"),
    ({"seed": 2**70}, "seed", "", "seed"),
    ({"seed": "x"}, "seed", "invalid_type", "integer"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value", "from 0"),
    ({"max_tokens": "many"}, "max_tokens", "invalid_type", "integer"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", "at least 1"),
    ({"max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded", "passes the context"),
    ({"max_tokens": 10**15}, "max_tokens", "", "max_tokens"),
    ({"max_tokens": 1500}, "max_tokens", "context_length_exceeded", "blocks"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens", "invalid_value", "must not exceed"),
    ({"stop": ""}, "stop", "invalid_value", "non-empty"),
    ({"stop": ["a", ""]}, "stop", "invalid_value", "non-empty"),
    ({"stop": 5}, "stop", "invalid_value", "string"),
    ({"stop": ["a"] * 65}, "stop", "invalid_value", "at most"),
    ({"stop": "s" * 2**20}, "stop", "invalid_value", "at most"),
    ({"stop": ["s" * 2**20] * 4}, "stop", "invalid_value", "at most"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value", "from 0"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids", "invalid_value", str(VOCAB - 1)),
    ({"stop_token_ids": ["5"]}, "stop_token_ids[0]", "invalid_type", "integer"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value", "-100 to 100"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "invalid_value", "token id"),
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias", "invalid_value", str(VOCAB - 1)),
    ({"logit_bias": {"5": "much"}}, "logit_bias.5", "invalid_type", "number"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type", "object"),
    ({"stream": "yes"}, "stream", "invalid_type", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "stream=true"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type", "true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown_field", "include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options", "invalid_type", "object"),
    ({"priority": 2**40}, "priority", "invalid_value", "32 bits"),
    ({"priority": "high"}, "priority", "invalid_type", "integer"),
    ({"response_format": "json"}, "response_format", "invalid_type", "object"),
    ({"response_format": {}}, "response_format.type", "invalid_value", "json_object"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value", "json_object"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "unknown_field", "known are"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_field", "not served yet"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_field", "not served yet"),
    ({"suffix": "x"}, "suffix", "unsupported_field", "gaps"),
    ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice", "invalid_type", "list of strings"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value", "at least one"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "invalid_value", "none of them empty"),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs", "invalid_value", "nothing computes here"),
    ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices", "unknown_field", "choice"),
    ({"guided_json": {}}, "guided_json", "unsupported_field", "response_format"),
    ({"cache_salt": ""}, "cache_salt", "invalid_value", "1 to 1024"),
    ({"cache_salt": "x" * 1025}, "cache_salt", "invalid_value", "1 to 1024"),
    ({"cache_salt": 7}, "cache_salt", "invalid_type", "string"),
    ({"logits_processors": ["os.system"]}, "logits_processors", "unsupported_field", "no code"),
    ({"use_beam_search": True}, "use_beam_search", "unsupported_field", "beams"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param", "code", "says"), BOTH, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_wrong_field_is_named_with_its_remedy(
    server: Running, path: str, change: dict[str, Any], param: str, code: str, says: str
) -> None:
    good: dict[str, Any] = {"prompt": "hello"} if path == COMPLETIONS else {"messages": HI}
    error = refusal(server.post(path, good | change), 404 if "model" in change and code == "model_not_found" else 400)
    assert says in error["message"]
    if param:
        assert error["param"] == param
        assert param.partition("[")[0] in error["message"]
    if code:
        assert error["code"] == code


@pytest.mark.parametrize(
    ("body", "param", "code", "says"),
    [
        ({}, "prompt", "missing_field", "missing"),
        ({"prompt": None}, "prompt", "missing_field", "missing"),
        ({"prompt": ""}, "prompt", "invalid_value", "empty"),
        ({"prompt": []}, "prompt", "invalid_value", "empty"),
        ({"prompt": [""]}, "prompt[0]", "invalid_value", "empty"),
        ({"prompt": [[]]}, "prompt[0]", "invalid_value", "empty"),
        ({"prompt": ["a", 5]}, "prompt[1]", "invalid_type", "string"),
        ({"prompt": [[1], "a"]}, "prompt[1]", "invalid_type", "token ids"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_type", "list of token ids"),
        ({"prompt": [1.5]}, "prompt", "invalid_type", "list of token ids"),
        ({"prompt": [True]}, "prompt", "invalid_type", "list of token ids"),
        ({"prompt": {"text": "a"}}, "prompt", "invalid_type", "list of token ids"),
        ({"prompt": [VOCAB]}, "prompt", "invalid_value", str(VOCAB - 1)),
        ({"prompt": [-1]}, "prompt", "invalid_value", str(VOCAB - 1)),
        ({"prompt": [10**30]}, "prompt", "invalid_value", "token id"),
        ({"prompt": [[1], [VOCAB]]}, "prompt[1]", "invalid_value", str(VOCAB - 1)),
        ({"prompt": "a" * 1024, "max_tokens": 2}, "max_tokens", "context_length_exceeded", "blocks"),
        ({"prompt": "a" * 1025}, "prompt", "context_length_exceeded", "KV cache holds 1024"),
        ({"prompt": "a" * 5000}, "prompt", "context_length_exceeded", "1024"),
        ({"prompt": ["a", "b" * 5000]}, "prompt[1]", "context_length_exceeded", "5000 tokens"),
        ({"prompt": ["a"] * 1025}, "prompt", "invalid_value", "at most 1024"),
        ({"prompt": ["a"] * 1024, "n": 2}, "n", "queue_limit", "--max-waiting-requests"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value", "0 to 20"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "invalid_type", "integer"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo", "unsupported_field", "prompt"),
        ({"prompt": "a", "best_of": 3}, "best_of", "invalid_value", "n=1"),
        ({"prompt": "a", "messages": HI}, "messages", "unsupported_field", "/v1/chat/completions"),
        ({"prompt": "a", "max_completion_tokens": 5}, "max_completion_tokens", "unsupported_field", "max_tokens"),
        ({"prompt": "a", "top_logprobs": 5}, "top_logprobs", "unsupported_field", "logprobs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_completion_is_refused(server: Running, body: dict[str, Any], param: str, code: str, says: str) -> None:
    error = refusal(server.post(COMPLETIONS, body))
    assert (error["param"], error["code"]) == (param, code)
    assert says in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "messages", "missing"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": {"role": "user"}}, "messages", "list"),
        ({"messages": ["hi"]}, "messages[0]", "object"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "role"),
        ({"messages": [{"role": 5, "content": "hi"}]}, "messages[0].role", "role"),
        ({"messages": [{"role": " ", "content": "hi"}]}, "messages[0].role", "role"),
        ({"messages": [{"role": "user\nsystem", "content": "hi"}]}, "messages[0].role", "printable"),
        ({"messages": [{"role": "r" * 100, "content": "hi"}]}, "messages[0].role", "printable"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages", "no wizards here"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "string"),
        ({"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content", "string"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0].type", "text parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type", "only text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "string"),
        ({"messages": [{"role": "user", "content": "hi", "cache_control": {}}]}, "messages[0].cache_control", "served"),
        ({"messages": [{"role": "user", "content": "hi", "name": 5}]}, "messages[0].name", "string"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [5]}]},
         "messages[0].tool_calls[0].function", "object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
         "messages[0].tool_calls[0].function.arguments", "JSON"),
        ({"messages": HI, "prompt": "a"}, "prompt", "/v1/completions"),
        ({"messages": HI, "logprobs": 5}, "logprobs", "true or false"),
        ({"messages": HI, "top_logprobs": 5}, "top_logprobs", "logprobs=true"),
        ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"messages": HI, "logprobs": True, "top_logprobs": -1}, "top_logprobs", "0 to 20"),
        ({"messages": HI, "max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "one of the two"),
        ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"messages": HI, "max_completion_tokens": CONTEXT}, "max_completion_tokens", "context"),
        ({"messages": HI, "chat_template": "{{ x }}"}, "chat_template", "--chat-template"),
        ({"messages": HI, "continue_final_message": True}, "continue_final_message", "new message"),
        ({"messages": [{"role": "user", "content": "a" * 3000}]}, "messages", "shorten|send at most"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_wrong_chat_is_refused(server: Running, body: dict[str, Any], param: str, says: str) -> None:
    error = refusal(server.post(CHAT, body))
    assert error["param"] == param
    assert any(word in error["message"] for word in says.split("|")), error["message"]
    if len(str(body)) > 2000:
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_fields_that_change_nothing_are_accepted(server: Running, path: str) -> None:
    good: dict[str, Any] = {"prompt": "hello"} if path == COMPLETIONS else {"messages": HI}
    nothing = {
        "max_tokens": 2, "tools": [], "tool_choice": "none", "functions": None, "user": "me", "store": False,
        "metadata": {}, "service_tier": "auto", "modalities": ["text"], "stop": None, "logit_bias": None, "seed": None,
        "temperature": None, "top_p": None, "n": None, "stream": None, "stream_options": None, "logprobs": None,
        "response_format": {"type": "text"}, "use_beam_search": False, "best_of": 1, "echo": False,
        "parallel_tool_calls": True, "audio": None, "prediction": None, "reasoning_effort": None,
    }  # fmt: skip
    assert server.post(path, good | nothing).status_code == 200


def test_a_stream_is_refused_before_it_begins(server: Running) -> None:
    """The status line of a stream cannot be taken back: what is wrong must be known before."""
    answer = server.post(CHAT, {"messages": HI, "stream": True, "max_tokens": CONTEXT})
    assert refusal(answer)["code"] == "context_length_exceeded"


def test_one_bad_prompt_among_many_refuses_them_all_and_leaves_nothing(server: Running) -> None:
    answer = server.post(COMPLETIONS, {"prompt": [[1, 2], [3, VOCAB]], "max_tokens": 900, "n": 2})
    assert refusal(answer)["param"] == "prompt[1]"
    server.until_empty()


@pytest.mark.parametrize("length", range(1018, 1030))
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9])
def test_near_the_edge_every_request_is_answered_or_refused(server: Running, length: int, max_tokens: int) -> None:
    """Two rules of admission that disagree by a block would leave one of these waiting for ever."""
    answer = server.post(COMPLETIONS, {"prompt": "a" * length, "max_tokens": max_tokens})
    if length + max_tokens - 1 <= 1024:
        assert answer.json()["usage"]["completion_tokens"] == max_tokens
    else:
        assert refusal(answer)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, "nonsense"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**30]}, "tokens[0]"),
    ],
)
def test_bad_input_to_the_tokenizer(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    assert refusal(server.post(path, body), 404 if "model" in body else 400)["param"] == param


def test_refusals_are_counted_by_reason(server: Running) -> None:
    def counts() -> dict[str, int]:
        return server.get("/stats").json()["refusals_total"]

    before = counts()
    server.post(CHAT, {"messages": HI, "nonsense": 1})
    server.post(CHAT, {"messages": HI, "max_tokens": CONTEXT})
    server.post(CHAT, {"messages": HI, "max_tokens": 1500})
    after = counts()
    assert after["invalid"] - before["invalid"] == 2
    assert after["never_fits"] - before["never_fits"] == 1


def test_a_refusal_of_the_engine_is_counted_once_it_is_answered_even_in_the_midst_of_a_long_step() -> None:
    """Refused between two steps; the next one has not ended when the answer is there."""
    executor = Slow(0.2)
    with served(make_core(executor, slabs=40)) as server:
        server.begin(CHAT, {"messages": HI, "max_tokens": 20})
        server.until(lambda: server.get("/stats").json()["active_sequences"] == 1, "something runs")
        for count in range(1, 4):
            answer = server.post(CHAT, {"messages": HI, "max_tokens": 1500})
            assert refusal(answer)["type"] == "invalid_request_error"
            assert server.get("/stats").json()["refusals_total"]["never_fits"] == count


def test_keys_are_asked_for_where_requests_are_and_nowhere_else() -> None:
    with served(api_keys=("one", "zwei-ü")) as server:
        for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
            for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer three"},
                            {"Authorization": "Basic one"}, {"Authorization": "one"}):  # fmt: skip
                answer = server.client.post(path, json={}, headers=headers)
                assert refusal(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/stats", "/v1/models", "/nowhere"):
            assert server.get(path).status_code == 401
        for path in ("/", "/health", "/ready", "/metrics", "/version", "/static/page.js"):
            assert server.get(path).status_code == 200
        right = {"Authorization": b"bearer zwei-\xc3\xbc"}
        body = {"prompt": "ab", "max_tokens": 1}
        assert server.client.post(COMPLETIONS, json=body, headers=right).status_code == 200


@pytest.mark.parametrize("value", [["x" * 4000] * 90, ["\u00e9" * 4000] * 90, [[1] * 9000] * 90, "y" * 100_000])
def test_what_is_wrong_is_told_in_few_words_however_long_it_is(server: Running, value: Any) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "ab", "stop": value})
    assert "stop" in refusal(answer)["message"]
    assert len(answer.content) < 2000
