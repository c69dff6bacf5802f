"""The prefix directory: which full blocks can be found again, by what they hold, and in which tiers.

    root(salt) -- node: tokens of block 0 -- node: block 1 -+- node: block 2
            device (7, 12, -)                 (2, 3, -)     +- node: another block 2
            host   (-, 4, 9)

A node is one block of text after the text before it; for each tier and group it names the slot that holds its state,
or none. State of a constant group stands at a node when it was copied exactly at the node's end. A node lives as
long as it, or one below it, names a slot or is the last of a live sequence. Owns nodes, and which slot belongs to
which; references are the cache's.

Invariant: a slot of a tier stands at one node at most, and holds exactly the state of that node's text: a node is
reached only by comparing tokens, whatever the hash says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from octavo.memory.keys import IDENTIFYING, TOKEN_BYTES, KeySpace, packed, sha256, token_bytes
from octavo.memory.layout import GroupLayout
from octavo.memory.nodes import NO_SLOT, Node, Run, is_kept, link, relink, unlink
from octavo.memory.values import Int32

_SIBLINGS = 16
"""Siblings that are compared for a block shared in part: the latest so many of the same first token."""


@dataclass(frozen=True, slots=True)
class Match:
    """How far a sequence can start from what is kept: `tokens` positions, valid in all groups."""

    tokens: int = 0
    path: tuple[Node, ...] = ()
    """The whole blocks among them."""
    partial: Node | None = None
    """The block whose first `tokens % block_tokens` positions are wanted: to be copied, not shared."""
    asked: int = 0
    """Positions that were looked up; 0: nothing was."""
    known: int = 0
    """Of those, positions whose text is known, whether or not every group keeps what a start there needs."""
    unused: int = 0
    """Positions that were found and are left alone, for want of room to copy from them."""

    def left_alone(self) -> Match:
        """The same look-up, none of which is used."""
        return Match(asked=self.asked, known=self.known, unused=self.tokens)


NO_MATCH = Match()


Slots = tuple[npt.NDArray[np.bool_], ...]


class PrefixDirectory:
    def __init__(self, groups: Sequence[GroupLayout], slots: Sequence[Sequence[int]], space: KeySpace) -> None:
        """`slots[tier][group]`: how many there are."""
        self.space = space
        self.keyed_in: tuple[Slots, ...] = tuple(tuple(np.zeros(n, dtype=bool) for n in tier) for tier in slots)
        """By tier, group and slot: whether it stands at a node."""
        self.keyed = self.keyed_in[0]
        """On the device."""
        self.groups = tuple(groups)
        self.grows = tuple(g.block_tokens > 0 and not g.slides for g in groups)
        """By group: whether a block is of use only together with all before it."""
        self._nodes: dict[bytes, Node | Run] = {}
        self._at: tuple[tuple[dict[int, Node | Run], ...], ...] = tuple(tuple({} for _ in groups) for _ in slots)
        self._numbers = 0
        self.keys_identify = space.digest in IDENTIFYING
        """Whether the key of a block is its identity too."""
        self.plain = len(slots) == 1 and self.grows == (True,)
        """One group, of which a block is of use only together with all before it, and one tier."""
        self.in_runs = 0
        """Blocks of which there is no node yet."""
        self.changes = 0
        """How often a slot of any tier was given to a node, or taken from one."""
        self.uses = 0
        """How often state was let go by somebody who had read it: the clock of `last_used`."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def some(self, most: int) -> list[Node | Run]:
        """Of the oldest `most` keys and the latest, what stands for them, each once. Unfolds nothing."""
        values = self._nodes.values()
        return list({id(one): one for end in (values, reversed(values)) for one in islice(end, most)}.values())

    def nodes(self) -> Iterator[Node]:
        """All nodes, roots included, in order of creation."""
        for key, found in self._nodes.items():
            yield self._node(found, key)

    def node_of(self, group: int, slot: int, tier: int = 0) -> Node:
        found = self._at[tier][group][slot]
        return self.unfold(found, found.slots.index(slot) + 1)[-1] if isinstance(found, Run) else found

    def standing_at(self, group: int, slots: Sequence[int], tier: int = 0) -> list[Node | Run]:
        """What stands at these slots, in order: a run only where all of its slots are among them, one after another."""
        at, place = self._at[tier][group], 0
        found: list[Node | Run] = []
        while place < len(slots):
            one = at[slots[place]]
            if isinstance(one, Run):
                many = len(one.slots)
                if slots[place : place + many] == one.slots:
                    place += many
                    found.append(one)
                    continue
                one = self.node_of(group, slots[place], tier)
            place += 1
            found.append(one)
        return found

    def run_at(self, slot: int) -> Run | None:
        """The run that this slot is the last of, in one group and one tier."""
        found = self._at[0][0][slot]
        return found if isinstance(found, Run) and found.slots[-1] == slot else None

    def lives(self, node: Node) -> bool:
        """Whether it can still be found; one that was forgotten is replaced by another of the same text."""
        return self._nodes.get(node.key) is node

    def find(self, key: bytes) -> Node | None:
        found = self._nodes.get(key)
        return found if found is None else self._node(found, key)

    def _node(self, found: Node | Run, key: bytes) -> Node:
        return self.unfold(found, found.keys.index(key) + 1)[-1] if isinstance(found, Run) else found

    # -- finding ------------------------------------------------------------------------------

    def match(
        self, keys: Sequence[bytes], root: tuple[bytes, bytes], tokens: Int32, limit: int, tiers: int = 1
    ) -> Match:
        """The longest start of `tokens`, at most `limit` positions, that can be had in all groups.

        `keys` are those of its full blocks; what is kept below the first `tiers` tiers does not count. Reads only,
        but that runs are unfolded as far as they are matched.
        """
        top = self.find(root[0])
        if top is None or top.said != root[1]:
            return Match(asked=limit)
        path = self._walk(top, keys, tokens)
        size = self.space.block_tokens
        whole = min(len(path), limit // size)
        partial, shared = self._partly_shared(path, top, tokens, whole, limit)
        known = whole * size + shared
        if all(self.grows):
            return self._longest(path, whole, partial, known, limit, tiers)
        has = self._has(path, tiers)
        part = None if partial is None else [bool(one[0]) for one in self._has([partial], tiers)]
        if part is not None and self._valid(has, whole, part, known):
            return Match(known, tuple(path[:whole]), partial, limit, known)
        for count in range(whole, 0, -1):
            if self._valid(has, count, None, count * size):
                return Match(count * size, tuple(path[:count]), None, limit, known)
        return Match(asked=limit, known=known)

    def _longest(
        self, path: Sequence[Node], whole: int, partial: Node | None, known: int, limit: int, tiers: int
    ) -> Match:
        """The match where each block is of use together with all before it: up to the first that some group lacks."""
        count = 0
        while count < whole and is_kept(path[count], tiers):
            count += 1
        if count == whole and partial is not None and is_kept(partial, tiers):
            return Match(known, tuple(path[:whole]), partial, limit, known)
        if not count:
            return Match(asked=limit, known=known)
        return Match(count * self.space.block_tokens, tuple(path[:count]), None, limit, known)

    def _has(self, path: Sequence[Node], tiers: int) -> list[npt.NDArray[np.bool_]]:
        """By group: whether each node of the path is kept in one of the first `tiers` tiers."""
        has = []
        for g in range(len(self.groups)):
            kept = np.array([node.slots[g] for node in path], dtype=np.int64) >= 0
            for tier in range(1, min(tiers, len(self._at))):
                kept |= np.array([node.places[tier][g] for node in path], dtype=np.int64) >= 0
            has.append(kept)
        return has

    def _walk(self, node: Node, keys: Sequence[bytes], tokens: Int32) -> list[Node]:
        size, path = self.space.block_tokens, list[Node]()
        while len(path) < len(keys):
            index = len(path)
            found = self._nodes.get(keys[index])
            if found is None or found.parent is not node:
                break
            if isinstance(found, Run):
                alike = self._alike(found, keys[index : index + len(found.keys)], tokens[index * size :])
                if not alike:
                    break
                path += self.unfold(found, alike)
            else:
                if found.said != token_bytes(tokens[index * size : (index + 1) * size]):
                    break
                path.append(found)
            node = path[-1]
        return path

    def _alike(self, run: Run, keys: Sequence[bytes], tokens: Int32) -> int:
        """Blocks of the run that have these keys and tokens, one after the other."""
        size, many = self.space.block_tokens, len(keys)
        width, said = TOKEN_BYTES * size, token_bytes(tokens[: many * size])
        if run.keys[:many] == keys and run.said.startswith(said):
            return many
        for place, key in enumerate(keys):
            part = slice(place * width, (place + 1) * width)
            if run.keys[place] != key or run.said[part] != said[part]:
                return place
        return many

    def _partly_shared(
        self, path: Sequence[Node], top: Node, tokens: Int32, whole: int, limit: int
    ) -> tuple[Node | None, int]:
        """The block after `whole` ones whose first tokens are wanted, and how many of them."""
        size = self.space.block_tokens
        rest = token_bytes(tokens[whole * size : min(limit, (whole + 1) * size)])
        if not rest:
            return None, 0
        if len(path) > whole:
            return path[whole], len(rest) // TOKEN_BYTES
        parent = path[whole - 1] if whole else top
        siblings: Iterable[Node | Run] = ()
        if parent.children is not None:
            alike = parent.children.get(rest[:TOKEN_BYTES])
            # Thousands of prompts may begin with one token.
            siblings = () if alike is None else islice(reversed(alike.values()), _SIBLINGS)
        elif parent.only is not None:
            siblings = (parent.only,)
        best, most = None, 0
        for node in siblings:
            shared = _shared_tokens(node.said, rest)  # `rest` is a block at most
            if shared > most:
                best, most = node, shared
        return self.unfold(best, 1)[0] if isinstance(best, Run) else best, most

    def _valid(
        self, has: Sequence[npt.NDArray[np.bool_]], whole: int, partial: Sequence[bool] | None, tokens: int
    ) -> bool:
        """Whether every group keeps what a query at position `tokens` reads of this start."""
        for g, group in enumerate(self.groups):
            if group.block_tokens == 0:
                if partial is not None or not has[g][whole - 1]:
                    return False
                continue
            first = int(group.first_block(np.array([tokens]))[0])
            if not has[g][first:whole].all() or (partial is not None and not partial[g]):
                return False
        return True

    # -- keeping ------------------------------------------------------------------------------

    def root(self, root: tuple[bytes, bytes]) -> Node | None:
        """The root of a chain, made if need be; None when its key is taken by another."""
        return self._obtain(root[0], root[1], None)

    def child(self, parent: Node, key: bytes, tokens: Int32) -> Node | None:
        """The node of a block after `parent`, made if need be; None when its key is taken by another text."""
        return self._obtain(key, token_bytes(tokens), parent)

    def child_that_says(self, parent: Node, key: bytes, said: bytes) -> Node | None:
        """`child`, of tokens that are bytes already."""
        return self._obtain(key, said, parent)

    def _obtain(self, key: bytes, said: bytes, parent: Node | None) -> Node | None:
        node = self.find(key)
        if node is not None:
            return node if node.parent is parent and node.said == said else None
        self._numbers += 1
        none, zero = [NO_SLOT] * len(self.groups), [0] * len(self.groups)
        places: tuple[list[int], ...] = (none,)
        children_in: tuple[list[int], ...] = (zero,)
        for _ in range(1, len(self._at)):
            places, children_in = (*places, none.copy()), (*children_in, zero.copy())
        identity = self._identity(parent, key, said)
        index = -1 if parent is None else parent.index + 1
        node = Node(self._numbers, parent, key, said, index, identity, none, places, children_in)
        self._nodes[key] = node
        if parent is not None:
            link(parent, node)
        return node

    def _identity(self, parent: Node | None, key: bytes, said: bytes) -> bytes:
        if self.keys_identify:
            return key
        return sha256(said if parent is None else packed(parent.identity, said))

    def grow(
        self, tail: Node | Run, keys: Sequence[bytes], said: bytes, slots: Sequence[int]
    ) -> tuple[Node | Run, int]:
        """Blocks that follow each other after `tail`, up to one whose key is known, which the first one's is not:
        `child_that_says` and `place` of each in turn, in one group and one tier. The new tail, and how many they are.
        """
        nodes, at = self._nodes, self._at[0][0]
        many = len(keys)
        if many > 1 and not (nodes.keys().isdisjoint(keys) and len(set(keys)) == many):
            many = next(i for i in range(1, many + 1) if i == many or keys[i] in nodes or keys[i] in keys[:i])
            keys, slots = keys[:many], slots[:many]
        if len(said) > many * TOKEN_BYTES * self.space.block_tokens:
            said = said[: many * TOKEN_BYTES * self.space.block_tokens]
        numbers = range(self._numbers + 1, self._numbers + 1 + many)
        if isinstance(tail, Run):
            run = tail
            run.numbers.extend(numbers)
            run.keys.extend(keys)
            run.said += said
            run.slots.extend(slots)
        else:
            run = Run(tail, tail.index + 1, list(numbers), list(keys), said, list(slots))
            tail.held -= 1
            tail.children_in[0][0] += 1
            link(tail, run)
        nodes.update(dict.fromkeys(keys, run))
        at.update(dict.fromkeys(slots, run))
        self._numbers += many
        self.in_runs += many
        self.changes += many
        self.keyed[0][slots[0] if many == 1 else slots] = True
        return run, many

    def unfold(self, run: Run, count: int) -> list[Node]:
        """Nodes in place of the run's first `count` blocks; what is left of it comes after them."""
        nodes, at = self._nodes, self._at[0][0]
        width, parent = TOKEN_BYTES * self.space.block_tokens, run.parent
        made: list[Node] = []
        for place in range(count):
            key, slot, text = run.keys[place], run.slots[place], run.said[place * width : (place + 1) * width]
            own, identity = [slot], self._identity(parent, key, text)
            node = Node(run.numbers[place], parent, key, text, run.index + place, identity, own, (own,), ([1],))
            node.kept, node.last_used = 1, run.last_used
            if made:
                parent.only = node
            nodes[key] = at[slot] = parent = node
            made.append(node)
        relink(run.parent, made[0])
        self.in_runs -= count
        if count == len(run.keys):
            parent.children_in[0][0] = 0
            parent.held = run.held
            run.last = parent
            return made
        parent.only, run.parent = run, parent
        run.index += count
        run.said = run.said[count * width :]
        for column in (run.numbers, run.keys, run.slots):
            del column[:count]
        return made

    def cut(self, run: Run, count: int) -> list[int]:
        """`displace` of the run's last `count` blocks, the last one first. Returns their slots."""
        slots, keys = run.slots[-count:][::-1], run.keys[-count:]
        if count == len(run.slots):
            unlink(run.parent, run)
            run.parent.children_in[0][0] -= 1
        for column in (run.numbers, run.keys, run.slots):
            del column[-count:]
        left = len(run.keys) * TOKEN_BYTES * self.space.block_tokens
        if len(run.said) > left + left // 4:  # not for every block: it is copied
            run.said = run.said[:left]
        at, nodes = self._at[0][0], self._nodes
        for slot, key in zip(slots, keys, strict=True):
            del at[slot]
            del nodes[key]
        self.keyed[0][slots] = False
        self.in_runs -= count
        self.changes += count
        if not run.slots and not run.parent.kept:
            self.forget_if_bare(run.parent)
        return slots

    def shrink(self, run: Sequence[Node]) -> list[int]:
        """`displace` of each of these nodes in turn, each the only child of the next that is kept: in one group and
        one tier. Returns their slots."""
        nodes, at = self._nodes, self._at[0][0]
        slots: list[int] = []
        for node in run:
            slot = node.slots[0]
            del at[slot]
            slots.append(slot)
            node.slots[0] = NO_SLOT
            node.kept = 0
            parent = node.parent
            if parent is not None:
                parent.children_in[0][0] -= 1
                if node.only is None and not node.children and not node.held:
                    del nodes[node.key]
                    if parent.children is None:
                        parent.only = None
                    else:
                        unlink(parent, node)
        self.keyed[0][slots] = False
        self.changes += len(run)
        last = run[-1].parent
        if last is not None and not last.kept:
            self.forget_if_bare(last)
        return slots

    def place(self, node: Node, group: int, slot: int, tier: int = 0) -> None:
        """`slot` holds the state of `node` in this group, which this tier keeps nowhere else."""
        node.places[tier][group] = slot
        node.kept += 1
        self.changes += 1
        self.keyed_in[tier][group][slot] = True
        self._at[tier][group][slot] = node
        if node.parent is not None:
            node.parent.children_in[tier][group] += 1

    def displace(self, group: int, slot: int, tier: int = 0) -> Node:
        """The slot is given up; nodes that nothing needs any more are forgotten. Returns the node it stood at."""
        node = self.node_of(group, slot, tier)
        del self._at[tier][group][slot]
        self.keyed_in[tier][group][slot] = False
        node.places[tier][group] = NO_SLOT
        node.kept -= 1
        self.changes += 1
        if node.parent is not None:
            node.parent.children_in[tier][group] -= 1
        if not node.kept and not node.held and node.only is None and not node.children:
            self.forget_if_bare(node)
        return node

    def forget_if_bare(self, node: Node) -> None:
        """Remove a node that names no slot, has none below it and is nobody's, and so on towards its root."""
        at: Node | None = node
        while at is not None and at.only is None and not at.children and not at.held and not at.kept:
            del self._nodes[at.key]
            parent = at.parent
            if parent is not None:
                unlink(parent, at)
            at = parent


def _shared_tokens(one: bytes, other: bytes) -> int:
    """Token ids in which both begin alike."""
    most = min(len(one), len(other)) // TOKEN_BYTES
    a, b = np.frombuffer(one, "<i4", most), np.frombuffer(other, "<i4", most)
    differing = np.flatnonzero(a != b)
    return int(differing[0]) if len(differing) else most
