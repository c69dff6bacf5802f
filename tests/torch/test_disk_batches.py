"""Whole batches in one call of the extension: the same file, the same proofs and the same reasons as one by one."""

from __future__ import annotations

import errno
import io
import mmap
import os
import random
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.torch.disk_faults import MODEL, Faulty, flip, key

from octavo.errors import InvariantViolation
from octavo.runtime.disk_batch import Batch, extension
from octavo.runtime.disk_files import RealSyscalls
from octavo.runtime.disk_folder import DiskFolder
from octavo.runtime.disk_format import HEADER_BYTES, SEGMENT_SLOTS, Header, Identity, Places, block_checksum, checksum
from octavo.runtime.disk_slots import DiskSlots
from octavo.runtime.disk_store import Placed

pytestmark = pytest.mark.skipif(extension() is None, reason="the native module was not built")

SIZE = 5000  # with padding in the file
PLACES = Places.of(SIZE)
SLOTS = SEGMENT_SLOTS + 20


class Batches(RealSyscalls):
    """Whole batches, and nothing else: whoever falls back to single calls is told."""

    def __init__(self):
        self.single = 0

    def pwritev(self, descriptor, buffers, offset):
        self.single += 1
        return super().pwritev(descriptor, buffers, offset)

    def preadv(self, descriptor, buffers, offset):
        self.single += 1
        return super().preadv(descriptor, buffers, offset)


def payload(n, version=0):
    return random.Random(n * 1000 + version).randbytes(SIZE)


def store(kind, path, syscalls=None, slots=SLOTS):
    if kind == "folder":
        return DiskFolder(path, MODEL, SIZE, slots * (HEADER_BYTES + SIZE), syscalls)
    return DiskSlots(path, MODEL, SIZE, PLACES.file_bytes(slots), syscalls)


def put(disk, numbers, version=0):
    return disk.write([Placed(n, key(n), payload(n, version)) for n in numbers])


def get(disk, numbers):
    memory = [bytearray(SIZE) for _ in numbers]
    reasons = disk.read([Placed(n, key(n), into) for n, into in zip(numbers, memory, strict=True)])
    return [reason or bytes(into) for reason, into in zip(reasons, memory, strict=True)]


def damage(kind, path, n, at):
    """Flip a bit of block n's header (at < HEADER_BYTES) or of its data."""
    if kind == "folder":
        flip(next(path.glob(f"*{key(n).hex()}")), at)
    elif at < HEADER_BYTES:
        flip(path, PLACES.header(n) + at)
    else:
        flip(path, PLACES.block(n) + at - HEADER_BYTES)


kinds = pytest.mark.parametrize("kind", ["slots", "folder"])


@kinds
def test_batches_read_what_single_calls_wrote_and_the_other_way_round(kind, tmp_path):
    numbers = random.Random(1).sample(range(SLOTS), SLOTS)
    calls = Batches()
    for name, writer, reader in (("a", calls, Faulty()), ("b", Faulty(), calls)):
        with closing(store(kind, tmp_path / name, writer)) as disk:
            calls.single = 0
            assert put(disk, numbers) == [None] * SLOTS
            assert calls.single == 0
        with closing(store(kind, tmp_path / name, reader)) as disk:
            calls.single = 0
            some = numbers[:50]
            assert get(disk, some) == [payload(n) for n in some]
            assert calls.single == 0


def test_the_file_that_a_batch_writes_is_the_one_that_single_calls_write(tmp_path):
    for name, calls in (("a", Batches()), ("b", Faulty())):
        with closing(store("slots", tmp_path / name, calls)) as disk:
            put(disk, range(3, SLOTS, 2))
            put(disk, range(10), 1)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@kinds
@pytest.mark.parametrize("at", [0, 8, 12, 16, 47, 48, 80, 112, 120, 128, 143, 144, 400, 496, 511, 512, 3000, 5511])
def test_a_bit_that_flips_anywhere_in_a_batch_is_one_miss_and_the_others_are_served(kind, at, tmp_path):
    path, bad = tmp_path / "disk", 7
    with closing(store(kind, path)) as disk:
        put(disk, range(16))
        damage(kind, path, bad, at)
        found = get(disk, range(16))
        assert found.pop(bad) == ("bad_header" if at < HEADER_BYTES else "bad_checksum")
        assert found == [payload(n) for n in range(16) if n != bad]
        assert get(disk, [bad]) == ["absent"]
        assert put(disk, [bad], 1) == [None]
        assert get(disk, [bad, 8]) == [payload(bad, 1), payload(8)]


