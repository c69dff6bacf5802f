"""The real `openai` client against a running server: what its users do, streaming and not, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.server.serving import Running, byte_tokenizer, served

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").owned_by == "octavo"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="echo", messages=HI)
    assert answer.choices[0].message.content == "user\nhi"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    (record,) = answer.usage.model_extra["octavo"]  # type: ignore[index]
    assert record["input_tokens"] == answer.usage.prompt_tokens
    assert answer._request_id == answer.id


def test_a_chat_with_every_sampling_field(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="echo",
        messages=HI,
        n=2,
        temperature=0.5,
        top_p=0.9,
        max_completion_tokens=6,
        stop=["zzz"],
        seed=7,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        logit_bias={"5": 3},
        logprobs=True,
        top_logprobs=2,
        response_format={"type": "text"},
        user="somebody",
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "ignore_eos": True,
            "stop_token_ids": [3],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "priority": 1,
        },
    )
    assert [choice.message.content for choice in answer.choices] == ["<|im_start|>user\n"] * 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 6
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content) == b"<|im_start|>user\n"


def test_a_stream_of_a_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="echo", messages=HI, stream=True, n=2, stream_options={"include_usage": True}
    )
    text = {0: "", 1: ""}
    ends: list[tuple[int, str]] = []
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends.append((choice.index, choice.finish_reason))
    assert text == {0: "user\nhi", 1: "user\nhi"}
    assert sorted(ends) == [(0, "stop"), (1, "stop")]
    assert usage is not None
    assert usage.completion_tokens == 18


def test_the_clients_own_accumulator_takes_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="echo", messages=HI, logprobs=True) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "user\nhi"
    assert final.choices[0].logprobs is not None


def test_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {"model": "echo", "prompt": ["ab", "xyz"], "max_tokens": 4, "n": 2, "echo": True}
    whole = client.completions.create(**options)
    assert [choice.text for choice in whole.choices] == ["ababab"] * 2 + ["xyzxyzx"] * 2
    parts = ["", "", "", ""]
    for chunk in client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert parts == [choice.text for choice in whole.choices]
    logprobs = client.completions.create(model="echo", prompt="ab", max_tokens=2, logprobs=1).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset == [0, 1]


def test_many_asynchronous_streams_at_once(server: Running) -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        stream = await client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": f"number {i}"}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*[one(client, i) for i in range(32)])

    assert asyncio.run(everyone()) == [f"user\nnumber {i}" for i in range(32)]


def test_an_asynchronous_client_that_breaks_off_frees_its_blocks(server: Running) -> None:
    async def breaks_off() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(
                model="echo", prompt="abc", n=3, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(breaks_off())
    server.until_empty()


@pytest.mark.parametrize(
    ("change", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"n": 1000}, openai.BadRequestError, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools"),
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "nonsense"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
    ],
)
def test_errors_are_those_that_the_client_knows(
    client: openai.OpenAI, change: dict[str, Any], kind: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**({"model": "echo", "messages": HI} | change))
    assert caught.value.param == param
    assert param in caught.value.message


def test_a_key_is_asked_for() -> None:
    with served(api_keys=("first", "second")) as server:
        for key in ("first", "second"):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                assert client.models.list().data[0].id == "echo"
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="third", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                client.models.list()
            assert caught.value.code == "invalid_api_key"


def test_an_unknown_model_is_refused_and_the_served_names_are_known() -> None:
    with (
        served(served_model_names=("gpt-4o", "mine")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == ["gpt-4o", "mine"]
        assert client.completions.create(model="mine", prompt="ab", max_tokens=1).model == "mine"
        with pytest.raises(openai.NotFoundError, match="gpt-4o or mine"):
            client.completions.create(model="echo", prompt="ab", max_tokens=1)


def test_token_ids_of_a_prompt_are_taken_as_they_are(client: openai.OpenAI) -> None:
    ids = byte_tokenizer()("ab").input_ids
    assert client.completions.create(model="echo", prompt=ids, max_tokens=2).choices[0].text == "ab"
    assert client.completions.create(model="echo", prompt=[ids, ids], max_tokens=2).choices[1].text == "ab"
