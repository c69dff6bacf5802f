"""`octavo simulate`: what a deployment would do with a workload, in virtual time, by octavo's own scheduler.

Owns the flags and the ways out (text, JSON, an HTML page, a Chrome trace); workloads are `simulate_workload`'s. All
figures come from `octavo.simulate`; no torch is imported and no weight is read.
"""

from __future__ import annotations

import json
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.simulate_capacity import check_capacity, tell_capacity, with_capacity_options
from octavo.cli.simulate_tiers import bounded, lower_of, with_tier_options
from octavo.cli.writing import write_line
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.simulate.run import Simulated

DEVICE, WORK, POLICY, OUT = "Device and model", "Workload", "Policies", "Output"


def _text(help_text: str, panel: str, *flags: str, metavar: str = "<text>") -> Any:
    return typer.Option(*flags, help=help_text, rich_help_panel=panel, metavar=metavar, show_default=False)


Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="config.json or a model's directory")]
Story = Annotated[str | None, _text("tell and check one: chat, handover, reservation", WORK, metavar="<name>")]
Device = Annotated[str | None, _text("accelerator, for example h100-sxm", DEVICE, metavar="<name>")]
Tp = Annotated[int, typer.Option("--tp", help="tensor-parallel ranks", rich_help_panel=DEVICE)]
Context = Annotated[str | None, _text("longest sequence; the model's own if not given", DEVICE, metavar="<int>")]
BlockSize = Annotated[str | None, _text("positions per block; 16 if not given", DEVICE, metavar="<int>")]
Seqs = Annotated[str | None, _text("sequences at once at most", DEVICE, "--max-num-seqs", metavar="<int>")]
Batched = Annotated[str | None, _text("tokens in a step at most", DEVICE, "--max-num-batched-tokens", metavar="<int>")]
KvBytes = Annotated[str | None, _text("KV cache of one device", DEVICE, "--kv-cache-memory-bytes", metavar="<bytes>")]
KvDtype = Annotated[str | None, _text("keys and values: auto, bf16, fp8, ...", DEVICE, metavar="<type>")]
Quantization = Annotated[
    str | None, _text("linear layers as octavo rounds them on a CPU: int8, or int4", DEVICE, metavar="<type>")
]
Utilization = Annotated[str | None, _text("share of a device in use", DEVICE, metavar="<float>")]
Weights = Annotated[str | None, _text("weights of one device, where known", DEVICE, metavar="<bytes>")]
Price = Annotated[str | None, _text("dollars per device and hour", DEVICE, metavar="<dollars>")]
Layers = Annotated[str | None, _text("by hand, instead of a model: layers", DEVICE, metavar="<int>")]
KvHeads = Annotated[str | None, _text("by hand: key heads of a layer", DEVICE, metavar="<int>")]
HeadDim = Annotated[str | None, _text("by hand: width of a head", DEVICE, metavar="<int>")]
Heads = Annotated[str | None, _text("by hand: query heads of a layer", DEVICE, metavar="<int>")]
Cost = Annotated[str, _text("roofline, fitted:FILE (of octavo calibrate), tables:DIR", DEVICE, metavar="<model>")]
Foreign = Annotated[
    bool,
    typer.Option("--foreign-calibration", help="of another model or machine all the same", rich_help_panel=DEVICE),
]
TraceFile = Annotated[
    str | None,
    _text("a trace: octavo's JSON lines, Azure, Mooncake, BurstGPT, ServeGen, inference-perf", WORK, metavar="<file>"),
]
From = Annotated[float, typer.Option("--from", help="ServeGen: seconds of the pool's day", rich_help_panel=WORK)]
For = Annotated[float, typer.Option("--for", help="ServeGen: so many seconds from then on", rich_help_panel=WORK)]
OnBad = Annotated[str, typer.Option(help="a line of the trace that is wrong: refuse or skip", rich_help_panel=WORK)]
Sort = Annotated[bool, typer.Option(help="put arrivals in order", rich_help_panel=WORK)]
Speed = Annotated[float, typer.Option(help="send so many times as fast as the trace says", rich_help_panel=WORK)]
Requests = Annotated[int | None, typer.Option(help="so many requests: of the trace, or made", rich_help_panel=WORK)]
Rate = Annotated[float, typer.Option(help="requests a second; inf for all at once", rich_help_panel=WORK)]
Variation = Annotated[float, typer.Option(help="of the gaps: 1 is Poisson, more is burstier", rich_help_panel=WORK)]
OnS = Annotated[float | None, typer.Option("--on", help="bursts: seconds of arrivals", rich_help_panel=WORK)]
OffS = Annotated[float, typer.Option("--off", help="bursts: seconds without", rich_help_panel=WORK)]
Lengths = Annotated[str | None, _text("named lengths: sharegpt, alpaca", WORK, metavar="<name>")]
Input = Annotated[
    str, typer.Option(help="512, uniform:16,256, lognormal:161,200, zipf:1.2,16,4096", rich_help_panel=WORK)
]
Output = Annotated[str, typer.Option(help="the same, of outputs", rich_help_panel=WORK)]
Declare = Annotated[int | None, typer.Option(help="max_tokens that every request declares", rich_help_panel=WORK)]
Users = Annotated[int | None, typer.Option(help="closed loop: so many users, one request each", rich_help_panel=WORK)]
Think = Annotated[float, typer.Option(help="seconds before a user, or a session, goes on", rich_help_panel=WORK)]
Turns = Annotated[str | None, _text("turns of a session, as --input-tokens", WORK, metavar="<lengths>")]
Prefix = Annotated[int, typer.Option(help="tokens that all prompts begin with", rich_help_panel=WORK)]
Tree = Annotated[
    str | None, _text("prompts begin with a path of a tree: depth,fan,tokens of a level", WORK, metavar="<d,f,t>")
]
Seed = Annotated[int, typer.Option(help="of all that is drawn", rich_help_panel=WORK)]
Allocation = Annotated[str, typer.Option(help="paged, contiguous-max, -pow2, -oracle", rich_help_panel=POLICY)]
Batching = Annotated[str, typer.Option(help="iteration or request", rich_help_panel=POLICY)]
Admission = Annotated[str, typer.Option(help="max_utilization or guaranteed_no_evict", rich_help_panel=POLICY)]
Reuse = Annotated[str, typer.Option(help="none or prefix", rich_help_panel=POLICY)]
WaitTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="with --reuse prefix, the fewest tokens being computed that others wait for; by cost if not given",
        rich_help_panel=POLICY, metavar="<int>",
    ),
]  # fmt: skip
Preemption = Annotated[str, typer.Option(help="recompute; offload or auto, with --host-bytes", rich_help_panel=POLICY)]
Eviction = Annotated[str, typer.Option(help="lru or cheapest_to_rebuild", rich_help_panel=POLICY)]
Depth = Annotated[int, typer.Option("--pipeline-depth", help="steps in flight: 0 or 1", rich_help_panel=POLICY)]
SloTtft = Annotated[float | None, typer.Option("--slo-ttft", help="seconds to the first token", rich_help_panel=OUT)]
SloTpot = Annotated[float | None, typer.Option("--slo-tpot", help="seconds per output token", rich_help_panel=OUT)]
SloE2e = Annotated[float | None, typer.Option("--slo-e2e", help="seconds to the end", rich_help_panel=OUT)]
Intervals = Annotated[
    bool, typer.Option(help="also simulate the ends of the cost model's interval", rich_help_panel=OUT)
]
Singly = Annotated[
    bool, typer.Option("--single-steps", help="take no steps at once; the same, slower", rich_help_panel=OUT)
]
Html = Annotated[str | None, _text("also write a page with plots, in one file", OUT, metavar="<file>")]
Chrome = Annotated[
    str | None, _text("also write a trace for chrome://tracing or Perfetto", OUT, "--chrome-trace", metavar="<file>")
]
Json = Annotated[bool, typer.Option("--json", help="one JSON object", rich_help_panel=OUT)]


