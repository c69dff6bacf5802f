"""The store on disk: whatever happens to it, a key gives back the bytes written under it, or a miss that says why."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import stat
import subprocess
import sys
import time
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
    opened,
    payload,
    read,
)

from octavo.errors import ConfigError, InvariantViolation
from octavo.runtime.disk import DiskPool
from octavo.runtime.disk_format import HEADER_BYTES, POOL_BYTES, Identity


def test_a_block_comes_back_as_written_and_after_a_restart(tmp_path):
    with opened(tmp_path / "pool") as pool:
        assert pool.put(key(1), payload(1)) is None
        assert pool.has(key(1))
        assert read(pool, 1) == payload(1)
        assert read(pool, 2) == "absent"
        facts = pool.stats()
        assert (facts.hits, facts.writes, dict(facts.misses)) == (1, 1, {"absent": 1})
    with opened(tmp_path / "pool") as pool:
        assert pool.stats().found == 1
        assert read(pool, 1) == payload(1)


def test_the_file_is_whole_from_the_start_private_and_never_grows(tmp_path):
    path = tmp_path / "pool"
    with opened(path, slots=3) as pool:
        facts = path.stat()
        assert stat.S_IMODE(facts.st_mode) == 0o600
        assert facts.st_size == pool.stats().file_bytes == PLACES.file_bytes(3)
        assert facts.st_blocks * 512 >= facts.st_size
        for n in range(9):
            assert pool.put(key(n), payload(n)) is None
        assert path.stat().st_size == facts.st_size
        assert pool.stats().evictions == 6


def test_the_block_of_oldest_use_goes_first(tmp_path):
    with opened(tmp_path / "pool", slots=3) as pool:
        for n in range(3):
            pool.put(key(n), payload(n))
        assert read(pool, 0) == payload(0)
        pool.put(key(3), payload(3))
        assert pool.keys() == (key(2), key(0), key(3))
    with opened(tmp_path / "pool", slots=3) as pool:
        assert pool.keys() == (key(0), key(2), key(3))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Identity.of("model b", "layout a", "full"), "wrong_fingerprint"),
        (Identity.of("model a", "layout b", "full"), "wrong_layout"),
        (Identity.of("model a", "layout a", "window_64"), "wrong_layout"),
    ],
)
def test_a_restart_with_another_model_dtype_or_group_is_a_miss_by_reason(tmp_path, other, reason):
    with opened(tmp_path / "pool") as pool:
        pool.put(key(1), payload(1))
    with opened(tmp_path / "pool", identity=other) as pool:
        assert read(pool, 1) == reason
        assert dict(pool.stats().left_aside) == {reason: 1}
        for n in range(2, 6):
            pool.put(key(n), payload(n))
        assert read(pool, 1) == "absent"
        assert [read(pool, n) for n in range(2, 6)] == [payload(n) for n in range(2, 6)]


def test_a_restart_with_another_block_size_is_a_miss_by_reason(tmp_path):
    with opened(tmp_path / "pool") as pool:
        pool.put(key(1), payload(1))
    with opened(tmp_path / "pool", identity=Identity.of("model a", "layout b", "full"), size=2 * SIZE) as pool:
        assert read(pool, 1) == "wrong_layout"
        assert pool.put(key(1), payload(1) * 2) is None
        assert read(pool, 1) == payload(1) * 2


def test_a_pool_may_grow_and_shrink_and_says_what_had_no_room(tmp_path):
    with opened(tmp_path / "pool", slots=2) as pool:
        pool.put(key(1), payload(1))
    with opened(tmp_path / "pool", slots=5) as pool:
        assert read(pool, 1) == payload(1)
        for n in range(2, 6):
            pool.put(key(n), payload(n))
    with opened(tmp_path / "pool", slots=2) as pool:
        assert pool.stats().blocks == 2
        assert [type(read(pool, n)) for n in range(1, 6)].count(bytes) == 2
        assert dict(pool.stats().misses) == {"no_room": 3}


@pytest.mark.parametrize("restart", [False, True])
def test_a_flip_of_any_bit_is_never_served(tmp_path, restart):
    path = tmp_path / "pool"
    rng = random.Random(5)
    seen = set()
    for _ in range(60):
        path.unlink(missing_ok=True)
        pool = opened(path, slots=1)
        pool.put(key(1), payload(1))
        header, block = PLACES.header(0), PLACES.block(0)
        start, most = rng.choice([(header, 8), (header, 64), (header, HEADER_BYTES), (block, SIZE)])
        where = start + rng.randrange(most)
        if restart:
            pool.close()
        flip(path, where, 1 << rng.randrange(8))
        if restart:
            pool = opened(path, slots=1)
        found = read(pool, 1)
        assert isinstance(found, str), where
        seen.add(found)
        assert not pool.has(key(1))
        assert pool.put(key(1), payload(1)) is None
        assert read(pool, 1) == payload(1)
        pool.close()
    assert seen == ({"absent", "bad_checksum"} if restart else {"bad_header", "bad_checksum"})


def test_a_truncated_file_is_a_miss_by_reason(tmp_path):
    path = tmp_path / "pool"
    with opened(path, slots=1) as pool:
        pool.put(key(1), payload(1))
        os.truncate(path, PLACES.block(0) + SIZE - 1)
        assert read(pool, 1) == "truncated"
        pool.put(key(1), payload(1))
    os.truncate(path, PLACES.block(0) + SIZE - 1)
    with opened(path, slots=1) as pool:
        assert read(pool, 1) == "truncated"
        assert path.stat().st_size == PLACES.file_bytes(1)


def test_faults_of_the_disk_are_refusals_and_misses_with_a_reason(tmp_path):
    calls = Faulty()
    with opened(tmp_path / "pool", syscalls=calls) as pool:
        pool.put(key(1), payload(1))
        for code, reason in ((errno.ENOSPC, "disk_full"), (errno.EDQUOT, "disk_full"), (errno.EIO, "io_error")):
            calls.write_error = code
            assert pool.put(key(2), payload(2)) == reason
            assert not pool.has(key(2))
        calls.write_error = None
        calls.most = 0
        assert pool.put(key(2), payload(2)) == "short_write"
        calls.most = 100
        assert pool.put(key(2), payload(2)) is None
        assert read(pool, 2) == payload(2)
        calls.read_error = errno.EIO
        assert read(pool, 1) == "io_error"
        calls.read_error = None
        assert read(pool, 1) == "absent"
        assert dict(pool.stats().refusals) == {"disk_full": 2, "io_error": 1, "short_write": 1}
        assert dict(pool.stats().misses) == {"io_error": 1, "absent": 1}
        assert pool.flush() is None
    assert pool.flush() == pool.put(key(1), payload(1)) == "closed"
    assert read(pool, 1) == "closed"


def test_a_failed_write_over_a_key_does_not_leave_the_old_block_findable_in_part(tmp_path):
    calls = Faulty()
    with opened(tmp_path / "pool", slots=1, syscalls=calls) as pool:
        pool.put(key(1), payload(1))
        calls.written, calls.die_after = 0, HEADER_BYTES + 300
        with pytest.raises(Killed):
            pool.put(key(2), payload(2))
    with opened(tmp_path / "pool", slots=1) as pool:
        assert (read(pool, 1), read(pool, 2)) == ("absent", "absent")


def crash_points():
    whole = 2 * HEADER_BYTES + SIZE  # what one write of a block writes
    edges = [0, HEADER_BYTES, HEADER_BYTES + SIZE, whole]
    near = [at + d for at in edges for d in (-1, 0, 1) if 0 <= at + d <= whole]
    return sorted({*near, *(whole + at for at in near), *random.Random(1).sample(range(2 * whole), 60)})


def test_a_crash_at_any_byte_leaves_a_usable_store(tmp_path):
    for at in crash_points():
        path = tmp_path / f"pool{at}"
        with opened(path, slots=2) as pool:
            pool.put(key(1), payload(1))
            pool.put(key(2), payload(2))
        calls = Faulty()
        pool = opened(path, slots=2, syscalls=calls)
        calls.written, calls.die_after = 0, at
        try:
            for n in (3, 2):
                pool.put(key(n), payload(n, 1))
        except Killed:
            pass
        abandon(pool)
        with opened(path, slots=2) as pool:
            found = {n: read(pool, n) for n in (1, 2, 3)}
            assert found[1] in (payload(1), "absent")
            assert found[2] in (payload(2), payload(2, 1), "absent"), at
            assert found[3] in (payload(3, 1), "absent")
            assert sum(isinstance(block, bytes) for block in found.values()) >= 1
            assert pool.put(key(4), payload(4)) is None
            assert read(pool, 4) == payload(4)
        path.unlink()


def test_a_crash_while_the_file_is_made_leaves_a_usable_path(tmp_path):
    for at in [0, 1, 7, 8, 9, 40, 100, POOL_BYTES - 1, POOL_BYTES]:
        path = tmp_path / f"pool{at}"
        calls = Faulty()
        calls.die_after = at
        with contextlib.suppress(Killed):
            opened(path, syscalls=calls).close()
        with opened(path) as pool:
            assert pool.put(key(1), payload(1)) is None
            assert read(pool, 1) == payload(1)


WRITER = """
import sys
sys.path[:0] = [{src!r}, {root!r}]
from pathlib import Path
from tests.torch.disk_faults import key, opened, payload
pool = opened(Path({path!r}), slots=8)
print("ready", flush=True)
version = 0
while True:
    version += 1
    for n in range(12):
        pool.put(key(n), payload(n, version % 3))
"""


@pytest.mark.timeout(120)
def test_a_writer_killed_at_random_points_leaves_only_whole_blocks(tmp_path):
    path = tmp_path / "pool"
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
        with opened(path, slots=8) as pool:
            for n in range(12):
                found = read(pool, n)
                if isinstance(found, bytes):
                    served += 1
                    assert found in [payload(n, version) for version in range(3)]
                else:
                    assert found == "absent"
    assert served > 50


def test_a_second_opener_is_refused_until_the_first_has_closed(tmp_path):
    with opened(tmp_path / "pool"), pytest.raises(ConfigError, match="in use by another process"):
        opened(tmp_path / "pool")
    opened(tmp_path / "pool").close()


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
        DiskPool(tmp_path / "pool", MODEL, SIZE, POOL_BYTES)
    with opened(tmp_path / "pool") as pool, pytest.raises(InvariantViolation):
        pool.put(key(1), b"short")
