"""What is wrong with a workload is refused in words, by line or by option: nothing is dropped, nothing crashes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from tests.pure.test_simulate_report import BY_HAND

from octavo.cli.main import run as octavo
from octavo.errors import ConfigError
from octavo.simulate.formats import read_trace
from octavo.simulate.lengths import lengths_named
from octavo.simulate.measure import Measured
from octavo.simulate.sources import ClosedLoop, OpenLoop
from octavo.simulate.synthetic import Arrivals, PrefixTree, Synthetic
from octavo.simulate.trace import MOST_TOKENS

GOOD = '{"arrival":0,"input_tokens":10,"output_tokens":5}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def zipped(data: bytes) -> bytes:
    """`data` in gzip without the time of day, which would name the test differently in every worker."""
    return gzip.compress(data, mtime=0)


def own(**fields: object) -> str:
    return json.dumps({"arrival": 0, "input_tokens": 10, "output_tokens": 5} | fields) + "\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + '{"arrival":1,"input_tokens":10\n', "line 2: is not JSON"),
        (GOOD + "\0\0\n", "line 2: is not JSON"),
        (GOOD + "[1, 2]\n", "line 2: is no JSON object"),
        ('{"a":' * 100_000, "line 1: is not JSON"),
        (own(input_tokens=-10), "input_tokens=-10 is not from 1"),
        (own(output_tokens=0), "output_tokens=0 is not from 1"),
        (own(input_tokens=10**26), "is not from 1 to 16777216"),
        (own(input_tokens=2 * 10**9), "is not from 1 to 16777216"),
        ('{"arrival":0,"input_tokens":' + "9" * 5000 + ',"output_tokens":5}', "line 1: is not JSON"),
        (own(input_tokens=10.5), "input_tokens=10.5 is no whole number"),
        (own(input_tokens=True), "input_tokens=True is no whole number"),
        (own(arrival=float("nan")), "arrival=nan is no time"),
        (own(arrival=float("inf")), "arrival=inf is no time"),
        (own(arrival=-1), "arrival=-1 is no time"),
        (own(arrival=1e300), r"arrival=1e\+300 is no time from 0 to 4.6e\+09"),
        (own(session="a", think=1e300), r"think=1e\+300 is no time"),
        (own(arrival=None), "arrival=None is no time"),
        (own(priority=10**11), "priority=100000000000 is not from"),
        (own(colour="red"), "has a field 'colour'"),
        ('{"arrival":0,"input_tokens":10,"input_tokens":20,"output_tokens":5}', "has 'input_tokens' more than once"),
        ('{"Arrival":7,"arrival":0,"input_tokens":20,"output_tokens":5}', "has 'arrival' more than once"),
        (own(hash_ids=[1, "x"]), "hash_ids is no list of whole numbers"),
        (own(hash_ids=[1, 2], hash_block=-4), "hash_block=-4 is not from 1"),
        (own(hash_ids=[1, 2], hash_block=2**24), "2 hash_ids of 16777216 tokens are more than"),
        (own(arrival=5) + own(arrival=1), "line 2: arrives before the request above it"),
        (AZURE + "2023-11-16 18:15:46.68,374\n", "line 2: has 2 of 3 columns"),
        (AZURE + "2023-11-16 18:15:46.68,374,44\nsome day,1,2\n", "line 3: timestamp='some day' is no date"),
        (AZURE + "9" * 200_000 + ",1,2\n", "line 2: is no line of a CSV"),
        (AZURE, "has no request in it"),
        ("", "is empty"),
        ("\n \n", "is empty"),
        ('[{"arrival":0}]', "is one JSON list; write one object a line"),
        ("a,b,c\n1,2,3\n", "of no known kind"),
        ("just words\n", "is neither JSON lines nor a CSV"),
    ],
)
def test_a_trace_that_is_wrong_is_refused_by_its_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(text.encode())
    with pytest.raises(ConfigError, match=said):
        read_trace(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (zipped(GOOD.encode() * 1000)[:60], "is a damaged gzip file"),
        (zipped(GOOD.encode() * 1000)[:-6] + b"xxxxxx", "cannot be read"),
        (zipped(GOOD.encode())[:12] + b"\xff" * 20, "is a damaged gzip file"),
        (GOOD.encode(), "cannot be read"),
        (b"", "is empty"),
        (zipped(b""), "is empty"),
        (zipped(GOOD.encode("utf-16")), "is no text"),
    ],
)
def test_a_damaged_archive_is_refused_in_words(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        read_trace(path)


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + GOOD.encode() * 2,
        GOOD.replace("\n", "\r\n").encode() * 2,
        (GOOD + "\n\n" + GOOD.rstrip()).encode(),
        '{"arrival":0,"input_tokens":10,"output_tokens":5,"session":"a\u2028b"}\n'.encode() + GOOD.encode(),
        b"\xef\xbb\xbf" + (AZURE + "2023-11-16 18:15:46.68,10,5\n" * 2).replace("\n", "\r\n").encode(),
    ],
)
def test_marks_ends_of_lines_and_empty_lines_are_no_fault(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    assert [(entry.input_tokens, entry.output_tokens) for entry in read_trace(path).requests] == [(10, 5), (10, 5)]


def test_wrong_lines_are_skipped_where_asked_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    wrong = ["{", own(arrival=-1).strip(), "[]", "9" * 5000, own(input_tokens=0).strip(), own(output_tokens=0).strip()]
    path.write_text(GOOD + "\n".join(wrong) + "\n" + own(arrival=3))
    found = read_trace(path, on_bad="skip")
    assert len(found.requests) == 2
    assert found.skipped_lines == 6
    assert [line.partition(":")[0] for line in found.skipped] == [f"line {number}" for number in range(2, 7)]


def test_hash_ids_that_do_not_fit_their_prompt_are_a_wrong_line(tmp_path: Path) -> None:
    def line(tokens: int, ids: int) -> str:
        told = {"timestamp": 0, "input_length": tokens, "output_length": 5, "hash_ids": list(range(ids))}
        return json.dumps(told) + "\n"

    path = tmp_path / "trace"
    path.write_text(line(1500, 3) + line(600, 2) + line(100, 7) + line(5000, 10))
    with pytest.raises(ConfigError, match="line 3: 7 hash_ids do not cover its 100 input tokens by blocks of 512"):
        read_trace(path)
    found = read_trace(path, on_bad="skip")
    assert [entry.hash_block for entry in found.requests] == [512, 512, 512]
    assert found.skipped_lines == 1


@pytest.mark.parametrize(
    "text",
    ["0", "-5", "nan", "inf", "10.5", "99999999999", "uniform:5,1", "uniform:0,4", "uniform:1,nan", "lognormal:0,1",
     "lognormal:100,-1", "lognormal:1e30,1", "zipf:0,1,9", "zipf:1.2,0,9", "zipf:1.2,1,99999999999", "zipf:1.2,1.5,9",
     "lognormal:1e-300,1e300", "lognormal:100,1e-300", "lognormal:1e-200,1e200", "zipf:nan,1,9",
     "empirical:", "empirical:5,0", "empirical:5,99999999999", "normal:5,5", ""],
)  # fmt: skip
def test_lengths_that_nobody_can_have_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        lengths_named("input_tokens", text)


@pytest.mark.parametrize(
    "text", ["zipf:1e9,2,100", "zipf:1e-9,1,100", "lognormal:1,1e6", "lognormal:1e7,10", "lognormal:0.001,1"]
)
def test_lengths_that_are_taken_are_lengths_however_they_are_spread(text: str) -> None:
    drawn = lengths_named("input_tokens", text).draw(np.random.default_rng(0), 1000)
    assert 1 <= drawn.min() <= drawn.max() <= MOST_TOKENS


@pytest.mark.parametrize("variation", [0.0, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("rate", [1e-8, 1.0, 1e300])
def test_arrivals_that_are_taken_are_moments_in_order(rate: float, variation: float) -> None:
    try:
        moments = Arrivals(rate=rate, variation=variation).draw_ns(np.random.default_rng(0), 20)
    except ConfigError as error:
        assert "hundred years" in str(error)  # noqa: PT017 - a burst may last that long
    else:
        assert (np.diff(moments) >= 0).all()
        assert moments[0] >= 0


def test_made_requests_refuse_what_cannot_be_made() -> None:
    for wrong in ({"requests": 0}, {"requests": 10**12}, {"seed": -1}, {"max_tokens": 0}, {"max_tokens": -3},
                  {"think_s": 1e300}, {"think_s": float("nan")}):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Synthetic(**({"requests": 5} | wrong))
    for tree in ({"block_tokens": 2**25}, {"depth": 60, "fan": 60, "block_tokens": 1}, {"block_tokens": 0},
                 {"depth": 16_000_000, "block_tokens": 1}):  # fmt: skip
        with pytest.raises(ConfigError):
            PrefixTree(**tree)
    for rate in (0.0, -1.0, float("nan"), 1e-320):
        with pytest.raises(ConfigError, match="rate"):
            Arrivals(rate=rate)
    for variation in (-1.0, float("nan"), float("inf"), 1e300, 1e-300, 5e-324):
        with pytest.raises(ConfigError, match="variation"):
            Arrivals(rate=1.0, variation=variation)
    with pytest.raises(ConfigError, match="hundred years"):
        Synthetic(requests=5, arrivals=Arrivals(rate=1e-300)).draw()
    for speed in (0.0, -1.0, float("nan"), 1e-300, float("inf")):
        with pytest.raises(ConfigError, match="speed"):
            OpenLoop([], speed=speed)
    for think in (-1.0, float("nan"), 1e300):
        with pytest.raises(ConfigError, match="think_s"):
            ClosedLoop([], 1, think_s=think)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--trace TRACE --rate 5", "rate=5.0: makes arrivals, and a trace has its own"),
        ("--trace POOL --rate 5", "rate=5.0: makes arrivals"),
        ("--trace TRACE --max-tokens 5", "max_tokens=5: makes requests"),
        ("--trace TRACE --for 5", "error: for=5.0: is for a pool"),
        ("--trace TRACE --on-bad maybe", "use refuse or skip"),
        ("--trace TRACE --requests 0", "requests=0: must be at least 1"),
        ("--trace TRACE --speed 0", "speed=0.0"),
        ("--trace /nowhere", "cannot be read"),
        ("--rate 0", "rate=0.0: must be above 0"),
        ("--seed -1", "seed=-1: must be at least 0"),
        ("--sort", "sort=True: is for the lines of a trace"),
        ("--off 5", "error: off=5.0: is what comes after a burst"),
        ("--users 0", "users=0: must be at least 1"),
        ("--users 2 --rate 3", "rate=3.0: has no meaning for users"),
        ("--users 2 --speed 2", "speed=2.0: cannot speed up users"),
        ("--think 3", "think=3.0: is for users or turns"),
        ("--lengths alpaca --input-tokens 5", "input_tokens='5': cannot be given beside --lengths"),
        ("--on 0", "error: on=0.0: must be above 0"),
        ("--users 2 --think -1", "error: think=-1.0: must be at least 0"),
        ("--slo-tpot nan", "error: slo_tpot=nan: must be above 0"),
        ("--input-tokens 0", "error: input_tokens='0': tokens=0: a length is at least 1"),
        ("--turns uniform:9,3", "error: turns='uniform:9,3': high=3: must not be below"),
        ("--prefix-tree 0,0,0", "error: prefix_tree='0,0,0': block_tokens=0: must be at least 1"),
        ("--shared-prefix 99999999999", "error: shared_prefix=99999999999: must be from 0 to 16,777,216"),
        ("--placement drop", "placement='drop': is of a tier below the device; give --host-bytes"),
        ("--host-eviction cheapest_to_rebuild", "host_eviction='cheapest_to_rebuild': is of a tier below the device"),
        (
            "--host-bytes 1GB --disk-eviction cheapest_to_rebuild",
            "is of a disk; give --disk-bytes",
        ),
        (
            "--reuse prefix --host-bytes 1GB --host-eviction nope",
            "error: host_eviction='nope': use one of lru, cheapest_to_rebuild",
        ),
        (
            "--reuse prefix --host-bytes 1GB --disk-bytes 1GB --disk-eviction no",
            "error: disk_eviction='no': use one of lru, cheapest_to_rebuild",
        ),
        ("--placement nope", "placement='nope': is of a tier below the device"),
        ("--reuse prefix --host-bytes 1GB --placement nope", "placement='nope': use"),
        ("--host-bytes 1GB --preemption offload --placement drop", "placement='drop': is of blocks that are kept"),
        ("--prefix-wait-tokens 5", "prefix_wait_tokens=5: is of blocks that are kept; give --reuse prefix"),
        ("--eviction cheapest_to_rebuild", "is of blocks that are kept; give --reuse prefix"),
        ("--story chat --requests 5", "requests='given': means nothing to --story chat"),
        ("--story chat --html x.html", "html='given': means nothing"),
        ("--story nobody", "use chat or handover or reservation"),
    ],
)
def test_an_option_that_means_nothing_here_is_refused_by_name(
    flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text(GOOD)
    given = [{"TRACE": str(path), "POOL": str(tmp_path)}.get(one, one) for one in flags.split()]
    assert octavo(["simulate", *([] if "--story" in given else BY_HAND), *given]) == 2
    assert said in capsys.readouterr().err


MOST = 10**26


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        *((f"--{name} {MOST}", f"{name.replace('-', '_')}={MOST}: must be at most 1,0") for name in (
            "tp", "context", "block-size", "max-num-seqs", "max-num-batched-tokens")),
        (f"--kv-cache-memory-bytes {MOST}", "must be at most 1,152,921,504,606,846,976 bytes"),
        ("--kv-cache-memory-bytes 1000TB", "blocks, and 67,108,864 at most are simulated"),
        (f"--host-bytes {MOST}", "blocks, and 67,108,864 at most are simulated"),
        (f"--requests {MOST}", "at most 16,777,216"),
        (f"--max-tokens {MOST}", "from 1 to 16777216"),
        ("--max-num-seqs 2147483648", "0 B left for the KV cache beside weights and the largest step"),
    ],
)  # fmt: skip
def test_an_option_far_too_large_is_refused_by_what_is_the_most(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo(["simulate", *BY_HAND, *flags.split()]) == 2
    assert said in capsys.readouterr().err


def test_more_layers_than_memory_holds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    by_hand = "--device h100-sxm --kv-heads 8 --head-dim 128 --weights-bytes 16GB --layers"
    for command in ("plan", "simulate"):
        assert octavo([command, *by_hand.split(), "2147483648"]) == 2
        assert "must be at most 16,384 layers" in capsys.readouterr().err


LATE = "later than virtual time counts"


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (AZURE + "0001-01-01 00:00:00,9,5\n9999-12-31 00:00:00,9,5\n", ""),
        (GOOD + own(arrival=4e9), "--speed 0.00001"),
        ("".join(own(session="a", think=3e9) for _ in range(3)), ""),
        (GOOD * 3, "--users 1 --think 4e9"),
    ],
)
def test_moments_that_the_clock_cannot_reach_are_refused(
    text: str, flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    assert octavo(["simulate", *BY_HAND, "--trace", str(path), *flags.split()]) == 2
    assert LATE in capsys.readouterr().err


def test_dates_have_any_digits_of_a_second_and_offsets(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    dates = ["2024-05-10 00:00:00.25+00:00", "2024-05-10 00:00:01+00:00", "2024-05-10 00:00:01.5",
             "2024-05-10T00:00:02Z", "2024-05-10 02:00:03.123456789+02:00"]  # fmt: skip
    path.write_text(AZURE + "".join(f"{date},9,5\n" for date in dates))
    gaps = [entry.arrival_ns for entry in read_trace(path).requests]
    assert gaps == [0, 750_000_000, 1_250_000_000, 1_750_000_000, 2_873_456_789]
    for wrong in ("2024-05-10 00:00:00+99:00", "2024-05-10 00:00:00+0x:00", "2024-13-10 00:00:00", "yesterday", ""):
        path.write_text(AZURE + f"{wrong},9,5\n")
        with pytest.raises(ConfigError, match="is no date"):
            read_trace(path)


def test_lengths_without_arrivals_take_those_that_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "30,5\n" * 40)
    flags = ["--trace", str(path), "--kv-cache-memory-bytes", "64MiB", "--no-intervals", "--json"]
    spans = []
    for more in (["--rate", "4"], [], ["--users", "2"]):
        assert octavo(["simulate", *BY_HAND, *flags, *more]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["requests"]["ended"] == {"length": 40}
        assert any("all come at once" in line for line in told["about"]) == (more == [])
        spans.append(told["span_s"])
    assert spans[0] > 5 > 2 * spans[1]


def test_impossible_requests_are_counted_as_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    path.write_text(own(input_tokens=2**24) + GOOD + own(max_tokens=2**24) + own(input_tokens=3000, output_tokens=2000))
    flags = ["--kv-cache-memory-bytes", "1MiB", "--no-intervals", "--json"]
    assert octavo(["simulate", *BY_HAND, "--trace", str(path), *flags]) == 0
    whole = json.loads(capsys.readouterr().out)
    told = whole["requests"]
    assert told["ended"] == {"length": 1}
    assert sum(told["refused"].values()) == 3
    assert "of those refused, the first: prompt='16777216 tokens': the context holds" in whole["about"][-1]


def test_a_device_is_never_busy_for_longer_than_the_run_took(capsys: pytest.CaptureFixture[str]) -> None:
    for depth in ("0", "1"):
        flags = ["--requests", "30", "--rate", "inf", "--output-tokens", "20", "--pipeline-depth", depth]
        assert (
            octavo(["simulate", *BY_HAND, *flags, "--kv-cache-memory-bytes", "64MiB", "--no-intervals", "--json"]) == 0
        )
        told = json.loads(capsys.readouterr().out)
        assert 0.5 < told["steps"]["busy_share"] <= 1.0
        assert sum(told["steps"]["bound_s"].values()) == pytest.approx(told["steps"]["busy_share"] * told["span_s"])
    assert Measured().busy_s == 0


@pytest.mark.parametrize(
    "content",
    ['[{"id": "a", "conversations": [{"from": "human", "value": "hi"}]}]', '{"id": "a", "conversations": []}\n'],
    ids=["one list", "lines"],
)
def test_conversations_given_as_a_trace_are_called_what_they_are(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(content)
    assert octavo(["simulate", *BY_HAND, "--trace", str(path)]) == 2
    said = capsys.readouterr().err
    assert "ShareGPT" in said
    assert "--lengths sharegpt" in said
