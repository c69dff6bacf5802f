"""A run in which what is kept is forgotten, pinned and let go replays to the same plans; none of it may be left out."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from tests.pure.test_recording import HEADS, tiered
from tests.pure.worlds import engine, request

from octavo.cost.transfer import TransferLaw
from octavo.errors import RequestError
from octavo.policy.bundle import Policies
from octavo.scheduling.core import EngineCore
from octavo.scheduling.plan import Executor
from octavo.simulate.executors import EchoExecutor
from octavo.simulate.links import Links, SimMover
from octavo.simulate.recording import (
    Divergence,
    Looking,
    Pinning,
    RecordedExecutor,
    RecordedMover,
    Recorder,
    Recording,
    RecordingExecutor,
    RecordingMover,
    Reset,
    Unpinning,
    replay,
)
from octavo.simulate.toy_model import toy_layout


def keeping(executor: Executor, depth: int = 0) -> EngineCore:
    return engine(slabs=14, seqs=4, budget=40, executor=executor, policies=Policies.named(reuse="prefix"), depth=depth)


def drive(run: Recorder) -> None:
    """Prompts that come back, while what is kept is pinned, let go and forgotten."""
    rng, now = Random(8), 0.0
    texts = [request(length, 4, seed=seed).prompt_token_ids for seed, length in enumerate((9, 14, 20, 26))]
    names: list[str] = []
    for number in range(260):
        if number < 160 and rng.random() < 0.5:
            asked = request(texts[rng.randrange(4)].tolist(), rng.randint(3, 9), name=f"r{number}")
            sequence_id = run.submit(asked, now)
            if rng.random() < 0.1:
                run.abort(sequence_id, now, "stop")
        if rng.random() < 0.15:
            with suppress(RequestError):
                names.append(run.pin(texts[rng.randrange(4)], "", now, rng.choice((2.0, 9.0, 40.0))).name)
        if names and rng.random() < 0.1:
            run.unpin(names.pop(rng.randrange(len(names))))
        if rng.random() < 0.05:
            run.reset_kept(now)
        if rng.random() < 0.1:
            run.live_pins(now)
        run.step(now)
        now += rng.choice((0.1, 0.5, 1.0))
    while run.has_work:
        now += 1.0
        run.step(now)


def recorded(depth: int = 0) -> Recording:
    recording = Recording()
    drive(Recorder(keeping(RecordingExecutor(EchoExecutor(), recording), depth), recording))
    return recording


@pytest.mark.parametrize("depth", [0, 1])
def test_a_run_with_resets_and_pins_replays_to_the_same_plans(depth: int) -> None:
    recording = recorded(depth)
    kinds = {type(entry) for entry in recording.inputs}
    assert kinds >= {Reset, Pinning, Unpinning, Looking}
    pinned = [entry.tokens for entry in recording.inputs if isinstance(entry, Pinning)]
    assert None in pinned, "some are refused"
    assert any(tokens for tokens in pinned)
    for _ in range(2):
        again = keeping(RecordedExecutor(recording), depth)
        assert replay(recording, again) == len(recording.plans) > 60
        assert not again.has_work


@pytest.mark.parametrize("left_out", [Reset, Pinning])
def test_what_was_forgotten_or_pinned_cannot_be_left_out(left_out: type) -> None:
    recording = recorded()
    recording.inputs = [entry for entry in recording.inputs if not isinstance(entry, left_out)]
    with pytest.raises(Divergence, match=r"^step \d+: "):
        replay(recording, keeping(RecordedExecutor(recording)))


def test_a_pin_of_another_size_is_a_divergence() -> None:
    recording = recorded()
    place = next(i for i, entry in enumerate(recording.inputs) if isinstance(entry, Pinning) and entry.tokens)
    for tokens in (None, 1000):
        recording.inputs[place] = replace(recording.inputs[place], tokens=tokens)
        with pytest.raises(Divergence, match="a pin is of"):
            replay(recording, keeping(RecordedExecutor(recording)))


@pytest.mark.parametrize("depth", [0, 1])
def test_with_tiers_too(depth: int) -> None:
    recording = Recording()
    links = Links({"promote": TransferLaw(1e9, 0.7), "load": TransferLaw(1e9, 0.7)})
    sizes = [group.block_bytes for group in toy_layout(HEADS).groups]
    mover = RecordingMover(SimMover(sizes, links), recording)
    core = tiered(RecordingExecutor(EchoExecutor(), recording), mover, depth=depth)
    drive(Recorder(core, recording))
    again = tiered(RecordedExecutor(recording), RecordedMover(recording), depth=depth)
    assert replay(recording, again) == len(recording.plans) > 60
