"""The store on disk against a dict, under faults, damage, deaths and restarts in any order."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.torch.disk_faults import PLACES, SIZE, Faulty, Killed, flip, key, opened, payload, read

from octavo.runtime.disk_format import HEADER_BYTES


class StoreAgainstDict(RuleBasedStateMachine):
    """A dict says what each key may hold; the pool may forget, and may never say anything else."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "pool"
        self.model = {}
        self.calls = Faulty()

    @initialize(slots=st.integers(1, 4))
    def make(self, slots):
        self.slots = slots
        self.pool = opened(self.path, slots, syscalls=self.calls)

    @rule(n=st.integers(0, 5), version=st.integers(0, 2), most=st.sampled_from([None, 1000, 333]))
    def put(self, n, version, most):
        self.calls.most = most
        assert self.pool.put(key(n), payload(n, version)) is None
        self.calls.most = None
        self.model[n] = {payload(n, version)}
        assert read(self.pool, n) == payload(n, version)

    @rule(n=st.integers(0, 5), version=st.integers(0, 2), code=st.sampled_from([errno.ENOSPC, errno.EIO]))
    def fail_to_put(self, n, version, code):
        self.calls.write_error = code
        assert self.pool.put(key(n), payload(n, version)) in ("disk_full", "io_error")
        self.calls.write_error = None
        assert not self.pool.has(key(n))

    @rule(n=st.integers(0, 5), version=st.integers(0, 2), at=st.integers(0, 2 * HEADER_BYTES + SIZE - 1))
    def die_in_a_put(self, n, version, at):
        self.calls.written, self.calls.die_after = 0, at
        with pytest.raises(Killed):
            self.pool.put(key(n), payload(n, version))
        self.calls.die_after = None
        self.model.setdefault(n, set()).add(payload(n, version))
        self.restart()

    @rule(n=st.integers(0, 5))
    def get(self, n):
        had = self.pool.has(key(n))
        found = read(self.pool, n)
        assert found in self.model.get(n, set()) if had else found == "absent"

    @rule(n=st.integers(0, 5))
    def fail_to_get(self, n):
        self.calls.read_error = errno.EIO
        assert read(self.pool, n) in ("io_error", "absent")
        self.calls.read_error = None

    @rule(slot=st.integers(0, 3), where=st.integers(0, HEADER_BYTES + SIZE - 1))
    def damage(self, slot, where):
        if slot < self.slots:
            flip(
                self.path,
                PLACES.header(slot) + where if where < HEADER_BYTES else PLACES.block(slot) + where - HEADER_BYTES,
            )
        for n in range(6):
            found = read(self.pool, n)
            assert isinstance(found, str) or found in self.model[n]

    @rule(n=st.integers(0, 5))
    def drop(self, n):
        had = self.pool.has(key(n))
        assert self.pool.drop(key(n)) == had
        assert read(self.pool, n) == "absent"

    @rule()
    def restart(self):
        self.pool.close()
        self.pool = opened(self.path, self.slots, syscalls=self.calls)

    @invariant()
    def every_slot_is_kept_or_free(self):
        if hasattr(self, "pool"):
            slots = [*self.pool._kept.values(), *self.pool._free]
            assert sorted(slots) == list(range(self.slots))

    def teardown(self):
        if hasattr(self, "pool"):
            self.pool.close()
        self.folder.cleanup()


StoreAgainstDict.TestCase.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStoreAgainstDict = StoreAgainstDict.TestCase
