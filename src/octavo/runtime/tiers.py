"""The memory of the tiers below the device, and the mover between them: `open_tiers`.

    device arena <-- mover --> host arena (pinned on CUDA) <-- mover --> a store on disk for each group

Owns opening and closing, and how the bytes of the disk are shared out; what lies where is the core's. A store is
named by its group, and bound to the model, the layout and the group by what is written in its headers. Invariant:
either everything is open, or nothing is and a `ConfigError` says what could not be had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from octavo.errors import ConfigError
from octavo.memory.layout import GroupLayout, Layout
from octavo.runtime.arena import Arena
from octavo.runtime.disk_files import FIELD
from octavo.runtime.disk_folder import DiskFolder
from octavo.runtime.disk_format import HEADER_BYTES, Identity, Places
from octavo.runtime.disk_look import LOOK_S
from octavo.runtime.disk_slots import DiskSlots
from octavo.runtime.disk_store import DiskStore
from octavo.runtime.disk_uses import BYTES_A_SLOT, RemembersUses
from octavo.runtime.mover import Budget, Faults, Mover

SNAPSHOT_TOKENS = 1024
"""Positions for each block of constant state that is kept, in sharing out the disk: it is kept once a turn or so."""


@dataclass(frozen=True, slots=True)
class DiskAsked:
    path: Path
    """A directory, made if absent."""
    bytes: int
    """All groups together, at most."""
    shared: bool = False
    """Whether other processes may use the directory at the same time."""


@dataclass(frozen=True, slots=True)
class OpenTiers:
    host: Arena
    disk: tuple[DiskStore, ...]
    """By group; empty where there is no disk."""
    mover: Mover

    @property
    def disk_slots(self) -> tuple[int, ...]:
        """By group."""
        return tuple(store.slots for store in self.disk)

    @property
    def stored(self) -> tuple[tuple[tuple[bytes, int], ...], ...]:
        """By group: key and slot of what an earlier run left, the one to go first foremost."""
        return tuple(tuple(store.stored()) for store in self.disk)

    def close(self) -> None:
        """After the copies under way, and what is to be erased; the stores stay as they are on the disk."""
        self.mover.close()


def open_tiers(
    device: Arena,
    host_slabs: int,
    *,
    fingerprint: str = "",
    disk: DiskAsked | None = None,
    budget: Budget | None = None,
    faults: Faults | None = None,
    look_s: float = LOOK_S,
) -> OpenTiers:
    """A host arena of `host_slabs` slabs, laid out as the device's, and stores of the model that `fingerprint` names.

    `look_s`: between two looks for what other processes have left on a disk that is shared.
    Raises `ConfigError` where the host's memory, or the disk's, is not to be had. Closing the mover closes all.
    """
    try:
        host = Arena(device.layout, host_slabs)
    except ConfigError as error:
        raise ConfigError("host_bytes", host_slabs * device.layout.slab_bytes, error.remedy) from None
    stores = () if disk is None else _stores(device.layout, fingerprint, disk)
    try:
        mover = Mover(device, host, stores, budget=budget, faults=faults, look_s=look_s)
    except BaseException:
        _close(stores)
        raise
    return OpenTiers(host, stores, mover)


def _stores(layout: Layout, fingerprint: str, asked: DiskAsked) -> tuple[DiskStore, ...]:
    shares = _shares(layout, asked)
    try:
        asked.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # of a name that no file has, Python raises the latter
        remedy = f"no directory can be made there: {getattr(error, 'strerror', None) or error}; name another"
        raise ConfigError(FIELD, str(asked.path), remedy) from None
    stores: list[DiskStore] = []
    try:
        for group, share in zip(layout.groups, shares, strict=True):
            identity = Identity.of(fingerprint, layout.signature, group.name)
            if asked.shared:
                stores.append(DiskFolder(asked.path / group.name, identity, group.block_bytes, share))
            else:
                path = asked.path / f"{group.name}.blocks"
                share -= BYTES_A_SLOT * Places.of(group.block_bytes).slots_in(share)
                slots = DiskSlots(path, identity, group.block_bytes, share)
                stores.append(RemembersUses(slots, path.with_suffix(".uses")))
    except MemoryError:
        _close(stores)
        remedy = "is more blocks than there is memory to know them by; give less"
        raise ConfigError("disk_bytes", asked.bytes, remedy) from None
    except BaseException:
        _close(stores)
        raise
    return tuple(stores)


def _close(stores: Sequence[DiskStore]) -> None:
    for store in stores:
        store.close()


def _shares(layout: Layout, asked: DiskAsked) -> list[int]:
    """Bytes of each group: room for one block, and of the rest what a position of it takes of all it takes."""
    least = [_bytes_of_one(group, shared=asked.shared) for group in layout.groups]
    rest = asked.bytes - sum(least)
    if rest < 0:
        remedy = f"a block of each of the {len(least)} groups takes {sum(least)}; give more"
        raise ConfigError("disk_bytes", asked.bytes, remedy)
    weights = [Fraction(group.block_bytes, group.block_tokens or SNAPSHOT_TOKENS) for group in layout.groups]
    return [one + int(rest * weight / sum(weights)) for one, weight in zip(least, weights, strict=True)]


def _bytes_of_one(group: GroupLayout, *, shared: bool) -> int:
    return HEADER_BYTES + group.block_bytes if shared else Places.of(group.block_bytes).file_bytes(1) + BYTES_A_SLOT
