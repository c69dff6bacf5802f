"""Tiers below the device on models: greedy float32 tokens equal those of an engine with everything off.

Eight conversations of three turns, each with tokens of its own, in a device pool that holds about two of them, over a
host that holds little more and a disk that holds the rest. Free memory of both arenas is not a number.
"""

from __future__ import annotations

import functools
from random import Random

import numpy as np
import pytest
from test_reuse import BLOCK, KINDS, Engine, bench
from tier_engines import AXES, TieredEngine, converse, room_for_two
from tiny import Bench, tiny_config

from octavo.scheduling.events import Finished

ROOM = {
    "mistral": (8, 16, 8),
    "mamba2": (4, 3, 2),
    "bamba": (5, 6, 8),
    "gemma3_text": (24, 30, 8),
    "gemma3n_text": (24, 30, 8),
    "llama4_text": (20, 24, 8),
}
"""Slabs on the device and on the host, and rows, where what holds two is not tight: windows and states are small."""
TIGHTER = {
    "mistral": (6, 16, 8),
    "bamba": (4, 4, 8),
    "llama4_text": (16, 24, 8),
    "gemma3_text": (20, 30, 8),
    "gemma3n_text": (18, 30, 8),
}
"""Where some policies would have nobody give way in `ROOM`."""
NEVER_SHORT = ("mamba2",)
"""Constant state does not grow, so that nobody who runs ever has to give way."""


def room(name: str) -> tuple[int, int, int]:
    slabs = room_for_two(bench(name).executor(block_tokens=BLOCK)[1])
    return ROOM.get(name, (slabs - 4, slabs, 8))


@functools.cache
def expected(name: str) -> list[list[int]]:
    return converse(Engine(bench(name), reuse=False, slabs=900).run)


def tiered(name: str, path, *, tighter: bool = False, **options) -> TieredEngine:
    slabs, host_slabs, rows = TIGHTER.get(name, room(name)) if tighter else room(name)
    return TieredEngine(bench(name), slabs=slabs, host_slabs=host_slabs, rows=rows, path=path, **options)


@pytest.mark.parametrize(("name", "depth"), [(name, i % 2) for i, name in enumerate(KINDS)])
def test_what_goes_down_to_the_disk_and_comes_up_again_is_what_was_computed(name, depth, tmp_path) -> None:
    with tiered(name, tmp_path, placement="write_through", preemption="offload", depth=depth) as engine:
        assert converse(engine.run) == expected(name)
        engine.assert_at_rest()
        found = engine.tally()
    happened = ["demote", "store", "load", "promote", "device tokens", "disk tokens", "evicted from the host"]
    if name not in NEVER_SHORT:
        happened += ["host tokens", "offload", "resumed"]
    assert [what for what in happened if not found[what]] == []


def sample(count: int) -> list[dict[str, str]]:
    """So many combinations of the policies, of each seam all alternatives equally often."""
    random = Random(6)
    combinations: list[dict[str, str]] = [{} for _ in range(count)]
    for axis, values in AXES.items():
        drawn: list[str] = []
        while len(drawn) < count:
            drawn += random.sample(values, len(values))
        for one, value in zip(combinations, drawn, strict=False):
            one[axis] = value
    return combinations


SAMPLED = [(name, i, one) for i, (name, one) in enumerate(zip([*KINDS] * 2, sample(2 * len(KINDS)), strict=True))]


