"""`AsyncLLM`: many coroutines over one engine thread; nobody waits for ever, whatever happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from tests.pure.worlds import VOCAB, engine

from octavo import AsyncLLM, EngineDeadError, RequestError, SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.memory.check import is_empty
from octavo.scheduling.core import EngineCore
from octavo.scheduling.plan import StepPlan, StepResult
from octavo.simulate.executors import EchoExecutor

SECONDS = 30.0


def serve(core: EngineCore) -> AsyncLLM:
    return AsyncLLM(Engine(core, Intake(None, defaults={}, eos_token_ids=(), vocab_size=VOCAB)))


def run(core: EngineCore, scenario: Callable[[AsyncLLM], Awaitable[Any]]) -> Any:
    """Run a scenario against an `AsyncLLM` around this core, within a bound."""

    async def bounded() -> Any:
        async with asyncio.timeout(SECONDS), serve(core) as llm:
            return await scenario(llm)

    return asyncio.run(bounded())


async def collect(llm: AsyncLLM, prompt: list[int], wanted: int, leave_after: int | None = None) -> list[int]:
    tokens: list[int] = []
    async for delta in llm.stream(prompt, SamplingParams(max_tokens=wanted)):
        tokens.extend(delta.token_ids)
        if leave_after is not None and len(tokens) >= leave_after:
            break
    return tokens


def echoed(prompt: list[int], wanted: int) -> list[int]:
    return [prompt[(len(prompt) + i) % len(prompt)] for i in range(wanted)]


async def until_empty(core: EngineCore) -> None:
    while not is_empty(core.scheduler.cache) or core.has_work:  # noqa: ASYNC110 - the engine runs in a thread
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("depth", [0, 1])
def test_many_streams_get_their_own_tokens_while_others_leave(depth: int) -> None:
    core = engine(slabs=40, depth=depth)

    async def scenario(llm: AsyncLLM) -> None:
        prompts = [[i + 1, i + 2, i + 3] for i in range(60)]
        leaving = [3 if i % 10 == 0 else None for i in range(60)]
        got = await asyncio.gather(*[collect(llm, p, 20, n) for p, n in zip(prompts, leaving, strict=True)])
        for prompt, tokens, left in zip(prompts, got, leaving, strict=True):
            expected = echoed(prompt, 20)
            assert tokens == expected if left is None else tokens == expected[: len(tokens)]
        await until_empty(core)

    run(core, scenario)


def test_generate_yields_everything_so_far() -> None:
    async def scenario(llm: AsyncLLM) -> list[int]:
        lengths = []
        async for output in llm.generate([5, 6, 7], SamplingParams(max_tokens=4, n=2)):
            lengths.append(sum(len(choice.token_ids) for choice in output.outputs))
        assert output.finished
        assert [choice.token_ids for choice in output.outputs] == [(5, 6, 7, 5)] * 2
        return lengths

    lengths = run(engine(), scenario)
    assert lengths == sorted(lengths)
    assert lengths[-1] == 8


def test_a_cancelled_reader_frees_its_blocks() -> None:
    core = engine(slabs=400, context=100_000)

    async def scenario(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(collect(llm, [1, 2, 3], 1000)) for _ in range(8)]
        for task in tasks[:4]:  # before the engine has answered, and while it runs
            task.cancel()
        await asyncio.sleep(0.05)
        for task in tasks[4:]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) or len(result) == 1000 for result in results)
        await until_empty(core)

    run(core, scenario)


def test_a_refused_request_raises_at_once_and_harms_nobody() -> None:
    core = engine(slabs=4)

    async def scenario(llm: AsyncLLM) -> None:
        other = asyncio.create_task(collect(llm, [1, 2], 10))
        for prompt, params in (([1] * 50, None), ([], None), ([VOCAB], None), ([1], SamplingParams(max_tokens=500))):
            with pytest.raises(RequestError):
                async for _ in llm.stream(prompt, params):
                    pass
        with pytest.raises(RequestError, match="in use"):
            await asyncio.gather(
                *[anext(llm.stream([1], SamplingParams(max_tokens=4), request_id="twice")) for _ in range(2)]
            )
        assert await other == echoed([1, 2], 10)

    run(core, scenario)


def test_abort_ends_the_reader_with_a_reason() -> None:
    async def scenario(llm: AsyncLLM) -> str | None:
        reason = None
        async for delta in llm.stream([1, 2], SamplingParams(max_tokens=3000), request_id="long"):
            reason = delta.finish_reason or reason
            await llm.abort("long")
        return reason

    assert run(engine(slabs=1000, context=100_000), scenario) == "abort"
    assert not asyncio.run(serve(engine()).abort("nobody"))


class Breaking(EchoExecutor):
    """Works for a while, once it may begin."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.may_begin = threading.Event()

    def collect(self) -> StepResult:
        self.may_begin.wait(SECONDS)
        self.steps -= 1
        if self.steps < 0:
            raise RuntimeError("the device is gone")
        return super().collect()


