"""Metrics while the engine runs in its own thread: a scrape is of one moment, a request arrives when it is sent."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from pathlib import Path

import pytest
from tests.pure.metrics_by_hand import MODEL, Series, assert_histogram, scraped, total, value
from tests.pure.worlds import VOCAB, engine

from octavo import AsyncLLM, EngineDeadError, SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.observe.metrics import Metrics
from octavo.observe.names import NAMES
from octavo.scheduling.core import EngineCore
from octavo.scheduling.plan import StepPlan, StepResult
from octavo.simulate.executors import EchoExecutor

SECONDS = 60.0


def served(core: EngineCore) -> AsyncLLM:
    return AsyncLLM(Engine(core, Intake(None, defaults={}, eos_token_ids=(), vocab_size=VOCAB)))


def watched(llm: AsyncLLM) -> Metrics:
    metrics = Metrics(llm.engine.core, MODEL)
    llm.observers.append(metrics.observe)
    return metrics


class Paced(EchoExecutor):
    """Takes a little real time for each step."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        self.steps = 0

    def submit(self, plan: StepPlan) -> None:
        time.sleep(self.step_s)
        self.steps += 1
        super().submit(plan)

    def collect(self) -> StepResult:
        result = super().collect()
        return StepResult(result.number, result.tokens, time.monotonic())


async def tokens_of(llm: AsyncLLM, prompt: list[int], wanted: int, leave_after: int | None = None) -> int:
    got = 0
    async for delta in llm.stream(prompt, SamplingParams(max_tokens=wanted)):
        got += len(delta.token_ids)
        if leave_after is not None and got >= leave_after:
            break
    return got


async def one_round(llm: AsyncLLM, draw: random.Random) -> None:
    """Sixty streams, one in five of which leaves early."""
    wanted = [draw.randint(1, 30) for _ in range(60)]
    leaving = [draw.randint(1, 5) if i % 5 == 0 else None for i in range(60)]
    prompts = [[i + 1, i + 2, i + 3] for i in range(60)]
    jobs = [tokens_of(llm, p, w, n) for p, w, n in zip(prompts, wanted, leaving, strict=True)]
    got = await asyncio.gather(*jobs)
    assert all(g >= (w if n is None else min(n, w)) for g, w, n in zip(got, wanted, leaving, strict=True))


def scrape_until(done: threading.Event, metrics: Metrics, found: list[Series]) -> None:
    while not done.is_set():
        found.append(scraped(metrics))
        done.wait(0.002)


@pytest.mark.parametrize("depth", [0, 1])
def test_every_scrape_from_another_thread_is_of_one_moment(depth: int) -> None:
    """Fault 48, while it happens: blocks add up, and whatever runs holds some, at any time that somebody looks."""
    core = engine(slabs=40, seqs=6, depth=depth, executor=Paced(0.0005), audit=False)
    found: list[Series] = []
    done = threading.Event()

    async def scenario() -> int:
        async with asyncio.timeout(SECONDS), served(core) as llm:
            metrics = watched(llm)
            reader = threading.Thread(target=scrape_until, args=(done, metrics, found))
            reader.start()
            draw, rounds = random.Random(depth), 0
            while rounds == 0 or len(found) < 30:
                rounds += 1
                await one_round(llm, draw)
            while core.has_work:  # noqa: ASYNC110 - the engine runs in a thread
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            done.set()
            await asyncio.to_thread(reader.join)
            found.append(scraped(metrics))
            return rounds

    rounds = asyncio.run(scenario())
    block_bytes = core.scheduler.cache.layout.groups[0].block_bytes
    counters = {name.full for name in NAMES if name.kind == "counter"}
    assert any(value(series, "active_sequences") for series in found)
    for before, series in zip([{}, *found], found, strict=False):
        used = value(series, "kv_bytes_used", group="full")
        assert used / block_bytes + value(series, "kv_blocks_free", group="full") == 40
        assert 0 <= value(series, "active_sequences") <= 6
        # A seat has at least one block and at most the positions of its blocks.
        assert value(series, "active_sequences") * block_bytes <= used
        assert value(series, "live_cached_tokens") * block_bytes <= used * 4
        assert all(value(series, "kv_waste_bytes", cause=c) >= 0 for c in ("reserved", "internal", "padding"))
        assert all(series[key] >= number for key, number in before.items() if key[0] in counters)
    last = found[-1]
    assert total(last, "finished_total") == 60 * rounds
    assert value(last, "finished_total", reason="abort") == value(last, "aborted_total") <= 12 * rounds
    assert value(last, "finished_total", reason="length") >= 48 * rounds
    assert total(last, "kv_bytes_used") == value(last, "active_sequences") == value(last, "live_cached_tokens") == 0


