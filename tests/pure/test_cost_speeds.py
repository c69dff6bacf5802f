"""Two speeds of a machine's memory are told from one that varies, and only steps at the usual one are fitted."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cost.learn import Sample, usual_steps
from octavo.cost.speeds import Speed, speed_of
from octavo.cost.step import StepShape

SHAPE = StepShape.decode([50])


def drawn(seed: int, *classes: tuple[int, float, float]) -> list[float]:
    """So many rates around each speed, off by so much, in no order."""
    random = np.random.default_rng(seed)
    rates = np.concatenate([speed * np.exp(random.normal(0, off, count)) for count, speed, off in classes])
    return [float(rate) for rate in random.permutation(rates)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("slow", "fast"), [(70, 30), (30, 70), (95, 5)])
def test_two_speeds_are_found_and_the_one_seen_more_often_is_the_usual(seed: int, slow: int, fast: int) -> None:
    speed = speed_of(drawn(seed, (slow, 29e9, 0.03), (fast, 40e9, 0.03)))
    assert speed is not None
    assert speed.other is not None
    usual, other = (29e9, 40e9) if slow > fast else (40e9, 29e9)
    assert speed.usual == pytest.approx(usual, rel=0.03)
    assert speed.other == pytest.approx(other, rel=0.05)
    assert speed.at(usual)
    assert not speed.at(other)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("off", [0.0, 0.01, 0.05, 0.1, 0.2, 0.4])
def test_one_speed_that_varies_stays_one(seed: int, off: float) -> None:
    speed = speed_of(drawn(seed, (300, 30e9, off)))
    assert speed is not None
    assert speed.other is None
    assert speed.usual == pytest.approx(30e9, rel=0.01 + off / 4)


def test_a_few_reads_beside_another_program_make_no_speed() -> None:
    speed = speed_of(drawn(0, (300, 30e9, 0.03), (4, 15e9, 0.05)))
    assert speed is not None
    assert speed.other is None


def test_speeds_nearly_alike_are_one() -> None:
    speed = speed_of(drawn(0, (100, 30e9, 0.005), (100, 33e9, 0.005)))
    assert speed is not None
    assert speed.other is None


@given(st.lists(st.floats(1e6, 1e13), max_size=40))
def test_whatever_was_read_some_of_it_was_at_the_usual_speed(rates: list[float]) -> None:
    speed = speed_of(rates)
    if not rates:
        assert speed is None
        return
    assert speed is not None
    assert speed.at(speed.usual)
    if speed.other is not None:
        assert not speed.at(speed.other)
        assert 2 * sum(speed.at(rate) for rate in rates) >= len(rates)


def test_steps_around_which_memory_was_read_at_the_other_speed_are_left_out() -> None:
    slow, fast = drawn(1, (60, 29e9, 0.02)), drawn(2, (20, 40e9, 0.02))
    reads = slow + fast
    samples = [Sample(0, number, SHAPE, 1.0, 0.1, rates=pair) for number, pair in enumerate(pairwise(reads))]
    kept, speed = usual_steps(samples)
    assert speed is not None
    assert [one.step for one in kept] == list(range(59))  # not the one between both, and none after it
    assert speed.told(len(samples) - len(kept))["steps_left_out"] == 20
    assert Speed.of(speed.told(20)) == speed


def test_all_steps_are_kept_where_nobody_looked_or_memory_has_one_speed() -> None:
    unseen = [Sample(0, number, SHAPE, 1.0, 0.1) for number in range(9)]
    assert usual_steps(unseen) == (unseen, None)
    seen = [Sample(0, n, SHAPE, 1.0, 0.1, rates=(3e10 + n, 3e10 - n)) for n in range(9)]
    kept, speed = usual_steps(seen)
    assert kept == seen
    assert speed is not None
    assert "steps_left_out" not in speed.told(0)
