"""A folder of blocks that processes share: bounded whoever writes, whole whoever dies, never another's bytes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
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

    monkeypatch.setattr(os, "posix_fallocate", full)
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


class TwoOpenersAgainstDict(RuleBasedStateMachine):
    """A dict says what each key may hold; the openers may forget, and may never say anything else."""

    @initialize(slots=st.integers(1, 4))
    def make(self, slots):
        self.folder = tempfile.TemporaryDirectory()
        self.slots = slots
        self.calls = [Faulty(), Faulty()]
        self.disks = [opened(self.folder.name, slots, syscalls=calls) for calls in self.calls]
        self.model = {}

    @rule(who=st.integers(0, 1), n=st.integers(0, 5), version=st.integers(0, 2), slot=st.integers(0, 3))
    def write(self, who, n, version, slot):
        assert put(self.disks[who], n, version, slot % self.slots) is None
        self.model.setdefault(n, set()).add(payload(n, version))
        assert get(self.disks[1 - who], n) in self.model[n]

    @rule(who=st.integers(0, 1), batch=st.lists(st.integers(0, 5), max_size=8))
    def read(self, who, batch):
        memory = [bytearray(SIZE) for _ in batch]
        reasons = self.disks[who].read([Placed(0, key(n), into) for n, into in zip(batch, memory, strict=True)])
        for n, into, reason in zip(batch, memory, reasons, strict=True):
            assert reason == "absent" if reason else bytes(into) in self.model[n]

    @rule(who=st.integers(0, 1), n=st.integers(0, 5), at=st.integers(0, FILE - 1))
    def die_in_a_write(self, who, n, at):
        self.calls[who].written, self.calls[who].die_after = 0, at
        try:
            put(self.disks[who], n)
        except Killed:
            pass
        else:
            self.model.setdefault(n, set()).add(payload(n))
        self.calls[who].die_after = None
        self.reopen(who)
        for entry in Path(self.folder.name).glob(".part-*"):
            entry.unlink()  # as if their time had passed

    @rule(n=st.integers(0, 5), at=st.integers(0, FILE - 1), who=st.integers(0, 1))
    def damage(self, n, at, who):
        for path in Path(self.folder.name).glob(f"*{key(n).hex()}"):
            flip(path, at)
            assert isinstance(get(self.disks[who], n), str)

    @rule(who=st.integers(0, 1), slot=st.integers(0, 3))
    def forget(self, who, slot):
        gone = [k for k, s in self.disks[who].stored() if s == slot]
        self.disks[who].forget([slot])
        for n in range(6):
            assert key(n) not in gone or get(self.disks[1 - who], n) == "absent"

    @rule(who=st.integers(0, 1))
    def reopen(self, who):
        self.disks[who].close()
        self.disks[who] = opened(self.folder.name, self.slots, syscalls=self.calls[who])

    @invariant()
    def the_bound_holds(self):
        if hasattr(self, "disks"):
            assert sum(p.stat().st_size for p in Path(self.folder.name).iterdir() if p.name != ".lock") <= (
                self.slots * FILE
            )

    def teardown(self):
        if hasattr(self, "disks"):
            for disk in self.disks:
                disk.close()
            self.folder.cleanup()


TwoOpenersAgainstDict.TestCase.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTwoOpenersAgainstDict = TwoOpenersAgainstDict.TestCase


WORKER = """
import json, random, sys, time
sys.path[:0] = [{src!r}, {root!r}]
from tests.torch.disk_faults import key, payload
from tests.torch.test_disk_folder import get, opened, put
seed, seconds = int(sys.argv[1]), float(sys.argv[2])
rng, until = random.Random(seed), time.monotonic() + seconds
disk = opened({path!r}, 6)
print("ready", flush=True)
wrong, reasons = 0, []
while time.monotonic() < until:
    n = rng.randrange(12)
    act = rng.random()
    if act < 0.5:
        reasons.append(put(disk, n, slot=n % 6))
    elif act < 0.95:
        found = get(disk, n)
        reasons.append(found if isinstance(found, str) else None)
        wrong += not isinstance(found, str) and found != payload(n)
    else:
        disk.forget([n % 6])
stats = disk.stats()
print(json.dumps(dict(wrong=wrong, reasons=sorted(set(map(str, reasons))), hits=stats.hits, writes=stats.writes,
    evictions=stats.evictions, misses=dict(stats.misses), refusals=dict(stats.refusals))))
"""


def bytes_in(folder):
    """What the files take, while nobody can begin another."""
    lock = os.open(folder / ".lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        total = 0
        for entry in os.scandir(folder):
            if entry.name != ".lock":
                try:
                    total += entry.stat().st_size
                except FileNotFoundError:
                    continue
        return total
    finally:
        os.close(lock)


@pytest.mark.timeout(120)
def test_processes_that_write_and_evict_the_same_keys_never_serve_wrong_bytes_nor_exceed_the_bound(tmp_path):
    folder = tmp_path / "f"
    here = Path(__file__).resolve()
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(src=str(here.parents[2] / "src"), root=str(here.parents[2]), path=str(folder)))

    def worker(seed, seconds):
        child = subprocess.Popen([sys.executable, str(script), str(seed), str(seconds)], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        return child

    steady = [worker(seed, 5) for seed in (1, 2)]
    rng = random.Random(4)
    for seed in range(3, 7):  # a third comes and is killed, again and again
        victim = worker(seed, 60)
        for _ in range(20):
            assert bytes_in(folder) <= 6 * FILE
            time.sleep(rng.uniform(0, 0.01))
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        victim.stdout.close()
    found = []
    for child in steady:
        found.append(json.loads(child.communicate(timeout=60)[0]))
        assert child.returncode == 0
    for facts in found:
        assert facts["wrong"] == 0
        assert set(facts["misses"]) == {"absent"}
        assert set(facts["refusals"]) <= {"no_room"}
        assert facts["hits"] > 50
        assert facts["writes"] > 50
        assert facts["evictions"] > 10
    disk = opened(folder, 6)
    assert put(disk, 20) is None
    assert get(disk, 20) == payload(20)
    disk.close()
