"""A folder of blocks that processes share: bounded whoever writes, whole whoever dies, never another's bytes."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
from pathlib import Path

import pytest
from tests.torch.disk_faults import MODEL, SIZE, Faulty, Killed, flip, key, payload

from octavo.errors import ConfigError, InvariantViolation
from octavo.runtime import disk_room
from octavo.runtime.disk_folder import NAME, DiskFolder
from octavo.runtime.disk_format import HEADER_BYTES, Identity
from octavo.runtime.disk_store import Placed

FILE = HEADER_BYTES + SIZE


def opened(folder, slots=4, identity=MODEL, syscalls=None, size=SIZE):
    return DiskFolder(Path(folder), identity, size, slots * (HEADER_BYTES + size), syscalls)


def put(disk, n, version=0, slot=0):
    return disk.write([Placed(slot, key(n), payload(n, version))])[0]


def get(disk, n, slot=0):
    into = bytearray(disk.block_bytes)
    return disk.read([Placed(slot, key(n), into)])[0] or bytes(into)


def names(folder):
    return sorted(entry.name for entry in Path(folder).iterdir() if entry.name != ".lock")


def age(folder, n, seconds):
    """Make the block's last use that much older."""
    path = next(Path(folder).glob(f"*{key(n).hex()}"))
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def test_what_one_opener_writes_the_other_reads_and_a_later_one_lists(tmp_path):
    a, b = opened(tmp_path / "f"), opened(tmp_path / "f")
    assert put(a, 1) is None
    assert get(b, 1, slot=3) == payload(1)
    assert get(b, 2) == "absent"
    assert b.stored() == [(key(1), 3)]
    assert put(b, 2) is None
    assert a.appeared() == [key(2)]
    assert a.appeared() == []
    a.close()
    b.close()
    age(tmp_path / "f", 1, 10)
    with_both = opened(tmp_path / "f")
    assert with_both.stored() == [(key(1), 0), (key(2), 1)]
    assert with_both.stats().found == 2
    with_both.close()
    assert (a.stats().writes, b.stats().hits, dict(b.stats().misses)) == (1, 1, {"absent": 1})
    assert (put(a, 1), get(a, 1), a.appeared()) == ("closed", "closed", [])


def test_files_are_named_by_model_layout_and_key_private_and_of_one_size(tmp_path):
    disk = opened(tmp_path / "f")
    put(disk, 1)
    disk.close()
    (name,) = names(tmp_path / "f")
    assert NAME.fullmatch(name).group(3) == key(1).hex()
    facts = (tmp_path / "f" / name).stat()
    assert (facts.st_size, stat.S_IMODE(facts.st_mode)) == (FILE, 0o600)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o700


def test_the_bound_holds_for_all_openers_together_and_the_oldest_use_goes_first(tmp_path):
    a, b = opened(tmp_path / "f", 3), opened(tmp_path / "f", 3)
    for n, disk in ((1, a), (2, b), (3, a)):
        assert put(disk, n) is None
        age(tmp_path / "f", n, 1000 - n)
    assert get(b, 1) == payload(1)
    assert put(b, 4) is None
    assert [get(a, n) for n in (1, 2, 3, 4)] == [payload(1), "absent", payload(3), payload(4)]
    assert b.stats().evictions == 1
    assert len(names(tmp_path / "f")) == 3
    a.close()
    b.close()


def test_a_batch_larger_than_the_folder_keeps_within_it_and_one_key_twice_is_one_file(tmp_path):
    disk = opened(tmp_path / "f", 3)
    blocks = [Placed(n % 3, key(n), payload(n)) for n in (0, 1, 1, 2, 3, 4, 0)]
    assert disk.write(blocks) == [None] * 7
    assert len(names(tmp_path / "f")) == 3
    assert get(disk, 0) == payload(0)
    disk.close()


def test_forgetting_a_slot_removes_its_file_for_everybody(tmp_path):
    a, b = opened(tmp_path / "f"), opened(tmp_path / "f")
    put(a, 1, slot=0)
    put(a, 2, slot=1)
    a.forget([0, 3])
    assert (get(b, 1), get(b, 2)) == ("absent", payload(2))
    assert a.stored() == [(key(2), 1)]
    a.close()
    b.close()


def test_a_file_that_vanishes_is_a_miss(tmp_path):
    disk = opened(tmp_path / "f")
    put(disk, 1)
    (tmp_path / "f" / names(tmp_path / "f")[0]).unlink()
    assert get(disk, 1) == "absent"
    assert disk.stored() == []
    assert put(disk, 1) is None
    assert get(disk, 1) == payload(1)
    disk.close()


def test_another_model_or_layout_is_a_miss_by_reason_and_both_may_stay(tmp_path):
    others = {
        "wrong_fingerprint": Identity.of("model b", "layout a", "full"),
        "wrong_layout": Identity.of("model a", "layout b", "full"),
    }
    disk = opened(tmp_path / "f")
    put(disk, 1)
    disk.close()
    for reason, identity in others.items():
        disk = opened(tmp_path / "f", identity=identity)
        assert get(disk, 1) == reason
        assert dict(disk.stats().left_aside)[reason] == 1
        assert disk.stored() == []
        assert put(disk, 1, 1) is None
        assert get(disk, 1) == payload(1, 1)
        disk.close()
    disk = opened(tmp_path / "f")
    assert get(disk, 1) == payload(1)
    disk.close()


