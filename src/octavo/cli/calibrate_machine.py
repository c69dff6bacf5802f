"""What a calibration says of the machine, from the kernel's files: no torch, so that a simulation can compare it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from octavo.machine import read_machine

_NAMED = ("model name", "cpu family", "model", "stepping")


def machine_fields(proc: Path = Path("/proc")) -> dict[str, Any]:
    """The processor and how many of its cores this process may use."""
    return {"cpu": _cpu(proc), "cores": read_machine(proc).cores}


def _cpu(proc: Path) -> str:
    try:
        text = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in _NAMED:
            found.setdefault(name.strip(), value.strip())
    words = [found.get("model name", platform.machine())]
    words += [f"{name.removeprefix('cpu ')} {found[name]}" for name in _NAMED[1:] if name in found]
    return ", ".join(words)
