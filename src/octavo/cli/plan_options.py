"""The flags of `octavo plan`, made from one table, with vLLM's long names for the same things beside ours.

Converts nothing: a text goes to `octavo.planner.asked`, which has the one check there is. Imports neither
numpy nor torch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer


@dataclass(frozen=True, slots=True)
class PlanFlag:
    name: str
    """As `Asked` calls it."""
    flags: tuple[str, ...]
    metavar: str
    help: str
    panel: str


DEVICE, MODEL, CACHE, WORK, HAND, PRICE = "Device", "Model", "Ledger", "Workload", "By hand", "Time and money"


def _flag(name: str, metavar: str, text: str, panel: str, *others: str) -> PlanFlag:
    return PlanFlag(name, (f"--{name.replace('_', '-')}", *others), metavar, text, panel)


FLAGS = (
    _flag("device", "<name>", "accelerator, for example h100-sxm; --list-devices prints all", DEVICE),
    _flag("device_file", "<toml>", "accelerators of your own, as [[accelerators]] tables", DEVICE),
    _flag("memory", "<bytes>", "memory of one device, for example 80GiB, instead of the device's own", DEVICE),
    _flag("devices", "<int>", "devices in all; a multiple of tp x pp x dp", DEVICE),
    _flag("tp", "<int>", "tensor-parallel ranks", DEVICE, "--tensor-parallel-size"),
    _flag("pp", "<int>", "pipeline stages", DEVICE, "--pipeline-parallel-size"),
    _flag("dp", "<int>", "replicas", DEVICE, "--data-parallel-size"),
    _flag("engine", "<name>", "whose rules charge: octavo, vllm-0.11, sglang, trtllm, llamacpp (or a month)", MODEL),
    _flag("kv_dtype", "<type>", "keys and values: auto, bf16, fp16, fp32, fp8, int8, int4, llama.cpp's q8_0",
          MODEL, "--kv-cache-dtype"),
    _flag("dtype", "<type>", "element type of the weights, where the checkpoint's own is not meant", MODEL),
    _flag("quantization", "<type>", "weights of linear layers as octavo rounds them on a CPU: int8, or int4", MODEL),
    _flag("context", "<int>", "prompt and output; the model's own if not given", MODEL, "--max-model-len"),
    _flag("contexts", "<int,int>", "more lengths to show", MODEL),
    _flag("utilization", "<float>", "share of a device in use; what it covers depends on the engine  [default: 0.9]",
          CACHE, "--gpu-memory-utilization", "--mem-fraction-static"),
    _flag("weights_bytes", "<bytes>", "weights of one device, where known", CACHE),
    _flag("runtime_bytes", "<bytes>", "what running needs besides, of one device, where known", CACHE),
    _flag("kv_cache_memory_bytes", "<bytes>", "KV cache of one device, where known", CACHE),
    _flag("headroom_bytes", "<bytes>", "left free on purpose", CACHE),
    _flag("block_size", "<int>", "positions per block", CACHE),
    _flag("max_num_seqs", "<int>", "sequences at once at most", CACHE),
    _flag("max_num_batched_tokens", "<int>", "tokens in a step at most", CACHE),
    _flag("speculative_tokens", "<int>", "tokens drafted ahead", CACHE, "--num-speculative-tokens"),
    _flag("workload", "<file>", "a trace: CSV or JSON lines with input and output tokens", WORK),
    _flag("lengths", "<int,int>", "final lengths of sequences", WORK),
    _flag("mean", "<int>", "mean length, with --max", WORK),
    _flag("max", "<int>", "longest length, with --mean", WORK),
    _flag("declared_max", "<int>", "the length that a contiguous reservation has to allow for", WORK),
    _flag("shared_prefix", "<int>", "tokens that all sequences begin with", WORK),
    _flag("host_memory_bytes", "<bytes>", "host memory for parked sequences  [default: 64GiB]", WORK),
    _flag("batch_size", "<int>", "sequences in the decode step of the roofline; as many as fit if not given", PRICE),
    _flag("slo_tpot_ms", "<float>", "a decode step may take so long", PRICE),
    _flag("price", "<dollars>", "of one device and hour", PRICE),
    _flag("layers", "<int>", "layers", HAND),
    _flag("kv_heads", "<int>", "key heads of a layer", HAND),
    _flag("head_dim", "<int>", "width of a head", HAND),
    _flag("heads", "<int>", "query heads of a layer", HAND),
    _flag("hidden_size", "<int>", "width of the residual", HAND),
    _flag("window", "<int>", "all layers attend within so many positions", HAND),
)  # fmt: skip

Command = Callable[..., Any]


def with_plan_options(command: Command) -> Command:
    """Give `command` every flag of the table; it receives those that were given as one mapping, `asked`."""
    ours = {flag.name: flag for flag in FLAGS}
    known = inspect.signature(command, eval_str=True).parameters
    parameters = [
        inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(flag))
        for flag in FLAGS
    ]

    @functools.wraps(command)
    def gathered(**given: Any) -> Any:
        asked = dict(_said(ours, given))
        return command(**{name: value for name, value in given.items() if name not in ours}, asked=asked)

    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in known.values() if p.name != "asked"]
    signature = inspect.Signature([*kept, *parameters])
    gathered.__dict__.pop("__wrapped__", None)
    gathered.__signature__ = signature  # type: ignore[attr-defined]
    gathered.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return gathered


def _said(ours: dict[str, PlanFlag], given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if name in ours and value is not None:
            yield name, value


def _annotation(flag: PlanFlag) -> Any:
    option = typer.Option(
        *flag.flags, metavar=flag.metavar, help=flag.help, rich_help_panel=flag.panel, show_default=False
    )
    return Annotated[str, option]
