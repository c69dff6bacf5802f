"""`Config`: what the user asked for, one frozen dataclass per concern. Never written to.

What was decided from it, and why, is `Deployment`. A field that is None was not asked. Every
field carries its help, limits and choices in its metadata, so that the command line and the docs
are made from here. Names are vLLM's wherever it has a name for the thing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Self

from octavo.config_fields import check_fields, parse_bytes
from octavo.config_fields import option_field as _option
from octavo.config_used import USUAL, refuse_unused
from octavo.errors import ConfigError

__all__ = [
    "QUANTISED", "CacheConfig", "Config", "EngineConfig", "ModelConfig", "Option", "SchedulerConfig", "options",
    "parse_bytes",
]  # fmt: skip

QUANTISED = ("int8", "fp8", "fp8_e4m3")
"""The values of `kv_cache_dtype` that keep eight bits and scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model: str | None = _option(
        "text", None, "local directory, hub id or GGUF file; the embedded SmolLM2-135M-Instruct if not given"
    )
    revision: str | None = _option("text", None, "branch, tag or commit of a hub id")
    tokenizer: str | None = _option("text", None, "directory or hub id of the tokenizer, if not the model's own")
    skip_tokenizer_init: bool = _option("flag", False, "load no tokenizer: token ids in, token ids out")
    sanitize_control_tokens: bool = _option(
        "flag", True, "in chats, text that looks like a control token stays text; off: it is one, as in other engines"
    )
    dtype: str = _option(
        "choice",
        "auto",
        "element type of weights and activations; auto keeps the checkpoint's where the device computes in it",
        choices=("auto", "bfloat16", "float16", "half", "float32", "float"),
    )
    quantization: str | None = _option(
        "choice",
        None,
        "on CPU, round the weights of linear layers when they are loaded: to int8, or to int4 with the output head in "
        "int8; a checkpoint that is quantised says so itself",
        choices=("int8", "int4"),
    )
    max_model_len: int | None = _option(
        "int", None, "longest sequence, prompt and output together; the model's own context if not given", low=1
    )
    seed: int = _option("int", 0, "seeds the requests that bring no seed of their own", low=0, high=2**63 - 1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How much attention state there is room for, and how it is kept. The smallest of the limits wins."""

    block_size: int = _option("int", 16, "positions per block", low=1, high=1024)
    gpu_memory_utilization: float | None = _option(
        "float",
        None,
        "share of the memory that the device (on CPU: the machine or cgroup) grants, for everything together; "
        "0.9 on a GPU, a modest KV cache on CPU if not given",
        low=0.0,
        high=1.0,
    )
    kv_cache_memory_bytes: int | None = _option("bytes", None, "bytes of KV cache at most, for example 2GiB", low=1)
    num_gpu_blocks_override: int | None = _option("int", None, "blocks of KV cache at most", low=1)
    max_kv_tokens: int | None = _option("int", None, "tokens of KV cache at most", low=1)
    kv_cache_dtype: str = _option(
        "choice",
        "auto",
        "element type of keys and values; auto is the model's",
        choices=(
            "auto", "bf16", "bfloat16", "fp16", "float16", "half", "fp32", "float32", "float", "int8", "fp8", "fp8_e4m3"
        ),
        planned=("fp8_e5m2", "int4"),
    )  # fmt: skip
    kv_cache_dtype_skip_layers: str | None = _option(
        "text",
        None,
        "with int8 or fp8: layers that stay in the model's type, by index and separated by commas; "
        "sliding_window is all that have a window",
    )
    headroom_bytes: int = _option("bytes", 0, "bytes left unallocated on purpose", low=0)
    allocation: str = _option(
        "choice",
        "paged",
        "where a sequence's state lives: paged, or one run of blocks reserved up front, of the declared maximum, "
        "the next power of two or (for traces) the true length",
        choices=("paged", "contiguous", "contiguous-max", "contiguous-pow2", "contiguous-oracle"),
    )
    reuse: str = _option(
        "choice",
        "none",
        "whether a finished block may serve another request: never, or where the text before it is the same (prefix)",
        choices=("none", "prefix"),
    )
    prefix_wait_tokens: int | None = _option(
        "int",
        None,
        "with reuse, the fewest tokens being computed for which another request that needs them next waits; it "
        "computes fewer again. If not given, by what a step costs: 1 on CPUs, 200 on CUDA",
        low=1,
    )
    eviction: str = _option(
        "choice",
        "lru",
        "which block that is kept for reuse goes when room is needed",
        choices=("lru", "cheapest_to_rebuild"),
    )
    host_bytes: int = _option(
        "bytes", 0, "bytes of host memory for state that is moved from the device rather than lost; 0: none", low=0
    )
    host_eviction: str = _option(
        "choice", "lru", "which block on the host goes when room is needed", choices=("lru", "cheapest_to_rebuild")
    )
    placement: str = _option(
        "choice",
        "write_back",
        "with reuse and host_bytes, which blocks are copied down: none (drop), those whose room is needed "
        "(write_back), all as soon as they are full (write_through), those that cost less to move than to compute "
        "(break_even)",
        choices=("drop", "write_back", "write_through", "break_even"),
    )
    disk_path: str | None = _option("text", None, "directory for blocks that outlive the process, below the host")
    disk_bytes: int | None = _option("bytes", None, "bytes that disk_path may take at most", low=1)
    disk_eviction: str = _option(
        "choice",
        "lru",
        "which block on the disk goes when room is needed; files that processes share go by their last use",
        choices=("lru", "cheapest_to_rebuild"),
    )
    disk_shared: bool = _option(
        "flag", False, "keep a file for each block in disk_path, so that several processes can share them"
    )
    transfer_bytes_per_second: float | None = _option(
        "float", None, "bytes a second that copies between device and host may take; no bound if not given", low=1.0
    )
    disk_bytes_per_second: float | None = _option(
        "float", None, "bytes a second that copies to and from disk_path may take; no bound if not given", low=1.0
    )
    transfer_timeout: float = _option(
        "float", 10.0, "seconds that a sequence waits for state on its way up before it computes it again", low=0.001
    )

    def __post_init__(self) -> None:
        skipped: Any = self.kv_cache_dtype_skip_layers
        if isinstance(skipped, (list, tuple)):
            object.__setattr__(self, "kv_cache_dtype_skip_layers", ",".join(map(str, skipped)) or None)
        check_fields(self)
        if self.kv_cache_dtype_skip_layers is not None and self.kv_cache_dtype not in QUANTISED:
            remedy = f"kv_cache_dtype={self.kv_cache_dtype!r} rounds no layer; leave it out, or ask for int8 or fp8"
            raise ConfigError("kv_cache_dtype_skip_layers", self.kv_cache_dtype_skip_layers, remedy)
        if self.gpu_memory_utilization == 0:
            raise ConfigError("gpu_memory_utilization", self.gpu_memory_utilization, "must be above 0 and at most 1")
        if self.allocation == "contiguous":
            object.__setattr__(self, "allocation", "contiguous-max")
        if self.reuse != "none" and self.allocation != "paged":
            raise ConfigError("reuse", self.reuse, f"needs paged allocation, not {self.allocation}")
        self._check_tiers()

    def _check_tiers(self) -> None:
        refuse_unused({name: getattr(self, name) for name in USUAL})
        if self.host_bytes and self.allocation != "paged":
            raise ConfigError("host_bytes", self.host_bytes, f"needs paged allocation, not {self.allocation}")
        if (self.disk_path is None) != (self.disk_bytes is None):
            raise ConfigError(
                "disk_path", self.disk_path, f"goes together with disk_bytes={self.disk_bytes}; give both"
            )
        if self.disk_path is None:
            if self.disk_shared:
                raise ConfigError("disk_shared", True, "needs disk_path and disk_bytes")
            return
        if not self.host_bytes:
            raise ConfigError(
                "disk_path", self.disk_path, "needs host_bytes: what goes to the disk goes through the host"
            )
        if self.reuse == "none" or self.placement == "drop":
            remedy = f"keeps nothing with reuse={self.reuse} and placement={self.placement}; use reuse=prefix"
            raise ConfigError("disk_path", self.disk_path, remedy)
        if self.disk_shared and self.disk_eviction != "lru":
            raise ConfigError("disk_eviction", self.disk_eviction, "files that processes share go by lru; leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Who runs, who waits, who gives way."""

    max_num_seqs: int | None = _option("int", None, "sequences that run at once at most", low=1)
    max_num_batched_tokens: int | None = _option("int", None, "tokens in one step at most", low=1)
    enable_chunked_prefill: bool = _option("flag", True, "let a prompt fill over several steps (always on)")
    batching: str = _option(
        "choice",
        "iteration",
        "when a request may enter: at every iteration, or when the whole batch before it has ended (request)",
        choices=("iteration", "request"),
    )
    admission: str = _option(
        "choice",
        "max_utilization",
        "who gets in: as many as fit now, some of which may be paused later, or only who can surely finish",
        choices=("max_utilization", "guaranteed_no_evict"),
        planned=("future_bounded",),
    )
    preemption: str = _option(
        "choice",
        "recompute",
        "what happens to the state of a sequence that gives way: computed again, moved to the host (offload), or the "
        "cheaper of the two (auto)",
        choices=("recompute", "offload", "auto"),
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.enable_chunked_prefill:
            raise ConfigError(
                "enable_chunked_prefill",
                False,
                "prompts are always chunked; to take them whole set max_num_batched_tokens to max_model_len",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The machine and the loop."""

    device: str = _option("text", "auto", "auto, cpu, cuda or cuda:N; auto takes CUDA where there is one")
    threads: int | None = _option(
        "int",
        None,
        "threads that compute on a CPU; torch's own number, or the cores granted if fewer",
        low=1,
        high=1024,
    )
    pin: bool = _option("flag", False, "bind each of these threads to a core of its own (Linux)")
    attention_backend: str = _option(
        "choice",
        "auto",
        "attention kernels: octavo's own for CPUs (cpu) or plain torch (reference); auto takes cpu where they were "
        "built and the device is one",
        choices=("auto", "cpu", "reference"),
    )
    linear_backend: str = _option(
        "choice",
        "auto",
        "linear layers: weights packed for octavo's own kernels for CPUs (native) or plain torch; auto measures both",
        choices=("auto", "native", "torch"),
    )
    fuse: str = _option(
        "choice",
        "auto",
        "run layers of a known structure as native programs, where attention and linear layers are native (auto)",
        choices=("auto", "off"),
    )
    pipeline_depth: int = _option("int", 0, "steps in flight while the next one is planned", low=0, high=1)
    audit: bool = _option("flag", False, "check every accounting invariant after every step")

    def __post_init__(self) -> None:
        check_fields(self)
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (":" in self.device and not (kind == "cuda" and index.isdecimal())):
            raise ConfigError("device", self.device, "use auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All that was asked, by concern. `Config.from_kwargs` takes every field by its own name."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    @classmethod
    def from_kwargs(cls, **asked: Any) -> Self:
        """One flat set of names. An unknown one is refused, and the nearest known ones are offered.

        A name of vLLM's that is no option here is accepted with the value that asks for nothing
        (`tensor_parallel_size=1`), and refused with its reason otherwise.
        """
        known = {option.name: option.concern for option in options()}
        parts: dict[str, dict[str, Any]] = {concern: {} for concern in _CONCERNS}
        for name, value in asked.items():
            if name not in known:
                if _changes_nothing(name, value):
                    continue
                raise ConfigError(name, value, _unknown(name, tuple(known)))
            parts[known[name]][name] = value
        return cls(**{concern: make(**parts[concern]) for concern, make in _CONCERNS.items()})

    def __post_init__(self) -> None:
        cache, scheduler = self.cache, self.scheduler
        if scheduler.preemption != "recompute" and not cache.host_bytes:
            raise ConfigError("preemption", scheduler.preemption, "needs room to move to: give host_bytes")
        if cache.host_bytes and cache.reuse == "none" and scheduler.preemption == "recompute":
            raise ConfigError(
                "host_bytes", cache.host_bytes, "is used by nothing: ask for reuse=prefix or preemption=offload"
            )

    def as_kwargs(self) -> dict[str, Any]:
        """The flat form again: `Config.from_kwargs(**config.as_kwargs()) == config`."""
        return {option.name: getattr(getattr(self, option.concern), option.name) for option in options()}


_CONCERNS: Mapping[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "engine": EngineConfig,
}

_ELSEWHERE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "enable_prefix_caching": ((False,), "is spelled reuse here: reuse='prefix'"),
    "tensor_parallel_size": ((1,), "is not served: one device per engine"),
    "pipeline_parallel_size": ((1,), "is not served: one device per engine"),
    "trust_remote_code": ((False,), "is not served: no code from checkpoints is run"),
    "enforce_eager": ((False, True), "is not an option: no graphs are captured; leave it out"),
    "swap_space": ((0,), "is spelled host_bytes here, with preemption='offload'"),
    "cpu_offload_gb": ((0,), "is not served: weights stay on the device"),
    "disable_log_stats": ((False, True), "is not an option: nothing is logged but by the server; leave it out"),
    "speculative_config": ((None,), "is not served: every token comes from the model itself"),
}
"""vLLM's names that people bring along: the values that change nothing here, and why no other is taken."""


@dataclass(frozen=True, slots=True)
class Option:
    """One field of one concern, for whoever prints options or builds a command line."""

    concern: str
    name: str
    kind: str
    """text, flag, int, float, bytes or choice."""
    default: Any
    help: str
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def options() -> Iterator[Option]:
    """Every option there is, in the order of the dataclasses."""
    for concern, make in _CONCERNS.items():
        for f in fields(make):
            meta = f.metadata
            yield Option(concern, f.name, meta["kind"], f.default, meta["help"], meta["choices"])


def _changes_nothing(name: str, value: Any) -> bool:
    harmless, _ = _ELSEWHERE.get(name, ((), ""))
    if value is not None and not isinstance(value, Real):
        return False
    # True equals 1 and False equals 0, but they do not mean it
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in harmless)


def _unknown(name: str, known: tuple[str, ...]) -> str:
    if name in _ELSEWHERE:
        return _ELSEWHERE[name][1]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"is no option; did you mean {' or '.join(near)}?" if near else f"is no option; there are {', '.join(known)}"
