"""The KV pool's pages are asked for while the engine is idle, in the order of the slots, no further than was said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import Bench, tiny_config, tiny_prompts

from octavo.machine import read_machine
from octavo.models.trial import Trial, subjects
from octavo.runtime import pool_pages
from octavo.runtime.pool_pages import AHEAD_BYTES, MOST_OF_FREE, PIECE_BYTES, QUIET_S, PoolPages, ahead_bytes

torch.set_num_threads(1)
MIB = 1 << 20


class Asked:
    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.parts: list[tuple[int, int]] = []

    def __call__(self, address: int, size: int, advice: int) -> int:
        self.parts.append((address, size))
        return self.answer

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.parts)


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.002)


def over(size: int, ahead: int, answer: int = 0) -> tuple[PoolPages, Asked]:
    asked = Asked(answer)
    return PoolPages(torch.empty(size, dtype=torch.uint8), ahead, advise=asked), asked


def test_an_idle_engine_asks_in_order_and_no_further_than_was_said() -> None:
    pages, asked = over(200 * MIB, 64 * MIB)
    pages.used(0)
    until(lambda: asked.bytes == 64 * MIB)
    pages.used(40 * MIB)
    until(lambda: asked.bytes == 104 * MIB)
    assert all(a + n == b for (a, n), (b, _) in zip(asked.parts, asked.parts[1:], strict=False))
    assert max(size for _, size in asked.parts) == PIECE_BYTES
    pages.used(190 * MIB)
    until(lambda: asked.bytes == 200 * MIB)
    pages.close()


def test_nothing_is_asked_for_while_a_step_runs() -> None:
    pages, asked = over(64 * MIB, 64 * MIB)
    pages.step_begins()
    pages.used(0)
    time.sleep(3 * QUIET_S)
    assert not asked.parts
    pages.step_ended()
    until(lambda: asked.bytes == 64 * MIB)
    pages.close()


def test_what_is_asked_for_at_the_start_is_there_when_that_returns_unless_it_takes_too_long() -> None:
    pages, asked = over(64 * MIB, 32 * MIB)
    pages.ask_now(60.0)
    assert asked.bytes == 32 * MIB
    asked = Asked()
    moments = iter(range(100))
    slow = PoolPages(
        torch.empty(64 * MIB, dtype=torch.uint8), 64 * MIB, advise=asked, clock=lambda: float(next(moments))
    )
    slow.ask_now(5.0)
    assert asked.bytes == 4 * PIECE_BYTES


def test_no_thread_is_left_when_there_is_no_more_to_ask_for() -> None:
    pages, asked = over(64 * MIB, 32 * MIB)
    pages.used(0)
    until(lambda: not any(thread.name == "octavo-pool-pages" for thread in threading.enumerate()))
    assert asked.bytes == 32 * MIB
    pages.used(MIB)
    assert not any(thread.name == "octavo-pool-pages" for thread in threading.enumerate()), "for a single piece"


def test_a_system_that_does_not_know_how_is_asked_once() -> None:
    pages, asked = over(64 * MIB, 32 * MIB, answer=-1)
    pages.used(0)
    until(lambda: len(asked.parts) == 1)
    pages.close()
    pages.used(32 * MIB)
    assert len(asked.parts) == 1


def test_closing_ends_the_thread_with_the_piece_it_is_at() -> None:
    pages, asked = over(64 * MIB, 64 * MIB)
    pages.step_begins()
    pages.used(0)
    begun = time.monotonic()
    pages.close()
    assert time.monotonic() - begun < 5 * QUIET_S
    assert not asked.parts
    pages.used(64 * MIB)
    assert not any(thread.name == "octavo-pool-pages" for thread in threading.enumerate())


def test_a_pool_that_is_a_limit_is_asked_for_in_small_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_pages, "_nodes", lambda: 1)
    assert ahead_bytes(1 << 50, named=False) == AHEAD_BYTES
    free = read_machine().available_bytes
    assert ahead_bytes(1 << 50, named=True) <= 1.5 * free / MOST_OF_FREE, "never most of what is free"
    assert ahead_bytes(3 * MIB, named=True) == 3 * MIB
    monkeypatch.setattr(pool_pages, "_nodes", lambda: 2)
    assert ahead_bytes(3 * MIB, named=True) == 0, "pages belong to the node that writes them first"


@pytest.mark.parametrize(
    ("listed", "nodes"), [("0\n", 1), ("0-1\n", 2), ("0,2-3\n", 3), ("", 1), ("none", 1), (None, 1)]
)
def test_nodes_are_counted_as_the_system_lists_them(tmp_path: Path, listed: str | None, nodes: int) -> None:
    path = tmp_path / "has_memory"
    if listed is not None:
        path.write_text(listed, encoding="ascii")
    assert pool_pages._nodes(path) == nodes


class Told:
    """What an executor says, instead of a `PoolPages`."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.most = 0

    def used(self, end: int) -> None:
        self.words.append("used")
        self.most = max(self.most, end)

    def step_begins(self) -> None:
        self.words.append("begins")

    def step_ended(self) -> None:
        self.words.append("ended")

    def close(self) -> None:
        self.words.append("close")


def test_an_executor_says_when_it_steps_and_how_far_its_pool_is_used() -> None:
    bench = Bench(tiny_config("llama"))
    executor, layout = bench.executor()
    told = Told()
    executor._pool_pages = told  # type: ignore[assignment]
    trial = Trial(executor, layout, 80, 8, seed=1)
    trial.run(subjects(tiny_prompts()[:3], 6))
    executor.close()
    assert told.words[-1] == "close"
    steps = [word for word in told.words[:-1] if word != "used"]
    assert steps == ["begins", "ended"] * (len(steps) // 2)
    assert told.words[:2] == ["begins", "used"]
    assert layout.address(0, 1) < told.most <= layout.address(0, 79)


def test_tokens_are_the_same_over_pages_that_were_had_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_pages, "QUIET_S", 0.0)
    monkeypatch.setattr(pool_pages, "_GROWS_BY", 1)
    bench = Bench(tiny_config("llama"))
    right, _ = bench.serve(tiny_prompts(), 8)
    executor, layout = bench.executor(rows=5)
    executor.ask_ahead(1 << 30)
    made = subjects(tiny_prompts(), 8)
    Trial(executor, layout, 80, 5, seed=0).run(made, longest_chunk=7)
    executor.close()
    assert [subject.outputs for subject in made] == right
