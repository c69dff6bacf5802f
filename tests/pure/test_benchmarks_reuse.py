"""The arithmetic of the benchmark of tiers: what was gained, and what is told where that is not known. No model."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import pytest
from reuse import GAINED, add_gains, live_tokens, metrics_text, most_that_hold

ARGS = Namespace(talk=100, most=8)


def rows(off: tuple[int, bool], on: tuple[int, bool]) -> list[dict[str, Any]]:
    made = [{"tiers": name, "sequences": count, "live_tokens": live_tokens(ARGS, count), "at_least": more,
             "promise_s": 0.1} for name, (count, more) in (("device alone", off), ("host", on))]  # fmt: skip
    add_gains(made)
    return made


def test_live_tokens_are_of_first_turns_and_answers_and_of_one_second_turn() -> None:
    assert [live_tokens(ARGS, count) for count in (0, 1, 3)] == [0, 148, 3 * 116 + 32]


def test_what_was_gained_is_on_less_off_under_the_names_that_are_kept() -> None:
    made = rows((3, False), (8, True))
    assert GAINED[0] not in made[0]
    assert [made[1][name] for name in GAINED] == [5 * 116, 5]
    text = metrics_text("m", made).decode()
    assert 'octavo_effective_capacity_gained_tokens{model="m",tiers="host"} 580.0' in text
    assert 'octavo_effective_capacity_gained_sequences{model="m",tiers="host"} 5.0' in text


def test_a_device_that_may_hold_more_leaves_the_gain_unknown_and_unwritten() -> None:
    made = rows((8, True), (8, True))
    assert [made[1][name] for name in GAINED] == [None, None]
    assert "{" not in metrics_text("m", made).decode()


@pytest.mark.parametrize("bound", [1, 2, 3, 7, 8, 100])
def test_the_search_finds_every_edge_and_says_when_there_is_none(bound: int) -> None:
    for edge in range(bound + 2):
        tried: list[int] = []

        def holds(count: int, edge: int = edge, tried: list[int] = tried) -> bool:
            tried.append(count)
            return count <= edge

        assert most_that_hold(bound, holds) == (min(edge, bound), edge >= bound)
        assert len(tried) <= 2 * bound.bit_length() + 1
        assert len(tried) == len(set(tried))
        assert max(tried) <= bound


def test_without_halving_it_says_that_more_between_two_doublings_might_hold() -> None:
    found = [most_that_hold(9, lambda count, edge=edge: count <= edge, halve=False) for edge in range(11)]
    between = (4, True)  # 5, 6 and 7 were not tried
    assert found == [
        (0, False), (1, False), (2, True), (2, True), between, between, between, between, (8, False), (9, True),
        (9, True),
    ]  # fmt: skip
