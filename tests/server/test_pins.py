"""Pins over HTTP and in Python: what is kept goes last, for a while; each caller sees and ends its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from tests.server.serving import Running, Slow, make_core, served

from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.engine.llm import LLM
from octavo.errors import EngineDeadError, RequestError
from octavo.policy.bundle import Policies
from octavo.scheduling.request import SamplingParams
from octavo.server.async_llm import AsyncLLM

PROMPT = list(range(20, 53))
"""33 tokens: 8 blocks of 4, and one more."""
CHAT: Any = [{"role": "user", "content": "what is a block, and who may have it"}]


@contextmanager
def keeping(
    reuse: str = "prefix", executor: Slow | None = None, slabs: int = 4000, **settings: Any
) -> Iterator[Running]:
    with served(make_core(executor, slabs=slabs, policies=Policies.named(reuse=reuse)), **settings) as running:
        yield running


def client_of(server: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def ask(client: openai.OpenAI, prompt: Any = PROMPT, salt: str | None = None) -> int:
    """Serve a prompt; returns its cached tokens."""
    extra = {} if salt is None else {"cache_salt": salt}
    answer = client.completions.create(model="echo", prompt=prompt, max_tokens=1, extra_body=extra)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def post(client: openai.OpenAI, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Through the client's own connection, with its key."""
    return client.post(f"/cache/{path}", body=body, cast_to=dict[str, Any])  # type: ignore[return-value]


def listed(client: openai.OpenAI) -> list[dict[str, Any]]:
    found: Any = client.get("/cache/pins", cast_to=dict[str, Any])
    assert found["object"] == "list"
    return found["data"]


def crowd_out(client: openai.OpenAI, times: int = 6) -> None:
    for start in range(100, 100 + times):
        ask(client, [start] * 120)


def test_a_pinned_prompt_is_found_after_a_crowd_and_another_is_not() -> None:
    with keeping(slabs=40) as server, client_of(server) as client:
        other = [token + 300 for token in PROMPT]
        for prompt in (PROMPT, other):
            assert ask(client, prompt) == 0
        made = post(client, "pin", {"prompt": PROMPT, "ttl": 60})
        assert made["object"] == "cache.pin"
        assert made["tokens"] == 32
        assert 59 < made["expires_in"] <= 60
        crowd_out(client)
        assert ask(client, PROMPT) == 32
        assert ask(client, other) == 0
        [shown] = listed(client)
        assert (shown["id"], shown["tokens"]) == (made["id"], 32)
        assert 0 < shown["expires_in"] <= made["expires_in"]
        assert "octavo_pinned_tokens" in server.get("/metrics").text
        assert 'octavo_pinned_tokens{model="echo"} 32.0' in server.get("/metrics").text
        assert post(client, "unpin", {"id": made["id"]}) == {"object": "cache.unpin", "id": made["id"]}
        assert listed(client) == []
        crowd_out(client)
        assert ask(client, PROMPT) == 0, "pinned no more"