@with_capacity_options
@with_tier_options
def simulate(  # noqa: PLR0913 - one for each flag
    model: Model = None,
    *,
    story: Story = None,
    device: Device = None,
    tp: Tp = 1,
    context: Context = None,
    block_size: BlockSize = None,
    max_num_seqs: Seqs = None,
    max_num_batched_tokens: Batched = None,
    kv_cache_memory_bytes: KvBytes = None,
    kv_dtype: KvDtype = None,
    quantization: Quantization = None,
    utilization: Utilization = None,
    weights_bytes: Weights = None,
    price: Price = None,
    layers: Layers = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = None,
    heads: Heads = None,
    cost: Cost = "roofline",
    foreign_calibration: Foreign = False,
    trace: TraceFile = None,
    from_s: From = 0.0,
    for_s: For = 600.0,
    on_bad: OnBad = "refuse",
    sort: Sort = False,
    speed: Speed = 1.0,
    requests: Requests = None,
    rate: Rate = 1.0,
    variation: Variation = 1.0,
    on_s: OnS = None,
    off_s: OffS = 0.0,
    lengths: Lengths = None,
    input_tokens: Input = "512",
    output_tokens: Output = "128",
    max_tokens: Declare = None,
    users: Users = None,
    think: Think = 0.0,
    turns: Turns = None,
    shared_prefix: Prefix = 0,
    prefix_tree: Tree = None,
    seed: Seed = 0,
    allocation: Allocation = "paged",
    batching: Batching = "iteration",
    admission: Admission = "max_utilization",
    preemption: Preemption = "recompute",
    reuse: Reuse = "none",
    prefix_wait_tokens: WaitTokens = None,
    eviction: Eviction = "lru",
    pipeline_depth: Depth = 0,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    slo_e2e: SloE2e = None,
    intervals: Intervals = True,
    single_steps: Singly = False,
    html: Html = None,
    chrome_trace: Chrome = None,
    as_json: Json = False,
    tiers: Any = None,
    capacity: Any = None,
) -> None:
    """Predict what a deployment would do with a workload, on hardware that need not be there.

    Runs octavo's own scheduler, cache and policies in virtual time against a cost model of the device.
    """
    given = _USUAL | {name: value for name, value in locals().items() if name not in ("tiers", "capacity")}
    given |= tiers | capacity
    asked = {name for name, value in given.items() if value != _USUAL[name]}
    if story is None:
        try:
            _run(given, asked)
        except ConfigError as error:
            if error.field not in _OPTIONS:
                raise
            raise ConfigError(_OPTIONS[error.field], error.value, error.remedy) from None
    else:
        _tell(story, asked, as_json=as_json)