@kinds
def test_a_lost_end_is_a_miss_for_those_it_held_and_the_others_are_served(kind, tmp_path):
    path = tmp_path / "disk"
    with closing(store(kind, path)) as disk:
        put(disk, range(12))
        if kind == "folder":
            for n in (10, 11):
                os.truncate(next(path.glob(f"*{key(n).hex()}")), 4000)
        else:
            os.truncate(path, PLACES.block(10) + SIZE - 1)
        assert get(disk, range(12)) == [payload(n) for n in range(10)] + ["truncated"] * 2


@kinds
def test_another_key_or_model_in_a_batch_is_a_miss_by_reason(kind, tmp_path):
    path, other = tmp_path / "disk", Identity.of("model b", "layout a", "full")
    with closing(store(kind, path)) as disk:
        put(disk, range(6))
        where = {n: (next(path.glob(f"*{key(n).hex()}")), 0) for n in range(6)} if kind == "folder" else {}
        for n, header in (
            (2, Header(key(9), MODEL, SIZE, 5, block_checksum(payload(2)))),
            (4, Header(key(4), other, SIZE, 5, block_checksum(payload(4)))),
        ):
            file, start = where.get(n, (path, PLACES.header(n)))
            with file.open("r+b") as opened:
                opened.seek(start)
                opened.write(header.encoded())
        found = get(disk, range(6))
        assert [found[2], found[4]] == ["wrong_key", "wrong_fingerprint"]
        assert [found[n] for n in (0, 1, 3, 5)] == [payload(n) for n in (0, 1, 3, 5)]


def old_header(n):
    """As version 2 wrote them: the same fields, and a SHA-256 of their own behind."""
    fields = bytearray(Header(key(n), MODEL, SIZE, n, block_checksum(payload(n))).encoded()[:144])
    fields[8] = 2
    return (bytes(fields) + checksum(fields)).ljust(HEADER_BYTES, b"\0")


def test_a_file_of_the_version_before_is_a_miss_by_reason_and_is_written_anew(tmp_path):
    path = tmp_path / "disk"
    with closing(store("slots", path)) as disk:
        put(disk, range(4))
        with path.open("r+b") as file:
            file.seek(PLACES.header(2))
            file.write(old_header(2))
        assert get(disk, range(4)) == [payload(0), payload(1), "wrong_version", payload(3)]
    with path.open("r+b") as file:
        fields = bytearray(path.read_bytes()[:24])
        fields[8] = 2
        file.write((bytes(fields) + checksum(fields)).ljust(4096, b"\0"))
    with closing(store("slots", path)) as disk:
        assert dict(disk.stats().left_aside) == {"wrong_version": 1}
        assert disk.stored() == []
        assert put(disk, [1]) == [None]
        assert get(disk, [1]) == [payload(1)]


