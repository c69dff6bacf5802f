"""Two openers of one folder of blocks against a dict, and processes that write, evict and die in it at once."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.torch.disk_faults import SIZE, Faulty, Killed, flip, key, payload
from tests.torch.test_disk_folder import FILE, get, opened, put

from octavo.runtime.disk_store import Placed


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
