"""Prefix reuse through the real scheduler and a toy model whose answers depend on what it reads from its blocks."""

from __future__ import annotations

import hashlib
import struct
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.worlds import VOCAB, endings

from octavo.errors import ConfigError
from octavo.memory.cache import KVCache
from octavo.memory.check import check, is_empty
from octavo.memory.keys import Chain, KeySpace, in_process, sha256
from octavo.memory.prefix import PrefixDirectory
from octavo.policy.bundle import Policies
from octavo.policy.eviction import EVICTIONS, eviction_named
from octavo.policy.reuse import NoReuse, PrefixReuse
from octavo.scheduling.audit import Audit
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Admitted, Event, Preempted, StepTokens
from octavo.scheduling.limits import Limits
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.toy_laws import laws_of, toy_layout
from octavo.simulate.toy_model import ToyExecutor, ToyModel, toy_request

BLOCK = 4


def weak(data: bytes) -> bytes:
    """A hash that overlooks all tokens of a block but the first."""
    return sha256(data[: -4 * (BLOCK - 1)])


class World:
    """An engine with reuse on over the toy model."""

    def __init__(
        self,
        *,
        heads: tuple[int, ...] = (2,),
        laws: tuple[str, ...] = (),
        slabs: int = 64,
        seqs: int = 4,
        budget: int = 64,
        depth: int = 0,
        reuse: bool = True,
        digest: Any = sha256,
        eviction: str = "lru",
        policies: Policies | None = None,
    ) -> None:
        layout = toy_layout(heads, BLOCK, laws)
        self.model = ToyModel(ends_every=25, laws=laws_of(layout))
        keys = KeySpace("toy", BLOCK, digest) if reuse else None
        self.cache = KVCache(layout, slabs, seqs, keys=keys, eviction=eviction_named(eviction))
        limits = Limits(seqs, budget, 200, VOCAB)
        scheduler = Scheduler(self.cache, limits, policies or Policies(reuse=PrefixReuse(2) if reuse else NoReuse()))
        executor = ToyExecutor(self.model, layout, slabs, seqs)
        self.core = EngineCore(scheduler, executor, depth=depth, audit=Audit(full_every=1))
        self.asked: dict[int, Any] = {}
        self.events: list[Event] = []
        self.time = 0.0

    def ask(self, prompt: list[int], max_tokens: int = 6, salt: str = "") -> int:
        request = toy_request(f"r{len(self.asked)}", prompt, max_tokens, cache_salt=salt)
        number = self.core.submit(request, self.time)
        self.asked[number] = request
        return number

    def finish(self) -> None:
        for _ in range(3000):
            if not self.core.has_work:
                break
            self.events += self.core.step(self.time)
            self.time += 1.0
            check(self.cache)
        assert not self.core.has_work
        self.events += self.core.scheduler.drain_events()

    def tokens(self, number: int) -> list[int]:
        return [t for e in self.events if isinstance(e, StepTokens) for i, t in e.pairs() if i == number]

    def cached(self, number: int) -> int:
        """Prompt tokens that it did not compute."""
        return sum(endings(self.events)[number].record.cached_tokens.values())

    def assert_all_right(self) -> None:
        for number, request in self.asked.items():
            answer = self.model.answer(request, request.prompt_tokens + request.params.max_tokens)
            assert self.tokens(number) == answer.tokens, f"request {number}"


