"""Fields as large as a body allows: refused by what they are, worked on beside the event loop, in nobody's way.

Owns what a request of megabytes may cost the others. What a field may hold at all is in `test_bad_input`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.server.serving import Running, make_core, served

from octavo.engine.intake import Intake
from octavo.errors import RequestError
from octavo.scheduling.request import MAX_BIASES, SamplingParams, prompt_array
from octavo.server.body import MAX_DEPTH, parse_object
from octavo.server.errors import ApiError
from octavo.server.tokens import LONG, MAX_OPTIONS
from octavo.server.wire import Wire

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TURN = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with served(make_core(context=300)) as running:
        yield running


@pytest.mark.parametrize(("path", "body", "param", "code", "says"), [
    (COMPLETIONS, {"prompt": [3], "logit_bias": {str(i): 1 for i in range(100_000)}}, "logit_bias",
     "invalid_value", f"100000 token ids': at most {MAX_BIASES}"),
    (COMPLETIONS, {"prompt": [3], "logit_bias": {"5": 1, "05": 1}}, "logit_bias", "invalid_value", "5: is there twice"),
    (COMPLETIONS, {"prompt": [3], "stop_token_ids": [3] * 200_000}, "stop_token_ids", "invalid_value", "at most 64"),
    (COMPLETIONS, {"prompt": [3] * 200_000}, "prompt", "context_length_exceeded", "200000 tokens: too long"),
    (CHATS, {"messages": [TURN] * 20_000}, "messages", "context_length_exceeded", "20000 messages': too many"),
    (CHATS, {"messages": [TURN], "chat_template_kwargs": {f"a{i}": 1 for i in range(20_000)}}, "chat_template_kwargs",
     "invalid_value", f"20000 options': send at most {MAX_OPTIONS}"),
    (CHATS, {"messages": [TURN], "chat_template_kwargs": {"!" * 20_000: 1}}, "chat_template_kwargs",
     "invalid_value", "is no option of a template"),
    ("/v1/cache/pin", {"ttl": 1, "messages": [TURN] * 20_000}, "messages", "context_length_exceeded", "too many"),
    ("/detokenize", {"tokens": [3] * 100_000 + [5_000]}, "tokens[100000]", "invalid_value", "from 0 to"),
])  # fmt: skip
def test_a_field_of_more_than_anybody_needs_is_refused_by_how_much_it_holds(
    server: Running, path: str, body: dict[str, Any], param: str, code: str, says: str
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    told = answer.json()["error"]
    assert (told["param"], told["code"]) == (param, code)
    assert says in told["message"]
    assert len(told["message"]) < 400


@pytest.mark.parametrize(("path", "body"), [
    (COMPLETIONS, {"prompt": [3] * 50_000}),
    (CHATS, {"messages": [TURN | {"content": "a" * 70_000}]}),
    ("/v1/cache/pin", {"ttl": 1, "prompt": [3] * 50_000}),
    ("/v1/cache/unpin", {"id": "a" * 70_000}),
    ("/v1/cache/reset", {"a": "a" * 70_000}),
    ("/tokenize", {"prompt": "a" * 70_000, "return_token_strs": True}),
    ("/detokenize", {"tokens": [3] * 50_000}),
])  # fmt: skip
def test_a_large_body_is_checked_beside_the_event_loop(
    server: Running, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, threads = Wire.parse.__func__, list[str]()  # type: ignore[attr-defined]

    def parse(cls: type[Wire], content: Any, **more: Any) -> Wire:
        threads.append(threading.current_thread().name)
        parsed: Wire = plain(cls, content, **more)
        return parsed

    monkeypatch.setattr(Wire, "parse", classmethod(parse))
    assert server.post(path, body).status_code in (200, 400, 404)
    assert threads
    assert all(name.startswith("asyncio_") for name in threads)  # those of `asyncio.to_thread`


def test_who_sends_a_short_chat_never_waits_behind_a_giant_one(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, let_go, plain = threading.Event(), threading.Event(), Intake.encode_chat

    def encode(self: Intake, messages: Any, **options: Any) -> list[int]:
        if len(messages[0]["content"]) > LONG:
            begun.set()
            assert let_go.wait(20)
            return [3] * 1000
        return plain(self, messages, **options)

    monkeypatch.setattr(Intake, "encode_chat", encode)
    giant = {"messages": [TURN | {"content": "a" * (LONG + 1)}]}
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(server.client.post, CHATS, json=giant)
        try:
            assert begun.wait(20)
            for path, body in ((CHATS, {"messages": [TURN], "max_tokens": 1}), ("/tokenize", {"prompt": "a" * 10_000})):
                assert server.post(path, body, timeout=10).status_code == 200
        finally:
            let_go.set()
        assert "too long" in waiting.result().json()["error"]["message"]


def test_what_lies_among_many_lists_is_looked_at_and_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    many = "[" + "[]," * 10_000
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert len(parse_object(f'{{"user": {many}[]]}}'.encode())["user"]) == 10_001
    with pytest.raises(ApiError, match="nested deeper than"):
        parse_object(f'{{"user": {many}{deep}]}}'.encode())
    with pytest.raises(ApiError, match=r"user\[10000\]\.a=.*half of a surrogate pair"):
        parse_object(f'{{"user": {many}{{"a": "\\ud800"}}]}}'.encode())
    monkeypatch.setattr("octavo.server.body.MAX_PARTS", 20_000)
    code = json.dumps("if (a[0]) {\\" + '"' + "[" * 20_000)
    assert len(parse_object(f'{{"prompt": {code}, "user": {many}[]]}}'.encode())["prompt"]) > 20_000
    with pytest.raises(ApiError, match="holds 20,002 lists and objects, at most 20,000 are read"):
        parse_object(f'{{"prompt": {code}, "user": [{"[]," * 20_000}3]}}'.encode())
    with pytest.raises(ApiError, match="is not JSON"):  # the quotes of a text without an end are not each looked behind
        parse_object(b'{"prompt": "' + b'\\"[' * 200_000 + b"\\")


@pytest.mark.parametrize("wrong", [True, 3.0, "3", None, 2**70, -1])
def test_one_wrong_id_among_many_is_found(wrong: Any) -> None:
    with pytest.raises(RequestError, match="prompt_token_ids"):
        prompt_array([3] * 1000 + [wrong])


def test_as_many_biases_as_are_taken_reach_every_choice(server: Running) -> None:
    bias = {str(i): 0.5 for i in range(MAX_BIASES)}
    assert len(SamplingParams(logit_bias=bias).logit_bias) == MAX_BIASES  # type: ignore[arg-type]
    answer = server.post(
        COMPLETIONS, {"prompt": [3], "n": 8, "max_tokens": 1, "logit_bias": dict(list(bias.items())[:900])}
    )
    assert answer.status_code == 200, json.dumps(answer.json())[:300]
    assert len(answer.json()["choices"]) == 8
