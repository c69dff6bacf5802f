"""Blocks in slots that the caller chooses: neighbours go in one call, and nothing is served as what it is not."""

from __future__ import annotations

import errno
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.torch.disk_faults import MODEL, PLACES, SIZE, Faulty, flip, key, payload

from octavo.errors import InvariantViolation
from octavo.memory.keys import Chain, KeySpace
from octavo.runtime.disk_format import PAGE_BYTES, SEGMENT_SLOTS, Places
from octavo.runtime.disk_slots import DiskSlots
from octavo.runtime.disk_store import Placed


class Counting(Faulty):
    """Remembers the offsets of calls; fails those that touch a bad stretch of the file."""

    def __init__(self):
        super().__init__()
        self.read_at, self.written_at = [], []
        self.bad = None

    def preadv(self, descriptor, buffers, offset):
        self.read_at.append(offset)
        if self.bad is not None and offset <= self.bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "injected")
        return super().preadv(descriptor, buffers, offset)

    def pwritev(self, descriptor, buffers, offset):
        self.written_at.append(offset)
        if self.bad is not None and offset <= self.bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "injected")
        return super().pwritev(descriptor, buffers, offset)


def store(path, slots=6, syscalls=None, size=SIZE):
    return DiskSlots(path, MODEL, size, Places.of(size).file_bytes(slots), syscalls)


def written(slots, version=0):
    return [Placed(slot, key(slot), payload(slot, version)) for slot in slots]


def served(disk, wanted):
    """Bytes, or why not, for each (slot, key)."""
    memory = [bytearray(disk.block_bytes) for _ in wanted]
    reasons = disk.read([Placed(slot, k, into) for (slot, k), into in zip(wanted, memory, strict=True)])
    return [reason or bytes(into) for reason, into in zip(reasons, memory, strict=True)]


def test_a_batch_in_any_order_comes_back_whole_and_after_a_restart_says_what_lies_where(tmp_path):
    order = [4, 0, 5, 1, 2]
    with_path = tmp_path / "slots"
    disk = store(with_path)
    assert disk.write(written(order)) == [None] * 5
    assert served(disk, [(n, key(n)) for n in (2, 5, 0, 3)]) == [payload(2), payload(5), payload(0), "absent"]
    disk.close()
    disk = store(with_path)
    assert sorted(disk.stored()) == sorted((key(n), n) for n in order)
    assert served(disk, [(n, key(n)) for n in order]) == [payload(n) for n in order]
    disk.close()


def test_after_a_restart_the_oldest_write_is_named_first(tmp_path):
    disk = store(tmp_path / "slots")
    for slot in (3, 1, 4, 1, 0):
        disk.write(written([slot]))
    assert disk.stored() == [(key(n), n) for n in (3, 4, 1, 0)]
    disk.close()
    disk = store(tmp_path / "slots")
    assert disk.stored() == [(key(n), n) for n in (3, 4, 1, 0)]
    disk.close()


def test_neighbours_are_read_and_written_in_one_call_up_to_a_segments_end(tmp_path):
    calls = Counting()
    disk = store(tmp_path / "slots", 2 * SEGMENT_SLOTS, calls)
    calls.read_at.clear()
    calls.written_at.clear()
    disk.write(written([2, 3, 4, 5]))
    assert calls.written_at == [PLACES.header(2), PLACES.block(2), PLACES.header(2)]
    served(disk, [(n, key(n)) for n in (5, 4, 3, 2)])
    assert calls.read_at == [PLACES.header(2), PLACES.block(2)]
    calls.written_at.clear()
    edge = SEGMENT_SLOTS - 1
    disk.write(written([edge, edge + 1]))
    assert PLACES.block(edge) in calls.written_at
    assert PLACES.block(edge + 1) in calls.written_at
    disk.close()


def test_blocks_lie_on_page_boundaries_and_never_overlap():
    for size in (1, 700, PAGE_BYTES, PAGE_BYTES + 1):
        places = Places.of(size)
        spans = []
        for slot in range(2 * SEGMENT_SLOTS + 3):
            assert places.block(slot) % PAGE_BYTES == 0
            spans += [(places.header(slot), 512), (places.block(slot), size)]
            assert places.slots_in(places.file_bytes(slot + 1)) == slot + 1
            assert places.slots_in(places.file_bytes(slot + 1) - 1) == slot
        spans.sort()
        assert all(start + length <= after for (start, length), (after, _) in pairwise(spans))


