"""`Asked`: what a plan is asked for, checked once and never written to.

Owns every option's name, default and limits, and the manual form (layers, heads, width instead of a
config). vLLM's long names are accepted beside ours. What was decided from it is the `Plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from math import isfinite
from typing import Any

from octavo.config import parse_bytes
from octavo.errors import ConfigError
from octavo.geometry.weights_rounded import BITS

SYNONYMS: Mapping[str, str] = {
    "gpu_memory_utilization": "utilization",
    "mem_fraction_static": "utilization",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "dp",
    "kv_cache_dtype": "kv_dtype",
    "max_model_len": "context",
    "context_length": "context",
    "n_ctx": "context",
    "batch": "batch_size",
    "num_hidden_layers": "layers",
    "num_key_value_heads": "kv_heads",
}
"""Other engines' names -> ours."""

_BYTES = (
    "memory",
    "weights_bytes",
    "runtime_bytes",
    "kv_cache_memory_bytes",
    "headroom_bytes",
    "host_memory_bytes",
)
_WHOLE = (
    "devices", "tp", "pp", "dp", "context", "block_size", "max_num_seqs", "max_num_batched_tokens", "batch_size",
    "speculative_tokens", "shared_prefix", "declared_max", "mean", "max", "layers", "kv_heads", "head_dim", "heads",
    "hidden_size", "window",
)  # fmt: skip
_MAY_BE_ZERO = (
    "weights_bytes",
    "runtime_bytes",
    "headroom_bytes",
    "speculative_tokens",
    "shared_prefix",
    "host_memory_bytes",
)
_NUMBERS = ("utilization", "slo_tpot_ms", "price")
MANUAL = ("layers", "kv_heads", "head_dim", "heads", "hidden_size", "window")
_MOST = 2**40
_RANKS = ("devices", "tp", "pp", "dp")
_MOST_RANKS = 2**20
_MOST_BYTES = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Everything a plan depends on besides the model. None: not said."""

    device: str | None = None
    device_file: str | None = None
    memory: int | None = None
    """Bytes of one device, instead of a device's own."""
    devices: int | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    dtype: str | None = None
    """Element type of the weights, where the checkpoint's own is not meant."""
    quantization: str | None = None
    """What octavo rounds linear layers to when it loads them on a CPU."""
    kv_dtype: str = "auto"
    context: int | None = None
    contexts: tuple[int, ...] = ()
    utilization: float = 0.9
    weights_bytes: int | None = None
    """Per device."""
    runtime_bytes: int | None = None
    """Per device."""
    kv_cache_memory_bytes: int | None = None
    """Per device."""
    headroom_bytes: int = 0
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    speculative_tokens: int = 0
    engine: str = "octavo"
    batch_size: int | None = None
    slo_tpot_ms: float | None = None
    price: float | None = None
    """Dollars per device and hour."""
    host_memory_bytes: int | None = None
    shared_prefix: int | None = None
    workload: str | None = None
    """A trace's file."""
    lengths: tuple[int, ...] = ()
    mean: int | None = None
    max: int | None = None
    declared_max: int | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    heads: int | None = None
    hidden_size: int | None = None
    window: int | None = None
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """Names that were said, as opposed to defaults."""

    @property
    def manual(self) -> bool:
        return any(getattr(self, name) is not None for name in MANUAL)

    @classmethod
    def of(cls, **options: Any) -> Asked:
        """Checked and converted. Raises `ConfigError` naming the option, its value and what to do."""
        known = {f.name for f in fields(cls)} - {"given"}
        values: dict[str, Any] = {}
        for name, value in options.items():
            ours = SYNONYMS.get(name, name)
            if ours not in known:
                near = " or ".join(get_close_matches(name, [*sorted(known), *SYNONYMS], n=2))
                raise ConfigError(name, value, f"is no option of a plan{f'; did you mean {near}?' if near else ''}")
            if value is None:
                continue
            if ours in values and values[ours] != value:
                raise ConfigError(name, value, f"contradicts {ours}={values[ours]!r}, which means the same; give one")
            values[ours] = value
        checked = {name: _checked(name, value) for name, value in values.items()}
        ranks = checked.get("tp", 1) * checked.get("pp", 1)
        if "dp" not in checked and checked.get("devices", ranks) % ranks == 0:
            checked["dp"] = checked.get("devices", ranks) // ranks
        asked = cls(**checked, given=frozenset(values))
        asked._agree()
        return asked

    def _agree(self) -> None:
        """What options must have in common."""
        if self.heads is not None and self.kv_heads is not None and self.heads % self.kv_heads:
            raise ConfigError("kv_heads", self.kv_heads, f"must divide heads={self.heads}")
        ranks = self.tp * self.pp * self.dp
        if self.devices is not None and self.devices != ranks:
            what = f"tp x pp x dp = {ranks}" if "dp" in self.given else f"a multiple of tp x pp = {self.tp * self.pp}"
            raise ConfigError("devices", self.devices, f"must be {what}: a replica takes {self.tp * self.pp} of them")
        if self.quantization is not None:
            self._agree_on_rounding(self.quantization)
        if self.mean is not None and self.max is not None and self.mean > self.max:
            raise ConfigError("mean", self.mean, f"must not be above max={self.max}")
        if (self.mean is None) != (self.max is None):
            raise ConfigError("mean" if self.mean is None else "max", None, "--mean and --max belong together")
        if sum((bool(self.lengths), self.workload is not None, self.mean is not None)) > 1:
            raise ConfigError("workload", self.workload, "give one of --workload, --lengths, or --mean with --max")
        longest = max(self.lengths, default=self.max or 0)
        if self.declared_max is not None and longest > self.declared_max:
            raise ConfigError("declared_max", self.declared_max, f"is below the longest sequence, {longest}")

    def _agree_on_rounding(self, kind: str) -> None:
        if kind not in BITS:
            raise ConfigError("quantization", kind, f"must be one of {', '.join(BITS)}")
        if self.engine != "octavo":
            remedy = f"is how octavo loads weights, not {self.engine}; leave it out, or give --weights-bytes"
            raise ConfigError("quantization", kind, remedy)
        if self.weights_bytes is not None:
            raise ConfigError("quantization", kind, "weights are given as --weights-bytes; leave one of both out")


