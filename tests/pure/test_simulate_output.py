"""What a simulation leaves behind: the page, the Chrome trace, figures of tiers; and what a pool of clients sends."""

from __future__ import annotations

import io
import json
import tarfile
import xml.dom.minidom
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pure.test_simulate_report import BY_HAND, WORK, replica

from octavo.cli.main import run as octavo
from octavo.errors import ConfigError
from octavo.observe.chrome_trace import ENGINE, SEQUENCES, ChromeTrace
from octavo.planner.wording import size
from octavo.policy.bundle import Policies
from octavo.simulate.axes import decades, named_seconds, round_bytes, round_steps
from octavo.simulate.deploy import Lower
from octavo.simulate.drive import Simulation
from octavo.simulate.gaps import Gaps
from octavo.simulate.measure import Measured, quantiles
from octavo.simulate.page import page
from octavo.simulate.plots import cumulative_shares, gantt, lines_over_time, stacked_over_time
from octavo.simulate.report import figures, lines
from octavo.simulate.servegen import clients_of, draw
from octavo.simulate.sources import OpenLoop
from octavo.simulate.trace import TraceRequest

# -- the page ---------------------------------------------------------------------------------------


def measured(lower: Lower | None = None, *, leap: bool = True, policies: Policies | None = None) -> Measured:
    fold = Measured()
    Simulation(replica().core(policies, lower=lower), OpenLoop(WORK), [fold], leap=leap).run()
    return fold


def svgs(html: str) -> list[xml.dom.minidom.Document]:
    return [xml.dom.minidom.parseString("<svg" + part.split("</svg>")[0] + "</svg>") for part in html.split("<svg")[1:]]


def test_the_page_has_its_five_plots_and_reaches_for_nothing_outside() -> None:
    fold = measured()
    html = page(["toy <model> & more"], figures(fold), fold)
    drawn = svgs(html)
    assert len(drawn) == 5
    for outside in ("<script", "http://", "https://", "url(", "<link", "<img"):
        assert outside not in html
    assert "toy &lt;model&gt; &amp; more" in html
    for title in ("KV cache over time", "Sequences over time", "Latencies", "What bound each step", "80 requests"):
        assert title in html
    bars = list(drawn[-1].getElementsByTagName("rect"))
    assert len(bars) >= 2 * 80  # each request computes its prompt and generates


def test_the_page_of_a_run_in_which_nothing_happened_is_a_page() -> None:
    fold = Measured()
    Simulation(
        replica().core(), OpenLoop([TraceRequest(arrival_ns=0, input_tokens=5000, output_tokens=5)]), [fold]
    ).run()
    assert "<svg" in page([], figures(fold), fold)


def test_areas_are_stacked_to_scale() -> None:
    drawn = svgs(stacked_over_time([0.0, 1.0], [("a", "#111", [10.0] * 2), ("b", "#222", [30.0] * 2)], 80.0, str, "t"))[
        0
    ]
    low, high = (
        [tuple(map(float, p.split(","))) for p in one.getAttribute("points").split()]
        for one in drawn.getElementsByTagName("polygon")
    )
    heights = [max(y for _, y in area) - min(y for _, y in area) for area in (low, high)]
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.02)
    assert min(y for _, y in low) == pytest.approx(max(y for _, y in high))


def test_a_long_run_is_drawn_with_a_bounded_number_of_points() -> None:
    values = np.linspace(0.001, 5.0, 50_000).tolist()
    for drawn in (
        cumulative_shares([("x", values)], "t"),
        lines_over_time([("x", list(enumerate(values)))], "t"),
        stacked_over_time(values, [("x", "#fff", values)], 5.0, str, "t"),
    ):
        assert len(drawn) < 30_000
    assert gantt([], (("a", "#fff"),), "t")


def test_ticks_are_round_numbers_within_their_axis() -> None:
    assert round_steps(414.0) == [0, 100, 200, 300, 400]
    assert round_steps(1.0, 1.0) == [0, 1]
    assert round_steps(0.68) == pytest.approx([0, 0.2, 0.4, 0.6])
    assert round_steps(3605.0, first=3590.0) == pytest.approx([3590, 3595, 3600, 3605])
    assert round_steps(0.0) == [0]
    assert [size(value) for value in round_bytes(110 * 2**30)] == ["0 B", "32 GiB", "64 GiB", "96 GiB"]
    assert [named_seconds(value) for value in decades(3e-4, 250.0)][:3] == ["100 us", "1 ms", "10 ms"]
    assert named_seconds(decades(3e-4, 250.0)[-1]) == "1,000 s"
    assert [named_seconds(value) for value in decades(0.3, 0.3)] == ["100 ms", "200 ms", "500 ms", "1 s"]