@pytest.mark.parametrize("where", ["header", "block"])
def test_a_bad_sector_in_a_run_is_one_miss_and_one_refusal(tmp_path, where):
    calls = Counting()
    disk = store(tmp_path / "slots", syscalls=calls)
    disk.write(written(range(6)))
    calls.bad = PLACES.header(3) if where == "header" else PLACES.block(3) + 5
    found = served(disk, [(n, key(n)) for n in range(6)])
    assert found == [payload(0), payload(1), payload(2), "io_error", payload(4), payload(5)]
    assert disk.write(written(range(6), 1)) == [None, None, None, "io_error", None, None]
    calls.bad = None
    found = served(disk, [(n, key(n)) for n in range(6)])
    assert found == [payload(n, 1) if n != 3 else "absent" for n in range(6)]
    facts = disk.stats()
    assert dict(facts.misses) == {"io_error": 1, "absent": 1}
    assert dict(facts.refusals) == {"io_error": 1}
    assert facts.bytes_written == 11 * SIZE
    disk.close()


def test_a_slot_read_under_another_key_is_a_miss_even_when_the_disk_kept_the_old_block(tmp_path):
    path = tmp_path / "slots"
    disk = store(path, 1)
    disk.write([Placed(0, key(1), payload(1))])
    before = path.read_bytes()
    assert served(disk, [(0, key(1))]) == [payload(1)]
    assert served(disk, [(0, key(2))]) == ["absent"]
    disk.write([Placed(0, key(2), payload(2))])
    with path.open("r+b") as file:  # a disk that claims to have written and has not
        file.write(before)
    assert served(disk, [(0, key(2))]) == ["wrong_key"]
    disk.close()


def test_a_block_read_before_is_checked_again_whenever_it_is_read(tmp_path):
    path = tmp_path / "slots"
    for at in (PLACES.header(0), PLACES.header(0) + 300, PLACES.block(0), PLACES.block(0) + SIZE - 1):
        path.unlink(missing_ok=True)
        disk = store(path, 1)
        disk.write(written([0]))
        assert served(disk, [(0, key(0))] * 2) == [payload(0)] * 2
        flip(path, at)
        assert served(disk, [(0, key(0))])[0] in ("bad_header", "bad_checksum")
        disk.close()


def test_what_is_forgotten_is_not_found_by_a_later_run(tmp_path):
    disk = store(tmp_path / "slots")
    disk.write(written(range(4)))
    disk.forget([1, 2])
    assert served(disk, [(1, key(1))]) == ["absent"]
    disk.close()
    disk = store(tmp_path / "slots")
    assert [slot for _, slot in disk.stored()] == [0, 3]
    assert key(1) not in (tmp_path / "slots").read_bytes()
    disk.close()


def test_another_salt_is_another_key_and_never_a_hit(tmp_path):
    space = KeySpace("model", 4)
    tokens = random.Random(3).choices(range(100), k=16)

    def keys(salt):
        chain = Chain(space, salt)
        chain.extend(np.array(tokens, dtype=np.int32))
        return chain.keys

    disk = store(tmp_path / "slots")
    disk.write([Placed(slot, k, payload(slot)) for slot, k in enumerate(keys("alice"))])
    assert served(disk, list(enumerate(keys("alice")))) == [payload(slot) for slot in range(4)]
    disk.close()
    disk = store(tmp_path / "slots")
    stored = dict(disk.stored())
    assert not [k for k in keys("bob") if k in stored]
    assert served(disk, list(enumerate(keys("bob")))) == ["absent"] * 4
    assert served(disk, [(slot, k) for k, slot in disk.stored()]) == [payload(slot) for slot in stored.values()]
    disk.close()


def test_slots_keys_and_blocks_that_cannot_be_are_broken_invariants(tmp_path):
    disk = store(tmp_path / "slots", 2)
    for placed in (Placed(2, key(0), payload(0)), Placed(-1, key(0), payload(0)), Placed(0, b"short", payload(0))):
        with pytest.raises(InvariantViolation):
            disk.write([placed])
    with pytest.raises(InvariantViolation):
        disk.read([Placed(0, key(0), bytearray(SIZE - 1))])
    disk.close()
    assert disk.write(written([0])) == ["closed"]
    assert served(disk, [(0, key(0))]) == ["closed"]


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=8), min_size=1, max_size=8
    ),
    size=st.sampled_from([64, 512, 4096, 5000]),
)
def test_any_batches_of_writes_leave_in_each_slot_what_was_written_last(tmp_path_factory, batches, size):
    disk = store(tmp_path_factory.mktemp("disk") / "slots", 10, size=size)
    model = {}
    for batch in batches:
        blocks = [Placed(slot, key(slot + 10 * v), bytes([slot * 3 + v]) * size) for slot, v in batch]
        assert disk.write(blocks) == [None] * len(blocks)
        model.update((placed.slot, placed) for placed in blocks)
        assert sorted(disk.stored()) == sorted((placed.key, slot) for slot, placed in model.items())
        got = served(disk, [(slot, placed.key) for slot, placed in model.items()])
        assert got == [placed.block for placed in model.values()]
    disk.close()