def test_a_run_over_whole_segments_leaves_the_headers_of_the_others_alone(tmp_path):
    slots = 3 * SEGMENT_SLOTS + 10
    with_a_hole = [n for n in range(slots) if n != SEGMENT_SLOTS + 40]
    for some in (
        range(2 * SEGMENT_SLOTS),
        range(5, 3 * SEGMENT_SLOTS),
        range(70, 190),
        range(64, slots - 3),
        with_a_hole,
    ):
        calls = Batches()
        path = tmp_path / f"{some[0]}-{len(some)}"
        with closing(store("slots", path, calls, slots)) as disk:
            calls.single = 0
            assert put(disk, range(slots)) == [None] * slots
            assert put(disk, some, version=1) == [None] * len(some)
            assert get(disk, range(slots)) == [payload(n, int(n in some)) for n in range(slots)]
            assert calls.single == 0


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of the process in /proc")
def test_threads_that_help_are_as_many_as_asked_and_end_with_the_store(tmp_path):
    def helpers():
        return len(list(Path("/proc/self/task").iterdir()))

    for threads in (1, 3):
        with closing(
            DiskSlots(tmp_path / f"{threads}", MODEL, SIZE, PLACES.file_bytes(SLOTS), threads=threads)
        ) as disk:
            before = helpers()
            for _ in range(3):  # batches of half a megabyte or less are moved by their caller
                assert put(disk, range(SLOTS)) == [None] * SLOTS
            assert helpers() == before
        wide = 64 * SIZE
        disk = DiskSlots(tmp_path / f"w{threads}", MODEL, wide, Places.of(wide).file_bytes(4), threads=threads)
        with closing(disk):
            blocks = [Placed(n, key(n), payload(n) * 64) for n in range(4)]
            assert disk.write(blocks) == [None] * 4
            assert helpers() == before  # the file has one writer, which hashes for itself
            into = [Placed(n, key(n), bytearray(wide)) for n in range(4)]
            assert disk.read(into) == [None] * 4
            assert helpers() == before + threads - 1
        assert helpers() == before


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="nothing makes this system forget a file")
@pytest.mark.parametrize("size", [16 << 10, 64 << 10, 5000])
@pytest.mark.parametrize("aligned", [True, False])
def test_what_is_in_no_memory_comes_from_the_disk_as_it_was_written_and_is_proven(tmp_path, size, aligned):
    """Lone blocks and runs, in memory that a disk can write by itself and in memory that it cannot."""
    slots, path, bad = 3 * SEGMENT_SLOTS, tmp_path / "slots", 96
    memory = np.frombuffer(mmap.mmap(-1, slots * size + 4096), np.uint8)[0 if aligned else 7 :]
    starts = np.arange(slots) * size
    keys = [key(n) for n in range(slots)]
    memory[:] = np.random.default_rng(size).integers(0, 255, len(memory), np.uint8)
    written = memory.copy()
    places = Places.of(size)
    with closing(DiskSlots(path, MODEL, size, places.file_bytes(slots))) as disk:
        assert disk.write(Batch(range(slots), keys, memory, starts, size)) == [None] * slots
        flip(path, places.block(bad) + size - 1)
        assert disk.flush() is None
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        memory[:] = 0
        some = [*range(0, slots, 3), *range(SEGMENT_SLOTS + 1, 2 * SEGMENT_SLOTS, 3), SEGMENT_SLOTS + 7]
        found = disk.read(Batch(some, [keys[n] for n in some], memory, starts[some], size))
        assert found == ["bad_checksum" if n == bad else None for n in some]
        for n in some:
            assert n == bad or bytes(memory[n * size : (n + 1) * size]) == bytes(written[n * size : (n + 1) * size])


@kinds
def test_a_full_disk_in_a_batch_is_refused_by_reason_and_leaves_nothing_to_be_served(kind, tmp_path):
    """The extension's attempt fails as the system's would; single calls then say why."""

    class Full(Faulty):
        def whole_batches(self, block_bytes):
            return Failing()

    class Failing:
        Crew = staticmethod(lambda helpers: io.BytesIO())

        def write_slots(self, file, slots, addresses, size, keys, heading, states, age):
            states[:] = 1

        def write_files(self, descriptors, addresses, size, keys, heading, states):
            states[:] = 1

    calls = Full()
    with closing(store(kind, tmp_path / "disk", calls)) as disk:
        calls.write_error = errno.ENOSPC
        assert put(disk, range(3)) == ["disk_full"] * 3
        assert disk.stored() == []
        calls.write_error = None
        assert put(disk, range(3)) == [None] * 3
        assert calls.calls > 0


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batches=st.lists(st.lists(st.integers(0, 80), min_size=1, max_size=30), min_size=1, max_size=5),
)
def test_any_batches_leave_in_each_slot_what_was_written_last(tmp_path_factory, seed, batches):
    """Blocks that lie anywhere in one arena, also for slots that are named twice."""
    made = np.random.default_rng(seed)
    memory = made.integers(0, 255, 100 * SIZE, np.uint8)
    last = {}
    with closing(store("slots", tmp_path_factory.mktemp("disk") / "slots")) as disk:
        for slots in batches:
            starts = made.integers(0, 99 * SIZE, len(slots)).astype(np.int64)
            keys = [key(100 * slot + i) for i, slot in enumerate(slots)]
            assert disk.write(Batch(slots, keys, memory, starts, SIZE)) == [None] * len(slots)
            last |= {s: (k, bytes(memory[a : a + SIZE])) for s, k, a in zip(slots, keys, starts, strict=True)}
        into = np.zeros(len(last) * SIZE + 13, np.uint8)
        starts = np.arange(len(last), dtype=np.int64)[::-1] * SIZE + 13
        assert disk.read(Batch(list(last), [k for k, _ in last.values()], into, starts, SIZE)) == [None] * len(last)
        for start, (_, block) in zip(starts, last.values(), strict=True):
            assert bytes(into[start : start + SIZE]) == block
        assert not into[:13].any()


