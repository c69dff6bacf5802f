"""Seconds of a step from a model's geometry and a device's peaks, without a measurement.

One fused step reads the weights once and multiplies them with all its tokens, reads the state of every chunk, and
meets queries with keys. Each part takes as long as the slower of its arithmetic and its reading, at stated shares of
the device's peaks; tensor ranks exchange activations twice a layer. Owns the factors and where each is from; what is
read and multiplied is the planner's `Machine` and the geometry's.

    weights    max(2 x parameters x tokens / flops, weights read / bandwidth)
    attention  by law (full, window, chunk): max(flops of query-key pairs, bytes of positions read and written)
    exchange   2 a layer: 2 (r - 1) / r x tokens x hidden bytes / link, and a latency each
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.cost.laws import Law, laws_of
from octavo.cost.step import Float64, StepShape
from octavo.errors import ConfigError
from octavo.planner.roofline import Machine

_TABLES = "kernel timings of vLLM 0.19 on RTX 4090 and RTX PRO 6000, Llama-3.1-8B and Qwen3-32B (LLMServingSim, MIT)"


@dataclass(frozen=True, slots=True)
class Factor:
    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Shares of a device's dense peaks that kernels reach, and what a step costs besides."""

    weight_bandwidth: Factor = Factor(0.89, f"0.82 to 0.95 of peak at 1 to 16 tokens, matrices over 30 MB: {_TABLES}")
    weight_flops: Factor = Factor(0.80, f"0.63 to 1.0 of peak at 1,024 and 2,048 tokens: {_TABLES}")
    state_bandwidth: Factor = Factor(0.92, f"0.90 to 0.95 of peak in decode over 262,144 positions and more: {_TABLES}")
    attention_flops: Factor = Factor(0.58, f"0.44 to 0.84 of peak in chunks of 1,024 and 2,048 tokens: {_TABLES}")
    layer_s: Factor = Factor(15e-6, f"six small kernels of 2 to 4 us at few tokens: {_TABLES}")
    link: Factor = Factor(0.75, "assumed: a ring all-reduce of megabytes on NVLink; not measured here")
    exchange_s: Factor = Factor(8e-6, "assumed: latency of a small all-reduce within a node; not measured here")
    host_s: Factor = Factor(
        1e-3, "assumed: deciding, preparing and sampling a step; `octavo calibrate` is to measure it"
    )
    interval: tuple[float, float] = (0.75, 1.35)
    """A step takes so many times its prediction, from and to, four times in five."""
    interval_source: str = (
        "designed steps from five sets of kernel timings over their predictions: the least tenth and the largest "
        f"nine-tenths of any device, model and number of ranks (benchmarks/prediction_vllm.py); {_TABLES}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost:
    machine: Machine
    ranks: int = 1
    """Tensor-parallel devices; the machine is one of them."""
    factors: Factors = field(default_factory=Factors)
    laws: tuple[Law, ...] = field(init=False)
    _flops: tuple[float, float] = field(init=False)
    """Of the weights' type and of the state's, looked up once."""
    _state_rates: tuple[float, float] = field(init=False)
    """Bytes of state read in a second, and operations of attention done."""
    _fixed: dict[int, float] = field(init=False, default_factory=dict, compare=False, repr=False)
    """What does not depend on contexts, by the tokens of a step."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "laws", laws_of(self.machine.geometry))
        device = self.machine.accelerator
        object.__setattr__(self, "_flops", (device.flops(self.machine.weight_bits), device.flops(16)))
        factors = self.factors
        read_per_s = device.bandwidth_bytes_per_s * factors.state_bandwidth.value
        met_per_s = self._flops[1] * factors.attention_flops.value
        object.__setattr__(self, "_state_rates", (read_per_s, met_per_s))
        if self.ranks > 1 and self.machine.accelerator.device_link_bytes_per_s is None:
            raise ConfigError(
                "device", self.machine.accelerator.name, "has no link between devices in the table: use tp=1, or a "
                "device file with gpu_link_gbs_one_way"
            )  # fmt: skip

    @property
    def interval(self) -> tuple[float, float]:
        return self.factors.interval

    def host_seconds(self, shape: StepShape) -> float:
        return self.factors.host_s.value

    def step_interval(self, shape: StepShape) -> tuple[float, float]:
        seconds = self.step_seconds(shape) + self.host_seconds(shape)
        return seconds * self.interval[0], seconds * self.interval[1]

    def step_seconds(self, shape: StepShape) -> float:
        seconds = self._fixed_s(shape)
        starts, counts = shape.starts, shape.counts
        for law in self.laws:
            if law.kind == "full":
                read = pairs = shape.context_tokens
                if shape.tokens != shape.chunks:
                    pairs = int(counts.dot(2 * starts + counts + 1)) // 2
            else:
                read, pairs = int(law.read(starts, counts).sum()), int(law.pairs(starts, counts).sum())
            seconds += max(self._attention_parts_s(law, read, pairs, shape.tokens))
        return seconds

    def run_seconds(self, shape: StepShape, steps: int) -> Float64:
        seconds: Any = self._fixed_s(shape)
        later = np.arange(steps, dtype=np.int64)
        for law in self.laws:
            if law.kind == "full":
                read = shape.context_tokens + later * shape.chunks
            else:
                one = np.ones((1, 1), dtype=np.int64)
                read = law.read(shape.starts[None, :] + later[:, None], one).sum(axis=1)
            pairs = np.zeros_like(read) if law.kind == "constant" else read
            seconds = seconds + np.maximum(*self._attention_parts_s(law, read, pairs, shape.tokens))
        return seconds if self.laws else np.full(steps, seconds)

    def _fixed_s(self, shape: StepShape) -> float:
        """Weights, small kernels and exchange: what does not depend on contexts."""
        fixed = self._fixed.get(shape.tokens)
        if fixed is None:
            fixed = self._fixed[shape.tokens] = self._without_contexts_s(shape)
        return fixed

    def _without_contexts_s(self, shape: StepShape) -> float:
        machine, factors = self.machine, self.factors
        device = machine.accelerator
        flops = 2 * machine.active_parameters * shape.tokens
        arithmetic = flops / (self._flops[0] * factors.weight_flops.value)
        reading = machine.weights_read_bytes(shape.tokens)
        weights = max(arithmetic, reading / (device.bandwidth_bytes_per_s * factors.weight_bandwidth.value))
        layers = machine.geometry.num_layers
        return weights + layers * factors.layer_s.value + self._exchange_s(shape.tokens, layers)

    def _exchange_s(self, tokens: int, layers: int) -> float:
        link = self.machine.accelerator.device_link_bytes_per_s
        if self.ranks == 1 or link is None:
            return 0.0
        moved = 2 * (self.ranks - 1) / self.ranks * tokens * self.machine.geometry.hidden_size * 2
        return 2 * layers * (moved / (link * self.factors.link.value) + self.factors.exchange_s.value)

    def _attention_parts_s(self, law: Law, read: Any, pairs: Any, tokens: int) -> tuple[Any, Any]:
        """(seconds of reading, seconds of arithmetic), of one step or of many: the same sums either way."""
        read_per_s, met_per_s = self._state_rates
        reading = (read * law.bytes_per_position + tokens * law.written_bytes) / read_per_s
        return reading, pairs * law.flops_per_pair / met_per_s
