"""What a sequence must be granted, in whole blocks: the rule that admission and the planner share.

`bytes_kept` is what is needed at rest. While a step runs, a window layer must hold the positions that
its first query still reads, `window - 1` of them, and those that the step adds. They may begin and
end anywhere in a block:

    block       |  0      |  1      |  2      |  3      |
    positions         [ window - 1 + the step's chunk ]         touches blocks 0 to 3

so the charge is the most blocks that so many consecutive positions can touch, and never more than
the sequence has. Layers that grow are charged their length, rounded up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.errors import ConfigError
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import (
    Chunked,
    Compressed,
    Constant,
    Growing,
    LayerState,
    Windowed,
    components_bytes,
    parts_of,
)

Int64 = npt.NDArray[np.int64]


def touched_blocks(positions: int, block_tokens: int) -> int:
    """The most blocks that `positions` consecutive positions can touch, wherever they begin."""
    return (positions + block_tokens - 2) // block_tokens + 1 if positions else 0


def window_blocks(tokens: int, reach_tokens: int, step_tokens: int, block_tokens: int) -> int:
    """Blocks charged for a layer whose queries reach `reach_tokens` positions, their own included.

    `tokens` is the length of the sequence, `step_tokens` the most positions of it in one step.
    """
    for name, value in (("block_size", block_tokens), ("step_tokens", step_tokens), ("window", reach_tokens)):
        if value < 1:
            raise ConfigError(name, value, "must be at least 1")
    whole = -(-tokens // block_tokens)
    return min(whole, touched_blocks(reach_tokens - 1 + step_tokens, block_tokens))


def window_blocks_many(tokens: Int64, reach_tokens: int, step_tokens: Int64, block_tokens: int) -> Int64:
    """`window_blocks` of each pair of `tokens` and `step_tokens`; 0 positions are charged nothing."""
    whole = -(-tokens // block_tokens)
    return np.minimum(whole, touched_blocks_many(reach_tokens - 1 + np.maximum(1, step_tokens), block_tokens))


def touched_blocks_many(positions: Int64, block_tokens: int) -> Int64:
    """`touched_blocks` of each of `positions`, all positive."""
    return (positions + block_tokens - 2) // block_tokens + 1


def bytes_charged(state: LayerState, tokens: int, *, step_tokens: int, block_tokens: int) -> int:
    """Bytes granted to one layer of a sequence of `tokens` positions, in whole blocks of `block_tokens`."""
    if block_tokens < 1:
        raise ConfigError("block_size", block_tokens, "must be at least 1")
    total = 0
    whole = -(-tokens // block_tokens)
    for part in parts_of(state):
        if isinstance(part, Growing):
            total += whole * block_tokens * part.bytes_per_token
        elif isinstance(part, Windowed):
            blocks = window_blocks(tokens, part.window_tokens, step_tokens, block_tokens)
            sinks = -(-part.sink_tokens // block_tokens)
            total += min(whole, blocks + sinks) * block_tokens * part.bytes_per_token
        elif isinstance(part, Chunked):
            blocks = window_blocks(tokens, part.chunk_tokens, step_tokens, block_tokens)
            total += blocks * block_tokens * part.bytes_per_token
        elif isinstance(part, Compressed):
            entries = -(-(tokens // part.run_tokens) // block_tokens) * block_tokens
            waiting = part.run_tokens * components_bytes(part.waiting) + components_bytes(part.carried)
            total += entries * part.bytes_per_entry + waiting
        elif isinstance(part, Constant):
            total += part.bytes_per_sequence
    return total


def sequence_bytes_charged(geometry: ModelGeometry, tokens: int, *, step_tokens: int, block_tokens: int) -> int:
    """Bytes granted to one sequence in all layers."""
    return sum(
        bytes_charged(state, tokens, step_tokens=step_tokens, block_tokens=block_tokens) for state in geometry.layers
    )