def _checked(name: str, value: Any) -> Any:
    if name in _BYTES:
        number = parse_bytes(name, value)
        if number < (0 if name in _MAY_BE_ZERO else 1):
            raise ConfigError(name, value, "must be above 0 bytes, for example 80GiB")
        if number > _MOST_BYTES:
            raise ConfigError(name, value, f"must be at most {_MOST_BYTES:,} bytes")
        return number
    if name in _WHOLE:
        return _whole(name, value, 0 if name in _MAY_BE_ZERO else 1)
    if name in _NUMBERS:
        return _number(name, value)
    if name in ("contexts", "lengths"):
        return _list(name, value)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(name, value, "must be a text")
    return value


def _whole(name: str, value: Any, low: int) -> int:
    if isinstance(value, str):
        value = int(value) if value.strip().lstrip("-").isdecimal() else value
    most = _MOST_RANKS if name in _RANKS else _MOST
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(name, value, f"must be a whole number of at least {low}")
    if value > most:
        raise ConfigError(name, value, f"must be at most {most:,}")
    return value


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(name, value, "must be a number") from None
    if not isfinite(number) or number <= 0 or (name == "utilization" and number > 1):
        raise ConfigError(name, value, "must be above 0 and at most 1" if name == "utilization" else "must be above 0")
    return number


def _list(name: str, value: Any) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if isinstance(parts, int) or not isinstance(parts, (list, tuple)) or not parts:
        raise ConfigError(name, value, "must be whole numbers with commas between, for example 8192,32768")
    return tuple(_whole(name, part.strip() if isinstance(part, str) else part, 1) for part in parts)
