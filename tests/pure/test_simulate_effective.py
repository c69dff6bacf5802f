"""Effective capacity: what is live, the search for the most of it, and what tiers gain in a world to be counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.pure.worlds import one_group

from octavo.cli.main import run as octavo
from octavo.cost.step import LinearCost
from octavo.errors import ConfigError
from octavo.policy.bundle import Policies
from octavo.simulate.deploy import Lower, Replica
from octavo.simulate.effective import FURTHEST, Alive, Capacity, Gain, Loads, Tried, capacity_of, gain_of
from octavo.simulate.executors import NANOSECONDS
from octavo.simulate.measure import Objectives
from octavo.simulate.run import Asked
from octavo.simulate.sources import ClosedLoop, OpenLoop
from octavo.simulate.trace import TraceRequest

TURN_TOKENS = 40


def talks(count: int, gap_s: float = 1.0) -> tuple[TraceRequest, ...]:
    """Conversations of two turns, one after the other; the second turns come when all have had their first."""
    think = round(gap_s * count * NANOSECONDS)
    turns = []
    for number in range(count):
        at = round(number * gap_s * NANOSECONDS)
        first = TraceRequest(arrival_ns=at, input_tokens=TURN_TOKENS, output_tokens=8, session=f"t{number}")
        again = TraceRequest(
            arrival_ns=at, input_tokens=TURN_TOKENS + 16, output_tokens=8, session=f"t{number}", think_ns=think
        )
        turns += [first, again]
    return tuple(turns)


def replica(blocks: int) -> Replica:
    """Blocks of 8 positions; a position takes 10 ms, so that what was kept is had much sooner than computed."""
    return Replica(
        model="toy", device="toy", tp=1, layout=one_group(8), slabs=blocks, max_num_seqs=8, max_num_batched_tokens=64,
        max_model_len=128, attention_mode="gqa", cache_dtype="bf16", cost=LinearCost(1e-3, 1e-2, 0.0),
    )  # fmt: skip


def test_a_conversation_is_live_from_its_first_request_to_the_end_of_its_last() -> None:
    entries = (
        TraceRequest(arrival_ns=0, input_tokens=10, output_tokens=2, session="a"),
        TraceRequest(arrival_ns=0, input_tokens=20, output_tokens=3, session="a", think_ns=100),
        TraceRequest(arrival_ns=0, input_tokens=5, output_tokens=1),
        TraceRequest(arrival_ns=0, input_tokens=7, output_tokens=1),
    )
    alive = Alive(OpenLoop(entries), entries)
    for number in (0, 2):
        assert alive.pop().request_id == str(number)
    assert (alive.most_sequences, alive.most_tokens) == (2, 18)
    alive.ended("0", 10)  # thinks
    assert alive.pop().request_id == "3"
    assert (alive.most_sequences, alive.most_tokens) == (3, 12 + 6 + 8)
    alive.ended("2", 20)
    alive.ended("3", 20)
    assert alive.pop().request_id == "1"
    assert (alive.most_sequences, alive.most_tokens) == (3, 26), "the second turn is the same conversation, 23 by now"
    alive.ended("1", 200)
    assert alive.next_ns() is None
    assert alive.known == alive.most_sequences == 3


def kept_up_to(most: float, seen: list[float] | None = None) -> Callable[[float], Tried]:
    def run(load: float) -> Tried:
        if seen is not None:
            seen.append(load)
        return Tried(load, 1.0 if load <= most else 0.5, int(load), int(10 * load))

    return run


def loads_of(first: float, most: float, *, whole: bool) -> Loads:
    return Loads((), lambda load: OpenLoop(()), first, most, whole)


@pytest.mark.parametrize("truth", [1, 2, 3, 7, 8, 9, 100, 101, 127])
@pytest.mark.parametrize("first", [1, 5, 8, 127])
def test_of_whole_loads_the_largest_that_is_kept_is_found(truth: int, first: int) -> None:
    seen: list[float] = []
    found = capacity_of(kept_up_to(truth, seen), 0.9, loads_of(first, 127, whole=True))
    assert found.best is not None
    assert found.best.load <= truth < found.best.load * 1.05 + 1
    assert found.at_least == (truth == 127)
    assert all(load == int(load) and 1 <= load <= 127 for load in seen)
    assert len(seen) == len(set(seen)) == found.runs, "nothing is run twice"


@pytest.mark.parametrize("truth", [0.003, 0.9, 1.0, 1.4, 37.0, 4000.0])
def test_of_speeds_one_within_a_twentieth_is_found(truth: float) -> None:
    found = capacity_of(kept_up_to(truth), 0.9, loads_of(1.0, FURTHEST, whole=False))
    assert found.best is not None
    assert found.best.load <= truth <= 1.06 * found.best.load
    assert found.runs < 20


def test_the_search_ends_where_no_load_is_kept_and_where_every_one_is() -> None:
    none = capacity_of(kept_up_to(0.0), 0.9, loads_of(1.0, FURTHEST, whole=False))
    assert (none.best, none.tokens, none.sequences, none.at_least) == (None, 0, 0, False)
    none = capacity_of(kept_up_to(0.0), 0.9, loads_of(9.0, 100.0, whole=True))
    assert none.best is None
    everything = capacity_of(kept_up_to(1e9), 0.9, loads_of(1.0, FURTHEST, whole=False))
    assert everything.at_least
    assert everything.best is not None
    assert everything.best.load == FURTHEST


def test_tiers_gain_the_conversations_that_the_host_holds_beside_the_device() -> None:
    # A first turn computes 40 positions, 0.4 s; a second one 16 more and what is left of a block, at most 0.3 s, if the
    # first is kept. A conversation is 6 full blocks after its first turn.
    entries = talks(16)
    share = 0.5
    world = replica(20)

    def measured_share(count: int, lower: Lower | None) -> float:
        made = talks(count)
        one = Asked(
            source=lambda: OpenLoop(made), policies=lambda: Policies.named(reuse="prefix"), lower=lower,
            objectives=Objectives(ttft_s=0.3),
        )  # fmt: skip
        found = gain_of(world, one, one, Loads(made, lambda load: OpenLoop(made), 1.0, 1.0, whole=True), share)
        return found.on.best.share if found.on.best is not None else 0.0

    assert measured_share(3, None) == share, "three are kept on the device"
    assert measured_share(8, None) < share
    host = Lower(host_bytes=200 * world.layout.slab_bytes)
    assert measured_share(16, host) == share, "all are kept on the host"
    assert len(entries) == 32


def test_where_the_device_holds_everything_tiers_gain_nothing() -> None:
    entries = talks(6)
    world = replica(400)

    def asked(lower: Lower | None) -> Asked:
        return Asked(
            source=lambda: OpenLoop(entries), policies=lambda: Policies.named(reuse="prefix"), lower=lower,
            objectives=Objectives(ttft_s=0.5),
        )  # fmt: skip

    loads = Loads(entries, lambda load: OpenLoop(entries, speed=load), 1.0, 64.0)
    lower = Lower(host_bytes=10 * world.layout.slab_bytes)
    found = gain_of(world, asked(lower), asked(None), loads, 0.9)
    assert (found.tokens, found.sequences) == (0, 0)
    assert found.on == found.off


def test_nothing_can_be_gained_by_a_promise_that_is_none() -> None:
    entries = talks(2)
    asked = Asked(source=lambda: OpenLoop(entries), objectives=Objectives(ttft_s=1.0))
    loads = Loads(entries, lambda load: ClosedLoop(entries, int(load)), 1.0, 2.0, whole=True)
    for promise in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="slo_share"):
            gain_of(replica(20), asked, asked, loads, promise)
    with pytest.raises(ConfigError, match=r"slo_ttft.*give --slo-ttft"):
        gain_of(replica(20), Asked(source=asked.source), asked, loads, 0.9)


def test_where_all_that_there_are_were_live_more_might_be() -> None:
    everybody, fewer = (Tried(1.0, 1.0, 9, 900, everybody=all_of_them) for all_of_them in (True, False))
    missed = Tried(2.0, 0.1, 9, 900)
    assert Capacity(everybody, missed, 2).at_least
    assert not Capacity(fewer, missed, 2).at_least
    assert not Gain(Capacity(fewer, missed, 2), Capacity(everybody, missed, 2)).known


def test_a_gain_is_a_difference() -> None:
    on, off = (Capacity(Tried(1.0, 1.0, sequences, tokens), None, 1) for sequences, tokens in ((9, 900), (2, 150)))
    assert (Gain(on, off).sequences, Gain(on, off).tokens) == (7, 750)
    assert not Gain(on, off).known, "without tiers more might be kept"
    assert Gain(on, Capacity(off.best, Tried(2.0, 0.0, 3, 200), 1)).known


# -- the command ------------------------------------------------------------------------------------

FLAGS = ["simulate", "--device", "h100-sxm", "--layers", "16", "--kv-heads", "8", "--head-dim", "128",
         "--weights-bytes", "16GB", "--reuse", "prefix", "--kv-cache-memory-bytes", "1GB", "--requests", "60",
         "--input-tokens", "1500", "--output-tokens", "20", "--slo-ttft", "0.1"]  # fmt: skip
SESSIONS = ["--turns", "4", "--think", "20", "--rate", "0.5"]


def test_the_command_finds_that_a_host_gains_something_and_tells_it_in_three_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*FLAGS, *SESSIONS, "--host-bytes", "64GB", "--effective-capacity", "--slo-share", "0.7"]
    assert octavo(asked) == 0
    out = capsys.readouterr().out
    assert "effective capacity gained: " in out
    path = tmp_path / "capacity.prom"
    assert octavo([*asked, "--json", "--metrics", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    gained = told["effective_capacity_gained_tokens"]
    assert gained == told["with_tiers"]["live_tokens"] - told["without_tiers"]["live_tokens"] > 0
    assert f"{gained:+,} tokens" in out
    text = path.read_text()
    assert f'octavo_effective_capacity_gained_tokens{{model="{told["model"]}",tiers="host"}} {float(gained)}' in text
    assert "# TYPE octavo_effective_capacity_gained_sequences gauge" in text
    assert octavo([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == told, "the same command, the same answer"


def test_where_the_device_alone_kept_every_load_nothing_is_told_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "capacity.prom"
    asked = [*FLAGS, "--users", "8", "--requests", "8", "--slo-ttft", "1000", "--host-bytes", "1GB",
             "--disk-bytes", "1GB", "--effective-capacity"]  # fmt: skip
    assert octavo([*asked, "--json", "--metrics", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["without_tiers"]["at_least"]
    assert told["effective_capacity_gained_tokens"] is told["effective_capacity_gained_sequences"] is None
    assert "# TYPE octavo_effective_capacity_gained_tokens gauge" in path.read_text()
    assert "{" not in path.read_text()
    assert octavo(asked) == 0
    assert "effective capacity gained: not known" in capsys.readouterr().out


def test_the_command_takes_users_too(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*FLAGS, "--users", "4", "--host-bytes", "64GB", "--preemption", "offload", "--effective-capacity"]
    assert octavo([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["with_tiers"]["users"] == int(told["with_tiers"]["users"])
    assert told["without_tiers"]["live_sequences"] == told["without_tiers"]["users"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([*SESSIONS, "--effective-capacity"], "effective_capacity=True: is what tiers below the device gain"),
        ([*SESSIONS, "--slo-share", "0.5"], "slo_share=0.5: is of a search; give --effective-capacity"),
        ([*SESSIONS, "--metrics", "m"], "metrics='m': is of a search"),
        ([*SESSIONS, "--host-bytes", "1GB", "--effective-capacity", "--html", "x"], "html='x': is of one run"),
        ([*SESSIONS, "--host-bytes", "1GB", "--effective-capacity", "--price", "2"], "price='2': is of one run"),
        (["--host-bytes", "1GB", "--effective-capacity", "--rate", "inf"], "all requests come at once, at any load"),
        (
            [*SESSIONS, "--host-bytes", "1GB", "--effective-capacity", "--slo-share", "2"],
            "slo_share=2.0: must be",
        ),
        ([*SESSIONS, "--host-bytes", "1GB", "--effective-capacity", "--metrics", "/nowhere/m"], "cannot be written"),
        (["--transfer-bytes-per-second", "1GB"], "transfer_bytes_per_second='1GB': is of a tier below the device"),
        (["--host-bytes", "1GB", "--disk-bytes-per-second", "1GB"], "disk_bytes_per_second='1GB': is of a disk"),
        (["--host-bytes", "1GB", "--transfer-bytes-per-second", "0"], "must be above 0 bytes a second"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo([*FLAGS, *flags]) == 2
    assert says in capsys.readouterr().err


def test_bounds_of_links_make_copies_take_longer(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for flags in ([], ["--transfer-bytes-per-second", "2GB"]):
        assert octavo([*FLAGS, *SESSIONS, "--host-bytes", "64GB", "--json", *flags]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["transfers"]["by_route"]["demote"]["seconds"])
    assert 0 < 2 * seconds[0] < seconds[1]
