"""How many threads compute, on which cores, and what of that is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from checkpoints import tiny_llama

from octavo import LLM
from octavo.engine.start import SPINS, spin_briefly
from octavo.errors import ConfigError
from octavo.kernels.cpu import load_native
from octavo.runtime import cpu_threads
from octavo.runtime.cpu_threads import settle_threads

CPU = torch.device("cpu")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
pinnable = pytest.mark.skipif(not CORES or load_native() is None, reason="threads cannot be bound to cores here")


@pytest.fixture(autouse=True)
def threads_as_they_were():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_default_is_torchs_own_number_or_the_cores_granted_if_fewer(monkeypatch):
    torch.set_num_threads(1)
    assert settle_threads(None, False, CPU) == ("1", "torch's own number")
    torch.set_num_threads(5)

    class Granted:
        cores = 2

    monkeypatch.setattr(cpu_threads, "read_machine", Granted)
    assert settle_threads(None, False, CPU) == ("2", "cores granted to this process; torch's own number is 5")
    assert torch.get_num_threads() == 2


def test_a_number_that_is_asked_for_is_given_to_the_pool_and_told(tmp_path):
    llm = LLM(str(tiny_llama(tmp_path)), threads=3, max_kv_tokens=256)
    assert torch.get_num_threads() == 3
    rows = {row.name: (row.value, row.reason) for row in llm.engine.deployment.rows()}
    assert rows["threads"] == ("3", "as asked")


def test_threads_of_an_engine_elsewhere_are_refused_by_name():
    assert settle_threads(None, False, torch.device("meta")) == ("", "")
    with pytest.raises(ConfigError, match="threads=2"):
        settle_threads(2, False, torch.device("meta"))
    with pytest.raises(ConfigError, match="pin=True"):
        settle_threads(None, True, torch.device("meta"))


@pytest.mark.parametrize(
    ("set_already", "loaded", "found"),
    [
        ({}, False, SPINS),
        ({}, True, None),
        ({"GOMP_SPINCOUNT": "7"}, False, "7"),
        ({"OMP_WAIT_POLICY": "active"}, False, None),
    ],
)
def test_idle_threads_are_told_to_sleep_soon_before_torch_unless_the_user_has_said(
    set_already, loaded, found, monkeypatch
):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # restored afterwards, whatever the call sets
        monkeypatch.delenv(name)
    for name, value in set_already.items():
        monkeypatch.setenv(name, value)
    if not loaded:
        monkeypatch.delitem(sys.modules, "torch")
    spin_briefly()
    assert os.environ.get("GOMP_SPINCOUNT") == found


@pinnable
def test_pinning_more_threads_than_cores_or_on_another_system_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=f"pin=True: {CORES + 1} threads cannot each have one of {CORES} cores"):
        settle_threads(CORES + 1, True, CPU)
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(ConfigError, match="Linux only"):
        settle_threads(1, True, CPU)


def test_pinning_without_the_native_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(cpu_threads, "load_native", lambda: None)
    if CORES:
        with pytest.raises(ConfigError, match="were not built"):
            settle_threads(1, True, CPU)


PINNED = """
import os, sys, torch
from octavo import LLM
llm = LLM(sys.argv[1], threads=int(sys.argv[2]), pin=True, max_kv_tokens=256)
tasks = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
alone = sorted(core for cores in tasks if len(cores) == 1 for core in cores)
print(llm.engine.notes[-1], "|", *sorted(set(alone)), "|", len(os.sched_getaffinity(0)))
"""


@pinnable
def test_pinned_threads_each_have_a_core_of_their_own(tmp_path):
    """In a process of its own: a thread that has been bound stays so."""
    count = min(2, CORES)
    command = [sys.executable, "-c", PINNED, str(tiny_llama(tmp_path)), str(count)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    note, alone, own = done.stdout.strip().split(" | ")
    cores = sorted(os.sched_getaffinity(0))[:count]
    assert note == f"{count} threads are bound to cores {', '.join(map(str, cores))}"
    assert alone == " ".join(map(str, cores))
    assert own == "1"
