"""What a simulation reports: each figure against a second way of counting it, and the same from leaps and steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.pure.planner_shapes import LLAMA_8B
from tests.pure.worlds import one_group

from octavo.cli.main import run as octavo
from octavo.cost.step import LinearCost, StepShape
from octavo.errors import ConfigError, InvariantViolation
from octavo.planner.asked import Asked as Planned
from octavo.policy.bundle import Policies
from octavo.scheduling.events import Finished, Refused
from octavo.scheduling.leap import DecodeRun, expand
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate import stories
from octavo.simulate.deploy import Replica, replica_of
from octavo.simulate.drive import Happening, Simulation
from octavo.simulate.lengths import Uniform
from octavo.simulate.measure import Measured, Objectives, quantiles
from octavo.simulate.report import figures, lines
from octavo.simulate.run import Asked, simulate
from octavo.simulate.sources import ClosedLoop, OpenLoop
from octavo.simulate.synthetic import Arrivals, Synthetic
from octavo.simulate.trace import TraceRequest

LAYERS = {"layers": 4, "kv_heads": 2, "head_dim": 16, "weights_bytes": 10**9}


def replica(slabs: int = 60, *, seqs: int = 8, length: int = 400) -> Replica:
    return Replica(
        model="toy", device="toy", tp=1, layout=one_group(8), slabs=slabs, max_num_seqs=seqs, max_num_batched_tokens=64,
        max_model_len=length, attention_mode="gqa", cache_dtype="bf16", cost=LinearCost(1e-3, 1e-5, 1e-7),
        price_per_hour=3.6,
    )  # fmt: skip


WORK = Synthetic(
    requests=80, arrivals=Arrivals(rate=60.0), input_tokens=Uniform(5, 120), output_tokens=Uniform(1, 60), seed=3
).draw()


class Everything:
    def __init__(self) -> None:
        self.events: list[Happening] = []

    def observe(self, happenings: list[Happening]) -> None:
        self.events.extend(happenings)

    def at_rest(self, now_ns: int, scheduler: Scheduler) -> None:
        pass


def measured(*, leap: bool, depth: int = 0, slabs: int = 60) -> tuple[Measured, Everything]:
    kept, figures_ = Everything(), Measured()
    core = replica(slabs).core(depth=depth)
    Simulation(core, OpenLoop(WORK), [kept, figures_], leap=leap).run()
    return figures_, kept


@pytest.mark.parametrize("depth", [0, 1])
def test_figures_are_those_of_the_records_and_tokens(depth: int) -> None:
    fold, kept = measured(leap=False, depth=depth)
    told = figures(fold, Objectives(ttft_s=0.005, tpot_s=0.00112), 3.6)
    records = [event.record for event in kept.events if isinstance(event, Finished)]
    ttft = sorted(r.first_token_s - r.arrival_s for r in records if r.first_token_s is not None)
    assert told["requests"] == {"submitted": 80, "ended": {"length": 80}, "refused": {}}
    assert told["ttft_s"]["p50"] == ttft[39]
    assert told["ttft_s"]["max"] == ttft[-1]
    tpot = [r.decode_time / (r.output_tokens - 1) for r in records if r.output_tokens > 1]
    assert told["tpot_s"]["mean"] == pytest.approx(sum(tpot) / len(tpot))
    outputs = sum(r.output_tokens for r in records)
    span = max(r.finished_s for r in records) - min(r.arrival_s for r in records)
    assert told["span_s"] == pytest.approx(span)
    assert told["throughput"]["output_tokens_per_s"] == pytest.approx(outputs / span)
    assert told["dollars_per_million_output_tokens"] == pytest.approx(3.6 / 3600 / (outputs / span) * 1e6)
    gaps, weights = fold.gaps()
    assert weights.sum() == outputs - 80
    assert (gaps * weights).sum() == pytest.approx(sum(r.decode_time for r in records))
    good = sum(r.first_token_s - r.arrival_s <= 0.005 and (r.output_tokens < 2 or
               r.decode_time / (r.output_tokens - 1) <= 0.00112) for r in records)  # fmt: skip
    assert told["goodput"]["requests"] == good
    assert 0 < good < 80
    preempted = sum(r.preemptions for r in records)
    assert told["preemptions"]["count"] == preempted > 0
    assert told["preemptions"]["recomputed_tokens"] == sum(r.recomputed_tokens for r in records)


def test_leaps_and_steps_come_to_the_same_figures() -> None:
    singly, at_once = (figures(measured(leap=leap)[0]) for leap in (False, True))
    for told in (singly, at_once):
        del told["kv"]["over_time"], told["kv"]["mean_waste_share"]  # looked at between steps, of which there are fewer
    assert flat(singly) == pytest.approx(flat(at_once))
    _, kept = measured(leap=True)
    assert sum(len(list(expand(e))) for e in kept.events if isinstance(e, DecodeRun)) > 300


def flat(told: object, name: str = "") -> dict[str, float]:
    if isinstance(told, dict):
        return {k: v for key, value in told.items() for k, v in flat(value, f"{name}.{key}").items()}
    return {name: -1.0 if told is None else float(told)}  # type: ignore[arg-type]


def test_the_cache_is_looked_at_a_bounded_number_of_times_over_the_whole_run() -> None:
    fold, _ = measured(leap=False)
    assert 100 < len(fold.looks) <= 512
    assert fold.looks[-1].at_s > 0.9 * fold.end_s
    assert max(look.used for look in fold.looks) <= 60 * fold.slab_bytes
    assert all(look.useful + look.internal + look.reserved <= look.used for look in fold.looks)


def test_quantiles_by_weight_are_those_of_repeated_values() -> None:
    values, weights = np.array([5.0, 1.0, 3.0, np.nan]), np.array([2.0, 7.0, 91.0, 4.0])
    repeated = np.repeat(values[:3], [2, 7, 91])
    assert quantiles(values, weights) == pytest.approx(quantiles(repeated))
    assert quantiles(np.array([np.nan])) is None


def test_what_can_never_fit_is_counted_as_refused_and_its_user_goes_on() -> None:
    huge = TraceRequest(arrival_ns=0, input_tokens=5000, output_tokens=5)
    small = TraceRequest(arrival_ns=0, input_tokens=5, output_tokens=5)
    kept, fold = Everything(), Measured()
    core = replica().core()
    Simulation(core, ClosedLoop([huge, small, huge, small], users=1), [kept, fold]).run()
    told = figures(fold)
    assert told["requests"]["ended"] == {"length": 2}
    assert sum(told["requests"]["refused"].values()) == 2
    assert any(isinstance(event, Refused) for event in kept.events)


def test_intervals_hold_the_prediction_and_slower_steps_take_longer() -> None:
    by_hand = replica_of(None, Planned.of(device="h100-sxm", kv_cache_memory_bytes=10**8, **LAYERS))
    done = simulate(by_hand, Asked(source=lambda: OpenLoop(WORK), intervals=True))
    low, high = done.intervals["tpot_s mean"]
    assert low < done.figures["tpot_s"]["mean"] < high
    assert done.intervals.keys() >= {"ttft_s p50", "requests_per_s"}
    assert any("to" in line for line in lines(done.figures, done.intervals))


def test_rounded_weights_take_a_simulated_step_less_time_by_the_bytes_that_it_reads() -> None:
    def step(kind: str | None) -> float:
        planned = Planned.of(device="epyc-9654", quantization=kind)
        return replica_of(LLAMA_8B, planned).cost.step_seconds(StepShape.decode([100]))

    plain, eight, four = step(None), step("int8"), step("int4")
    assert 1.6 < plain / eight < 2
    assert 1.4 < eight / four < 1.7


@pytest.mark.parametrize(
    ("fields", "name"),
    [({}, "device"), ({"device": "h100-sxm", "pp": 2}, "pp"), ({"device": "h100-sxm", "engine": "vllm"}, "engine")],
)
def test_what_cannot_be_simulated_is_refused(fields: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        replica_of(None, Planned.of(**LAYERS, **fields))


def test_the_same_workload_twice_gives_the_same_report() -> None:
    first, second = (json.dumps(figures(measured(leap=True)[0])) for _ in range(2))
    assert first == second


# -- stories ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(stories.STORIES))
def test_a_story_tells_its_steps_and_holds(name: str) -> None:
    told = stories.STORIES[name]()
    assert len(told) > 8


def test_a_story_that_did_not_happen_is_no_story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stories.Policies, "named", lambda **_: Policies())
    with pytest.raises(InvariantViolation, match="story"):
        stories.reservation()


# -- the command ------------------------------------------------------------------------------------

BY_HAND = ["--device", "h100-sxm", "--layers", "4", "--kv-heads", "2", "--head-dim", "16", "--weights-bytes", "1GB"]


def test_the_command_reports_a_synthetic_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert octavo(["simulate", *BY_HAND, "--requests", "20", "--rate", "50", "--slo-ttft", "1"]) == 0
    out = capsys.readouterr().out
    for word in ("ttft", "tpot", "goodput      100.0%", "KV waste", "to"):
        assert word in out


def test_the_command_reads_a_trace_and_says_what_it_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival": 0, "input_tokens": 9, "output_tokens": 4}\nnonsense\n')
    assert octavo(["simulate", *BY_HAND, "--trace", str(path)]) == 2
    assert "line 2: is not JSON" in capsys.readouterr().err
    assert octavo(["simulate", *BY_HAND, "--trace", str(path), "--on-bad", "skip", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["requests"]["submitted"] == 1
    assert "skipped 1 lines" in " ".join(told["about"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--rate", "0"], "rate=0.0"), (["--story", "x"], "no such story"), (["--users", "0"], "users=0"),
     (["--speed", "0"], "speed=0.0"), (["--requests", "0"], "requests=0"), (["--lengths", "x"], "lengths='x'"),
     (["--allocation", "x"], "allocation='x'"), (["--slo-ttft", "0"], "error: slo_ttft=0.0"), (["--tp", "3"], "tp=3"),
     (["--users", "2", "--turns", "3"], "users=2"), (["--shared-prefix", "-1"], "shared_prefix=-1")],
)  # fmt: skip
def test_wrong_input_is_one_line_that_names_the_option(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo(["simulate", *BY_HAND, *flags]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
