"""Faults that other engines' prefix caches have had, one by one, and others of their kinds.

Each test names its fault in words. Answers come from a toy model that reads its blocks, so that state of somebody
else changes them. Faults of kernels and of batches on models are in tests/torch/test_reuse_faults.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.pure.test_reuse import BLOCK, World, text
from tests.pure.worlds import drain, endings, engine, request

from octavo.memory import keys as keys_of_memory
from octavo.memory.check import is_empty
from octavo.memory.keys import Chain, KeySpace, sha256
from octavo.scheduling.events import Admitted, Preempted, StepPlanned
from octavo.scheduling.plan import StepResult

LAWS = [("full",), ("window_6",), ("chunk_8",), ("constant",), ("full", "window_6"), ("full", "constant")]


def heads(laws: tuple[str, ...]) -> tuple[int, ...]:
    return (2,) * len(laws)


def computed(world: World, number: int) -> int:
    """Positions that the engine computed while this request, alone, was served."""
    before = len(world.events)
    world.finish()
    steps = [event for event in world.events[before:] if isinstance(event, StepPlanned)]
    assert number in world.asked
    return sum(step.prefill_tokens + step.decode_tokens for step in steps)


# -- security: hashes that collide ---------------------------------------------------------------


def constant(data: bytes) -> bytes:
    return b"the same for everything"


def like_pythons(data: bytes) -> bytes:
    """`hash(-1) == hash(-2)`: two texts whose sums are alike have one key."""
    return (sum(data) % 7).to_bytes(8, "little")


@pytest.mark.parametrize("digest", [constant, like_pythons])
@pytest.mark.parametrize("laws", LAWS, ids="+".join)
def test_predictable_collisions_never_serve_one_tenants_state_to_another(laws: tuple[str, ...], digest: Any) -> None:
    """Keys of two tenants could be made to collide, and one was served the state of the other (faults, 4)."""
    world = World(digest=digest, laws=laws, heads=heads(laws), slabs=120)
    for turn in range(3):
        for salt, seed in itertools.product(("a", "b"), range(3)):
            world.ask(text(14 + turn, seed), 4, salt)
        world.finish()
    world.assert_all_right()
    assert is_empty(world.cache)


def test_a_root_that_collides_keeps_salts_apart() -> None:
    """Roots alone have one key here, so that all that follows has too: what was hashed into them is compared."""
    world = World(digest=lambda data: sha256(data) if b"octavo block 1" in data else b"root")
    for salt in ("a", "b", "b", "a"):
        world.ask(text(13), 1, salt)
        world.finish()
    assert [world.cached(i) for i in range(4)] == [0, 0, 0, 12], "whoever came first keeps the key"
    world.assert_all_right()


# -- security: what timing tells ------------------------------------------------------------------


@pytest.mark.parametrize("laws", LAWS, ids="+".join)
@pytest.mark.parametrize("guessed", [8, 11, 16, 21])
def test_a_guess_of_another_tenants_prompt_computes_as_much_as_any_wrong_guess(
    laws: tuple[str, ...], guessed: int
) -> None:
    """Paired, since an engine that keeps nothing would pass the first half (faults, 5)."""
    world = World(laws=laws, heads=heads(laws), slabs=120)
    secret = text(22, 1)
    computed(world, world.ask(secret, 2, "theirs"))
    right = computed(world, world.ask(secret[:guessed] + text(3, 5), 1, "mine"))
    wrong = computed(world, world.ask(text(guessed, 2) + text(3, 5), 1, "mine"))
    assert right == wrong == guessed + 3
    same = computed(world, world.ask(secret, 1, "theirs"))
    assert same < 22


def test_nobody_waits_for_another_tenants_prefix() -> None:
    """Waiting for a duplicate would tell that somebody computes it now."""
    world = World(seqs=4, budget=60)
    for salt in ("a", "b", "a"):
        world.ask(text(17), 3, salt)
    world.events += world.core.step(0.0)
    entered = [event.sequence_id for event in world.events if isinstance(event, Admitted)]
    assert entered == [0, 1], "the third has a prefix that the first computes, of the same salt: it waits"
    world.finish()
    assert [world.cached(i) for i in range(3)] == [0, 0, 16]


# -- security: a salt that one path overlooks ------------------------------------------------------


@pytest.mark.parametrize("laws", LAWS, ids="+".join)
@pytest.mark.parametrize("depth", [0, 1])
def test_every_path_to_a_kept_block_honours_the_salt(laws: tuple[str, ...], depth: int) -> None:
    """Whole blocks, a block in part, snapshots, the next turn, and what a preempted one comes back to (faults, 6)."""
    world = World(laws=laws, heads=heads(laws), slabs=60, depth=depth, seqs=3)
    first = world.ask(text(18, 1), 9, "a")
    world.finish()
    answer = world.tokens(first)
    ways = {
        "all of it": text(18, 1),
        "in part": text(18, 1)[:14] + text(5, 9),
        "one block": text(18, 1)[:BLOCK] + text(5, 8),
        "the next turn": text(18, 1) + answer + text(4, 7),
    }
    strangers = {}
    for way, prompt in ways.items():
        strangers[way] = world.ask(prompt, 2, f"of {way}")
        world.finish()
    assert {way: world.cached(number) for way, number in strangers.items()} == dict.fromkeys(ways, 0)
    own = [world.ask(ways["all of it"], 2, "a"), world.ask(ways["the next turn"], 2, "a")]
    world.finish()
    assert min(world.cached(number) for number in own) >= 16
    world.assert_all_right()


# -- security: fields that run together ------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("org_1", "2345"), ("org_12345", "")),
        (("", "adapter"), ("adapter", "")),
        (("a\0b", ""), ("a", "b")),
        (("ä", ""), ("a", "\u0308")),
        (("x" * 255, "y"), ("x" * 256, "")),
    ],
)
def test_salt_and_adapter_never_run_into_each_other(one: tuple[str, str], other: tuple[str, str]) -> None:
    """Fields that are joined without their lengths spell each other (faults, 7)."""
    space = KeySpace("a model", BLOCK)
    assert space.root(*one) != space.root(*other)
    chains = [Chain(space, *fields) for fields in (one, other)]
    for chain in chains:
        chain.extend(np.arange(8, dtype=np.int32))
    assert not set(chains[0].keys) & set(chains[1].keys)


def test_the_fingerprint_and_the_block_size_do_not_run_into_each_other_either() -> None:
    assert KeySpace("model1", 6).root() != KeySpace("model", 16).root()
    assert KeySpace("m", 4).root("4") != KeySpace("m4", 4).root("")


def test_a_block_cannot_pass_for_a_root() -> None:
    """What a caller sends as tokens is never hashed as a root, whatever it spells."""
    space = KeySpace("m", BLOCK)
    key, said = space.root("victim")
    padded = np.frombuffer(said + b"\0" * (-len(said) % 4), dtype="<i4").astype(np.int32)
    chain = Chain(space)
    chain.extend(np.concatenate([padded, np.zeros(-len(padded) % BLOCK, dtype=np.int32)]))
    assert key not in chain.keys
    assert space.child(b"", said) != key


# -- reuse: resumed sequences ---------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("laws", LAWS, ids="+".join)
def test_a_preempted_sequence_that_hits_its_own_blocks_stays_within_its_table(
    laws: tuple[str, ...], depth: int
) -> None:
    """A pool of one and a half requests, 64 with one system prompt: first looked up, then scheduled
    (faults, 40)."""
    world = World(laws=laws, heads=heads(laws), slabs=14 * len(laws), seqs=3, budget=24, depth=depth)
    system = text(9, 77)
    for number in range(64):
        world.ask(system + text(2 + number % 5, number), 12 + number % 9)
    world.finish()
    world.assert_all_right()
    if laws == ("full",):
        assert any(isinstance(event, Preempted) for event in world.events)
    assert sum(isinstance(e, Admitted) and e.cached_tokens > 0 for e in world.events) > 20
    assert is_empty(world.cache)


def test_every_block_of_a_sequence_is_hashed_once_however_often_it_waits_or_gives_way() -> None:
    hashed = 0

    def counted(data: bytes) -> bytes:
        nonlocal hashed
        hashed += b"octavo block 1" in data
        return sha256(data)

    world = World(digest=counted, slabs=14, seqs=3, budget=24)
    for number in range(24):
        world.ask(text(9, 77) + text(2 + number % 5, number), 12 + number % 9)
    world.finish()
    world.assert_all_right()
    assert any(isinstance(event, Preempted) for event in world.events)
    lengths = [request.prompt_tokens + len(world.tokens(number)) for number, request in world.asked.items()]
    assert sum(length // BLOCK for length in lengths) - len(lengths) <= hashed
    assert hashed <= sum(length // BLOCK for length in lengths)


# -- reuse: nothing left to compute ------------------------------------------------------------------


@pytest.mark.parametrize("laws", LAWS, ids="+".join)
@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK, 1])
def test_a_prompt_that_is_kept_to_its_last_block_still_computes_one_position(
    laws: tuple[str, ...], length: int
) -> None:
    """A prompt of whole blocks, all of them kept, left nothing to compute (faults, 41)."""
    world = World(laws=laws, heads=heads(laws))
    for _ in range(3):
        assert computed(world, world.ask(text(length), 1)) >= 1
    world.assert_all_right()
    assert world.cached(2) < length


# -- reuse: off means off ------------------------------------------------------------------------------


def test_with_reuse_off_nothing_is_hashed_and_a_long_run_ends_with_an_empty_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two thousand requests, many of them alike (faults, 42)."""

    def refuse(*_: object) -> bytes:
        raise AssertionError("a key was computed")

    monkeypatch.setattr(KeySpace, "root", refuse)
    monkeypatch.setattr(KeySpace, "child", refuse)
    monkeypatch.setattr(keys_of_memory, "sha256", refuse)
    core = engine(slabs=40, seqs=8, audit=False)
    for batch in range(40):
        for number in range(50):
            core.submit(request(9, 4, seed=number % 5), float(batch))
        drain(core, now=float(batch))
    cache = core.scheduler.cache
    assert cache.sharing is None
    assert cache.pool.free.count == 40
    assert cache.pool.cached == [0]
    assert sha256(b"") != b""


