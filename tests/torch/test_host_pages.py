"""Pages of the host's arena are asked for ahead of their first write, no further than is likely to be used."""

from __future__ import annotations

import time

import pytest
import torch
from tests.torch.movers import block, ended, give, movers

from octavo.runtime.host_pages import AHEAD_BYTES, CHUNK_BYTES, PagesAhead

torch.set_num_threads(1)
MIB = 1 << 20


class Asked:
    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.parts: list[tuple[int, int]] = []

    def __call__(self, address: int, size: int, advice: int) -> int:
        self.parts.append((address, size))
        return self.answer


def all_of(pages: PagesAhead) -> None:
    for _ in range(1000):
        if pages.lacking:
            pages.ask()


def test_nothing_is_asked_for_before_the_host_is_used_and_then_a_little_ahead() -> None:
    asked = Asked()
    pages = PagesAhead(4096, 1 << 30, asked)
    assert not pages.lacking
    pages.used(5 * MIB)
    all_of(pages)
    assert asked.parts[0] == (4096, CHUNK_BYTES)
    assert sum(size for _, size in asked.parts) == 5 * MIB + AHEAD_BYTES
    assert all(a + n == b for (a, n), (b, _) in zip(asked.parts, asked.parts[1:], strict=False))
    pages.used(2 * MIB)
    assert not pages.lacking, "used again"
    pages.used(1 << 30)
    all_of(pages)
    assert sum(size for _, size in asked.parts) == 1 << 30


def test_where_the_system_does_not_know_how_it_is_asked_once() -> None:
    asked = Asked(-1)
    pages = PagesAhead(4096, 1 << 30, asked)
    pages.used(MIB)
    all_of(pages)
    pages.used(500 * MIB)
    all_of(pages)
    assert len(asked.parts) == 1


@pytest.mark.parametrize("answer", [0, -1])
def test_an_idle_mover_asks_and_what_the_arena_holds_stays(answer: int) -> None:
    with movers() as make:
        mover, device, host = make()
        asked = Asked(answer)
        mover._pages = PagesAhead(host.bytes.data_ptr(), host.bytes.numel(), asked)
        before = block(host, 1, 5)
        for _ in range(2):
            give(mover, "demote", 1, (0,), (4,))
            ended(mover)
        until = time.monotonic() + 10
        while mover._pages.lacking:
            assert time.monotonic() < until
            time.sleep(0.001)
        assert block(host, 1, 4) == block(device, 1, 0)
        assert block(host, 1, 5) == before
    assert asked.parts


def test_real_pages_are_had_without_a_change() -> None:
    with movers() as make:
        _, _, host = make()
        before = bytes(host.bytes.numpy())
        pages = PagesAhead(host.bytes.data_ptr() & ~4095, host.bytes.numel())
        pages.used(0)
        all_of(pages)
        assert not pages.lacking
        assert bytes(host.bytes.numpy()) == before