def text(length: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


@pytest.mark.parametrize("length", range(9, 9 + 2 * BLOCK))
@pytest.mark.parametrize("depth", [0, 1])
def test_a_second_equal_prompt_computes_only_what_logits_need(length: int, depth: int) -> None:
    world = World(depth=depth)
    world.ask(text(length), 12)
    world.finish()
    second = world.ask(text(length), 12)
    world.finish()
    world.assert_all_right()
    assert world.cached(second) == length - 1, "its last block was full by then, and was copied"


@pytest.mark.parametrize("shared", range(14))
@pytest.mark.parametrize("heads", [(2,), (4, 2), (6, 2)])
def test_a_hit_may_end_anywhere_in_a_block(shared: int, heads: tuple[int, ...]) -> None:
    world = World(heads=heads)
    world.ask(text(16, 1), 2)
    world.finish()
    second = world.ask(text(16, 1)[:shared] + text(9, 2), 5)
    world.finish()
    world.assert_all_right()
    assert world.cached(second) == shared


def test_another_salt_finds_nothing_and_the_same_salt_everything() -> None:
    world = World()
    for salt in ("a", "b", "a"):
        world.ask(text(12), 1, salt)
        world.finish()
    assert [world.cached(i) for i in range(3)] == [0, 0, 11]
    world.assert_all_right()


def test_without_reuse_equal_prompts_share_no_block_and_report_no_cached_tokens() -> None:
    world = World(reuse=False)
    one, two = world.ask(text(20), 4), world.ask(text(20), 4)
    world.events += world.core.step(0.0)
    held = [set(world.cache.tables[0].row(world.core.scheduler.running.order[i]).tolist()) for i in range(2)]
    assert held[0]
    assert held[1]
    assert not held[0] & held[1]
    world.finish()
    assert (world.cached(one), world.cached(two)) == (0, 0)


def test_live_sequences_share_blocks_by_reference() -> None:
    world = World(seqs=3)
    world.ask(text(17), 20)
    world.events += world.core.step(0.0)
    world.ask(text(17), 20)
    world.events += world.core.step(1.0)
    rows = world.core.scheduler.running.order
    first, second = (world.cache.tables[0].row(row).tolist() for row in rows)
    assert first[:4] == second[:4]
    assert (world.cache.pool.slots[0].refs[first[:4]] == 2).all()
    world.finish()
    world.assert_all_right()


def test_duplicates_of_a_prefix_that_is_being_computed_wait_for_it() -> None:
    world = World(seqs=4, budget=12)
    for _ in range(3):
        world.ask(text(33), 3)
    world.finish()
    world.assert_all_right()
    assert [world.cached(i) for i in range(3)] == [0, 32, 32]


@pytest.mark.parametrize(("wait_tokens", "cached"), [(1, 32), (32, 32), (33, 0)])
def test_who_shares_enough_waits_and_who_shares_less_computes_it_too(wait_tokens: int, cached: int) -> None:
    world = World(seqs=4, budget=200, policies=Policies.named(reuse="prefix", wait_tokens=wait_tokens))
    for number in range(3):
        world.ask([*text(32), 7 + number, *text(5, number)], 3)
    world.finish()
    world.assert_all_right()
    assert [world.cached(i) for i in range(3)] == [0, cached, cached]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("laws", [("full",), ("constant",), ("window_6",)])
def test_a_hash_that_collides_serves_no_wrong_state(depth: int, laws: tuple[str, ...]) -> None:
    world = World(digest=weak, depth=depth, seqs=3, laws=laws)
    for _ in range(3):
        for seed in range(4):
            world.ask([7 if i % BLOCK == 0 else token for i, token in enumerate(text(18, seed))], 5)
        world.finish()
    world.assert_all_right()
    assert sum(world.cached(number) > 12 for number in world.asked) >= 2, "the text that came first is found again"


def test_keys_are_the_same_in_every_process_and_fields_do_not_run_together() -> None:
    space = KeySpace("fingerprint", 2)
    chain = Chain(space, "salt")
    chain.extend(np.array([1, 2, 3, 4, 5], dtype=np.int32))

    def said(*fields: bytes) -> bytes:
        return b"".join(struct.pack("<Q", len(field)) + field for field in fields)

    root = hashlib.sha256(said(b"octavo root 1", b"fingerprint", b"2", b"salt", b"")).digest()
    first = hashlib.sha256(said(b"octavo block 1", root, struct.pack("<2i", 1, 2))).digest()
    second = hashlib.sha256(said(b"octavo block 1", first, struct.pack("<2i", 3, 4))).digest()
    assert chain.keys == [first, second]
    assert space.root("ab", "c") != space.root("a", "bc")
    assert space.root("", "x") != space.root("x", "")


@pytest.mark.parametrize("name", EVICTIONS)
@pytest.mark.parametrize("heads", [(2,), (4, 2), (5, 2)])
def test_what_is_kept_gives_way_and_nothing_goes_wrong(name: str, heads: tuple[int, ...]) -> None:
    world = World(heads=heads, slabs=24 if len(heads) == 1 else 40, seqs=3, eviction=name)
    rng = Random(3)
    for number in range(40):
        seed = rng.randrange(5)
        world.ask(text(6 + 5 * seed, seed) + text(rng.randrange(5), number), rng.randrange(1, 9))
        if number % 3 == 0:
            world.finish()
    world.finish()
    world.assert_all_right()
    assert world.cache.sharing is not None
    assert world.cache.sharing.shelf.evicted_blocks > 0
    assert sum(isinstance(e, Admitted) and e.cached_tokens > 0 for e in world.events) > 5


def test_only_leaves_go_the_least_recently_used_first() -> None:
    world = World(slabs=9, seqs=1)
    world.ask(text(13, 1), 1)
    world.finish()
    world.ask(text(8, 2), 1)
    world.finish()
    world.ask(text(13, 1), 1)  # the first is used again, so the second goes
    world.finish()
    assert world.cached(2) == 12
    world.ask(text(17, 3), 1)
    world.finish()
    again = world.ask(text(13, 1), 1)
    world.finish()
    assert world.cached(again) == 12
    gone = world.ask(text(8, 2), 1)
    world.finish()
    assert world.cached(gone) == 4, "one block was needed, and its last one went"
    world.assert_all_right()


def test_a_preempted_sequence_resumes_from_its_own_blocks() -> None:
    world = World(slabs=12, seqs=3, budget=16)
    for seed in range(3):
        world.ask(text(9, seed), 24)
    world.finish()
    world.assert_all_right()
    assert any(isinstance(e, Preempted) for e in world.events)


def test_at_the_end_nothing_is_referenced_and_the_kept_blocks_can_all_be_had() -> None:
    world = World()
    for seed in range(4):
        world.ask(text(14, seed), 6)
    world.finish()
    assert is_empty(world.cache)
    assert world.cache.sharing is not None
    assert world.cache.sharing.shelf.clear() > 0
    assert world.cache.pool.free.count == world.cache.pool.slabs
    assert len(world.cache.sharing.directory) == 0, "nodes that nothing needs are forgotten"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("laws", [("full",), ("constant",), ("window_6",)])
def test_after_a_reset_nothing_is_found_whoever_was_running(depth: int, laws: tuple[str, ...]) -> None:
    world = World(depth=depth, seqs=6, laws=laws, slabs=60)
    world.ask(text(21), 3)
    world.finish()
    shares, longer = world.ask(text(21), 9), world.ask(text(30, 2), 9)
    for _ in range(3):
        world.events += world.core.step(world.time)
    assert len(world.core.scheduler.running) == 2
    world.core.reset_kept(world.time)
    check(world.cache)
    assert world.cache.sharing is not None
    assert len(world.cache.sharing.directory) == 0
    again = [world.ask(text(21), 4), world.ask(text(30, 2), 4)]
    world.finish()
    assert [world.cached(i) for i in again] == [0, 0]
    assert world.cached(shares) == 20
    assert world.cached(longer) == 0
    world.assert_all_right()
    assert is_empty(world.cache)
    world.core.reset_kept(world.time)
    assert world.cache.pool.free.count == world.cache.pool.slabs


def test_contiguous_runs_cannot_be_shared() -> None:
    with pytest.raises(ConfigError, match="paged"):
        KVCache(toy_layout(), 8, 2, contiguous=True, keys=KeySpace("toy", BLOCK))


MIXED = {
    "window": ((2,), ("window_6",)),
    "window beside full": ((2, 2), ("full", "window_6")),
    "chunk beside full": ((4, 2), ("full", "chunk_8")),
    "constant": ((2,), ("constant",)),
    "constant beside full": ((2, 6), ("full", "constant")),
    "all kinds": ((2, 4, 3, 5), ("full", "window_5", "chunk_8", "constant")),
}


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("depth", [0, 1])
def test_every_kind_of_state_is_found_again(kind: str, depth: int) -> None:
    heads, laws = MIXED[kind]
    world = World(heads=heads, laws=laws, slabs=200, depth=depth, budget=13)
    first = world.ask(text(21, 1), 30)
    world.finish()
    second = world.ask(text(21, 1), 5)
    world.finish()
    assert world.cached(second) == 20
    turn = world.ask(text(21, 1) + world.tokens(first) + text(3, 9), 4)
    world.finish()
    world.assert_all_right()
    assert world.cached(turn) >= 20
    assert is_empty(world.cache)


def test_constant_state_needs_a_snapshot_at_the_very_boundary() -> None:
    world = World(heads=(2, 2), laws=("full", "constant"), slabs=100)
    world.ask(text(17, 1), 1)
    world.finish()
    longer = world.ask(text(17, 1) + text(9, 2), 1)
    world.finish()
    assert world.cached(longer) == 16
    shorter = world.ask(text(11, 1) + text(9, 3), 1)
    world.finish()
    assert world.cached(shorter) == 0, "its first 8 tokens are kept, but no state as it stood there"
    world.assert_all_right()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("every", "keeps"), [(2, 1), (2, 3), (1, 2), (8, 3), (20, 1)])
