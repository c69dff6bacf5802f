"""Measures what moving blocks between tiers takes: between two arenas, and to and from a file where one is given.

Owns the sizes and their order; the copies are those of the mover, without its threads and queues. Several sizes are
measured in turn, again and again, so that a change of the machine's mood hits all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from octavo.cost.learn import trimmed_mean
from octavo.cost.transfer import TransferLaw
from octavo.memory.layout import Layout
from octavo.runtime.arena import Arena
from octavo.runtime.block_copy import BlockCopier
from octavo.runtime.disk_batch import Batch
from octavo.runtime.disk_format import KEY_BYTES, Identity, Places
from octavo.runtime.disk_slots import DiskSlots

_SIZES = (1, 2, 4, 8, 16, 32)
"""Blocks in one order."""
_SEEN_BYTES = 256 << 10
"""What the largest order has at least: where blocks are tiny, one of 32 takes no longer than one of 1."""
_REPEATS = 7
_MOST_BYTES = 64 << 20
"""Of one arena."""


def measure_transfers(layout: Layout, device: str, disk_path: Path | None = None) -> dict[str, TransferLaw]:
    """The law of each route, for blocks of the group that has the largest ones."""
    group = max(range(len(layout.groups)), key=lambda index: layout.groups[index].block_bytes)
    size = layout.groups[group].block_bytes
    counts = list(_SIZES)
    while counts[-1] * size < _SEEN_BYTES:
        counts.append(2 * counts[-1])
    slabs = max(2, min(2 * max(counts), _MOST_BYTES // layout.slab_bytes))
    counts = [count for count in counts if 2 * count <= slabs] or [1]
    copier = BlockCopier(Arena(layout, slabs, device), Arena(layout, slabs))
    try:
        copier.device.bytes.fill_(1)
        copier.host.bytes.fill_(1)
        random = np.random.default_rng(0)

        def demote(count: int) -> None:
            copier.copy(True, group, _scattered(random, slabs, count), _scattered(random, slabs, count))

        def promote(count: int) -> None:
            copier.copy(False, group, _scattered(random, slabs, count), _scattered(random, slabs, count))

        actions: dict[str, Callable[[int], None]] = {"demote": demote, "promote": promote}
        if disk_path is None:
            return _laws(actions, counts, size)
        return _laws(actions, counts, size) | _disk_laws(copier, group, size, counts, disk_path)
    finally:
        copier.close()


def _scattered(random: np.random.Generator, slabs: int, count: int) -> list[int]:
    """Slots as they come to lie in a used pool: in no order."""
    return [int(slot) for slot in random.permutation(slabs)[:count]]


def _disk_laws(
    copier: BlockCopier, group: int, size: int, counts: Sequence[int], folder: Path
) -> dict[str, TransferLaw]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "octavo-calibration.blocks"
    identity = Identity.of("calibration", copier.host.layout.signature, copier.host.layout.groups[group].name)
    keys = [place.to_bytes(KEY_BYTES, "big") for place in range(max(counts))]
    disk = DiskSlots(path, identity, size, Places.of(size).file_bytes(len(keys)))

    def blocks(count: int) -> Batch:
        return copier.host_blocks(group, range(count), range(count), keys[:count])

    try:

        def store(count: int) -> None:
            disk.write(blocks(count))

        def load(count: int) -> None:
            disk.read(blocks(count))

        store(max(counts))
        return _laws({"store": store, "load": load}, counts, size)
    finally:
        disk.close()
        path.unlink(missing_ok=True)


def _laws(actions: dict[str, Callable[[int], None]], counts: Sequence[int], size: int) -> dict[str, TransferLaw]:
    took: dict[tuple[str, int], list[float]] = {}
    for repeat in range(_REPEATS + 1):
        for name, act in actions.items():
            for count in counts:
                begun = time.perf_counter()
                act(count)
                if repeat:  # the first round warms up
                    took.setdefault((name, count), []).append(time.perf_counter() - begun)
    return {
        name: TransferLaw.fitted(
            [count * size for count in counts], [trimmed_mean(took[name, count]) for count in counts]
        )
        for name in actions
    }
