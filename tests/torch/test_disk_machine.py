"""The store on disk against a dict, under faults, damage, deaths and restarts in any order."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.torch.disk_faults import PLACES, SIZE, Faulty, Killed, flip, key, keys, opened, payload, put, read

from octavo.runtime.disk_format import HEADER_BYTES


class StoreAgainstDict(RuleBasedStateMachine):
    """A dict says what each key may hold; it may forget, and may never say anything else."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "disk"
        self.model = {}
        self.damaged = set()
        self.calls = Faulty()

    @initialize(slots=st.integers(1, 4))
    def make(self, slots):
        self.slots = slots
        self.disk = opened(self.path, slots, syscalls=self.calls)

    @rule(n=st.integers(0, 5), version=st.integers(0, 2), most=st.sampled_from([None, 1000, 333]))
    def put(self, n, version, most):
        self.calls.most = most
        assert put(self.disk, n, version) is None
        self.calls.most = None
        self.model[n] = {payload(n, version)}
        assert read(self.disk, n) == payload(n, version)

    @rule(n=st.integers(0, 5), version=st.integers(0, 2), code=st.sampled_from([errno.ENOSPC, errno.EIO]))
    def fail_to_put(self, n, version, code):
        self.calls.write_error = code
        assert put(self.disk, n, version) in ("disk_full", "io_error")
        self.calls.write_error = None
        assert key(n) not in keys(self.disk)

    @rule(n=st.integers(0, 5), version=st.integers(0, 2), at=st.integers(0, 2 * HEADER_BYTES + SIZE - 1))
    def die_in_a_put(self, n, version, at):
        self.calls.written, self.calls.die_after = 0, at
        with pytest.raises(Killed):
            put(self.disk, n, version)
        self.calls.die_after = None
        self.model.setdefault(n, set()).add(payload(n, version))
        self.restart()

    @rule(n=st.integers(0, 5))
    def get(self, n):
        had = key(n) in keys(self.disk)
        found = read(self.disk, n)
        if had:  # what was damaged under a whole header is found once more after a restart
            assert found in self.model[n] or (found == "bad_checksum" and n in self.damaged)
        else:
            assert found == "absent"

    @rule(n=st.integers(0, 5))
    def fail_to_get(self, n):
        self.calls.read_error = errno.EIO
        assert read(self.disk, n) in ("io_error", "absent")
        self.calls.read_error = None

    @rule(slot=st.integers(0, 3), where=st.integers(0, HEADER_BYTES + SIZE - 1))
    def damage(self, slot, where):
        if slot < self.slots:
            self.damaged.update(n for n in range(6) if n % self.slots == slot)
            flip(
                self.path,
                PLACES.header(slot) + where if where < HEADER_BYTES else PLACES.block(slot) + where - HEADER_BYTES,
            )
        for n in range(6):
            found = read(self.disk, n)
            assert isinstance(found, str) or found in self.model[n]

    @rule(slot=st.integers(0, 3))
    def forget(self, slot):
        if slot < self.slots:
            gone = [n for n in range(6) if (key(n), slot) in self.disk.stored()]
            self.disk.forget([slot])
            assert all(read(self.disk, n) == "absent" for n in gone)

    @rule()
    def restart(self):
        self.disk.close()
        self.disk = opened(self.path, self.slots, syscalls=self.calls)

    @invariant()
    def each_slot_and_each_key_is_named_once(self):
        if hasattr(self, "disk"):
            stored = self.disk.stored()
            assert len({k for k, _ in stored}) == len({slot for _, slot in stored}) == len(stored)

    def teardown(self):
        if hasattr(self, "disk"):
            self.disk.close()
        self.folder.cleanup()


StoreAgainstDict.TestCase.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStoreAgainstDict = StoreAgainstDict.TestCase
