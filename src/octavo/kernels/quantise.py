"""Keys and values in eight bits: `quantise` on the way into pages, `dequantise` on the way out.

Owns the arithmetic alone; where values and scales lie is the arena's. Each row (one token's key or
value of one head) has a scale of its own, its largest magnitude over the largest number of the type,
so a row's bytes depend on that row alone: not on its batch, its block or when it was written.

Invariant: a row that is not finite comes back not finite, so that a mistake is seen and not hidden.
"""

from __future__ import annotations

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The element types served, and the largest number of each."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Below it a scale would lose bits, or be zero and divide a row of zeros."""


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [..., dim] -> values [..., dim] of `dtype`, and float32 scales [...]."""
    wide = x.float()
    scales = (wide.abs().amax(-1) / LARGEST[dtype]).clamp_min(SMALLEST_SCALE)
    scaled = wide / scales.unsqueeze(-1)
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scales


def dequantise(values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The float32 numbers [..., dim] that were stored."""
    out = torch.empty(values.shape, dtype=torch.float32, device=values.device) if out is None else out
    if values.dtype == torch.int8:
        out.copy_(values)
    else:
        # The bits of an e4m3 number, moved up by seven, are those of a float16 that is 256 times smaller. A CPU does
        # this six times as fast as torch converts one by one. The sign, spread over the top, leaves bit 14 again.
        halves = values.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
        out.copy_(halves.view(torch.float16))
        scales = scales * 256
    return out.mul_(scales.unsqueeze(-1))
