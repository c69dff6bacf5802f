"""Nodes of the prefix directory, and runs of blocks of which nobody has asked for a node yet.

    node --- node -+- run: block, block, block, block        of 512 new blocks of a prompt one object is made
                   +- node --- run: block, block

Most blocks are kept and given up without ever being found again. In one group and one tier the blocks that a row
fills after each other stand in one `Run`: as nodes they would differ by their place alone. Who wants one of them as a
node unfolds the run up to it (`PrefixDirectory`).

Invariant: a run is never empty; its blocks are referenced, let go and used together, by the one row that filled them;
nothing comes after its last block.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.memory.keys import TOKEN_BYTES

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Node:
    number: int
    """Order of creation; also its identity in events."""
    parent: Node | None
    key: bytes
    said: bytes
    """Token ids of its block as bytes; of a root, what was hashed into its key."""
    index: int
    """Which block of its sequence; -1 for a root."""
    identity: bytes
    """SHA-256 of all its text, whatever hash the keys are made with: what finds it on a disk that keeps no tokens."""
    slots: list[int]
    """On the device, by group; NO_SLOT where its state is not kept."""
    places: tuple[list[int], ...]
    """By tier, then group; the first is `slots`."""
    children_in: tuple[list[int], ...]
    """By tier, then group: how many of its children are kept there."""
    only: Node | Run | None = None
    """Its child, while it has never had two at once."""
    children: dict[bytes, dict[bytes, Node | Run]] | None = None
    """Since it had two: by first token, then by key, whom to compare for a block shared in part."""
    kept: int = 0
    """Slots that it names, of any tier and group."""
    coming: int = 0
    """Copies to the device that are under way, of any group."""
    settled: int = 0
    """Bit by tier and group: since somebody last used it, it was copied down from there, or found not to be."""
    pins: int = 0
    """How many pins keep it."""
    held: int = 0
    """Live sequences whose last keyed block this is."""
    last_used: int = 0


@dataclass(slots=True, eq=False)
class Run:
    """Blocks that follow each other; of lists, an entry a block."""

    parent: Node
    """The block before the first one."""
    index: int
    """Which block of its sequence the first one is."""
    numbers: list[int]
    """Those that their nodes will have."""
    keys: list[bytes]
    said: bytes
    """The token ids of all blocks, and perhaps of some that came after them and were given up."""
    slots: list[int]
    held: int = 1
    """Live sequences whose last keyed block is its last: the row that fills it, or nobody."""
    last_used: int = 0
    last: Node | None = None
    """Once the run has been unfolded to its end: the node of its last block."""

    @property
    def key(self) -> bytes:
        """Of the first block, by which it is found among its siblings."""
        return self.keys[0]


def link(parent: Node, child: Node | Run) -> None:
    """One more child, the latest."""
    if parent.children is None:
        only = parent.only
        if only is None:
            parent.only = child
            return
        parent.only, parent.children = None, {only.said[:TOKEN_BYTES]: {only.key: only}}
    first = child.said[:TOKEN_BYTES]
    alike = parent.children.get(first)
    if alike is None:
        parent.children[first] = {child.key: child}
    else:
        alike[child.key] = child


def unlink(parent: Node, child: Node | Run) -> None:
    """A child is forgotten."""
    if parent.children is None:
        parent.only = None
        return
    first = child.said[:TOKEN_BYTES]
    siblings = parent.children[first]
    if len(siblings) == 1:
        del parent.children[first]
    else:
        del siblings[child.key]


def relink(parent: Node, child: Node | Run) -> None:
    """Another object stands for the same child, at the same place among its siblings."""
    if parent.children is None:
        parent.only = child
    else:
        parent.children[child.said[:TOKEN_BYTES]][child.key] = child


def is_kept(node: Node, tiers: int) -> bool:
    """Whether every group's state of it is in one of the first so many tiers."""
    if NO_SLOT not in node.slots:
        return True
    return tiers > 1 and all(max(slots) != NO_SLOT for slots in zip(*node.places[:tiers], strict=True))