def test_text_and_messages_are_pinned_as_they_are_served() -> None:
    with keeping() as server, client_of(server) as client:
        text = "thirty two bytes of text, or more than that"
        ask(client, text)
        assert post(client, "pin", {"prompt": text, "ttl": 5})["tokens"] == (len(text) // 4) * 4
        answer = client.chat.completions.create(model="echo", messages=CHAT, max_tokens=1)
        assert answer.usage is not None
        made = post(client, "pin", {"messages": CHAT, "ttl": 5.5, "model": "echo", "cache_salt": None})
        assert made["tokens"] == answer.usage.prompt_tokens // 4 * 4
        assert len(listed(client)) == 2


def test_what_is_not_kept_is_not_pinned_and_the_answer_says_so() -> None:
    with keeping() as server, client_of(server) as client:
        assert post(client, "pin", {"prompt": PROMPT, "ttl": 5})["tokens"] == 0
        ask(client)
        assert post(client, "pin", {"prompt": PROMPT[:10], "ttl": 5})["tokens"] == 8
        assert post(client, "pin", {"prompt": PROMPT, "ttl": 5, "cache_salt": "another"})["tokens"] == 0


def test_a_pin_ends_with_its_time_in_an_idle_engine_too() -> None:
    with keeping() as server, client_of(server) as client:
        ask(client)
        made = post(client, "pin", {"prompt": PROMPT, "ttl": 0.2})
        assert made["tokens"] == 32
        server.until(lambda: not listed(client), "the pin has ended")
        assert 'octavo_pinned_tokens{model="echo"} 0.0' in server.get("/metrics").text
        with pytest.raises(openai.NotFoundError):
            post(client, "unpin", {"id": made["id"]})


def test_a_time_that_is_over_is_over_for_the_gauge_before_anybody_asks() -> None:
    with keeping() as server, client_of(server) as client:
        ask(client)
        post(client, "pin", {"prompt": PROMPT, "ttl": 0.05})
        time.sleep(0.1)
        assert 'octavo_pinned_tokens{model="echo"} 0.0' in server.get("/metrics").text


def test_a_reset_ends_all_pins() -> None:
    with keeping() as server, client_of(server) as client:
        ask(client)
        post(client, "pin", {"prompt": PROMPT, "ttl": 60})
        freed = server.post("/v1/cache/reset", {}).json()["freed_blocks"]
        assert freed["full"] >= 8, "pinned or not"
        assert listed(client) == []
        assert ask(client) == 0
        assert 'octavo_broken_pins_total{model="echo",tier="device"} 0.0' in server.get("/metrics").text


def test_with_isolated_keys_nobody_sees_or_ends_the_pins_of_another() -> None:
    with keeping(api_keys=("key of a", "key of b"), isolate_api_keys=True) as server:
        a, b = client_of(server, "key of a"), client_of(server, "key of b")
        for salt in (None, "mine"):
            ask(a, salt=salt)
        assert post(b, "pin", {"prompt": PROMPT, "ttl": 60})["tokens"] == 0, "not b's text"
        names = [post(a, "pin", {"prompt": PROMPT, "ttl": 60, "cache_salt": s})["id"] for s in (None, "mine")]
        assert [one["id"] for one in listed(a)] == names, "whatever salt it sent"
        assert [one["tokens"] for one in listed(b)] == [0]
        for name in names:
            with pytest.raises(openai.NotFoundError) as found:
                post(b, "unpin", {"id": name})
            assert found.value.param == "id"
            assert found.value.code == "pin_not_found"
        assert [one["id"] for one in listed(a)] == names
        assert post(a, "unpin", {"id": names[1]})["id"] == names[1]
        assert len(listed(a)) == 1


def test_without_isolation_keys_share_pins() -> None:
    with keeping(api_keys=("key of a", "key of b")) as server:
        a, b = client_of(server, "key of a"), client_of(server, "key of b")
        ask(a, salt="mine")
        made = post(a, "pin", {"prompt": PROMPT, "ttl": 60, "cache_salt": "mine"})
        assert [one["id"] for one in listed(b)] == [made["id"]]
        post(b, "unpin", {"id": made["id"]})
        assert listed(a) == []


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"ttl": 5}, "prompt", "missing_field"),
    ({"ttl": 5, "prompt": PROMPT, "messages": CHAT}, "prompt", "missing_field"),
    ({"prompt": PROMPT}, "ttl", "missing_field"),
    ({"prompt": PROMPT, "ttl": 0}, "ttl", "invalid_value"),
    ({"prompt": PROMPT, "ttl": -3}, "ttl", "invalid_value"),
    ({"prompt": PROMPT, "ttl": 1e300}, "ttl", "invalid_value"),
    ({"prompt": PROMPT, "ttl": "5"}, "ttl", "invalid_type"),
    ({"prompt": PROMPT, "ttl": True}, "ttl", "invalid_type"),
    ({"prompt": PROMPT, "ttl": [5]}, "ttl", "invalid_type"),
    ({"prompt": [], "ttl": 5}, "prompt", "invalid_value"),
    ({"prompt": "", "ttl": 5}, "prompt", "invalid_value"),
    ({"prompt": 5, "ttl": 5}, "prompt", "invalid_type"),
    ({"prompt": ["a", "b"], "ttl": 5}, "prompt", "invalid_value"),
    ({"prompt": [7, 999_999], "ttl": 5}, "prompt", "invalid_value"),
    ({"prompt": [7, -1], "ttl": 5}, "prompt", "invalid_value"),
    ({"prompt": [7, 2**80], "ttl": 5}, "prompt", "invalid_value"),
    ({"prompt": [7] * 2049, "ttl": 5}, "prompt", "context_length_exceeded"),
    ({"messages": [], "ttl": 5}, "messages", "invalid_value"),
    ({"messages": "hello", "ttl": 5}, "messages", "invalid_type"),
    ({"messages": [{"role": "wizard", "content": "x"}], "ttl": 5}, "messages", "invalid_value"),
    ({"prompt": PROMPT, "ttl": 5, "cache_salt": ""}, "cache_salt", "invalid_value"),
    ({"prompt": PROMPT, "ttl": 5, "cache_salt": "x" * 1025}, "cache_salt", "invalid_value"),
    ({"prompt": PROMPT, "ttl": 5, "cache_salt": 7}, "cache_salt", "invalid_type"),
    ({"prompt": PROMPT, "ttl": 5, "name": "mine"}, "name", "unknown_field"),
    ({"prompt": PROMPT, "ttl": 5, "add_special_tokens": 1}, "add_special_tokens", "invalid_type"),
    ({"prompt": PROMPT, "ttl": 5, "max_tokens": 1}, "max_tokens", "unknown_field"),
]