@given(st.floats(1e-6, 1e9), st.floats(0, 1e6))
def test_an_axis_has_some_ticks_whatever_it_spans(span: float, first: float) -> None:
    ticks = round_steps(first + span, first=first)
    assert len(ticks) <= 8
    assert all(first - 1e-6 * span <= tick <= (first + span) * (1 + 1e-6) for tick in ticks)
    if span > 1e-6 * first:
        assert len(ticks) >= 2


def test_what_is_seen_at_moments_holds_until_the_next() -> None:
    line = svgs(lines_over_time([("x", [(0.0, 1.0), (1.0, 3.0), (2.0, 3.0)])], "t"))[0].getElementsByTagName("polyline")
    points = [tuple(map(float, p.split(","))) for p in line[0].getAttribute("points").split()]
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(points)), "no slope between two moments"


def test_of_many_requests_those_around_the_worst_are_shown_by_their_place() -> None:
    many = [TraceRequest(arrival_ns=0, input_tokens=20, output_tokens=5) for _ in range(200)]
    fold = Measured()
    Simulation(replica().core(), OpenLoop(many), [fold]).run()
    html = page(["t"], figures(fold), fold)
    assert "80 of 200 requests, by arrival: those around the one that waited longest" in html
    assert "request 200 by arrival: generating" in html
    assert "request 100 by arrival" not in html


# -- the Chrome trace -------------------------------------------------------------------------------


def test_steps_taken_at_once_are_one_slice_and_lanes_are_those_of_single_steps() -> None:
    traces = {}
    for leap in (False, True):
        trace = ChromeTrace()
        Simulation(replica().core(), OpenLoop(WORK), [trace], leap=leap).run()
        traces[leap] = json.loads(trace.json())["traceEvents"]
    lanes = {leap: [slice_ for slice_ in told if slice_["pid"] == SEQUENCES] for leap, told in traces.items()}
    assert sorted(map(str, lanes[True])) == sorted(map(str, lanes[False]))
    engine = [slice_ for slice_ in traces[True] if slice_["pid"] == ENGINE and slice_["ph"] == "X"]
    single = [slice_ for slice_ in traces[False] if slice_["pid"] == ENGINE and slice_["ph"] == "X"]
    assert len(engine) < len(single)
    assert sum(one["args"].get("steps", 1) for one in engine) == len(single)
    assert sum(one["dur"] for one in engine) == pytest.approx(sum(one["dur"] for one in single))


# -- tiers ------------------------------------------------------------------------------------------


def test_state_moved_to_the_host_is_told_by_route_and_nothing_is_computed_again() -> None:
    policies = Policies.named(preemption="offload")
    without, with_host = figures(measured()), figures(measured(Lower(host_bytes=2**22), policies=policies))
    assert without["preemptions"]["count"] > 0
    assert without["preemptions"]["recomputed_tokens"] > 0
    assert with_host["preemptions"]["offloaded"] == with_host["preemptions"]["count"] > 0
    assert with_host["preemptions"]["recomputed_tokens"] == 0
    moved = with_host["transfers"]["by_route"]
    assert moved["demote"]["bytes"] == moved["promote"]["bytes"] > 0
    assert any("copies" in line for line in lines(with_host))
    assert without["transfers"]["by_route"] == {}


def test_hits_are_told_by_the_tier_they_came_from() -> None:
    shared = [
        TraceRequest(arrival_ns=i * 10**9, input_tokens=160, output_tokens=4, hash_ids=(i % 4,) * 10, hash_block=16)
        for i in range(12)
    ]
    fold = Measured()
    core = replica(slabs=44).core(Policies.named(reuse="prefix"), lower=Lower(host_bytes=2**22))
    Simulation(core, OpenLoop(shared), [fold]).run()
    told = figures(fold)["reuse"]
    assert set(told["hit_rate_by_tier"]) >= {"host"}
    assert sum(told["hit_rate_by_tier"].values()) == pytest.approx(told["hit_rate"])


@pytest.mark.parametrize("fields", [{"host_bytes": 0}, {"host_bytes": 2**20, "disk_bytes": -1}])
def test_tiers_of_no_size_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        Lower(**fields)


# -- ServeGen ---------------------------------------------------------------------------------------

DATASET = json.dumps({"0": {"input_tokens": "{}", "output_tokens": "{}"},
                      "600": {"input_tokens": "{10: 0.25, 30: 0.75}", "output_tokens": "{7: 1.0}"}})  # fmt: skip
TRACE = "0,0,0,,0,0\r\n600,20.0,1.0,Gamma,1.0,0.05\r\n1200,40,2.0,Weibull,1.0,0.025\r\n1800,0,0,,0,0\r\n"


def pool(trace: str = TRACE, dataset: str = DATASET) -> Mapping[str, bytes]:
    return {"data/chunk-3-trace.csv": trace.encode(), "data/chunk-3-dataset.json": dataset.encode()}