_USUAL = {name: parameter.default for name, parameter in signature(simulate).parameters.items()}


_PLANNED = ("device", "tp", "context", "block_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes",
            "kv_dtype", "quantization", "utilization", "weights_bytes", "price", "layers", "kv_heads", "head_dim",
            "heads")  # fmt: skip


_OPTIONS = {"on_s": "on", "off_s": "off", "from_s": "from", "for_s": "for", "think_s": "think", "ttft_s": "slo_ttft",
            "tpot_s": "slo_tpot", "e2e_s": "slo_e2e", "begin": "from", "length": "for"}  # fmt: skip
"""Names of the library that an operator has not typed, and what was typed."""


def _run(given: dict[str, Any], asked_for: set[str]) -> None:
    from octavo.cli.calibrate_read import costed_replica
    from octavo.cli.simulate_workload import workload
    from octavo.cost.waiting import tokens_worth_waiting_for
    from octavo.observe.chrome_trace import ChromeTrace
    from octavo.planner.asked import Asked as Planned
    from octavo.policy.bundle import Policies
    from octavo.simulate.measure import Objectives
    from octavo.simulate.run import Asked, simulate

    planned = Planned.of(**{name: given[name] for name in _PLANNED})
    replica, said = costed_replica(given["cost"], given["model"], planned, foreign=given["foreign_calibration"])
    replica = bounded(replica, given)
    check_capacity(given, asked_for)
    names = {name: given[name] for name in ("allocation", "batching", "admission", "preemption", "reuse")}
    made = workload(given, asked_for)
    wait = given["prefix_wait_tokens"] or tokens_worth_waiting_for(replica.cost)
    trace = None if given["chrome_trace"] is None else ChromeTrace()
    asked = Asked(
        source=made.source,
        policies=lambda: Policies.named(**names, wait_tokens=wait),
        objectives=Objectives(given["slo_ttft"], given["slo_tpot"], given["slo_e2e"]),
        eviction=given["eviction"],
        lower=lower_of(given),
        depth=given["pipeline_depth"],
        leap=not given["single_steps"],
        intervals=given["intervals"],
        watchers=() if trace is None else (trace,),
    )
    pool = f"{replica.slabs:,} blocks, {replica.kv_tokens:,} tokens of KV cache"
    most = (
        f"{replica.max_num_seqs} sequences and {replica.max_num_batched_tokens:,} tokens a step at most, "
        f"{replica.max_model_len:,} tokens a sequence"
    )
    head = [f"{replica.model} on {replica.tp} x {replica.device}: {pool}, {most}", *said, *made.notes]
    if given["effective_capacity"]:
        alone = names | {"preemption": "recompute"}
        without = replace(asked, policies=lambda: Policies.named(**alone, wait_tokens=wait), lower=None)
        tell_capacity(replica, asked, without, made, head, given)
        return
    done = simulate(replica, asked)
    if done.first_refusal is not None:
        head.append(f"of those refused, the first: {done.first_refusal}")
    if trace is not None:
        _write_file("chrome_trace", given["chrome_trace"], trace.json())
    if given["html"] is not None:
        from octavo.simulate.page import page

        _write_file("html", given["html"], page(head, done.figures, done.measured, done.intervals))
    _print(done, head, as_json=given["as_json"])


def _write_file(option: str, file: str, text: str) -> None:
    try:
        Path(file).write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(option, file, f"cannot be written ({error.strerror or error})") from None


def _tell(story: str, asked: set[str], *, as_json: bool) -> None:
    from octavo.simulate.stories import STORIES

    if story not in STORIES:
        raise ConfigError("story", story, f"there is no such story; use {' or '.join(STORIES)}")
    for name in sorted(asked - {"story", "as_json"}):
        raise ConfigError(
            name, "given", f"means nothing to --story {story}, which has a world of its own; leave it out"
        )
    told = STORIES[story]()
    write_line(json.dumps({"story": story, "lines": told}) if as_json else "\n".join(told))


def _print(done: Simulated, head: list[str], *, as_json: bool) -> None:
    if as_json:
        write_line(json.dumps(done.figures | {"about": head, "intervals": done.intervals}))
        return
    from octavo.simulate.report import lines

    for line in (*head, "", *lines(done.figures, done.intervals)):
        write_line(line)
