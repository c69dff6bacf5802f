"""Who goes from the disk when room is needed, beside a naive list of what is there."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from octavo.config import Config
from octavo.errors import ConfigError, PolicyError
from octavo.memory.keys import KeySpace, token_bytes
from octavo.memory.nodes import NO_SLOT, Node
from octavo.memory.prefix import PrefixDirectory
from octavo.memory.tiers import DISK_TIER, DiskTier
from octavo.policy.eviction import EVICTIONS, Evictable, LeastRecentlyUsed, eviction_named
from octavo.simulate.toy_laws import toy_layout

SIZE = 4


class Disk:
    """A disk of one group, the nodes of texts that are paths in a tree, and what should be known of each block."""

    def __init__(self, slots: int, eviction: Any, left: int = 0) -> None:
        self.space = KeySpace("a model", SIZE)
        self.directory = PrefixDirectory(toy_layout([1]).groups, [[9], [9], [slots]], self.space)
        stored = [(self.keys(path)[-1], slot) for slot, path in enumerate([(9,), (9, 8), (9, 8, 7), (5,)][:left])]
        self.tier = DiskTier((slots,), self.directory, eviction, [stored])
        self.never_asked_for = [identity for identity, _ in stored]
        self.held: list[int] = []

    def keys(self, path: tuple[int, ...]) -> list[bytes]:
        key, keys = self.space.root()[0], []
        for block in path:
            key = self.space.child(key, token_bytes(np.full(SIZE, block, np.int32)))
            keys.append(key)
        return keys

    def nodes(self, path: tuple[int, ...]) -> list[Node]:
        """As a look-up makes them: what the disk has of them may be started from."""
        node, made = self.directory.root(self.space.root()), []
        for block, key in zip(path, self.keys(path), strict=True):
            assert node is not None
            node = self.directory.child(node, key, np.full(SIZE, block, np.int32))
            assert node is not None
            if node.places[DISK_TIER][0] == NO_SLOT:
                self.tier.adopt(node, 0)
            if key in self.never_asked_for:
                self.never_asked_for.remove(key)
            made.append(node)
        return made

    def store(self, path: tuple[int, ...]) -> list[int | None]:
        """From the last block on, as texts are written, in one order. Which slots it got."""
        given: list[int | None] = []
        written = []
        nodes = self.nodes(path)
        nodes[-1].held += 1  # what is copied is kept above
        for node in reversed(nodes):
            node.last_used = self.directory.uses = self.directory.uses + 1
            if node.places[DISK_TIER][0] != NO_SLOT:
                continue
            expected = None if self.tier.free_slots(0) else self.expected()
            slot = self.tier.take(0)
            if isinstance(self.tier.eviction, LeastRecentlyUsed) and expected is not None:
                assert slot == expected
            given.append(slot)
            if slot is not None:
                written.append((node, slot))
                self.held.append(slot)
        for node, slot in written:
            self.tier.publish(node, 0, slot)
            self.tier.let_go(0, slot)
            self.held.remove(slot)
        nodes[-1].held -= 1
        return given

    def may_go(self) -> list[tuple[int, int, int]]:
        """(last use, depth, slot) of all that may, by looking at everything."""
        found = []
        for slot in self.tier.found_slots(0):
            if slot in self.held:
                continue
            if not self.directory.keyed_in[DISK_TIER][0][slot]:  # of another process: where it lies is not known
                if self.tier._said[0][slot] not in self.never_asked_for:
                    found.append((self.tier._used[0][slot], 0, slot))
                continue
            node = self.directory.node_of(0, slot, DISK_TIER)
            followers = [n for n in self.directory.nodes() if n.parent is node and n.places[DISK_TIER][0] != NO_SLOT]
            if not followers:
                used = max(node.last_used, self.tier._used[0].get(slot, 0))
                found.append((used, -node.index, slot))
        return sorted(found)

    def expected(self) -> int | None:
        """By `lru`."""
        for identity in self.never_asked_for:
            slot = self.tier._found[0].get(identity)
            if slot is not None and slot not in self.held:
                return slot
        may = self.may_go()
        return may[0][2] if may else None


def some_path(random: Random) -> tuple[int, ...]:
    return tuple(random.randrange(1, 3) for _ in range(random.randrange(1, 5))) if random.random() < 0.9 else (9, 8, 7)


@pytest.mark.parametrize("seed", range(60))
def test_lru_gives_up_the_leaf_used_longest_ago_whatever_happened_before(seed: int) -> None:
    random = Random(seed)
    disk = Disk(random.choice((4, 6, 10)), LeastRecentlyUsed(), left=random.choice((0, 0, 2, 4)))
    for _ in range(120):
        kind = random.random()
        if kind < 0.45:
            disk.store(some_path(random))
        elif kind < 0.6:
            for node in reversed(disk.nodes(some_path(random))):  # read: the beginning is the last to go
                disk.tier.use(0, node.identity)
        elif kind < 0.7:
            for node in disk.nodes(some_path(random)):  # used on another tier
                node.last_used = disk.directory.uses = disk.directory.uses + 1
        elif kind < 0.8 and disk.tier.found_slots(0):
            slot = random.choice(disk.tier.found_slots(0))
            disk.tier.hold(0, slot)
            disk.held.append(slot)
        elif kind < 0.9 and disk.held:
            disk.tier.let_go(0, disk.held.pop(random.randrange(len(disk.held))))
        elif kind < 0.95 and disk.tier.found_slots(0):
            identity = random.choice(list(disk.tier._found[0]))
            disk.tier.withdraw(identity, 0)
            if identity in disk.never_asked_for:
                disk.never_asked_for.remove(identity)
        elif disk.tier.free_slots(0):
            disk.tier.appear(0, [disk.keys((9, 8, 7))[random.randrange(3)]])
            for identity in disk.tier._found[0]:
                if identity in disk.never_asked_for and identity not in disk.tier._left[0]:
                    disk.never_asked_for.remove(identity)
        listed = disk.tier.free_slots(0) + disk.tier.found_slots(0)
        assert len(set(listed)) == len(listed)
        assert set(disk.held) == set(disk.tier.busy_slots(0))
    for slot in disk.held:
        disk.tier.let_go(0, slot)
    disk.tier.forget_all()
    assert sorted(disk.tier.free_slots(0)) == list(range(disk.tier.slots[0]))
    assert disk.tier.eviction.choose(0) is None


@pytest.mark.parametrize("name", EVICTIONS)
def test_the_end_of_a_text_goes_before_its_beginning(name: str) -> None:
    disk = Disk(6, eviction_named(name))
    disk.store((1, 2, 3, 4, 5, 6))
    disk.store((7, 7))
    assert [node.places[DISK_TIER][0] != NO_SLOT for node in disk.nodes((1, 2, 3, 4, 5, 6))] == [True] * 4 + [False] * 2


def test_what_is_cheap_to_compute_again_goes_first_however_lately_it_was_used() -> None:
    disk = Disk(6, eviction_named("cheapest_to_rebuild"))
    long = (1, 2, 3, 4, 5)
    disk.store(long)
    for fresh in (10, 11):
        disk.store((fresh,))
    assert all(node.places[DISK_TIER][0] != NO_SLOT for node in disk.nodes(long)), "a lone block went instead"
    by_use = Disk(6, eviction_named("lru"))
    by_use.store(long)
    for fresh in (10, 11):
        by_use.store((fresh,))
    assert not all(node.places[DISK_TIER][0] != NO_SLOT for node in by_use.nodes(long))


@pytest.mark.parametrize("name", EVICTIONS)
def test_what_an_earlier_run_left_and_nobody_asked_for_goes_before_the_rest(name: str) -> None:
    disk = Disk(5, eviction_named(name), left=4)
    disk.nodes((5,))  # somebody asks for the last of the four, the three of another text stay as they are
    assert disk.store((1, 2)) == [4, 0]
    assert disk.store((3, 3)) == [1, 2]


def test_a_policy_that_chooses_what_may_not_go_is_named() -> None:
    class Stubborn(LeastRecentlyUsed):
        name = "stubborn"

        def choose(self, group: int) -> Evictable | None:
            return Evictable(group, 0, 0, 0)

    disk = Disk(2, Stubborn())
    disk.store((1, 2))
    disk.tier.hold(0, 0)
    with pytest.raises(PolicyError, match=r"stubborn.*slot 0 of the disk"):
        disk.store((3,))


def test_where_processes_share_a_disk_its_files_go_by_their_last_use_alone(tmp_path: Any) -> None:
    asked = {"reuse": "prefix", "host_bytes": 1 << 20, "disk_path": str(tmp_path), "disk_bytes": 1 << 20}
    assert Config.from_kwargs(**asked, disk_eviction="cheapest_to_rebuild").cache.disk_eviction == "cheapest_to_rebuild"
    with pytest.raises(ConfigError, match=r"disk_eviction='cheapest_to_rebuild'.*share go by lru"):
        Config.from_kwargs(**asked, disk_shared=True, disk_eviction="cheapest_to_rebuild")
    with pytest.raises(ConfigError, match=r"disk_eviction='cheapest_to_rebuild'.*give disk_path"):
        Config.from_kwargs(disk_eviction="cheapest_to_rebuild")
