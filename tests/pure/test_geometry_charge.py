"""The rule by which a sequence is granted room: whole blocks, and for windows what a step can touch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.geometry.charge import bytes_charged, sequence_bytes_charged, touched_blocks, window_blocks
from octavo.geometry.dtypes import BF16
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.state import (
    Borrowed,
    Chunked,
    Component,
    Compound,
    Compressed,
    Constant,
    Growing,
    Stateless,
    Windowed,
)

K = (Component("k", (1, 8), BF16),)
"""16 bytes a token."""


@given(st.integers(0, 200), st.integers(1, 40))
def test_touched_blocks_is_the_worst_over_all_beginnings(positions: int, block: int) -> None:
    worst = max(((start + positions - 1) // block + 1 if positions else 0) for start in range(block))
    assert touched_blocks(positions, block) == worst


def test_a_window_of_128_in_steps_of_2048_is_charged_2175_positions_wherever_they_begin() -> None:
    # 2,175 positions touch at most 137 blocks of 16: 136 if they begin at a block
    assert window_blocks(1_000_000, 128, 2048, 16) == 137
    assert window_blocks(1_000_000, 128, 1, 16) == 9, "128 positions from the middle of a block"
    assert window_blocks(100, 128, 2048, 16) == 7, "never more than the sequence has"
    assert window_blocks(1_000, 8, 4, 1) == 8 - 1 + 4, "and no more than a step can touch"


@given(st.integers(1, 300), st.integers(1, 80), st.integers(1, 60), st.integers(1, 20))
def test_every_step_of_a_prefill_fits_in_what_a_window_is_charged(
    length: int, window: int, step: int, block: int
) -> None:
    granted = window_blocks(length, window, step, block)
    for start in range(0, length, step):
        last = min(length, start + step) - 1
        first = max(0, start - window + 1)
        assert last // block - first // block + 1 <= granted


def test_each_kind_is_charged_by_its_law() -> None:
    def charged(state: object) -> int:
        return bytes_charged(state, 100, step_tokens=4, block_tokens=16)  # type: ignore[arg-type]

    assert charged(Growing(K)) == 7 * 16 * 16
    # 8 - 1 + 4 = 11 positions touch 2 blocks; the sinks have one of their own
    assert charged(Windowed(K, 8)) == 2 * 16 * 16
    assert charged(Windowed(K, 8, sink_tokens=4)) == 3 * 16 * 16
    assert charged(Chunked(K, 8)) == 2 * 16 * 16
    assert charged(Constant(K)) == 16
    assert charged(Borrowed(0)) == charged(Stateless()) == 0
    # 25 entries in 2 blocks of entries, 4 positions waiting and the carried part
    assert charged(Compressed(K, 4, waiting=K, carried=K)) == 2 * 16 * 16 + 4 * 16 + 16
    assert charged(Compound((Windowed(K, 8), Constant(K)))) == 2 * 16 * 16 + 16


def test_a_model_is_charged_the_sum_of_its_layers() -> None:
    g = geometry_from_config({"model_type": "gpt_oss", "num_hidden_layers": 4}, BF16)
    per_token = 2 * 8 * 64 * 2
    assert sequence_bytes_charged(g, 10_000, step_tokens=512, block_tokens=16) == (
        2 * 10_000 * per_token + 2 * (41 * 16) * per_token
    )  # 128 - 1 + 512 = 639 positions touch 41 blocks
    assert sequence_bytes_charged(g, 10_000, step_tokens=512, block_tokens=16) > g.bytes_kept(10_000)


@pytest.mark.parametrize("bad", [{"block_tokens": 0}, {"step_tokens": 0}, {"reach_tokens": 0}])
def test_sizes_of_nothing_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        window_blocks(**{"tokens": 10, "reach_tokens": 4, "step_tokens": 4, "block_tokens": 16, **bad})