def test_of_a_sequence_that_generates_as_many_snapshots_are_kept_as_the_policy_says(
    every: int, keeps: int, depth: int
) -> None:
    policies = Policies(reuse=PrefixReuse(every, keeps))
    world = World(heads=(2,), laws=("constant",), slabs=50, policies=policies, depth=depth)
    world.model = ToyModel(laws=world.model.laws)
    world.core.executor = ToyExecutor(world.model, world.cache.layout, 50, 4)
    first = world.ask(text(5, 1), 60)
    world.finish()
    whole = text(5, 1) + world.tokens(first)
    taken = list(range(every * BLOCK, 5 + 60, every * BLOCK))
    kept = [BLOCK, *taken[-keeps:]]
    assert world.cache.pool.cached == [len({*kept})], "one of the prompt, the others of what was generated"
    for length in range(2, len(whole), 3):
        chain = Chain(world.cache.sharing.directory.space)  # type: ignore[union-attr]
        tokens = np.array(whole[:length], dtype=np.int32)
        chain.extend(tokens)
        found = world.cache.sharing.match(chain, tokens, length - 1)  # type: ignore[union-attr]
        assert found.tokens == max((at for at in kept if at < length), default=0)
    world.assert_all_right()


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_random_worlds_answer_as_without_reuse(data: st.DataObject) -> None:
    plain = [(heads, ()) for heads in ((2,), (2, 2), (4, 2), (6, 2))]
    heads, laws = data.draw(st.sampled_from([*plain, *MIXED.values()]))
    world = World(
        heads=heads,
        laws=laws,
        slabs=data.draw(st.integers(20, 40)),
        seqs=data.draw(st.integers(1, 4)),
        budget=data.draw(st.integers(4, 40)),
        depth=data.draw(st.integers(0, 1)),
        digest=data.draw(st.sampled_from([sha256, weak])),
        eviction=data.draw(st.sampled_from(sorted(EVICTIONS))),
        policies=Policies.named(
            batching=data.draw(st.sampled_from(["iteration", "request"])),
            admission=data.draw(st.sampled_from(["max_utilization", "guaranteed_no_evict"])),
            reuse="prefix",
        ),
    )
    aborted = set()
    for number in range(data.draw(st.integers(1, 14))):
        seed = data.draw(st.integers(0, 2))
        prompt = text(data.draw(st.integers(1, 14)), seed) + text(data.draw(st.integers(0, 3)), 100 + number)
        world.ask(prompt, data.draw(st.integers(1, 10)), salt=data.draw(st.sampled_from(["", "x"])))
        for _ in range(data.draw(st.integers(0, 4))):
            world.events += world.core.step(world.time)
            check(world.cache)
        if data.draw(st.booleans()) and number % 3 == 2:
            victim = data.draw(st.integers(0, number))
            if world.core.abort(victim, world.time):
                aborted.add(victim)
    world.finish()
    for number, request in world.asked.items():
        answer = world.model.answer(request, request.prompt_tokens + request.params.max_tokens)
        got = world.tokens(number)
        assert got == (answer.tokens[: len(got)] if number in aborted else answer.tokens)
    assert is_empty(world.cache)