@pytest.mark.parametrize("depth", [0, 1])
def test_when_the_engine_dies_every_reader_is_told_and_newcomers_are_refused(depth: int) -> None:
    executor = Breaking(5)

    async def scenario(llm: AsyncLLM) -> None:
        async def ending(i: int) -> str | None:
            async for delta in llm.stream([i, i + 1], SamplingParams(max_tokens=50)):
                if delta.finish_reason:
                    assert "the device is gone" in (delta.error or "")
                    return delta.finish_reason
            return None

        endings = [asyncio.create_task(ending(i)) for i in range(1, 30)]
        await asyncio.sleep(0)  # each posts its request
        executor.may_begin.set()
        reasons = await asyncio.gather(*endings)
        assert reasons == ["error"] * 29
        assert not llm.is_alive
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await collect(llm, [1], 2)

    run(engine(slabs=100, executor=executor, depth=depth), scenario)


def test_a_state_too_broken_to_end_cleanly_still_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Breaking(3)
    executor.may_begin.set()
    core = engine(slabs=100, executor=executor)

    def broken(error: str, now: float) -> None:
        raise KeyError("a row without a sequence")

    monkeypatch.setattr(core.scheduler, "fail_all", broken)

    async def scenario(llm: AsyncLLM) -> list[str | None]:
        deltas = [delta async for delta in llm.stream([1, 2], SamplingParams(max_tokens=50, n=3))]
        return [delta.finish_reason for delta in deltas if delta.finish_reason]

    assert run(core, scenario) == ["error"] * 3


def test_shutting_down_ends_open_streams_and_draining_lets_them_finish() -> None:
    async def scenario(drain: bool) -> list[str | None]:
        llm = serve(engine(slabs=100))

        async def ending(i: int) -> str | None:
            reason = None
            async for delta in llm.stream([i, i + 1], SamplingParams(max_tokens=300)):
                reason = delta.finish_reason
            return reason

        async with asyncio.timeout(SECONDS), llm:
            readers = [asyncio.create_task(ending(i)) for i in range(1, 5)]
            await asyncio.sleep(0.01)
            await llm.shutdown(drain=drain)
            return await asyncio.gather(*readers)

    assert asyncio.run(scenario(drain=True)) == ["length"] * 4
    assert "error" in asyncio.run(scenario(drain=False))


def test_a_slow_reader_stalls_nobody() -> None:
    core = engine(slabs=400)

    async def scenario(llm: AsyncLLM) -> None:
        slow = llm.stream([1, 2, 3], SamplingParams(max_tokens=200))
        first = await anext(slow)
        assert await collect(llm, [4, 5], 100) == echoed([4, 5], 100)
        rest = [delta async for delta in slow]
        tokens = [token for delta in (first, *rest) for token in delta.token_ids]
        assert tokens == echoed([1, 2, 3], 200)

    run(core, scenario)


class Sickly(EchoExecutor):
    """Fails every sequence whose prompt begins with 13."""

    def _run(self, plan: StepPlan) -> StepResult:
        result = super()._run(plan)
        sick = [i for i in range(plan.chunks) if self._requests[int(plan.rows[i])].prompt_token_ids[0] == 13]
        return StepResult(result.number, result.tokens, result.finished_s, failures=tuple((i, "sick") for i in sick))


def test_a_sequence_that_fails_ends_alone() -> None:
    core = engine(executor=Sickly(), slabs=100)

    async def scenario(llm: AsyncLLM) -> None:
        async def sick() -> str | None:
            deltas = [delta async for delta in llm.stream([13, 1], SamplingParams(max_tokens=9))]
            assert deltas[-1].error == "sick"
            return deltas[-1].finish_reason

        well, reason = await asyncio.gather(collect(llm, [4, 5], 30), sick())
        assert (well, reason) == (echoed([4, 5], 30), "error")
        await until_empty(core)

    run(core, scenario)
    assert np.all(core.scheduler.running.sequence_id == -1)


def test_an_observer_that_fails_costs_no_reader_its_tokens() -> None:
    core = engine()
    seen: list[int] = []

    def failing(events: list[Any]) -> None:
        raise ZeroDivisionError

    async def scenario(llm: AsyncLLM) -> None:
        llm.observers += [failing, lambda events: seen.append(len(events))]
        assert await collect(llm, [4, 5], 10) == echoed([4, 5], 10)

    run(core, scenario)
    assert seen
