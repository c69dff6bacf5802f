"""The counter-based uniform: known answers, purity, and that neighbours look independent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.runtime.uniform import philox, uniforms

INT64 = st.integers(-(2**63), 2**63 - 1)
COUNT = st.integers(0, 2**63 - 1)


def one(seed: int, choice: int, position: int) -> float:
    return float(uniforms(np.array([seed]), np.array([choice]), np.array([position]))[0])


def grid(seeds: int, choices: int, positions: int) -> np.ndarray:
    s, c, p = np.meshgrid(np.arange(seeds), np.arange(choices), np.arange(positions), indexing="ij")
    return uniforms(s.astype(np.int64), c.astype(np.int64), p.astype(np.int64))


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: tuple, key: tuple, answer: tuple) -> None:
    words = philox(tuple(np.uint64([w]) for w in counter), tuple(np.uint64([w]) for w in key))
    assert tuple(int(w[0]) for w in words) == answer


def test_values_never_change_between_releases() -> None:
    got = [one(0, 0, 0), one(1, 0, 0), one(0, 1, 0), one(0, 0, 1), one(-1, 3, 131072), one(2**63 - 1, 127, 2**31)]
    assert got == [
        0.3990464708489645,
        0.8902591729757107,
        0.5166791607485287,
        0.9722412015223156,
        0.8699175815995103,
        0.7158162881571636,
    ]


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(-(2**63), 2**63 - 1, 300)
    choices, positions = rng.integers(0, 128, 300), rng.integers(0, 2**40, 300)
    together = uniforms(seeds, choices, positions)
    alone = [one(int(s), int(c), int(p)) for s, c, p in zip(seeds, choices, positions, strict=True)]
    assert together.tolist() == alone
    assert uniforms(seeds[::-1], choices[::-1], positions[::-1]).tolist() == alone[::-1]


@given(INT64, COUNT, COUNT)
def test_every_value_is_in_the_half_open_unit_interval(seed: int, choice: int, position: int) -> None:
    assert 0.0 <= one(seed, choice, position) < 1.0


@given(INT64, COUNT, COUNT)
def test_changing_any_argument_changes_the_value(seed: int, choice: int, position: int) -> None:
    here = one(seed, choice, position)
    assert here == one(seed, choice, position)
    assert here != one(seed ^ 1, choice, position)
    assert here != one(seed ^ (1 << 40), choice, position)
    assert here != one(seed, choice ^ 1, position)
    assert here != one(seed, choice, position ^ 1)


def test_all_53_bits_are_used() -> None:
    bits = (grid(64, 4, 64).ravel() * 2.0**53).astype(np.uint64)
    share = [float(((bits >> np.uint64(b)) & np.uint64(1)).mean()) for b in range(53)]
    assert all(abs(s - 0.5) < 0.02 for s in share)


def test_values_are_uniform() -> None:
    values = grid(50, 2, 1000).ravel()
    counts, _ = np.histogram(values, bins=100, range=(0.0, 1.0))
    expected = len(values) / 100
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 50 < chi_square < 160  # 99 degrees of freedom: outside about once in 10 000
    ordered = np.sort(values)
    distance = np.abs(ordered - (np.arange(len(values)) + 0.5) / len(values)).max()
    assert distance < 1.95 / np.sqrt(len(values))  # Kolmogorov-Smirnov at 0.1 %


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("lag", [1, 2, 3, 8])
def test_neighbouring_seeds_choices_and_positions_are_uncorrelated(axis: int, lag: int) -> None:
    values = grid(40, 40, 40)
    size = values.shape[axis]
    a = np.take(values, range(size - lag), axis).ravel()
    b = np.take(values, range(lag, size), axis).ravel()
    assert abs(float(np.corrcoef(a, b)[0, 1])) < 4 / np.sqrt(len(a))
