"""What the machine grants this process: memory and cores, read from the kernel's own files.

The smallest of what exists, what the control group allows (v2 or v1, the group's parents
included) and what the process is bound to. Reads files only; no torch, nothing is changed.
The roots are arguments, so that tests can bring a tree of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.deployment import Facts
from octavo.errors import ConfigError
from octavo.geometry.dtypes import Dtype

_UNLIMITED = 2**60
"""Control groups v1 write a number of about 2**63 for no limit."""


@dataclass(frozen=True, slots=True)
class Machine:
    total_bytes: int
    """Memory granted: physical memory, or the control group's limit where that is lower."""
    available_bytes: int
    """Of that, what can be taken now without anything being pushed out."""
    granted_by: str
    """`physical memory` or `control group`."""
    cores: int
    """Processors that this process may use, its quota included."""
    process_bytes: int
    """Resident memory of this process now."""


def read_machine(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Machine:
    """Raises `ConfigError` where the kernel's memory file cannot be read."""
    physical, free = _meminfo(proc)
    total, available, granted_by = physical, free, "physical memory"
    for limit, used in _memory_limits(proc, cgroup):
        if limit < total:
            total, granted_by = limit, "control group"
        available = min(available, max(0, limit - used))
    return Machine(total, min(available, total), granted_by, _cores(proc, cgroup), _resident(proc))


def cpu_facts(machine: Machine, *, weights_bytes: int, weights_dtype: Dtype, weights_loaded: bool = False) -> Facts:
    """The facts of a CPU engine. Read the machine before the weights, or say that they are loaded."""
    process_bytes = max(0, machine.process_bytes - (weights_bytes if weights_loaded else 0))
    return Facts(
        device="cpu",
        total_bytes=machine.total_bytes,
        available_bytes=machine.available_bytes,
        weights_bytes=weights_bytes,
        weights_dtype=weights_dtype,
        weights_loaded=weights_loaded,
        process_bytes=process_bytes,
        cores=machine.cores,
        granted_by=machine.granted_by,
    )


def _meminfo(proc: Path) -> tuple[int, int]:
    path = proc / "meminfo"
    values: dict[str, int] = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        amount = rest.split()
        if amount and amount[0].isdecimal():
            values[name] = int(amount[0]) * 1024
    if "MemTotal" not in values:
        raise ConfigError("machine", str(path), "has no MemTotal; set kv_cache_memory_bytes on a Linux machine")
    total = values["MemTotal"]
    return total, values.get("MemAvailable", values.get("MemFree", total))


def _memory_limits(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of this process's group and its parents, file cache that can be dropped not counted."""
    for folder in _folders(proc, cgroup, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / limit_name)
            if limit is None or limit >= _UNLIMITED:
                continue
            used = _number(folder / used_name) or 0
            yield limit, max(0, used - _droppable(folder))


def _droppable(folder: Path) -> int:
    for line in _text(folder / "memory.stat").splitlines():
        name, _, amount = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and amount.strip().isdecimal():
            return int(amount)
    return 0


def _cores(proc: Path, cgroup: Path) -> int:
    cores = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    for folder in _folders(proc, cgroup, "cpu"):
        quota, period = _quota(folder)
        if quota is not None and period:
            cores = min(cores, quota / period)
    return max(1, int(cores))


def _quota(folder: Path) -> tuple[int | None, int | None]:
    parts = _text(folder / "cpu.max").split()
    if len(parts) == 2 and parts[0].isdecimal() and parts[1].isdecimal():
        return int(parts[0]), int(parts[1])
    quota = _number(folder / "cpu.cfs_quota_us")
    return (quota if quota and quota > 0 else None), _number(folder / "cpu.cfs_period_us")


def _folders(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """The folders that may limit `controller` for this process, innermost first.

    Inside a container the path may not exist below the mount: then the mount itself is the group.
    """
    seen: set[Path] = set()
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mounts = [cgroup] if number == "0" and not controllers else [cgroup / controllers, cgroup / controller]
        for mount in mounts:
            inner = mount / path.strip().lstrip("/")
            while inner != mount and mount in inner.parents:
                if inner not in seen and inner.is_dir():
                    seen.add(inner)
                    yield inner
                inner = inner.parent
            if mount not in seen and mount.is_dir():
                seen.add(mount)
                yield mount


def _resident(proc: Path) -> int:
    for line in _text(proc / "self" / "status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.removeprefix("-").isdecimal() else None


def _text(path: Path) -> str:
    """A kernel file that is not there says nothing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