# -- reuse: tails of others -----------------------------------------------------------------------------


@pytest.mark.parametrize("laws", LAWS, ids="+".join)
def test_a_longer_kept_entry_leaves_no_tail_for_those_who_share_its_beginning(laws: tuple[str, ...]) -> None:
    """Two hundred requests on five topics under one system prompt: each answer is that of its own
    topic (faults, 43)."""
    world = World(laws=laws, heads=heads(laws), slabs=70 * len(laws), seqs=4, budget=32)
    system = text(10, 50)
    topics = [text(25, 60 + topic) for topic in range(5)]
    for number in range(200):
        topic = topics[(number * 7) % 5]
        # Long and short ones take turns, so that what is kept is often longer than what is asked.
        world.ask(system + topic[: 3 + (number * 5) % 20], 3)
        if number % 9 == 0:
            world.finish()
    world.finish()
    world.assert_all_right()
    assert sum(isinstance(e, Admitted) and e.cached_tokens > 0 for e in world.events) > 100


# -- of their kinds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("laws", LAWS, ids="+".join)
@pytest.mark.parametrize("depth", [0, 1])
def test_an_aborted_sequence_leaves_only_blocks_that_were_computed(laws: tuple[str, ...], depth: int) -> None:
    """Whoever comes after an abort in the middle of a prompt finds what was learned of, and nothing more."""
    for steps in range(6):
        world = World(laws=laws, heads=heads(laws), depth=depth, budget=5)
        doomed = world.ask(text(22), 6)
        for _ in range(steps):
            world.events += world.core.step(world.time)
        learned = int(world.cache.committed.max())
        world.core.abort(doomed, world.time)
        heir = world.ask(text(22), 6)
        world.finish()
        del world.asked[doomed]
        world.assert_all_right()
        assert world.cached(heir) <= learned
        assert is_empty(world.cache)


def test_a_failed_step_leaves_nothing_that_another_finds() -> None:
    """What a failing sequence was computing is not kept: nobody knows what is in it."""
    world = World(budget=8)
    collect = world.core.executor.collect

    def fail_second() -> StepResult:
        result = collect()
        return replace(result, failures=((0, "it is sick"),)) if result.number == 1 else result

    world.core.executor.collect = fail_second  # type: ignore[method-assign]
    sick = world.ask(text(30), 2)
    world.finish()
    assert endings(world.events)[sick].reason == "error"
    heir = world.ask(text(30), 2)
    world.finish()
    del world.asked[sick]
    world.assert_all_right()
    assert world.cached(heir) == 8, "the first step's blocks, and none of the one that failed"


def test_a_prompt_token_no_model_has_is_refused_before_any_key() -> None:
    world = World()
    before = len(world.cache.sharing.directory)  # type: ignore[union-attr]
    with pytest.raises(Exception, match="token"):
        world.ask([1, 2, 3, -5, 7], 2)
    assert len(world.cache.sharing.directory) == before  # type: ignore[union-attr]
    assert not world.core.has_work
