"""Reuse as clients see it: cached tokens in the usage, salts, isolation by key, choices that share, resets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from tests.server.serving import Running, Slow, make_core, served

from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.engine.llm import LLM
from octavo.errors import EngineDeadError
from octavo.policy.bundle import Policies
from octavo.scheduling.request import SamplingParams
from octavo.server.async_llm import AsyncLLM
from octavo.simulate.recording import (
    Divergence,
    RecordedExecutor,
    Recorder,
    Recording,
    RecordingExecutor,
    Reset,
    replay,
)

PROMPT = list(range(20, 53))
"""33 tokens: 8 blocks of 4 and the last one, which is always computed."""
CHAT: Any = [{"role": "user", "content": "what is a block, and who may have it"}]


@contextmanager
def keeping(reuse: str = "prefix", executor: Slow | None = None, **settings: Any) -> Iterator[Running]:
    with served(make_core(executor, policies=Policies.named(reuse=reuse)), **settings) as running:
        yield running


def client_of(server: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def cached(client: openai.OpenAI, *, salt: str | None = None, stream: bool = False, **more: Any) -> int:
    """Cached tokens that the usage tells of one completion."""
    extra = {} if salt is None else {"cache_salt": salt}
    if stream:
        more |= {"stream": True, "stream_options": {"include_usage": True}}
    answer: Any = client.completions.create(model="echo", prompt=PROMPT, max_tokens=2, extra_body=extra, **more)
    if stream:
        answer = list(answer)[-1]
    return answer.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_same_salt_hits_and_another_finds_nothing(stream: bool) -> None:
    with keeping() as server, client_of(server) as client:
        salts = ("a", "a", "b", "b", None, None, "a")
        assert [cached(client, salt=salt, stream=stream) for salt in salts] == [0, 32, 0, 32, 0, 32, 32]


def test_without_reuse_equal_prompts_report_no_cached_tokens() -> None:
    with keeping("none") as server, client_of(server) as client:
        assert [cached(client) for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_found_again_and_salted_like_a_completion(stream: bool) -> None:
    def ask(salt: str) -> int:
        more: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer: Any = client.chat.completions.create(
            model="echo", messages=CHAT, max_tokens=1, extra_body={"cache_salt": salt}, **more
        )
        usage = (list(answer)[-1] if stream else answer).usage
        assert usage.model_extra["octavo"][0]["input_tokens"] == usage.prompt_tokens
        return usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens

    with keeping() as server, client_of(server) as client:
        cold, warm, other = ask("a"), ask("a"), ask("b")
        assert cold == other > 40
        assert 1 <= warm <= 4, "the last block at most"


def test_keys_are_kept_apart_whatever_salt_a_caller_sends() -> None:
    with keeping(api_keys=("key of a", "key of b"), isolate_api_keys=True) as server:
        a, b = client_of(server, "key of a"), client_of(server, "key of b")
        assert [cached(a), cached(a)] == [0, 32]
        assert cached(b) == 0, "the paired test: the same prompt under another key"
        assert cached(b) == 32
        assert cached(a, salt="mine") == 0
        assert cached(b, salt="mine") == 0, "a salt that both choose is still two salts"
        assert cached(a, salt="x" * 1024) == 0
        assert cached(a, salt="x" * 1024) == 32


def test_without_isolation_keys_share_what_has_one_salt() -> None:
    with keeping(api_keys=("key of a", "key of b")) as server:
        assert cached(client_of(server, "key of a")) == 0
        assert cached(client_of(server, "key of b")) == 32


def test_choices_share_their_prompt_which_counts_as_computed_once() -> None:
    with keeping() as server, client_of(server) as client:
        answer = client.completions.create(model="echo", prompt=PROMPT, max_tokens=2, n=4)
        assert answer.usage is not None
        records = answer.usage.model_extra["octavo"]  # type: ignore[index]
        assert [record["cached_tokens"].get("device", 0) for record in records] == [0, 32, 32, 32]
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0, "one of the choices has computed it"
        assert [cached(client, n=4), cached(client, n=4, stream=True)] == [32, 32], "never more than the prompt has"


def test_several_prompts_of_one_request_count_each_for_itself() -> None:
    with keeping() as server, client_of(server) as client:
        cached(client)
        answer = client.completions.create(model="echo", prompt=[PROMPT, PROMPT[::-1]], max_tokens=1, n=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 32


def test_after_a_reset_nothing_is_found_and_the_answer_says_what_it_freed() -> None:
    with keeping() as server, client_of(server) as client:
        assert [cached(client), cached(client)] == [0, 32]
        kept = server.core.scheduler.cache.pool.cached[0]
        block = server.core.scheduler.cache.layout.groups[0].block_bytes
        answer = server.post("/v1/cache/reset", {})
        assert answer.status_code == 200
        assert answer.json() == {
            "object": "cache.reset",
            "reuse": "prefix",
            "freed_blocks": {"full": kept},
            "freed_bytes": kept * block,
        }
        assert kept >= 8
        assert server.core.scheduler.cache.pool.free.count == server.core.scheduler.cache.pool.slabs
        assert [cached(client), cached(client)] == [0, 32]
        found = server.get("/metrics").text
        assert f'octavo_evictions_total{{model="echo",tier="device"}} {float(kept)}' in found
        assert 'octavo_prefix_cache_hits_total{model="echo",tier="device"} 64.0' in found


def test_a_reset_amid_a_stream_leaves_the_stream_alone_and_its_blocks_unfound() -> None:
    slow = Slow(step_s=0.002)
    with keeping(executor=slow) as server, client_of(server) as client:
        stream = client.completions.create(model="echo", prompt=PROMPT, max_tokens=200, stream=True)
        chunks = iter(stream)
        first = [next(chunks) for _ in range(3)]
        assert server.post("/v1/cache/reset", {}).json()["freed_blocks"] == {"full": 0}
        assert cached(client) == 0
        rest = list(chunks)
        assert rest[-1].choices[0].finish_reason == "length"
        assert len(first) == 3
        server.until_empty()


def test_a_served_run_with_a_reset_and_pins_replays_to_the_same_plans() -> None:
    recording = Recording()
    policies = Policies.named(reuse="prefix")
    core = Recorder(make_core(RecordingExecutor(Slow(), recording), policies=policies), recording)
    with served(core) as server, client_of(server) as client:
        assert [cached(client), cached(client)] == [0, 32]
        pin = server.post("/v1/cache/pin", {"prompt": PROMPT, "ttl": 60}).json()["id"]
        assert server.post("/v1/cache/unpin", {"id": pin}).status_code == 200
        assert server.post("/v1/cache/reset", {}).status_code == 200
        assert [cached(client), cached(client)] == [0, 32]
        server.until_empty()
    again = make_core(RecordedExecutor(recording), policies=policies)
    assert replay(recording, again) == len(recording.plans) == 9, "the first is that of the start"
    recording.inputs = [entry for entry in recording.inputs if not isinstance(entry, Reset)]
    with pytest.raises(Divergence, match="step 5: "):
        replay(recording, make_core(RecordedExecutor(recording), policies=policies))


def test_a_reset_needs_a_key_a_json_object_and_nothing_in_it() -> None:
    with keeping(api_keys=("secret",)) as server:
        key = {"Authorization": "Bearer secret"}
        assert server.post("/v1/cache/reset", {}).status_code == 401
        assert server.post("/v1/cache/reset", {}, headers=key).status_code == 200
        bare = server.client.post("/v1/cache/reset", headers=key)
        assert bare.status_code == 415, "a form of another site's page cannot send JSON"
        wrong = server.post("/v1/cache/reset", {"salt": "a"}, headers=key)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "salt")
        assert server.get("/v1/cache/reset", headers=key).status_code == 405


def test_a_reset_without_reuse_frees_nothing_and_says_so() -> None:
    with keeping("none") as server:
        answer = server.post("/v1/cache/reset", {}).json()
        assert (answer["reuse"], answer["freed_blocks"], answer["freed_bytes"]) == ("none", {"full": 0}, 0)


def test_a_reset_of_a_dead_engine_is_answered() -> None:
    slow = Slow()
    with keeping(executor=slow) as server:
        slow.broken = True
        server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
        answer = server.post("/v1/cache/reset", {})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


def engine_that_keeps(reuse: str = "prefix") -> Engine:
    core = make_core(policies=Policies.named(reuse=reuse))
    return Engine(core, Intake(None, defaults={}, eos_token_ids=(), vocab_size=1000))


def test_python_callers_reset_by_vllms_name() -> None:
    llm = LLM.from_engine(engine_that_keeps())

    def found() -> int:
        before = len(seen)
        llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=1))
        return sum(e.cached_tokens for events in seen[before:] for e in events if type(e).__name__ == "Admitted")

    seen: list[list[Any]] = []
    llm.engine.observers.append(seen.append)
    assert [found(), found()] == [0, 32]
    assert llm.reset_prefix_cache()
    assert [found(), found()] == [0, 32]
    assert not LLM.from_engine(engine_that_keeps("none")).reset_prefix_cache()


def test_asyncio_callers_reset_and_are_told_when_nobody_is_there() -> None:
    async def main() -> None:
        llm = AsyncLLM(engine_that_keeps())
        async with llm:
            async for _ in llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=1)):
                pass
            assert await llm.reset_prefix_cache() == [8]
            assert await llm.reset_prefix_cache() == [0]
        with pytest.raises(EngineDeadError):
            await llm.reset_prefix_cache()

    asyncio.run(main())
