"""What was read last is given up last by a later run too; what is known of uses is a hint, and harms nothing."""

from __future__ import annotations

import itertools

import pytest
from tests.torch.disk_faults import MODEL, PLACES, SIZE, key, payload

from octavo.runtime.disk_batch import Placed
from octavo.runtime.disk_slots import DiskSlots
from octavo.runtime.disk_uses import BYTES_A_SLOT, RemembersUses

SLOTS = 8
SECONDS = itertools.count(1_000_000)


def opened(folder):
    """With a second between any two calls."""
    inner = DiskSlots(folder / "p.blocks", MODEL, SIZE, PLACES.file_bytes(SLOTS))
    return RemembersUses(inner, folder / "p.uses", lambda: float(next(SECONDS)))


def put(store, *names):
    return store.write([Placed(n, key(n), payload(n)) for n in names])


def read(store, *names):
    return store.read([Placed(n, key(n), bytearray(SIZE)) for n in names])


def order(store):
    return [slot for _, slot in store.stored()]


@pytest.fixture
def used(tmp_path):
    """Two texts of three blocks, written from their last blocks on; then the first is read, in two parts."""
    store = opened(tmp_path)
    assert put(store, 2, 1, 0) == [None] * 3
    assert put(store, 6, 5, 4) == [None] * 3
    assert order(store) == [2, 1, 0, 6, 5, 4]
    now = next(SECONDS)
    store._clock = lambda: now
    assert read(store, 0, 1) + read(store, 2) == [None] * 3
    store.close()
    return tmp_path


def test_a_later_run_gives_up_the_oldest_use_and_of_each_text_the_end_first(used):
    store = opened(used)
    assert order(store) == [6, 5, 4, 2, 1, 0]
    assert put(store, 7) == [None]
    store.close()
    again = opened(used)
    assert order(again)[-1] == 7
    assert again.stats().found == 7
    again.close()


def test_a_read_that_fails_is_no_use(used):
    store = opened(used)
    assert store.read([Placed(6, key(1), bytearray(SIZE))]) == ["absent"]
    assert order(store) == [6, 5, 4, 2, 1, 0]
    store.close()


@pytest.mark.parametrize("damage", ["lost", "rubbish", "short", "a directory", "a link"])
def test_where_uses_are_not_known_blocks_go_in_the_order_of_their_writes_and_all_are_served(used, damage, tmp_path):
    path = used / "p.uses"
    path.unlink()
    if damage == "rubbish":
        path.write_bytes(b"\xff" * SLOTS * BYTES_A_SLOT)
    elif damage == "short":
        path.write_bytes(b"\0" * 5)
    elif damage == "a directory":
        path.mkdir()
    elif damage == "a link":
        (tmp_path / "elsewhere").write_bytes(b"not to be touched")
        path.symlink_to(tmp_path / "elsewhere")
    store = opened(used)
    assert order(store) == [0, 1, 2, 4, 5, 6]
    assert read(store, 0, 1, 2) == [None] * 3
    assert order(store) == [4, 5, 6, 2, 1, 0], "for as long as it runs"
    store.close()
    if damage == "a link":
        assert (tmp_path / "elsewhere").read_bytes() == b"not to be touched"


def test_it_is_as_long_as_its_slots_and_for_its_owner_alone(used):
    facts = (used / "p.uses").stat()
    assert (facts.st_size, facts.st_mode & 0o777) == (SLOTS * BYTES_A_SLOT, 0o600)