def test_what_is_wrong_is_refused_by_field_and_pins_nothing() -> None:
    with keeping() as server:
        for body, param, code in WRONG:
            answer = server.post("/v1/cache/pin", body)
            told = (answer.status_code, answer.json()["error"]["param"], answer.json()["error"]["code"])
            assert told == (400, param, code), (str(body)[:80], answer.text)
        assert server.post("/v1/cache/pin", {"prompt": PROMPT, "ttl": 5, "model": "gpt"}).status_code == 404
        assert server.get("/v1/cache/pins").json() == {"object": "list", "data": []}
        for bad in ({}, {"id": 5}, {"id": "pin-1", "salt": "x"}, {"id": None}):
            assert server.post("/v1/cache/unpin", bad).status_code == 400
        missing = server.post("/v1/cache/unpin", {"id": "pin-1\n" * 999})
        assert missing.status_code == 404
        assert len(missing.text) < 500
        assert server.get("/v1/cache/pin").status_code == 405
        assert server.post("/v1/cache/pins", {}).status_code == 405


def test_pins_need_a_key_and_json() -> None:
    with keeping(api_keys=("secret",)) as server:
        for path in ("pin", "unpin"):
            assert server.post(f"/v1/cache/{path}", {}).status_code == 401
            bare = server.client.post(f"/v1/cache/{path}", headers={"Authorization": "Bearer secret"})
            assert bare.status_code == 415
        assert server.get("/v1/cache/pins").status_code == 401


def test_beyond_the_bound_a_pin_is_refused_and_says_how_much_there_is() -> None:
    with keeping(slabs=40) as server, client_of(server) as client:  # 160 positions, of which 40 may be pinned
        other = [token + 300 for token in PROMPT]
        for prompt in (PROMPT, other):
            ask(client, prompt)
        assert post(client, "pin", {"prompt": PROMPT, "ttl": 60})["tokens"] == 32
        with pytest.raises(openai.BadRequestError) as found:
            post(client, "pin", {"prompt": other, "ttl": 60})
        assert found.value.param == "prompt"
        assert "32 are, of 40 that may be" in str(found.value)
        assert post(client, "pin", {"prompt": other[:9], "ttl": 60})["tokens"] == 8