def test_a_scrape_waits_for_a_decision_and_not_for_a_step() -> None:
    core = engine(executor=Paced(0.4), audit=False)

    async def scenario() -> None:
        async with asyncio.timeout(SECONDS), served(core) as llm:
            metrics = watched(llm)
            job = asyncio.create_task(tokens_of(llm, [1, 2, 3], 4))
            slowest, seen = 0.0, 0.0
            while not job.done():
                begun = time.perf_counter()
                seen = max(seen, value(scraped(metrics), "active_sequences"))
                slowest = max(slowest, time.perf_counter() - begun)
                await asyncio.sleep(0.01)
            assert seen == 1
            assert slowest < 0.3

    asyncio.run(scenario())


def test_a_request_arrives_when_it_is_sent_and_not_when_the_engine_looks() -> None:
    """TTFT includes the rest of the step that was running when the request came."""
    executor = Paced(0.3)
    core = engine(executor=executor, audit=False)

    async def scenario() -> Series:
        async with asyncio.timeout(SECONDS), served(core) as llm:
            metrics = watched(llm)
            long = asyncio.create_task(tokens_of(llm, [1, 2, 3], 4))
            await asyncio.sleep(0.1)  # into the first step, which has 0.2 seconds to go
            assert executor.steps == 0
            await tokens_of(llm, [4, 5], 1)
            await long
            return scraped(metrics)

    series = asyncio.run(scenario())
    # The first request waits for nothing and takes one step; the second waits for 0.2 s, and takes one step.
    assert value(series, "queue_seconds_sum") >= 0.15
    assert value(series, "time_to_first_token_seconds_sum") >= 0.3 + 0.3 + 0.15
    assert value(series, "time_to_first_token_seconds_count") == 2


def test_the_parts_of_steps_add_up_to_the_time_that_passed() -> None:
    executor = Paced(0.02)
    core = engine(executor=executor, audit=False)

    async def scenario() -> tuple[Series, float]:
        async with asyncio.timeout(SECONDS), served(core) as llm:
            metrics = watched(llm)
            begun = time.monotonic()
            await tokens_of(llm, [1, 2, 3], 25)
            return scraped(metrics), time.monotonic() - begun

    series, passed = asyncio.run(scenario())
    for part in ("schedule", "execute", "commit"):
        assert value(series, "step_seconds_count", part=part) == executor.steps == 25
    assert 25 * 0.02 <= value(series, "step_seconds_sum", part="execute") <= passed
    assert sum(value(series, "step_seconds_sum", part=p) for p in ("schedule", "execute", "commit")) <= passed
    assert 0.5 < value(series, "device_busy_ratio") <= 1.0
    assert_histogram(series, "batch_size_by_iteration", [1.0] * 25)


def test_when_the_engine_dies_metrics_go_on_and_the_recorder_has_written_what_it_saw(tmp_path: Path) -> None:
    class Breaking(Paced):
        def submit(self, plan: StepPlan) -> None:
            if self.steps == 5:
                raise RuntimeError("the device is gone")
            super().submit(plan)

    core = engine(slabs=40, seqs=4, executor=Breaking(0.001), audit=False)

    async def scenario() -> tuple[int, Series]:
        async with asyncio.timeout(SECONDS), served(core) as llm:
            llm.engine.recorder.path = tmp_path / "dump.jsonl"
            metrics = watched(llm)
            jobs = [tokens_of(llm, [i + 1, i + 2, i + 3], 50) for i in range(4)]
            results = await asyncio.gather(*jobs, return_exceptions=True)
            refused = sum(isinstance(result, EngineDeadError) for result in results)
            return refused, scraped(metrics)

    refused, series = asyncio.run(scenario())
    assert value(series, "finished_total", reason="error") == 4 - refused > 0
    assert value(series, "active_sequences") == total(series, "waiting_sequences") == 0
    header, state, *events = map(json.loads, (tmp_path / "dump.jsonl").read_text().splitlines())
    assert header["error"] == "RuntimeError: the device is gone"
    assert state["state"]["running"] == 4 - refused
    assert len(state["state"]["tables"]) == 4 - refused
    kinds = [event["event"] for event in events]
    assert kinds.count("StepPlanned") == 6
    assert kinds.count("StepEnded") == 5
    assert "Finished" not in kinds
