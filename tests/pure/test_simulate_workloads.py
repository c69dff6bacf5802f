"""Traces, lengths, arrivals and sources: what is read, what is drawn, what is refused and how it is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.simulate.formats import read_trace
from octavo.simulate.lengths import NAMED, Empirical, Fixed, LogNormal, Uniform, Zipf, lengths_named
from octavo.simulate.sources import ClosedLoop, OpenLoop
from octavo.simulate.synthetic import Arrivals, PrefixTree, Synthetic
from octavo.simulate.trace import TraceRequest, prompt_of, request_of

OWN = [
    {"arrival": 1.5, "input_tokens": 10, "output_tokens": 3},
    {
        "arrival": 2.0,
        "hash_ids": [4, 5],
        "hash_block": 8,
        "output_tokens": 2,
        "max_tokens": 9,
        "priority": 1,
        "salt": "s",
    },
    {"arrival": 2.0, "input_tokens": 7, "output_tokens": 1, "session": "a", "think": 0.25},
]


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_our_own_format_says_everything(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", OWN))
    first, second, third = trace.requests
    assert trace.format == "octavo"
    assert (first.arrival_ns, second.arrival_ns) == (0, 500_000_000)
    assert (second.input_tokens, second.hash_block, second.max_tokens) == (16, 8, 9)
    assert (second.priority, second.salt) == (1, "s")
    assert (third.session, third.think_ns) == ("a", 250_000_000)


@pytest.mark.parametrize(
    ("text", "name", "lengths", "second_ns"),
    [
        (
            (
                "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n"
                "2023-11-16 18:17:04.0319600,31,8\n"
            ),
            "azure",
            [(48, 10), (31, 8)],
            52_000_000,
        ),
        (
            (
                "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
                "5,x,m,472,18,490,c\n45,y,m,1,2,3,c\n"
            ),
            "burstgpt",
            [(472, 18), (1, 2)],
            40_000_000_000,
        ),
        (
            "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n37,54,91,0.7\n20,15,35,1.3\n",
            "lengths",
            [(37, 54), (20, 15)],
            0,
        ),
    ],
)
def test_published_formats_are_known_by_their_columns(
    tmp_path: Path, text: str, name: str, lengths: list[tuple[int, int]], second_ns: int
) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    trace = read_trace(path)
    assert trace.format == name
    assert [(r.input_tokens, r.output_tokens) for r in trace.requests] == lengths
    assert trace.requests[1].arrival_ns == second_ns
    assert trace.has_arrivals == (name != "lengths")


@pytest.mark.parametrize("size", [16, 512])
def test_hash_ids_stand_for_the_block_size_that_covers_the_prompts(tmp_path: Path, size: int) -> None:
    lengths = [3 * size - 1, 7 * size, 2 * size + 1]
    rows = [
        {"timestamp": i, "input_length": n, "output_length": 5, "hash_ids": list(range(-(-n // size)))}
        for i, n in enumerate(lengths)
    ]
    trace = read_trace(write(tmp_path / "m.jsonl", rows))
    assert {r.hash_block for r in trace.requests} == {size}
    assert [r.arrival_ns for r in trace.requests] == [0, 10**6, 2 * 10**6]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"arrival": -1, "input_tokens": 3, "output_tokens": 1}',
        '{"arrival": 3, "input_tokens": 0, "output_tokens": 1}',
        '{"arrival": 3, "input_tokens": 2.5, "output_tokens": 1}',
        '{"arrival": 3, "input_tokens": true, "output_tokens": 1}',
        '{"arrival": "soon", "input_tokens": 2, "output_tokens": 1}',
        '{"arrival": 3, "input_tokens": 2}',
        '{"arrival": 3, "input_tokens": 2, "output_tokens": 1, "outptu": 3}',
        '{"arrival": 0.5, "input_tokens": 2, "output_tokens": 1}',
        '{"arrival": 3, "hash_ids": [1, "x"], "output_tokens": 1}',
        '{"arrival": NaN, "input_tokens": 2, "output_tokens": 1}',
    ],
)
def test_a_bad_line_is_named_by_its_number_and_refused_or_skipped(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "t.jsonl", [OWN[0], line, OWN[1]])
    with pytest.raises(ConfigError, match="line 2: "):
        read_trace(path)
    trace = read_trace(path, on_bad="skip")
    assert len(trace.requests) == 2
    assert trace.skipped_lines == 1
    assert trace.skipped[0].startswith("line 2: ")


def test_arrivals_out_of_order_are_sorted_where_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [OWN[1], OWN[0]])
    with pytest.raises(ConfigError, match=r"line 2: arrives before .*--sort"):
        read_trace(path)
    assert [r.input_tokens for r in read_trace(path, sort=True).requests] == [10, 16]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "hello\n", '{"x": 1}\n'])
def test_a_file_of_no_known_kind_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match="trace="):
        read_trace(tmp_path / "t")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "absent")


def test_equal_hash_ids_are_equal_tokens_and_nothing_else_is() -> None:
    def made(index: int, **fields: object) -> np.ndarray:
        return prompt_of(TraceRequest(arrival_ns=0, output_tokens=1, **fields), index)  # type: ignore[arg-type]

    a, b = (
        made(0, input_tokens=20, hash_ids=(7, 8), hash_block=8),
        made(1, input_tokens=15, hash_ids=(7, 9), hash_block=8),
    )
    assert (a[:8] == b[:8]).all()
    assert not np.isin(a[8:], b[8:]).any()
    assert not np.isin(made(2, input_tokens=4), made(3, input_tokens=4)).any()
    turn, later = made(4, input_tokens=4, session="x"), made(5, input_tokens=9, session="x")
    assert (later[:4] == turn).all()
    assert not np.isin(turn, made(6, input_tokens=4, session="y")).any()


def test_a_request_ends_at_its_true_length_though_it_declares_more() -> None:
    asked = request_of(TraceRequest(arrival_ns=0, input_tokens=3, output_tokens=5, max_tokens=50), 0)
    assert (asked.params.max_tokens, asked.true_output_tokens, asked.stop_ids) == (50, 5, (0,))
    exact = request_of(TraceRequest(arrival_ns=0, input_tokens=3, output_tokens=5), 0)
    assert (exact.params.max_tokens, exact.stop_ids) == (5, ())


@pytest.mark.parametrize(
    ("lengths", "mean", "low", "high"),
    [
        (Fixed(7), 7, 7, 7),
        (Uniform(3, 9), 6, 3, 9),
        (LogNormal(161.31, 161.31), 161.31, 1, 2**31),
        (Zipf(1.0, 1, 100), 100 / sum(1 / n for n in range(1, 101)), 1, 100),
        (Empirical((4, 10)), 7, 4, 10),
    ],
)
def test_lengths_have_the_mean_and_the_bounds_that_were_asked(
    lengths: object, mean: float, low: int, high: int
) -> None:
    drawn = lengths.draw(np.random.default_rng(1), 40_000)  # type: ignore[attr-defined]
    assert drawn.mean() == pytest.approx(mean, rel=0.03)
    assert low <= drawn.min()
    assert drawn.max() <= high
    assert (drawn == lengths.draw(np.random.default_rng(1), 40_000)).all()  # type: ignore[attr-defined]


def test_published_means_are_those_of_the_named_lengths() -> None:
    assert [[one.mean for one in pair] for pair in NAMED.values()] == [  # type: ignore[attr-defined]
        [161.31, 337.99],
        [19.31, 58.45],
    ]


@pytest.mark.parametrize("text", ["", "x", "uniform:3", "uniform:9,3", "zipf:1,2", "fixed:0", "lognormal:0,3"])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        lengths_named("input_tokens", text)


@pytest.mark.parametrize("variation", [0.0, 1.0, 3.0])
def test_arrivals_have_their_rate_and_variation(variation: float) -> None:
    moments = Arrivals(rate=20.0, variation=variation).draw_ns(np.random.default_rng(3), 50_000)
    gaps = np.diff(moments) / 1e9
    assert gaps.mean() == pytest.approx(0.05, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.06, abs=1e-6)


def test_bursts_leave_the_off_time_empty() -> None:
    moments = Arrivals(rate=50.0, on_s=2.0, off_s=8.0).draw_ns(np.random.default_rng(3), 2_000) / 1e9
    assert (moments % 10.0 < 2.0 + 1e-6).all()
    assert moments[-1] > 100


@pytest.mark.parametrize(
    "fields",
    [
        {"rate": 0.0},
        {"rate": -1.0},
        {"rate": float("nan")},
        {"rate": 1.0, "variation": -1.0},
        {"rate": 1.0, "on_s": 0.0},
        {"rate": 1.0, "off_s": -1.0},
    ],
)
def test_arrivals_without_a_rate_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Arrivals(**fields)


def test_a_prefix_tree_gives_each_path_its_own_ids() -> None:
    tree = PrefixTree(block_tokens=4, root_blocks=2, depth=2, fan=3, level_blocks=2)
    random = np.random.default_rng(0)
    paths = {tree.path(random) for _ in range(500)}
    assert len(paths) == 9
    assert {path[:2] for path in paths} == {(0, 1)}
    assert len({path[2:4] for path in paths}) == 3
    assert len({path[4:] for path in paths}) == 9


def test_the_same_seed_makes_the_same_workload_and_turns_grow() -> None:
    made = Synthetic(requests=50, turns=Fixed(5), input_tokens=Uniform(2, 9), think_s=1.0, seed=4)
    assert made.draw() == made.draw()
    assert len(made.draw()) == 50
    for before, after in zip(made.draw(), made.draw()[1:], strict=False):
        if before.session == after.session:
            assert after.input_tokens > before.input_tokens + before.output_tokens
            assert after.think_ns == 10**9


def entry(arrival_s: float, **fields: object) -> TraceRequest:
    return TraceRequest(arrival_ns=round(arrival_s * 1e9), input_tokens=2, output_tokens=2, **fields)  # type: ignore[arg-type]


def test_a_session_sends_its_next_request_after_the_end_of_the_one_before_and_some_thought() -> None:
    source = OpenLoop([entry(0, session="a"), entry(1, session="a", think_ns=10**9), entry(2)])
    assert source.pop().request_id == "0"
    assert source.next_ns() == 2 * 10**9
    source.ended("0", 500_000_000)
    assert source.next_ns() == 1_500_000_000
    assert [source.pop().request_id for _ in range(2)] == ["1", "2"]
    source.ended("1", 9 * 10**9)
    assert source.next_ns() is None


def test_twice_the_speed_is_half_the_time() -> None:
    assert OpenLoop([entry(4)], speed=2.0).next_ns() == 2 * 10**9
    with pytest.raises(ConfigError, match="speed"):
        OpenLoop([entry(4)], speed=0.0)


def test_users_send_again_when_they_have_their_answer() -> None:
    source = ClosedLoop([entry(0) for _ in range(3)], users=2, think_s=0.5)
    assert [source.pop().request_id for _ in range(2)] == ["0", "1"]
    assert source.next_ns() is None
    source.ended("1", 10**9)
    assert source.next_ns() == 1_500_000_000
    source.pop()
    source.ended("0", 2 * 10**9)
    assert source.next_ns() is None
    with pytest.raises(ConfigError, match="users"):
        ClosedLoop([entry(0)], users=0)
