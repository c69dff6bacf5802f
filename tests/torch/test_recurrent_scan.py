"""The scan of Mamba 1: against a loop in float64, from any state, cut anywhere."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu, softplus
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from octavo.models.selective_scan import BLOCK, Drive, recurrence, selective_scan

CHANNELS, STATES = 6, 5


def inputs(positions, sequences=2, seed=0, dtype=torch.float32):
    """What a mixer passes, each [sequences, channels or states, positions], and a state to go on from."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made = {
        "hidden_states": noise(sequences, CHANNELS, positions),
        "dt": noise(sequences, CHANNELS, positions),
        "A": -torch.exp(noise(CHANNELS, STATES)),
        "B": noise(sequences, STATES, positions),
        "C": noise(sequences, STATES, positions),
        "D": noise(CHANNELS),
        "z": noise(sequences, CHANNELS, positions),
        "delta_bias": noise(CHANNELS),
    }
    state = noise(sequences, CHANNELS, STATES)
    return {name: tensor.to(dtype) for name, tensor in made.items()}, state.to(dtype)


def by_loop(made, state):
    """One position after the other in float64, as the recurrence is written."""
    made = {name: tensor.double() for name, tensor in made.items()}
    steps = softplus(made["dt"] + made["delta_bias"][:, None])
    state, outputs = state.double().clone(), []
    for t in range(made["dt"].shape[2]):
        step = steps[:, :, t, None]
        written = step * made["B"][:, None, :, t] * made["hidden_states"][:, :, t, None]
        state = torch.exp(step * made["A"]) * state + written
        read = (state * made["C"][:, None, :, t]).sum(-1)
        outputs.append((read + made["D"] * made["hidden_states"][:, :, t]) * silu(made["z"][:, :, t]))
    return torch.stack(outputs, dim=-1), state


@pytest.mark.parametrize("positions", [1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_it_equals_a_loop_in_float64_from_a_state(positions):
    made, state = inputs(positions)
    outputs, last = selective_scan(**made, delta_softplus=True, initial_state=state)
    right, right_last = by_loop(made, state)
    torch.testing.assert_close(outputs.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last.double(), right_last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("positions", [1, 5, 2 * BLOCK + 3])
def test_without_a_state_it_equals_that_of_transformers(positions):
    made, _ = inputs(positions, seed=3)
    mine = selective_scan(**made, delta_softplus=True)
    theirs = mamba_selective_scan(**made, delta_softplus=True, return_last_state=True)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 7, BLOCK, BLOCK + 5, 149])
def test_two_runs_are_one(cut):
    made, state = inputs(150, seed=5)
    whole, last = selective_scan(**made, delta_softplus=True, initial_state=state)
    along = {"hidden_states", "dt", "B", "C", "z"}

    def part(where):
        return {name: tensor[..., where] if name in along else tensor for name, tensor in made.items()}

    first, between = selective_scan(**part(slice(0, cut)), delta_softplus=True, initial_state=state)
    second, end = selective_scan(**part(slice(cut, None)), delta_softplus=True, initial_state=between)
    torch.testing.assert_close(torch.cat([first, second], dim=-1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(end, last, rtol=1e-5, atol=1e-5)


def test_a_state_that_decays_at_once_or_never_overflows_nothing():
    made, state = inputs(3 * BLOCK, seed=7)
    made["A"] = torch.full((CHANNELS, STATES), -500.0)
    made["A"][0] = -1e-9
    outputs, last = selective_scan(**made, delta_softplus=True, initial_state=state)
    right, _ = by_loop(made, state)
    assert outputs.isfinite().all()
    assert last.isfinite().all()
    torch.testing.assert_close(outputs.double(), right, rtol=1e-4, atol=1e-4)


def test_the_state_handed_in_is_left_as_it_was():
    made, state = inputs(9)
    before = state.clone()
    selective_scan(**made, delta_softplus=True, initial_state=state)
    assert torch.equal(state, before)


def test_sequences_side_by_side_do_not_meet():
    made, state = inputs(20, sequences=3)
    drive = Drive(*(made[name].transpose(1, 2) for name in ("dt", "hidden_states", "B", "C")))
    drive = Drive(drive.steps.abs(), drive.inputs, drive.write, drive.read)
    together, last = recurrence(drive, made["A"], state)
    for i in range(3):
        alone = Drive(*(tensor[i : i + 1] for tensor in (drive.steps, drive.inputs, drive.write, drive.read)))
        one, one_last = recurrence(alone, made["A"], state[i : i + 1])
        torch.testing.assert_close(one, together[i : i + 1])
        torch.testing.assert_close(one_last, last[i : i + 1])


def test_in_bfloat16_the_state_stays_in_float32():
    made, state = inputs(30, dtype=torch.bfloat16)
    made["A"], state = made["A"].float(), state.float()
    _, last = selective_scan(**made, delta_softplus=True, initial_state=state)
    theirs = mamba_selective_scan(**made, delta_softplus=True, return_last_state=True)
    mine = selective_scan(**made, delta_softplus=True)
    assert last.dtype == theirs[1].dtype == torch.float32
    assert mine[0].dtype == theirs[0].dtype
    torch.testing.assert_close(mine[0].float(), theirs[0].float(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-4, atol=1e-4)
