"""One law of step times that octavo's simulator and DynoSim can both be given, so that only decisions differ.

A step takes so much for each new prompt token, and if anyone decodes so much more, and so much for each position that
those who decode read. octavo takes it as a cost model; DynoSim as a profile, which it interpolates linearly, asking
for the new tokens of all prompts as their number times a mean in whole tokens: so does this. Owns the law and how each
side reads it; a chunk of one token is taken as decoding, which a prompt's last may be too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.cost.step import CostModel, Float64, HasHostTime, StepShape
from octavo.memory.values import Int64

NEAR, FAR, MANY, CHUNK = 1_024, 32_768, 32, 8_192
"""Where another model is looked at: so many that decode at these positions, and one chunk in mid-prompt."""


@dataclass(frozen=True, slots=True)
class Law:
    prompt_token_s: float
    decode_s: float
    position_s: float

    @classmethod
    def near(cls, cost: CostModel) -> Law:
        """Of the size of another model's times."""

        def took(starts: list[int], counts: list[int]) -> float:
            shape = StepShape.from_chunks(starts, counts, len(starts))
            host = cost.host_seconds(shape) if isinstance(cost, HasHostTime) else 0.0
            return cost.step_seconds(shape) + host

        near = took([NEAR] * MANY, [1] * MANY)
        position = (took([FAR] * MANY, [1] * MANY) - near) / (MANY * (FAR - NEAR))
        decode = near - position * MANY * (NEAR + 1)
        return cls((took([CHUNK], [CHUNK]) - decode) / CHUNK, decode, position)

    def step_seconds(self, shape: StepShape) -> float:
        one = shape.counts == 1
        decoding = int(np.count_nonzero(one))
        prompts = self.prompt_token_s * _whole(shape.starts[~one], shape.counts[~one])
        if not decoding:
            return prompts
        return prompts + (self.decode_s + self.position_s * (int(shape.starts[one].sum()) + decoding))

    def run_seconds(self, shape: StepShape, steps: int) -> Float64:
        positions = shape.context_tokens + shape.chunks * np.arange(steps, dtype=np.int64)
        seconds: Float64 = self.decode_s + np.float64(self.position_s) * positions
        return seconds

    def write_profile(self, path: Path) -> None:
        """The same as DynoSim reads it: two points of each axis, between and beyond which it is linear."""
        tokens, reads, lengths = np.array([0.0, 2**20]), np.array([0.0, 2**30]), np.array([0.0, 2**20])
        steps = 1e3 * (self.decode_s + self.position_s * reads[:, None] + 0 * lengths)
        np.savez(
            path, prefill_isl=tokens, prefill_ttft_ms=1e3 * self.prompt_token_s * tokens,
            decode_active_kv_tokens=reads, decode_context_length=lengths, decode_itl=steps,
        )  # fmt: skip


def _whole(starts: Int64, counts: Int64) -> int:
    """New tokens of these chunks, as many times the mean prompt less the mean prefix, both in whole tokens."""
    if not (many := len(starts)):
        return 0
    before = int(starts.sum())
    return many * ((before + int(counts.sum())) // many - before // many)