@pytest.mark.parametrize("every", [1, 23, 10_000])
@pytest.mark.parametrize(("digest", "eviction"), [(in_process, "lru"), (weak, "lru"), (sha256, "cheapest_to_rebuild")])
def test_runs_of_blocks_are_made_and_given_up_as_blocks_are_one_by_one(digest: Any, eviction: str, every: int) -> None:
    """In a pool that is too small: the same slots, nodes and evictions, by run and by block.

    Whoever looks at nodes unfolds the runs, so most are looked at seldom or at the end alone.
    """
    told, evicted = [], 0
    for plain in (True, False):
        world, random, seen = World(slabs=30, digest=digest, eviction=eviction), Random(7), []
        sharing, world.core.audit = world.cache.sharing, None  # it looks at all nodes
        assert sharing is not None
        assert sharing.directory.plain
        sharing.directory.plain = plain
        for number in range(30):
            shared = text(40, random.randrange(3))[: random.randrange(1, 40)]
            world.ask(shared + text(random.randrange(1, 30), 100 + number), random.randrange(1, 12))
            for _ in range(random.randrange(8)):
                world.events += world.core.step(world.time)
                nodes = all_nodes(sharing.directory) if len(seen) % every == every - 1 else []
                kept = np.flatnonzero(sharing.directory.keyed[0]).tolist()
                seen.append((nodes, len(sharing.directory), kept, world.cache.pool.free.members().tolist()))
        world.finish()
        evicted = sharing.shelf.evicted_blocks
        seen.append((all_nodes(sharing.directory), sharing.directory.changes, evicted))
        told.append(seen)
    assert told[0] == told[1]
    assert evicted > 50


def all_nodes(directory: PrefixDirectory) -> list[object]:
    """What is known of each."""
    return [
        [n.number, n.parent and n.parent.number, n.said, n.index, n.slots, n.children_in, n.kept, n.held, n.last_used]
        for n in directory.nodes()
    ]
