"""The store on disk: whatever happens to it, a key gives back the bytes written under it, or a miss that says why."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.torch.disk_faults import (
    MODEL,
    PLACES,
    SIZE,
    Faulty,
    Killed,
    abandon,
    flip,
    key,
    keys,
    opened,
    payload,
    put,
    read,
)

from octavo.errors import ConfigError, InvariantViolation
from octavo.runtime.disk_format import HEADER_BYTES, POOL_BYTES, Identity
from octavo.runtime.disk_slots import DiskSlots
from octavo.runtime.disk_store import Placed


def test_a_block_comes_back_as_written_and_after_a_restart(tmp_path):
    with closing(opened(tmp_path / "disk")) as disk:
        assert put(disk, 1) is None
        assert key(1) in keys(disk)
        assert read(disk, 1) == payload(1)
        assert read(disk, 2) == "absent"
        facts = disk.stats()
        assert (facts.hits, facts.writes, dict(facts.misses)) == (1, 1, {"absent": 1})
    with closing(opened(tmp_path / "disk")) as disk:
        assert disk.stats().found == 1
        assert read(disk, 1) == payload(1)


def test_the_file_is_whole_from_the_start_private_and_never_grows(tmp_path):
    path = tmp_path / "disk"
    with closing(opened(path, slots=3)) as disk:
        facts = path.stat()
        assert stat.S_IMODE(facts.st_mode) == 0o600
        assert facts.st_size == disk.stats().file_bytes == PLACES.file_bytes(3)
        assert facts.st_blocks * 512 >= facts.st_size
        for n in range(9):
            assert put(disk, n) is None
        assert path.stat().st_size == facts.st_size


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Identity.of("model b", "layout a", "full"), "wrong_fingerprint"),
        (Identity.of("model a", "layout b", "full"), "wrong_layout"),
        (Identity.of("model a", "layout a", "window_64"), "wrong_layout"),
    ],
)
def test_a_restart_with_another_model_dtype_or_group_is_a_miss_by_reason(tmp_path, other, reason):
    with closing(opened(tmp_path / "disk")) as disk:
        put(disk, 1)
    with closing(opened(tmp_path / "disk", identity=other)) as disk:
        assert read(disk, 1) == reason
        assert dict(disk.stats().left_aside) == {reason: 1}
        for n in range(2, 6):
            put(disk, n)
        assert read(disk, 1) == "absent"
        assert [read(disk, n) for n in range(2, 6)] == [payload(n) for n in range(2, 6)]


def test_a_restart_with_another_block_size_is_a_miss_by_reason(tmp_path):
    with closing(opened(tmp_path / "disk")) as disk:
        put(disk, 1)
    with closing(opened(tmp_path / "disk", identity=Identity.of("model a", "layout b", "full"), size=2 * SIZE)) as disk:
        assert read(disk, 1) == "wrong_layout"
        assert disk.write([Placed(1, key(1), payload(1) * 2)]) == [None]
        assert read(disk, 1) == payload(1) * 2


def test_a_file_may_grow_and_shrink_and_says_what_had_no_room(tmp_path):
    with closing(opened(tmp_path / "disk", slots=2)) as disk:
        put(disk, 1)
    with closing(opened(tmp_path / "disk", slots=5)) as disk:
        assert read(disk, 1) == payload(1)
        for n in range(2, 6):
            put(disk, n)
    with closing(opened(tmp_path / "disk", slots=2)) as disk:
        assert disk.stats().blocks == 2
        assert [type(read(disk, n)) for n in range(1, 6)].count(bytes) == 2
        assert dict(disk.stats().misses) == {"no_room": 3}
    with closing(opened(tmp_path / "disk", slots=5)) as disk:
        assert disk.stats().found == 2


@pytest.mark.parametrize("restart", [False, True])
def test_a_flip_of_any_bit_is_never_served(tmp_path, restart):
    path = tmp_path / "disk"
    rng = random.Random(5)
    seen = set()
    for _ in range(60):
        path.unlink(missing_ok=True)
        disk = opened(path, slots=1)
        put(disk, 1)
        header, block = PLACES.header(0), PLACES.block(0)
        start, most = rng.choice([(header, 8), (header, 64), (header, HEADER_BYTES), (block, SIZE)])
        where = start + rng.randrange(most)
        if restart:
            disk.close()
        flip(path, where, 1 << rng.randrange(8))
        if restart:
            disk = opened(path, slots=1)
        found = read(disk, 1)
        assert isinstance(found, str), where
        seen.add(found)
        assert key(1) not in keys(disk)
        assert put(disk, 1) is None
        assert read(disk, 1) == payload(1)
        disk.close()
    assert seen == ({"absent", "bad_checksum"} if restart else {"bad_header", "bad_checksum"})


def test_a_truncated_file_is_a_miss_by_reason(tmp_path):
    path = tmp_path / "disk"
    with closing(opened(path, slots=1)) as disk:
        put(disk, 1)
        os.truncate(path, PLACES.block(0) + SIZE - 1)
        assert read(disk, 1) == "truncated"
        put(disk, 1)
    os.truncate(path, PLACES.block(0) + SIZE - 1)
    with closing(opened(path, slots=1)) as disk:
        assert read(disk, 1) == "truncated"
        assert path.stat().st_size == PLACES.file_bytes(1)


def test_faults_of_the_disk_are_refusals_and_misses_with_a_reason(tmp_path):
    calls = Faulty()
    with closing(opened(tmp_path / "disk", syscalls=calls)) as disk:
        put(disk, 1)
        for code, reason in ((errno.ENOSPC, "disk_full"), (errno.EDQUOT, "disk_full"), (errno.EIO, "io_error")):
            calls.write_error = code
            assert put(disk, 2) == reason
            assert key(2) not in keys(disk)
        calls.write_error = None
        calls.most = 0
        assert put(disk, 2) == "short_write"
        calls.most = 100
        assert put(disk, 2) is None
        assert read(disk, 2) == payload(2)
        calls.read_error = errno.EIO
        assert read(disk, 1) == "io_error"
        calls.read_error = None
        assert read(disk, 1) == "absent"
        assert dict(disk.stats().refusals) == {"disk_full": 2, "io_error": 1, "short_write": 1}
        assert dict(disk.stats().misses) == {"io_error": 1, "absent": 1}
        assert disk.flush() is None
    assert disk.flush() == put(disk, 1) == "closed"
    assert read(disk, 1) == "closed"


def test_a_failed_write_over_a_key_does_not_leave_the_old_block_findable_in_part(tmp_path):
    calls = Faulty()
    with closing(opened(tmp_path / "disk", slots=1, syscalls=calls)) as disk:
        put(disk, 1)
        calls.written, calls.die_after = 0, HEADER_BYTES + 300
        with pytest.raises(Killed):
            put(disk, 2)
    with closing(opened(tmp_path / "disk", slots=1)) as disk:
        assert (read(disk, 1), read(disk, 2)) == ("absent", "absent")


def crash_points():
    whole = 2 * HEADER_BYTES + SIZE  # what one write of a block writes
    edges = [0, HEADER_BYTES, HEADER_BYTES + SIZE, whole]
    near = [at + d for at in edges for d in (-1, 0, 1) if 0 <= at + d <= whole]
    return sorted({*near, *(whole + at for at in near), *random.Random(1).sample(range(2 * whole), 60)})


def test_a_crash_at_any_byte_leaves_a_usable_store(tmp_path):
    for at in crash_points():
        path = tmp_path / f"disk{at}"
        with closing(opened(path, slots=2)) as disk:
            put(disk, 1)
            put(disk, 2)
        calls = Faulty()
        disk = opened(path, slots=2, syscalls=calls)
        calls.written, calls.die_after = 0, at
        try:
            for n in (3, 2):
                put(disk, n, 1)
        except Killed:
            pass
        abandon(disk)
        with closing(opened(path, slots=2)) as disk:
            found = {n: read(disk, n) for n in (1, 2, 3)}
            assert found[1] in (payload(1), "absent")
            assert found[2] in (payload(2), payload(2, 1), "absent"), at
            assert found[3] in (payload(3, 1), "absent")
            assert sum(isinstance(block, bytes) for block in found.values()) >= 1
            assert put(disk, 4) is None
            assert read(disk, 4) == payload(4)
        path.unlink()


def test_a_crash_while_the_file_is_made_leaves_a_usable_path(tmp_path):
    for at in [0, 1, 7, 8, 9, 40, 100, POOL_BYTES - 1, POOL_BYTES]:
        path = tmp_path / f"disk{at}"
        calls = Faulty()
        calls.die_after = at
        with suppress(Killed):
            opened(path, syscalls=calls).close()
        with closing(opened(path)) as disk:
            assert put(disk, 1) is None
            assert read(disk, 1) == payload(1)


WRITER = """
import sys
sys.path[:0] = [{src!r}, {root!r}]
from pathlib import Path
from tests.torch.disk_faults import opened, put
disk = opened(Path({path!r}), slots=8)
print("ready", flush=True)
version = 0
while True:
    version += 1
    for n in range(12):
        put(disk, n, version % 3)