@pytest.mark.parametrize(
    ("name", "number", "policies"), SAMPLED, ids=[f"{name}-{'-'.join(one.values())}" for name, _, one in SAMPLED]
)
def test_no_choice_of_policies_changes_a_token(name, number, policies, tmp_path) -> None:
    options = {"depth": (number // 2) % 2, "shared": number % 4 == 1, "seed": number, **policies}
    with tiered(name, tmp_path, tighter=True, **options) as engine:
        assert converse(engine.run) == expected(name)
        engine.assert_at_rest()
        found = engine.tally()
    happened = [("hit", found["device tokens"] + found["host tokens"] + found["disk tokens"])]
    if policies["placement"] in ("write_back", "write_through", "break_even"):
        happened += [("demote", found["demote"]), ("promote", found["promote"])]
    if name not in NEVER_SHORT:
        happened.append(("preempted", found["offload"] + found["recompute"]))
        if policies["preemption"] == "offload":
            happened += [("offload", found["offload"]), ("resumed", found["resumed"])]
    assert [what for what, times in happened if not times] == []


def test_the_sample_has_every_policy_of_every_seam() -> None:
    for axis, values in AXES.items():
        assert {one[axis] for _, _, one in SAMPLED} == set(values)


def test_two_engines_in_turn_share_what_both_have_stored(tmp_path) -> None:
    for depth in (0, 1):
        with tiered("llama", tmp_path, placement="write_through", depth=depth) as engine:
            assert converse(engine.run) == expected("llama")
            engine.assert_at_rest()
            found = engine.tally()
    assert found["disk tokens"] > sum(map(len, expected("llama"))) / 2, "the second finds what the first left"


@pytest.mark.parametrize("route", ["demote", "promote", "store", "load"])
def test_a_copy_that_is_skipped_does_not_go_unnoticed(route, tmp_path) -> None:
    """Whether these tests can fail: a block of each order of one route stays where it is."""
    with tiered("llama", tmp_path, placement="write_through", preemption="offload") as engine:
        mover = engine.tiers.mover
        batch = mover._batch

        def skips(transfer, part):
            if transfer.order.route != route:
                return batch(transfer, part)
            rest = slice(part.start + 1, part.stop)
            return ["", *(batch(transfer, rest) if rest.start < rest.stop else [])]

        mover._batch = skips
        if route == "store":  # the checksum tells: it is a miss
            assert converse(engine.run) == expected("llama")
            assert engine.tally()["load: absent"] > 0
        else:
            assert converse(engine.run) != expected("llama")


# -- where hits end -------------------------------------------------------------------------------


@functools.cache
def heads(count: int) -> Bench:
    config = tiny_config("llama")
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 6, count, 8
    return Bench(config)


MADE = {
    **{f"{count} kv heads": functools.partial(heads, count) for count in (1, 2, 3)},
    **{name: functools.partial(bench, name) for name in ("deepseek_v3", "gemma3_text", "llama4_text", "gemma3n_text")},
}


@pytest.mark.parametrize("name", MADE)
def test_hits_end_anywhere_in_a_block_on_the_host_and_on_the_disk(name, tmp_path) -> None:
    made = MADE[name]()
    random = np.random.default_rng(len(name))
    kept = [random.integers(3, 60, size=20).tolist() for _ in range(BLOCK)]
    asked = [[*text[: 8 + i], 119 - text[8 + i] + 3, *text[:9]] for i, text in enumerate(kept)]
    fillers = [random.integers(60, 120, size=40).tolist() for _ in range(6)]
    plain = Engine(made, reuse=False, slabs=200)
    want = [plain.run([text], 8)[0] for text in asked]
    slabs = made.executor(block_tokens=BLOCK)[1].slabs_for(50, 24) + 2
    for tier, host_slabs in (("host", 400), ("disk", slabs + 2)):
        path = tmp_path / tier
        with TieredEngine(made, slabs=slabs, host_slabs=host_slabs, path=path, placement="write_through") as engine:
            for text in (*kept, *fillers):
                engine.run([text], 3)
            assert [engine.run([text], 8)[0] for text in asked] == want
            assert hits(engine, BLOCK) == [{tier: 8 + i} for i in range(BLOCK)]
    with TieredEngine(made, slabs=slabs, path=tmp_path / "host", placement="drop") as engine:
        again = [[*text[:8], text[9], *text[:9]] for text in kept]
        assert [engine.run([text], 8)[0] for text in again] == [plain.run([text], 8)[0] for text in again]
        assert hits(engine, BLOCK) == [{"disk": 8}] * BLOCK, "of an earlier run whole blocks are found"


def hits(engine: TieredEngine, last: int) -> list[dict[str, int]]:
    """Cached tokens by tier of the last requests."""
    engine.assert_at_rest()
    return [event.record.cached_tokens for event in engine.of(Finished)[-last:]]