def test_without_reuse_a_pin_is_refused_and_none_is_listed() -> None:
    with keeping("none") as server, client_of(server) as client:
        ask(client)
        with pytest.raises(openai.BadRequestError, match="reuse=prefix"):
            post(client, "pin", {"prompt": PROMPT, "ttl": 5})
        assert listed(client) == []


def test_a_dead_engine_answers() -> None:
    slow = Slow()
    with keeping(executor=slow) as server:
        slow.broken = True
        server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
        for answer in (
            server.post("/v1/cache/pin", {"prompt": PROMPT, "ttl": 5}),
            server.post("/v1/cache/unpin", {"id": "pin-1"}),
            server.get("/v1/cache/pins"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


def test_a_pin_amid_a_stream_does_not_touch_the_stream() -> None:
    with keeping(executor=Slow(step_s=0.002), slabs=80) as server, client_of(server) as client:
        ask(client)
        stream = client.completions.create(model="echo", prompt=PROMPT, max_tokens=150, stream=True)
        chunks = iter(stream)
        next(chunks)
        assert post(client, "pin", {"prompt": PROMPT, "ttl": 60})["tokens"] == 32
        crowd_out(client, 2)
        assert list(chunks)[-1].choices[0].finish_reason == "length"
        assert ask(client) == 32


# -- Python -------------------------------------------------------------------------------------------


def engine_that_keeps(reuse: str = "prefix") -> Engine:
    core = make_core(slabs=40, policies=Policies.named(reuse=reuse))
    return Engine(core, Intake(None, defaults={}, eos_token_ids=(), vocab_size=1000))


def test_python_callers_pin_and_unpin() -> None:
    llm = LLM.from_engine(engine_that_keeps())
    once = SamplingParams(max_tokens=1)
    llm.generate({"prompt_token_ids": PROMPT, "cache_salt": "mine"}, once)
    assert llm.pin_prefix(PROMPT, 5).tokens == 0
    pin = llm.pin_prefix(PROMPT, ttl=5, cache_salt="mine")
    assert pin.tokens == 32
    assert llm.pin_prefix({"prompt_token_ids": PROMPT, "cache_salt": "mine"}, 5).tokens == 32
    assert [llm.unpin_prefix(pin.name), llm.unpin_prefix(pin.name)] == [True, False]
    short = llm.pin_prefix(PROMPT, ttl=0.01, cache_salt="mine")
    time.sleep(0.02)
    assert not llm.unpin_prefix(short.name), "its time is over"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((PROMPT, 0), "ttl"),
        ((PROMPT, float("nan")), "ttl"),
        ((PROMPT, float("inf")), "ttl"),
        ((PROMPT, True), "ttl"),
        ((PROMPT, "5"), "ttl"),
        (([], 5), "prompt"),
        ((5, 5), "prompt"),
        (("no tokenizer here", 5), "prompt"),
        (([1000], 5), "prompt_token_ids"),
        ((PROMPT, 5, ""), "cache_salt"),
        (({"prompt_token_ids": PROMPT, "cache_salt": "a"}, 5, "b"), "cache_salt"),
        (({"prompt_token_ids": PROMPT, "ttl": 5}, 5), "prompt"),
    ],
)
def test_python_callers_are_told_which_field_is_wrong(arguments: tuple[Any, ...], field: str) -> None:
    with pytest.raises(RequestError) as found:
        LLM.from_engine(engine_that_keeps()).pin_prefix(*arguments)
    assert found.value.field == field


def test_asyncio_callers_pin_and_are_told_when_nobody_is_there() -> None:
    async def main() -> None:
        llm = AsyncLLM(engine_that_keeps())
        async with llm:
            async for _ in llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=1)):
                pass
            pin = await llm.pin_prefix(PROMPT, 5)
            assert (pin.tokens, [one.name for one in await llm.live_pins()]) == (32, [pin.name])
            assert await llm.unpin_prefix(pin.name)
            assert not await llm.unpin_prefix(pin.name)
            with pytest.raises(RequestError):
                await llm.pin_prefix(PROMPT, 0)
        with pytest.raises(EngineDeadError):
            await llm.pin_prefix(PROMPT, 5)

    asyncio.run(main())
