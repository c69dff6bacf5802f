"""What the machine grants, read from trees made by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.geometry.dtypes import FP32
from octavo.machine import cpu_facts, read_machine

MIB = 2**20
MEMINFO = "MemTotal:       16384 kB\nMemFree:         1024 kB\nMemAvailable:    8192 kB\nHugePages_Total:       0\n"


def tree(root: Path, cgroup_line: str, files: dict[str, str], meminfo: str = MEMINFO) -> tuple[Path, Path]:
    proc, sys = root / "proc", root / "sys"
    (proc / "self").mkdir(parents=True)
    sys.mkdir()
    (proc / "meminfo").write_text(meminfo)
    (proc / "self" / "cgroup").write_text(cgroup_line)
    (proc / "self" / "status").write_text("Name:\tpython\nVmRSS:\t    2048 kB\n")
    for name, text in files.items():
        path = sys / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, sys


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3}, raising=False)


def test_without_a_group_it_is_physical_memory_and_the_bound_cores(tmp_path: Path) -> None:
    machine = read_machine(*tree(tmp_path, "0::/\n", {"memory.max": "max\n", "cpu.max": "max 100000\n"}))
    assert (machine.total_bytes, machine.available_bytes) == (16 * MIB, 8 * MIB)
    assert machine.granted_by == "physical memory"
    assert machine.cores == 4
    assert machine.process_bytes == 2 * MIB


def test_a_group_of_version_two_limits_memory_and_cores(tmp_path: Path) -> None:
    files = {
        "app/memory.max": str(4 * MIB),
        "app/memory.current": str(3 * MIB),
        "app/memory.stat": f"anon 1\ninactive_file {MIB}\n",
        "app/cpu.max": "150000 100000",
    }
    machine = read_machine(*tree(tmp_path, "0::/app\n", files))
    assert machine.total_bytes == 4 * MIB
    assert machine.available_bytes == 2 * MIB, "file cache that can be dropped is not in use"
    assert machine.granted_by == "control group"
    assert machine.cores == 1


def test_a_parent_group_limits_too(tmp_path: Path) -> None:
    files = {"a/b/memory.max": "max", "a/memory.max": str(6 * MIB), "a/memory.current": str(5 * MIB)}
    machine = read_machine(*tree(tmp_path, "0::/a/b\n", files))
    assert (machine.total_bytes, machine.available_bytes) == (6 * MIB, MIB)


def test_a_group_of_version_one_limits_too(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": str(2 * MIB),
        "memory/job/memory.usage_in_bytes": str(MIB),
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "cpu,cpuacct/job/cpu.cfs_quota_us": "200000",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
    }
    lines = "5:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/x\n"
    machine = read_machine(*tree(tmp_path, lines, files))
    assert (machine.total_bytes, machine.available_bytes) == (2 * MIB, MIB)
    assert machine.cores == 2


def test_in_a_container_whose_path_is_not_mounted_the_mount_is_the_group(tmp_path: Path) -> None:
    machine = read_machine(*tree(tmp_path, "0::/docker/123\n", {"memory.max": str(3 * MIB), "memory.current": "0"}))
    assert machine.total_bytes == 3 * MIB


def test_a_quota_without_limit_and_odd_files_change_nothing(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": "rubbish", "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}
    machine = read_machine(*tree(tmp_path, "2:memory:/\n3:cpu:/\nnonsense\n", files))
    assert (machine.total_bytes, machine.cores) == (16 * MIB, 4)


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"memory.max": str(MIB), "memory.current": str(2 * MIB)}
    assert read_machine(*tree(tmp_path, "0::/\n", files)).available_bytes == 0


def test_a_machine_without_the_kernels_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MemTotal"):
        read_machine(*tree(tmp_path, "", {}, meminfo=""))


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert 0 < machine.available_bytes <= machine.total_bytes
    assert machine.cores >= 1
    assert machine.process_bytes > 0


def test_cpu_facts_do_not_count_loaded_weights_as_the_process(tmp_path: Path) -> None:
    machine = read_machine(*tree(tmp_path, "0::/\n", {}))
    facts = cpu_facts(machine, weights_bytes=MIB, weights_dtype=FP32, weights_loaded=True)
    assert facts.process_bytes == MIB
    assert facts.free_bytes == machine.available_bytes
    before = cpu_facts(machine, weights_bytes=MIB, weights_dtype=FP32)
    assert before.free_bytes == machine.available_bytes - MIB