"""


@pytest.mark.timeout(120)
def test_a_writer_killed_at_random_points_leaves_only_whole_blocks(tmp_path):
    path = tmp_path / "disk"
    here = Path(__file__).resolve()
    script = tmp_path / "writer.py"
    script.write_text(WRITER.format(src=str(here.parents[2] / "src"), root=str(here.parents[2]), path=str(path)))
    served = 0
    for round_ in range(20):
        child = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        time.sleep(random.Random(round_).uniform(0, 0.02))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        with closing(opened(path, slots=8)) as disk:
            for n in range(12):
                found = read(disk, n)
                if isinstance(found, bytes):
                    served += 1
                    assert found in [payload(n, version) for version in range(3)]
                else:
                    assert found == "absent"
    assert served > 50


def test_a_second_opener_is_refused_until_the_first_has_closed(tmp_path):
    with closing(opened(tmp_path / "disk")), pytest.raises(ConfigError, match="in use by another process"):
        opened(tmp_path / "disk")
    opened(tmp_path / "disk").close()


def test_links_directories_pipes_and_foreign_files_are_refused_and_left_alone(tmp_path):
    (tmp_path / "real").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="symbolic link"):
        opened(tmp_path / "link")
    with pytest.raises(ConfigError, match="disk_path"):
        opened(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="regular file"):
        opened(tmp_path / "pipe")
    (tmp_path / "thesis").write_text("years of work")
    with pytest.raises(ConfigError, match="left alone"):
        opened(tmp_path / "thesis")
    assert (tmp_path / "thesis").read_text() == "years of work"


def test_too_little_room_and_blocks_of_a_wrong_size_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="disk_bytes"):
        DiskSlots(tmp_path / "disk", MODEL, SIZE, PLACES.file_bytes(1) - 1)
    with closing(opened(tmp_path / "disk")) as disk, pytest.raises(InvariantViolation):
        disk.write([Placed(0, key(1), b"short")])
