"""The recurrence of Mamba 1 over a run of positions, going on from a state: `selective_scan`.

Transformers' own scan starts from nothing whatever state there is, so a prompt in two chunks comes out wrong.
Owns the arithmetic alone. Every position multiplies the state by a decay and adds to it, and two such positions
make one (a2 * a1, a2 * b1 + b2): runs of 1, 2, 4, ... positions are joined until all see the first. No decay is
ever divided by, so nothing overflows however fast a state decays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu, softplus

BLOCK = 32
"""Positions that are joined at once: their states are held together, [sequences, positions, channels, states]."""


@dataclass(frozen=True, slots=True, eq=False)
class Drive:
    """What drives the recurrence at each position: [sequences, positions, ...]."""

    steps: torch.Tensor
    """[.., channels]: how long each position lasts."""
    inputs: torch.Tensor
    """[.., channels]"""
    write: torch.Tensor
    """[.., states]: how an input enters the state (B)."""
    read: torch.Tensor
    """[.., states]: how the state leaves (C)."""


def recurrence(drive: Drive, a: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (what is read at each position [sequences, positions, channels], the last state).

    `a` is [channels, states] and negative; `state` [sequences, channels, states], None for the start.
    """
    sequences, positions, channels = drive.inputs.shape
    if state is None:
        state = a.new_zeros(sequences, channels, a.shape[1])
    state = state.to(a.dtype)
    read = []
    for first in range(0, positions, BLOCK):
        part = slice(first, min(first + BLOCK, positions))
        steps = drive.steps[:, part].to(a.dtype)
        decay = torch.exp(steps[..., None] * a)
        states = (steps * drive.inputs[:, part].to(a.dtype))[..., None] * drive.write[:, part, None].to(a.dtype)
        states[:, 0] += decay[:, 0] * state
        _join(decay, states)
        state = states[:, -1]
        columns = drive.read[:, part, :, None]
        read.append(torch.matmul(states.to(columns.dtype), columns)[..., 0])
    return torch.cat(read, dim=1), state.clone()


def _join(decay: torch.Tensor, states: torch.Tensor) -> None:
    """Make each entry of `states` the outcome of all positions up to it, in place."""
    reach, positions = 1, states.shape[1]
    while reach < positions:
        states[:, reach:] += decay[:, reach:] * states[:, :-reach]
        decay[:, reach:] = decay[:, reach:] * decay[:, :-reach]
        reach *= 2


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 - the names by which Transformers' mixers pass them
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    *,
    initial_state: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transformers' `mamba_selective_scan`, going on from `initial_state` [sequences, channels, states].

    `hidden_states` and `dt` are [sequences, channels, positions], `B` and `C` [sequences, states, positions].
    -> (outputs [sequences, channels, positions], last state). The options are `D`, `z`, `delta_bias` and
    `delta_softplus`; those that choose between equivalent ways to compute are no matter.
    """
    bias, skip, gate = (options.get(name) for name in ("delta_bias", "D", "z"))
    if bias is not None:
        dt = dt + bias.to(dt.dtype)[..., None]
    if options.get("delta_softplus"):
        dt = softplus(dt)
    drive = Drive(*(tensor.transpose(1, 2) for tensor in (dt, hidden_states, B, C)))
    read, state = recurrence(drive, A, initial_state)
    outputs = read.transpose(1, 2)
    if skip is not None:
        outputs = outputs + hidden_states * skip[None, :, None]
    if gate is not None:
        outputs = outputs * silu(gate)
    return outputs, state
