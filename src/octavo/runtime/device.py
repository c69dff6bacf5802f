"""Which device serves, and what it grants: the facts from which a deployment is decided."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.deployment import Facts
from octavo.errors import ConfigError
from octavo.geometry.dtypes import Dtype
from octavo.machine import cpu_facts, read_machine
from octavo.memory.layout import BlockOrder

Device = torch.device


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises `ConfigError` for a device that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "torch sees no CUDA device here; use cpu or auto")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError("device", name, f"there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return device


def device_facts(device: torch.device, *, weights_bytes: int, weights_dtype: Dtype, block_order: BlockOrder) -> Facts:
    """What the device grants now, the weights being in place."""
    machine = read_machine()
    if device.type == "cpu":
        facts = cpu_facts(machine, weights_bytes=weights_bytes, weights_dtype=weights_dtype, weights_loaded=True)
        return replace(facts, block_order=block_order)
    free, total = torch.cuda.mem_get_info(device)
    return Facts(
        device=str(device),
        total_bytes=total,
        available_bytes=free,
        weights_bytes=weights_bytes,
        weights_dtype=weights_dtype,
        weights_loaded=True,
        process_bytes=max(0, total - free - weights_bytes),
        cores=machine.cores,
        granted_by=torch.cuda.get_device_name(device),
        block_order=block_order,
    )