def test_a_client_sends_at_the_rate_and_with_the_lengths_of_its_window() -> None:
    clients = clients_of(pool(), "toy")
    made = draw(clients, begin_s=600.0, length_s=1200.0, seed=3)
    at = np.array([entry.arrival_ns for entry in made]) / 1e9
    assert (np.diff(at) >= 0).all()
    assert (at < 600).sum() == pytest.approx(20 * 600, rel=0.05)
    assert (at >= 600).sum() == pytest.approx(40 * 600, rel=0.05)
    inputs = np.array([entry.input_tokens for entry in made])
    assert set(inputs.tolist()) == {10, 30}
    assert (inputs == 30).mean() == pytest.approx(0.75, abs=0.02)
    assert {entry.output_tokens for entry in made} == {7}
    assert draw(clients, begin_s=600.0, length_s=1200.0, seed=3) == made
    assert len(draw(clients, begin_s=600.0, length_s=1200.0, limit=9)) == 9


@pytest.mark.parametrize(
    ("trace", "dataset", "says"),
    [("0,1,1\n", DATASET, "has 3 of 6"), ("0,x,1,,1,1\n", DATASET, "no window"), (TRACE, "[]", "no JSON object"),
     ("600,1,1,,1,1\n0,1,1,,1,1\n", DATASET, "times must rise"), ("0,1,1,Pareto,1,1\n", DATASET, "neither Gamma"),
     (TRACE, "{}", "no client with both")],
)  # fmt: skip
def test_a_pool_that_is_wrong_says_where(trace: str, dataset: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        clients_of(pool(trace, dataset), "toy")


def test_a_time_at_which_nobody_sends_is_refused() -> None:
    with pytest.raises(ConfigError, match="nobody sends"):
        draw(clients_of(pool(), "toy"), begin_s=0.0, length_s=60.0)


def test_the_command_reads_a_pool_from_a_folder_and_from_an_archive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, archive = tmp_path / "pool", tmp_path / "pool.tar.gz"
    folder.mkdir()
    with tarfile.open(archive, "w:gz") as packed:
        for name, data in pool().items():
            (folder / Path(name).name).write_bytes(data)
            member = tarfile.TarInfo(name)
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))
    told = []
    for where in (folder, archive):
        flags = ["--trace", str(where), "--from", "600", "--for", "3", "--no-intervals"]
        assert octavo(["simulate", *BY_HAND, *flags]) == 0
        told.append(capsys.readouterr().out.splitlines()[2:])
    assert told[0] == told[1]
    assert "submitted" in told[0][1]


# -- the command ------------------------------------------------------------------------------------


def test_the_command_writes_a_page_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, trace = tmp_path / "out.html", tmp_path / "out.json"
    flags = ["--requests", "20", "--prefix-tree", "1,3,32", "--reuse", "prefix", "--no-intervals"]
    assert octavo(["simulate", *BY_HAND, *flags, "--html", str(html), "--chrome-trace", str(trace)]) == 0
    assert len(svgs(html.read_text())) == 5
    assert json.loads(trace.read_text())["traceEvents"]
    for factor, source in (("weight_bandwidth", "kernel timings of vLLM 0.19"), ("exchange_s", "assumed: latency")):
        assert factor in html.read_text()
        assert source in html.read_text()
    assert "submitted" in capsys.readouterr().out
    assert octavo(["simulate", *BY_HAND, *flags, "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert len(cost) == 9
    assert all(one["source"] and one["value"] for one in cost.values()), "each with where it is from"
    assert octavo(["simulate", *BY_HAND, *flags, "--html", str(tmp_path / "no" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--preemption", "offload"], "host tier"), (["--disk-bytes", "1GB"], "host tier"),
     (["--host-bytes", "1GB", "--placement", "x"], "placement='x'"), (["--prefix-tree", "1,2"], "prefix_tree='1,2'"),
     (["--host-bytes", "1GB", "--allocation", "contiguous-max"], "contiguous")],
)  # fmt: skip
def test_tiers_and_trees_that_make_no_sense_are_refused(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo(["simulate", *BY_HAND, "--requests", "4", *flags]) == 2
    assert says in capsys.readouterr().err


# -- many tokens ------------------------------------------------------------------------------------


def test_gaps_of_many_tokens_keep_their_mean_and_their_percentiles_and_no_more_memory() -> None:
    generator = np.random.default_rng(0)
    few, many, exact = Gaps(), Gaps(), []
    for _ in range(300):
        values = generator.lognormal(-4, 1, 1000)
        many.add(values, 2.0)
        exact.append(values)
    few.add(exact[0])
    assert few.all()[0].tolist() == exact[0].tolist()
    told, true = quantiles(*many.all()), quantiles(np.concatenate(exact))
    assert told is not None
    assert true is not None
    assert told["mean"] == pytest.approx(true["mean"], rel=1e-9)
    for name in ("p50", "p90", "p99"):
        assert told[name] == pytest.approx(true[name], rel=2e-3)
    assert len(many.all()[0]) < 300_000
    assert many.all()[1].sum() == pytest.approx(600_000)