def test_batches_outside_their_memory_or_store_are_broken_invariants(tmp_path):
    memory = np.zeros(3 * SIZE, np.uint8)
    for starts in ([-1], [2 * SIZE + 1], [0, SIZE]):
        with pytest.raises(InvariantViolation):
            Batch([0], [key(0)], memory, np.array(starts, np.int64), SIZE)
    with closing(store("slots", tmp_path / "disk", slots=4)) as disk:
        zero = np.zeros(1, np.int64)
        for batch in (
            Batch([4], [key(0)], memory, zero, SIZE),
            Batch([-1], [key(0)], memory, zero, SIZE),
            Batch([0], [b"short"], memory, zero, SIZE),
            Batch([0], [key(0)], memory, zero, SIZE - 1),
        ):
            with pytest.raises(InvariantViolation):
                disk.write(batch)
        memory.flags.writeable = False
        with pytest.raises(InvariantViolation):
            disk.read(Batch([0], [key(0)], memory, zero, SIZE))


@pytest.mark.parametrize("scattered", [False, True])
def test_parts_of_a_batch_are_its_blocks_and_each_is_written_and_read_as_it_would_be_alone(tmp_path, scattered):
    slots, cut = [4, 9, 0, 1, 2, 7, 3], 3
    with closing(store("slots", tmp_path / "disk", slots=10)) as disk:
        blocks = [Placed(slot, key(slot), payload(slot)) for slot in slots]
        memory = np.frombuffer(b"".join(payload(slot) for slot in slots), np.uint8)
        starts = np.arange(len(slots)) * SIZE
        whole = Batch.of(blocks, SIZE) if scattered else Batch(slots, [key(n) for n in slots], memory, starts, SIZE)
        whole.require(disk.slots, SIZE)
        assert whole.packed == b"".join(map(key, slots))
        for first, end in ((0, cut), (cut, len(slots))):
            part = whole.part(first, end)
            assert [(one.slot, one.key, bytes(one.block)) for one in map(part.__getitem__, range(len(part)))] == [
                (slot, key(slot), payload(slot)) for slot in slots[first:end]
            ]
            assert disk.write(part) == [None] * (end - first)
        assert disk.stored() == [(key(slot), slot) for slot in slots]
        into = np.zeros(len(slots) * SIZE, np.uint8)
        read = Batch(slots, [key(n) for n in slots], into, starts, SIZE)
        assert [reason for at in range(len(slots)) for reason in disk.read(read.part(at, at + 1))] == [None] * len(
            slots
        )
        assert bytes(into) == bytes(memory)


def test_an_extension_whose_calls_are_others_is_left_alone(monkeypatch):
    monkeypatch.setattr(extension(), "copies_version", 1)
    assert extension.__wrapped__() is None


@pytest.mark.parametrize("size", [241, 256, 496, 1023, 1024, 1025, 2049, 5000, 16384, 70001])
def test_the_extensions_checksum_is_that_of_xxhash(size):
    data = random.Random(size).randbytes(size)
    assert extension().digest(data) == xxhash.xxh3_128_digest(data) == block_checksum(data)


@pytest.mark.parametrize("size", [4096, 4608])
def test_neighbours_on_both_sides_go_as_one_piece_with_and_without_padding(size, tmp_path):
    """Also where a run in memory goes backwards, has a gap, or goes beyond a segment of the file."""
    count = SEGMENT_SLOTS + 8
    memory = np.random.default_rng(size).integers(0, 255, 2 * count * size, np.uint8)
    slots = [*range(40), *range(41, count)]
    starts = np.array([*range(20), *range(30, 20, -1), *range(40, 40 + len(slots) - 30)], np.int64) * size
    keys = [key(slot) for slot in slots]
    with closing(DiskSlots(tmp_path / "disk", MODEL, size, Places.of(size).file_bytes(count))) as disk:
        assert disk.write(Batch(slots, keys, memory, starts, size)) == [None] * len(slots)
        into = np.zeros_like(memory)
        assert disk.read(Batch(slots, keys, into, starts, size)) == [None] * len(slots)
    want = np.zeros_like(memory)
    for start in starts:
        want[start : start + size] = memory[start : start + size]
    assert (into == want).all()
