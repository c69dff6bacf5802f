"""What bookkeeping takes of the host's memory: tables, states of slots, and what finds kept blocks again.

Arrays are counted to the byte. Nodes of the prefix directory are Python objects: the oldest few are weighed with what
belongs to them alone, and stand for all. Reads only; costs the same however many nodes there are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

import numpy as np

from octavo.memory.cache import KVCache
from octavo.memory.keys import TOKEN_BYTES
from octavo.memory.nodes import NO_SLOT, Node
from octavo.memory.pool import BlockPool
from octavo.memory.prefix import PrefixDirectory

WEIGHED = 64
"""Nodes that stand for all."""
ENTRY_BYTES = 60
"""Of a dict, for each key that it holds: its entry, its part of the index, and what is kept free."""
INT_BYTES = 32
"""Of an integer as an object."""


def metadata_bytes(cache: KVCache, host: BlockPool | None) -> int:
    """`host`: the pool of the host tier, if there is one."""
    arrays: list[np.ndarray] = [cache.committed, cache.touched]
    for table in cache.tables:
        arrays += [table.slots, table.counts]
    for pool in (cache.pool, *(() if host is None else (host,))):
        arrays += [pool.owner, pool.used]
        for slots in pool.slots:
            arrays += [slots.state, slots.refs, slots.last_plan]
    found = sum(array.nbytes for array in arrays)
    return found if cache.sharing is None else found + directory_bytes(cache.sharing.directory)


def directory_bytes(directory: PrefixDirectory) -> int:
    """About what the prefix directory takes."""
    columns = sum(slots.nbytes for tier in directory.keyed_in for slots in tier)
    blocks = islice((node for node in directory.nodes() if node.parent is not None), WEIGHED)
    weighed = [_node_bytes(node, node.parent) for node in blocks if node.parent is not None]
    return columns + (round(sum(weighed) / len(weighed) * len(directory)) if weighed else 0)


def _node_bytes(node: Node, parent: Node) -> float:
    """What it has for itself, and its part of what its parent finds it by; its children are weighed for themselves."""
    own = {id(part): part for part in _parts(node)}.values()
    placed = sum(slot != NO_SLOT for place in node.places for slot in place)
    found_by = 0.0
    if parent.children is not None:
        first = node.said[:TOKEN_BYTES]
        alike = parent.children[first]
        found_by = sys.getsizeof(parent.children) / len(parent.children) + sys.getsizeof(alike) / len(alike)
        found_by += sys.getsizeof(first) / len(alike)
    return sum(map(sys.getsizeof, own)) + found_by + ENTRY_BYTES + placed * (ENTRY_BYTES + INT_BYTES)


def _parts(node: Node) -> Iterator[object]:
    yield from (node, node.key, node.said, node.identity)
    yield from (node.places, *node.places, node.children_in, *node.children_in)
    if node.children is not None and not node.children:
        yield node.children
