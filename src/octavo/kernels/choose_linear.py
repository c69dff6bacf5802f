"""Which linear layers serve: `choose_linear`. What was asked, the device, what was built and a short measurement.

Owns the choice and its reason, which the start table prints. There is one choice for all row counts: torch's sums
and ours differ in their last bits, so a switch by the number of rows would make a sequence's tokens depend on how
many others run beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear

from octavo.errors import ConfigError
from octavo.kernels.cpu import load_native
from octavo.kernels.linear import PackedLinear

DECODE_ROWS, PREFILL_ROWS = 8, 256
PROMPT_PER_OUTPUT = 2
"""Tokens of prompts for each token of output, by which the two measurements are weighed."""
CLEARLY = 0.5
"""Torch is taken where its time is this share of ours or less: a noisy machine must not flip the choice."""
ROUNDS = 5
MOST_SECONDS = 0.5
MOST_ELEMENTS = 2**22
"""Of the matrix that is measured."""


def choose_linear(
    asked: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, quantization: str | None = None
) -> tuple[str, str]:
    """`native` or `torch`, and why. `shape`: (outputs, inputs) of the model's usual matrix.

    Where weights are to be rounded, `auto` measures nothing: torch's own layers would keep them as they are.
    """
    if asked == "torch":
        return "torch", "as asked"
    if device.type != "cpu":
        if asked == "native":
            raise ConfigError("linear_backend", asked, f"these kernels do not run on {device}; use auto or torch")
        return "torch", f"auto: torch's own on {device}"
    if load_native() is None:
        missing = "the native kernels were not built when octavo was installed; with a C++ compiler, install again"
        if asked == "native":
            raise ConfigError("linear_backend", asked, f"{missing}, or use auto or torch")
        return "torch", f"auto: torch's own, since {missing}"
    if asked == "native":
        return "native", "as asked: packed weights, octavo's C++ kernels"
    if quantization is not None:
        return "native", f"auto: octavo's C++ kernels, which alone multiply weights in {quantization}"
    ours, theirs = measured(shape, dtype)
    saying = f"{1e6 * ours:.1f} us a token beside torch's {1e6 * theirs:.1f} for {shape[0]} x {shape[1]}"
    if theirs <= CLEARLY * ours:
        return "torch", f"auto: octavo's kernels take {saying}"
    return "native", f"auto: octavo's kernels take {saying}"


def measured(shape: tuple[int, int], dtype: torch.dtype) -> tuple[float, float]:
    """Seconds for a token of our mixture through one matrix: (ours, torch's), the fastest of a few rounds each."""
    outputs, inputs = shape
    outputs = max(1, min(outputs, MOST_ELEMENTS // inputs))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    packed = PackedLinear([weight])
    times = [0.0, 0.0]
    with torch.inference_mode():
        for rows, share in ((DECODE_ROWS, 1), (PREFILL_ROWS, PROMPT_PER_OUTPUT)):
            x = torch.randn(rows, inputs, generator=generator).to(dtype)
            best = _fastest((lambda x=x: packed(x), lambda x=x: linear(x, weight)))
            times = [so_far + share * one / rows for so_far, one in zip(times, best, strict=True)]
    weights = 1 + PROMPT_PER_OUTPUT
    return times[0] / weights, times[1] / weights


def _fastest(calls: tuple[Callable[[], torch.Tensor], ...]) -> list[float]:
    """The least time of each call, taken in turns."""
    best = [float("inf")] * len(calls)
    begun = time.perf_counter()
    for number in range(ROUNDS + 1):  # the first warms up, and counts only if there is no time for more
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            taken = time.perf_counter() - start
            best[i] = taken if number == 1 else min(best[i], taken)
        if time.perf_counter() - begun > MOST_SECONDS / 2:
            break
    return best