def test_a_file_under_the_name_of_another_key_or_model_is_not_served(tmp_path):
    folder = tmp_path / "f"
    disk, other = opened(folder), opened(folder, identity=Identity.of("model b", "layout a", "full"))
    put(disk, 1)
    put(other, 2)
    by_key = {NAME.fullmatch(name).group(3): name for name in names(folder)}
    mine = by_key[key(1).hex()]
    (folder / by_key[key(2).hex()]).rename(folder / mine.replace(key(1).hex(), key(2).hex()))
    assert get(disk, 2) == "wrong_fingerprint"
    (folder / mine).rename(folder / mine.replace(key(1).hex(), key(3).hex()))
    assert get(disk, 3) == "wrong_key"
    assert names(folder) == []
    disk.close()
    other.close()


def test_a_flip_of_any_byte_and_a_lost_end_are_never_served(tmp_path):
    rng = random.Random(2)
    seen = set()
    disk = opened(tmp_path / "f", 1)
    for n, at in enumerate([0, 7, 8, 20, 100, 200, HEADER_BYTES - 1, HEADER_BYTES, FILE - 1]):
        assert put(disk, n) is None
        flip(tmp_path / "f" / names(tmp_path / "f")[0], at, 1 << rng.randrange(8))
        found = get(disk, n)
        assert isinstance(found, str), at
        seen.add(found)
        assert names(tmp_path / "f") == []
    for at in (0, 100, HEADER_BYTES, FILE - 1):
        put(disk, 1)
        os.truncate(tmp_path / "f" / names(tmp_path / "f")[0], at)
        assert get(disk, 1) == "truncated"
    assert seen == {"bad_header", "bad_checksum"}
    disk.close()


def test_faults_of_the_disk_are_refusals_and_misses_with_a_reason_and_leave_nothing_behind(tmp_path, monkeypatch):
    calls = Faulty()
    disk = opened(tmp_path / "f", syscalls=calls)
    for code, reason in ((errno.ENOSPC, "disk_full"), (errno.EIO, "io_error")):
        calls.write_error = code
        assert put(disk, 1) == reason
    calls.write_error, calls.most = None, 0
    assert put(disk, 1) == "short_write"
    assert names(tmp_path / "f") == []
    calls.most = 100
    assert put(disk, 1) is None
    assert get(disk, 1) == payload(1)
    calls.most, calls.read_error = None, errno.EIO
    assert get(disk, 1) == "io_error"
    calls.read_error = None

    def full(*_):
        raise OSError(errno.ENOSPC, "injected")

    monkeypatch.setattr(os, "ftruncate", full)
    assert put(disk, 2) == "disk_full"
    assert names(tmp_path / "f") == []
    monkeypatch.undo()
    assert put(disk, 2) is None
    assert dict(disk.stats().refusals) == {"disk_full": 2, "io_error": 1, "short_write": 1}
    disk.close()


def test_a_folder_that_is_taken_away_is_refusals_and_misses(tmp_path):
    disk = opened(tmp_path / "f")
    put(disk, 1)
    for entry in (tmp_path / "f").iterdir():
        entry.unlink()
    (tmp_path / "f").rmdir()
    assert get(disk, 1) == "absent"
    assert put(disk, 1) == "io_error"
    assert disk.appeared() == []
    disk.close()


def test_a_crash_at_any_byte_leaves_a_usable_folder_and_its_remains_go_in_time(tmp_path, monkeypatch):
    for at in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, FILE - 1):
        folder = tmp_path / f"f{at}"
        calls = Faulty()
        disk = opened(folder, 2, syscalls=calls)
        put(disk, 1)
        calls.written, calls.die_after = 0, at
        with pytest.raises(Killed):
            put(disk, 2)
        disk.close()
        disk = opened(folder, 2)
        assert (get(disk, 1), get(disk, 2)) == (payload(1), "absent")
        assert len(names(folder)) == 2
        assert put(disk, 3) is None  # the remains count, so the older block went
        assert (get(disk, 1), get(disk, 3)) == ("absent", payload(3))
        monkeypatch.setattr(disk_room, "STALE_SECONDS", -1.0)
        assert put(disk, 4) is None
        assert len(names(folder)) == 2
        assert [get(disk, n) for n in (3, 4)] == [payload(3), payload(4)]
        monkeypatch.undo()
        disk.close()


def test_a_lock_that_is_never_given_back_is_a_refusal_and_hinders_no_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_room, "PATIENCE_SECONDS", 0.02)
    disk = opened(tmp_path / "f")
    put(disk, 1)
    holder = os.open(tmp_path / "f" / ".lock", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    assert put(disk, 2) == "busy"
    assert get(disk, 1) == payload(1)
    os.close(holder)
    assert put(disk, 2) is None
    disk.close()


def test_a_count_that_is_nonsense_is_counted_anew(tmp_path):
    disk = opened(tmp_path / "f", 3)
    for n, raw in enumerate((b"", b"nonsense" * 2, b"octavoRM" + b"\xff" * 8, b"octavoRM\0")):
        (tmp_path / "f" / ".lock").write_bytes(raw)
        assert put(disk, n) is None
        assert len(names(tmp_path / "f")) <= 3
    disk.close()


def test_foreign_files_are_left_alone_and_unsafe_folders_refused(tmp_path):
    folder = tmp_path / "f"
    folder.mkdir(mode=0o700)
    (folder / "thesis").write_text("years of work")
    disk = opened(folder, 1)
    for n in range(4):
        assert put(disk, n) is None
    disk.close()
    assert (folder / "thesis").read_text() == "years of work"
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="written by others"):
        opened(folder)
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="disk_path"):
        opened(tmp_path / "link")
    with pytest.raises(ConfigError, match="disk_path"):
        opened(folder / "thesis")
    with pytest.raises(ConfigError, match="disk_bytes"):
        DiskFolder(folder, MODEL, SIZE, FILE - 1)
    disk = opened(folder)
    with pytest.raises(InvariantViolation):
        disk.write([Placed(4, key(0), payload(0))])
    disk.close()
