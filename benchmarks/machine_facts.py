"""What a figure must carry with it: the machine, the versions, and how busy the machine was meanwhile.

Reads the kernel's files and the libraries' own version strings; changes nothing. What cannot be
read is said to be unknown rather than left out.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from octavo.machine import read_machine

GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def machine_facts() -> dict[str, Any]:
    """Plain values, for the table's foot and the JSON line."""
    machine = read_machine()
    return {
        "cpu": _cpu_model(),
        "cores": machine.cores,
        "memory_gib": round(machine.total_bytes / 2**30, 1),
        "governor": GOVERNOR.read_text().strip() if GOVERNOR.exists() else "unknown",
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
    }


def torch_facts() -> dict[str, Any]:
    """The same for the libraries that run models."""
    import torch

    return {
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "threads": torch.get_num_threads(),
    }


def described(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
