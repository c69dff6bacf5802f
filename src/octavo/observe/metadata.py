"""What bookkeeping takes of the host's memory: tables, states of slots, and what finds kept blocks again.

Arrays are counted to the byte. Nodes of the prefix directory and runs of blocks are Python objects: the oldest and the
latest few are weighed with what belongs to them alone, and stand for all of their kind. Reads only: no run is unfolded.
Costs the same however many blocks there are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from octavo.memory.cache import KVCache
from octavo.memory.keys import TOKEN_BYTES
from octavo.memory.nodes import NO_SLOT, Node, Run
from octavo.memory.pool import BlockPool
from octavo.memory.prefix import PrefixDirectory

WEIGHED = 64
"""Keys from each end whose nodes and runs stand for all."""
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
    found = directory.some(WEIGHED)
    nodes = [_node_bytes(one, one.parent) for one in found if isinstance(one, Node) and one.parent is not None]
    runs = [one for one in found if isinstance(one, Run)]
    of_nodes = sum(nodes) / len(nodes) if nodes else 0.0
    of_runs = sum(map(_run_bytes, runs)) / sum(len(run.keys) for run in runs) if runs else of_nodes
    return columns + round(
        (of_nodes or of_runs) * (len(directory) - directory.in_runs) + of_runs * directory.in_runs
    )  # a kind that neither the oldest nor the latest are of weighs like the other


def _node_bytes(node: Node, parent: Node) -> float:
    """What it has for itself, and its part of what its parent finds it by; its children are weighed for themselves."""
    own = {id(part): part for part in _parts(node)}.values()
    placed = sum(slot != NO_SLOT for place in node.places for slot in place)
    return sum(map(sys.getsizeof, own)) + _found_by(node, parent) + ENTRY_BYTES + placed * (ENTRY_BYTES + INT_BYTES)


def _run_bytes(run: Run) -> float:
    """Of all its blocks together."""
    lists = (run, run.numbers, run.keys, run.said, run.slots)
    each = ENTRY_BYTES + sys.getsizeof(run.key) + INT_BYTES + ENTRY_BYTES + INT_BYTES
    return sum(map(sys.getsizeof, lists)) + _found_by(run, run.parent) + len(run.keys) * each


def _found_by(child: Node | Run, parent: Node) -> float:
    if parent.children is None:
        return 0.0
    first = child.said[:TOKEN_BYTES]
    alike = parent.children[first]
    own = (sys.getsizeof(alike) + sys.getsizeof(first)) / len(alike)
    return sys.getsizeof(parent.children) / len(parent.children) + own


def _parts(node: Node) -> Iterator[object]:
    yield from (node, node.key, node.said, node.identity)
    yield from (node.places, *node.places, node.children_in, *node.children_in)
    if node.children is not None and not node.children:
        yield node.children
