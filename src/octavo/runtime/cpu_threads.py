"""How many threads compute on a CPU, and on which cores: `settle_threads` and `pin_threads`.

Owns the number that torch's pool is given, which octavo's kernels share, and the binding of its threads. The
default is torch's own, or fewer where the machine grants this process fewer cores. Threads are bound last, when
all others have been started: a new thread inherits the cores of the one that starts it.
"""

from __future__ import annotations

import os

import torch

from octavo.errors import ConfigError
from octavo.kernels.cpu import load_native
from octavo.machine import read_machine


def settle_threads(asked: int | None, pin: bool, device: torch.device) -> tuple[str, str]:
    """Give torch's pool its threads: how many, and why. Raises `ConfigError` for what cannot be had."""
    if device.type != "cpu":
        for name, value in (("threads", asked), ("pin", pin or None)):
            if value is not None:
                raise ConfigError(name, value, f"is for engines on a CPU; this one runs on {device}; leave it out")
        return "", ""
    if pin:
        _require_pinnable(asked)
    if asked is not None:
        torch.set_num_threads(asked)
        return str(asked), "as asked"
    own, cores = torch.get_num_threads(), read_machine().cores
    if own <= cores:
        return str(own), "torch's own number"
    torch.set_num_threads(cores)
    return str(cores), f"cores granted to this process; torch's own number is {own}"


def pin_threads() -> str:
    """Bind each thread of the pool to a core of its own. Which, in words; raises `ConfigError` where that fails."""
    cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
    native = load_native()
    if native is None or not native.pin_threads(cores):
        raise ConfigError("pin", True, f"the threads could not be bound to cores {_listed(cores)}; leave it out")
    return f"bound to cores {_listed(cores)}"


def _require_pinnable(asked: int | None) -> None:
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("pin", True, "threads are bound to cores on Linux only; leave it out")
    if load_native() is None:
        raise ConfigError("pin", True, "needs the native kernels, which were not built; leave it out")
    cores = len(os.sched_getaffinity(0))
    if (asked or 1) > cores:
        raise ConfigError("pin", True, f"{asked} threads cannot each have one of {cores} cores; ask for fewer threads")


def _listed(cores: list[int]) -> str:
    return ", ".join(map(str, cores))
